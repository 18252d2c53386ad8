"""What the commands have in common: the choice of a shelf, dry runs, JSON."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends import Backend, open_backend
from kvshelf.backends.posix import PosixBackend
from kvshelf.errors import PermanentStorageError, StorageError
from tests.support.commands import done, report, run
from tests.support.filled import fill, hybrid, namespace, prompt

FOLDER = namespace().folder


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A shelf with the two chunks of ``prompt(0, 2)`` in two shards."""
    root = tmp_path / "shelf"
    fill(root, namespace(), prompt(0, 2))
    return root


# ------------------------------------------------------------------------------ what is chosen


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(prompt(0, 2)) + "\n")
    return file


def _without_times(text: str) -> str:
    return " ".join(word for word in text.split() if "/s" not in word and "." not in word)


@pytest.mark.long
@pytest.mark.parametrize("form", [FOLDER[:-1], FOLDER[-16:-14], FOLDER[-16:], f"{FOLDER}/"])
def test_namespace_is_named_by_a_beginning(shelf: Path, prompts: Path, form: str) -> None:
    fill(shelf, hybrid(), prompt(0, 2))
    for name, *more in (
        ["verify", shelf],
        ["rm", shelf],
        ["copy", shelf, f"{shelf}-2", "--dry-run"],
        ["pin", shelf, "a", "--replace"],
        ["explain", shelf, prompts],
    ):
        whole = done(name, *more, "-n", FOLDER).stdout
        assert _without_times(done(name, *more, "-n", form).stdout) == _without_times(whole)


def test_name_that_may_be_several_is_told(shelf: Path, prompts: Path) -> None:
    fill(shelf, hybrid(), prompt(0, 2))
    folders = [namespace().folder, hybrid().folder]
    begin = folders[0][:1]
    assert folders[1].startswith(begin)
    for name, *more in (
        ["rm", shelf, "--yes"],
        ["copy", shelf, f"{shelf}-2"],
        ["explain", shelf, prompts],
    ):
        result = run(name, *more, "-n", begin)
        assert result.exit_code == 2, result.output
        assert all(folder in result.stderr for folder in folders)


# ------------------------------------------------------------------------------ dry runs

#: Commands that change nothing without --yes.
WITH_YES = ("gc", "rm", "verify")
DRY = [
    ["gc", "{shelf}", "--max-bytes", "20KB"],
    ["rm", "{shelf}", "--group", "_"],
    ["verify", "{shelf}", "--repair"],
    ["copy", "{shelf}", "{shelf}-2"],
    ["pin", "{shelf}", "a", "--group", "_"],
    ["pin", "{shelf}", "kept", "--remove"],
    ["seed", "{shelf}", "{prompts}", "--model", "none"],
    ["doctor", "{shelf}"],
]


def _state(root: Path) -> dict[str, tuple[int, float]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime) for p in root.parent.rglob("*")}


@pytest.fixture
def opened_for_changes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shelves that were opened, and not only for reading."""
    found: list[str] = []

    def note(url: str, *, read_only: bool = False, **options: Any) -> Backend:
        if not read_only:
            found.append(url)
        return open_backend(url, read_only=read_only, **options)

    monkeypatch.setattr("kvshelf.cli.shelves.open_backend", note)
    monkeypatch.setattr("kvshelf.shelf.shelf.open_backend", note)
    return found


@pytest.mark.parametrize("arguments", DRY, ids=" ".join)
def test_dry_run_changes_nothing(
    shelf: Path, prompts: Path, opened_for_changes: list[str], arguments: list[str]
) -> None:
    if "--remove" in arguments:
        done("pin", shelf, "kept", "-n", FOLDER)
    damaged = next(shelf.rglob("*-0of2*"))
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    before = _state(shelf)
    opened_for_changes.clear()
    given = [word.format(shelf=shelf, prompts=prompts) for word in arguments]
    dry = [] if arguments[0] in WITH_YES else ["--dry-run"]
    found = run(*given, *dry, "--json")
    assert found.exit_code == (arguments[0] == "verify"), found.output
    assert arguments[0] == "doctor" or json.loads(found.stdout)["dry_run"] is True
    assert run(*given, *dry).stdout
    assert _state(shelf) == before
    # So it also works for those who may only read.
    assert not opened_for_changes
    if arguments[0] != "seed":
        os.utime(damaged, (1e9, 1e9))  # long enough ago for a repair
        run(*given, *([] if dry else ["--yes"]))
        assert _state(shelf) != before or arguments[0] == "doctor"


#: Command lines with files of their own that are refused; :mod:`tests.test_inputs` has others.
REFUSED = [
    ("ls {shelf}/\x1b[2J\nINFO_forged", "holds"),
    ("copy {shelf} {link}", "expected two places"),
    ("copy {shelf} b --storage-options {{}}", "--source-options"),
    ("pin {shelf} a {text}", "line 2 is text"),
    ("pin {shelf} a {short}", "no prompt fills a chunk of 32 tokens"),
    ("rm {shelf} -n unknown --yes", "no namespace unknown"),
    ("rm {shelf} --prompts /dev/null/nowhere --yes", "cannot be read"),
    ("verify {shelf} 0123 --sample 1", "OBJECT beside"),
    ("verify {shelf} \x1b]0;title\x07", "is no object of"),
    ("seed {shelf} /dev/null/nowhere --model m", "cannot be read"),
    ("seed {shelf} /dev/null --model m", "no prompts"),
    ("seed {shelf} {short} --model m --engine-arg =1", "NAME=VALUE"),
    ("seed {shelf} {short} --model {shelf} --dry-run", "no folder of a model"),
]


@pytest.mark.parametrize(("line", "told"), REFUSED, ids=[line for line, _ in REFUSED])
def test_command_line_that_cannot_be_used_is_refused_and_changes_nothing(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, told: str
) -> None:
    monkeypatch.setattr("kvshelf.vllm.seeding.OfflineEngine", pytest.fail)
    names = {name: tmp_path / name for name in ("shelf", "link", "text", "short")}
    names["link"].symlink_to(shelf)
    names["text"].write_text('[1, 2]\n"a text"\n')
    names["short"].write_text("[1, 2, 3]\n")
    before = _state(shelf)
    result = run(*(word.format(**names) for word in line.split(" ") if word))
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.stderr.split()), result.stderr
    assert all(letter.isprintable() or letter == "\n" for letter in result.stderr)
    assert _state(shelf) == before


# ------------------------------------------------------------------------------ JSON

JSON = [
    *DRY,
    ["ls", "{shelf}"],
    ["ls", "{shelf}", "-n", FOLDER],
    ["explain", "{shelf}", "{prompts}"],
    ["verify", "{shelf}", "{object}", "--long"],
]


@pytest.mark.long
@pytest.mark.parametrize("arguments", JSON, ids=" ".join)
def test_each_object_has_errors_also_when_a_command_fails_midway(
    shelf: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    done("pin", shelf, "kept", "-n", FOLDER)
    if arguments[2:3] == ["a"]:
        done("pin", shelf, "kept", "--remove")
    found = next(shelf.rglob("*.safetensors"))
    given = [word.format(shelf=shelf, prompts=prompts, object=found) for word in arguments]
    more = ["--dry-run"] if arguments in DRY and arguments[0] not in WITH_YES else []
    rows = [json.loads(line) for line in run(*given, *more, "--json").stdout.splitlines()]
    assert rows
    assert all(row["errors"] == [] for row in rows if "problem" not in row or not row["problem"])
    if arguments in DRY and arguments[0] != "doctor":
        assert rows[-1]["dry_run"] is True
        assert str(shelf) in rows[-1].get("shelf", rows[-1].get("source"))

    def fail(*_: object, **__: object) -> None:
        raise StorageError("the disk is gone")

    if arguments[0] == "seed":
        return
    for method in ("list", "folders", "stat", "open"):
        monkeypatch.setattr(PosixBackend, method, fail)
    result = run(*given, *more, "--json")
    assert result.exit_code == 3, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    assert any("the disk is gone" in error["problem"] for error in last["errors"])
    assert len(result.stdout.splitlines()) == 1


def test_error_has_the_name_of_what_is_bad(shelf: Path) -> None:
    damaged = next(shelf.rglob("*.safetensors"))
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    name = str(damaged.relative_to(shelf))
    for given in (["verify", shelf], ["verify", shelf, damaged], ["copy", shelf, f"{shelf}-2"]):
        [error] = report(*given, code=1)["errors"]
        assert name in error["name"]
        assert error["problem"]
    (shelf / FOLDER / "namespace.json").unlink()
    [error] = report("ls", shelf)["errors"]
    assert error["name"] == FOLDER
    for more in ([], ["--dry-run"]):
        [error] = report("pin", shelf, "none", "--remove", *more, code=1)["errors"]
        assert error["name"] == "none"


@pytest.mark.parametrize(
    ("arguments", "objects"),
    [
        (["ls"], 4),
        (["verify"], 4),
        (["gc", "--max-bytes", "1B", "--yes"], 0),
        (["rm", "-n", FOLDER, "--yes"], 0),
    ],
)
def test_folder_that_cannot_be_listed_is_told_in_one_line_and_the_rest_is_done(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], objects: int
) -> None:
    group = f"{FOLDER}/x\nkvshelf: all is well"
    (shelf / group).mkdir()
    list_folders = PosixBackend.folders

    def refuse(self: PosixBackend, prefix: str = "") -> list[str]:
        if prefix == group:
            raise PermanentStorageError(13, "EACCES", f"{shelf / group}/none/of/these")
        return list_folders(self, prefix)

    monkeypatch.setattr(PosixBackend, "folders", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: 4000000000)
    name, *more = arguments
    row = report(name, shelf, *more, code=1)
    assert any("x\\nkvshelf" in f"{error['name']} {error['problem']}" for error in row["errors"])
    assert row.get("intact", objects) == objects == len(list(shelf.rglob("*.safetensors")))
    line, *_ = done(name, shelf, *more, code=1).stderr.splitlines()
    assert "x\\nkvshelf: all is well" in line
    if name != "verify":
        assert re.search("well belongs to .*, mode 0755, and you are user 4000000000$", line)


@pytest.mark.parametrize("name", ["gc", "rm"])
def test_interrupted_deletion_tells_what_was_done(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvshelf.cli.deletion.delete_picked", stop)
    more = ["--max-bytes", "20KB"] if name == "gc" else ["--group", "_"]
    row = report(name, shelf, *more, "--yes", code=130)
    assert (row["interrupted"], row["dry_run"]) == (True, False)
    assert "start it again" in row["errors"][0]["problem"]
