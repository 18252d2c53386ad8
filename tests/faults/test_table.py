"""Every fault on every kind of storage that knows it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from logging import INFO
from pathlib import Path

import pytest

from kvshelf.backends import open_backend
from kvshelf.errors import KVShelfError, UnavailableStorageError
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from tests.faults.cells import (
    BUCKET_FAULTS,
    CELLS,
    DEADLINE,
    RECOVERY,
    EngineStandIn,
    MountedStorage,
    Prompt,
    Storage,
    bad_objects,
    check_whole,
    damage,
    eventually,
    make_prompt,
    within,
)
from tests.faults.faultfs import mounted
from tests.support.formats import make_format
from tests.support.servers import SECRET
from tests.support.waiting import until

pytestmark = [pytest.mark.real, pytest.mark.slow]

FMT = make_format()


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


@pytest.mark.parametrize(("fault", "moment", "backend"), CELLS)
def test_cell(
    fault: str,
    moment: str,
    storage: Storage,
    backend: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    known, new, victim = (make_prompt(FMT, seed) for seed in range(3))
    with closing(EngineStandIn(storage.backend, deadline=storage.deadline)) as engine:
        for prompt in (known, victim):
            assert engine.answer(prompt) == 0
            # At once, but for a machine so busy that a deadline is missed.
            eventually(loads_all(engine, prompt))
        spoilt = engine.rig.shelf.view(FMT).name(ObjectRef(victim.chunks[1], 0))
        doomed = engine.rig.shelf.view(FMT).name(ObjectRef(victim.chunks[2], 0))
        damage(storage.plain, spoilt, lambda data: data.reverse())
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


def check_that_nothing_is_stored(engine: EngineStandIn, place: Path) -> None:
    """Serve prompts as without a shelf, and say why; leave what is at `place` alone."""
    known, new = make_prompt(FMT, 0), make_prompt(FMT, 1)
    engine.patience = DEADLINE / 4
    for _ in range(3):
        assert engine.answer(known) == engine.answer(new) == 0
    for call in (
        lambda: engine.backend.write("a/x", [b"1"]),
        lambda: list(engine.backend.list()),
        engine.backend.space,
    ):
        with pytest.raises(UnavailableStorageError, match="another filesystem is at the root"):
            call()
    assert list(place.iterdir()) == []
    guard = engine.rig.guard

    def rests() -> bool:
        guard.stat(["a/x"])
        return not guard.reads.is_closed

    eventually(rests)
    engine.be_patient()


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_unmounted_shelf_is_not_stored_on_the_disk_beneath(
    tmp_path: Path,
    create: bool,
    inside: bool,
    short_pauses: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    known, new = make_prompt(FMT, 0), make_prompt(FMT, 1)
    with mounted(tmp_path) as mount:
        root = mount.path / "shelf" if inside else mount.path
        root.mkdir(exist_ok=True)
        backend = open_backend(root, storage_options={"create": create})
        with closing(EngineStandIn(backend)) as engine:
            engine.answer(known)
            eventually(loads_all(engine, known))
            mount.kill()
            mount.unmount()
            check_that_nothing_is_stored(engine, mount.path)
            said = [line for line in caplog.messages if "another filesystem is at the root" in line]
            assert 1 <= len(said) <= 4, "a line when a breaker opens, and none for each object"
            mount.mount()
            eventually(loads_all(engine, known, new))


@pytest.mark.parametrize("backend", ["fuse"])
def test_object_whose_bytes_change_while_it_is_read_is_never_wrong(
    storage: MountedStorage, backend: str
) -> None:
    """A foreign program writes it in place, good and bad in turn."""
    prompt = make_prompt(FMT, 0)
    with closing(EngineStandIn(storage.backend)) as engine:
        engine.answer(prompt)
        path = min(Path(storage.plain.url).rglob("*.safetensors"))
        good = path.read_bytes()
        bad = good[:4096] + bytes(reversed(good[4096:]))
        stop = threading.Event()
        turns = [0]

        def alternate() -> None:
            while not stop.is_set():
                for body in (bad, good):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(body)
                turns[0] += 1

        writer = threading.Thread(target=alternate, daemon=True)
        writer.start()
        try:
            for _ in range(60):
                engine.answer(prompt)
        finally:
            until(lambda: turns[0] > 10)
            stop.set()
            writer.join()
        eventually(loads_all(engine, prompt))
        engine.check_blocks()
