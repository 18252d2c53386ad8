"""The disk tier: copies near in front of a shelf that is far."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import pytest

from kvshelf.backends import Backend
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.posix import PosixBackend
from kvshelf.config import Config, DiskTierConfig
from kvshelf.errors import (
    ConfigError,
    TransientStorageError,
)
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.names import object_name
from kvshelf.metrics import Counters
from kvshelf.shelf import opening as opening_module
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import LookupService
from kvshelf.shelf.shelf import Shelf, open_shelf
from kvshelf.shelf.view import ObjectRef
from kvshelf.tiers import disk_tier as tier_module
from kvshelf.tiers import runtime
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.tiers.runtime import open_configured, open_late
from kvshelf.tiers.tiered import TieredShelf
from kvshelf.transfer.read_ahead import ReadAhead
from tests.faults import tier_child
from tests.sim.storage import FAR, Fault, FaultyStorage, posix
from tests.support.formats import hold_buffer, make_format, present
from tests.support.prompts import make_chunks, prompt
from tests.support.threads import none_can_be_started
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, until

FMT = make_format()
SHARDS = range(FMT.shards)
ROOM = 1 << 30


class Near(PosixBackend):
    """The directory of a tier."""


@pytest.fixture(autouse=True)
def _near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "PosixBackend", Near)


def hang_objects(patch: pytest.MonkeyPatch, go: Callable[[], threading.Event]) -> None:
    """Let writes of objects to a tier hang until an event is set."""
    writing = Near.write

    def held(self: Near, name: str, *arguments: Any) -> Any:
        assert not name.endswith(".safetensors") or go().wait(PATIENCE)
        return writing(self, name, *arguments)

    patch.setattr(Near, "write", held)


class Machine:
    """One machine with a disk tier in front of a shelf that others share."""

    def __init__(self, remote: Backend, tier: Path, **options: Any) -> None:
        self.counters = Counters()
        memory = {name: options.pop(name) for name in ("memory_chunks", "keeps") if name in options}
        self.tier = DiskTier(
            tier, options.pop("max_bytes", ROOM), counters=self.counters, **options
        )
        self.rig = Rig(
            remote,
            fmt=FMT,
            **memory,
            in_front=lambda shelf: TieredShelf(shelf, [self.tier]),
        )
        self.lookups = LookupService(
            TieredShelf(Shelf(GuardedBackend(remote)), [self.tier]).view(FMT),
            failed=FailedKeys(),
            counters=Counters(),
        )

    def put(self, chunks: list[Chunk]) -> None:
        self.rig.put(chunks)
        assert self.tier.drain(PATIENCE)

    def load(self, chunks: list[Chunk]) -> bool:
        """Whether all of a load came, and was right."""
        for cache in self.rig.caches:
            cache.zero_()
        load, items = self.rig.load(chunks, 20)
        assert self.tier.drain(PATIENCE)
        assert all(self.rig.holds(item) for item in items[: load.failed_at])
        return load.failed_at is None

    def hit(self, tokens: list[int]) -> int:
        """Chunks that a look-up finds."""
        lookup = self.lookups.submit(tokens, lambda: KeyChain(FMT.namespace.digest, FMT.chunk_size))
        assert lookup.wait(PATIENCE)
        return lookup.hit_chunks

    def count(self, name: str) -> float:
        return self.counters.snapshot().get(name, 0)

    def close(self) -> None:
        self.lookups.close()
        self.rig.transfer.close(0.0)
        self.tier.close()
        self.rig.guard.close()


@pytest.fixture
def remote(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(posix(tmp_path / "remote"), **FAR)


StartMachine: TypeAlias = Callable[..., Machine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartMachine]:
    """Start machines; they end with the test."""
    started: list[Machine] = []

    def make(remote: Backend, tier: Path | str = "tier", **options: Any) -> Machine:
        started.append(Machine(remote, tmp_path / tier, **options))
        return started[-1]

    yield make
    for machine in started:
        machine.close()


def hang(
    patch: pytest.MonkeyPatch, where: object, name: str, call: Callable[..., Any] | None = None
) -> threading.Event:
    """Let a function hang until the event is set, and then call itself, or `call`."""
    go, then = threading.Event(), call or getattr(where, name)

    def hanging(*arguments: Any, **options: Any) -> Any:
        assert go.wait(PATIENCE)
        return then(*arguments, **options)

    patch.setattr(where, name, hanging)
    return go


def tokens_of(seed: int, chunks: int) -> list[int]:
    return prompt(chunks, seed, unit=FMT.chunk_size)


def files(root: Path) -> dict[str, bytes]:
    """What a shelf holds, by name; no files of kvshelf's own."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and ".kvshelf" not in path.parts
    }


def copy_of(root: Path, chunk: Chunk, shard: int) -> Path:
    return root / FMT.namespace.folder / object_name(chunk, shard, FMT.shards)


# ------------------------------------------------------------------------- what it is good for


def test_what_is_stored_is_in_the_tier_while_the_shelf_is_away(
    remote: FaultyStorage, start: StartMachine
) -> None:
    faulty = FaultyStorage(remote)
    machine = start(faulty)
    chunks = make_chunks(FMT, 4)
    machine.put(chunks)
    faulty.add(Fault("*", error=TransientStorageError(5, "away")))
    # The shelf's breaker may be closed, about to open or open by now.
    for _ in range(8):
        assert machine.hit(tokens_of(0, 4)) == 4
        assert machine.load(chunks)
        # What only the shelf may have is computed.
        assert machine.hit(tokens_of(1, 4)) == 0
        assert not machine.load(make_chunks(FMT, 4, seed=1))
    assert machine.rig.count("breaker_opens") == 1
    assert machine.rig.shelf.available
    assert machine.hit(tokens_of(0, 4)) == 4
    assert machine.load(chunks)
    faulty.heal()


def test_thread_that_a_tier_keeps_is_replaced(
    remote: FaultyStorage, start: StartMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = start(remote)
    chunks, others = make_chunks(FMT, 1), make_chunks(FMT, 2, seed=1)
    machine.put([*chunks, *others])
    guard = machine.tier.usable.backend
    gate = threading.Event()
    hanging = FaultyStorage(guard.inner, Fault("open", f"*{chunks[0].key.hex()}*", wait=gate))
    monkeypatch.setattr(guard, "inner", hanging)
    # Of whichever shelf behind the tier.
    TieredShelf(Shelf(FaultyStorage(machine.rig.backend, **FAR)), [machine.tier])
    assert machine.rig.load(chunks, 20)[0].failed_at == 0
    until(lambda: machine.rig.count("stuck_threads") == FMT.shards)
    assert machine.load(others)
    gate.set()


def test_tier_holds_on_to_no_shelf_that_is_gone(tmp_path: Path) -> None:
    with closing(DiskTier(tmp_path / "tier", ROOM)) as tier:
        gone = []
        for number in range(3):
            shelf = Shelf(posix(tmp_path / f"shelf-{number}"))
            gone.append(weakref.ref(shelf.backend))
            TieredShelf(shelf, [tier])
            shelf.close()
        del shelf
        gc.collect()
        assert [guard() for guard in gone] == [None] * 3


def test_two_shelves_may_have_one_tier(
    remote: FaultyStorage, start: StartMachine, tmp_path: Path
) -> None:
    chunks = make_chunks(FMT, 2)
    start(remote).put(chunks)
    other = start(posix(tmp_path / "other remote"))
    assert other.hit(tokens_of(0, 2)) == 2
    assert other.load(chunks)


# ----------------------------------------------------------------------------------- never wrong


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "folder", "link"])
def test_bad_copy_is_dropped_and_the_load_goes_on(
    remote: FaultyStorage,
    start: StartMachine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    machine = start(remote)
    chunks = make_chunks(FMT, 2)
    machine.put(chunks)
    before = files(tmp_path / "remote")
    path = copy_of(tmp_path / "tier", chunks[1], 1)
    data = path.read_bytes()
    if damage in ("folder", "link"):
        path.unlink()
        path.mkdir() if damage == "folder" else path.symlink_to("/etc/passwd")
    else:
        path.write_bytes(
            {"flip": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-9], "empty": b""}[damage]
        )
    remote.counts.clear()
    with caplog.at_level(logging.WARNING):
        assert machine.load(chunks)
    assert remote.counts["open"] == 1
    assert files(tmp_path / "remote") == before
    assert machine.count("disk_tier_bad_objects") == 1
    assert "was bad and is removed" in caplog.text
    if damage == "folder":
        return
    assert path.read_bytes() == data
    remote.counts.clear()
    assert machine.load(chunks)
    assert remote.counts["open"] == 0


def test_bad_object_of_the_shelf_does_not_get_into_the_tier(
    remote: FaultyStorage, start: StartMachine, tmp_path: Path
) -> None:
    chunks = make_chunks(FMT, 1)
    with closing(Rig(remote.inner, fmt=FMT)) as elsewhere:
        elsewhere.put(chunks)
    bad = copy_of(tmp_path / "remote", chunks[0], 0)
    bad.write_bytes(bytes(bad.stat().st_size))
    assert not start(remote).load(chunks)
    assert not copy_of(tmp_path / "tier", chunks[0], 0).exists()


# ----------------------------------------------------------------------------------- never stuck


def test_load_does_not_wait_for_its_copies(
    remote: FaultyStorage, start: StartMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = make_chunks(FMT, 6)
    start(remote, "other tier").put(chunks)
    go = threading.Event()
    hang_objects(monkeypatch, lambda: go)
    machine = start(remote, memory_chunks=8)
    load, items = machine.rig.load(chunks, 20)
    assert load.failed_at is None
    assert all(machine.rig.holds(item) for item in items)
    # The queue holds a fourth of the memory.
    assert machine.count("disk_tier_dropped_objects") == 4 * FMT.shards
    assert machine.rig.chunks_in_use == 2
    go.set()
    assert machine.tier.drain(PATIENCE)
    monkeypatch.undo()
    assert machine.load(chunks)
    assert machine.count("disk_tier_loaded_objects") == 2 * FMT.shards


def test_read_ahead_has_memory_beside_a_disk_tier_that_hangs(
    remote: FaultyStorage, start: StartMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, waiting = make_chunks(FMT, 6), make_chunks(FMT, 4, 7)
    start(remote, "other tier").put(waiting)
    go = threading.Event()
    hang_objects(monkeypatch, lambda: go)
    machine = start(remote, memory_chunks=16)
    for item in machine.rig.items(stored, 0):
        machine.rig.fill(item)
        machine.rig.store(item)
    assert machine.rig.transfer.drain(PATIENCE) == 0
    assert machine.rig.chunks_in_use == 4
    ahead = ReadAhead(machine.rig.context, machine.rig.loads)
    ahead.add("waiting", machine.rig.view, waiting)
    # A fourth of the memory is the queue's, and a fourth is left.
    until(lambda: machine.rig.chunks_in_use == 8)
    assert ahead.take_failures() == []
    ahead.release_all()
    go.set()


def test_chunk_of_a_far_shelf_is_kept_in_memory_while_a_disk_tier_holds_what_a_store_had(
    remote: FaultyStorage, start: StartMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = make_chunks(FMT, 1)
    start(remote, "other tier").put(chunks)
    go = threading.Event()
    hang_objects(monkeypatch, lambda: go)
    machine = start(remote, keeps=True)
    (item,) = machine.rig.items(chunks, 0)
    machine.rig.fill(item)
    machine.rig.store(item)
    assert machine.rig.transfer.drain(PATIENCE) == 0
    assert machine.rig.chunks_in_use == 1
    machine.rig.comes_back(chunks, 20)
    remote.counts.clear()
    machine.rig.comes_back(chunks, 40)
    assert remote.counts["open"] == 0
    go.set()


def test_use_of_a_copy_is_recorded(
    remote: FaultyStorage, start: StartMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: set[str] = set()
    monkeypatch.setattr(tier_module.PosixBackend, "touch", lambda _, name, before: names.add(name))
    machine, chunks = start(remote), make_chunks(FMT, 2)
    machine.put(chunks)
    assert machine.load(chunks)
    copies = (tmp_path / "tier").rglob("*.safetensors")
    expected = {str(path.relative_to(tmp_path / "tier")) for path in copies}
    until(lambda: len(expected) == 2 * FMT.shards and names == expected)


def test_object_is_queued_once_and_can_be_removed_from_the_queue(
    remote: FaultyStorage, start: StartMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, go = threading.Event(), threading.Event()
    writing = Near.write
    names: list[str] = []

    def held(self: Any, name: str, *args: Any) -> Any:
        if name.endswith(".safetensors"):
            names.append(name)
            written.set()
            assert go.wait(PATIENCE)
        return writing(self, name, *args)

    monkeypatch.setattr(Near, "write", held)
    machine = start(remote)
    refs = [ObjectRef(chunk, 0) for chunk in make_chunks(FMT, 3)]
    data = [bytearray(FMT.object_size(0)) for _ in refs]
    for ref, buffer in zip(refs, data, strict=True):
        FMT.seal(memoryview(buffer), ref.chunk, 0)
        assert not machine.tier.is_queued(FMT, ref)
        for _ in range(3):
            machine.tier.keep(FMT, ref, buffer, hold_buffer)
            assert machine.tier.is_queued(FMT, ref)
    # The first is being written. It is not taken again either.
    assert written.wait(PATIENCE)
    machine.tier.keep(FMT, refs[0], data[0], hold_buffer)
    assert machine.tier.remove(FMT, refs[1:2]) == 1
    assert not machine.tier.is_queued(FMT, refs[1])
    with ThreadPoolExecutor(1) as pool:
        removed = pool.submit(machine.tier.remove, FMT, refs[:1])
        go.set()
        assert removed.result(PATIENCE) == 1
    assert machine.tier.drain(PATIENCE)
    assert len(set(names)) == 2
    assert machine.tier.holds(FMT, refs) == [False, False, True]
    assert machine.tier.remove(FMT, refs) == 1
    assert not files(tmp_path / "tier").keys() - {f"{FMT.namespace.folder}/namespace.json"}
    assert machine.count("disk_tier_dropped_objects") == 0


def test_tier_that_cannot_be_opened_is_used_when_it_can(
    remote: FaultyStorage,
    start: StartMachine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(opening_module, "_RETRY_SECONDS", 0.01)
    well, real = threading.Event(), tier_module.PosixBackend

    def opening(path: str) -> Any:
        if not well.is_set():
            raise TransientStorageError(5, "the disk is away")
        return real(path)

    monkeypatch.setattr(tier_module, "PosixBackend", opening)
    machine = start(remote)
    chunks = make_chunks(FMT, 2)
    machine.put(chunks)
    assert machine.load(chunks)
    assert machine.hit(tokens_of(0, 2)) == 2
    assert not machine.tier.available
    assert caplog.text.count("cannot be opened") == 1
    well.set()
    while not machine.tier.available:
        threading.Event().wait(0.001)
    assert machine.load(chunks)
    assert machine.load(chunks)
    assert machine.count("disk_tier_loaded_objects") == 4


def test_without_a_thread_for_the_tier_only_copies_are_missing(
    remote: FaultyStorage, start: StartMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = make_chunks(FMT, 2), make_chunks(FMT, 2, seed=1)
    start(remote).put(old)
    machine = start(remote)
    with none_can_be_started(monkeypatch, "kvshelf-tier"):
        machine.put(new)
        # The one from the tier, whose use cannot be noted, the other from the shelf.
        assert machine.load(old)
        assert machine.load(new)
    assert machine.rig.count("stored_chunks") == 2
    assert (
        machine.rig.count("dropped_chunks_error") == machine.rig.count("load_failures_error") == 0
    )
    assert machine.count("disk_tier_loaded_objects") == 4
    assert machine.count("disk_tier_loaded_bytes") == 2 * sum(map(FMT.object_size, SHARDS))
    assert machine.count("disk_tier_dropped_objects") == 8
    # Threads can be had again: what is loaded now is copied.
    assert machine.load(new)
    remote.counts.clear()
    assert machine.load(new)
    assert remote.counts["open"] == 0


def test_copies_go_on_when_the_thread_of_the_tier_is_kept_and_another_can_be_started_later(
    remote: FaultyStorage, start: StartMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = start(remote)
    first, second = make_chunks(FMT, 1), make_chunks(FMT, 1, seed=1)
    guard = machine.tier.usable.backend
    go, free = threading.Event(), threading.Event()
    free.set()
    kept: list[int] = []

    def hanging_once() -> threading.Event:
        if not kept:
            kept.append(threading.get_ident())
        return go if threading.get_ident() in kept else free

    hang_objects(monkeypatch, hanging_once)
    machine.rig.put(first)
    with none_can_be_started(monkeypatch, "kvshelf-tier"):
        until(lambda: machine.count("stuck_threads") == 1)
    until(lambda: guard.reads.state.value == "closed" and guard.writes.allows())
    machine.rig.put(second)
    until(lambda: machine.tier.holds(FMT, [(second[0], s) for s in SHARDS]) == [True] * FMT.shards)
    go.set()
    assert machine.tier.drain(PATIENCE)


def test_tier_that_does_not_open_holds_up_nothing(
    remote: FaultyStorage, start: StartMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = hang(monkeypatch, tier_module, "PosixBackend")
    machine = start(remote, open_seconds=0.01)
    chunks = make_chunks(FMT, 2)
    machine.put(chunks)
    assert machine.load(chunks)
    go.set()


def test_shelf_that_cannot_be_opened_is_done_without_until_it_can(
    remote: FaultyStorage, start: StartMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = make_chunks(FMT, 3)
    start(remote).put(chunks[:2])
    with closing(Rig(remote.inner, fmt=FMT)) as elsewhere:
        elsewhere.put(chunks)
    well = threading.Event()

    def opening(url: str, **_: Any) -> Backend:
        if not well.is_set():
            raise TransientStorageError(5, "nobody answers")
        return remote

    monkeypatch.setattr(opening_module, "_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(runtime, "open_backend", opening)
    with closing(DiskTier(tmp_path / "tier", ROOM)) as tier:
        shelf = open_late("s3://key:se@cret@bucket/kv", tier)
        assert shelf.url == "s3://bucket/kv"
        near = TieredShelf(shelf, [tier])
        assert present(near.view(FMT), chunks) == [True, True, False]
        with closing(TieredShelf(shelf, [tier])) as loads:
            image = memoryview(bytearray(FMT.object_size(0)))
            loads.view(FMT).load(ObjectRef(chunks[0], 0), image)
            with pytest.raises(TransientStorageError):
                loads.view(FMT).load(ObjectRef(chunks[2], 0), image)
            well.set()
            until(lambda: present(near.view(FMT), chunks) == [True] * 3)
            loads.view(FMT).load(ObjectRef(chunks[2], 0), image)


def test_directory_that_fails_gets_no_copies(
    remote: FaultyStorage,
    start: StartMachine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = start(remote)

    def failing(self: Near, name: str, *arguments: Any) -> Any:
        raise TransientStorageError(5, "the disk fails")

    monkeypatch.setattr(Near, "write", failing)
    chunks = make_chunks(FMT, 3)
    machine.put(chunks)
    assert machine.count("disk_tier_breaker_opens") >= 1
    assert "write circuit breaker open" in caplog.text
    assert machine.load(chunks)


def test_directory_with_objects_that_is_no_tier_is_refused(tmp_path: Path) -> None:
    with closing(Rig(posix(tmp_path / "shelf"), fmt=FMT)) as rig:
        rig.put(make_chunks(FMT, 2))
    before = files(tmp_path / "shelf")
    with pytest.raises(ConfigError, match="is a shelf"):
        DiskTier(tmp_path / "shelf", 1)
    assert files(tmp_path / "shelf") == before


def test_tier_that_is_emptied_while_it_is_used_opens_again(
    remote: FaultyStorage, start: StartMachine, tmp_path: Path
) -> None:
    first, second = make_chunks(FMT, 2)
    machine = start(remote)
    machine.put([first])
    shutil.rmtree(tmp_path / "tier")
    machine.put([second])
    assert copy_of(tmp_path / "tier", second, 0).exists()
    machine.close()
    with closing(DiskTier(tmp_path / "tier", ROOM)) as tier:
        assert tier.available


def test_shelf_gets_a_tier_without_a_look_at_the_directories(tmp_path: Path) -> None:
    """The first call of a cache does that, also on a storage that hangs meanwhile."""
    with closing(DiskTier(tmp_path / "tier", ROOM)) as tier:
        shelf = Shelf(posix(tmp_path / "shelf"))
        with mock.patch("kvshelf.tiers.directories.os.stat", side_effect=AssertionError):
            TieredShelf(shelf, [tier])


def test_tier_is_used_while_its_shelf_hangs_at_opening(
    remote: FaultyStorage,
    start: StartMachine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chunks = make_chunks(FMT, 2)
    start(remote).put(chunks[:1])
    with closing(Rig(remote.inner, fmt=FMT)) as elsewhere:
        elsewhere.put(chunks)
    go = hang(monkeypatch, runtime, "open_backend", lambda url, **_: remote)
    monkeypatch.setattr(runtime, "TIERED_SECONDS", 0.01)
    with (
        closing(DiskTier(tmp_path / "tier", ROOM)) as tier,
        closing(open_late("s3://bucket/kv", tier)) as shelf,
    ):
        assert "s3://bucket/kv has not answered yet" in caplog.text
        near = TieredShelf(shelf, [tier])
        assert present(near.view(FMT), chunks) == [True, False]
        go.set()
        until(lambda: present(near.view(FMT), chunks) == [True, True])


@pytest.mark.parametrize("error", [ConfigError("the key is wrong"), ValueError("it is wrong")])
def test_mistake_that_a_shelf_finds_late_is_spoken_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    go = hang(monkeypatch, runtime, "open_backend", mock.Mock(side_effect=error))
    monkeypatch.setattr(runtime, "TIERED_SECONDS", 0.01)
    with (
        closing(DiskTier(tmp_path / "tier", ROOM)) as tier,
        closing(open_late("s3://bucket/kv", tier)),
    ):
        go.set()
        until(lambda: f"s3://bucket/kv cannot be used: {error}" in caplog.text)


@pytest.mark.parametrize("with_tier", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_shelf_with_the_directory_of_a_disk_tier_is_refused(
    tmp_path: Path, late: bool, with_tier: bool
) -> None:
    with closing(DiskTier(tmp_path / "tier", ROOM, open_seconds=PATIENCE)):
        pass
    near = DiskTierConfig(path=str(tmp_path / "near"), max_bytes=ROOM) if with_tier else None
    config = Config(shared_storage_path=str(tmp_path / "tier"), disk_tier=near)
    with pytest.raises(ConfigError, match="is the directory of a disk tier"):
        open_configured(str(tmp_path / "tier"), config, Counters(), late=late)


@pytest.mark.parametrize("within", ["", "near", ".."])
@pytest.mark.parametrize("order", ["tier first", "shelf first", "given both"])
def test_tier_that_is_the_shelf_by_another_name_removes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    within: str,
    order: str,
) -> None:
    root = tmp_path / "all" / "shelf"
    root.parent.mkdir()
    chunks = make_chunks(FMT, 3)
    with closing(Rig(posix(root), fmt=FMT)) as rig:
        rig.put(chunks)
    before = files(root)

    def mark() -> None:
        """Otherwise it is refused as a shelf of its own."""
        for folder in {root, (root / within).resolve()}:
            (folder / ".kvshelf").mkdir(parents=True, exist_ok=True)
            (folder / ".kvshelf" / "tier").touch()

    if order != "shelf first":
        mark()
    (root / "near").mkdir(exist_ok=True)
    (tmp_path / "link").symlink_to((root / within).resolve())
    seconds = PATIENCE
    if order == "shelf first":
        seconds, go = 0.01, hang(monkeypatch, tier_module, "PosixBackend")
    with closing(DiskTier(tmp_path / "link", 1, open_seconds=seconds)) as tier:
        if order == "tier first":
            with pytest.raises(ConfigError, match="a directory of its own"):
                open_late(f"file://{root}", tier)
        elif order == "shelf first":
            shelf = open_late(f"file://{root}", tier)
            mark()
            go.set()
            until(lambda: "a directory of its own" in caplog.text)
            shelf.close()
        else:
            with (
                closing(Shelf(posix(root))) as shelf,
                pytest.raises(ConfigError, match="a directory of its own"),
            ):
                tier.check_disjoint(shelf.backend)
        assert not tier.available
        image = copy_of(root, chunks[0], 0).read_bytes()
        tier.keep(FMT, ObjectRef(chunks[0], 0), image, hold_buffer)
        assert tier.drain(PATIENCE)
    assert files(root) == before


# ------------------------------------------------------------------------------- many processes


def run_child(tier: Path, **job: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, tier_child.__file__, json.dumps({"path": str(tier), **job})],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )


def used_bytes(root: Path) -> int:
    """Bytes of all objects and temporaries at this moment."""
    paths = [
        f"{folder}/{name}"
        for folder, _, names in os.walk(root)
        for name in names
        if ".safetensors" in name
    ]
    seen: list[dict[str, tuple[int, int]]] = [{}, {}]
    # What is there twice was there between the two looks.
    for look in seen:
        for path in paths:
            with suppress(FileNotFoundError):
                found = os.lstat(path)
                look[path] = found.st_ino, found.st_size
    first, second = seen
    # A temporary that is linked has two names for a moment.
    sizes = dict(first[path] for path in second if first.get(path) == second[path])
    return sum(sizes.values())


def check_tier(root: Path) -> int:
    """Assert that all that is there is good; return the number of objects."""
    count = 0
    with open_shelf(root, read_only=True) as shelf:
        for found in shelf.objects():
            count += 1
            data = (root / found.name).read_bytes()
            assert len(data) == tier_child.FMT.object_size(found.parsed.shard)
    return count


@pytest.mark.real
def test_bound_holds_for_many_processes(tmp_path: Path) -> None:
    size = tier_child.FMT.object_size(0)
    most = 120 * size + 17
    child = run_child(tmp_path / "tier", max_bytes=most, writers=4, objects=50)
    highest = 0
    while child.poll() is None:
        highest = max(highest, used_bytes(tmp_path / "tier"))
        time.sleep(0.02)
    counts = json.loads(child.communicate()[0])
    assert child.returncode == 0
    assert all(counts), "a writer failed"
    written = sum(c["disk_tier_stored_bytes"] for c in counts)
    evicted = sum(c.get("disk_tier_evicted_bytes", 0) for c in counts)
    left = used_bytes(tmp_path / "tier")
    # They begin at the same moment, before they know how many they are.
    assert highest <= 1.1 * most
    assert left <= most
    assert left == check_tier(tmp_path / "tier") * size
    assert left >= 0.5 * most
    assert written == left + evicted
