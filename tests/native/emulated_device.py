"""An emulated device for ``first_light.py --emulated``, with a fault where a test wants one.

The environment variable ``SEEDED_FAULT`` names the fault; each is in what the code under test
sees, not in what tests it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import gpu_digests
from gpu_groups import Engine

from kvshelf.kv import device as device_module
from tests.native.emulation import Emulation, emulation
from tests.native.simulated_device import SimulatedEvent, SimulatedStream, SimulatedStreams

Launch = Callable[..., int]
Patch = contextlib.AbstractContextManager[Any]


def one_byte(launch: Launch) -> Launch:
    """The first byte of each gather's buffers is wrong."""

    def spoiled(*arguments: int) -> int:
        width = launch(*arguments)
        if width > 0:
            ctypes.c_uint8.from_address(arguments[4]).value ^= 1
        return width

    return spoiled


def hang(launch: Launch) -> Launch:
    """The tenth gather never ends."""
    calls = iter(range(10))

    def stuck(*arguments: int) -> int:
        if next(calls, None) is None:
            while True:
                time.sleep(1)
        return launch(*arguments)

    return stuck


def illegal_address(launch: Launch) -> Launch:
    """After the tenth gather each call fails, for as long as the process lives."""
    calls = iter(range(10))

    def failing(*arguments: int) -> int:
        if next(calls, None) is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return launch(*arguments)

    return failing


def refused(launch: Launch) -> Launch:
    """The kernels leave each gather to plain torch, as if it were too large."""
    return lambda *_: -1


def unfenced(load: Launch) -> Launch:
    """Loads wait for nothing of the engine's."""
    return lambda *arguments: load(*arguments[:-1], 0)


def lost(load: Launch) -> Launch:
    """Loads do nothing."""
    return lambda *_: -1


def first_only(load: Launch) -> Launch:
    """Each load is one of the first object."""
    return lambda *arguments: load(*arguments[:2], 0, *arguments[3:])


def stale(digests: Launch) -> Launch:
    """From the third call on, digests stay what they are."""
    calls = itertools.count()
    return lambda *arguments: digests(*arguments) if next(calls) < 2 else 16


def elsewhere(streams: SimulatedStreams) -> Patch:
    """Gathers do not run on the engine's stream."""
    handle = emulation().address_of(streams.stream(urgent=False))
    return mock.patch.object(streams, "handle", return_value=handle)


def early(streams: SimulatedStreams) -> Patch:
    """Copies to the host do not wait for what the engine's stream has to do first."""
    wait, of_engine = SimulatedEvent.synchronize, set()

    class Event(SimulatedEvent):
        def record(self, stream: SimulatedStream) -> None:
            if stream is streams.engine:
                of_engine.add(self)
            super().record(stream)

        def synchronize(self) -> None:
            if self not in of_engine:
                wait(self)

    return mock.patch.object(streams, "event", functools.partial(Event, streams))


def dropped(streams: SimulatedStreams) -> Patch:
    """One piece of a copy between device and host is lost."""
    work, copies = streams.work, itertools.count()

    def lossy(stream: SimulatedStream, run: Callable[[], object], nbytes: int) -> None:
        work(stream, int if nbytes and next(copies) == 5 else run, nbytes)

    return mock.patch.object(streams, "work", lossy)


def exposed(streams: SimulatedStreams) -> Patch:
    """Threads that wait disturb captures."""
    counted = mock.PropertyMock(side_effect=itertools.count())
    return mock.patch.object(Emulation, "exposed", counted)


def slow_link(streams: SimulatedStreams) -> Patch:
    """The pace stays where it began."""
    streams.rate = 1e9
    return contextlib.nullcontext()


class SlowEngine(Engine):
    """The engine of a simulated device: it does nothing as long as anything else can be done."""

    def __init__(self, streams: SimulatedStreams) -> None:
        self._streams = streams

    def enqueue(self, work: Callable[..., object], *arguments: Any) -> None:
        self._streams.do(work, *arguments)

    def fall_behind(self) -> None:
        self._streams.let_engine_be_last()

    def finish(self) -> None:
        self._streams.engine.finish()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        before = emulation().exposed
        yield
        if emulation().exposed != before:
            raise RuntimeError("operation failed due to a previous error during capture")


OF_DIGESTS = (stale,)
OF_LOADS = (first_only, lost, unfenced)
OF_STREAMS = (dropped, early, elsewhere, exposed, slow_link)


@contextlib.contextmanager
def device() -> Iterator[Engine]:
    name = os.environ.get("SEEDED_FAULT", "")
    if os.environ["KVSHELF_OPS"] != "cuda":
        yield Engine()  # the fallback runs on the CPU
        return
    emulated = emulation()
    kept = emulated.library
    assert kept.device is not None
    assert kept.copier is not None
    streams = SimulatedStreams(rate=50e9)
    with contextlib.ExitStack() as stack:
        fault = globals().get(name)
        if name == "torch_copies":
            # Stores and loads by torch's copies, as if the library could not open a copier.
            emulated.library = dataclasses.replace(kept, copier=None)
        elif fault in OF_STREAMS:
            stack.enter_context(fault(streams))
        elif fault in OF_DIGESTS:
            hashes = gpu_digests.functions

            def faulty() -> tuple[Launch, Launch]:
                digests, room = hashes()
                return fault(digests), room

            stack.enter_context(mock.patch.object(gpu_digests, "functions", faulty))
        elif fault in OF_LOADS:
            copier = dataclasses.replace(kept.copier, load=fault(kept.copier.load))
            emulated.library = dataclasses.replace(kept, copier=copier)
        elif name:
            assert fault is not None
            of_device = dataclasses.replace(kept.device, gather=fault(kept.device.gather))
            emulated.library = dataclasses.replace(kept, device=of_device)
        stack.enter_context(emulated.in_use())
        stack.enter_context(mock.patch.object(device_module, "streams_of", return_value=streams))
        yield SlowEngine(streams)
    if name:
        # Whoever found the fault did not wait for the rest, which uses memory that is gone.
        streams.fail()
    streams.close()
