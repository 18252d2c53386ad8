"""One file that any writer may put on a shelf: what keepers and commands do beside it."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvshelf.backends import Backend, ObjectInfo
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.oserrors import storage_error
from kvshelf.capacity import keepers
from kvshelf.capacity.evictor import Evictor
from kvshelf.capacity.limits import FANS
from kvshelf.capacity.sweep import KEEPERS
from kvshelf.cli.app import app
from kvshelf.config import CapacityConfig
from kvshelf.errors import StorageError
from kvshelf.metrics import Counters
from kvshelf.shelf.pins import PINS, Pin, Pins
from tests.capacity.shelves import DAY, FMT, SIZE, Place, chunks, tail_of
from tests.sim.memory import MemoryStorage
from tests.sim.storage import FaultyStorage, LaterBackend, posix

TAG = "0123456789abcdef"
CHUNKS = chunks(10)


def write(root: Path, name: str, data: bytes) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


NUMBERS = st.dictionaries(st.sampled_from(["evicts_after", "max_age"]), st.floats() | st.integers())
TEXTS = st.text(max_size=50) | NUMBERS.map(json.dumps)


@given(st.binary(max_size=200) | TEXTS.map(str.encode))
def test_marker_with_any_bytes_is_read_and_tells_an_age_above_zero_or_none(data: bytes) -> None:
    storage = MemoryStorage()
    storage.put(f"{KEEPERS}/{TAG}", len(data), data)
    assert all(isinstance(one, dict) for one in keepers.read(storage).values())
    age = keepers.evicts_after(storage)
    assert age is None or 0 < age < math.inf


# ------------------------------------------------------------------------ files, one by one


def small_bound(root: Path) -> None:
    said = {"max_bytes": 1, "bytes": 1 << 62, "evicts_after": 1e-9, "by": "x" * 3000}
    write(root, f"{KEEPERS}/{TAG}", json.dumps(said).encode())


def many_keepers(root: Path) -> None:
    for number in range(1500):
        write(root, f"{KEEPERS}/{number:016x}", b"{}")


def no_reserved_folder(root: Path) -> None:
    write(root, ".kvshelf", b"x")


def keepers_are_a_link(root: Path) -> None:
    (root / ".kvshelf").mkdir(exist_ok=True)
    (root / KEEPERS).symlink_to("/tmp")


def no_windows(root: Path) -> None:
    record = {"format": "kvshelf/1", "kinds": ["full", "window"], "sliding_windows": []}
    write(root, f"x-{TAG}/namespace.json", json.dumps(record | {"chunk_size": 64}).encode())
    write(root, f"x-{TAG}/_/aa/{'aa' * 32}-0-window-0of1.safetensors", bytes(300))


def other_version(root: Path) -> None:
    write(root, f"{FMT.namespace.folder}/namespace.json", b'{"format":"x"}')


def sparse(root: Path) -> None:
    os.truncate(write(root, f"x-{TAG}/_/aa/{'aa' * 32}-0-0of1.safetensors", b""), 1 << 43)
    os.truncate(write(root, ".kvshelf/large", b""), 1 << 43)
    temporary = f"x-{TAG}/_/aa/.{'aa' * 32}-1-0of1.safetensors.{TAG}.tmp"
    os.truncate(write(root, temporary, b""), 1 << 43)


def make_chain(path: Path) -> None:
    """Make folders in each other of which the last have too long a path to be listed."""
    path.mkdir(parents=True)
    folder = os.open(path, os.O_DIRECTORY)
    for _ in range(18):
        os.mkdir("d" * 250, dir_fd=folder)
        inner = os.open("d" * 250, os.O_DIRECTORY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)


def hard_links(root: Path) -> None:
    folder = f"x-{TAG}/_/aa"
    first = write(root, f"{folder}/{'aa' * 32}-0-0of1.safetensors", bytes(10 * SIZE))
    for index in range(1, 300):
        os.link(first, root / folder / f"{'aa' * 32}-{index}-0of1.safetensors")


def deep(root: Path) -> None:
    make_chain(root / FMT.namespace.folder / "_/ab/d")


def deep_in_reserved_folders(root: Path) -> None:
    inner = f"{FMT.namespace.folder}/.kvshelf"
    for place in (".kvshelf", KEEPERS, PINS, inner, f"{inner}/gave-up"):
        make_chain(root / place / "d")


def not_files(root: Path) -> None:
    """Pipes, folders and links in the place of files."""
    for name in (f"{KEEPERS}/{TAG}", ".kvshelf/pins/x.json", f"x-{TAG}/namespace.json"):
        write(root, name, b"").unlink()
        os.mkfifo(root / name)
    (root / KEEPERS / ("2" * 16)).symlink_to("/dev/zero")
    key = "ee" * 32
    write(root, f"x-{TAG}/_/ee/y", b"").unlink()
    (root / f"x-{TAG}/_/ee/{key}-0-0of1.safetensors").mkdir()


def odd_names(root: Path) -> None:
    """As in archives from Windows."""
    for name in (f"{FMT.namespace.folder}/a\\b/c", ".kvshelf/a\\b"):
        os.utime(write(root, name, b"x"), (0, 0))


HOSTILE = [
    small_bound,
    many_keepers,
    no_reserved_folder,
    keepers_are_a_link,
    no_windows,
    other_version,
    sparse,
    hard_links,
    deep,
    deep_in_reserved_folders,
    not_files,
    odd_names,
]
hostile_files = pytest.mark.parametrize("hostile", HOSTILE, ids=lambda one: one.__name__)


@hostile_files
def test_keeper_keeps_its_bound_beside_one_file(
    tmp_path: Path, hostile: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Of ten chunks stay what its own bound allows, and not many fewer."""
    place = Place(tmp_path, ahead=0.0)
    place.put(FMT, CHUNKS, age=3600.0)
    hostile(tmp_path)

    def objects() -> int:
        mine = {name for name in place.objects() if name.startswith(FMT.namespace.folder)}
        return len(mine)

    if hostile is no_reserved_folder:
        # Pins may have been there.
        evictor = place.evictor(max_bytes=6 * SIZE)
        assert evictor._turn() is not None
        assert objects() == 10 * FMT.shards and "a file is in the place" in caplog.text
        return
    place.round(place.evictor(max_bytes="10TiB"))
    assert objects() == 10 * FMT.shards
    place.round(place.evictor(max_bytes=6 * SIZE))
    assert 3 * FMT.shards <= objects() <= 6 * FMT.shards


@pytest.mark.long
@hostile_files
def test_commands_end_beside_one_file(tmp_path: Path, hostile: Callable[[Path], None]) -> None:
    """Each with a code of its own, and without a traceback."""
    place = Place(tmp_path, ahead=0.0)
    place.put(FMT, CHUNKS, age=3600.0)
    hostile(tmp_path)
    before = {name for name in place.objects() if name.startswith(FMT.namespace.folder)}
    for arguments in (["gc", "--yes"], ["ls"], ["rm", "--unused-for", "9d", "--yes"], ["verify"]):
        result = CliRunner().invoke(app, [arguments[0], str(tmp_path), *arguments[1:]])
        assert result.exit_code in ((0, 1, 3) if hostile is no_reserved_folder else (0, 1))
        assert isinstance(result.exception, SystemExit | None), result.exception
    assert before <= place.objects()


# ------------------------------------------------------------------------ calls, one by one


class OneBadCall(FaultyStorage):
    """Has a fault at its call of a number, and at all later ones for the same entry.

    What concerns the shelf as a whole is well again some seconds later.
    """

    def __init__(self, inner: Backend, number: int, fault: int | str) -> None:
        # Where calls may hang, each has a thread.
        local_path = "" if fault == "hangs" else inner.properties.local_path
        super().__init__(inner, local_path=local_path)
        self.calls: list[tuple[str, str]] = []
        self.bad = ("", "none")
        self._number, self._fault = number, fault
        self._well_at = math.inf

    @property
    def concerns_all(self) -> bool:
        return not self.bad[1] or self.bad[1].startswith((KEEPERS, PINS))

    def meet(self, operation: str, name: str) -> Sequence[Callable[[bytearray], object]]:
        self.calls.append((operation, name))
        if len(self.calls) == self._number:
            self.bad = operation, name
            self._well_at = time.monotonic() + 8 if self.concerns_all else math.inf
        if (operation, name) == self.bad and time.monotonic() < self._well_at:
            if self._fault == "hangs":
                threading.Event().wait(8 if self.concerns_all else None)
            elif isinstance(self._fault, int):
                raise storage_error(OSError(self._fault, "injected"), operation, name)
        return ()

    def list(self, prefix: str = "", **options: Any) -> Iterator[ObjectInfo]:
        self.meet("list", prefix)
        yield from super().list(prefix, **options)


def sweep_copy(place: Place, number: int, fault: int | str, odd: str = "") -> OneBadCall:
    """Sweep a copy of a shelf, and again a while later; return the storage with its calls."""
    root = place.root.parent / "copy"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(place.root, root)
    if fault == "odd name" and (root / odd).is_dir():
        (root / odd / "a\\b").touch()
        (root / odd / "c\\d").mkdir()
    storage = OneBadCall(LaterBackend(posix(root), place.later.ahead), number, fault)
    rules = CapacityConfig.model_validate({"max_age": "1d"})
    evictor = Evictor(GuardedBackend(storage), rules, Counters())
    evictor.schedule.width, evictor.budget.unknown = FANS, 0
    for _ in range(2):
        with suppress(StorageError):
            evictor.sweep()
        time.sleep(10)
    return storage


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        "hangs",
        "odd name",
        *(pytest.param(one, marks=pytest.mark.slow) for one in (errno.EIO, errno.EACCES)),
    ],
)
def test_sweep_with_one_bad_call_deletes_all_but_what_the_call_is_for(
    tmp_path: Path, fault: int | str
) -> None:
    place = Place(tmp_path / "shelf")
    place.put(FMT, chunks(2), age=3 * DAY)
    place.put(FMT, chunks(1, seed=1), age=60.0)
    place.put(FMT, [tail_of()], age=3 * DAY)
    space, temporary = FMT.namespace.folder, f".x.{TAG}.tmp"
    for name in (f".kvshelf/{temporary}", f"{space}/.kvshelf/gave-up/{'a' * 32}", ".kvshelf/a/b"):
        place.write(name, b"", age=3 * DAY)
    Pins.add(place.backend, "x", Pin(namespace="other-" + TAG))

    def left() -> set[str]:
        paths = [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]
        names = [str(path.relative_to(tmp_path / "copy")) for path in paths]
        return {name for name in names if not name.startswith(KEEPERS)}

    calls = sweep_copy(place, 0, "").calls
    expected = left()
    assert sum(name.endswith(".safetensors") for name in expected) == FMT.shards
    assert not any(name.endswith((".tmp", "a" * 32, "/b")) for name in expected)
    for number, (_, odd) in enumerate(calls, 1):
        operation, bad = sweep_copy(place, number, fault, odd).bad
        bad = "none" if fault == "odd name" else bad
        # A listing fails for its folder, a look or a deletion for a chunk.
        folder = bad.rpartition("/")[0] if operation == "entries" else bad
        key = bad.rpartition("/")[2].partition("-")[0]
        more = {
            name
            for name in left() - expected
            if not name.startswith((f"{folder}/", bad)) and key not in name and "\\" not in name
        }
        assert not more, (operation, bad)
        assert expected <= left(), (operation, bad)
