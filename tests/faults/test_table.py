"""Every fault at every moment on every kind of storage: see the table at the end of the run."""

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
    BACKENDS,
    CLOCKS,
    DAMAGES,
    DEADLINE,
    LIMIT,
    MOMENTS,
    MOUNTS,
    RECOVERY,
    STALE,
    WRONG_BYTES,
    WRONG_LENGTH,
    EngineStandIn,
    MountedStorage,
    Prompt,
    Storage,
    bad_objects,
    check_whole,
    damage,
    eventually,
    faults_of,
    make_old,
    make_prompt,
    why_no_cell_of_a_mount,
    why_not_a_cell,
    within,
)
from tests.faults.faultfs import FaultMount
from tests.support.formats import make_format, sealed
from tests.support.servers import SECRET
from tests.support.waiting import until

FMT = make_format()


def rows_of(backend: str) -> tuple[str, ...]:
    """Return the rows of the table for a kind of storage."""
    own = () if backend == "s3" else (STALE, "frozen")
    mounts = (*MOUNTS, *CLOCKS) if backend == "fuse" else ()
    return (*faults_of(backend), "truncated", *own, *mounts)


def why_no_cell(fault: str, moment: str, backend: str) -> str | None:
    """Give the reason why the table has no such cell, or None."""
    if fault == "truncated":
        return None if moment in ("read", "write") else "no bytes of an object move at this moment"
    if fault == STALE:
        if backend != "fuse":
            return "no cache between the backend and its storage"
        return None if moment in ("read", "write") else "the sizes seen matter to loads and stores"
    if fault == "frozen":
        if backend != "fuse":
            return "no filesystem's process that could be stopped"
        return None if moment == "probe" else "a stopped filesystem answers no probe already"
    if fault in (*MOUNTS, *CLOCKS):
        return why_no_cell_of_a_mount(fault, moment)
    return why_not_a_cell(fault, moment, backend)


#: Storages on this machine, in real time.
REAL = [pytest.mark.slow, pytest.mark.real]
CELLS = [
    pytest.param(fault, moment, backend, marks=REAL if backend != "posix" else ())
    for backend in BACKENDS
    for fault in faults_of(backend)
    for moment in MOMENTS
    if why_no_cell(fault, moment, backend) is None
]


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


def counters_of(fault: str, moment: str) -> tuple[str, ...]:
    """Return the counters of which one tells of trouble with a bucket; none where it is a miss."""
    if moment == "probe":
        return () if fault in ("404", WRONG_LENGTH) else ("probe_errors", "late_calls")
    if moment == "read":
        if fault == "404":
            return ("load_failures_missing",)
        if fault == WRONG_LENGTH:
            # A client that asks for the size first cannot tell it from an object just replaced.
            return ("load_failures_bad", "load_failures_error")
        return (
            ("load_failures_bad",)
            if fault == WRONG_BYTES
            else ("load_failures_error", "load_failures_timeout")
        )
    if moment == "write" and fault in (WRONG_LENGTH, WRONG_BYTES):
        # What was damaged on its way is noticed by who loads it.
        return ("load_failures_bad", "repaired_objects")
    if moment in ("write", "publish"):
        return () if fault == "412" else ("dropped_chunks_error", "late_calls")
    return ()


def check_report(
    fault: str, moment: str, engine: EngineStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody who looks at metrics and log learns of the trouble, and is not flooded."""

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno > INFO]

    def is_told() -> bool:
        found = engine.rig.counters.snapshot()
        return bool(lines()) and any(found.get(name) for name in wanted)

    wanted = counters_of(fault, moment)
    if wanted:
        # Clients try again for a while by themselves.
        until(is_told)
    assert len(lines()) < 12, "one line for each object at most"
    assert not [line for line in lines() if SECRET in line or "\n" in line]


@pytest.mark.parametrize(("fault", "moment", "backend"), CELLS)
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
            check_report(fault, moment, engine, caplog)
        if fault not in DAMAGES or fault.endswith("once") or moment != "read":
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


def boundaries() -> dict[str, int]:
    """Where an object can be cut: at every boundary of its parts, and next to it."""
    chunk = make_prompt(FMT, 0).chunks[0]
    image = sealed(FMT, chunk)
    header_end = 8 + len(bytes(image[8 : FMT.data_offset]).rstrip())
    found = {"empty": 0, "header length": 8, "header": header_end, "data offset": FMT.data_offset}
    for number, spec in enumerate(FMT.tensors(0)[:-1]):
        found[f"tensor {number}"] = FMT.data_offset + spec.offset + spec.nbytes
    near = {"last byte": len(image) - 1, "half": len(image) // 2}
    for name, at in found.items():
        near[f"{name} + 1"] = at + 1
        if at:
            near[f"{name} - 1"] = at - 1
    return found | near


BOUNDARIES = boundaries()
#: All of them in a directory, and one on each other kind of storage.
CUTS = [
    *((boundary, "posix") for boundary in BOUNDARIES),
    *(pytest.param("half", backend, marks=REAL) for backend in BACKENDS if backend != "posix"),
]


def cut_to(size: int) -> Callable[[bytearray], object]:
    return lambda data: data.__delitem__(slice(size, None))


@pytest.mark.parametrize(("boundary", "backend"), CUTS)
def test_truncated_objects_are_misses_and_replaced(
    boundary: str, storage: Storage, backend: str, note_cell: Callable[..., None]
) -> None:
    note_cell("truncated", "read", backend)
    prompt = make_prompt(FMT, 0)
    with closing(EngineStandIn(storage.backend, deadline=LIMIT)) as engine:
        engine.answer(prompt)
        for old in (True, False):
            name = engine.rig.shelf.view(FMT).name(ObjectRef(prompt.chunks[1], int(old)))
            damage(storage.plain, name, cut_to(BOUNDARIES[boundary]), old=old)
            # The truncated object is not even found; one truncated behind the look-up's back
            # is a failed load of that chunk.
            items = engine.rig.items(prompt.chunks, 0)
            assert engine._load(items) == 1
            assert engine.answer(prompt) == 1
            eventually(loads_all(engine, prompt))
        assert list(bad_objects(storage.plain, FMT, [prompt])) == []


@pytest.mark.parametrize(("boundary", "backend"), CUTS)
def test_writes_of_which_a_part_is_lost(
    boundary: str, storage: Storage, backend: str, note_cell: Callable[..., None]
) -> None:
    note_cell("truncated", "write", backend)
    prompt = make_prompt(FMT, 0)
    size = BOUNDARIES[boundary]
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


# ------------------------------------------------------------------------------ stopped filesystems


@pytest.mark.real
@pytest.mark.parametrize("then", ["goes on", "is killed and mounted again"])
@pytest.mark.parametrize("backend", ["fuse"])
def test_frozen(
    then: str, storage: MountedStorage, backend: str, note_cell: Callable[..., None]
) -> None:
    note_cell("frozen", "probe", backend)
    known, new = make_prompt(FMT, 0), make_prompt(FMT, 1)
    with closing(EngineStandIn(storage.backend, deadline=storage.deadline)) as engine:
        engine.answer(known)
        storage.mount.freeze()
        try:
            engine.patience = DEADLINE / 4
            for _ in range(3):
                assert engine.answer(known) == engine.answer(new) == 0
        finally:
            if then == "goes on":
                storage.mount.thaw()
            else:
                storage.mount.revive()
        engine.be_patient()
        eventually(loads_all(engine, known, new))
        engine.check_blocks()
    assert list(bad_objects(storage.plain, FMT, [known, new])) == []
