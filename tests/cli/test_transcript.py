"""What each command writes, as text and as JSON, and its exit code: compared byte by byte.

The transcript is ``tests/golden/commands/transcript.txt``. A heading ``=== scene NAME`` makes the
shelf anew, by a function of this module; any other heading is a command line with its exit code.
``python -m tests.cli.test_transcript`` writes what follows the headings anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import run
from tests.support.filled import fill, hybrid, namespace, prompt

TRANSCRIPT = Path(__file__).parents[1] / "golden" / "commands" / "transcript.txt"
FOLDER = namespace().folder


def fresh(shelf: Path) -> None:
    """Two namespaces, of which one is hybrid."""
    shutil.rmtree(shelf, ignore_errors=True)
    shutil.rmtree(shelf.with_name("copy"), ignore_errors=True)
    fill(shelf, namespace(), prompt(0, 2), prompt(1, 3))
    fill(shelf, hybrid(), prompt(0, 2))
    for path in shelf.rglob("*"):
        os.utime(path, (1.7e9, 1.7e9))


def damaged(shelf: Path) -> None:
    fresh(shelf)
    path = min(shelf.glob(f"{FOLDER}/_/*/*"))
    path.write_bytes(b"x" * path.stat().st_size)
    os.utime(path, (1.7e9, 1.7e9))


def without_description(shelf: Path) -> None:
    fresh(shelf)
    (shelf / FOLDER / "namespace.json").unlink()


def with_a_hole(shelf: Path) -> None:
    fresh(shelf)
    min(shelf.glob(f"{FOLDER}/_/*/*")).unlink()


def empty(shelf: Path) -> None:
    shutil.rmtree(shelf, ignore_errors=True)
    shelf.mkdir()


#: Patterns of text that differs between runs, and what replaces it.
VOLATILE = (
    (r'"(seconds|until|last_used)": [0-9.e+-]+', r'"\1": #'),
    (r'"(free|total)": \d+', r'"\1": #'),
    (r"[0-9.]+ s \([^)]*/s\)", "# s"),
    (r"[\d.]+ \w+ of [\d.]+ \w+ free on", "# free on"),
    (r"20\d\d-\d\d-\d\d \d\d:\d\d", "TIME"),
    (r'("pin": \{"files": \d+, "bytes"): \d+|(pin files: ).*?(; )', r"\1\2#\3"),
)


def transcript(folder: Path) -> Iterator[str]:
    """Run the scenes and the command lines of the transcript; yield its parts as they are now."""
    shelf = folder / "shelf"
    names = {"SHELF": shelf, "COPY": folder / "copy", "MISSING": folder / "missing"}
    names |= {name.upper(): folder / name for name in ("prompts", "salted", "bad")}
    tokens = [prompt(0, 2), prompt(5, 2), prompt(1, 3), [1, 2]]
    names["PROMPTS"].write_text("".join(f"{json.dumps(each)}\n" for each in tokens))
    names["SALTED"].write_text(json.dumps({"tokens": prompt(0, 2), "cache_salt": "x"}))
    names["BAD"].write_text('[1,2\n{"tokens": [1], "x": 2}\n{"prompt": ""}\n[-1]\n{}\n5\n')
    for heading in re.findall("^=== (.*)", TRANSCRIPT.read_text(), re.MULTILINE):
        if scene := re.fullmatch(r"scene (\w+)", heading):
            globals()[scene[1]](shelf)
            yield f"=== {heading}\n"
            continue
        line = heading.rpartition(" [")[0]
        names["OBJECT"] = min(shelf.glob(f"{FOLDER}/_/*/*"), default=shelf)
        result = run(
            *(str(names.get(word, word)).replace("FOLDER", FOLDER) for word in line.split())
        )
        text = f"{result.stdout}--- standard error\n{result.stderr}"
        text = text.replace(str(folder), "").replace(FOLDER, "FOLDER")
        for pattern, replacement in VOLATILE:
            text = re.sub(pattern, replacement, text)
        yield f"=== {line} [{result.exit_code}]\n{text}"


def test_commands_write_what_the_transcript_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("KVSHELF_")]:
        monkeypatch.delenv(name)
    expected = re.split("^(?==== )", TRANSCRIPT.read_text(), flags=re.MULTILINE)[1:]
    for part, expected_part in zip(transcript(tmp_path), expected, strict=True):
        assert part == expected_part


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        TRANSCRIPT.write_text("".join(transcript(Path(folder))))
