"""Tokens of which it is not known, or not any more, that their KV depends on the prefix alone.

Contracts
---------
* What depends on a load that another connector (inside MultiConnector) does within a step is not
  stored until the outcome of that load is known: it may depend on blocks without KV.
* Where no multimodal item may be divided (:mod:`kvshelf.vllm.scheduler.hits`), and vLLM divided one
  all the same, nothing from its first token on is stored.
* Runs on the engine's step thread.

When this part fails, nothing more is stored of the requests that may be part of the step.
"""

from __future__ import annotations

import itertools
from typing import Any

from kvshelf.vllm.metadata import NULL_BLOCK, StepMetadata
from kvshelf.vllm.scheduler.requests import items_of
from kvshelf.vllm.scheduler.shared import Shared, SharingPart
from kvshelf.vllm.scheduler.steps import scheduled


class Unsettled(SharingPart):
    """What must not be stored yet, or ever, of one engine's requests.

    Parameters
    ----------
    shared : Shared
    """

    failure = "it is not known which tokens of a step have KV that may be stored"

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        #: By request that depends on a load whose outcome is not known: for how many steps more,
        #: and its blocks.
        self._loading: dict[str, tuple[int, frozenset[int]]] = {}
        #: Number of further steps of which it is not known what they compute.
        self._lost_steps = 0
        #: Whether that is not known of this step.
        self.lost = False

    def __contains__(self, request_id: str) -> bool:
        """Whether a request depends on a load whose outcome is not known."""
        return request_id in self._loading

    def plan(self, output: Any, meta: StepMetadata) -> None:
        """Note what a step leaves unknown."""
        self.lost = self._lost_steps > 0
        self._lost_steps = max(0, self._lost_steps - 1)
        if self._hits.whole_items:
            self._note_divided_items(output)
        self._note_sync_loads(output)

    def lose(self) -> None:
        """Note that it is unknown what a step computes, so nothing more of requests is stored."""
        self._lost_steps = self._steps.in_flight
        for state in self._requests.values():
            state.stores.cut = 0

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
        if not loads and not self._loading:
            return
        self._loading = {
            request_id: (left - 1, blocks)
            for request_id, (left, blocks) in self._loading.items()
            if left > 1
        }
        admitted = [new.req_id for new in output.scheduled_new_reqs]
        admitted += getattr(output.scheduled_cached_reqs, "resumed_req_ids", ())
        for request_id in admitted:
            tables = output.kv_connector_block_state.get_block_ids(request_id) or ()
            blocks = frozenset(itertools.chain.from_iterable(tables)) - {NULL_BLOCK}
            if loads or any(blocks & others for _, others in self._loading.values()):
                self._loading[request_id] = self._steps.in_flight, blocks
