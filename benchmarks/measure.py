"""Measurement in alternating pairs, and its statistics.

Owns the comparison of two pieces of work. They run in turn, in alternating order, so a temporary
slowdown of the machine affects both. The result is the median of the pairs' ratios, with an
interval that makes no assumption about their distribution.

Contracts
---------
* Everything runs on the calling thread. The garbage collector is off while a pair is measured
  and runs between pairs.
* Preparation and cleanup of a piece of work are not timed.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["ratio", "seconds"]

#: Smallest number of pairs for a meaningful interval.
LEAST_PAIRS = 15


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and the 95 % interval around it.

    Attributes
    ----------
    value : float
        The median of the samples.
    low, high : float
        Ends of the interval; the extremes if there are too few samples.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a row. Reported, not asserted.

    Attributes
    ----------
    most : float
        The largest value that meets the goal: a ratio, or seconds.
    kind : {"ratio", "seconds"}
        Meaning of the value: ours / floor, or our time.
    """

    most: float
    kind: Kind = "ratio"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes
    ----------
    name : str
        Identifies the row; ``<group>/<what>``.
    work, floor : str
        Text: what was measured, and what it is compared with.
    ours, floors : list of float
        Seconds, one sample per pair. `floors` is empty without a comparison.
    goal : Goal, optional
    note : str
        Explanation for readers.
    extra : dict
        Further figures for the JSON file.
    skipped : str
        Why the row was not measured; there are no samples then.
    """

    name: str
    work: str
    floor: str = ""
    ours: list[float] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    goal: Goal | None = None
    note: str = ""
    extra: dict[str, object] = field(default_factory=dict)
    skipped: str = ""

    @property
    def ratio(self) -> Estimate | None:
        """Median of ours / floor over the pairs."""
        if not self.floors:
            return None
        return estimate([a / b for a, b in zip(self.ours, self.floors, strict=True)])

    @property
    def judged(self) -> Estimate | None:
        """The estimate that the goal applies to; without a goal the ratio, else our time."""
        if not self.ours:
            return None
        kind: Kind = self.goal.kind if self.goal else "ratio" if self.floors else "seconds"
        return estimate(self.ours) if kind == "seconds" else self.ratio

    @property
    def met(self) -> bool | None:
        """Whether the median meets the goal; None without a goal or without samples."""
        judged = self.judged
        if self.goal is None or judged is None:
            return None
        return judged.value <= self.goal.most


def median(samples: Sequence[float]) -> float:
    """Return the median of `samples`, at least one."""
    ordered = sorted(samples)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the median with its 95 % interval by order statistics.

    The interval is the narrowest pair of ranks (k, n + 1 − k) that covers the true median with a
    probability of at least 0.95, whatever the distribution of the samples.
    """
    ordered = sorted(samples)
    count = len(ordered)
    below = 0.0
    rank = 0
    # P(fewer than rank + 1 of n samples lie below the median) for each tail.
    while rank < count // 2:
        below += math.comb(count, rank) / 2**count
        if 2 * below > 0.05:
            break
        rank += 1
    first = max(rank - 1, 0)
    return Estimate(median(ordered), ordered[first], ordered[count - 1 - first])


@dataclass(frozen=True, slots=True)
class Work:
    """One of the two things that are compared.

    Attributes
    ----------
    run : Callable
        The timed function.
    after : Callable, optional
        Untimed cleanup after each sample.
    """

    run: Callable[[], object]
    after: Callable[[], object] | None = None


def sample(work: Work, repeats: int) -> float:
    """Return the seconds of one run, averaged over `repeats`."""
    run = work.run
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    seconds = (time.perf_counter() - start) / repeats
    if work.after is not None:
        work.after()
    return seconds


def repeats_for(work: Work, seconds: float) -> int:
    """Return how often `work` runs in about `seconds`."""
    sample(work, 1)
    once = median([sample(work, 1) for _ in range(3)])
    return max(1, min(10_000, round(seconds / max(once, 1e-9))))


def measure_pairs(
    ours: Work,
    floor: Work,
    pairs: int,
    *,
    sample_seconds: float = 4e-3,
    warm_up: int = 3,
) -> tuple[list[float], list[float]]:
    """Measure two pieces of work in alternating pairs.

    Parameters
    ----------
    ours, floor : Work
        The two pieces of work.
    pairs : int
        Number of pairs.
    sample_seconds : float
        Shorter work is repeated within a sample, equally often on both sides.
    warm_up : int
        Pairs that are measured first and discarded.

    Returns
    -------
    tuple of (list of float, list of float)
        Seconds of one run of each, by pair.
    """
    repeats = repeats_for(floor, sample_seconds)
    times: tuple[list[float], list[float]] = ([], [])
    enabled = gc.isenabled()
    gc.disable()
    try:
        for pair in range(-warm_up, pairs):
            order = ((0, ours), (1, floor)) if pair % 2 else ((1, floor), (0, ours))
            found = [0.0, 0.0]
            for side, work in order:
                found[side] = sample(work, repeats)
            if pair >= 0:
                times[0].append(found[0])
                times[1].append(found[1])
            if pair % 16 == 0:
                gc.collect()
    finally:
        if enabled:
            gc.enable()
    return times
