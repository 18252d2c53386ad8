"""Threads, locks, waits and clocks in simulated time: the same on every machine, however busy.

During a test the standard library's `threading`, `queue` and `time` work on a :class:`Simulation`.
Threads are real ones, of which only one runs at any time, until it waits for something. Time stands
still while any of them can go on; then the simulation sets the clock to when the first wait ends.
If no wait has an end, the test's thread gets a :class:`DeadlockError`. So how busy the machine is
changes nothing that a test sees.

Contracts
---------
* Locks, and all that consists of them, are simulated if made during a test by a thread of the
  simulation. Those made before, at import, are real: they must not be held while a thread waits.
* Each call of a clock takes :data:`TICK`, and each use of a lock :data:`INSTANT`, so that a loop
  that waits for a time ends, and other threads get their turn.
* Without a seed threads take turns where they wait, in the order in which they could go on. With
  one, a draw decides who is next, and a thread's turn may end at any use of a lock or a clock.
* Numbers drawn at random are the same each time, those for secrets as well; another seed, others.
* When the test is over, threads that still wait get :class:`OverError`, one after the other.
* Threads of other languages, processes and sockets know nothing of it: tests with those have the
  mark ``real``. In others, starting one is an error.
"""

from __future__ import annotations

import _thread
import gc
import heapq
import itertools
import math
import multiprocessing.process
import os
import queue
import random
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar, NoReturn

import pytest

TICK = 20e-6
INSTANT = 1e-6
#: How long a thread that uses locks and clocks runs before another gets its turn.
_TURN = 2e-3
#: Real seconds in which a thread must end when its test is over.
_END_SECONDS = 10.0

_allocate, _get_ident = _thread.allocate_lock, _thread.get_ident
_start, _join, _is_alive = threading.Thread.start, threading.Thread.join, threading.Thread.is_alive
_enumerate = threading.enumerate
_time_ns, _real_sleep, _real_poll = time.time_ns, time.sleep, select.poll


class OverError(BaseException):
    """The test has ended; the thread that gets this must end too."""


class DeadlockError(AssertionError):
    """All threads wait for each other."""


class _Task:
    """One thread. It runs when `gate` is released, and `error` is raised there."""

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.gate = _allocate()
        self.gate.acquire()
        self.error: BaseException | None = None
        #: What it waits in; None: it can go on. And how often it has waited: its timers say when.
        self.waits_in: deque[_Task] | None = None
        self.waits = 0
        self.woken = self.ended = False
        self.joining: deque[_Task] = deque()


class Simulation:
    """The threads of one test, and its clock.

    Parameters
    ----------
    seed : str
        Of the draws; empty: without any.
    """

    #: That of the test that runs, if it has one.
    current: ClassVar[Simulation | None] = None

    def __init__(self, seed: str = "") -> None:
        self.now = 1e6
        self.epoch = _time_ns() / 1e9 - self.now
        self.over = False
        self._random = random.Random(seed) if seed else None
        #: What ``random.SystemRandom`` draws from.
        self.chance = random.Random(seed)
        self._ready: deque[_Task] = deque()
        self._timers: list[tuple[float, int, int, _Task]] = []
        self._numbers = itertools.count()
        self._tasks: dict[threading.Thread, _Task] = {}
        #: Where threads wait for files, and how these are asked.
        self._polls: dict[int, tuple[deque[_Task], Any]] = {}
        self._main = self._running = _Task(threading.current_thread())
        #: The thread that runs; 0 while it starts another one.
        self._ident = _get_ident()
        self._turn_ends = self.now + _TURN

    def is_mine(self) -> bool:
        """Whether the calling thread is the one that runs."""
        return self._ident == _get_ident()

    def deadline(self, timeout: float | None) -> float:
        """Return when a wait ends."""
        return math.inf if timeout is None or timeout < 0 else self.now + timeout

    # ------------------------------------------------------------- threads

    def start(self, thread: threading.Thread) -> None:
        """Start a thread; it runs when others wait."""
        task, run = _Task(thread), thread.run

        def run_in_turn() -> None:
            task.gate.acquire()
            self._ident = _get_ident()
            with ExitStack() as stack:
                stack.push(partial(self._end, task))
                if not self.over:
                    run()

        self._ident = 0
        try:
            # Its start is waited for in real time.
            vars(thread).update(run=run_in_turn, _started=threading.Event())
            _start(thread)
        finally:
            self._ident = _get_ident()
        self._tasks[thread] = task
        self._ready.append(task)
        self.pass_time(INSTANT)

    def task(self, thread: threading.Thread) -> _Task | None:
        """Return what the simulation knows of a thread."""
        return self._tasks.get(thread)

    def join(self, task: _Task, timeout: float | None) -> None:
        """Wait until a thread has ended."""
        deadline = self.deadline(timeout)
        while not task.ended and self.wait(task.joining, deadline):
            pass

    def _end(self, task: _Task, kind: Any, error: BaseException | None, trace: Any) -> bool:
        """End a thread, and report its error as the library does."""
        if error is not None and not self.over:
            threading.excepthook(threading.ExceptHookArgs((kind, error, trace, task.thread)))
        task.ended = True
        self.wake(task.joining, len(task.joining))
        (self._main if self.over else self._next()).gate.release()
        return True

    # ------------------------------------------------------------- waits

    def wait(self, place: deque[_Task], deadline: float) -> bool:
        """Wait in `place`, until this thread is woken; return whether it was."""
        me = self._running
        if self.over:
            raise OverError
        me.waits_in, me.woken = place, False
        me.waits += 1
        place.append(me)
        if deadline < math.inf:
            heapq.heappush(self._timers, (deadline, next(self._numbers), me.waits, me))
        self._pass_on(me)
        return me.woken

    def wake(self, place: deque[_Task], count: int = 1) -> None:
        """Let those who have waited longest in `place` go on."""
        for _ in range(min(count, len(place))):
            task = place.popleft()
            task.waits_in, task.woken = None, True
            self._ready.append(task)

    def poll(self, poll: Any, timeout: float | None) -> Any:
        """Wait until a file is ready, which other threads of the simulation make so."""
        ready = poll.poll(0)
        deadline = self.deadline(timeout)
        while not ready and self.now < deadline:
            place: deque[_Task] = deque()
            self._polls[id(place)] = place, poll
            self.wait(place, deadline)
            del self._polls[id(place)]
            ready = poll.poll(0)
        return ready

    def pass_time(self, seconds: float) -> None:
        """Let a little time pass, and other threads run if it is their turn."""
        self.now += seconds
        if self.now > self._turn_ends:
            self.let_others()

    def let_others(self) -> None:
        """Let all run that can."""
        self._expire()
        if self._ready and not self.over:
            self._ready.append(self._running)
            self._pass_on(self._running)
        else:
            self._begin_turn()

    def _begin_turn(self) -> None:
        share = 1.0 if self._random is None else 10 ** -self._random.uniform(0, 3.3)
        self._turn_ends = self.now + share * _TURN

    def _expire(self) -> None:
        """Let those go on whose wait has ended, or whose file is ready."""
        for place, poll in self._polls.values():
            if place and poll.poll(0):
                self.wake(place)
        timers = self._timers
        while timers and timers[0][0] <= self.now:
            _, _, waits, task = heapq.heappop(timers)
            if task.waits_in is not None and task.waits == waits:
                task.waits_in.remove(task)
                task.waits_in = None
                self._ready.append(task)

    def _next(self) -> _Task:
        """Return who runs next, when none can go on after time has passed."""
        while True:
            self._expire()
            if self._ready:
                place = self._random.randrange(len(self._ready)) if self._random else 0
                self._running = self._ready[place]
                del self._ready[place]
                self._begin_turn()
                return self._running
            if self._timers:
                self.now = max(self.now, self._timers[0][0])
                continue
            main = self._main
            names = [task.thread.name for task in self._tasks.values() if not task.ended]
            main.error = DeadlockError(f"all threads wait without an end: {', '.join(names)}")
            if main.waits_in is not None:
                main.waits_in.remove(main)
                main.waits_in = None
            self._ready.append(main)

    def _pass_on(self, me: _Task) -> None:
        following = self._next()
        if following is not me:
            following.gate.release()
            me.gate.acquire()
            self._ident = _get_ident()
        if self.over and me is not self._main:
            raise OverError
        error, me.error = me.error, None
        if error is not None:
            raise error

    def end(self) -> None:
        """End all threads, one after the other; the test's own calls this.

        Raises
        ------
        AssertionError
            If a thread does not end.
        """
        self.over = True
        for task in list(self._tasks.values()):
            if not task.ended:
                self._running = task
                task.gate.release()
                if not self._main.gate.acquire(timeout=_END_SECONDS):
                    raise AssertionError(f"{task.thread.name} does not end")
            _join(task.thread, _END_SECONDS)
        self._running, self._ident = self._main, _get_ident()


class _Lock:
    """What ``threading.Lock()`` is during a test. Afterwards it never waits."""

    def __init__(self) -> None:
        self._locked = False
        self._waiting: deque[_Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return whether it was free in time."""
        sim = _mine()
        if sim is None:
            free, self._locked = not self._locked, True
            return free
        sim.pass_time(INSTANT)
        if self._locked and (not blocking or timeout == 0):
            # Who tries again and again must not keep others from running.
            sim.let_others()
            if self._locked:
                return False
        deadline = sim.deadline(timeout)
        while self._locked:
            if not sim.wait(self._waiting, deadline) and self._locked:
                return False
        self._locked = True
        return True

    def release(self) -> None:
        """Let the next one have the lock."""
        if not self._locked:
            raise RuntimeError("release unlocked lock")
        self._locked = False
        sim = _mine()
        if sim is not None:
            sim.wake(self._waiting)
            sim.pass_time(INSTANT)

    def locked(self) -> bool:
        """Whether someone has it."""
        return self._locked

    def _at_fork_reinit(self) -> None:
        self._locked = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _mine() -> Simulation | None:
    """Return the simulation, if the calling thread is one of its own."""
    sim = Simulation.current
    return sim if sim is not None and sim.is_mine() else None


def _make_lock() -> Any:
    return _allocate() if _mine() is None else _Lock()


def _clock(real: Callable[[], Any], unit: float = 1.0, *, wall: bool = False) -> Callable[[], Any]:
    """Return a clock that tells the time of the simulation, if there is one."""

    def tell() -> Any:
        sim = Simulation.current
        if sim is None:
            return real()
        if sim.is_mine():
            sim.pass_time(TICK)
        now = sim.epoch + sim.now if wall else sim.now
        return now if unit == 1 else int(now * unit)

    return tell


def _sleep(seconds: float) -> None:
    sim = _mine()
    if sim is None:
        _real_sleep(seconds)
    else:
        sim.wait(deque(), sim.deadline(max(0.0, seconds)))


def _draw(name: str) -> Callable[..., Any]:
    real = getattr(random.SystemRandom, name)

    def draw(system: random.SystemRandom, *arguments: Any) -> Any:
        sim = Simulation.current
        return real(system, *arguments) if sim is None else getattr(sim.chance, name)(*arguments)

    return draw


class _Poll:
    """What ``select.poll()`` is."""

    def __init__(self) -> None:
        self._real = _real_poll()
        self.register, self.unregister = self._real.register, self._real.unregister

    def poll(self, milliseconds: float | None = None) -> Any:
        """Return the files that are ready, when one is."""
        sim = _mine()
        if sim is None:
            return self._real.poll(milliseconds)
        return sim.poll(self._real, None if milliseconds is None else milliseconds / 1e3)


def _start_thread(thread: threading.Thread) -> None:
    sim = _mine()
    if sim is None:
        if Simulation.current is not None:
            raise StartedError(f"{thread.name}: started by a thread that is not simulated")
        _start(thread)
    elif sim.over:
        raise OverError
    else:
        sim.start(thread)


def _task_of(thread: threading.Thread) -> _Task | None:
    return None if Simulation.current is None else Simulation.current.task(thread)


def _join_thread(thread: threading.Thread, timeout: float | None = None) -> None:
    sim, task = _mine(), _task_of(thread)
    if sim is None or task is None:
        _join(thread, timeout)
    else:
        sim.join(task, timeout)


def _thread_is_alive(thread: threading.Thread) -> bool:
    task = _task_of(thread)
    return _is_alive(thread) if task is None else not task.ended


def _all_threads() -> list[threading.Thread]:
    return [thread for thread in _enumerate() if thread.is_alive()]


def _replace_library() -> None:
    """Have the library ask whether there is a simulation.

    For good, and before kvshelf is imported, since some defaults of parameters are clocks.
    """
    library: Any = threading
    files: Any = select
    library.Lock = library._allocate_lock = _make_lock
    library.Thread.start, library.Thread.join = _start_thread, _join_thread
    library.Thread.is_alive = _thread_is_alive
    files.poll = _Poll
    library.enumerate, library.active_count = _all_threads, lambda: len(_all_threads())
    queues: Any = queue
    queues.SimpleQueue = queues._PySimpleQueue
    clocks: Any = time
    for name in ("monotonic", "perf_counter"):
        setattr(time, name, _clock(getattr(time, name)))
        setattr(time, f"{name}_ns", _clock(getattr(time, f"{name}_ns"), 1e9))
    clocks.time, clocks.time_ns = _clock(time.time, wall=True), _clock(time.time_ns, 1e9, wall=True)
    clocks.sleep = _sleep
    for name in ("random", "getrandbits"):
        setattr(random.SystemRandom, name, _draw(name))
    library._time = queues.time = time.monotonic


class StartedError(Exception):
    """A test in simulated time has started something real."""


def _refuse(what: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise StartedError(f"a test without the mark `real` {what}")

    return refuse


@contextmanager
def simulated(seed: str = "") -> Iterator[Simulation]:
    """Run what is inside in simulated time."""
    with pytest.MonkeyPatch.context() as patch:
        # A lock in C would be a real one.
        patch.setattr(threading, "_CRLock", None)
        patch.setattr(subprocess.Popen, "_execute_child", _refuse("starts a process"))
        patch.setattr(multiprocessing.process.BaseProcess, "start", _refuse("starts a process"))
        patch.setattr(os, "fork", _refuse("starts a process"))
        patch.setattr(socket.socket, "connect", _refuse("opens a connection"))
        patch.setattr(socket.socket, "listen", _refuse("opens a server"))
        sim = Simulation.current = Simulation(seed)
        # What garbage does when it is collected must not depend on when that is.
        gc.disable()
        drawn = random.getstate()
        random.seed(seed)
        try:
            yield sim
        finally:
            try:
                sim.end()
            finally:
                Simulation.current = None
                gc.enable()
                random.setstate(drawn)


_replace_library()
