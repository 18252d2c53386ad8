"""The engine's steps: which compute anything, and whether one may wait.

Contracts
---------
* A step may wait where it probably computes nothing and no other rank or pipeline stage waits for
  it: not with several stages, nor with data parallelism over the experts of one model, whose ranks
  step together.
* Runs on the engine's step thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from kvshelf.vllm.scheduler.requests import Requests


class Steps:
    """Counts an engine's steps.

    Parameters
    ----------
    vllm_config : VllmConfig
    requests : Requests

    Attributes
    ----------
    in_flight : int
        How many steps may be scheduled before the first of them has finished, with it.
    count : int
        Steps so far.
    began : float
        ``time.monotonic()`` of the last step.
    seconds : float
        From the step before to the last one, if that step computed anything; otherwise 0. A pause
        of the engine between the two counts.
    """

    def __init__(self, vllm_config: Any, requests: Requests) -> None:
        self._requests = requests
        # With asynchronous scheduling or pipeline stages, later steps are scheduled before earlier
        # ones finish.
        scheduling = getattr(vllm_config, "scheduler_config", None)
        stages = int(vllm_config.parallel_config.pipeline_parallel_size)
        self.in_flight = stages + bool(getattr(scheduling, "async_scheduling", False))
        # vLLM sets data_parallel_size to 1 where the ranks do not depend on each other. It divides
        # batches into micro-batches only where it is more.
        ranks_step_together = int(vllm_config.parallel_config.data_parallel_size) > 1
        self._holds_up_others = stages > 1 or ranks_step_together
        self.count = 0
        self.began = self.seconds = 0.0
        #: Steps since the last one that computed anything, and the requests of that one; None
        #: while they are not known.
        self._idle = self.in_flight
        self._computed: Iterable[str] | None = ()

    def begin(self, output: Any) -> None:
        """Begin a step with vLLM's ``SchedulerOutput``."""
        idle = output.total_num_scheduled_tokens == 0
        now = time.monotonic()
        self.seconds = 0.0 if self._idle else now - self.began
        self._idle = self._idle + 1 if idle else 0
        if not idle:
            self._computed = output.num_scheduled_tokens
        self.count += 1
        self.began = now

    def lose(self) -> None:
        """Note that it is unknown what a step computes."""
        self._idle, self._computed = 0, None

    @property
    def idle(self) -> bool:
        """Whether the last step computes nothing; false while that is not known."""
        return self._idle > 0

    @property
    def rests(self) -> bool:
        """Whether no step in flight computes anything."""
        return self._idle >= self.in_flight

    @property
    def may_wait(self) -> bool:
        """Whether nothing is computed, and no other rank depends on this engine's steps.

        Before a step is planned, as when vLLM asks for a request: what that step computes beside
        the request is not known.
        """
        if self._holds_up_others:
            return False
        if self.rests:
            return True
        # A step that computes may still be in flight, and the next one go on with its requests,
        # unless they have ended.
        return self._computed is not None and self._requests.keys().isdisjoint(self._computed)


def scheduled(output: Any) -> Iterator[tuple[str, int, int]]:
    """Yield the requests of a step, with their tokens with KV before and after it.

    vLLM's second model runner lists resumed requests among the new ones, its first among the
    cached ones; both lists say how many tokens were computed before the step.
    """
    counts = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        computed = new.num_computed_tokens
        yield new.req_id, computed, computed + counts[new.req_id]
    cached = output.scheduled_cached_reqs
    for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield req_id, computed, computed + counts[req_id]
