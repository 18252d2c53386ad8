"""Stores and loads of caches on a device that runs behind the host, in every order CUDA allows.

What was enqueued on its streams happens later, those of different streams in random order. Copies
that did not wait for what they have to wait for bring wrong bytes here.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from kvshelf.errors import (
    ConfigError,
    DeviceStuckError,
    DeviceUnavailableError,
    UnsupportedError,
)
from kvshelf.kv import copier, device, ops
from kvshelf.kv.caches import HostKVCache, LayerCall, PendingCopy
from kvshelf.kv.copy_plan import CopyPlan
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import PagedLayout, PermutedLayout, permutation_bytes
from kvshelf.kv.states import StateLayer, split_state, state_runs
from tests.native.emulation import emulated
from tests.sim.device import SimulatedEvent, SimulatedStream, SimulatedStreams, on_a_device
from tests.support.paged import Paged, make_paged
from tests.support.paged_cases import Case
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.real

SHARDS, TOKENS = 2, 6
#: The caches of each group of layers.
FORMS = (("bhnc-nhd", torch.bfloat16), ("2bnhd", torch.float32))
SLOTS = torch.tensor([7, 3, 19, 0, 1, 12])


@dataclass
class Rig:
    """Caches of two layouts on a simulated device, and the bytes of a shard."""

    streams: SimulatedStreams
    paged: list[Paged]
    calls: list[LayerCall]
    cache: DeviceKVCache
    size: int

    def payloads(self) -> list[torch.Tensor]:
        return [torch.full((self.size,), 0xAB, dtype=torch.uint8) for _ in range(SHARDS)]

    def expected(self, slots: torch.Tensor = SLOTS) -> list[torch.Tensor]:
        """The payloads that the caches have now."""
        parts = [Case(paged, slots.tolist(), SHARDS, 0, 1).gathered() for paged in self.paged]
        return [torch.cat([part[shard] for part in parts]) for shard in range(SHARDS)]

    def overwrite(self, seed: int = 0) -> None:
        """Let the engine write other KV, on its stream, as a step does."""
        for number, paged in enumerate(self.paged):
            for memory in paged.memory:
                generator = torch.Generator().manual_seed(seed * 100 + number)
                shape, dtype = memory.shape, torch.uint8
                fresh = torch.randint(0, 256, shape, dtype=dtype, generator=generator)
                self.streams.do(memory.copy_, fresh)

    def gather(self, payloads: Sequence[torch.Tensor]) -> PendingCopy:
        copied = self.cache.gather(SLOTS, payloads)
        assert copied is not None
        return copied

    def store(self) -> list[torch.Tensor]:
        payloads = self.payloads()
        self.gather(payloads).wait()
        return payloads

    def load(self, payloads: Sequence[torch.Tensor], fence: object = None) -> None:
        self.cache.scatter_chunk(range(SHARDS), SLOTS, payloads, fence)

    @contextmanager
    def late(self, stream: SimulatedStream) -> Iterator[None]:
        """What is enqueued on a stream from here on does not happen meanwhile."""
        gate = SimulatedEvent(self.streams)
        gate.recorded = 1
        stream.wait_event(gate)
        yield
        with self.streams.changed:
            gate.reached = 1
            self.streams.changed.notify_all()


def make_rig(seed: int = 0, **options: Any) -> Rig:
    paged = [make_paged(form, dtype, blocks=5, seed=n) for n, (form, dtype) in enumerate(FORMS)]
    calls, start = [], 0
    for part in paged:
        end = start + len(part.caches) * part.layout.chunk_bytes(TOKENS, 1)
        calls.append(LayerCall(part.caches, part.layout, start, end, 1))
        start = end
    by_shard = {n: [replace(call, first_head=n) for call in calls] for n in range(SHARDS)}
    streams = SimulatedStreams(seed)
    options = {"buffer_bytes": 1 << 20} | options
    cache = DeviceKVCache(by_shard, streams=streams, **options)
    streams.log.clear()
    return Rig(streams, paged, calls, cache, start)


@pytest.fixture(params=["kernel", "torch"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with emulated() if request.param == "kernel" else nullcontext():
        made = make_rig()
        yield made
        made.cache.close()
        made.streams.close()


def check(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, want)


def in_background(work: Callable[..., object], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> None:
    thread.join(PATIENCE)
    assert not thread.is_alive()


# --- order ---------------------------------------------------------------------------


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20, 0], ids=["two buffers", "eight", "none"])
@pytest.mark.parametrize("seed", range(8))
def test_store_has_what_was_written_before_it_and_nothing_later(
    seed: int, buffer_bytes: int
) -> None:
    rig = make_rig(seed, buffer_bytes=buffer_bytes)
    stored: list[tuple[PendingCopy, list[torch.Tensor], list[torch.Tensor]]] = []
    expected: list[torch.Tensor] = []
    for step in range(12):
        rig.overwrite(step)
        rig.streams.do(lambda: expected.append(torch.stack(rig.expected())))
        payloads = rig.payloads()
        copied = rig.cache.gather(SLOTS, payloads)
        while copied is None and buffer_bytes:
            time.sleep(1e-4)
            copied = rig.cache.gather(SLOTS, payloads)
        assert copied is not None
        stored.append((copied, payloads, []))
    rig.overwrite(99)
    for step, (copied, payloads, _) in enumerate(stored):
        copied.wait()
        assert copied.done()
        check(payloads, list(expected[step]))
    rig.cache.close()
    rig.streams.close()


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20, 0], ids=["two buffers", "eight", "none"])
@pytest.mark.parametrize("seed", range(8))
def test_loads_of_many_threads_come_behind_the_work_before_their_fence(
    seed: int, buffer_bytes: int
) -> None:
    rig = make_rig(seed, buffer_bytes=buffer_bytes)
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:18].view(3, 6)
    payloads = [[p.random_(0, 256) for p in rig.payloads()] for _ in slots]
    wanted = [[payload.clone() for payload in given] for given in payloads]
    problems: list[BaseException] = []

    def load(of: torch.Tensor, given: list[torch.Tensor], fence: object) -> None:
        try:
            rig.cache.scatter_chunk(range(SHARDS), of.clone(), given, fence)
            # A load has ended when its bytes are in the blocks. Its payloads are others' now.
            check(rig.expected(of), given)
            for payload in given:
                payload.zero_()
        except BaseException as problem:  # noqa: BLE001 - for the test
            problems.append(problem)

    with rig.late(rig.streams.engine):
        rig.overwrite()
        fence = rig.cache.fence()
        threads = [in_background(load, *each, fence) for each in zip(slots, payloads, strict=True)]
        time.sleep(0.02)
    for thread in threads:
        ended(thread)
    assert not problems
    rig.streams.finish()
    for of, want in zip(slots, wanted, strict=True):
        check(rig.expected(of), want)
    rig.cache.close()
    rig.streams.close()


def test_load_waits_for_nothing_that_comes_behind_its_fence(rig: Rig) -> None:
    payloads = [p.random_(0, 256) for p in rig.payloads()]
    fence = rig.cache.fence()
    with rig.late(rig.streams.engine):
        rig.load(payloads, fence)
        check(rig.expected(), payloads)


def test_store_is_not_read_before_its_event(rig: Rig) -> None:
    payloads = rig.payloads()
    with rig.late(rig.cache._copier._beside):
        copied = rig.gather(payloads)
        waiting = in_background(copied.wait)
        until(lambda: rig.streams.copies["beside"] > 0)
        waiting.join(0.1)
        assert waiting.is_alive()
        assert not copied.done()
    ended(waiting)
    check(payloads, rig.expected())


def test_nothing_is_enqueued_for_the_host_before_a_gather_is_done(rig: Rig) -> None:
    with rig.late(rig.streams.engine):
        copied = rig.gather(rig.payloads())
        time.sleep(0.05)
        assert {stream for _, stream in rig.streams.log} == {"engine"}
    copied.wait()
    kinds = [kind for kind, stream in rig.streams.log if stream == "engine"]
    # The engine's stream waits for nothing but the test's gate.
    assert kinds == ["wait", *["work"] * len(FORMS), "record"]
    assert {stream for kind, stream in rig.streams.log if kind == "copy"} == {"beside"}


def test_store_that_has_arrived_does_not_wait_for_a_later_gather(rig: Rig) -> None:
    first = rig.gather(rig.payloads())
    with rig.late(rig.streams.engine):
        second = rig.gather(rig.payloads())
        first.wait()
        assert not second.done()
    second.wait()


def test_buffer_is_free_again_when_its_chunk_has_arrived(rig: Rig) -> None:
    room = rig.cache.room
    assert room == device.MOST_BUFFERS - device.LOAD_BUFFERS
    with rig.streams.hold():
        under_way = [rig.gather(rig.payloads()) for _ in range(room)]
        assert rig.cache.gather(SLOTS, rig.payloads()) is None
    for copied in under_way:
        copied.wait()
    check(rig.store(), rig.expected())
    # Also if nobody waits.
    del under_way, copied
    for _ in range(2 * room):
        until(lambda: rig.cache.gather(SLOTS, rig.payloads()) is not None)


def test_two_pieces_of_each_direction_are_under_way_at_most(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "PIECE_BYTES", rig.size // 5)
    payloads = rig.store()
    with rig.streams.hold():
        loads = [in_background(rig.load, payloads) for _ in range(2)]
        until(lambda: rig.streams.copies["urgent"] == copier.PIECES_UNDER_WAY)
    for load in loads:
        ended(load)
    check(rig.expected(), payloads)
    assert rig.streams.most_copies == dict.fromkeys(("beside", "urgent"), copier.PIECES_UNDER_WAY)


def test_engines_on_one_device_share_nothing() -> None:
    rigs = [make_rig(seed) for seed in range(2)]
    for rig in rigs:
        rig.overwrite(rigs.index(rig))
        check(rig.store(), rig.expected())
    rigs[0].cache.close()
    check(rigs[1].store(), rigs[1].expected())
    rigs[1].cache.close()


# --- what is copied ------------------------------------------------------------------


def place(rig: Rig, shard: int, slots: torch.Tensor, payload: torch.Tensor) -> list[torch.Tensor]:
    """What all memory must be after one shard's payload was scattered."""
    after = []
    for paged, call in zip(rig.paged, rig.calls, strict=True):
        case = Case(paged, slots.tolist(), 1, shard * call.heads, call.heads)
        after += case.scattered(payload[call.start : call.end].view(1, -1))
    return after


def memory_of(rig: Rig) -> list[torch.Tensor]:
    return [memory for paged in rig.paged for memory in paged.memory]


def test_one_shard_goes_to_the_slots_that_are_not_skipped(rig: Rig) -> None:
    slots = torch.tensor([19, -1, 0, 5, 6, 2])
    for shard in range(SHARDS):
        payload = torch.randint(0, 256, (rig.size,), dtype=torch.uint8)
        want = place(rig, shard, slots, payload)
        rig.cache.scatter(shard, slots, payload, rig.cache.fence())
        check(memory_of(rig), want)
    with pytest.raises(ValueError, match="are no neighbours among"):
        rig.cache.scatter_chunk([1, 0], slots, rig.payloads())


@pytest.mark.parametrize("tokens", range(1, TOKENS))
def test_tail_has_offsets_of_its_own(rig: Rig, tokens: int) -> None:
    tail, size = rig.cache.of_tail(tokens), rig.size // TOKENS * tokens
    payloads = [torch.full((size,), 0xAB, dtype=torch.uint8) for _ in range(SHARDS)]
    copied = tail.gather(SLOTS[:tokens], payloads)
    assert copied is not None
    copied.wait()
    check(payloads, rig.expected(SLOTS[:tokens]))
    calls = [call.of_tail(tokens) for call in rig.calls]
    slots = torch.tensor([19, 2, -1, 5, 6][:tokens])
    for shard, payload in enumerate(payloads):
        payload.random_(0, 256)
        want = place(replace(rig, calls=calls), shard, slots, payload)
        tail.scatter(shard, slots, payload)
        check(memory_of(rig), want)
    check(rig.store(), rig.expected())


@pytest.mark.parametrize("is_divided", [False, True])
def test_each_cache_group_has_slots_and_heads_of_its_own(is_divided: bool) -> None:
    parts = 2 if is_divided else 1
    forms = [
        (make_paged("mla", torch.bfloat16, blocks=5), [9, 2, 5]),
        (make_paged("bhnc-hnd", torch.float32, blocks=6, seed=7), SLOTS.tolist()),
    ]
    calls, start, first_slot = [], 0, len(SLOTS) + 3
    for paged, slots in forms:
        end = start + len(paged.caches) * paged.layout.chunk_bytes(len(slots), 1) * parts
        first_slot -= len(slots)
        places = {"parts": parts, "part": parts - 1, "first_slot": first_slot}
        calls.append(LayerCall(paged.caches, paged.layout, start, end, 1, **places))
        start = end
    cache, slots = on_a_device({0: calls}), torch.tensor([*SLOTS.tolist(), 9, 2, 5])
    payload = torch.randint(0, 256, (start,), dtype=torch.uint8)
    want = []
    for (paged, of_group), call in zip(forms, calls, strict=True):
        rows = payload[call.start : call.end].view(-1, parts, paged.layout.row_bytes)[:, parts - 1]
        want += Case(paged, of_group, 1, 0, 1).scattered(rows.reshape(1, -1))
    cache.scatter(0, slots, payload, cache.fence())
    check([memory for paged, _ in forms for memory in paged.memory], want)
    if not is_divided:
        gathered = torch.zeros_like(payload)
        copied = cache.gather(slots, [gathered])
        assert copied is not None
        copied.wait()
        assert torch.equal(gathered, payload)
    # The first slots are of caches with 24 slots, the others of caches with 20.
    for position, slot in ((2, 24), (len(SLOTS) + 1, 20)):
        bad = slots.clone()
        bad[position] = slot
        with pytest.raises(ValueError, match=f"is {slot}"):
            cache.scatter(0, bad, payload)
    cache.close()


def test_bad_arguments_are_refused_before_anything_is_enqueued(rig: Rig) -> None:
    payloads, bad = rig.payloads(), SLOTS.clone()
    bad[2] = 20
    twice = [payload.repeat_interleave(2)[::2] for payload in payloads]
    for slots, given, message in (
        (bad, payloads, r"slot_mapping\[2\] is 20"),
        (SLOTS, [payload[1:] for payload in payloads], r"expected contiguous uint8 \[\d+\]"),
        (SLOTS, twice, "expected contiguous uint8"),
        (SLOTS[:5], payloads, r"expected a contiguous int64 CPU tensor \[6\]"),
    ):
        with pytest.raises(ValueError, match=message):
            rig.cache.gather(slots, given)
        with pytest.raises(ValueError, match=message):
            rig.cache.scatter(0, slots, given[0])
    assert rig.streams.log == []


def test_states_of_all_layers_take_a_launch_for_each_group_and_layout() -> None:
    """A gated delta net has queries and keys, values, and the rest, in three layouts."""
    shards, layers, groups, blocks = 2, 36, 3, 4
    state = split_state("gdn_attn", [(3, 512), (4, 16, 16)], [torch.bfloat16] * 2, 1, False)
    memory = torch.randint(0, 256, (layers, blocks, state.nbytes), dtype=torch.uint8)
    runs, units = state_runs(
        [
            StateLayer(cache.view(torch.int8)[:, None, None], state, number % groups)
            for number, cache in enumerate(memory)
        ],
        shards,
    )
    sizes = [len(run.caches) * run.layout.chunk_bytes(run.layout.block_size, 1) for run in runs]
    ends = list(itertools.accumulate(sizes))
    calls = {
        shard: [
            LayerCall(run.caches, run.layout, end - size, end, 1, shard, first_slot=run.first_slot)
            for run, size, end in zip(runs, sizes, ends, strict=True)
        ]
        for shard in range(shards)
    }

    def slots(block: int) -> torch.Tensor:
        return torch.tensor([slot for of in units.values() for slot in of.of(block)])

    wanted = [torch.empty(ends[-1], dtype=torch.uint8) for _ in range(shards)]
    HostKVCache(calls).gather(slots(2), wanted)
    with emulated() as kernels:
        cache = on_a_device(calls)
        payloads = [torch.empty_like(payload) for payload in wanted]
        copied = cache.gather(slots(2), payloads)
        assert copied is not None
        copied.wait()
        check(payloads, wanted)
        expected = memory.clone()
        expected[:, 1] = expected[:, 2]
        cache.scatter_chunk(range(shards), slots(1), payloads, cache.fence())
        assert torch.equal(memory, expected)
        assert len(kernels.launches) == 2 * 3 * groups
        assert {launch.name for launch in kernels.launches} == {"gather_16", "scatter_16"}
        cache.close()


def test_less_aligned_layers_do_not_slow_others_down() -> None:
    """The second layer begins in the middle of a vector."""
    backing = torch.randint(0, 256, (2, 4 * 16 * 64 + 16), dtype=torch.uint8)
    caches = [backing[n, 8 * n :][: 4 * 16 * 64].view(4, 16, 64) for n in range(2)]
    layout = PagedLayout.from_mla(caches[0])
    size = layout.chunk_bytes(TOKENS)
    calls = [
        LayerCall([cache], layout, n * size, (n + 1) * size, 1) for n, cache in enumerate(caches)
    ]
    plan = CopyPlan.of({0: calls})
    assert [len(runs) for _, _, runs in plan.groups] == [2]


def test_shards_with_other_layers_are_launched_apart() -> None:
    paged = [make_paged("bhnc-nhd", torch.bfloat16, layers=n + 1, seed=n) for n in range(2)]
    calls = {}
    for shard in range(4):
        part = paged[shard // 2]
        size = len(part.caches) * part.layout.chunk_bytes(TOKENS, 1)
        calls[shard] = [LayerCall(part.caches, part.layout, 0, size, 1, first_head=shard % 2)]
    cache = on_a_device(calls)
    slots = SLOTS % 12
    payloads = [torch.zeros(of_shard[0].end, dtype=torch.uint8) for of_shard in calls.values()]
    copied = cache.gather(slots, payloads)
    assert copied is not None
    copied.wait()
    for n, part in enumerate(paged):
        want = Case(part, slots.tolist(), 2, 0, 1).gathered()
        check(payloads[2 * n : 2 * n + 2], list(want))
    cache.close()


def test_permuted_caches_are_refused() -> None:
    caches = [torch.zeros(4, 2, 4, 16, dtype=torch.int16)]
    positions = torch.arange(2 * 4 * 8).view(2, 4, 8).flip(1)
    layout = PermutedLayout(
        block_size=4,
        block_stride=caches[0].stride(0) * 2,
        head_stride=caches[0].stride(1) * 2,
        kv_planes=2,
        heads=2,
        head_size=8,
        item_bytes=2,
        num_blocks=4,
        permutation=permutation_bytes(positions),
    )
    with pytest.raises(UnsupportedError, match="permuted inside their blocks"):
        on_a_device({0: [LayerCall(caches, layout, 0, layout.chunk_bytes(4, 2), 2)]})


def test_copies_are_named_in_traces(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(device, "trace_range", lambda name: names.append(name) or nullcontext())
    rig.load(rig.store())
    assert names == ["kvshelf gather", "kvshelf scatter"]


def test_caches_made_in_a_step_serve_threads_outside_of_it() -> None:
    # As vLLM's workers run each of their steps.
    with torch.inference_mode():
        rig = make_rig()
        payloads = rig.store()
    ended(in_background(rig.load, payloads))
    rig.cache.close()
    rig.streams.close()


# --- memory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "free", "buffers"),
    [(256, 1 << 20, 64), (5, 1 << 20, 5), (1, 1 << 20, 2), (256, 4 * 6, 6), (256, 1, 2)],
)
def test_buffers_take_their_budget_and_a_quarter_of_free_memory_at_most(
    caplog: pytest.LogCaptureFixture, budget: int, free: int, buffers: int
) -> None:
    chunk = SHARDS * make_rig().size
    with mock.patch.object(SimulatedStreams, "free_bytes", return_value=free * chunk):
        rig = make_rig(buffer_bytes=budget * chunk)
    assert rig.cache.room == buffers - min(device.LOAD_BUFFERS, buffers // 2)
    assert ("free memory for only" in caplog.text) is (free < budget)
    rig.load(rig.store())
    rig.cache.close()


def test_buffers_are_used_behind_the_work_of_the_stream_that_made_them(rig: Rig) -> None:
    """Their memory may have been another tensor's, which that work still uses."""
    options: dict[str, Any] = {"buffer_bytes": 1 << 20, "streams": rig.streams}
    with rig.late(rig.streams.engine):
        making = in_background(lambda: DeviceKVCache(rig.cache._plan.calls, **options))
        making.join(0.1)
        assert making.is_alive()
    ended(making)


def test_device_without_memory_for_two_buffers_stops_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(CopyPlan, "allocate", short)
    with pytest.raises(ConfigError, match="no memory for 64 buffers"):
        make_rig()


def test_memory_that_is_short_for_once_does_not_end_the_use_of_a_device() -> None:
    rig = make_rig(buffer_bytes=0)
    short = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    for owner, name in ((CopyPlan, "allocate"), (CopyPlan, "enqueue")):
        with mock.patch.object(owner, name, short):
            assert rig.cache.gather(SLOTS, rig.payloads()) is None
            with pytest.raises(torch.OutOfMemoryError):
                rig.load(rig.payloads())
    assert rig.cache.problem == ""
    rig.load(rig.store())
    rig.cache.close()


# --- errors --------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["enqueue", "copy", "record", "event", "query"])
def test_failed_device_is_asked_nothing_more_and_one_line_says_so(
    rig: Rig, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    payloads = rig.store()
    fence = rig.cache.fence()
    rig.streams.faults = {what}
    with pytest.raises(DeviceUnavailableError, match=f"cpu failed: CUDA error: {what} failed"):
        rig.load(payloads, fence)
    rig.streams.finish()
    rig.streams.log.clear()
    for _ in range(2 * device.MOST_BUFFERS):
        for work in (rig.store, rig.cache.fence, lambda: rig.load(payloads)):
            with pytest.raises(DeviceUnavailableError, match=f"{what} failed"):
                work()
    assert not rig.streams.log
    assert rig.cache.problem == f"cpu failed: CUDA error: {what} failed"
    assert caplog.text.count("CUDA error") == 1
    rig.streams.faults.clear()


@pytest.mark.parametrize("what", ["enqueue", "copy", "record", "event"])
def test_error_that_the_device_does_not_repeat_costs_one_copy(
    rig: Rig, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    payloads = rig.store()
    for work in (rig.store, lambda: rig.load(payloads)):
        rig.streams.once = {what}
        with pytest.raises(DeviceUnavailableError, match=f"{what} failed"):
            work()
    # Each direction has all its buffers, and what was enqueued before the errors is done.
    for _ in range(2 * device.MOST_BUFFERS):
        rig.load(payloads)
        check(rig.store(), payloads)
    assert rig.cache.problem == ""
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "the device still works" in warnings[0].getMessage()


def test_payloads_of_a_store_that_failed_are_written_no_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "PIECE_BYTES", rig.size // 5)
    payloads = rig.payloads()
    with rig.streams.hold():
        copied = rig.gather(payloads)
    rig.streams.finish()
    until(lambda: rig.streams.copies["beside"] > 0 or copied.done())
    rig.streams.once = {"copy"}
    try:
        copied.wait()
    except DeviceUnavailableError:
        before = [payload.clone() for payload in payloads]
        rig.streams.finish()
        check(payloads, before)
    rig.streams.once.clear()


# --- a device that does not answer ----------------------------------------------------


def load_in_vain(rig: Rig, payloads: Sequence[torch.Tensor] = (), fence: object = None) -> None:
    with pytest.raises(DeviceUnavailableError):
        rig.load(payloads or rig.payloads(), fence)


def test_device_that_hangs_holds_up_no_sleep_and_no_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copier, "ANSWER_SECONDS", 0.1)
    payloads = rig.payloads()
    with rig.streams.hold():
        copied = rig.gather(payloads)
        load = in_background(load_in_vain, rig)
        with pytest.raises(DeviceStuckError):
            copied.wait(time.monotonic() + 0.05)
        # The memory is the device's as long as it may write there.
        assert not copied.done()
        until(lambda: bool(rig.cache.problem))
        assert "no answer for 0.1 s" in rig.cache.problem
        with pytest.raises(DeviceUnavailableError, match="no answer"):
            rig.gather(rig.payloads())
        begin = time.monotonic()
        rig.cache.pause(begin + 0.1)
        assert load.is_alive()
        rig.cache.close(begin + 0.2)
        ended(load)
        assert time.monotonic() - begin < PATIENCE / 2
        assert not copied.done()
        assert caplog.text.count("No chunks are stored") == 1


def test_device_that_answers_late_ends_its_copies(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "ANSWER_SECONDS", 0.05)
    payloads = rig.payloads()
    with rig.streams.hold():
        copied = rig.gather(payloads)
        until(lambda: bool(rig.cache.problem))
    copied.wait(time.monotonic() + PATIENCE)
    check(payloads, rig.expected())


def test_error_of_any_class_costs_one_copy(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    enqueue = rig.streams.enqueue

    def refuse(work: Callable[..., object], *arguments: Any) -> None:
        if getattr(work, "__name__", "") == "copy_":
            monkeypatch.setattr(rig.streams, "enqueue", enqueue)
            monkeypatch.setattr(copier, "ANSWER_SECONDS", 0.5)
            raise ValueError("no copy of this kind")
        enqueue(work, *arguments)

    monkeypatch.setattr(rig.streams, "enqueue", refuse)
    with pytest.raises(DeviceUnavailableError, match="no copy of this kind"):
        rig.store()
    check(rig.store(), rig.expected())


def test_threads_that_ask_the_device_end_no_capture_of_others(rig: Rig) -> None:
    rig.load(rig.store(), rig.cache.fence())
    assert not rig.streams.unrelaxed


# --- sleep, the end ------------------------------------------------------------------


@pytest.mark.parametrize("under_way", ["gather", "scatter"])
def test_while_the_engine_sleeps_nothing_is_begun(rig: Rig, under_way: str) -> None:
    payloads = rig.payloads()
    with rig.streams.hold():
        if under_way == "scatter":
            loading = in_background(rig.load, payloads)
            until(lambda: bool(rig.streams.log))
        else:
            rig.gather(payloads)
        pausing = in_background(rig.cache.pause)
        pausing.join(0.1)
        # What is under way reads or writes the caches until it has ended.
        assert pausing.is_alive()
    ended(pausing)
    if under_way == "scatter":
        ended(loading)
    rig.streams.log.clear()
    assert rig.cache.gather(SLOTS, payloads) is None
    with pytest.raises(DeviceUnavailableError, match="sleeps"):
        rig.load(payloads)
    assert not rig.streams.log
    # An engine that wakes up has its caches at other addresses.
    for number, paged in enumerate(rig.paged):
        awake = make_paged(*FORMS[number], blocks=5, seed=20 + number)
        paged.caches[:] = awake.caches
        rig.paged[number] = awake
    rig.cache.resume()
    check(rig.store(), rig.expected())
    rig.load(rig.payloads())
    check(rig.expected(), rig.payloads())


@pytest.mark.parametrize("end", ["pause", "close"])
def test_load_whose_fence_is_reached_after_the_end_writes_nothing(rig: Rig, end: str) -> None:
    expected, payloads = rig.expected(), [p.random_(0, 256) for p in rig.payloads()]
    with rig.late(rig.streams.engine):
        loading = in_background(load_in_vain, rig, payloads, rig.cache.fence())
        until(lambda: ("copy", "urgent") in rig.streams.log)
        getattr(rig.cache, end)(time.monotonic() + 0.05)
    ended(loading)
    rig.streams.finish()
    check(rig.expected(), expected)


def test_load_under_way_at_the_deadline_of_a_pause_ends_before_the_pause(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_REFUSE_SECONDS", PATIENCE)
    with rig.streams.hold():
        loading = in_background(rig.load, rig.payloads())
        until(lambda: ("work", "urgent") in rig.streams.log)
        pausing = in_background(rig.cache.pause, time.monotonic())
        pausing.join(0.1)
        # The scatter still writes to the caches.
        assert pausing.is_alive()
    ended(pausing)
    ended(loading)


def test_after_the_end_nothing_is_begun(rig: Rig) -> None:
    rig.gather(rig.payloads())
    rig.cache.close()
    rig.cache.resume()
    assert rig.cache.gather(SLOTS, rig.payloads()) is None
    with pytest.raises(DeviceUnavailableError, match="has released them"):
        rig.load(rig.payloads())


def test_caches_that_nobody_closes_end_with_their_copies() -> None:
    rig = make_rig()
    payloads, expected = rig.payloads(), rig.expected()
    streams = rig.streams
    with streams.hold():
        rig.gather(payloads)
        thread, buffers = rig.cache._copier._thread, rig.cache._copier._stores
        assert thread is not None
        assert buffers is not None
        buffer = weakref.ref(buffers[0])
        del rig, buffers
        gc.collect()
        assert thread.is_alive()
    ended(thread)
    check(payloads, expected)
    gc.collect()
    assert buffer() is None
    streams.close()


def test_no_thread_for_copies_refuses_stores(rig: Rig) -> None:
    with mock.patch.object(copier, "try_to_start", return_value=False):
        assert rig.cache.gather(SLOTS, rig.payloads()) is None
    check(rig.store(), rig.expected())
    assert ops.implementation() in ("cpp", "torch")
