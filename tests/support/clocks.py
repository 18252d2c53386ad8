"""Time that passes as a test says."""

from __future__ import annotations


class Clock:
    """Seconds that only a test lets pass; stands for a function that tells them, or for `time`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now
