"""The slots of chunks in a worker's paged caches.

Owns how the tokens of a chunk, or the state at its end, lie in the blocks of a cache group. A slot
mapping has one entry for each token where chunks are stored canonically, and one for each block
where blocks are stored whole. A state has one block, and one entry for each row of bytes that its
parts have in the block. Layers of one kind may belong to several cache groups: the mapping of a
chunk then holds the entries of all these groups, one group behind the other.

vLLM's blocks and kvshelf's chunks need not end together. Tokens that a load must not touch are −1:
vLLM has them already, the hit ends before them, or, with decode context parallelism, another rank
holds them (:mod:`kvshelf.kv.interleave`).

A tail has one entry for each token, whatever chunks have: it is always stored canonically.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kvshelf.format.keys import Chunk
from kvshelf.kv.interleave import InterleavedBlocks
from kvshelf.kv.layout import native_slots_of
from kvshelf.kv.states import StateSlots
from kvshelf.kv.topology import ShardPlan
from kvshelf.transfer.context import ChunkSlots
from kvshelf.vllm.metadata import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """The slots of tokens in the blocks of one cache group.

    Attributes
    ----------
    group : int
        Index of the group among the engine's cache groups.
    blocks : InterleavedBlocks
        The tokens of a block that the worker holds.
    unit_tokens : int
        Number of tokens for each entry of a slot mapping, see
        :class:`~kvshelf.vllm.layout_discovery.StoredLayout`.
    """

    group: int
    blocks: InterleavedBlocks
    unit_tokens: int = 1

    def entries(self, chunk_size: int) -> int:
        """Return the number of entries of a chunk's slot mapping."""
        return chunk_size // self.unit_tokens

    def of_rank(self, plan: ShardPlan, interleave: int) -> TokenSlots:
        """Return the slots where the tokens of a block are spread over ranks."""
        size, ranks = self.blocks.block_size, plan.context_ranks
        blocks = InterleavedBlocks(size, ranks, plan.context_rank, interleave)
        return TokenSlots(self.group, blocks, self.unit_tokens)

    def find(
        self, block_ids: Sequence[int], start: int, count: int, *, tail: bool = False
    ) -> Tensor:
        """Return slots of a request's tokens, or ids of whole blocks where these are stored.

        Parameters
        ----------
        block_ids : Sequence of int
            The request's blocks, in the order of its tokens.
        start, count : int
            The first token, counted from the first block on, and the number of tokens.
        tail : bool
            Slots of tokens in any case.

        Returns
        -------
        Tensor
            int64 [count / unit_tokens], or [count] of a tail; CPU.
        """
        if tail or self.unit_tokens == 1:
            return self.blocks.slots_of(block_ids, start, count)
        size = self.blocks.block_size
        return native_slots_of(block_ids, size, self.unit_tokens, start, count)

    def to_load(
        self,
        block_ids: Sequence[int],
        start: int,
        end: int,
        first: int,
        rows: Tensor,
        *,
        tail: bool = False,
    ) -> None:
        """Fill in the slots of tokens ``[start, end)`` of a request; null blocks have none.

        Parameters
        ----------
        block_ids : Sequence of int
            The request's blocks from position 0 on.
        start, end : int
        first : int
            The token that the first entry of `rows` stands for.
        rows : Tensor
            int64, contiguous; what it holds elsewhere stays.
        tail : bool
            As for :meth:`find`.
        """
        unit = 1 if tail else self.unit_tokens
        ids = self.find(block_ids, start, end - start, tail=tail)
        # All requests share the null block.
        ids[ids // (self.blocks.block_size // unit) == NULL_BLOCK] = -1
        at = (start - first) // unit
        rows[at : at + len(ids)] = ids


@dataclass(frozen=True, slots=True)
class StateBlocks:
    """The rows of a state in one block of a cache group.

    Attributes
    ----------
    group : int
        Index of the group among the engine's cache groups.
    rows : StateSlots
    block_size : int
        Tokens in a block.
    """

    group: int
    rows: StateSlots
    block_size: int

    def find(self, block: int) -> Tensor:
        """Return the slots of the rows of one block: int64, CPU."""
        return torch.tensor(self.rows.of(block), dtype=torch.int64)


GroupSlots: TypeAlias = TokenSlots | StateBlocks


def slots_to_store(
    groups: Sequence[GroupSlots],
    block_ids: Sequence[Sequence[int]],
    index: int,
    chunk_size: int,
    *,
    tokens: int | None = None,
) -> Tensor:
    """Return the slot mapping of a chunk that a step completed.

    Parameters
    ----------
    groups : Sequence of GroupSlots
        Of the chunk's kind.
    block_ids : Sequence of Sequence of int
        For each cache group of the engine, the blocks that hold the chunk's tokens, in order, or
        the block that holds the state.
    index : int
        The chunk's index in its request.
    chunk_size : int
    tokens : int, optional
        Number of tokens of a tail; None for a whole chunk. States have no tails.
    """
    parts = []
    for group in groups:
        ids = block_ids[group.group]
        if isinstance(group, StateBlocks):
            (block,) = ids
            parts.append(group.find(block))
        else:
            # The first of these blocks may begin with tokens of the chunk before.
            first, tail = index * chunk_size % group.blocks.tokens, tokens is not None
            parts.append(group.find(ids, first, tokens or chunk_size, tail=tail))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def slots_to_load(
    groups: Sequence[GroupSlots],
    chunks: Sequence[Chunk],
    block_ids: Sequence[Sequence[int]],
    start: int,
    end: int,
    chunk_size: int,
) -> list[ChunkSlots]:
    """Return slot mappings of a load's chunks, −1 outside its tokens and in null blocks.

    Chunks of which no token is wanted are left out: a sliding window has passed them, or other
    ranks of a context-parallel group hold all their tokens.

    Parameters
    ----------
    groups : Sequence of GroupSlots
        Of the chunks' kind; not of states.
    chunks : Sequence of Chunk
        All chunks that overlap tokens ``[start, end)``. The last one may be a tail.
    block_ids : Sequence of Sequence of int
        For each cache group of the engine, the request's blocks from position 0 on.
    start, end : int
        The tokens to load.
    chunk_size : int

    Raises
    ------
    ValueError
        If `chunks` are too few or too many, or a tail ends before `end`.
    """
    first = start // chunk_size
    count = -(-end // chunk_size) - first
    if len(chunks) != count:
        raise ValueError(f"{len(chunks)} chunks cannot fill tokens {start} to {end} of a request")
    whole_chunks = sum(not chunk.tail for chunk in chunks)
    border = (first + whole_chunks) * chunk_size
    items = _rows_to_load(
        groups, chunks[:whole_chunks], block_ids, start, min(border, end), chunk_size, chunk_size
    )
    for tail in chunks[whole_chunks:]:
        if border + tail.tokens < end:
            raise ValueError(f"a tail of {tail.tokens} tokens cannot fill tokens {border} to {end}")
        begin = max(start, border)
        items += _rows_to_load(groups, [tail], block_ids, begin, end, chunk_size, tail.tokens)
    return items


def _rows_to_load(
    groups: Sequence[GroupSlots],
    chunks: Sequence[Chunk],
    block_ids: Sequence[Sequence[int]],
    start: int,
    end: int,
    chunk_size: int,
    tokens: int,
) -> list[ChunkSlots]:
    """Return the slot mappings of chunks of `tokens` tokens each, of which one may be a tail."""
    if not chunks:
        return []
    first = start // chunk_size * chunk_size
    tail = tokens < chunk_size
    parts = []
    for group in groups:
        assert isinstance(group, TokenSlots)
        entries = tokens if tail else group.entries(chunk_size)
        slots = torch.full((len(chunks) * entries,), -1, dtype=torch.int64)
        group.to_load(block_ids[group.group], start, end, first, slots, tail=tail)
        parts.append(slots.view(len(chunks), -1))
    rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    are_wanted = (rows >= 0).any(dim=1).tolist()
    return [
        ChunkSlots(chunk, row)
        for chunk, row, is_wanted in zip(chunks, rows.unbind(), are_wanted, strict=True)
        if is_wanted
    ]


def state_to_load(
    groups: Sequence[GroupSlots], chunk: Chunk, block_ids: Sequence[Sequence[int]], end: int
) -> ChunkSlots:
    """Return the slot mapping of the state after a load's last token.

    Parameters
    ----------
    groups : Sequence of GroupSlots
        Of all groups with states that the worker holds.
    chunk : Chunk
        The chunk that ends at token `end`.
    block_ids : Sequence of Sequence of int
        For each cache group of the engine, the request's blocks from position 0 on.
    end : int
        Number of tokens that have KV after the load.

    Raises
    ------
    ValueError
        If the state does not end with a block, or has no block to be loaded into.
    """
    parts = []
    for group in groups:
        assert isinstance(group, StateBlocks)
        column, remainder = divmod(end, group.block_size)
        ids = block_ids[group.group]
        if remainder or not 1 <= column <= len(ids) or ids[column - 1] == NULL_BLOCK:
            raise ValueError(
                f"the state after {end} tokens has no block: group {group.group} has"
                f" {len(ids)} blocks of {group.block_size} tokens"
            )
        parts.append(group.find(ids[column - 1]))
    return ChunkSlots(chunk, torch.cat(parts))
