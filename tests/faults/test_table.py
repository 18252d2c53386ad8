"""Every fault on every kind of storage that knows it: see the table at the end of the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from logging import INFO
from pathlib import Path

import pytest

from kvshelf.errors import KVShelfError, UnavailableStorageError
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from tests.faults.cells import (
    BUCKET_FAULTS,
    CELLS,
    DEADLINE,
    LIMIT,
    RECOVERY,
    STALE,
    EngineStandIn,
    MountedStorage,
    Prompt,
    Storage,
    bad_objects,
    check_whole,
    damage,
    eventually,
    make_old,
    make_prompt,
    within,
)
from tests.faults.faultfs import FaultMount
from tests.support.formats import make_format
from tests.support.servers import SECRET
from tests.support.waiting import until

FMT = make_format()


#: Storages on this machine, in real time.
REAL = [pytest.mark.slow, pytest.mark.real]


def loads_all(engine: EngineStandIn, *prompts: Prompt) -> Callable[[], bool]:
    """Serve prompts (which stores what is missing); whether all of each was loaded."""
    return lambda: all(engine.answer(prompt) == len(prompt.chunks) for prompt in prompts)


def deletes(shelf: Shelf, name: str) -> Callable[[], bool]:
    """Delete an object; whether the storage takes changes again."""

    def delete() -> bool:
        try:
            assert shelf.delete(name)
        except UnavailableStorageError:
            return False
        return True

    return delete


def check_report(fault: str, engine: EngineStandIn, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody who looks at metrics and log learns of the trouble, and is not flooded."""

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno > INFO]

    def is_told() -> bool:
        found = engine.rig.counters.snapshot()
        return bool(lines()) and any(found.get(name) for name in wanted)

    _, wanted = BUCKET_FAULTS[fault]
    if wanted:
        # Clients try again for a while by themselves.
        until(is_told)
    assert len(lines()) < 12, "one line for each object at most"
    assert not [line for line in lines() if SECRET in line or "\n" in line]


@pytest.mark.parametrize(
    ("fault", "moment", "backend"),
    [pytest.param(*cell, marks=() if cell[2] == "posix" else REAL) for cell in CELLS],
)
def test_cell(
    fault: str,
    moment: str,
    storage: Storage,
    backend: str,
    note_cell: Callable[..., None],
    record_property: Callable[[str, object], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    note_cell(fault, moment, backend)
    known, new, victim = (make_prompt(FMT, seed) for seed in range(3))
    with closing(EngineStandIn(storage.backend, deadline=storage.deadline)) as engine:
        for prompt in (known, victim):
            assert engine.answer(prompt) == 0
            # At once, but for a machine so busy that a deadline is missed.
            eventually(loads_all(engine, prompt))
        spoilt = engine.rig.shelf.view(FMT).name(ObjectRef(victim.chunks[1], 0))
        doomed = engine.rig.shelf.view(FMT).name(ObjectRef(victim.chunks[2], 0))
        damage(storage.plain, spoilt, lambda data: data.reverse(), old=True)
    with closing(EngineStandIn(storage.backend, deadline=storage.deadline)) as engine:
        if moment != "list":
            eventually(loads_all(engine, known))

        caplog.clear()
        storage.make_trouble(fault, moment)
        engine.patience = DEADLINE / 4
        engine.answer(known)
        engine.answer(new)
        engine.answer(victim)
        engine.answer(new)
        shelf = engine.rig.shelf
        threads: list[threading.Thread] = []
        for call in (lambda: list(shelf.objects()), lambda: shelf.delete(doomed)):
            result = within(DEADLINE, call, threads)
            assert not isinstance(result, BaseException) or isinstance(result, KVShelfError)

        def is_met() -> bool:
            if not storage.met():
                # On a busy machine nothing got so far before it was given up.
                for prompt in (known, new, victim):
                    engine.answer(prompt)
            return storage.met() > 0

        until(is_met, "the fault is met")
        record_property("met", storage.met())
        engine.check_blocks()
        if backend == "s3":
            check_report(fault, engine, caplog)
        if fault != "flipped bit":
            # What is read as damaged, again and again, is moved aside as it should.
            assert list(bad_objects(storage.plain, FMT, [known])) == []

        storage.heal()
        engine.be_patient()
        for thread in threads:
            # A delete that goes on would delete what is stored again.
            thread.join(RECOVERY)
        eventually(loads_all(engine, known, new, victim))
        check_whole(storage.plain, FMT, [known, new, victim])
        eventually(deletes(shelf, doomed))
        eventually(loads_all(engine, victim))
        engine.check_blocks()


# --------------------------------------------------------------------------------- truncated files


#: Bytes of which an object is cut.
CUTS = [
    *((size, "posix") for size in (0, 9, FMT.data_offset, FMT.object_size(0) - 1)),
    *(pytest.param(4500, backend, marks=REAL) for backend in ("fuse", "s3")),
]


def cut_to(size: int) -> Callable[[bytearray], object]:
    return lambda data: data.__delitem__(slice(size, None))


@pytest.mark.parametrize(("size", "backend"), CUTS)
def test_truncated_objects_are_misses_and_replaced(
    size: int, storage: Storage, backend: str, note_cell: Callable[..., None]
) -> None:
    note_cell("truncated", "read", backend)
    prompt = make_prompt(FMT, 0)
    with closing(EngineStandIn(storage.backend, deadline=LIMIT)) as engine:
        engine.answer(prompt)
        for old in (True, False):
            name = engine.rig.shelf.view(FMT).name(ObjectRef(prompt.chunks[1], int(old)))
            damage(storage.plain, name, cut_to(size), old=old)
            # The truncated object is not even found; one truncated behind the look-up's back
            # is a failed load of that chunk.
            items = engine.rig.items(prompt.chunks, 0)
            assert engine._load(items) == 1
            assert engine.answer(prompt) == 1
            eventually(loads_all(engine, prompt))
        assert list(bad_objects(storage.plain, FMT, [prompt])) == []


@pytest.mark.parametrize(("size", "backend"), CUTS)
def test_writes_of_which_a_part_is_lost(
    size: int, storage: Storage, backend: str, note_cell: Callable[..., None]
) -> None:
    note_cell("truncated", "write", backend)
    prompt = make_prompt(FMT, 0)
    with closing(EngineStandIn(storage.backend, deadline=LIMIT)) as engine:
        storage.lose_behind(size)
        for _ in range(3):
            assert engine.answer(prompt) == 0
        assert storage.met()
        if backend == "fuse":
            # The size check before publishing has noticed.
            assert [info for info in storage.plain.list() if info.name.endswith("tensors")] == []
        storage.heal()
        eventually(loads_all(engine, prompt))
        check_whole(storage.plain, FMT, [prompt])


# --------------------------------------------------------------------------------- caches that lie


@pytest.fixture(scope="module")
def forgetful(mounts: Callable[..., FaultMount]) -> FaultMount:
    """A mount whose kernel asks for names and attributes once, and believes them for an hour."""
    return mounts(cache_seconds=3600.0)


@pytest.fixture
def outdated(
    forgetful: FaultMount, short_pauses: None
) -> Iterator[tuple[MountedStorage, EngineStandIn, Prompt]]:
    """A prompt whose second chunk was too short, was seen so, and was replaced by a good one."""
    storage = MountedStorage(forgetful)
    prompt = make_prompt(FMT, 0)
    with closing(EngineStandIn(storage.plain)) as engine:
        engine.answer(prompt)
        name = engine.rig.shelf.view(FMT).name(ObjectRef(prompt.chunks[1], 0))
    good = Path(storage.plain.url, name).read_bytes()
    damage(storage.plain, name, cut_to(4500), old=True)
    assert storage.backend.stat([name]) == [4500]
    storage.plain.write(name, [good], "replace")
    make_old(storage.plain, name)
    assert storage.backend.stat([name]) == [4500], "the cache tells the truth"
    with closing(EngineStandIn(storage.backend, deadline=storage.deadline)) as engine:
        yield storage, engine, prompt
    storage.heal()
    storage.close()


def test_a_size_from_an_outdated_cache_moves_no_object(
    outdated: tuple[MountedStorage, EngineStandIn, Prompt], note_cell: Callable[..., None]
) -> None:
    note_cell(STALE, "read", "fuse")
    storage, engine, prompt = outdated
    assert engine._load(engine.rig.items(prompt.chunks, 0)) == 1
    assert list(bad_objects(storage.plain, FMT, [prompt])) == []
    engine.answer(prompt)
    eventually(loads_all(engine, prompt))


def test_an_object_behind_an_outdated_cache_survives_a_store_that_fails(
    outdated: tuple[MountedStorage, EngineStandIn, Prompt], note_cell: Callable[..., None]
) -> None:
    note_cell(STALE, "write", "fuse")
    storage, engine, prompt = outdated
    storage.make_trouble("ENOSPC", "write")
    assert engine.answer(prompt) == 1
    assert storage.met()
    assert list(bad_objects(storage.plain, FMT, [prompt])) == []
    storage.heal()
    eventually(loads_all(engine, prompt))
    assert list(bad_objects(storage.plain, FMT, [prompt])) == []
