"""Processes that run one function at the same time, for measurements without engines.

Owns the processes and a pipe to each. The function's first argument is its end of the pipe: it
sends once when it is ready, and once for each object that it receives. It returns when it has
nothing more to answer, or when the other end is closed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any, Final

_ANSWER_SECONDS: Final = 300.0


class Processes:
    """Running processes; all of them are ready.

    Parameters
    ----------
    function : Callable
        Of a module's top level.
    arguments : iterable of tuple
        The further arguments, of one process each.
    """

    def __init__(self, function: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([function.__module__])
        self._ends: list[Connection] = []
        self._processes = []
        for further in arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=function, args=(theirs, *further))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        try:
            self._answers()
        except BaseException:
            self.close()
            raise

    def ask(self, question: Any = None) -> list[Any]:
        """Send all of them an object, and return their answers in the order of the processes."""
        for end in self._ends:
            end.send(question)
        return self._answers()

    def _answers(self) -> list[Any]:
        for end in self._ends:
            if not end.poll(_ANSWER_SECONDS):
                raise RuntimeError(f"a process did not answer within {_ANSWER_SECONDS:.0f} s")
        return [end.recv() for end in self._ends]

    def close(self) -> None:
        """End the processes."""
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()
            process.join(_ANSWER_SECONDS)
