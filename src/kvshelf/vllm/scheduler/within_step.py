"""Hits that lie in memory, and are loaded within the step that computes the rest.

Owns which hits these are, and what is pinned for them until the step is handed out. An asynchronous
load ends at least a step after vLLM has asked, which a busy engine spends on other requests.

vLLM counts the tokens of such a load as computed at once, and other requests of the same step may
share its blocks, so it must not fail (``has_sync_kv_loads`` in vllm/v1/core/sched/scheduler.py).
Only what is verified and pinned is loaded so: in the memory tier of the only worker, where that is
in this process (:mod:`kvshelf.vllm.pinned_hits`).

Contracts
---------
* At most ``sync_load_bytes`` are loaded in one step: its other requests wait for the copies.
* What is pinned for a request is unpinned when its load has ended, and with the step if vLLM admits
  the request in a later one.
* Runs on the engine's step thread.
"""

from __future__ import annotations

from kvshelf.format.kinds import FULL
from kvshelf.vllm import pinned_hits
from kvshelf.vllm.metadata import StepMetadata
from kvshelf.vllm.pinned_hits import PinnedHits
from kvshelf.vllm.scheduler.requests import RequestState
from kvshelf.vllm.scheduler.shared import Shared, SharingPart


class WithinStep(SharingPart):
    """What one engine loads within the step.

    Parameters
    ----------
    shared : Shared
    """

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        engine = self._engine
        #: The drafter's KV comes asynchronously, and a failed load of several cache groups, or of
        #: a window, could not be told to vLLM by its blocks. Beside other connectors it is not
        #: known whose loads a step has (:mod:`kvshelf.vllm.scheduler.unsettled`).
        self._allowed = (
            engine.ranks == 1
            and not engine.beside_others
            and self._groups.keeps_blocks
            and not self._groups.hybrid
            and getattr(engine.vllm_config, "speculative_config", None) is None
        )
        #: Bytes that are pinned for the step.
        self._bytes = 0

    @property
    def _pinned(self) -> PinnedHits | None:
        if not self._allowed or not self._config.sync_load_bytes:
            return None
        return pinned_hits.find(self._engine.vllm_config, self._config)

    def pin(self, state: RequestState, end: int) -> bool:
        """Pin the hit that was found for a request, up to token `end`; whether it is in memory."""
        pinned, lookup, start = self._pinned, state.lookup, state.offered_from
        if pinned is None or lookup is None or lookup.chain is None:
            return False
        # vLLM computes at least one token in the step. A worker may not know an adapter yet.
        if end >= state.request.num_tokens or state.adapter is not None:
            return False
        indices = self._hits.ranges(start, end)[FULL]
        fmt = self._opening.views[FULL].fmt
        chunk_bytes = sum(map(fmt.object_size, range(fmt.shards)))
        nbytes = self._bytes + len(indices) * chunk_bytes
        if nbytes > self._config.sync_load_bytes:
            return False
        chunks = self._hits.chunks_before(state, lookup, lookup.chain, end)
        if not pinned.pin(state.id, chunks[indices.start : indices.stop]):
            return False
        self._bytes = nbytes
        return True

    def holds(self, state: RequestState) -> bool:
        """Whether the hit of a request is pinned."""
        pinned = self._pinned
        return pinned is not None and state.id in pinned

    def hand_out(self, meta: StepMetadata) -> None:
        """Leave to the worker what the step loads, and unpin the rest."""
        self._bytes = 0
        pinned = self._pinned
        if pinned is not None:
            pinned.keep_only({op.request_id for op in meta.loads if op.sync})
