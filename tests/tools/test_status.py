"""What is known of a shelf without a listing: the numbers are those that engines go by."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends.base import Space
from kvshelf.capacity.lease import SWEEP, Finding, Lease, Record
from kvshelf.capacity.pins import Pin, Pins
from kvshelf.capacity.written import WRITTEN
from kvshelf.config import CapacityConfig
from kvshelf.errors import TransientStorageError
from kvshelf.format.keys import KeyChain
from kvshelf.tools.status import A_SWEEP, Status, look
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.filled import CHUNK, fill, hybrid, namespace, prompt

GIB = 1 << 30


class Far(FaultyStorage):
    """A storage of which a test says how much is free."""

    room: Space | None = Space(60 * GIB, 100 * GIB)

    def space(self) -> Space | None:
        return self.room


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Far]:
    root = tmp_path / "shelf"
    fill(root, namespace(), prompt(0, 3))
    fill(root, hybrid(), prompt(0, 2))
    storage = Far(posix(root))
    yield storage
    storage.close()


def status(storage: Far, **capacity: Any) -> Status:
    return look(storage, CapacityConfig(**capacity), "KVSHELF_CAPACITY")


def swept(storage: Far, record: Record | None = None, **finding: Any) -> str:
    """Let a process sweep, and end; return its id."""
    lease, now = Lease(storage), time.time()
    taken = lease.take(record or Record(), now)
    assert taken is not None
    made = Finding(now - 30, 40 * GIB, 0.5, by=lease.owner, deleted_files=7, deleted_bytes=5 * GIB)
    lease.release(replace(taken, finding=replace(made, **finding)), now)
    return lease.owner


def bounds(found: Status) -> dict[str, tuple[float, str, int | None]]:
    return {bound.name: (bound.value, bound.given_by, bound.room) for bound in found.bounds}


def test_what_was_written_since_the_sweep_counts(storage: Far) -> None:
    owner = swept(storage, free=62 * GIB)
    found = status(storage, max_bytes="50GiB")
    assert found.used == 42 * GIB
    assert bounds(found)["max_bytes"] == (50 * GIB, "KVSHELF_CAPACITY", 8 * GIB)
    assert found.acting is not None and found.acting.name == "max_bytes"
    assert found.finding is not None
    assert (found.finding.by, found.finding.deleted_files) == (owner, 7)


def test_where_free_space_is_not_told_writers_tell_what_they_wrote(storage: Far) -> None:
    storage.room = None
    for name, nbytes in (("a" * 16, 3 * GIB), ("b" * 16, 4 * GIB)):
        storage.write_marker(f"{WRITTEN}/{name}-{nbytes}")
    swept(storage, written=GIB)
    before = {info.name for info in storage.list(WRITTEN, hidden=True)}
    found = status(storage)
    assert found.used == 46 * GIB
    assert found.free is None
    assert any("free space" in sentence for sentence in found.unknown)
    assert {info.name for info in storage.list(WRITTEN, hidden=True)} == before


def test_the_smallest_bound_that_acts_is_shown_with_who_gave_it(storage: Far) -> None:
    now = time.time()
    swept(storage, Record(max_bytes=41 * GIB, max_bytes_at=now), free=60 * GIB, max_age=3600.0)
    found = bounds(status(storage, max_bytes="50GiB", max_age="7d", min_free="58GiB"))
    assert found["max_bytes"] == (41 * GIB, A_SWEEP, GIB)
    assert found["max_age"] == (3600.0, A_SWEEP, None)
    assert found["min_free"] == (58 * GIB, "KVSHELF_CAPACITY", 2 * GIB)
    found = bounds(status(storage, max_bytes="30GiB", max_age="10m", min_free=0))
    assert found["max_bytes"] == (30 * GIB, "KVSHELF_CAPACITY", -10 * GIB)
    assert found["max_age"] == (600.0, "KVSHELF_CAPACITY", None)
    assert "min_free" not in found
    assert bounds(status(storage, group_max_bytes="1GiB"))["group_max_bytes"][0] == GIB


def test_a_bound_that_no_engine_has_named_for_an_hour_is_not_known(storage: Far) -> None:
    swept(storage, Record(max_bytes=41 * GIB, max_bytes_at=time.time() - 4000), free=60 * GIB)
    found = status(storage)
    assert "max_bytes" not in bounds(found)
    assert any(str(41 * GIB) in sentence for sentence in found.unknown)


def test_a_sweep_of_an_earlier_version_does_not_say_what_it_deleted(storage: Far) -> None:
    now = time.time()
    record = {"version": 1, "owner": "x", "finding": {"at": now, "nbytes": 5, "seconds": 1}}
    storage.write(SWEEP, [json.dumps(record).encode()], "replace")
    found = status(storage)
    assert found.finding is not None
    assert (found.finding.nbytes, found.finding.by, found.finding.deleted_files) == (5, "", None)
    assert any("what the last sweep deleted" in sentence for sentence in found.unknown)


def test_pins_with_the_bytes_of_their_chunks(storage: Far) -> None:
    for of in (namespace(), hybrid()):
        keys = [chunk.key for chunk in KeyChain(of.digest, CHUNK).extend(prompt(0, 2))]
        Pins.add(storage, of.folder[-16:], Pin(of.folder, keys=keys, until=4e9))
    Pins.add(storage, "group", Pin(group="_"))
    Pins.add(storage, "elsewhere", Pin("gone-0123456789abcdef", keys=[bytes(32)]))
    found = status(storage)
    for of in (namespace(), hybrid()):
        paths = list(Path(storage.inner.root).glob(f"{of.folder}/_/*/*.safetensors"))
        chunks = {path.name.split("-")[0] for path in paths}
        whole = sum(path.stat().st_size for path in paths)
        assert found.pin_bytes[of.folder[-16:]] == whole // len(chunks) * 2
    assert found.pin_bytes["group"] is found.pin_bytes["elsewhere"] is None
    for name in ("group", "elsewhere"):
        assert any(f"the pin {name}:" in sentence for sentence in found.unknown)


def test_a_storage_that_fails_is_an_error(storage: Far) -> None:
    failing = FaultyStorage(storage)
    failing.add(Fault("folders", error=TransientStorageError(5, "EIO")))
    with pytest.raises(TransientStorageError):
        look(failing, CapacityConfig(), "")
