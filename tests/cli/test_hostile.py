"""Whatever lies on a shelf: each command ends by a code of its own, and nothing outside changes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import Result

from kvshelf.cli.common import EXIT_CODES, PROBLEM, UNEXPECTED, UNREACHABLE, USAGE
from kvshelf.format.namespace import Namespace
from tests.support.commands import run
from tests.support.filled import fill, hybrid, namespace, prompt

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
#: What stands in the place of something else, and where. What is below a link is not seen.
STANDS = [
    ("link", [".kvshelf", f"{FOLDER}/.kvshelf"]),
    ("link", [".kvshelf/pins", ".kvshelf/keepers", f"{FOLDER}/.kvshelf/gave-up"]),
    ("link", [".kvshelf/pins/x.json", f"{FOLDER}/namespace.json"]),
    ("link", [f"{FOLDER}/_"]),
    ("file", [".kvshelf", f"{FOLDER}/_"]),
    ("file", [".kvshelf/keepers"]),
    ("fifo", [".kvshelf/pins/x.json", f"{FOLDER}/namespace.json"]),
]


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
@pytest.mark.parametrize(("what", "places"), STANDS)
def test_anything_in_the_place_of_something_else(root: Path, what: str, places: list[str]) -> None:
    outside = root.parent / "outside"
    (outside / "00").mkdir(parents=True)
    kept = [outside / "x.json", outside / "00" / f"{'00' * 32}-0-0of2.safetensors"]
    for path in kept:
        path.write_bytes(b"mine")
    for path in map(root.joinpath, places):
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


@pytest.mark.parametrize("make", [sparse, deep], ids=lambda one: one.__name__)
def test_files_of_any_kind(root: Path, make: Callable[[Path], None]) -> None:
    make(root)
    survives(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("places", [["_"], ["_/{fan}", ".kvshelf"], [".", "../.kvshelf"]])
def test_folders_that_this_user_may_not_list(root: Path, places: list[str]) -> None:
    fan = next(root.rglob("*.safetensors")).parent
    closed = [root / FOLDER / place.format(fan=fan.name) for place in places]
    for path in closed:
        path.mkdir(exist_ok=True)
        (path / "kept").touch()
        os.chmod(path, 0)
    for one in (root, *root.rglob("*")):
        is_closed = any(one.resolve().is_relative_to(path.resolve()) for path in closed)
        os.chown(one, 0 if is_closed else OTHER_USER, -1)
    # What commands import is imported now: that user need not be able to read it.
    survives(root.parent / "nothing")
    os.seteuid(OTHER_USER)
    try:
        assert run("ls", root).exit_code == PROBLEM
        survives(root)
    finally:
        os.seteuid(0)
    assert all((path / "kept").exists() for path in closed)


# ------------------------------------------------------------------------------ a grammar


def absurd(root: Path) -> None:
    """Put everything onto a shelf that its readers should survive."""
    fill(root, namespace(), prompt(0, 2))
    fill(root, hybrid(), prompt(0, 1))
    paths = sorted(root.rglob("*.safetensors"))
    for number, when in enumerate((999999999999.0, -1e10, 0.0)):
        os.utime(paths[number], (when, when))
    os.truncate(paths[3], 1 << 36)
    os.truncate(paths[4], 0)
    name = paths[0].name
    paths[0].with_name(name.replace("-0of2", f"-{2**32 - 2}of{2**32 - 1}")).write_bytes(b"")
    inner = paths[0].relative_to(root / paths[0].relative_to(root).parts[0])
    base = dict(namespace().record)
    records: dict[str, bytes] = {
        "shards": Namespace(
            base | {"shards": 2_000_000, "layer_shapes": ["2,*,2000000,1"] * 2}
        ).encoded,
        "size": Namespace(base | {"chunk_size": 2**32 - 1}).encoded,
        "large": Namespace(base | {"layer_shapes": ["2,*,4,8388608"] * 2}).encoded,
        "text": Namespace(base | {"kv_dtype": "\x1b]0;x\x07\x1b[2J\nINFO \u202e"}).encoded,
        "deep": b"[" * 100_000,
        "long": b'{"format":"' + b"x" * (2 << 20) + b'"}',
        "number": b'{"chunk_size":' + b"9" * 5000 + b"}",
        "nan": b'{"chunk_size":NaN,"kinds":[[]],"sliding_windows":[1e400]}',
        "kinds": json.dumps(
            {"kinds": ["window"], "sliding_windows": [2**61], "chunk_size": 1}
        ).encode(),
        "empty": b"",
        "null": b"null",
    }
    for slug, data in records.items():
        folder = root / f"{slug}-{hashlib.sha256(data).hexdigest()[:16]}"
        (folder / inner).parent.mkdir(parents=True)
        shutil.copy(paths[0], folder / inner)
        (folder / "namespace.json").write_bytes(data)
    (root / ".kvshelf" / "pins").mkdir(parents=True, exist_ok=True)
    (root / ".kvshelf" / "pins" / "x.json").write_bytes(b"[" * 100_000)
    (root / ".kvshelf" / "uses").mkdir(parents=True, exist_ok=True)
    (root / ".kvshelf" / "uses" / f"1-{'0' * 16}").write_bytes(b'{"version":1,"sections":[[]]}\n')


def check(result: Result) -> None:
    """Assert that a command ended as all must, whatever it met."""
    assert result.exit_code in EXIT_CODES, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    for text in (result.stdout, result.stderr):
        assert all(c.isprintable() or c == "\n" for c in text)
        assert not any(line.startswith("INFO") for line in text.splitlines())


#: Of each command, what must stand behind the shelf, and what may.
GRAMMAR: dict[str, tuple[list[str], list[str]]] = {
    "ls": ([""], ["--by group", "--by age", "-n {folder}"]),
    "verify": (
        ["", "{object}"],
        ["--sample 3", "--sample 50%", "--long", "--repair", "-n {folder}"],
    ),
    "explain": (["{prompts}"], ["-n {folder}", "-n {large}", "-n {shards}"]),
    "copy": (["{target} --dry-run"], ["--prompts {prompts}", "-n {folder}", "-n {shards}"]),
    "gc": ([""], ["--max-bytes 40KB", "--max-age 1h", "--group-max-bytes 1KB"]),
    "rm": (["--group _", "-n {shards}"], ["--unused-for 1h", "--prompts {prompts}", "--pinned"]),
    "pin": (
        ["x --dry-run", "new --dry-run", "x --remove --dry-run"],
        ["{prompts}", "-n {folder}", "-n {shards}", "--group _", "--until 2h", "--replace"],
    ),
}


@st.composite
def command_lines(draw: st.DrawFn) -> str:
    command = draw(st.sampled_from(list(GRAMMAR)))
    firsts, options = GRAMMAR[command]
    chosen = draw(st.lists(st.sampled_from(options), unique=True, max_size=3))
    return " ".join([command, "{shelf}", draw(st.sampled_from(firsts)), *chosen])


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | str]:
    """What command lines name: an absurd shelf, and parts of it."""
    folder = tmp_path_factory.mktemp("absurd")
    shelf, prompts = folder / "shelf", folder / "prompts"
    absurd(shelf)
    prompts.write_text(json.dumps(prompt(0, 2)))
    return {
        "shelf": shelf,
        "target": folder / "target",
        "object": sorted(shelf.rglob("*.safetensors"))[0],
        "prompts": prompts,
        "folder": FOLDER,
        "large": next(shelf.glob("large-*")).name,
        "shards": next(shelf.glob("shards-*")).name,
    }


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(line=command_lines())
def test_any_command_line_without_yes_ends_by_a_documented_code_and_changes_nothing(
    names: dict[str, Path | str], line: str
) -> None:
    shelf = Path(names["shelf"])
    before = {path: path.lstat().st_mtime_ns for path in shelf.parent.rglob("*")}
    given = [word.format(**names) for word in line.split()]
    result = run(*given)
    check(result)
    assert result.exit_code != UNEXPECTED, result.stderr
    if result.exit_code in (USAGE, UNREACHABLE):
        assert len(result.stderr.splitlines()) == 1, result.stderr
    result = run(*given, "--json")
    check(result)
    for row in result.stdout.splitlines():
        json.loads(row)
    assert {path: path.lstat().st_mtime_ns for path in shelf.parent.rglob("*")} == before


def test_repair_and_a_copy_of_an_absurd_shelf(tmp_path: Path) -> None:
    absurd(tmp_path / "shelf")
    check(run("verify", tmp_path / "shelf", "--repair", "--yes"))
    result = run("copy", tmp_path / "shelf", tmp_path / "target")
    check(result)
    assert "at most 65536" in result.stderr


@pytest.mark.parametrize("more", [[], ["--json"]], ids=str)
def test_verify_with_control_characters_in_a_header_prints_none(
    tmp_path: Path, more: list[str]
) -> None:
    """:mod:`tests.format.test_objects` has other headers. No namespace.json refuses the object."""
    fill(tmp_path, namespace(), prompt(0, 1))
    (tmp_path / FOLDER / "namespace.json").unlink()
    path = next(tmp_path.rglob("*.safetensors"))
    text = json.dumps({"__metadata__": {"a": "\ud800", "\x1b[31m": "\x1b]0;title\x07"}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    check(run("verify", tmp_path, path, "--long", *more))
