"""Which blocks of the engine hold KV of the weights that it has now.

Owns, for each block of vLLM's cache, the *period* in which its KV was computed or loaded. A new
period begins with each round of :mod:`kvshelf.vllm.handshake`. When the round shows that the
weights changed, the blocks of all earlier periods are old, and so is everything that is computed
behind them: requests that were running, and requests that get old blocks from vLLM's own prefix
cache, which is not always reset.

All cache groups of an engine take their blocks from one pool, and a block belongs to one group at a
time, so its id names it. Requests whose images an encoder with earlier weights has seen are old in
any period (:mod:`kvshelf.vllm.encoder_outputs`).

Runs on the engine's step thread. Until the first round it does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvshelf.vllm.metadata import NULL_BLOCK

#: The period of KV that belongs to no weights.
_NEVER: Final = -1


class BlockWeights:
    """The period of each block.

    Attributes
    ----------
    period : int
        The current period; 0 until the first round.
    """

    def __init__(self) -> None:
        self.period = 0
        self._first_valid = 0
        self._blocks: dict[int, int] = {}

    def begin(self) -> None:
        """Begin a period: the weights may differ from now on."""
        self.period += 1

    def settle(self, *, changed: bool) -> None:
        """Note whether the current period has other weights than the one before."""
        if changed:
            self._first_valid = self.period

    def lose(self) -> None:
        """Note that it is unknown which blocks a step filled: all earlier blocks count as old."""
        if self.period:
            self.begin()
            self.settle(changed=True)

    def is_valid(self, period: int) -> bool:
        """Whether KV of a period belongs to the current weights."""
        return period >= self._first_valid

    def admit(
        self, block_ids: Sequence[Sequence[int]], reused: Sequence[int], *, old: bool = False
    ) -> int:
        """Return the period of a request that is admitted now.

        Parameters
        ----------
        block_ids : sequence of Sequence of int
            All its blocks in each cache group.
        reused : Sequence of int
            How many of the first ones of each group held KV already.
        old : bool
            Whether it is computed of something that earlier weights made.
        """
        if not self.period:
            return 0
        known = self._blocks
        # Blocks that a sliding window has passed say nothing. Those behind them do.
        held = [
            block
            for blocks, count in zip(block_ids, reused, strict=True)
            for block in blocks[:count]
            if block != NULL_BLOCK
        ]
        period = min([self.period, *(known.get(block, 0) for block in held)])
        if old:
            period = _NEVER
        new = [blocks[count:] for blocks, count in zip(block_ids, reused, strict=True)]
        self.take(new, period)
        return period

    def take(self, block_ids: Sequence[Sequence[int]], period: int) -> None:
        """Note that blocks of each cache group were given to a request of a period."""
        if self.period:
            for blocks in block_ids:
                self._blocks.update(dict.fromkeys(blocks, period))
