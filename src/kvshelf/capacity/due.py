"""When the next sweep of a shelf is due, and how much of a processor sweeps may take.

Owns these decisions as functions of what is known; nothing here reads a clock or a storage.

The nearer a shelf is to its bound, the more sweeps may take, so that they keep up with stores:

==========================  ================  =================
the shelf                   of a core, while  of a core, over
                            a sweep runs      ten minutes
==========================  ================  =================
below 90 % of `max_bytes`   20 %              1 %
above, or stores refused    90 %              25 %
==========================  ================  =================

Both grow evenly until 92.5 %. Each process counts what its own sweeps took. While nothing is short,
the processes share one allowance: a sweep of any of them counts for all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvshelf.capacity.bound import LOOK_SECONDS
from kvshelf.capacity.lease import Finding
from kvshelf.capacity.rules import Rules

#: Part of a core that sweeps of a process take over time: with space, and without.
CORE_PART: Final = 0.01
MOST_CORE_PART: Final = 0.25
#: Part of a core that a sweep takes while it runs: with space, and without.
_RUNNING_PART: Final = 0.2
_MOST_RUNNING_PART: Final = 0.9
#: Share of ``max_bytes`` from which on sweeps may take more, and as much as they may take at all.
SHORT: Final = 0.9
_PRESSED: Final = 0.925
#: Share of ``max_bytes`` from which on processes other than the last sweeper sweep: that one still
#: has a plan.
_OTHERS: Final = 0.95
#: Seconds of their allowance that sweeps may take at once.
_AVERAGE_SECONDS: Final = 600.0
#: Seconds over which the growth of a shelf is averaged.
_GROWTH_SECONDS: Final = 30.0
#: Least seconds from one sweep to the next, and the same when space is short.
SWEEP_SECONDS: Final = 60.0
SHORT_SECONDS: Final = 1.0
#: Seconds after which a shelf is listed anew where it is known what others write; the most that any
#: sweep is put off for what others took.
RELIST_SECONDS: Final = 3600.0


def pressure(used: int | None, limit: int | None, refuses: bool) -> float:
    """Return how short space is, from 0 to 1.

    Parameters
    ----------
    used, limit : int or None
        Bytes on the shelf, and its bound, as far as they are known.
    refuses : bool
        Stores are refused.
    """
    if used is None or limit is None:
        return 0.0
    if refuses and used > limit * SHORT:
        return 1.0
    return min(max((used / limit - SHORT) / (_PRESSED - SHORT), 0.0), 1.0)


def running_part(pressed: float) -> float:
    """Return the part of a core that a sweep takes while it runs."""
    return _RUNNING_PART + pressed * (_MOST_RUNNING_PART - _RUNNING_PART)


class Allowance:
    """The processor time that the sweeps of one process may take."""

    def __init__(self) -> None:
        #: Seconds that were taken and are not made up for.
        self._owed = 0.0
        self._at = 0.0

    def take(self, seconds: float) -> None:
        """Count what a sweep took."""
        self._owed += seconds

    def pause(self, pressed: float, now: float) -> float:
        """Return the seconds until a sweep may begin.

        Parameters
        ----------
        pressed : float
            The :func:`pressure` since the last call.
        now : float
            Seconds of a clock that never steps back.
        """
        part = CORE_PART + pressed * (MOST_CORE_PART - CORE_PART)
        self._owed = max(0.0, self._owed - part * (now - self._at))
        self._at = now
        return min(max(self._owed / part - _AVERAGE_SECONDS, 0.0), RELIST_SECONDS)


class Growth:
    """How fast a shelf grows, by the notes of its size.

    Attributes
    ----------
    per_second : float
        Bytes; an average of about half a minute.
    """

    def __init__(self) -> None:
        self.per_second = 0.0
        self._noted: tuple[int, float] | None = None

    def note(self, used: int | None, now: float) -> None:
        """Note how many bytes are used. Deletions are left out, as far as they can be seen."""
        if self._noted is not None and used is not None:
            seconds = now - self._noted[1]
            if seconds < LOOK_SECONDS:
                return
            rate = max(0, used - self._noted[0]) / seconds
            self.per_second += (rate - self.per_second) * min(1.0, seconds / _GROWTH_SECONDS)
        self._noted = None if used is None else (used, now)


def due_in(
    finding: Finding | None,
    rules: Rules,
    used: int,
    age: float,
    resolution: float,
    *,
    ours: bool,
    finished: bool = True,
) -> float:
    """Return the seconds until a sweep is due; 0: it is due.

    Parameters
    ----------
    finding : Finding or None
        What the last sweep found.
    rules : Rules
    used : int
        Bytes on the shelf, by the estimate.
    age : float
        Seconds since the finding.
    resolution : float
        Seconds in which uses are recorded once.
    ours : bool
        It was this process's sweep: it still has the plan, so it sweeps first.
    finished : bool
        The sweep deleted all that it might, as far as is known: its plan did not end because of
        its age, and was not one that an earlier sweep had used up.
    """
    if finding is None:
        return 0.0
    bound, max_age, group = rules.max_bytes, rules.max_age, rules.group_max_bytes
    high = rules if ours or age > RELIST_SECONDS else replace(rules, high=_OTHERS)
    if high.to_free(used, bound) > 0:
        # If a sweep freed nothing (all pinned or too new), another one right away would not either.
        in_vain = finished and rules.to_free(finding.nbytes, bound) > 0
        return max(0.0, (SWEEP_SECONDS if in_vain else SHORT_SECONDS) - age)
    least = max(SWEEP_SECONDS, min(finding.seconds / CORE_PART, RELIST_SECONDS))
    if max_age is not None and (finding.max_age is None or finding.max_age > max_age):
        # It was the sweep of an engine that keeps chunks for longer.
        return max(0.0, least - age)
    if group is not None and used > finding.nbytes:
        return max(0.0, least - age)
    return max(0.0, max(least, RELIST_SECONDS if max_age is None else resolution) - age)
