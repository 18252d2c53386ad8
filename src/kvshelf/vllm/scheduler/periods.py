"""Which KV of requests may be stored: of the current weights, and of the prefix alone.

Owns, for each block of vLLM's cache, the *period* in which its KV was computed or loaded. A new
period begins with each round of :mod:`kvshelf.vllm.handshake`. When the round shows that the
weights changed, the blocks of all earlier periods are old, and so is everything that is computed
behind them: requests that were running, and requests that get old blocks from vLLM's own prefix
cache, which is not always reset.

All cache groups of an engine take their blocks from one pool, and a block belongs to one group at a
time, so its id names it. Requests with images, audio or video are old in any period while vLLM may
have what an encoder with earlier weights made of them (:mod:`kvshelf.vllm.encoder_outputs`).

Owns also which requests are *unsettled*: it is not known yet whether their blocks have KV.

Contracts
---------
* After a change of weights nothing is stored that was computed before it, or behind blocks that
  were, or of an encoder's output that was. Until the first round all blocks are valid.
* What depends on a load that another connector (inside MultiConnector) does within a step is not
  stored until the outcome of that load is known: it may depend on blocks without KV.
* Where no multimodal item may be divided (:mod:`kvshelf.vllm.scheduler.hits`), and vLLM divided one
  all the same, nothing from its first token on is stored.
* Runs on the engine's step thread.

When :meth:`BlockPeriods.plan` fails, all blocks of before count as old, and nothing more is stored
of the requests that may be part of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvshelf.vllm.encoder_outputs import EncoderOutputs
from kvshelf.vllm.metadata import NULL_BLOCK
from kvshelf.vllm.scheduler.engine import SchedulerEngine
from kvshelf.vllm.scheduler.hits import Hits
from kvshelf.vllm.scheduler.requests import RequestState, items_of, scheduled

#: The period of KV that belongs to no weights.
_NEVER: Final = -1


class BlockPeriods:
    """The periods of one engine's blocks, and its unsettled requests.

    Parameters
    ----------
    engine : SchedulerEngine
    hits : Hits

    Attributes
    ----------
    is_lost : bool
        It is not known what this step computes.
    unsettled : dict
        By request that depends on a load whose outcome is not known: for how many steps more, and
        its blocks.
    """

    #: What the log says when :meth:`plan` fails.
    failure: Final = "it is not known which tokens of a step have KV that may be stored"

    def __init__(self, engine: SchedulerEngine, hits: Hits) -> None:
        self._engine, self._hits = engine, hits
        self._groups, self._requests = engine.groups, engine.requests
        #: The current period; 0 until the first round.
        self._period = 0
        self._first_valid = 0
        self._blocks: dict[int, int] = {}
        self._encoder_outputs = EncoderOutputs()
        self.is_lost = False
        #: Number of further steps of which it is not known what they compute.
        self._lost_steps = 0
        self.unsettled: dict[str, tuple[int, frozenset[int]]] = {}

    # ------------------------------------------------------------- steps

    def plan(self, output: Any) -> None:
        """Note which requests a step gives which blocks, and what it leaves unknown."""
        self.is_lost = self._lost_steps > 0
        self._lost_steps = max(0, self._lost_steps - 1)
        if self._period:
            self._note_blocks(output)
        if self._hits.whole_items:
            self._note_divided_items(output)
        if self.unsettled or getattr(output, "has_sync_kv_loads", False):
            self._note_sync_loads(output)

    def lose(self) -> None:
        """Note that it is unknown what a step computes: nothing more of its requests is stored."""
        if self._period:
            self._period += 1
            self._first_valid = self._period
        self._lost_steps = self._engine.steps_in_flight
        for state in self._requests.values():
            state.stores.cut = 0

    def _note_blocks(self, output: Any) -> None:
        """Note which requests a step gives which blocks."""
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

    def _note_divided_items(self, output: Any) -> None:
        """Note multimodal items of which a step computes only the beginning."""
        for request_id, _, step_end in scheduled(output):
            state = self._requests.get(request_id)
            for start, end in () if state is None else items_of(state.request):
                if state is not None and start < step_end < end:
                    state.stores.cut = min(state.stores.cut, start)

    def _note_sync_loads(self, output: Any) -> None:
        """Note which requests depend on loads within a step whose outcome is not known.

        These are requests that a step with such loads admits, and those admitted behind it that
        share blocks with them. All others were admitted before, into blocks of their own.
        """
        loads = getattr(output, "has_sync_kv_loads", False)
        self.unsettled = {
            request_id: (steps - 1, blocks)
            for request_id, (steps, blocks) in self.unsettled.items()
            if steps > 1
        }
        admitted = [new.req_id for new in output.scheduled_new_reqs]
        admitted += getattr(output.scheduled_cached_reqs, "resumed_req_ids", ())
        for request_id in admitted:
            tables = output.kv_connector_block_state.get_block_ids(request_id) or ()
            blocks = frozenset(itertools.chain.from_iterable(tables)) - {NULL_BLOCK}
            if loads or any(blocks & pending for _, pending in self.unsettled.values()):
                self.unsettled[request_id] = self._engine.steps_in_flight, blocks

    # ------------------------------------------------------------- periods

    def begin(self) -> None:
        """Begin a period: the weights may differ from now on."""
        self._period += 1
        self._encoder_outputs.begin()

    def settle(self, *, changed: bool) -> None:
        """Note whether the weights differ from those of the period before."""
        if changed:
            self._first_valid = self._period
        self._encoder_outputs.settle(changed=changed)

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
        blocks_with_kv = [
            block
            for blocks, count in zip(block_ids, filled, strict=True)
            for block in blocks[:count]
            if block != NULL_BLOCK
        ]
        period = min([self._period, *(self._blocks.get(block, 0) for block in blocks_with_kv)])
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
