"""The slots of a request's tokens where the ranks of a group share each block.

Owns the arithmetic of vLLM's decode context parallelism: which tokens a rank of a group holds, and
in which slots of its own paged cache (``_compute_slot_mapping`` in
``vllm/v1/worker/block_table.py``). It is pure.

A block of vLLM's cache manager stands for one block in the cache of every rank of the group. The
ranks hold its tokens in turn: rank 0 the first `interleave` of them, rank 1 the next, and so on.
Each rank packs the tokens that it holds in its own block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvshelf.kv.layout import slots_of


@dataclass(frozen=True, slots=True)
class InterleavedBlocks:
    """Blocks of the cache manager as one rank of a group holds them.

    Parameters
    ----------
    block_size : int
        Slots of a block in the cache of one rank.
    ranks : int
        Number of ranks that share each block; 1 without context parallelism.
    rank : int
        This rank's place among them.
    interleave : int
        Number of neighbouring tokens that a rank holds.

    Raises
    ------
    ValueError
        If a rank's block does not consist of whole runs of neighbouring tokens.
    """

    block_size: int
    ranks: int = 1
    rank: int = 0
    interleave: int = 1
    #: Slot inside this rank's block of each token of a manager block, −1 for those of other ranks.
    _offsets: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} is not one of {self.ranks} ranks")
        if self.ranks > 1 and (self.interleave < 1 or self.block_size % self.interleave):
            raise ValueError(
                f"{self.interleave} neighbouring tokens do not divide blocks of {self.block_size}"
            )
        offsets = torch.full((self.block_size, self.ranks), -1, dtype=torch.int64)
        # Run after run of a block: [runs, ranks, tokens of a run].
        runs = offsets.view(-1, self.ranks, self.interleave if self.ranks > 1 else 1)
        runs[:, self.rank] = torch.arange(self.block_size).view(len(runs), -1)
        object.__setattr__(self, "_offsets", offsets.view(-1))

    @property
    def tokens(self) -> int:
        """Number of tokens in a block of the cache manager."""
        return self.block_size * self.ranks

    def slots_of(self, block_ids: Sequence[int], start: int, count: int) -> Tensor:
        """Return the slot mapping of consecutive tokens of one request.

        Parameters
        ----------
        block_ids : Sequence[int]
            The request's block ids, in the order of its tokens.
        start : int
            Position of the first token in the request.
        count : int
            Number of tokens.

        Returns
        -------
        Tensor
            int64 [count], CPU; −1 for tokens that other ranks hold.

        Raises
        ------
        ValueError
            As :func:`kvshelf.kv.layout.slots_of`.
        """
        if self.ranks == 1:
            return slots_of(block_ids, self.block_size, start, count)
        first, end = start // self.tokens, -(-(start + count) // self.tokens)
        blocks = slots_of(block_ids, 1, first, end - first).unsqueeze(1)
        is_held = self._offsets >= 0
        slots = torch.where(is_held, blocks * self.block_size + self._offsets, -1)
        skip = start - first * self.tokens
        return slots.view(-1)[skip : skip + count]
