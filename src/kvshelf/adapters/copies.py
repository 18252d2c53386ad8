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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kvshelf.adapters.names import check_mode
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
            layout_of_layer = layouts[name]
            if native and isinstance(layout_of_layer, PermutedLayout):
                layout_of_layer = layout_of_layer.as_blocks()
            if runs and runs[-1].layout == layout_of_layer:
                runs[-1].caches.append(kv_caches[name])
            else:
                runs.append(LayerRun(number, [kv_caches[name]], layout_of_layer))
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

    def slots(self, op: LoadStoreOp, *, is_store: bool) -> list[Tensor]:
        """Return the slots of the chunks of an operation, the whole chunks of its tokens.

        Those that a load skips are −1.

        Raises
        ------
        ValueError
            If the operation is malformed, or the caches do not have its blocks.
        """
        size = self._fmt.chunk_size
        chunks = self._count_chunks(op)
        mapping = slots_of(op.block_ids, self._block_size, 0, chunks * size)
        if not is_store:
            mapping[: op.skip_first_n_tokens] = -1
        slots = with_slots(self._fmt, self.memory, mapping, self._num_slots).slots
        return [slots(start, start + size) for start in range(0, chunks * size, size)]

    def _count_chunks(self, op: LoadStoreOp) -> int:
        """Return the number of whole chunks of an operation, which is checked."""
        check_mode("an operation", op.block_hashes, op.token_ids)
        size = self._fmt.chunk_size
        per_chunk = size // self._block_size
        if op.token_ids is None:
            assert op.block_hashes is not None
            chunks = len(op.block_hashes) // per_chunk
        elif op.start % size or not 0 <= op.start <= op.end <= len(op.token_ids):
            raise ValueError(
                f"tokens {op.start} … {op.end} of {len(op.token_ids)}: expected a range that"
                f" begins at a multiple of the chunk size {size}"
            )
        else:
            chunks = op.end // size - op.start // size
        if len(op.block_ids) < chunks * per_chunk:
            raise ValueError(
                f"{len(op.block_ids)} blocks for {chunks} chunks of {per_chunk} blocks:"
                f" expected {chunks * per_chunk}"
            )
        return chunks

    def blocks(self, op: LoadStoreOp, chunks: int) -> list[set[int]]:
        """Return the blocks of each of an operation's chunks that a load writes to."""
        per_chunk = self._fmt.chunk_size // self._block_size
        first = op.skip_first_n_tokens // self._block_size
        return [
            {op.block_ids[number] for number in range(max(start, first), start + per_chunk)}
            for start in range(0, chunks * per_chunk, per_chunk)
        ]
