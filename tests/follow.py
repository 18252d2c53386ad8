"""Shows what a store, and a lookup with its load, pass through: ``make follow``.

Counts the modules of kvshelf, their functions and the calls of these, for a prompt of one whole
chunk through the real connector, in all steps of the request's life: first an engine computes and
stores it, then another one loads it. Each row is a thread; the engine's own thread counts inside
the connector's methods alone. ``python -m tests.follow -v`` names each function. Nested functions
belong to the function around them. A request goes before, so that nothing is done for the first
time.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any

from kvshelf.vllm.connector import KVShelfConnector
from tests.sim.engine import EngineModel
from tests.support.prompts import prompt

METHODS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "update_connector_output",
    "request_finished",
    "clear_connector_metadata",
    "get_block_ids_with_load_errors",
)
CHUNK = 8


class Calls:
    """The calls of kvshelf's functions, by thread."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.is_on = False
        threading.setprofile(self.note)
        for name in METHODS:
            if hasattr(KVShelfConnector, name):
                self._follow(name)

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call; the profile function of all threads."""
        if event != "call" or not self.is_on or frame.f_code.co_name.startswith("<"):
            return
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("kvshelf"):
            function = frame.f_code.co_qualname.partition(".<locals>")[0]
            thread = threading.current_thread()
            name = (
                "step" if thread is threading.main_thread() else thread.name.rstrip("-0123456789")
            )
            self.counts[name, module, function] += 1

    def _follow(self, name: str) -> None:
        method = getattr(KVShelfConnector, name)

        @functools.wraps(method)
        def followed(connector: Any, *arguments: Any, **options: Any) -> Any:
            sys.setprofile(self.note)
            try:
                return method(connector, *arguments, **options)
            finally:
                sys.setprofile(None)

        setattr(KVShelfConnector, name, followed)

    def show(self, title: str) -> None:
        """Print what was counted since the last call."""
        counts, self.counts = self.counts, Counter()
        lines = [title]
        for thread in (*sorted({thread for thread, _, _ in counts}), ""):
            of_thread = {key: n for key, n in counts.items() if thread in (key[0], "")}
            functions = {key[1:] for key in of_thread}
            modules = {module for module, _ in functions}
            lines.append(
                f"  {sum(of_thread.values()):5d} calls  {len(functions):4d} functions"
                f"  {len(modules):3d} modules  {thread or 'all'}"
            )
        if "-v" in sys.argv:
            lines += [f"    {n:4d}  {' '.join(key)}" for key, n in sorted(counts.items())]
        sys.stdout.write("\n".join(lines) + "\n")


def follow(calls: Calls, shelf: str, title: str) -> None:
    """Run a request of one whole chunk and a part of another one in a new engine."""
    with EngineModel(shelf, admission="always") as engine:
        engine.run(prompt(2 * CHUNK + 3, 5))
        calls.is_on, first = True, engine.steps
        engine.add("followed", prompt(CHUNK + 3, 1), 2)
        engine.finish()
        engine.drain()
        # Threads tell of an end after the step has seen it.
        time.sleep(0.3)
        calls.is_on = False
        steps = engine.steps - first
    calls.show(f"{title}, {steps} steps")


def main() -> None:
    calls = Calls()
    with tempfile.TemporaryDirectory() as shelf:
        follow(calls, shelf, "store: a prompt of one whole chunk is computed and stored")
        follow(calls, shelf, "load: another engine loads it")


if __name__ == "__main__":
    main()
