"""A part of the scheduler side: the calls that it gets.

A part overrides those in which it has something to do. All run on the engine's step thread.
"""

from __future__ import annotations

from typing import Any

from kvshelf.vllm.metadata import StepMetadata, WorkerMetadata
from kvshelf.vllm.scheduler.requests import RequestState


class Part:
    """What the scheduler side runs.

    Attributes
    ----------
    failure : str
        What the log says when :meth:`plan` fails.
    """

    failure = ""

    def plan(self, output: Any, meta: StepMetadata) -> None:
        """Plan for a step of vLLM's ``SchedulerOutput``."""

    def plan_failed(self, output: Any, meta: StepMetadata) -> None:
        """Bear what an error in :meth:`plan` costs."""

    def lose(self) -> None:
        """Note that it is unknown what a step computes."""

    def hand_out(self, meta: StepMetadata) -> None:
        """Add what every step must bring to the workers, and forget it."""

    def take_report(self, meta: WorkerMetadata) -> None:
        """Take what workers report of a step."""

    def finished(self, state: RequestState) -> None:
        """Forget a request that has ended."""
