"""The path between caches on a device and staging buffers, on a device that is not there.

The caches, the device buffers and the kernels are emulated on the host; streams are simulated: the
test decides when what was enqueued on the copy stream has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from emulation import emulation
from fake_streams import FakeEvent, FakeStreams
from paged import Case, Paged, make_paged

from kvshelf.errors import ConfigError, DeviceUnavailableError
from kvshelf.kv import device, ops
from kvshelf.kv.caches import LayerCall
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import PagedLayout

SHARDS, TOKENS = 2, 6


@dataclass
class Rig:
    paged: list[Paged]
    calls: list[LayerCall]
    streams: FakeStreams
    path: DeviceKVCache
    size: int

    def payloads(self) -> list[torch.Tensor]:
        return [torch.full((self.size,), 0xAB, dtype=torch.uint8) for _ in range(SHARDS)]

    def expected(self, slots: list[int]) -> list[np.ndarray]:
        parts = [Case(paged, slots, 1, SHARDS, 0, 1).gathered()[0] for paged in self.paged]
        return [np.concatenate([part[shard] for part in parts]) for shard in range(SHARDS)]


#: Streams of their own for each rig.
NEW = FakeStreams()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with emulation().in_use():
        yield make_rig()


def make_rig(streams: FakeStreams | None = NEW, **options: Any) -> Rig:
    paged = [
        make_paged("bhnc-nhd", torch.bfloat16, blocks=5),
        make_paged("2bnhd", torch.float32, blocks=5, seed=7),
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


def test_a_chunk_arrives_in_the_staging_buffers_of_its_shards(rig: Rig) -> None:
    payloads = rig.payloads()
    copied = rig.path.gather(torch.tensor(SLOTS), payloads)
    assert copied is not None
    copied.wait()
    for payload, want in zip(payloads, rig.expected(SLOTS), strict=True):
        np.testing.assert_array_equal(payload.numpy(), want)


def place(rig: Rig, shard: int, slots: list[int], payload: torch.Tensor) -> list[list[np.ndarray]]:
    """What all memory must be after one shard's payload was scattered."""
    after = []
    for paged, call in zip(rig.paged, rig.calls, strict=True):
        case = Case(paged, slots, 1, 1, shard * call.heads, call.heads)
        after.append(case.scattered(payload[call.start : call.end].view(1, 1, -1).numpy()))
    return after


def test_a_shard_goes_back_to_the_slots_that_are_not_skipped(rig: Rig) -> None:
    slots = [19, -1, 0, 5, 6, 2]
    for shard in range(SHARDS):
        payload = torch.randint(0, 256, (rig.size,), dtype=torch.uint8)
        want = place(rig, shard, slots, payload)
        rig.path.scatter(shard, torch.tensor(slots), payload, rig.path.fence())
        for paged, of_paged in zip(rig.paged, want, strict=True):
            for memory, after in zip(paged.memory, of_paged, strict=True):
                np.testing.assert_array_equal(memory, after)


def test_a_device_without_streams_does_the_same() -> None:
    rig = make_rig(None)
    payloads = rig.payloads()
    copied = rig.path.gather(torch.tensor(SLOTS), payloads)
    assert copied is not None
    copied.wait()
    for payload, want in zip(payloads, rig.expected(SLOTS), strict=True):
        np.testing.assert_array_equal(payload.numpy(), want)
    want = place(rig, 1, SLOTS[::-1], payloads[0])
    rig.path.scatter(1, torch.tensor(SLOTS[::-1]), payloads[0], rig.path.fence())
    for paged, of_paged in zip(rig.paged, want, strict=True):
        for memory, after in zip(paged.memory, of_paged, strict=True):
            np.testing.assert_array_equal(memory, after)
    rig.path.close()


def test_a_path_made_in_a_step_serves_threads_outside_of_it() -> None:
    problems: list[BaseException] = []

    def load(shard: int, payload: torch.Tensor) -> None:
        try:
            rig.path.scatter(shard, torch.tensor(SLOTS[::-1]), payload)
        except BaseException as problem:  # noqa: BLE001 - for the test
            problems.append(problem)

    with emulation().in_use():
        # As vLLM's workers run each of their steps.
        with torch.inference_mode():
            rig = make_rig()
            payloads = rig.payloads()
            copied = rig.path.gather(torch.tensor(SLOTS), payloads)
            assert copied is not None
            copied.wait()
        want = place(rig, 1, SLOTS[::-1], payloads[0])
        thread = threading.Thread(target=load, args=(1, payloads[0]))
        thread.start()
        thread.join(30)
        assert not problems
        for paged, of_paged in zip(rig.paged, want, strict=True):
            for memory, after in zip(paged.memory, of_paged, strict=True):
                np.testing.assert_array_equal(memory, after)


def interleaved(blocks: int = 5, layers: int = 3) -> tuple[torch.Tensor, LayerCall]:
    """Caches of a single content whose layers lie inside the blocks."""
    backing = torch.randint(0, 256, (blocks, layers, TOKENS // 2, 16), dtype=torch.uint8)
    caches = list(backing.unbind(1))
    layout = PagedLayout.from_mla(caches[0])
    return backing, LayerCall(caches, layout, 0, layers * layout.chunk_bytes(TOKENS, 1), 1)


@pytest.mark.parametrize("pinned", [True, False])
def test_blocks_that_hold_all_layers_are_filled_by_a_list_of_copies(pinned: bool) -> None:
    with emulation().in_use(buffers_on_host=pinned):
        backing, call = interleaved()
        streams = FakeStreams()
        path = DeviceKVCache({0: [call]}, pinned=pinned, streams=streams)
        before = backing.clone()
        slots = [12, 13, 14, 3, -1, 5]
        payload = torch.randint(0, 256, (call.end,), dtype=torch.uint8)
        launches, copies = emulation().launches, emulation().copies
        streams.log.clear()
        fence = path.fence()
        path.scatter(0, torch.tensor(slots), payload, fence)
        # Two runs of neighbours, one of them cut by a token that is skipped, in each layer.
        assert emulation().copies - copies == (3 * 3 if pinned else 0)
        assert (emulation().launches == launches) is pinned
        rows = payload.view(3, TOKENS, 16)
        for token, slot in enumerate(slots):
            if slot >= 0:
                before[slot // 3, :, slot % 3] = rows[:, token]
        torch.testing.assert_close(backing, before, rtol=0, atol=0)
        assert ("wait", streams.made[-1], fence) in streams.log
        path.close()


@pytest.mark.parametrize("form", ["bhnc-nhd", "mla"])
def test_other_caches_are_filled_by_kernels_from_buffers(form: str) -> None:
    with emulation().in_use():
        paged = make_paged(form, torch.bfloat16, blocks=5)
        size = len(paged.caches) * paged.layout.chunk_bytes(TOKENS, 1)
        call = LayerCall(paged.caches, paged.layout, 0, size, 1)
        path = DeviceKVCache({0: [call]}, pinned=True, streams=FakeStreams())
        launches, copies = emulation().launches, emulation().copies
        path.scatter(0, torch.tensor(SLOTS), torch.zeros(size, dtype=torch.uint8))
        assert emulation().launches > launches
        assert emulation().copies == copies


def test_a_gather_runs_on_the_engines_stream_and_the_copy_beside_it(rig: Rig) -> None:
    rig.path.gather(torch.tensor(SLOTS), rig.payloads())
    (recorded, ready, by), (waited, beside, what), (ended, done, on) = rig.streams.log
    assert (recorded, by) == ("record", rig.streams.engine)
    assert (waited, what) == ("wait", ready)
    assert (ended, on) == ("record", beside)
    assert done is not ready
    assert beside.name == "beside"  # type: ignore[attr-defined]
    # The engine's stream waits for nothing.
    assert not [entry for entry in rig.streams.log if entry[:2] == ("wait", rig.streams.engine)]


def test_a_scatter_waits_on_its_own_stream_for_what_the_engine_had_enqueued(rig: Rig) -> None:
    fence = rig.path.fence()
    assert rig.streams.log == [("record", fence, rig.streams.engine)]
    rig.path.scatter(0, torch.tensor(SLOTS), rig.payloads()[0], fence)
    _, (waited, urgent, what), (ended, _, on) = rig.streams.log
    assert (waited, what, ended) == ("wait", fence, "record")
    assert urgent is on
    assert urgent.name == "urgent"  # type: ignore[attr-defined]


def test_gathers_are_refused_while_all_buffers_are_under_way() -> None:
    with emulation().in_use():
        rig = make_rig(ring=3)
        rig.streams.ended.clear()
        under_way = [rig.path.gather(torch.tensor(SLOTS), rig.payloads()) for _ in range(3)]
        before = emulation().launches
        assert rig.path.gather(torch.tensor(SLOTS), rig.payloads()) is None
        assert emulation().launches == before
        rig.streams.ended.set()
        again = rig.payloads()
        copied = rig.path.gather(torch.tensor(SLOTS), again)
        assert copied is not None
        for one in [*under_way, copied]:
            assert one is not None
            one.wait()
        for payload, want in zip(again, rig.expected(SLOTS), strict=True):
            np.testing.assert_array_equal(payload.numpy(), want)


def test_buffers_come_back_although_nobody_waited(rig: Rig) -> None:
    for _ in range(50):
        assert rig.path.gather(torch.tensor(SLOTS), rig.payloads()) is not None


def test_bad_slots_are_refused_before_anything_is_enqueued(rig: Rig) -> None:
    bad = torch.tensor([0, 1, 20, 3, 4, 5])
    with pytest.raises(ValueError, match=r"slot_mapping\[2\] is 20"):
        rig.path.gather(bad, rig.payloads())
    with pytest.raises(ValueError, match=r"slot_mapping\[2\] is 20"):
        rig.path.scatter(0, bad, rig.payloads()[0])
    with pytest.raises(ValueError, match="bytes; expected"):
        rig.path.gather(torch.tensor(SLOTS), [payload[1:] for payload in rig.payloads()])
    assert rig.streams.log == []


def test_after_a_failed_launch_nothing_writes_into_the_staging_buffers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: launch failure")

    before = rig.path.gather(torch.tensor(SLOTS), rig.payloads())
    assert before is not None
    rig.streams.log.clear()
    with monkeypatch.context() as patch:
        patch.setattr(ops, "gather_kv", fail)
        with pytest.raises(DeviceUnavailableError, match="cpu failed: CUDA error: launch failure"):
            rig.path.gather(torch.tensor(SLOTS), rig.payloads())
    # What had been enqueued was waited for.
    ((kind, done, _),) = rig.streams.log
    assert kind == "record"
    assert done.query()  # type: ignore[attr-defined]
    # What had arrived before is good.
    before.wait()


def test_a_device_that_failed_is_asked_nothing_more_and_one_line_says_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: launch failure\nCompile with TORCH_USE_CUDA_DSA")

    assert rig.path.problem == ""
    with monkeypatch.context() as patch:
        patch.setattr(ops, "gather_kv", fail)
        with pytest.raises(DeviceUnavailableError):
            rig.path.gather(torch.tensor(SLOTS), rig.payloads())
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
    rig.path.close()


def test_memory_that_is_short_for_once_does_not_end_the_use_of_a_device(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(ops, "gather_kv", short)
        for _ in range(2 * device.DEFAULT_RING):
            with pytest.raises(torch.OutOfMemoryError):
                rig.path.gather(torch.tensor(SLOTS), rig.payloads())
    assert rig.path.gather(torch.tensor(SLOTS), rig.payloads()) is not None


def test_loads_of_several_threads_share_the_buffers() -> None:
    with emulation().in_use():
        rig = make_rig(loads=1)
        payloads = rig.payloads()
        for payload, whole in zip(payloads, rig.expected(SLOTS), strict=True):
            payload.copy_(torch.from_numpy(whole))
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
        for payload, whole in zip(payloads, rig.expected(SLOTS), strict=True):
            np.testing.assert_array_equal(payload.numpy(), whole)


def test_after_a_failed_scatter_nothing_reads_the_staging_buffer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: launch failure")

    with monkeypatch.context() as patch:
        patch.setattr(ops, "scatter_kv", fail)
        with pytest.raises(DeviceUnavailableError, match="launch failure"):
            rig.path.scatter(0, torch.tensor(SLOTS), rig.payloads()[0])
    # What had been enqueued was waited for.
    assert [entry[0] for entry in rig.streams.log] == ["record"]


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


def works_both_ways(rig: Rig) -> None:
    payloads = rig.payloads()
    copied = rig.path.gather(torch.tensor(SLOTS), payloads)
    assert copied is not None
    copied.wait()
    rig.path.scatter(0, torch.tensor(SLOTS), payloads[0])


@pytest.mark.parametrize("loads", [3, 100])
@pytest.mark.parametrize("buffers", [4, 12, 50])
def test_half_of_a_devices_free_memory_is_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, buffers: int, loads: int
) -> None:
    with emulation().in_use():
        one = make_rig().path._ring.free[0].payload.stride(0)
        memory = Memory(monkeypatch, 2 * SHARDS * one * buffers)
        rig = make_rig(memory.streams, ring=100, loads=loads)
        assert memory.left >= SHARDS * one * buffers
        assert "of 100 buffers" in caplog.text
        works_both_ways(rig)


def test_a_device_that_gives_less_than_it_said_does_with_what_there_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with emulation().in_use():
        one = make_rig().path._ring.free[0].payload.stride(0)
        memory = Memory(monkeypatch, 1 << 30, (1 << 30) - (2 + 2 * SHARDS) * one)
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


def test_while_the_engine_sleeps_nothing_is_begun(rig: Rig) -> None:
    payloads = rig.payloads()
    rig.streams.ended.clear()
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
    rig.path.resume()
    copied = rig.path.gather(torch.tensor(SLOTS), payloads)
    assert copied is not None
    rig.path.scatter(0, torch.tensor(SLOTS), payloads[0])


def test_a_device_that_failed_can_be_closed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: FakeEvent) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    copied = rig.path.gather(torch.tensor(SLOTS), rig.payloads())
    assert copied is not None
    monkeypatch.setattr(FakeEvent, "synchronize", fail)
    with pytest.raises(RuntimeError, match="unspecified"):
        copied.wait()
    rig.path.close()
    assert "cpu failed: CUDA error: unspecified launch failure" in caplog.text
