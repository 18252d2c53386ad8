"""``kvshelf gc``: shows what would go, deletes it when told to, and never anything else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvshelf.backends import base
from kvshelf.backends.posix import PosixBackend
from kvshelf.capacity.pins import Pin, Pins
from kvshelf.capacity.rules import Rules
from kvshelf.cli.app import app
from kvshelf.cli.common import PROBLEM, UNREACHABLE, USAGE
from kvshelf.shelf.shelf import Shelf, open_shelf
from tests.support.filled import CHUNK, namespace, store
from tests.support.servers import BUCKET, S3Server, command, moto_s3

DAY = 86400.0


class Filled:
    """A shelf of three prompts of four chunks, and the environment in which commands reach it."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url
        self._options = options
        with self.open() as shelf:
            for first in (0, 1000, 2000):
                store(shelf, namespace(), range(first, first + 4 * CHUNK))

    def open(self) -> Shelf:
        return open_shelf(self.url, storage_options=self._options)

    def names(self) -> set[str]:
        with self.open() as shelf:
            return {row.name for row in shelf.objects()}

    def bytes(self) -> int:
        with self.open() as shelf:
            return sum(row.size for row in shelf.objects())

    def run(self, *args: object, **environment: str) -> Result:
        env = {"KVSHELF_STORAGE_OPTIONS": json.dumps(self._options)} if self._options else {}
        return CliRunner().invoke(app, ["gc", self.url, *map(str, args)], env=env | environment)

    def row(self, *args: object, code: int = 0, **environment: str) -> dict[str, Any]:
        result = self.run(*args, "--json", **environment)
        assert result.exit_code == code, result.output
        row: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return row


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server | None]:
    if command("moto_server") is None:
        yield None
        return
    with moto_s3() as server:
        yield server


@pytest.fixture(params=["directory", "s3"])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Filled:
    if request.param == "directory":
        return Filled(str(tmp_path / "shelf"), {})
    pytest.importorskip("obstore", reason="obstore is missing: pip install 'kvshelf[s3]'")
    server = request.getfixturevalue("s3")
    if server is None:
        pytest.skip("moto_server is missing: pip install 'moto[server]'")
    return Filled(f"s3://{BUCKET}/{tmp_path.name}", server.options())


@pytest.fixture
def folder(tmp_path: Path) -> Filled:
    return Filled(str(tmp_path / "shelf"), {})


def test_it_only_shows_what_would_go(filled: Filled) -> None:
    before = filled.names()
    result = filled.run("--max-bytes", filled.bytes() // 2)
    assert result.exit_code == 0, result.output
    assert "WOULD GO" in result.stdout
    assert "dry run" in result.stdout
    row = filled.row("--max-bytes", filled.bytes() // 2)
    assert row["dry_run"]
    assert row["chosen"]["size"]["files"] > 12
    assert filled.names() == before


def test_it_deletes_when_told_to(filled: Filled) -> None:
    bound = filled.bytes() // 2
    listed = filled.run("--max-bytes", bound, "--names").stdout.splitlines()
    row = filled.row("--max-bytes", bound, "--yes")
    assert row["finished"] and row["error"] is None
    left = filled.names()
    assert row["deleted"]["size"]["files"] == 24 - len(left)
    assert filled.bytes() <= bound
    named = {line.partition("  ")[0] for line in listed if line.endswith("(size)")}
    assert not named & left and len(named) == 24 - len(left)
    again = filled.run("--max-bytes", bound)
    assert again.exit_code == 0
    assert "0 files" in again.stdout
    assert "dry run" not in again.stdout


def test_the_ends_of_prompts_that_are_equally_old_go_first(folder: Filled) -> None:
    earlier = time.time() - 60
    for path in Path(folder.url).rglob("*.safetensors"):
        os.utime(path, (earlier, earlier))
    folder.run("--max-bytes", folder.bytes() // 2, "--yes")
    with folder.open() as shelf:
        indexes = [found.parsed.index for found in shelf.objects()]
    assert set(indexes) == {0, 1}


def test_nothing_goes_without_a_bound(filled: Filled) -> None:
    row = filled.row("--yes")
    assert row["deleted"] == {}
    assert len(filled.names()) == 24


def test_the_configured_bounds_are_the_default(folder: Filled) -> None:
    configured = json.dumps({"max_bytes": folder.bytes() // 2, "max_age": "7d"})
    row = folder.row(KVSHELF_CAPACITY=configured)
    assert row["chosen"]["size"]["files"] > 12
    row = folder.row("--max-bytes", "1GiB", KVSHELF_CAPACITY=configured)
    assert row["chosen"] == {}


def test_it_says_whose_bounds_act(folder: Filled, tmp_path: Path) -> None:
    """Those of this machine's configuration act on a shelf that was named, too."""
    configured = json.dumps({"max_bytes": "100KiB", "max_age": "7d"})
    lines = folder.run("--max-age", "1h", KVSHELF_CAPACITY=configured).stdout.splitlines()
    assert lines[1:3] == ["max_bytes 100.0 KiB (KVSHELF_CAPACITY)", "max_age 3600 s (--max-age)"]
    config = tmp_path / "config.yaml"
    config.write_text("capacity: {max_bytes: 1GiB}")
    assert folder.row(KVSHELF_CONFIG=str(config))["bounds"] == {
        "max_bytes": {"value": 1 << 30, "from": "KVSHELF_CONFIG"}
    }
    assert folder.row()["bounds"] == {}


def age(root: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


def test_objects_that_were_just_copied_here_do_not_count_as_old(folder: Filled) -> None:
    age(Path(folder.url), 90 * DAY)
    assert folder.row("--max-age", "30d")["chosen"] == {}


def test_a_salt_group_is_bounded_whatever_engines_here_would_do(tmp_path: Path) -> None:
    place = Filled(str(tmp_path / "shelf"), {})
    with place.open() as shelf:
        store(shelf, namespace(), range(5000, 5000 + 10 * CHUNK), "tenant")
    row = place.row("--group-max-bytes", place.bytes() // 10)
    assert set(row["chosen"]) == {"group"}


def test_pinned_chunks_stay_and_are_told_if_they_are_too_many(folder: Filled) -> None:
    with folder.open() as shelf:
        Pins.add(shelf.backend, "all", Pin(namespace=namespace().folder))
    row = folder.row("--max-bytes", 1000, "--yes", code=PROBLEM)
    assert row["pinned_bytes"] == folder.bytes() > 1000
    assert "pinned" in row["problem"]
    assert len(folder.names()) == 24


def test_what_a_pin_of_a_later_version_may_cover_stays(folder: Filled) -> None:
    with folder.open() as shelf:
        shelf.backend.write(".kvshelf/pins/later.json", [b'{"version": 2}'])
    row = folder.row("--max-bytes", 1000, "--yes", code=PROBLEM)
    assert "the pin later is not known" in row["problem"]
    assert len(folder.names()) == 24


def test_tails_stay_for_as_long_as_their_shelf_says(
    folder: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever calls it need not know how engines are configured."""
    space = Path(folder.url) / namespace().folder
    tail = space / "_" / "ab" / f"{'ab' * 32}-0t20-0of2.safetensors"
    tail.parent.mkdir(exist_ok=True)
    tail.write_bytes(b"KV")
    # Nobody can set the time of a file's last change.
    ahead = SimpleNamespace(time=lambda: time.time() + 2 * DAY)
    monkeypatch.setattr(PosixBackend, "now", lambda _: ahead.time())
    monkeypatch.setattr(base, "time", ahead)
    os.utime(tail, (ahead.time() - 7200, ahead.time() - 7200))
    said = space / ".kvshelf" / "keeps-tails" / "2592000"
    said.parent.mkdir(parents=True)
    said.touch()
    assert folder.row("--yes")["deleted"] == {}
    said.unlink()
    assert set(folder.row("--yes")["deleted"]) == {"tail"}


def test_what_hangs_on_a_missing_chunk_is_looked_for(
    folder: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvshelf.cli.gc.Rules", partial(Rules, orphans=-1.0))
    for path in Path(folder.url).rglob("*-1-*.safetensors"):
        path.unlink()
    assert folder.row("--no-orphans")["chosen"] == {}
    assert folder.row()["chosen"]["orphan"]["files"] == 12
    assert folder.row("--yes")["deleted"]["orphan"]["files"] == 12
    assert len(folder.names()) == 6


def test_a_look_is_no_use(folder: Filled) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_atime_ns for path in Path(folder.url).rglob("*.safetensors")}

    before = times()
    folder.row("--orphans")
    assert times() == before
    # Nor does a look by the command itself keep anything.
    row = folder.row("--orphans", "--max-bytes", folder.bytes() // 2, "--yes")
    assert row["kept"] == {"files": 0, "bytes": 0}
    assert row["deleted"]["size"]["files"] > 12


def test_foreign_files_links_and_other_versions_stay(folder: Filled, tmp_path: Path) -> None:
    root = Path(folder.url)
    elsewhere = Filled(str(tmp_path / "elsewhere"), {})
    other = namespace("Another")
    os.symlink(Path(elsewhere.url) / namespace().folder, root / other.folder)
    newer = root / f"newer-{'0' * 16}"
    (newer / "_" / "ab").mkdir(parents=True)
    (newer / "namespace.json").write_text('{"format": "kvshelf/2"}')
    kept = [
        newer / "_" / "ab" / f"{'ab' * 32}-0-0of1.safetensors",
        root / "README",
        root / namespace().folder / "notes.txt",
        root / f".README.{'0' * 16}.tmp",
    ]
    for path in kept:
        path.write_bytes(bytes(1000))
    row = folder.row("--max-bytes", 100, "--yes", code=PROBLEM)
    assert row["deleted"]["size"]["files"] == 24
    assert "no chunks that may go" in row["problem"]
    assert all(path.exists() for path in kept)
    assert len(elsewhere.names()) == 24


@pytest.mark.parametrize(
    "arguments",
    [["--max-bytes", "many"], ["--max-bytes", "-5"], ["--max-age", "soon"], ["--max-age", "1s"]],
)
def test_bounds_that_cannot_be_used_are_told(folder: Filled, arguments: list[str]) -> None:
    result = folder.run(*arguments, "--yes")
    assert result.exit_code == USAGE
    assert f"{arguments[0]}: found" in result.stderr
    assert len(folder.names()) == 24


@pytest.mark.parametrize("arguments", [[], ["--yes"]])
def test_a_shelf_that_does_not_exist_is_not_made(tmp_path: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["gc", str(tmp_path / "none"), *arguments])
    assert result.exit_code == UNREACHABLE
    assert "does not exist" in result.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("arguments", [[], ["--yes"]])
def test_an_empty_shelf_needs_nothing(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "shelf").mkdir()
    result = CliRunner().invoke(app, ["gc", str(tmp_path / "shelf"), *arguments])
    assert result.exit_code == 0, result.output
    assert "0 objects" in result.stdout


def test_deletions_that_the_storage_refuses_are_told(
    folder: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvshelf.backends.posix import PosixBackend
    from kvshelf.errors import PermanentStorageError

    def refuse(self: PosixBackend, name: str) -> bool:
        raise PermanentStorageError(13, "EACCES", name)

    monkeypatch.setattr(PosixBackend, "delete", refuse)
    result = folder.run("--max-bytes", 1000, "--yes")
    assert result.exit_code == PROBLEM
    assert "24 files could not be deleted" in result.stderr
    assert "EACCES" in result.stderr
