"""The paged KV caches of one worker, as the objects of a namespace see them.

Owns the interface that all KV caches implement (:class:`KVCache`), the record of one copy
call (:class:`LayerCall`), the computation of those calls from the layers of a worker
(:func:`layer_calls`), and the implementation for caches in host memory
(:class:`HostKVCache`). :mod:`kvshelf.kv.device` has the one for caches on a GPU.

Contracts
---------
* A copy touches only the slots given.
* A tail is copied through a view of the memory for its number of tokens (:meth:`KVMemory.of_tail`),
  which has a slot for each token in every layout.
* A copy of caches in host memory has ended when the call returns; one of caches on a device
  has ended when :meth:`PendingCopy.wait` of its result returns.
* ``gather`` and ``fence`` never wait: the engine's step thread calls them. ``scatter``,
  ``pause`` and ``close`` may wait, the latter two until a deadline. Any thread may call all.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.format.kinds import STATE
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv import ops
from kvshelf.kv.layout import PagedLayout, PermutedLayout
from kvshelf.kv.topology import ShardPlan

__all__ = ["DONE", "HostKVCache", "KVCache", "KVMemory", "LayerCall", "PendingCopy"]

#: Seconds after which a device that does not answer counts as failed.
ANSWER_SECONDS: Final = 60.0
#: Numbers of tokens for which a memory keeps its copy calls of tails.
TAILS_KEPT: Final = 64


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Consecutive tensors of an object, with paged caches of one layout and the same slots.

    Attributes
    ----------
    first_layer : int
        Index of the first of them among the tensors of an object (``ObjectFormat.tensors``): one
        for each layer, or for each part of a state.
    caches : list of Tensor
        The paged cache of each tensor.
    layout : PagedLayout or PermutedLayout
        How a block lies in each of them.
    first_slot : int
        Where their slots begin among the slots of a chunk. Layers of several cache groups have
        slots of their own: the groups' slots follow each other.
    token_layout : PagedLayout or PermutedLayout, optional
        How tokens lie in each of them, where `layout` is that of whole blocks and it is known.
    """

    first_layer: int
    caches: list[Tensor]
    layout: PagedLayout | PermutedLayout
    first_slot: int = 0
    token_layout: PagedLayout | PermutedLayout | None = None


@dataclass(frozen=True)
class LayerCall:
    """Layers of one layout and their part of a shard's payload: one call of the copy code.

    Attributes
    ----------
    caches : list of Tensor
        The cache of each layer.
    layout : PagedLayout or PermutedLayout
        How rows lie in each of them.
    start : int
        The first byte of these layers in the payload.
    end : int
        The end of their bytes in the payload.
    heads : int
        Number of the shard's KV heads.
    first_head : int
        The first of these heads in the caches.
    parts : int
        The payload holds so many groups of `heads` heads in a row, of which the caches hold one.
    part : int
        Which of these groups that is, from 0 on.
    first_slot : int
        The call uses the :attr:`count` slots of a chunk from this one on.
    token_layout : PagedLayout or PermutedLayout, optional
        As in :class:`LayerRun`.
    """

    caches: list[Tensor]
    layout: PagedLayout | PermutedLayout
    start: int
    end: int
    heads: int
    first_head: int = 0
    parts: int = 1
    part: int = 0
    first_slot: int = 0
    token_layout: PagedLayout | PermutedLayout | None = None

    @functools.cached_property
    def count(self) -> int:
        """Number of slots that the call uses."""
        return (self.end - self.start) // self._row(self.layout)

    def _row(self, layout: PagedLayout | PermutedLayout) -> int:
        """Return the bytes that a slot of a layout takes in the payload."""
        return len(self.caches) * layout.chunk_bytes(1, self.heads) * self.parts

    def of_tail(self, tokens: int) -> LayerCall:
        """Return the call for a tail of `tokens` tokens: a slot for each, its own offsets.

        Raises
        ------
        ValueError
            If a chunk has no more tokens.
        UnsupportedError
            If layers of several cache groups share the payload.
        """
        layout = self.token_layout or self.layout
        # In every form a chunk has as many bytes as the canonical form of its tokens.
        chunk = (self.end - self.start) // self._row(layout)
        if not 1 <= tokens < chunk:
            raise ValueError(f"a tail of {tokens} tokens: expected 1 to {chunk - 1}")
        if self.first_slot:
            raise UnsupportedError("layers of several cache groups have no tails")
        start, end = self.start // chunk * tokens, self.end // chunk * tokens
        return replace(self, layout=layout, start=start, end=end, token_layout=None)

    def own(self, slots: Tensor) -> Tensor:
        """Return the slots that the call uses, of all slots of a chunk: int64 [count]."""
        count = self.count
        # A slice of a tensor takes as long as copying 50 KB.
        if not self.first_slot and slots.numel() == count:
            return slots
        return slots[self.first_slot : self.first_slot + count]

    def rows(self, slots: Tensor) -> Tensor:
        """Return the slot of each row of the payload, −1 for heads that the caches do not hold.

        Parameters
        ----------
        slots : Tensor
            int64, of all slots of a chunk, as for :meth:`KVMemory.scatter`.

        Returns
        -------
        Tensor
            int64 [count × parts].
        """
        slots = self.own(slots)
        if self.parts == 1:
            return slots
        rows = slots.new_full((len(slots), self.parts), -1)
        rows[:, self.part] = slots
        return rows.view(-1)


class PendingCopy:
    """A gather that has begun. This class is one that has ended, see :data:`DONE`."""

    def done(self) -> bool:
        """Whether nothing writes to the payloads any more."""
        return True

    def wait(self, deadline: float | None = None) -> None:
        """Wait until the payloads are filled.

        Parameters
        ----------
        deadline : float, optional
            In seconds of :func:`time.monotonic`; by default in :data:`ANSWER_SECONDS`.

        Raises
        ------
        DeviceStuckError
            The device has not answered by then. Until :meth:`done` it may write to the payloads.
        DeviceUnavailableError
            The content of the payloads must not be used.
        """


#: A gather that had ended when the call returned.
DONE: Final = PendingCopy()


class KVMemory(ABC):
    """Memory from which KV is gathered and to which it is scattered, shard by shard."""

    @abstractmethod
    def gather(self, slots: Tensor, payloads: Sequence[Tensor]) -> PendingCopy | None:
        """Copy one chunk's KV into its payloads, or begin to.

        Parameters
        ----------
        slots : Tensor
            int64 [slots], CPU: one for each token, for native layouts a block id for each block;
            for several cache groups, those of one group after those of another.
        payloads : Sequence[Tensor]
            uint8 [payload bytes] in host memory, for each shard that the memory holds.

        Returns
        -------
        PendingCopy or None
            :data:`DONE` if the copy has ended. None if no buffer is free now; nothing
            has happened then.

        Raises
        ------
        ValueError
            If an argument does not fit.
        DeviceUnavailableError
            The caches cannot be used; nothing uses the payloads any more.
        """

    @abstractmethod
    def scatter(self, shard: int, slots: Tensor, payload: Tensor, fence: object = None) -> None:
        """Copy one shard of a chunk into its slots, and wait until it is there.

        Parameters
        ----------
        shard : int
            Number of the shard among all shards of the namespace.
        slots : Tensor
            As for :meth:`gather`; −1 = skip.
        payload : Tensor
            uint8 [payload bytes] in host memory.
        fence : object
            What :meth:`KVCache.fence` returned when the load began.

        Raises
        ------
        ValueError
            If an argument does not fit.
        DeviceUnavailableError
            The caches cannot be used; nothing reads `payload` or writes to them any more.
        """

    def scatter_chunk(
        self,
        shards: Sequence[int],
        slots: Tensor,
        payloads: Sequence[Tensor],
        fence: object = None,
    ) -> None:
        """Copy all shards of a chunk that the memory holds into their slots, and wait.

        Parameters
        ----------
        shards : Sequence[int]
            Their numbers, in order.
        slots, fence
            As for :meth:`scatter`.
        payloads : Sequence[Tensor]
            As for :meth:`scatter`, of each shard.

        Raises
        ------
        ValueError, DeviceUnavailableError
            As for :meth:`scatter`.
        """
        for shard, payload in zip(shards, payloads, strict=True):
            self.scatter(shard, slots, payload, fence)

    def of_tail(self, tokens: int) -> KVMemory:
        """Return the same memory for tails: its methods take slots and payloads of one.

        Parameters
        ----------
        tokens : int
            Number of tokens of the tails. They have one slot for each token, and the payloads
            that the format gives them.

        Raises
        ------
        ValueError
            If a chunk has no more tokens.
        UnsupportedError
            If the memory has no tails.
        """
        raise UnsupportedError(f"{type(self).__name__} has no tails")

    def close(self, deadline: float | None = None) -> None:
        """Wait for the copies that run, and begin no more. Idempotent.

        The memory is its owner's again when this returns: a scatter that has not begun to write
        raises. The deadline is as for :meth:`KVCache.pause`; by default in two seconds.
        """


class KVCache(KVMemory):
    """The paged KV cache of one worker: a :class:`KVMemory` that an engine owns."""

    @property
    def problem(self) -> str:
        """How the device of the caches failed; empty while it works."""
        return ""

    def fence(self) -> object:
        """Return a mark of the engine's work so far, which a scatter has to wait for.

        Raises
        ------
        DeviceUnavailableError
            If the caches cannot be used.
        """
        return None

    @property
    def room(self) -> int:
        """How many gathers may be under way at once."""
        return sys.maxsize

    def pause(self, deadline: float | None = None) -> None:
        """Wait for the copies that run and begin no more: the caches' memory is released.

        A device that does not answer is not waited for any longer than to the deadline, in seconds
        of :func:`time.monotonic`; by default half a minute.
        """

    def resume(self) -> None:
        """Continue after :meth:`pause`: the caches are back, at the same addresses or others."""


class HostKVCache(KVCache):
    """KV caches in host memory.

    Parameters
    ----------
    calls : Mapping[int, Sequence[LayerCall]]
        The copy calls of each shard, in the order of the shards.
    """

    def __init__(self, calls: Mapping[int, Sequence[LayerCall]]) -> None:
        self._calls = calls
        self._slots = slot_count(next(iter(calls.values()), ()))
        self._of_tail = functools.lru_cache(TAILS_KEPT)(
            lambda tokens: HostKVCache(
                {shard: tail_calls(of_shard, tokens) for shard, of_shard in calls.items()}
            )
        )

    def of_tail(self, tokens: int) -> HostKVCache:
        """See :meth:`KVMemory.of_tail`."""
        return self._of_tail(tokens)

    def gather(self, slots: Tensor, payloads: Sequence[Tensor]) -> PendingCopy:
        """See :meth:`KVMemory.gather`. The copy has ended when this method returns."""
        if len(payloads) != len(self._calls):
            raise ValueError(f"{len(payloads)} payloads for {len(self._calls)} shards")
        check_slot_count(slots, self._slots)
        # The slots of each range that calls use; all shards use the same.
        ranges: dict[tuple[int, int], Tensor] = {}
        for calls, payload in zip(self._calls.values(), payloads, strict=True):
            for call in calls:
                of_call = (call.first_slot, call.count)
                if (slots_of_call := ranges.get(of_call)) is None:
                    slots_of_call = ranges[of_call] = call.own(slots)
                part = payload[call.start : call.end]
                ops.gather_kv(
                    call.caches, slots_of_call, part, call.layout, call.first_head, call.heads
                )
        return DONE

    def scatter(self, shard: int, slots: Tensor, payload: Tensor, fence: object = None) -> None:
        """See :meth:`KVMemory.scatter`."""
        check_slot_count(slots, self._slots)
        for call in self._calls[shard]:
            part, rows = payload[call.start : call.end], call.rows(slots)
            ops.scatter_kv(call.caches, rows, part, call.layout, call.first_head, call.heads)


def tail_calls(calls: Sequence[LayerCall], tokens: int) -> list[LayerCall]:
    """Return the copy calls of a shard for tails, see :meth:`LayerCall.of_tail`."""
    return [call.of_tail(tokens) for call in calls]


def slot_count(calls: Sequence[LayerCall]) -> int:
    """Return how many slots a chunk has for the copy calls of a shard."""
    return max((call.first_slot + call.count for call in calls), default=0)


def check_slot_count(slots: Tensor, expected: int) -> None:
    """Check that a chunk's slots are as many as its copy calls use together.

    Raises
    ------
    ValueError
        If they are not.
    """
    if slots.numel() != expected:
        raise ValueError(f"slot_mapping has {slots.numel()} slots; expected {expected}")


def layer_calls(
    fmt: ObjectFormat, runs: Sequence[LayerRun], plan: ShardPlan | None = None
) -> dict[int, list[LayerCall]]:
    """Return the copy calls of each shard that a worker holds.

    Parameters
    ----------
    fmt : ObjectFormat
    runs : Sequence[LayerRun]
        All tensors of the worker's stage, in order.
    plan : ShardPlan, optional
        The shards whose heads the worker holds; all of them when absent.

    Raises
    ------
    ConfigError
        If layers and heads do not match those of the namespace.
    """
    plan = plan or ShardPlan.whole(fmt.shards)
    layers = sum(len(run.caches) for run in runs)
    calls = {}
    for position, shard in enumerate(plan.shards):
        specs = fmt.tensors(shard)
        if layers != len(specs):
            raise ConfigError(
                f"{layers} layers are registered, but objects of this namespace hold"
                f" {len(specs)}: the engine's model does not match the namespace"
            )
        calls[shard] = [_call(fmt, run, plan, position) for run in runs]
    return calls


def _call(fmt: ObjectFormat, run: LayerRun, plan: ShardPlan, place: int) -> LayerCall:
    """Return the call for one run of layers of the worker's shard number `place`."""
    shards = len(plan.shards)
    specs = fmt.tensors(plan.shards[place])
    first = specs[run.first_layer]
    start = first.offset
    last = specs[run.first_layer + len(run.caches) - 1]
    end = last.offset + last.nbytes
    heads = run.layout.heads // shards
    chunk = fmt.chunk_size
    if heads * shards != run.layout.heads:
        raise ConfigError(
            f"{run.layout.heads} KV heads cannot be split over {shards} shards: set `shards` to a"
            " divisor"
        )
    # Shapes with heads are [2, tokens, heads, head size] and [blocks, heads, bytes].
    parts = max(1, first.shape[-2] // heads) if plan.divided and len(first.shape) > 2 else 1
    row = run.layout.chunk_bytes(1, heads) * parts
    slots, remainder = divmod(end - start, len(run.caches) * row)
    # A state is one block of its cache; of other kinds each slot holds equally many tokens.
    fits = slots == run.layout.block_size if fmt.kind == STATE else slots and not chunk % slots
    if remainder or not fits:
        raise ConfigError(
            f"objects of this namespace hold {end - start} bytes of {len(run.caches)} layers,"
            f" which are not a whole number of rows of {row} bytes of the registered caches: the"
            " engine's model does not match the namespace"
        )
    part = plan.part(parts)
    return LayerCall(
        run.caches,
        run.layout,
        start,
        end,
        heads,
        first_head=place * heads,
        parts=parts,
        part=part,
        first_slot=run.first_slot,
        token_layout=run.token_layout,
    )
