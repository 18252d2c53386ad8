"""Which memory of an engine an operation copies: chunks, slots and blocks of its paged caches.

Owns what an engine asks for (:class:`LoadStoreOp`), and its caches as these operations name them,
by blocks (:class:`EngineCaches`). Copies are made by :mod:`kvshelf.kv.caches`.

Contracts
---------
* The caches have exactly the layers of the worker's namespace and shards, and the layout is the
  caller's: none is guessed.
* A malformed operation is refused before anything of it begins. Nothing outside of the caches'
  blocks is read or written.

Threads
-------
Any thread may call all methods, and use :attr:`EngineCaches.memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kvshelf.adapters.names import check_hash, check_mode, striding_block_hashes
from kvshelf.errors import ConfigError
from kvshelf.format.objects import ObjectFormat
from kvshelf.format.tensors import native_block_size, required_field
from kvshelf.kv.caches import KVCache, LayerRun
from kvshelf.kv.layout import PagedLayout, PermutedLayout, slots_of
from kvshelf.kv.sources import count_slots, open_paged, with_slots
from kvshelf.kv.topology import ShardPlan

Layout: TypeAlias = "PagedLayout | PermutedLayout"


@dataclass(slots=True)
class LoadStoreOp:
    """What is stored or loaded for one request. Exactly one of tokens and hashes is given.

    Attributes
    ----------
    block_ids : list of int
        The engine's blocks, in the order of the tokens: from token `start` on, or in hash mode one
        for each hash.
    token_ids : list of int, optional
        Token mode: the prompt from its beginning.
    block_hashes : list of bytes, optional
        Hash mode: the hash of each block.
    start : int
        Token mode: the first token to store or to load; a multiple of the chunk size.
    end : int
        Token mode: the end of the tokens to store or to load.
    skip_first_n_tokens : int
        A load writes nothing to the blocks of so many first tokens.
    """

    block_ids: list[int]
    token_ids: list[int] | None = None
    block_hashes: list[bytes] | None = None
    start: int = 0
    end: int = 0
    skip_first_n_tokens: int = 0

    def __len__(self) -> int:
        return len(self.block_ids)


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """One chunk of an operation.

    Attributes
    ----------
    number : int
        Counted from the operation's first chunk.
    slots : Tensor
        As :meth:`kvshelf.kv.caches.KVMemory.gather` takes them.
    shards : tuple of int
        What to store, or to load.
    """

    number: int
    slots: Tensor
    shards: tuple[int, ...]


class EngineCaches:
    """The caches of one worker.

    Parameters
    ----------
    fmt : ObjectFormat
    plan : ShardPlan
        The shards that the worker holds.
    block_size : int
        Tokens of a block.
    kv_caches : Mapping[str, Tensor]
        The cache of each layer.
    layout : PagedLayout or PermutedLayout, or a mapping of them by layer
        How a block lies in the caches.

    Attributes
    ----------
    memory : KVCache
        Gathers and scatters chunks.

    Raises
    ------
    ConfigError
        If the caches do not fit the namespace.
    """

    def __init__(
        self,
        fmt: ObjectFormat,
        plan: ShardPlan,
        block_size: int,
        kv_caches: Mapping[str, Tensor],
        layout: Layout | Mapping[str, Layout],
    ) -> None:
        shard = plan.shards[0]
        names = [spec.name for spec in fmt.tensors(shard)]
        different = sorted(set(names) ^ set(kv_caches))
        if different:
            raise ConfigError(
                f"{', '.join(different[:4])}: expected the caches of exactly the layers that this"
                f" worker has in the namespace, {names[0]} … {names[-1]}"
            )
        layouts = layout if isinstance(layout, Mapping) else dict.fromkeys(names, layout)
        stored = required_field(fmt.namespace.record, "layouts")
        native = native_block_size(stored[fmt.layer_numbers(shard)[0]]) is not None
        runs: list[LayerRun] = []
        for number, name in enumerate(names):
            own = layouts[name]
            if native and isinstance(own, PermutedLayout):
                own = own.as_blocks()
            if runs and runs[-1].layout == own:
                runs[-1].caches.append(kv_caches[name])
            else:
                runs.append(LayerRun(number, [kv_caches[name]], own))
        self._fmt = fmt
        self._plan = plan
        self._block_size = block_size
        self._num_slots = min(count_slots(fmt, run.layout) for run in runs)
        self.memory: KVCache = open_paged(fmt, runs, plan)
        self._device = runs[0].caches[0].device

    @property
    def device(self) -> torch.device:
        """Where the caches are."""
        return self._device

    def copies(self, op: LoadStoreOp, *, store: bool) -> list[ChunkCopy]:
        """Return what a store, or a load, copies of the caches: the whole chunks of its tokens.

        Raises
        ------
        ValueError
            If the operation is malformed, or the caches do not have its blocks.
        """
        size = self._fmt.chunk_size
        places = self._places(op)
        first = 0 if store else op.skip_first_n_tokens
        mapping = slots_of(op.block_ids, self._block_size, 0, len(places) * size)
        mapping[:first] = -1
        slots = with_slots(self._fmt, self.memory, mapping, self._num_slots).slots
        copies = []
        for number, place in enumerate(places):
            shards = self._plan.writes(place) if store else self._plan.shards
            if shards and (number + 1) * size > first:
                copies.append(ChunkCopy(number, slots(number * size, (number + 1) * size), shards))
        return copies

    def _places(self, op: LoadStoreOp) -> Sequence[int]:
        """Return a number for each chunk, by which workers with the same heads share stores."""
        check_mode("an operation", op.block_hashes, op.token_ids)
        size = self._fmt.chunk_size
        per_chunk = size // self._block_size
        places: Sequence[int]
        if op.token_ids is not None:
            if op.start % size or not 0 <= op.start <= op.end <= len(op.token_ids):
                raise ValueError(
                    f"tokens {op.start} … {op.end} of {len(op.token_ids)}: expected a range that"
                    f" begins at a multiple of the chunk size {size}"
                )
            places = range(op.start // size, op.end // size)
        else:
            assert op.block_hashes is not None
            # All of them know the hashes, but not where in the prompt these are.
            hashes = striding_block_hashes(op.block_hashes, per_chunk)
            places = [int.from_bytes(check_hash(one), "little") for one in hashes]
        if len(op.block_ids) < len(places) * per_chunk:
            raise ValueError(
                f"{len(op.block_ids)} blocks for {len(places)} chunks of {per_chunk} blocks:"
                f" expected {len(places) * per_chunk}"
            )
        return places

    def blocks(self, op: LoadStoreOp, chunks: Sequence[int]) -> set[int]:
        """Return the blocks of an operation's chunks that a load writes to."""
        per_chunk = self._fmt.chunk_size // self._block_size
        first = op.skip_first_n_tokens // self._block_size
        return {
            op.block_ids[place]
            for chunk in chunks
            for place in range(chunk * per_chunk, (chunk + 1) * per_chunk)
            if place >= first
        }
