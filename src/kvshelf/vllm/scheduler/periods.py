"""Which blocks of requests hold KV of the weights that the engine has now.

Owns the period (:mod:`kvshelf.vllm.scheduler.block_weights`) of each request's oldest block.

Contracts
---------
* After a change of weights nothing is stored that was computed before it, or behind blocks that
  were, or of an encoder's output that was (:mod:`kvshelf.vllm.encoder_outputs`).
* Runs on the engine's step thread.

When this part fails, all blocks of before count as old.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvshelf.vllm.encoder_outputs import EncoderOutputs
from kvshelf.vllm.metadata import StepMetadata
from kvshelf.vllm.scheduler.block_weights import BlockWeights
from kvshelf.vllm.scheduler.requests import RequestState
from kvshelf.vllm.scheduler.shared import Shared, SharingPart


class BlockPeriods(SharingPart):
    """The periods of one engine's blocks.

    Parameters
    ----------
    shared : Shared
    """

    failure = "it is not known which blocks a step filled"

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._blocks = BlockWeights()
        self._encoder_outputs = EncoderOutputs()

    def begin(self) -> None:
        """Begin a period: the weights may differ from now on."""
        self._blocks.begin()
        self._encoder_outputs.begin()

    def settle(self, *, changed: bool) -> None:
        """Note whether the weights differ from those of the period before."""
        self._blocks.settle(changed=changed)
        if self._encoder_outputs.settle(changed=changed):
            self.lose()

    def lose(self) -> None:
        """Note that it is unknown which blocks a step filled."""
        self._blocks.lose()

    def is_valid(self, state: RequestState) -> bool:
        """Whether KV of a request belongs to the current weights."""
        return self._blocks.is_valid(state.period)

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
        scratch = self._groups.scratch
        # A ring has no KV of these tokens.
        sizes = [0 if group.index in scratch else group.block_size for group in self._groups]
        filled = [-(-computed // size) if size else 0 for size in sizes]
        old = self._encoder_outputs.are_old(features)
        period = self._blocks.admit(block_ids, filled, old=old)
        if self._groups.hybrid and any(size and computed % size for size in sizes):
            # vLLM copied a block of another request, and it is not known which.
            return min(0, period)
        return period

    def plan(self, output: Any, meta: StepMetadata) -> None:
        """Note which requests a step gives which blocks."""
        if not self._blocks.period:
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
                self._blocks.take(blocks, state.period)
