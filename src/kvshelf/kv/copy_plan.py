"""Which launches copy a chunk between the caches of a device and a device buffer.

Owns the joining of copy calls: one launch copies all layers of one layout, wherever they lie in a
payload, and all neighbouring shards that differ only in their heads. Any thread may call all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import cast

import torch
from torch import Tensor

from kvshelf.errors import UnsupportedError
from kvshelf.kv import ops
from kvshelf.kv.caches import LayerCall, slot_count, tail_calls
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.streams import Streams


@dataclass(frozen=True, slots=True)
class _Run:
    """Layers that one launch copies, wherever they lie in a payload."""

    call: LayerCall
    caches: list[Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The launches that copy all shards of a chunk, or of a tail.

    Attributes
    ----------
    calls : Mapping of int to Sequence[LayerCall]
        The copy calls of each shard, from which it was made.
    groups : list of (int, int, list of _Run)
        Neighbouring shards that differ only in their heads: the first one's place among all
        shards, their number, and the launches for the first one.
    sizes : list of int
        Payload bytes of each shard.
    tokens : int
        Slots of a chunk, of which each call uses some: see :attr:`LayerCall.first_slot`.
    """

    calls: Mapping[int, Sequence[LayerCall]]
    groups: list[tuple[int, int, list[_Run]]]
    sizes: list[int]
    tokens: int

    @classmethod
    def of(cls, calls: Mapping[int, Sequence[LayerCall]]) -> CopyPlan:
        """Make the plan for the copy calls of each shard, in the order of the shards.

        Raises
        ------
        UnsupportedError
            If the elements of a cache are permuted, which no kernel supports.
        """
        groups: list[tuple[int, int, list[_Run]]] = []
        alike: tuple[object, ...] = ()
        for position, of_shard in enumerate(calls.values()):
            first, count = groups[-1][:2] if groups else (0, 0)
            if groups and alike == _form(of_shard, position - first):
                groups[-1] = (first, count + 1, groups[-1][2])
                continue
            alike = _form(of_shard)
            groups.append((position, 1, _runs(of_shard)))
        sizes = [max(call.end for call in of_shard) for of_shard in calls.values()]
        return cls(calls, groups, sizes, slot_count(next(iter(calls.values()))))

    def of_tail(self, tokens: int) -> CopyPlan:
        """Return the plan for a tail, see :meth:`KVMemory.of_tail`."""
        calls = self.calls.items()
        if any(call.token_layout is not None for _, of_shard in calls for call in of_shard):
            raise UnsupportedError("caches on a device whose chunks are whole blocks have no tails")
        return CopyPlan.of({shard: tail_calls(of_shard, tokens) for shard, of_shard in calls})

    def allocate(self, shards: int) -> Tensor:
        """Return a device buffer, uint8 [shards, bytes].

        Each shard is aligned, so that the kernel can use its widest vectors.
        """
        (first, *_), *_ = self.calls.values()
        size = -(-max(self.sizes) // 256) * 256
        # vLLM's step runs under inference_mode. Other threads could not write to a tensor that is
        # made there.
        with torch.inference_mode(False):
            return torch.empty(shards, size, dtype=torch.uint8, device=first.caches[0].device)

    def prepare(self) -> None:
        """Check the caches, and begin to compile the kernel for their device."""
        for _, _, runs in self.groups:
            for run in runs:
                ops.prepare(run.caches, cast(PagedLayout, run.call.layout))

    def check_slots(self, slots: Tensor) -> None:
        """Check a chunk's slots with the layouts that they are used for.

        Raises
        ------
        ValueError
            If a slot is not in the caches, or they are not as many as a chunk has.
        """
        if slots.shape != (self.tokens,) or not slots.is_contiguous():
            raise ValueError(
                f"slot_mapping is {list(slots.shape)} with strides {list(slots.stride())}; expected"
                f" a contiguous int64 CPU tensor [{self.tokens}]"
            )
        calls = [run.call for _, _, runs in self.groups for run in runs]
        for first, count, layout in {(c.first_slot, c.count, c.layout) for c in calls}:
            ops.check_slots(slots[first : first + count], cast(PagedLayout, layout))

    def enqueue(
        self,
        streams: Streams,
        copy: Callable[..., None],
        places: range,
        slots: Tensor,
        buffer: Tensor,
    ) -> None:
        """Enqueue a gather or scatter of neighbouring shards on the current stream."""
        for first, count, runs in self.groups:
            low, high = max(places.start, first), min(places.stop, first + count)
            part = buffer[low - places.start : high - places.start]
            for run in runs if low < high else ():
                call = run.call
                head = call.first_head + (low - first) * call.heads
                rows = call.rows(slots)
                streams.enqueue(
                    copy, run.caches, rows, part, call.layout, head, call.heads, run.starts
                )


def _form(calls: Sequence[LayerCall], behind: int = 0) -> tuple[object, ...]:
    """Return what the calls of shards of a group have alike, of one so many places behind."""
    return tuple(
        (
            *(tuple(map(id, call.caches)), call.layout, call.start, call.end, call.heads),
            *(call.parts, call.part, call.first_slot, call.first_head - behind * call.heads),
        )
        for call in calls
    )


def _runs(calls: Sequence[LayerCall]) -> list[_Run]:
    """Join the calls that differ only in their layers: states have several parts of each layer.

    Layers that are less aligned stay apart: what is copied together is copied in vectors of one
    width.
    """
    runs: dict[Hashable, _Run] = {}
    for call in calls:
        if not isinstance(call.layout, PagedLayout):
            raise UnsupportedError(
                f"the KV caches on {call.caches[0].device} are permuted inside their blocks; gather"
                " and scatter of such caches exist for CPUs only"
            )
        step = (call.end - call.start) // len(call.caches)
        for number, cache in enumerate(call.caches):
            start = call.start + number * step
            alike = (call.layout, call.heads, call.first_head, call.parts, call.part)
            kind = (cache.shape, cache.stride(), cache.dtype, gcd(16, start, cache.data_ptr()))
            run = runs.setdefault((alike, call.first_slot, call.count, kind), _Run(call))
            run.caches.append(cache)
            run.starts.append(start)
    return list(runs.values())
