"""What each command writes, as text and as JSON, and its exit code: compared byte by byte.

``tests/golden/commands/transcript.txt`` is the transcript; ``python -m tests.cli.test_transcript``
writes it anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
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


#: The state of a shelf, and the command lines that are run on it one after the other.
SCENES: list[tuple[Callable[[Path], None], list[str]]] = [
    (
        fresh,
        [
            "ls SHELF",
            "ls SHELF --by group",
            "ls SHELF --by age",
            f"ls SHELF -n {FOLDER[:6]}",
            "verify SHELF",
            "verify SHELF OBJECT --long",
            "verify SHELF FOLDER/_/00",
            "verify SHELF --sample x",
            "explain SHELF PROMPTS",
            "explain SHELF SALTED",
            "explain SHELF PROMPTS -n FOLDER",
            "explain SHELF BAD",
            "copy SHELF COPY --dry-run",
            "copy SHELF COPY --prompts PROMPTS",
            "copy SHELF COPY",
            "copy SHELF SHELF",
            "pin SHELF all -n FOLDER --until 7d",
            "pin SHELF some PROMPTS --replace",
            "pin SHELF group --group _ --dry-run",
            "ls SHELF",
            "gc SHELF --max-bytes 20KB",
            "pin SHELF all --remove --dry-run",
            "rm SHELF -n FOLDER",
            "rm SHELF -n FOLDER --pinned",
            "rm SHELF",
            "rm SHELF -n zzz",
            "seed SHELF PROMPTS --model m --dry-run",
            "seed SHELF BAD --model m --dry-run",
            "ls MISSING",
            "ls",
        ],
    ),
    (
        fresh,
        [
            "gc SHELF",
            "gc SHELF --max-bytes 20KB",
            "gc SHELF --group-max-bytes 1B",
            "gc SHELF --max-age 1d",
            "rm SHELF --prompts PROMPTS",
            "rm SHELF --unused-for 1d",
        ],
    ),
    (fresh, ["gc SHELF --max-bytes 150KB --yes"]),
    (fresh, ["rm SHELF --group _ --yes", "ls SHELF"]),
    (
        damaged,
        ["verify SHELF", "verify SHELF OBJECT --long", "verify SHELF --repair", "copy SHELF COPY"],
    ),
    (damaged, ["verify SHELF --repair --yes"]),
    (
        without_description,
        ["ls SHELF", "verify SHELF", "copy SHELF COPY --dry-run", "explain SHELF PROMPTS"],
    ),
    (with_a_hole, ["verify SHELF", "explain SHELF PROMPTS"]),
    (empty, ["ls SHELF", "verify SHELF", "gc SHELF", "explain SHELF PROMPTS", "copy SHELF COPY"]),
]
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
    """Yield what is in the transcript of each command line, as text and as JSON."""
    shelf = folder / "shelf"
    names = {
        "SHELF": shelf,
        "COPY": folder / "copy",
        "MISSING": folder / "missing",
        "FOLDER": FOLDER,
        "PROMPTS": folder / "prompts",
        "SALTED": folder / "salted",
        "BAD": folder / "bad",
    }
    tokens = [prompt(0, 2), prompt(5, 2), prompt(1, 3), [1, 2]]
    names["PROMPTS"].write_text("".join(f"{json.dumps(each)}\n" for each in tokens))
    names["SALTED"].write_text(json.dumps({"tokens": prompt(0, 2), "cache_salt": "x"}))
    names["BAD"].write_text('[1,2\n{"tokens": [1], "x": 2}\n{"prompt": ""}\n[-1]\n{}\n5\n')
    for make, lines in SCENES:
        for form in ([], ["--json"]):
            make(shelf)
            for line in lines:
                if "OBJECT" in line:
                    names["OBJECT"] = min(shelf.glob(f"{FOLDER}/_/*/*"))
                arguments = [str(names.get(word, word)) for word in line.split()]
                arguments = [word.replace("FOLDER", FOLDER) for word in arguments]
                result = run(*arguments, *form)
                text = f"{result.stdout}--- standard error\n{result.stderr}"
                text = text.replace(str(folder), "").replace(FOLDER, "FOLDER")
                for pattern, replacement in VOLATILE:
                    text = re.sub(pattern, replacement, text)
                yield f"=== {make.__name__}: {' '.join([line, *form])} [{result.exit_code}]\n{text}"


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
