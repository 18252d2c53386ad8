"""Which blocks of the engine hold KV of the weights that it has now.

Owns, for each block of vLLM's cache, the *period* in which its KV was computed or loaded. A new
period begins with each round of :mod:`kvshelf.vllm.handshake`. When the round shows that the
weights changed, the blocks of all earlier periods are old, and so is everything that is computed
behind them: requests that were running, and requests that get old blocks from vLLM's own prefix
cache, which is not always reset.

All cache groups of an engine take their blocks from one pool, and a block belongs to one group at a
time, so its id names it. Requests with images, audio or video are old in any period while vLLM may
have what an encoder with earlier weights made of them (:mod:`kvshelf.vllm.encoder_outputs`).

Contracts
---------
* After a change of weights nothing is stored that was computed before it, or behind blocks that
  were, or of an encoder's output that was.
* Runs on the engine's step thread. Until the first round it does nothing.

When this part fails, all blocks of before count as old.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvshelf.vllm.encoder_outputs import EncoderOutputs
from kvshelf.vllm.metadata import NULL_BLOCK, StepMetadata
from kvshelf.vllm.scheduler.requests import RequestState
from kvshelf.vllm.scheduler.shared import Shared, SharingPart

#: The period of KV that belongs to no weights.
_NEVER: Final = -1


class BlockPeriods(SharingPart):
    """The periods of one engine's blocks.

    Parameters
    ----------
    shared : Shared
    """

    failure = "it is not known which blocks a step filled"

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        #: The current period; 0 until the first round.
        self._period = 0
        self._first_valid = 0
        self._blocks: dict[int, int] = {}
        self._encoder_outputs = EncoderOutputs()

    def begin(self) -> None:
        """Begin a period: the weights may differ from now on."""
        self._period += 1
        self._encoder_outputs.begin()

    def settle(self, *, changed: bool) -> None:
        """Note whether the weights differ from those of the period before."""
        if changed:
            self._first_valid = self._period
        self._encoder_outputs.settle(changed=changed)

    def lose(self) -> None:
        """Note that it is unknown which blocks a step filled: all earlier blocks count as old."""
        if self._period:
            self._period += 1
            self._first_valid = self._period

    def is_valid(self, state: RequestState) -> bool:
        """Whether KV of a request belongs to the current weights."""
        return state.period >= self._first_valid

    def admit(
        self, block_ids: Sequence[Sequence[int]], computed: int, features: Iterable[Any] | None
    ) -> int:
        """Return the period of a request that is admitted now.

        Parameters
        ----------
        block_ids : sequence of Sequence of int
            All its blocks in each cache group.
        computed : int
            So many of its first tokens are in a cache.
        features : iterable or None
            Its multimodal items.
        """
        if not self._period:
            return 0
        scratch = self._groups.scratch
        # A ring has no KV of these tokens.
        sizes = [0 if group.index in scratch else group.block_size for group in self._groups]
        filled = [-(-computed // size) if size else 0 for size in sizes]
        # Blocks that a sliding window has passed say nothing. Those behind them do.
        held = [
            block
            for blocks, count in zip(block_ids, filled, strict=True)
            for block in blocks[:count]
            if block != NULL_BLOCK
        ]
        period = min([self._period, *(self._blocks.get(block, 0) for block in held)])
        if self._encoder_outputs.are_old(features):
            period = _NEVER
        self._take(
            [blocks[count:] for blocks, count in zip(block_ids, filled, strict=True)], period
        )
        if self._groups.hybrid and any(size and computed % size for size in sizes):
            # vLLM copied a block of another request, and it is not known which.
            return min(0, period)
        return period

    def _take(self, block_ids: Iterable[Sequence[int]], period: int) -> None:
        """Note that blocks of each cache group were given to a request of a period."""
        for blocks in block_ids:
            self._blocks.update(dict.fromkeys(blocks, period))

    def plan(self, output: Any, meta: StepMetadata) -> None:
        """Note which requests a step gives which blocks."""
        if not self._period:
            return
        for new in output.scheduled_new_reqs:
            state = self._requests.get(new.req_id)
            features = None if state is None else state.request.mm_features
            period = self.admit(new.block_ids, new.num_computed_tokens, features)
            if state is not None:
                state.period = period
        cached = output.scheduled_cached_reqs
        for req_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            state = self._requests.get(req_id)
            if state is None or not blocks:
                continue
            if req_id in cached.resumed_req_ids:
                state.period = self.admit(blocks, computed, state.request.mm_features)
            else:
                self._take(blocks, state.period)
