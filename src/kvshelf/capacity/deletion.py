"""Deletes what a plan says: for sweeps and for commands.

Contracts
---------
* Each object is checked once more before it is deleted. A unit is kept if one of its objects was
  used or replaced since the inventory, by the storage's current clock; so is a leftover that has
  changed. Objects are not checked if a command chose them without regard to uses, nor if they free
  space within ten minutes of the listing where one request deletes many: a check would take a
  hundred times as long as the deletion, and there uses are recorded in marks, not in the times of
  objects.
* Pins and marks are read again every minute and every thousand deletions, also after the process
  or the machine has slept: what has become pinned, or is marked as used since the plan, stays. A
  plan made without pins is carried out without them.
* An object that another process has deleted meanwhile is not an error.
* A process that is killed in between leaves what costs a miss, at most: some of the objects that
  are deleted at the same time may be left, and all that follow them in the plan. Without latency
  these are the objects of one unit; else a hundred, or as many as one request deletes, for each
  thread.

Threads
-------
:func:`carry_out` blocks on the storage. Where the latency is high it looks and deletes on threads
of its own; all that it is given but `pace` is called on the caller's.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from kvshelf.backends import Backend
from kvshelf.backends.base import time_for_ages
from kvshelf.backends.clock import StorageClock
from kvshelf.capacity.collect import Plan
from kvshelf.capacity.files import Leftover, Total, changed_at, last_use
from kvshelf.capacity.marks import MARKS, Marks
from kvshelf.capacity.parallel import Attempts, in_parallel, threads_for_calls
from kvshelf.capacity.rules import Rule
from kvshelf.errors import NotRegularError, StorageError
from kvshelf.shelf.pins import PINS, Pins

#: Most objects that are checked one after the other, and then deleted together.
_LOOKS: Final = 100
#: Refused deletions, without an allowed one, after which no more are tried.
_MOST_REFUSED: Final = 64
#: Seconds after a listing in which deletions that free space need no check where checks are costly.
_FRESH_SECONDS: Final = 600.0
_MAKES_ROOM: Final = (Rule.GROUP, Rule.SIZE)
#: Seconds, and deletions, after which pins and marks are read again.
_AGAIN_SECONDS: Final = 60.0
_AGAIN_DELETIONS: Final = 1000
#: A file: the number of its task in a group, its name, and bytes.
_File: TypeAlias = tuple[int, str, int]
#: A clock that continues while the machine sleeps.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def steady() -> float:
    """Return seconds of a clock that never steps back, and continues while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


@dataclass(slots=True)
class Lost(Total):
    """Objects of a salt group that were deleted, and when the chunk idle longest was used."""

    oldest: float = math.inf


@dataclass(slots=True)
class Outcome:
    """The result of a plan's execution.

    Attributes
    ----------
    deleted : dict of Rule and Total
        Files that were deleted, by reason.
    lost : dict of (str, Rule) and Lost
        Objects that were deleted, by namespace and salt group (``namespace/group``), and reason.
    kept : Total
        Files that stay, because they were used, replaced, changed or pinned meanwhile.
    gone : Total
        Files that another process had deleted, or that a storage lists though they are deleted.
    failed : int
        Files that the storage did not allow to delete.
    error : StorageError or None
        The first such refusal, or the error of the storage that ended the execution.
    finished : bool
        Whether all of the plan was tried.
    """

    deleted: dict[Rule, Total] = field(default_factory=dict)
    lost: dict[tuple[str, Rule], Lost] = field(default_factory=dict)
    kept: Total = field(default_factory=Total)
    gone: Total = field(default_factory=Total)
    failed: int = 0
    error: StorageError | None = None
    finished: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that were deleted."""
        return sum(total.nbytes for total in self.deleted.values())

    @property
    def count(self) -> int:
        """Number of files that were deleted."""
        return sum(total.count for total in self.deleted.values())

    @property
    def done(self) -> int:
        """Number of files that are finished."""
        return self.count + self.kept.count + self.gone.count + self.failed


class _Task(NamedTuple):
    """Files to delete together: a leftover, or objects of unit `number` of the plan, by rows."""

    reason: Rule
    what: Leftover | list[int]
    number: int = -1


@dataclass(slots=True)
class _Done:
    """The result of a task."""

    deleted: Total = field(default_factory=Total)
    kept: Total = field(default_factory=Total)
    gone: Total = field(default_factory=Total)
    problems: list[StorageError] = field(default_factory=list)


def carry_out(
    backend: Backend,
    plan: Plan,
    *,
    stop: Callable[[], bool] = lambda: False,
    pace: Callable[[], None] = lambda: None,
    pauses: Sequence[float] = (),
    on_progress: Callable[[Outcome], None] = lambda outcome: None,
    outcome: Outcome | None = None,
) -> Outcome:
    """Delete what a plan says, in its order.

    Parameters
    ----------
    backend : Backend
    plan : Plan
    stop : Callable
        Called after each deletion; True ends the plan.
    pace : Callable
        Called for each look, on any thread; may sleep.
    pauses : Sequence of float
        Seconds between the attempts where the storage fails; none: it fails at once.
    on_progress : Callable
        Called after each deletion.
    outcome : Outcome, optional
        Updated meanwhile, so that it is available after an interruption.

    Returns
    -------
    Outcome
        Also what was done before an error of the storage, which is in it and is not raised.
    """
    outcome = Outcome() if outcome is None else outcome
    attempts = Attempts(pauses)
    try:
        work = _Deletions(backend, plan, pace, attempts)
    except StorageError as trouble:
        outcome.error = trouble
        return outcome
    groups = _groups(plan, work.at_once)
    count = threads_for_calls(backend)
    with closing(in_parallel(work, groups, count, attempts.stop)) as results:
        for group, (done, error) in results:
            for task, one in zip(group, done, strict=True):
                if one.deleted.count:
                    total = outcome.deleted.setdefault(task.reason, Total())
                    total.add(one.deleted.nbytes, one.deleted.count)
                    if not isinstance(task.what, Leftover):
                        where = plan.inventory.group_of(task.what[0])
                        lost = outcome.lost.setdefault((where, task.reason), Lost())
                        lost.add(one.deleted.nbytes, one.deleted.count)
                        lost.oldest = min(lost.oldest, float(plan.used[task.number]))
                outcome.kept.add(one.kept.nbytes, one.kept.count)
                outcome.gone.add(one.gone.nbytes, one.gone.count)
                outcome.failed += len(one.problems)
                for problem in one.problems:
                    outcome.error = outcome.error or problem
            on_progress(outcome)
            if error is not None:
                outcome.error = error
                return outcome
            if (outcome.failed >= _MOST_REFUSED and not outcome.count) or stop():
                return outcome
    outcome.finished = True
    return outcome


def _groups(plan: Plan, at_once: int) -> Iterator[list[_Task]]:
    """Yield groups to delete together, in the plan's order: units with about `at_once` objects."""
    group: list[_Task] = []
    objects = 0
    for task in itertools.chain(
        (_Task(reason, leftover) for leftover, reason in plan.leftovers),
        (_Task(reason, rows, number) for number, (rows, reason) in enumerate(plan.victims())),
    ):
        group.append(task)
        objects += 1 if isinstance(task.what, Leftover) else len(task.what)
        if objects >= at_once:
            yield group
            group, objects = [], 0
    if group:
        yield group


class _Deletions:
    """Looks at some files, and deletes them; called by any thread."""

    def __init__(
        self, backend: Backend, plan: Plan, pace: Callable[[], None], attempts: Attempts
    ) -> None:
        choice = plan.rules.choice
        self._looks = choice is None or choice.unused_for is not None
        most = backend.properties.deletes_at_once
        self.at_once = min(most, _LOOKS) if self._looks else most
        self._looks_are_dear = most > 1
        self._backend = backend
        self._inventory = plan.inventory
        self._pace = pace
        self._attempts = attempts
        self._kept = _Kept(backend, plan)

    def __call__(self, group: Sequence[_Task]) -> tuple[list[_Done], StorageError | None]:
        """Return what became of each task, and the error that ends the work."""
        done = [_Done() for _ in group]
        #: The files that are to be deleted, once they are known.
        left: list[_File] | None = None

        def make() -> None:
            nonlocal left
            if left is None:
                left, done[:] = self._look_at(group)
                if self._kept.turn() != turn:
                    # This process may have slept since the check.
                    left, done[:] = self._look_at(group)
            answers = self._backend.delete_all([name for _, name, _ in left]) if left else []
            again: list[_File] = []
            trouble = None
            for file, answer in zip(left, answers, strict=True):
                number, _, nbytes = file
                if not isinstance(answer, StorageError):
                    (done[number].deleted if answer else done[number].gone).add(nbytes)
                elif isinstance(answer, NotRegularError):
                    # It was replaced, or is a folder that was set aside and is not empty.
                    done[number].kept.add(nbytes)
                elif answer.retryable:
                    trouble = answer
                    again.append(file)
                else:
                    done[number].problems.append(answer)
            self._kept.deletions += len(left) - len(again)
            left = again
            if trouble is not None:
                raise trouble

        try:
            # Without the pins nothing may be deleted.
            turn = self._kept.turn()
            error = self._attempts.make(make)
        except StorageError as trouble:
            return done, trouble
        if error is not None:
            for number, _, _ in self._files(group) if left is None else left:
                done[number].problems.append(error)
        return done, None

    def _files(self, group: Sequence[_Task]) -> Iterator[_File]:
        """Yield the files of some tasks."""
        inventory = self._inventory
        for number, (_, what, _) in enumerate(group):
            if isinstance(what, Leftover):
                yield number, what.name, what.size
            else:
                for row in what:
                    name, nbytes, _, _ = inventory.found(row)
                    yield number, name, nbytes

    def _look_at(self, group: Sequence[_Task]) -> tuple[list[_File], list[_Done]]:
        """Return the files to delete, and what became of the others."""
        done = [_Done() for _ in group]
        found = [
            (number, name, nbytes)
            for number, task in enumerate(group)
            for name, nbytes in self._look(task, done[number])
        ]
        return found, done

    def _look(self, task: _Task, done: _Done) -> list[tuple[str, int]]:
        """Return names and bytes of the files to delete."""
        inventory, what = self._inventory, task.what
        self._pace()
        if isinstance(what, Leftover):
            info = self._backend.info(what.name)
            if info is None:
                done.gone.add(what.size)
            elif changed_at(info) > what.changed:
                done.kept.add(what.size)
            else:
                return [(what.name, info.size)]
            return []
        found: list[tuple[str, int]] = []
        kept, now = self._kept.flags[task.number], self._kept.now()
        looks = self._looks and not (
            self._looks_are_dear
            and task.reason in _MAKES_ROOM
            and now < inventory.now + _FRESH_SECONDS
        )
        for row in () if kept else what:
            name, nbytes, used, _ = inventory.found(row)
            if not looks:
                found.append((name, nbytes))
                continue
            info = self._backend.info(name)
            if info is None:
                done.gone.add(nbytes)
            elif last_use(info, now) > used:
                kept = True
                break
            else:
                found.append((name, info.size))
        if kept:
            done.gone = Total()
            done.kept.add(int(inventory.size[what].sum()), len(what))
            return []
        return found


class _Kept:
    """The units of a plan that stay, because they have become pinned or used; and the time.

    Attributes
    ----------
    flags : bool array [n]
        Whether each unit of the plan stays.
    deletions : int
        Since pins and marks were read; roughly.
    """

    def __init__(self, backend: Backend, plan: Plan) -> None:
        self.flags = np.zeros(len(plan.units), np.bool_)
        self.deletions = 0
        self._backend = backend
        self._plan = plan
        self._lock = threading.Lock()
        self._turn = 0
        self._heeded = plan.heeds_pins and len(plan.units) > 0
        #: The files of pins and marks when they were last read.
        self._files: set[tuple[str, int, float]] | None = None
        self._clock = StorageClock(backend.now, steady)
        self._due = math.inf
        if len(plan.units):
            # A listing may have taken longer.
            age = max(0.0, self.now() - plan.inventory.now)
            self._due = steady() + _AGAIN_SECONDS - age

    def now(self) -> float:
        """Return the storage's time."""
        return self._clock.now()

    def turn(self) -> int:
        """Read pins and marks again if it is time; return how often that was done.

        Raises
        ------
        StorageError
            If the storage failed.
        """
        with self._lock:
            many = self._heeded and self.deletions >= _AGAIN_DELETIONS
            if many or steady() >= self._due:
                if self._heeded:
                    self._read()
                self.deletions = 0
                self._due = steady() + _AGAIN_SECONDS
                self._turn += 1
            return self._turn

    def _read(self) -> None:
        backend, plan = self._backend, self._plan
        rows = (row for folder in (PINS, MARKS) for row in backend.list(folder))
        files = {(row.name, row.size, row.mtime) for row in rows}
        if files == self._files:
            return
        pins = Pins.load(backend, time_for_ages(self.now(), backend.url))
        marks = Marks.read(backend)
        inventory, choice = plan.inventory, plan.rules.choice
        chosen = plan.reasons == Rule.CHOSEN
        # A tail is deleted at its age, pinned or not.
        by_pins = plan.reasons != Rule.TAIL
        by_uses = np.ones(len(by_pins), np.bool_)
        if choice is not None:
            by_pins &= ~(chosen & choice.pinned)
            by_uses &= ~(chosen & (choice.unused_for is None))
        first = inventory.first_rows[plan.units]
        for space, group, units in inventory.by_folder(first, by_group=True):
            folder, keys = inventory.namespaces[space].name, inventory.key[first[units]]
            pinned = pins.covers(folder, inventory.groups[group], keys)
            self.flags[units] |= by_pins[units] & pinned
            self.flags[units] |= by_uses[units] & (marks.used(folder, keys) > plan.used[units])
        self._files = files
