"""What a worker promises to other engines: hand-overs, their markers, and tails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")


from kvshelf.backends.posix import PosixBackend
from kvshelf.capacity.walk import Walk
from kvshelf.errors import TransientStorageError
from kvshelf.format.keys import Chunk
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from kvshelf.vllm.metadata import (
    AdapterContent,
    LoadOp,
    StepMetadata,
    StoreOp,
)
from tests.sim.storage import Fault
from tests.support.prompts import make_tail
from tests.support.waiting import until
from tests.vllm.rig import next_number
from tests.vllm.worker_rig import CHUNK, WorkerRig, store_op

# ------------------------------------------------------------------------- hand-overs


ATTEMPT, OTHER = "a" * 32, "b" * 32


def promised(chunk: Chunk, blocks: Sequence[int] = (1, 2), **options: Any) -> StoreOp:
    return store_op(chunk, blocks, **{"attempt": ATTEMPT, **options})


def gave_up(rig: WorkerRig, *attempts: str) -> list[bool]:
    view = Shelf(rig.backend.inner).view(rig.fmt)
    return view.gave_up(list(attempts or (ATTEMPT,)))


def test_what_others_wait_for_is_gathered_and_published_first(
    make_worker: Callable[..., WorkerRig],
) -> None:
    rig = make_worker()
    chunks = rig.chunks(1) + rig.chunks(1, 1) + rig.chunks(1, 2)
    ops = [store_op(chunk) for chunk in chunks[:2]]
    names: list[str] = []
    gate = threading.Event()
    rig.backend.add(Fault("write", "*.safetensors", wait=gate))
    write = rig.backend.inner.write
    rig.backend.inner.write = lambda name, *args: (names.append(name), write(name, *args))[1]  # type: ignore[method-assign]
    rig.step(StepMetadata(stores=[*ops, promised(chunks[2])]))
    gate.set()
    rig.drain()
    keys = [name.rpartition("/")[2][:64] for name in names if name.endswith(".safetensors")]
    assert keys[0] == chunks[2].key.hex()
    assert gave_up(rig) == [False]
    assert rig.counts.get("promises_broken") is None


def _unserved(rig: WorkerRig, op: StoreOp) -> None:
    rig.connector.weights_changed()


def _of_other_weights(rig: WorkerRig, op: StoreOp) -> None:
    object.__setattr__(op, "round", 7)


def _without_a_block(rig: WorkerRig, op: StoreOp) -> None:
    object.__setattr__(op, "block_ids", ([0, 2],))


def _of_an_unknown_adapter(rig: WorkerRig, op: StoreOp) -> None:
    object.__setattr__(op, "adapter", AdapterContent(3, b"x" * 32))


def _outside_the_cache(rig: WorkerRig, op: StoreOp) -> None:
    object.__setattr__(op, "block_ids", ([10**6, 2],))


def _onto_a_broken_storage(rig: WorkerRig, op: StoreOp) -> None:
    rig.backend.add(Fault("write", "*.safetensors", error=TransientStorageError("broken")))


@pytest.mark.parametrize(
    "happens",
    [
        _unserved,
        _of_other_weights,
        _without_a_block,
        _of_an_unknown_adapter,
        _outside_the_cache,
        _onto_a_broken_storage,
    ],
)
def test_a_chunk_that_is_not_stored_breaks_its_promise(
    make_worker: Callable[..., WorkerRig], happens: Callable[[WorkerRig, StoreOp], None]
) -> None:
    rig = make_worker()
    (chunk,) = rig.chunks(1)
    op = promised(chunk)
    happens(rig, op)
    rig.step(StepMetadata(stores=[op]))
    until(lambda: gave_up(rig) == [True])
    until(lambda: rig.counts.get("promises_broken") == 1)


def test_a_forward_pass_that_fails_stores_nothing_and_breaks_promises(
    make_worker: Callable[..., WorkerRig],
) -> None:
    rig = make_worker()
    (chunk,), (other,) = rig.chunks(1), rig.chunks(1, 1)
    worker = rig.connector
    worker.bind_connector_metadata(StepMetadata(stores=[promised(chunk), store_op(other)]))

    def step() -> None:
        try:
            raise RuntimeError("the forward pass failed")
        finally:
            worker.wait_for_save()

    with pytest.raises(RuntimeError, match="the forward pass failed"):
        step()
    worker.wait_for_save()
    worker.clear_connector_metadata()
    until(lambda: gave_up(rig) == [True])
    rig.drain()
    assert "stored_chunks" not in rig.counts


def test_the_promises_after_an_error_are_broken_too(make_worker: Callable[..., WorkerRig]) -> None:
    rig = make_worker()
    one, two = promised(rig.chunks(1)[0], [10**6, 2]), promised(rig.chunks(1, 1)[0])
    object.__setattr__(two, "attempt", OTHER)
    rig.step(StepMetadata(stores=[one, two]))
    until(lambda: gave_up(rig, ATTEMPT, OTHER) == [True, True])


@pytest.mark.parametrize("keep", [3600.0, 0.0])
def test_tails_are_looked_for_from_the_first_hand_over_on(
    make_worker: Callable[..., WorkerRig], monkeypatch: pytest.MonkeyPatch, keep: float
) -> None:
    keeps: list[float | None] = []
    begun: list[Walk] = []
    closed: list[Walk] = []
    create, close = Walk.__init__, Walk.close

    def note(walk: Walk, *args: Any, **options: Any) -> None:
        keeps.append(options["keep"])
        create(walk, *args, **options)

    monkeypatch.setattr(Walk, "__init__", note)
    monkeypatch.setattr(Walk, "begin", lambda walk, view: begun.append(walk))
    monkeypatch.setattr(Walk, "close", lambda walk: (closed.append(walk), close(walk)))
    rig = make_worker(handover_keep_s=keep)
    chunks = rig.chunks(2)
    rig.store(chunks[:1])
    assert (keeps, begun) == ([keep or None], [])
    rig.step(StepMetadata(stores=[promised(chunks[1])]))
    assert len(begun) == 1
    rig.connector.shutdown()
    assert set(closed) == set(begun)


def test_the_use_of_a_tail_that_is_loaded_is_recorded(
    make_worker: Callable[..., WorkerRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(PosixBackend, "touch", lambda _, name: names.append(name))
    rig = make_worker(cache_tails=True)
    (chunk,), tail = rig.chunks(1), make_tail(rig.fmt)
    rig.store([chunk, tail])
    rig.load(LoadOp(next_number(), "r", 0, CHUNK + tail.tokens, [chunk, tail], ([1, 2, 3],)))
    shards = range(rig.fmt.shards)
    view = Shelf(rig.backend).view(rig.fmt)
    until(lambda: names == [view.name(ObjectRef(tail, shard)) for shard in shards])


def test_shutting_down_says_which_hand_overs_are_lost(
    make_worker: Callable[..., WorkerRig],
) -> None:
    """Of what is queued and of what is on its way, though the storage does not end a write."""
    rig = make_worker(shutdown_drain_s=1.0)
    gate = threading.Event()
    rig.backend.add(Fault("write", "*.safetensors", wait=gate))
    ops = [promised(rig.chunks(1, seed)[0]) for seed in range(4)]
    attempts = [f"{number:032x}" for number in range(4)]
    for op, attempt in zip(ops, attempts, strict=True):
        object.__setattr__(op, "attempt", attempt)
    ordinary = store_op(rig.chunks(1, 9)[0])
    rig.step(StepMetadata(stores=[ordinary, *ops]))
    rig.connector.shutdown()
    assert gave_up(rig, *attempts) == [True] * 4
    gate.set()
    assert rig.counts["promises_broken"] == 4


@pytest.mark.slow
def test_a_worker_that_is_told_to_end_publishes_what_others_wait_for(tmp_path: Path) -> None:
    """A process of its own, which ends as vLLM's workers do."""
    program = Path(__file__).with_name("promises_child.py")
    child = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "shelf")],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout.splitlines()[-1])
    shelf = tmp_path / "shelf"
    found = {path.name[:64] for path in shelf.rglob("*.safetensors")}
    # Each write takes a while: there was time for some of them, the promised ones first.
    assert set(report["promised"]) <= found
    assert not set(report["ordinary"]) <= found
    assert not list(shelf.rglob("gave-up/*"))
