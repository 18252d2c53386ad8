"""A part of the scheduler side: the calls that it gets.

A part overrides those in which it has something to do. All run on the engine's step thread.
"""

from __future__ import annotations

from typing import Any

from kvshelf.vllm.metadata import Facts, StepMetadata
from kvshelf.vllm.scheduler.requests import RequestState


class Part:
    """What the scheduler side runs.

    Attributes
    ----------
    failure : str
        What the log says when :meth:`plan` fails.
    """

    failure = "a part of a step could not be planned"

    def plan(self, output: Any, meta: StepMetadata) -> None:
        """Plan for a step of vLLM's ``SchedulerOutput``."""

    def lose(self) -> None:
        """Note that it is unknown what a step computes: it could not be planned."""

    def take_facts(self, rank: int, facts: Facts) -> None:
        """Take what a rank reports. Facts that this raises come again."""

    def finished(self, state: RequestState) -> None:
        """Forget a request that has ended."""
