"""Runs groups of a part, one after another, in a process of their own; see first_light.py.

What happens is appended to a file of JSON lines, which the starting process reads: a group
begins, has a row or a fact, ends. The process ends after the first group that fails, since a
device that reported an error stays unusable for the process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import importlib
import importlib.util
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from gpu_parts import PARTS, Group
from torch import Tensor

from kvshelf.buffers import BufferPool
from kvshelf.kv import ops
from kvshelf.kv.caches import LayerCall, PendingCopy
from kvshelf.kv.copier import ChunkCopy
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.ops import library as native

_PARENT_DIED = 1  # PR_SET_PDEATHSIG


class NotRun(Exception):  # noqa: N818  not an error
    """The machine lacks what the group needs; the message says what."""


class NeedsGpuError(Exception):
    """An emulated device cannot run the group."""


class Engine:
    """The engine of a group: its thread is the one that runs the group.

    This class is for a device whose work is done when it is enqueued.
    """

    def here(self) -> contextlib.AbstractContextManager[Any]:
        """Make the engine's stream the calling thread's."""
        return contextlib.nullcontext()

    def enqueue(self, work: Callable[..., object], *arguments: Any) -> None:
        """Enqueue the engine's own work, such as a method of a tensor."""
        work(*arguments)

    def fall_behind(self) -> None:
        """Let the engine's stream be busy: what is enqueued next begins some time later."""

    def finish(self) -> None:
        """Wait for all that is enqueued on the engine's stream."""

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Fail if what other threads do meanwhile disturbs the capture of a graph."""
        yield


class CudaEngine(Engine):
    """On a GPU, with a stream of its own, as vLLM's: the default stream would wait for others."""

    #: Some milliseconds.
    CYCLES: Final = 10_000_000

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._behind: Any = None

    def here(self) -> contextlib.AbstractContextManager[Any]:
        """See :class:`Engine`."""
        return cast("contextlib.AbstractContextManager[Any]", torch.cuda.stream(self._stream))

    def fall_behind(self) -> None:
        """See :class:`Engine`. Nothing more is enqueued while the stream is still busy."""
        if self._behind is None or self._behind.query():
            torch.cuda._sleep(self.CYCLES)
            self._behind = torch.cuda.current_stream().record_event()

    def finish(self) -> None:
        """See :class:`Engine`."""
        self._stream.synchronize()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """See :class:`Engine`: in the mode that forbids most to all threads."""
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would first wait until the device is idle.
        graph.capture_begin(capture_error_mode="global")
        try:
            yield
        finally:
            graph.capture_end()
        graph.replay()


class Timing(NamedTuple):
    """Median seconds, and the spread of the middle half of the samples as a part of it."""

    seconds: float
    spread: float = 0.0

    def times(self, factor: float) -> Timing:
        """Return the time of `factor` times as much work."""
        return Timing(self.seconds * factor, self.spread)


class _Lagging(DeviceKVCache):
    """Gathers and fences of an engine whose stream is busy."""

    engine = Engine()

    def _gather(
        self, copy: ChunkCopy, slots: Tensor, payloads: Sequence[Tensor]
    ) -> PendingCopy | None:
        self.engine.fall_behind()
        return super()._gather(copy, slots, payloads)

    def fence(self) -> object:
        self.engine.fall_behind()
        return super().fence()


@dataclass
class Context:
    """What a group runs with, and where its results go.

    Attributes
    ----------
    device : torch.device
    emulated : bool
        The device is made of loops on the CPU.
    small : bool
        Fewer and smaller cases.
    serves : str
        The implementation that has to carry out everything.
    say : callable
        Takes what is to be reported, as a dict.
    engine : Engine
    lags : bool
        Before each gather and each fence the engine falls behind.
    launches, refused : int
        Calls of the library, and those that its kernels left to others.
    copiers : int
        Caches whose stores and loads the library carries out.
    widths : set of int
        Widths in bytes of the vectors of these calls.
    """

    device: torch.device
    emulated: bool = False
    small: bool = False
    serves: str = "cuda"
    say: Callable[[dict[str, Any]], None] = lambda _: None
    engine: Engine = field(default_factory=Engine)
    lags: bool = False
    comparisons: int = 0
    launches: int = 0
    refused: int = 0
    copiers: int = 0
    widths: set[int] = field(default_factory=set)

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def needs_gpu(self, why: str) -> None:
        """End the group on an emulated device."""
        if not self.cuda:
            raise NeedsGpuError(why)

    def equal(self, got: Tensor, want: Tensor, what: str) -> None:
        """Compare two byte tensors.

        Raises
        ------
        AssertionError
            With the number and the first of the different bytes.
        """
        self.comparisons += 1
        if got.shape != want.shape:
            raise AssertionError(f"{what}: {list(got.shape)} instead of {list(want.shape)}")
        if torch.equal(got, want.to(got.device)):
            return
        got, want = got.reshape(-1), want.to(got.device).reshape(-1)
        wrong = (got != want).nonzero().view(-1)
        first = int(wrong[0])
        raise AssertionError(
            f"{what}: {wrong.numel()} of {got.numel()} bytes differ, first at {first}: "
            f"{int(got[first])} instead of {int(want[first])}"
        )

    def row(
        self,
        name: str,
        took: Timing,
        floor: str,
        least: Timing,
        payload: int = 0,
        goal: float | None = None,
        note: str = "",
    ) -> None:
        """Report a time beside a floor of the same run on the same bytes.

        Parameters
        ----------
        name, floor : str
            What was measured, and what it is compared with.
        took, least : Timing
            Of both.
        payload : int
            Bytes moved; not counted twice for being read and written.
        goal : float, optional
            Smallest ratio ``least / took`` that is wanted.
        note : str
        """
        ratio = least.seconds / took.seconds
        row = {
            "name": name,
            "seconds": took.seconds,
            "spread": took.spread,
            "floor": floor,
            "floor_seconds": least.seconds,
            "floor_spread": least.spread,
            "gb_per_s": payload / took.seconds / 1e9,
            "ratio": ratio,
            "goal": goal,
            "met": None if goal is None else ratio >= goal,
            "note": note,
        }
        self.say({"event": "row", "row": row})

    def fact(self, name: str, value: object, line: str = "") -> None:
        """Report anything else, with a line for the screen."""
        self.say({"event": "fact", "name": name, "value": value, "line": line})

    def device_caches(
        self, calls: Mapping[int, Sequence[LayerCall]], **options: Any
    ) -> DeviceKVCache:
        """Make the path between caches and the host, which the library has to serve."""
        before = self.copiers
        path = (_Lagging if self.lags else DeviceKVCache)(calls, **options)
        if isinstance(path, _Lagging):
            path.engine = self.engine
        if self.serves == "cuda" and self.copiers == before:
            path.close()
            raise AssertionError("stores and loads are not carried out by the library")
        return path

    @contextlib.contextmanager
    def staging(self, count: int, size: int) -> Iterator[list[Tensor]]:
        """Host memory as a worker's staging: `count` buffers of one registered region."""
        room = -(-size // 4096) * 4096
        kind, device = ("pinned", self.device) if self.cuda else ("host", None)
        pool = BufferPool(count * room, kind=kind, device=device, alignment=4096)
        found = [pool.allocate(size) for _ in range(count)]
        buffers = [buffer for buffer in found if buffer is not None]
        try:
            if len(buffers) < count:
                raise NotRun(f"the system does not page-lock {count * room} bytes")
            yield [buffer.tensor for buffer in buffers]
        finally:
            if self.cuda:
                torch.cuda.synchronize(self.device)
            for buffer in buffers:
                buffer.release()
            pool.close()


@contextlib.contextmanager
def launches_noted(ctx: Context) -> Iterator[None]:
    """Count the calls of the library, and those that its kernels refuse."""
    kept = native.kernels

    def counting(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def call(*arguments: object) -> int:
            ctx.launches += 1
            return function(*arguments)

        return call

    def opening(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def call(*arguments: object) -> int:
            handle = function(*arguments)
            ctx.copiers += handle != 0
            return handle

        return call

    def noting(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def call(*arguments: object) -> int:
            width = function(*arguments)
            ctx.launches += width > 0
            ctx.refused += width == -1
            ctx.widths.add(width)
            return width

        return call

    @functools.cache
    def kernels(index: int | None) -> native.Library | None:
        library = kept(index)
        if library is None or library.device is None:
            return library
        device, copier = library.device, library.copier
        device = dataclasses.replace(
            device, gather=noting(device.gather), scatter=noting(device.scatter)
        )
        if copier is not None:
            copier = dataclasses.replace(
                copier,
                open=opening(copier.open),
                store=counting(copier.store),
                load=counting(copier.load),
            )
        return dataclasses.replace(library, device=device, copier=copier)

    native.kernels = kernels  # type: ignore[assignment]
    try:
        yield
    finally:
        native.kernels = kept


def served_by(device: torch.device) -> tuple[str, str]:
    """Return what serves a device, and why not the kernels."""
    try:
        return ops.implementation(device), ops.kernel_problem(device) or ""
    except Exception as error:
        return "nothing", f"{type(error).__name__}: {error}"


def run_group(group: Group, ctx: Context) -> dict[str, Any]:
    """Run one group; return its result."""
    began = time.monotonic()
    result: dict[str, Any] = {"state": "ok"}
    served, problem = "", ""
    try:
        if group.serves == "triton":
            ctx.needs_gpu("Triton's kernels need a GPU")
            if importlib.util.find_spec("triton") is None:
                raise NotRun("no Triton")
        served, problem = served_by(ctx.device)
        if served != ctx.serves:
            raise AssertionError(f"served by {served}, not by {ctx.serves}: {problem}")
        torch.manual_seed(0)
        module, _, function = group.where.partition(".")
        with launches_noted(ctx), ctx.engine.here():
            getattr(importlib.import_module(module), function)(ctx)
        if ctx.cuda:
            torch.cuda.synchronize(ctx.device)
        if ctx.refused:
            raise AssertionError(f"the kernels left {ctx.refused} calls to plain torch")
    except NotRun as reason:
        result |= {"state": "not run", "why": str(reason)}
    except NeedsGpuError as reason:
        result |= {"state": "needs a GPU", "why": str(reason)}
    except Exception as error:
        result |= {"state": "failed", "why": f"{type(error).__name__}: {error}"[:2000]}
        traceback.print_exc()
    return result | {
        "served": served,
        "launches": ctx.launches,
        "widths": sorted(width for width in ctx.widths if width > 0),
        "comparisons": ctx.comparisons,
        "seconds": round(time.monotonic() - began, 2),
    }


@contextlib.contextmanager
def opened_device(emulated: Path | None) -> Iterator[tuple[torch.device, Engine]]:
    """Make the device usable; `emulated` is a Python file with a context manager ``device()``."""
    if emulated is None:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        yield device, CudaEngine(device)
        return
    # The tensors are tiny; threads that wait for others of a busy machine would take minutes.
    torch.set_num_threads(1)
    sys.path.insert(0, str(emulated.parent))
    spec = importlib.util.spec_from_file_location(emulated.stem, emulated)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.device() as engine:
        yield torch.device("cpu"), engine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", required=True, choices=PARTS)
    parser.add_argument("--groups", required=True, help="their names, with commas")
    parser.add_argument("--events", required=True, type=Path)
    parser.add_argument("--emulated", type=Path)
    options = parser.parse_args(arguments)
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)
    faulthandler.enable()
    groups = {group.name: group for group in PARTS[options.part]}
    with options.events.open("a") as events:

        def say(what: dict[str, Any]) -> None:
            events.write(json.dumps(what, allow_nan=False) + "\n")
            events.flush()

        with opened_device(options.emulated) as (device, engine):
            for name in options.groups.split(","):
                group = groups[name]
                say({"event": "begin", "name": name})
                small = group.small or options.emulated is not None
                ctx = Context(
                    *(device, options.emulated is not None, small, group.serves, say, engine),
                    lags=group.lags,
                )
                result = run_group(group, ctx)
                say({"event": "end", "result": result})
                if result["state"] == "failed":
                    return 1
                if ctx.cuda:
                    torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    # The groups' functions import this module by its name.
    sys.modules["gpu_groups"] = sys.modules["__main__"]
    sys.exit(main())
