"""Hits that lie in memory, and are loaded within the step that computes the rest.

Owns which hits these are, and what is pinned for them until the step has loaded it. An asynchronous
load ends at least a step after vLLM has asked, which a busy engine spends on other requests. A hit
that must be read first would not be earlier this way: what is read beside a step is loaded when the
next one begins, whether its blocks were there before or not.

vLLM counts the tokens of such a load as computed at once, and other requests of the same step may
share its blocks, so it must not fail (``has_sync_kv_loads`` in vllm/v1/core/sched/scheduler.py).
Only what is verified and pinned is loaded so:

* in the memory tier of the only worker, where that is in this process
  (:mod:`kvshelf.vllm.pinned_hits`);
* in the memory of a node server that all ranks have mapped
  (:mod:`kvshelf.tiers.object_memory`). This side pins for all of them: what it has pinned lies
  there until it gives it back, or its process ends.

Contracts
---------
* At most ``sync_load_bytes`` are loaded in one step: its other requests wait for the copies.
* What is pinned for a request is unpinned when its load has ended on all ranks, and with the step
  if vLLM admits the request in a later one.
* A node server is waited for :data:`PIN_SECONDS` in a step at most, whatever it is asked for.
* A request of several ranks that hands its prompt over is not loaded so: of what depends on such a
  load nothing is stored in the same step (:mod:`kvshelf.vllm.scheduler.unsettled`).
* Runs on the engine's step thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL
from kvshelf.logs import RateLimitedLog
from kvshelf.tiers.object_memory import PinnedTogether, PinningView
from kvshelf.vllm import pinned_hits
from kvshelf.vllm.metadata import StepMetadata, WorkerMetadata
from kvshelf.vllm.pinned_hits import PinnedHits
from kvshelf.vllm.scheduler.requests import RequestState
from kvshelf.vllm.scheduler.shared import Shared, SharingPart

logger = logging.getLogger(__name__)

#: How long the hits of one step wait for a node server, in seconds. A hit that is loaded beside the
#: step ends a step later.
PIN_SECONDS: Final = 5e-3


class WithinStep(SharingPart):
    """What one engine loads within the step.

    Parameters
    ----------
    shared : Shared
    """

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._log = RateLimitedLog(logger)
        engine = self._engine
        #: The drafter's KV comes asynchronously, and a failed load of several cache groups, or of
        #: a window, could not be told to vLLM by its blocks. Beside other connectors it is not
        #: known whose loads a step has (:mod:`kvshelf.vllm.scheduler.unsettled`).
        self._allowed = (
            self._config.sync_load_bytes > 0
            and not engine.beside_others
            and self._groups.keeps_blocks
            and not self._groups.hybrid
            and getattr(engine.vllm_config, "speculative_config", None) is None
        )
        #: Bytes that are pinned for the step.
        self._bytes = 0
        #: What each rank has mapped of a node server's memory.
        self._mapped: dict[int, bytes] = {}
        #: What is pinned there: for the step, by request, and for steps by their numbers.
        self._served: dict[str, PinnedTogether] = {}
        self._lent: list[tuple[int, str, PinnedTogether]] = []
        #: How long this step has waited for a node server.
        self._waited = 0.0

    @property
    def _pinned(self) -> PinnedHits | None:
        if not self._allowed or self._engine.ranks > 1:
            return None
        return pinned_hits.find(self._engine.vllm_config, self._config)

    def pin(self, state: RequestState, end: int) -> bool:
        """Pin the hit that was found for a request, up to token `end`; whether it is in memory."""
        self._unpin(state.id)
        lookup, start = state.lookup, state.offered_from
        if not self._allowed or lookup is None or lookup.chain is None:
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
        known = self._hits.chunks_before(state, lookup, lookup.chain, end)
        chunks, pinned = known[indices.start : indices.stop], self._pinned
        in_tier = pinned is not None and pinned.pin(state.id, chunks)
        if not in_tier and not self._pin_served(state, chunks):
            return False
        self._bytes = nbytes
        return True

    def _pin_served(self, state: RequestState, chunks: Sequence[Chunk]) -> bool:
        """Pin chunks in the memory of the node server that all ranks have mapped."""
        view, ranks = self._opening.views[FULL], self._engine.ranks
        if not isinstance(view, PinningView) or (ranks > 1 and state.promise is not None):
            return False
        left = PIN_SECONDS - self._waited
        mapped = {self._mapped.get(rank, b"") for rank in range(ranks)}
        if left <= 0 or mapped != {view.mapped} or not view.mapped:
            return False
        begin, pinned = time.monotonic(), None
        try:
            pinned = view.pin_all(chunks, left)
        except Exception as error:  # noqa: BLE001 - the hit is loaded beside the step
            self._log.error("a hit was not pinned at the node server", exc_info=error)
        self._waited += time.monotonic() - begin
        if pinned is None:
            return False
        self._served[state.id] = pinned
        if {pinned.memory} != mapped:
            self._unpin(state.id)
            return False
        return True

    def _unpin(self, request_id: str) -> None:
        pinned = self._served.pop(request_id, None)
        if pinned is not None:
            pinned.release()

    def holds(self, state: RequestState) -> bool:
        """Whether the hit of a request is pinned."""
        pinned = self._pinned
        return state.id in self._served or (pinned is not None and state.id in pinned)

    def place_of(self, state: RequestState) -> tuple[bytes, list[int]]:
        """Return where a node server has what is pinned for a request, as in :class:`LoadOp`."""
        pinned = self._served.get(state.id)
        return (b"", []) if pinned is None else (pinned.memory, pinned.offsets)

    def hand_out(self, meta: StepMetadata) -> None:
        """Leave to the workers what the step loads, and unpin the rest."""
        pinned = self._pinned if self._bytes else None
        self._bytes, self._waited = 0, 0.0
        if pinned is not None:
            pinned.keep_only({op.request_id for op in meta.loads if op.sync})
        # Steps before these have ended, whether or not their reports arrived.
        over = self._steps.count - self._steps.in_flight
        while self._lent and self._lent[0][0] < over:
            self._lent.pop(0)[2].release()
        # Where planning a load failed, workers do not know where it is pinned.
        served = {op.request_id for op in meta.loads if op.memory}
        for request_id in list(self._served):
            if request_id in served:
                self._lent.append((self._steps.count, request_id, self._served.pop(request_id)))
            else:
                self._unpin(request_id)

    def take_report(self, meta: WorkerMetadata) -> None:
        """Take what ranks have mapped, and unpin what all of them have loaded in a step."""
        self._mapped |= meta.mapped
        for request_id in set(meta.loaded_now):
            first = next((one for one in self._lent if one[1] == request_id), None)
            if first is not None:
                self._lent.remove(first)
                first[2].release()

    def close(self) -> None:
        """Unpin all."""
        for request_id in list(self._served):
            self._unpin(request_id)
        while self._lent:
            self._lent.pop()[2].release()
