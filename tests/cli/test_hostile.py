"""Whatever lies on a shelf: each command ends by a code of its own, and nothing outside changes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvshelf.capacity.visit import KEEPERS
from kvshelf.cli.codes import EXIT_CODES, PROBLEM, UNEXPECTED
from tests.support.commands import run
from tests.support.filled import fill, namespace, prompt

FOLDER = namespace().folder
OTHER_USER = 61234
COMMANDS = [
    ["ls"],
    ["ls", "--by", "age", "--json"],
    ["verify"],
    ["verify", "--repair", "--yes"],
    ["explain", "{prompts}"],
    ["pin", "a", "{prompts}", "-n", FOLDER],
    ["rm", "--prompts", "{prompts}"],
    ["gc"],
    ["gc", "--max-bytes", "1B", "--max-age", "1d", "--group-max-bytes", "1B", "--yes"],
    ["rm", "--group", "_", "--unused-for", "1d", "--yes"],
    ["rm", "-n", FOLDER, "--yes"],
]
PLACES = [
    ".kvshelf",
    ".kvshelf/pins",
    ".kvshelf/keepers",
    ".kvshelf/pins/x.json",
    f"{FOLDER}/.kvshelf",
    f"{FOLDER}/.kvshelf/gave-up",
    f"{FOLDER}/namespace.json",
    f"{FOLDER}/_",
]
STANDS = [("link", place) for place in PLACES]
STANDS += [("file", place) for place in (".kvshelf", ".kvshelf/keepers", f"{FOLDER}/_")]
STANDS += [("fifo", place) for place in (".kvshelf/pins/x.json", f"{FOLDER}/namespace.json")]


@pytest.fixture
def root() -> Iterator[Path]:
    """A shelf, in a folder that every user may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shelf = Path(folder, "shelf")
        fill(shelf, namespace(), prompt(0, 3))
        Path(folder, "prompts").write_text(json.dumps(prompt(0, 3)))
        yield shelf


def survives(root: Path) -> None:
    """Run all commands, those that delete everything last."""
    for first, *rest in COMMANDS:
        given = [word.format(prompts=root.parent / "prompts") for word in rest]
        result = run(first, root, *given)
        assert result.exit_code in EXIT_CODES, result.output
        assert result.exit_code != UNEXPECTED, result.output
        assert isinstance(result.exception, SystemExit | None), result.exception


@pytest.mark.long
@pytest.mark.parametrize(("what", "place"), STANDS)
def test_anything_in_the_place_of_something_else(root: Path, what: str, place: str) -> None:
    outside = root.parent / "outside"
    (outside / "00").mkdir(parents=True)
    kept = [outside / "x.json", outside / "00" / f"{'00' * 32}-0-0of2.safetensors"]
    for path in kept:
        path.write_bytes(b"mine")
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if what == "link":
        path.symlink_to(outside)
    elif what == "file":
        path.write_bytes(b"x")
    else:
        os.mkfifo(path)
    survives(root)
    assert [path.read_bytes() for path in kept] == [b"mine"] * 2


def sparse(root: Path) -> None:
    path = next(root.rglob("*.safetensors"))
    os.truncate(path, 8 << 40)
    path.with_name(f".{path.name}.{'0' * 16}.tmp").touch()
    os.truncate(path.with_name(f".{path.name}.{'0' * 16}.tmp"), 8 << 40)


def deep(root: Path) -> None:
    """Chains of folders, longer than a path may be."""
    for folder in (root / ".kvshelf", next(root.rglob("*.safetensors")).parent):
        folder.mkdir(exist_ok=True)
        at = os.open(folder, os.O_RDONLY)
        for _ in range(60):
            os.mkdir("d" * 100, dir_fd=at)
            below = os.open("d" * 100, os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = below
        os.close(at)


def markers(root: Path) -> None:
    """Forged markers of keepers."""
    folder = root / KEEPERS
    folder.mkdir(parents=True)
    numbers = ["Infinity", "-1", "NaN", "9" * 4000, "1e308", "true", "[]", '"\\u001b[31m"', "1"]
    for number, text in enumerate(numbers):
        names = ("max_bytes", "max_age", "group_max_bytes", "evicts_after", "by", "bytes", "at")
        said = ", ".join(f'"{name}": {text}' for name in names)
        (folder / f"{number:016x}").write_text(f"{{{said}}}")
    (folder / "x").write_bytes(b"[" * 4096)
    for number in range(2000):
        (folder / f"{number:08x}").touch()


@pytest.mark.parametrize("make", [sparse, deep, markers], ids=lambda one: one.__name__)
def test_files_of_any_kind(root: Path, make: Callable[[Path], None]) -> None:
    make(root)
    survives(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("place", ["_", "_/{fan}", ".", ".kvshelf", "../.kvshelf"])
def test_folders_that_this_user_may_not_list(root: Path, place: str) -> None:
    fan = next(root.rglob("*.safetensors")).parent
    path = root / FOLDER / place.format(fan=fan.name)
    path.mkdir(exist_ok=True)
    (path / "kept").touch()
    os.chmod(path, 0)
    for one in (root, *root.rglob("*")):
        os.chown(one, 0 if one.is_relative_to(path) else OTHER_USER, -1)
    # What commands import is imported now: that user need not be able to read it.
    survives(root.parent / "nothing")
    os.seteuid(OTHER_USER)
    try:
        assert run("ls", root).exit_code == PROBLEM
        survives(root)
    finally:
        os.seteuid(0)
    assert (path / "kept").exists()
