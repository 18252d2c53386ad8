"""The connector with a clock on what it does on the engine's step thread.

A step's time is all that vLLM's calls of one side take together, in milliseconds; what copies KV
into staging is kept apart. Written to ``$TIMED_OUT.<process>``, a JSON list for each step:
``[side, milliseconds, of which gather]``.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvshelf.kv.caches import HostKVCache, PendingCopy
from kvshelf.vllm.connector import SharedStorageConnector

_SCHEDULER = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "update_connector_output",
    "request_finished",
    "build_connector_meta",
)
_WORKER = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
_WRITE_EVERY = 50


class _Clock:
    def __init__(self) -> None:
        self.spent = 0.0
        self.gathered = 0.0
        self.steps: list[list[Any]] = []
        self._file = Path(f"{os.environ['TIMED_OUT']}.{os.getpid()}").open("a")  # noqa: SIM115

    def end_step(self, side: str) -> None:
        self.steps.append([side, self.spent * 1e3, self.gathered * 1e3])
        self.spent = self.gathered = 0.0
        if len(self.steps) >= _WRITE_EVERY:
            for step in self.steps:
                self._file.write(json.dumps(step) + "\n")
            self._file.flush()
            self.steps.clear()


def _timed(clock: _Clock, method: Callable[..., Any], side: str, last: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            clock.spent += time.perf_counter() - begin
            if last:
                # An engine that has nothing to compute loses nothing by waiting for a look-up.
                idle = side == "scheduler" and not args[0].total_num_scheduled_tokens
                clock.end_step("idle scheduler" if idle else side)

    return call


class TimedConnector(SharedStorageConnector):
    """See the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        clock = _Clock()
        side, names = ("worker", _WORKER) if self._worker else ("scheduler", _SCHEDULER)
        for name in names:
            setattr(self, name, _timed(clock, getattr(self, name), side, name == names[-1]))
        gather = HostKVCache.gather

        def timed_gather(memory: HostKVCache, *args: Any, **kwargs: Any) -> PendingCopy:
            begin = time.perf_counter()
            pending = gather(memory, *args, **kwargs)
            clock.gathered += time.perf_counter() - begin
            return pending

        HostKVCache.gather = timed_gather  # type: ignore[method-assign]
