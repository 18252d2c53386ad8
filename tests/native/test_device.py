"""The path between caches on a device and host memory, on a device that is not there.

The caches, the device buffers and the kernels are emulated on the host; streams are simulated: the
test decides when what was enqueued has ended. What both copiers promise is tested with both: the
compiled library's, and the one for devices that the library has no kernels for.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import ConfigError, DeviceUnavailableError
from kvshelf.kv import device, ops
from kvshelf.kv.caches import HostKVCache, KVMemory, LayerCall, PendingCopy
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.native_copier import NativeCopier
from kvshelf.kv.states import StateLayer, split_state, state_runs
from tests.native.emulation import emulation
from tests.native.fake_streams import AtOnce, FakeEvent, FakeStreams
from tests.native.paged import Case
from tests.native.simulated_device import SimulatedStreams
from tests.support.paged import Paged, make_paged
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.real

SHARDS, TOKENS = 2, 6
#: The caches of each group of layers.
FORMS = (("bhnc-nhd", torch.bfloat16), ("2bnhd", torch.float32))
#: How long one direction's copies may keep the copy engine from others.
QUEUED_SECONDS = 0.2e-3


@dataclass
class Rig:
    paged: list[Paged]
    calls: list[LayerCall]
    streams: FakeStreams
    path: DeviceKVCache
    size: int

    def payloads(self) -> list[torch.Tensor]:
        return [torch.full((self.size,), 0xAB, dtype=torch.uint8) for _ in range(SHARDS)]

    def expected(self, slots: list[int]) -> list[torch.Tensor]:
        parts = [Case(paged, slots, 1, SHARDS, 0, 1).gathered()[0] for paged in self.paged]
        return [torch.cat([part[shard] for part in parts]) for shard in range(SHARDS)]


#: Streams of their own for each rig.
NEW = FakeStreams()


@contextmanager
def on_device(copier: str) -> Iterator[None]:
    """Caches are on the emulated device, with one of the two copiers."""
    with emulation().in_use(), pytest.MonkeyPatch.context() as patch:
        if copier == "tensors":
            patch.setattr(device, "native_copier", lambda *_, **__: None)
        yield


@pytest.fixture(params=["native", "tensors"])
def copier(request: pytest.FixtureRequest) -> Iterator[str]:
    with on_device(request.param):
        yield request.param


@pytest.fixture
def native() -> Iterator[None]:
    with on_device("native"):
        yield


@contextmanager
def ended_rig() -> Iterator[Rig]:
    made = make_rig()
    yield made
    made.streams.ended.set()
    made.streams.broken.clear()
    made.path.close()


@pytest.fixture
def rig(copier: str) -> Iterator[Rig]:
    with ended_rig() as made:
        yield made


@pytest.fixture
def native_rig(native: None) -> Iterator[Rig]:
    with ended_rig() as made:
        yield made


def make_rig(streams: FakeStreams | None = NEW, **options: Any) -> Rig:
    paged = [
        make_paged(form, dtype, blocks=5, seed=seed) for seed, (form, dtype) in enumerate(FORMS)
    ]
    calls, start = [], 0
    for part in paged:
        end = start + len(part.caches) * part.layout.chunk_bytes(TOKENS, 1)
        calls.append(LayerCall(part.caches, part.layout, start, end, 1))
        start = end
    if streams is NEW:
        streams = FakeStreams()
    by_shard = {
        shard: [replace(call, first_head=shard * call.heads) for call in calls]
        for shard in range(SHARDS)
    }
    path = DeviceKVCache(by_shard, streams=streams, **options)
    if streams is not None:
        streams.log.clear()
    return Rig(paged, calls, streams or FakeStreams(), path, start)


SLOTS = [7, 3, 19, 0, 1, 12]


def gather(path: KVMemory, slots: torch.Tensor, payloads: list[torch.Tensor]) -> None:
    """Gather a chunk or a tail, and wait for it."""
    copied = path.gather(slots, payloads)
    assert copied is not None
    copied.wait()


def check(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, want)


def check_memory(paged: Sequence[Paged], expected: Sequence[Sequence[torch.Tensor]]) -> None:
    """Assert what all memory of caches is."""
    for of_paged, wanted in zip(paged, expected, strict=True):
        check(of_paged.memory, wanted)


def place(
    rig: Rig, shard: int, slots: list[int], payload: torch.Tensor
) -> list[list[torch.Tensor]]:
    """What all memory must be after one shard's payload was scattered."""
    after = []
    for paged, call in zip(rig.paged, rig.calls, strict=True):
        case = Case(paged, slots, 1, 1, shard * call.heads, call.heads)
        after.append(case.scattered(payload[call.start : call.end].view(1, 1, -1)))
    return after


def test_a_shard_goes_back_to_the_slots_that_are_not_skipped(rig: Rig) -> None:
    slots = [19, -1, 0, 5, 6, 2]
    for shard in range(SHARDS):
        payload = torch.randint(0, 256, (rig.size,), dtype=torch.uint8)
        want = place(rig, shard, slots, payload)
        rig.path.scatter(shard, torch.tensor(slots), payload, rig.path.fence())
        check_memory(rig.paged, want)


@pytest.mark.parametrize("tokens", range(1, TOKENS))
def test_a_tail_goes_there_and_back_with_offsets_of_its_own(rig: Rig, tokens: int) -> None:
    path, size = rig.path.of_tail(tokens), rig.size // TOKENS * tokens
    payloads = [torch.full((size,), 0xAB, dtype=torch.uint8) for _ in range(SHARDS)]
    gather(path, torch.tensor(SLOTS[:tokens]), payloads)
    check(payloads, rig.expected(SLOTS[:tokens]))
    calls = [call.of_tail(tokens) for call in rig.calls]
    slots = [19, 2, -1, 5, 6][:tokens]
    for together in (False, True):
        payloads = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(SHARDS)]
        if together:
            path.scatter_chunk(range(SHARDS), torch.tensor(slots), payloads, rig.path.fence())
        for shard, payload in enumerate(payloads):
            if not together:
                path.scatter(shard, torch.tensor(slots), payload, rig.path.fence())
            after = place(replace(rig, calls=calls), shard, slots, payload)
            check_memory(rig.paged, after)
    # Chunks are copied as before.
    whole = rig.payloads()
    gather(rig.path, torch.tensor(SLOTS), whole)
    check(whole, rig.expected(SLOTS))


def test_copies_are_named_in_traces(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        ranges.append(f"{name} begins")
        yield
        ranges.append("ends")

    monkeypatch.setattr(device, "trace_range", noted)
    payloads = rig.payloads()
    pending = rig.path.gather(torch.tensor(SLOTS), payloads)
    assert pending is not None
    rig.streams.ended.set()
    pending.wait()
    rig.path.scatter(1, torch.tensor(SLOTS), payloads[1])
    assert ranges == ["kvshelf gather begins", "ends", "kvshelf scatter begins", "ends"]


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_tail_is_loaded_into_the_heads_that_a_rank_holds(copier: str, tokens: int) -> None:
    paged = make_paged("bhnc-hnd", torch.float32, blocks=6)
    row = paged.layout.row_bytes
    size = len(paged.caches) * paged.layout.chunk_bytes(TOKENS, 1) * 2
    call = LayerCall(paged.caches, paged.layout, 0, size, 1, parts=2, part=1)
    path = DeviceKVCache({0: [call]}, streams=FakeStreams())
    payload = torch.randint(0, 256, (size // TOKENS * tokens,), dtype=torch.uint8)
    rows = payload.view(-1, 2, row)[:, 1]
    want = Case(paged, SLOTS[:tokens], 1, 1, 0, 1).scattered(rows.reshape(1, 1, -1))
    path.of_tail(tokens).scatter(0, torch.tensor(SLOTS[:tokens]), payload, path.fence())
    check_memory([paged], [want])
    path.close()


@dataclass
class Group:
    """Caches whose calls use a part of a chunk's slots, and only some of the payload's heads."""

    paged: Paged
    slots: list[int]
    call: LayerCall


@contextmanager
def grouped(divided: bool) -> Iterator[tuple[DeviceKVCache, list[Group], torch.Tensor, int]]:
    """Caches of two cache groups with different slots, all of them, and a payload's size."""
    parts = 2 if divided else 1
    forms = [
        (make_paged("mla", torch.bfloat16, blocks=5), [9, 2, 5]),
        (make_paged("bhnc-hnd", torch.float32, blocks=6, seed=7), SLOTS),
    ]
    groups, start, first_slot = [], 0, len(SLOTS) + 3
    for paged, slots in forms:
        end = start + len(paged.caches) * paged.layout.chunk_bytes(len(slots), 1) * parts
        first_slot -= len(slots)
        call = LayerCall(
            paged.caches,
            paged.layout,
            start,
            end,
            1,
            parts=parts,
            part=parts - 1,
            first_slot=first_slot,
        )
        groups.append(Group(paged, slots, call))
        start = end
    path = DeviceKVCache({0: [group.call for group in groups]}, streams=FakeStreams())
    yield path, groups, torch.tensor([*SLOTS, 9, 2, 5]), start
    path.close()


def test_each_cache_group_has_slots_of_its_own(copier: str) -> None:
    with grouped(divided=False) as (path, groups, slots, size):
        payload = torch.full((size,), 0xAB, dtype=torch.uint8)
        gather(path, slots, [payload])
        cases = [Case(group.paged, group.slots, 1, 1, 0, 1) for group in groups]
        want = torch.cat([case.gathered().view(-1) for case in cases])
        np.testing.assert_array_equal(payload, want)


@pytest.mark.parametrize("divided", [False, True])
def test_each_cache_group_gets_its_part_of_a_payload_in_its_own_slots(
    copier: str, divided: bool
) -> None:
    with grouped(divided) as (path, groups, slots, size):
        payload = torch.randint(0, 256, (size,), dtype=torch.uint8)
        want = []
        for group in groups:
            call, row = group.call, group.paged.layout.row_bytes
            rows = payload[call.start : call.end].view(-1, call.parts, row)[:, call.part]
            case = Case(group.paged, group.slots, 1, 1, 0, 1)
            want.append(case.scattered(rows.reshape(1, 1, -1)))
        path.scatter(0, slots, payload, path.fence())
        check_memory([group.paged for group in groups], want)


def test_slots_are_checked_with_the_caches_of_their_group(copier: str) -> None:
    with grouped(divided=False) as (path, groups, slots, size):
        payload = torch.zeros(size, dtype=torch.uint8)
        before = [memory.clone() for group in groups for memory in group.paged.memory]
        # The first slots are of caches with 24 slots, the others of caches with 20.
        for position, slot in ((2, 24), (len(SLOTS) + 1, 20)):
            bad = slots.clone()
            bad[position] = slot
            with pytest.raises(ValueError, match=f"is {slot}"):
                path.gather(bad, [payload])
            with pytest.raises(ValueError, match=f"is {slot}"):
                path.scatter(0, bad, payload)
        good = slots.clone()
        good[2] = 20
        gather(path, good, [payload])
        with pytest.raises(ValueError, match=r"int64 CPU tensor \[9\]"):
            path.gather(slots[:-1], [payload])
        for group in groups:
            for memory in group.paged.memory:
                np.testing.assert_array_equal(memory, before.pop(0))


def test_a_device_without_streams_does_the_same() -> None:
    rig = make_rig(None)
    payloads = rig.payloads()
    gather(rig.path, torch.tensor(SLOTS), payloads)
    check(payloads, rig.expected(SLOTS))
    want = place(rig, 1, SLOTS[::-1], payloads[0])
    rig.path.scatter(1, torch.tensor(SLOTS[::-1]), payloads[0], rig.path.fence())
    check_memory(rig.paged, want)
    rig.path.close()


def test_a_path_made_in_a_step_serves_threads_outside_of_it(copier: str) -> None:
    problems: list[BaseException] = []

    def load(shard: int, payload: torch.Tensor) -> None:
        try:
            rig.path.scatter(shard, torch.tensor(SLOTS[::-1]), payload)
        except BaseException as problem:  # noqa: BLE001 - for the test
            problems.append(problem)

    # As vLLM's workers run each of their steps.
    with torch.inference_mode():
        rig = make_rig()
        payloads = rig.payloads()
        gather(rig.path, torch.tensor(SLOTS), payloads)
    want = place(rig, 1, SLOTS[::-1], payloads[0])
    thread = threading.Thread(target=load, args=(1, payloads[0]))
    thread.start()
    thread.join(30)
    assert not problems
    check_memory(rig.paged, want)


def interleaved(blocks: int = 5, layers: int = 3) -> tuple[Paged, LayerCall]:
    """Caches of a single content whose layers lie inside the blocks."""
    backing = torch.randint(0, 256, (blocks, layers, TOKENS // 2, 16), dtype=torch.uint8)
    caches = list(backing.unbind(1))
    layout = PagedLayout.from_mla(caches[0])
    call = LayerCall(caches, layout, 0, layers * layout.chunk_bytes(TOKENS, 1), 1)
    return Paged("mla", [backing], caches, layout), call


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_large_blocks_that_hold_all_layers_are_filled_by_a_list_of_copies(
    monkeypatch: pytest.MonkeyPatch, pinned: bool, large: bool
) -> None:
    # A block has 48 bytes of each layer.
    monkeypatch.setattr(device, "DIRECT_BYTES", 48 if large else 49)
    with on_device("native"):
        paged, call = interleaved()
        streams = FakeStreams()
        path = DeviceKVCache({0: [call]}, pinned=pinned, streams=streams)
        slots = [12, 13, 14, 3, -1, 5]
        payload = torch.randint(0, 256, (call.end,), dtype=torch.uint8)
        (want,) = Case(paged, slots, 1, 1, 0, 1).scattered(payload.view(1, 1, -1))
        launches, copies = emulation().launches, emulation().copies
        streams.log.clear()
        fence = path.fence()
        path.scatter(0, torch.tensor(slots), payload, fence)
        # Two runs of neighbours, one of them cut by a token that is skipped, in each layer; or the
        # payload as a whole.
        direct = pinned and large
        assert emulation().copies - copies == (3 * 3 if direct else 1)
        assert (emulation().launches == launches) is direct
        assert torch.equal(paged.memory[0], want)
        path.close()


@given(st.permutations(range(15)), st.integers(1, TOKENS), st.integers(0, 2**TOKENS - 1))
@settings(max_examples=40)
def test_copies_into_blocks_touch_their_slots_only(
    order: list[int], count: int, skipped: int
) -> None:
    slots = [-1 if skipped >> i & 1 else slot for i, slot in enumerate(order[:TOKENS])]
    with on_device("native"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "DIRECT_BYTES", 1)
        paged, call = interleaved()
        path = DeviceKVCache({0: [call]}, pinned=True, streams=FakeStreams())
        of, slots = (path, slots) if count == TOKENS else (path.of_tail(count), slots[:count])
        payload = torch.randint(0, 256, (call.end // TOKENS * count,), dtype=torch.uint8)
        (want,) = Case(paged, slots, 1, 1, 0, 1).scattered(payload.view(1, 1, -1))
        launches = emulation().launches
        of.scatter(0, torch.tensor(slots), payload, path.fence())
        assert emulation().launches == launches
        assert torch.equal(paged.memory[0], want)
        path.close()


def test_copies_into_blocks_use_the_slots_of_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "DIRECT_BYTES", 48)
    with on_device("native"):
        first, one = interleaved()
        second, other = interleaved(layers=2)
        calls = [
            replace(one, first_slot=TOKENS),
            replace(other, start=one.end, end=one.end + other.end),
        ]
        path = DeviceKVCache({0: calls}, pinned=True, streams=FakeStreams())
        slots = torch.tensor([3, 4, 5, 0, 1, 2, 12, 13, 14, 6, 7, 8])
        payload = torch.randint(0, 256, (calls[1].end,), dtype=torch.uint8)
        launches = emulation().launches
        path.scatter(0, slots, payload)
        assert emulation().launches == launches
        for paged, own, part in (
            (first, slots[TOKENS:], payload[: one.end]),
            (second, slots[:TOKENS], payload[one.end :]),
        ):
            assert torch.equal(paged.gathered(own.view(1, -1), 0, 1).view(-1), part)
        path.close()


def test_copies_into_blocks_wait_for_what_the_engine_had_enqueued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "DIRECT_BYTES", 48)
    with on_device("native"):
        _, call = interleaved()
        streams = FakeStreams()
        path = DeviceKVCache({0: [call]}, pinned=True, streams=streams)
        fence = path.fence()
        streams.log.clear()
        streams.ended.clear()
        payload = torch.zeros(call.end, dtype=torch.uint8)
        slots = torch.tensor([3, 4, 5, 0, 1, 2])
        load = threading.Thread(target=path.scatter, args=(0, slots, payload, fence))
        load.start()
        load.join(0.1)
        # Nothing is enqueued that would wait in front of others' copies.
        assert load.is_alive()
        assert not streams.log
        streams.ended.set()
        load.join(30)
        assert streams.log
        path.close()


@pytest.mark.parametrize("form", ["bhnc-nhd", "mla"])
def test_other_caches_are_filled_by_kernels_from_buffers(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(device, "DIRECT_BYTES", 1)
    with on_device("native"):
        paged = make_paged(form, torch.bfloat16, blocks=5)
        size = len(paged.caches) * paged.layout.chunk_bytes(TOKENS, paged.layout.heads)
        call = LayerCall(paged.caches, paged.layout, 0, size, paged.layout.heads)
        path = DeviceKVCache({0: [call]}, pinned=True, streams=FakeStreams())
        launches, copies = emulation().launches, emulation().copies
        path.scatter(0, torch.tensor(SLOTS), torch.zeros(size, dtype=torch.uint8))
        assert emulation().launches == launches + 1
        assert emulation().copies == copies + 1
        path.close()


def test_a_gather_runs_on_the_engines_stream_and_the_copy_beside_it(native_rig: Rig) -> None:
    rig = native_rig
    gather(rig.path, torch.tensor(SLOTS), rig.payloads())
    (recorded, ready, by), *rest = rig.streams.log
    assert (recorded, by) == ("record", rig.streams.engine)
    assert rest
    for kind, event, stream in rest:
        # The engine's stream waits for nothing, and no copy waits on the device for its turn.
        assert kind == "record"
        assert event is not ready
        assert stream.name == "beside"  # type: ignore[attr-defined]


def test_nothing_is_enqueued_for_a_copy_before_its_gather_is_done(native_rig: Rig) -> None:
    rig = native_rig
    rig.streams.ended.clear()
    copied = rig.path.gather(torch.tensor(SLOTS), rig.payloads())
    assert copied is not None
    waiting = threading.Thread(target=copied.wait)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    assert len(rig.streams.log) == 1
    rig.streams.ended.set()
    waiting.join(30)
    assert len(rig.streams.log) > 1


def test_a_scatter_waits_on_its_own_stream_for_what_the_engine_had_enqueued(rig: Rig) -> None:
    fence = rig.path.fence()
    ((kind, mark, by),) = rig.streams.log
    assert (kind, by) == ("record", rig.streams.engine)
    rig.path.scatter(0, torch.tensor(SLOTS), rig.payloads()[0], fence)
    waits = [entry for entry in rig.streams.log if entry[0] == "wait"]
    assert mark in [event for _, _, event in waits]
    (ended, _, last) = rig.streams.log[-1]
    assert ended == "record"
    assert {stream for _, stream, _ in waits} == {last}
    assert last.name == "urgent"  # type: ignore[attr-defined]


def test_all_shards_of_a_chunk_are_scattered_by_one_kernel_for_each_layout(native_rig: Rig) -> None:
    rig = native_rig
    check_scatter_of_a_chunk(rig, len(rig.paged))
    payloads = rig.payloads()
    with pytest.raises(ValueError, match="expected one for each of"):
        rig.path.scatter_chunk([1], torch.tensor(SLOTS), payloads[:1])


def test_scatters_can_leave_processors_to_others() -> None:
    with on_device("native"):
        rig = make_rig()
        native = rig.path._copier
        assert isinstance(native, NativeCopier)
        blocks = []
        for most in (0, 1):
            native.limit(most)
            before = emulation().blocks
            check_scatter_of_a_chunk(rig, len(rig.paged))
            blocks.append(emulation().blocks - before)
        assert blocks[1] == len(rig.paged) < blocks[0]
        # Those of the engine's stream are as they were.
        before = emulation().blocks
        gather(rig.path, torch.tensor(SLOTS), rig.payloads())
        assert emulation().blocks - before == blocks[0]
        rig.path.close()


def check_scatter_of_a_chunk(rig: Rig, kernels: int) -> None:
    before = [[memory.clone() for memory in paged.memory] for paged in rig.paged]
    payloads = rig.payloads()
    for payload in payloads:
        payload.random_(0, 256)
    want = [place(rig, shard, SLOTS, payload) for shard, payload in enumerate(payloads)]
    launches = emulation().launches
    rig.path.scatter_chunk(range(SHARDS), torch.tensor(SLOTS), payloads, rig.path.fence())
    assert emulation().launches == launches + kernels
    for number, paged in enumerate(rig.paged):
        for layer, memory in enumerate(paged.memory):
            was = before[number][layer]
            expected = was.clone()
            for of_shard in want:
                changed = of_shard[number][layer] != was
                expected[changed] = of_shard[number][layer][changed]
            np.testing.assert_array_equal(memory, expected)


def test_gathers_are_refused_while_all_buffers_are_under_way(native: None) -> None:
    rig = make_rig(ring=3)
    rig.streams.ended.clear()
    under_way = [rig.path.gather(torch.tensor(SLOTS), rig.payloads()) for _ in range(3)]
    before = emulation().launches
    assert rig.path.gather(torch.tensor(SLOTS), rig.payloads()) is None
    assert emulation().launches == before
    rig.streams.ended.set()
    for one in under_way:
        assert one is not None
        one.wait()
    again = rig.payloads()
    gather(rig.path, torch.tensor(SLOTS), again)
    check(again, rig.expected(SLOTS))
    rig.path.close()


def test_a_gather_is_known_to_have_ended_only_when_its_bytes_are_there(native: None) -> None:
    """Its memory may be given away then, though nobody waited."""
    rig = make_rig(ring=2)
    begun: list[tuple[PendingCopy, list[torch.Tensor]]] = []
    expected = rig.expected(SLOTS)
    for _ in range(20):
        payloads = rig.payloads()
        copied: list[PendingCopy] = []

        def gathered(
            payloads: list[torch.Tensor] = payloads, copied: list[PendingCopy] = copied
        ) -> bool:
            found = rig.path.gather(torch.tensor(SLOTS), payloads)
            copied.extend([] if found is None else [found])
            return found is not None

        until(gathered)
        begun.append((copied[0], payloads))
        assert [one.ended for one, _ in begun[-3:]] == [True, False, False][-len(begun) :]
        for payload, want in zip(begun[-3:][0][1], expected, strict=True):
            if len(begun) > 2:
                np.testing.assert_array_equal(payload, want)
    rig.path.close()


def test_buffers_come_back_although_nobody_waited(rig: Rig) -> None:
    for _ in range(50):
        payloads = rig.payloads()
        until(lambda: rig.path.gather(torch.tensor(SLOTS), payloads) is not None)  # noqa: B023
    rig.path.pause()


def test_bad_slots_are_refused_before_anything_is_enqueued(rig: Rig) -> None:
    bad = torch.tensor([0, 1, 20, 3, 4, 5])
    with pytest.raises(ValueError, match=r"slot_mapping\[2\] is 20"):
        rig.path.gather(bad, rig.payloads())
    with pytest.raises(ValueError, match=r"slot_mapping\[2\] is 20"):
        rig.path.scatter(0, bad, rig.payloads()[0])
    with pytest.raises(ValueError, match="bytes; expected"):
        rig.path.gather(torch.tensor(SLOTS), [payload[1:] for payload in rig.payloads()])
    twice = [payload.repeat_interleave(2)[::2] for payload in rig.payloads()]
    with pytest.raises(ValueError, match="expected contiguous uint8"):
        rig.path.gather(torch.tensor(SLOTS), twice)
    with pytest.raises(ValueError, match=r"expected a contiguous int64 CPU tensor \[6\]"):
        rig.path.gather(torch.tensor(SLOTS[:5]), rig.payloads())
    assert rig.streams.log == []


def test_states_of_all_layers_take_a_launch_for_each_group_and_layout() -> None:
    """A gated delta net has queries and keys, values, and the rest, in three layouts."""
    shards, layers, groups, blocks = 2, 36, 3, 4
    state = split_state("gdn_attn", [(3, 512), (4, 16, 16)], [torch.bfloat16] * 2, 1, False)
    generator = torch.Generator().manual_seed(0)
    memory = torch.randint(
        0, 256, (layers, blocks, state.nbytes), dtype=torch.uint8, generator=generator
    )
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
    assert len(runs) == 3 * layers

    def slots(block: int) -> torch.Tensor:
        return torch.tensor([slot for of in units.values() for slot in of.of(block)])

    host = HostKVCache(calls)
    wanted = [torch.empty(ends[-1], dtype=torch.uint8) for _ in range(shards)]
    host.gather(slots(2), wanted)
    with on_device("native"):
        path = DeviceKVCache(calls, streams=AtOnce())
        payloads = [torch.empty(ends[-1], dtype=torch.uint8) for _ in range(shards)]
        before = emulation().launches
        gather(path, slots(2), payloads)
        assert emulation().launches - before == 3 * groups
        for payload, want in zip(payloads, wanted, strict=True):
            assert torch.equal(payload, want)
        expected = memory.clone()
        expected[:, 1] = expected[:, 2]
        path.scatter_chunk(range(shards), slots(1), payloads, path.fence())
        assert emulation().launches - before == 6 * groups
        assert emulation().width == 16
        assert torch.equal(memory, expected)
        path.close()


def test_layers_that_are_less_aligned_do_not_slow_others_down() -> None:
    """The second layer begins in the middle of a vector."""
    backing = torch.randint(0, 256, (2, 4 * 16 * 64 + 16), dtype=torch.uint8)
    caches = [
        backing[number, 8 * number :][: 4 * 16 * 64].view(4, 16, 1, 64) for number in range(2)
    ]
    layout = PagedLayout.from_mla(caches[0].squeeze(2))
    size = layout.chunk_bytes(TOKENS)
    calls = [
        LayerCall([cache], layout, number * size, (number + 1) * size, 1)
        for number, cache in enumerate(caches)
    ]
    wanted = torch.empty(2 * size, dtype=torch.uint8)
    HostKVCache({0: calls}).gather(torch.tensor(SLOTS), [wanted])
    with on_device("native"):
        path = DeviceKVCache({0: calls}, streams=AtOnce())
        payload = torch.empty(2 * size, dtype=torch.uint8)
        before = emulation().launches
        gather(path, torch.tensor(SLOTS), [payload])
        assert emulation().launches - before == 2
        assert torch.equal(payload, wanted)
        path.close()


def store(rig: Rig) -> list[torch.Tensor]:
    payloads = rig.payloads()
    gather(rig.path, torch.tensor(SLOTS), payloads)
    return payloads


@pytest.mark.parametrize("what", ["kernels", "copies"])
def test_a_device_that_failed_is_asked_nothing_more_and_one_line_says_so(
    rig: Rig, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    assert rig.path.problem == ""
    # What arrived before is good.
    for payload, want in zip(store(rig), rig.expected(SLOTS), strict=True):
        np.testing.assert_array_equal(payload, want)
    rig.streams.broken = {what, "queries"}
    with pytest.raises(DeviceUnavailableError, match="cpu failed: CUDA error: launch failure"):
        store(rig)
    rig.streams.log.clear()
    for _ in range(2 * device.DEFAULT_RING):
        with pytest.raises(DeviceUnavailableError, match="launch failure"):
            rig.path.gather(torch.tensor(SLOTS), rig.payloads())
        with pytest.raises(DeviceUnavailableError, match="launch failure"):
            rig.path.scatter(0, torch.tensor(SLOTS), rig.payloads()[0])
        with pytest.raises(DeviceUnavailableError, match="launch failure"):
            rig.path.fence()
    assert not rig.streams.log
    assert rig.path.problem == "cpu failed: CUDA error: launch failure"
    assert caplog.text.count("launch failure") == 1


@pytest.mark.parametrize("what", ["kernels", "copies"])
def test_an_error_that_the_device_does_not_repeat_costs_one_copy(
    rig: Rig, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    slots, payloads = torch.tensor(SLOTS), store(rig)
    for memory in (memory for paged in rig.paged for memory in paged.memory):
        memory[...] = 0
    rig.streams.broken = {what}
    with pytest.raises(DeviceUnavailableError, match="cpu failed: CUDA error: launch failure"):
        rig.path.scatter_chunk(range(SHARDS), slots, payloads)
    with pytest.raises(DeviceUnavailableError, match="launch failure"):
        store(rig)
    rig.streams.broken.clear()
    assert rig.path.problem == ""
    # Each direction has all its buffers.
    for _ in range(2 * device.DEFAULT_RING):
        rig.path.scatter_chunk(range(SHARDS), slots, payloads, rig.path.fence())
        for payload, want in zip(store(rig), payloads, strict=True):
            assert torch.equal(payload, want)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "the device still works" in warnings[0].getMessage()


def test_memory_that_is_short_for_once_does_not_end_the_use_of_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def short(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with on_device("tensors"):
        rig = make_rig()
        with monkeypatch.context() as patch:
            patch.setattr(ops, "gather_kv", short)
            patch.setattr(ops, "scatter_kv", short)
            assert rig.path.gather(torch.tensor(SLOTS), rig.payloads()) is None
            with pytest.raises(torch.OutOfMemoryError):
                rig.path.scatter(0, torch.tensor(SLOTS), rig.payloads()[0])
        payloads = store(rig)
        rig.path.scatter(0, torch.tensor(SLOTS), payloads[0])
        assert rig.path.problem == ""
        rig.path.close()


def test_a_device_without_kernels_is_served_without_buffers_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with on_device("tensors"):
        memory = Memory(monkeypatch, 1 << 30)
        rig = make_rig(memory.streams)
        assert memory.left == 1 << 30
        assert "compiled library does not store and load on cpu" in caplog.text
        # More chunks are under way than there would be buffers, and each is waited for.
        memory.streams.ended.clear()
        begun = [
            (rig.path.gather(torch.tensor(SLOTS), part), part)
            for part in (rig.payloads() for _ in range(2 * device.DEFAULT_RING))
        ]
        assert not any(one.ended for one, _ in begun if one is not None)
        memory.streams.ended.set()
        for one, part in begun:
            assert one is not None
            one.wait()
            check(part, rig.expected(SLOTS))
        rig.path.close()


def test_loads_of_several_threads_share_the_buffers(copier: str) -> None:
    rig = make_rig(loads=1)
    payloads = rig.payloads()
    for payload, whole in zip(payloads, rig.expected(SLOTS), strict=True):
        payload.copy_(whole)
    for paged in rig.paged:
        for memory in paged.memory:
            memory[...] = 0
    rig.streams.ended.clear()
    threads = [
        threading.Thread(
            target=rig.path.scatter, args=(shard, torch.tensor(SLOTS), payloads[shard])
        )
        for shard in range(SHARDS)
    ]
    for thread in threads:
        thread.start()
    rig.streams.ended.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    check(payloads, rig.expected(SLOTS))
    rig.path.close()


@pytest.mark.parametrize("what", ["kernels", "copies"])
def test_after_a_failed_scatter_nothing_reads_the_payload(rig: Rig, what: str) -> None:
    rig.streams.broken = {what}
    with pytest.raises(DeviceUnavailableError, match="launch failure"):
        rig.path.scatter(0, torch.tensor(SLOTS), rig.payloads()[0])
    # What had been enqueued was waited for.
    kinds = [entry[0] for entry in rig.streams.log]
    if kinds:
        assert kinds[-1] in ("record", "finish")


class Memory:
    """The memory of a device: what is allocated is taken from it, but for some that is lost."""

    def __init__(self, patch: pytest.MonkeyPatch, nbytes: int, lost: int = 0) -> None:
        self.left = nbytes
        self.streams = FakeStreams()
        empty = torch.empty

        def taking(*size: Any, **options: Any) -> torch.Tensor:
            tensor = empty(*size, **options)
            if options.get("dtype") is torch.uint8:
                if tensor.numel() > self.left - lost:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                self.left -= tensor.numel()
            return tensor

        patch.setattr(torch, "empty", taking)
        patch.setattr(self.streams, "free_bytes", lambda: self.left)


def room_of_a_payload() -> int:
    """Bytes of a payload in a device buffer, where each starts at a multiple of 256."""
    return -(-make_rig().size // 256) * 256


def works_both_ways(rig: Rig) -> None:
    payloads = rig.payloads()
    gather(rig.path, torch.tensor(SLOTS), payloads)
    rig.path.scatter(0, torch.tensor(SLOTS), payloads[0])


@pytest.mark.parametrize("loads", [3, 100])
@pytest.mark.parametrize("buffers", [4, 12, 50])
def test_half_of_a_devices_free_memory_is_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, buffers: int, loads: int
) -> None:
    with on_device("native"):
        one = room_of_a_payload()
        memory = Memory(monkeypatch, 2 * SHARDS * one * buffers)
        rig = make_rig(memory.streams, ring=100, loads=loads)
        assert memory.left >= SHARDS * one * buffers
        assert "of 100 buffers" in caplog.text
        works_both_ways(rig)


def test_a_device_that_gives_less_than_it_said_does_with_what_there_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with on_device("native"):
        one = room_of_a_payload()
        memory = Memory(monkeypatch, 1 << 30, (1 << 30) - (2 + 2) * SHARDS * one)
        rig = make_rig(memory.streams, ring=4, loads=2)
        assert "only 2 of 4 buffers" in caplog.text
        works_both_ways(rig)
        with pytest.raises(ConfigError, match="no memory for one buffer"):
            make_rig(memory.streams)


def test_after_the_end_nothing_is_begun(rig: Rig) -> None:
    rig.path.gather(torch.tensor(SLOTS), rig.payloads())
    rig.path.close()
    assert rig.path.gather(torch.tensor(SLOTS), rig.payloads()) is None
    with pytest.raises(DeviceUnavailableError, match="has released them"):
        rig.path.scatter(0, torch.tensor(SLOTS), rig.payloads()[0])


@pytest.mark.parametrize("under_way", ["gather", "scatter"])
def test_while_the_engine_sleeps_nothing_is_begun(rig: Rig, under_way: str) -> None:
    payloads = rig.payloads()
    rig.streams.ended.clear()
    scatter = (0, torch.tensor(SLOTS), payloads[0])
    loading = threading.Thread(target=rig.path.scatter, args=scatter)
    if under_way == "scatter":
        loading.start()
        until(lambda: bool(rig.streams.log))
    else:
        assert rig.path.gather(torch.tensor(SLOTS), payloads) is not None
    pausing = threading.Thread(target=rig.path.pause)
    pausing.start()
    pausing.join(0.1)
    # What is under way reads the caches until it has ended.
    assert pausing.is_alive()
    rig.streams.ended.set()
    pausing.join(30)
    assert not pausing.is_alive()
    rig.streams.log.clear()
    assert rig.path.gather(torch.tensor(SLOTS), payloads) is None
    with pytest.raises(DeviceUnavailableError, match="sleeps"):
        rig.path.scatter(0, torch.tensor(SLOTS), payloads[0])
    assert not rig.streams.log
    # An engine that wakes up has its caches at other addresses.
    for number, paged in enumerate(rig.paged):
        awake = make_paged(*FORMS[number], blocks=5, seed=20 + number)
        paged.caches[:] = awake.caches
        rig.paged[number] = awake
    rig.path.resume()
    gather(rig.path, torch.tensor(SLOTS), payloads)
    check(payloads, rig.expected(SLOTS))
    rig.path.scatter(0, torch.tensor(SLOTS), payloads[0])


def test_a_gather_under_way_is_waited_for_although_the_device_failed(native_rig: Rig) -> None:
    native_rig.streams.ended.clear()
    copied = native_rig.path.gather(torch.tensor(SLOTS), native_rig.payloads())
    assert copied is not None
    native_rig.streams.broken.update(("copies", "kernels", "queries"))
    with pytest.raises(DeviceUnavailableError):
        native_rig.path.scatter(0, torch.tensor(SLOTS), native_rig.payloads()[0])

    def wait() -> None:
        with suppress(DeviceUnavailableError):
            copied.wait()

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.1)
    # The device may still write into the payloads.
    assert waiting.is_alive()
    native_rig.streams.ended.set()
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_device_that_failed_can_be_closed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: FakeEvent) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(FakeEvent, "synchronize", fail)
    monkeypatch.setattr(FakeEvent, "query", fail)
    copied = rig.path.gather(torch.tensor(SLOTS), rig.payloads())
    assert copied is not None
    for _ in range(2):
        with pytest.raises(DeviceUnavailableError, match="unspecified"):
            copied.wait()
    rig.path.close()
    assert "cpu failed: CUDA error: unspecified launch failure" in caplog.text


def test_the_thread_of_caches_that_nobody_closed_ends_with_them(native: None) -> None:
    rig = make_rig()
    thread = rig.path._thread
    assert thread.is_alive()
    del rig
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_a_thread_that_still_copies_keeps_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_END_SECONDS", 0.0)
    with on_device("native"):
        rig = make_rig()
        thread, held, copier = rig.path._thread, rig.streams.ended, rig.path._copier
        assert isinstance(copier, NativeCopier)
        buffers = [weakref.ref(buffer) for buffer in copier._buffers]
        payloads = rig.payloads()
        expected = rig.expected(SLOTS)
        held.clear()
        assert rig.path.gather(torch.tensor(SLOTS), payloads) is not None
        del rig, copier
        gc.collect()
        assert thread.is_alive()
        assert all(buffer() is not None for buffer in buffers)
        held.set()
        thread.join(30)
        assert not thread.is_alive()
        check(payloads, expected)
        gc.collect()
        assert all(buffer() is None for buffer in buffers)


def test_background_threads_do_not_disturb_captures_of_others() -> None:
    with on_device("native"):
        rig = make_rig()
        before = emulation().exposed
        payloads = store(rig)
        rig.path.scatter_chunk(range(SHARDS), torch.tensor(SLOTS), payloads, rig.path.fence())
        assert emulation().exposed == before
        rig.path.close()


def test_copies_to_the_host_go_on_while_another_thread_keeps_the_gil() -> None:
    # Functions of a PyDLL are called with the GIL.
    keeping = ctypes.PyDLL(None)
    with on_device("native"):
        path, size, caches = large(2, AtOnce())
        for cache in caches:
            cache.fill_(7)
        slots, payloads = torch.arange(128), [torch.zeros(size, dtype=torch.uint8)] * 2
        first = path.gather(slots, payloads)
        assert first is not None
        # From here on the thread that copies is inside the library.
        first.wait()
        payloads[0].zero_()
        last = ctypes.c_uint8.from_address(payloads[0].data_ptr() + size - 1)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(PATIENCE)
        try:
            copied = path.gather(slots, payloads)
            for _ in range(int(PATIENCE * 1000)):
                if last.value:
                    break
                keeping.usleep(1000)
        finally:
            sys.setswitchinterval(interval)
        assert last.value == 7
        assert copied is not None
        copied.wait()
        path.close()


# --- pacing ------------------------------------------------------------------------


def large(shards: int, streams: Any) -> tuple[DeviceKVCache, int, list[torch.Tensor]]:
    """Caches of which each shard of a chunk has more than 2 MB."""
    caches = [torch.zeros(4, shards, 64, 8192, dtype=torch.uint8) for _ in range(2)]
    layout = PagedLayout.from_bhnc(caches[0], 4096)
    size = 2 * layout.chunk_bytes(128, 1)
    by_shard = {
        shard: [LayerCall(caches, layout, 0, size, 1, first_head=shard)] for shard in range(shards)
    }
    return DeviceKVCache(by_shard, ring=4, loads=3, streams=streams), size, caches


@pytest.mark.parametrize("seed", range(3))
def test_an_engines_copy_has_less_than_a_fifth_of_a_millisecond_of_copies_ahead_of_it(
    native: None, seed: int
) -> None:
    rate = 2e9
    streams = SimulatedStreams(seed, rate=rate)
    path, size, caches = large(2, streams)
    for cache in caches:
        cache.random_(0, 256)
    slots = torch.randperm(256, generator=torch.Generator().manual_seed(seed))[:128]

    def payloads() -> list[torch.Tensor]:
        return [torch.empty(size, dtype=torch.uint8) for _ in range(2)]

    stored = [payloads() for _ in range(4)]
    with streams.hold():
        chunks = [path.gather(slots, part) for part in stored]
        loads = [
            threading.Thread(target=path.scatter_chunk, args=(range(2), slots, payloads()))
            for _ in range(2)
        ]
        for load in loads:
            load.start()
        # However long the device takes, no more is enqueued for loads (nor for stores, once their
        # gathers are done).
        beside = [stream for stream in streams.streams if stream.name == "beside"]
        until(lambda: any(stream.queued for stream in beside))
    for chunk in chunks:
        assert chunk is not None
        chunk.wait()
    for load in loads:
        load.join(60)
        assert not load.is_alive()
    for part in stored[1:]:
        assert all(map(torch.equal, part, stored[0]))
    links = [stream for stream in streams.streams if stream.most_queued]
    # One stream in each direction.
    assert len(links) == 2
    for link in links:
        assert link.most_queued <= QUEUED_SECONDS * rate
        # In several pieces, so that the link is never idle.
        assert 2 * link.largest <= link.most_queued
    path.close()
    streams.close()


def test_the_rate_of_a_link_is_measured_and_used() -> None:
    for rate in (1.5e9, 20e9):
        with on_device("native"):
            streams = SimulatedStreams(rate=rate)
            path, size, _ = large(1, streams)
            payload = torch.empty(size, dtype=torch.uint8)
            for _ in range(4):
                gather(path, torch.arange(128), [payload])
            native = path._copier
            assert isinstance(native, NativeCopier)
            assert native.rate(of_stores=True) == pytest.approx(rate, rel=0.05)
            assert native.rate(of_stores=False) == 1e9
            path.close()
            streams.close()
