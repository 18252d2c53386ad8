"""Streams and events of a device, as a parameter: tests have devices of their own.

:class:`Streams` is also the implementation for devices that have none. Any thread may use it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, cast

import torch


class Streams:
    """Streams and events of one device.

    This class is for a device that has none: work is done when it is enqueued, and an object of
    the class is the only stream and the only event.
    """

    @property
    def index(self) -> int | None:
        """The device's number in the compiled library; None if that does not know it."""
        return None

    def handle(self) -> int:
        """Return the address of the calling thread's stream, for the compiled library."""
        raise NotImplementedError

    def stream(self, *, urgent: bool) -> Any:
        """Make a stream, with high priority if `urgent`."""
        return self

    def event(self) -> Any:
        """Make an event; a thread that waits for it sleeps."""
        return self

    def current(self) -> Any:
        """Return the calling thread's stream."""
        return self

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream and its device the calling thread's."""
        return contextlib.nullcontext()

    def here(self) -> AbstractContextManager[Any]:
        """Make the device the calling thread's."""
        return contextlib.nullcontext()

    def enqueue(self, work: Callable[..., object], *arguments: Any) -> None:
        """Call `work`, which enqueues its work on the calling thread's stream.

        int64 tensors on the host are read during the call, all others when the work runs.
        """
        work(*arguments)

    def free_bytes(self) -> int:
        """Return the bytes of the device's memory that are free."""
        return sys.maxsize

    def wait_event(self, event: Any) -> None:
        """Return at once, as all methods of the stream and of the event do."""

    def record(self, stream: Any) -> None:
        """See :meth:`wait_event`."""

    def synchronize(self) -> None:
        """See :meth:`wait_event`."""

    def query(self) -> bool:
        """Whether the enqueued work is done: always."""
        return True


_cuda: Final = cast(Any, torch.cuda)  # much of it has no types


class _CudaStreams(Streams):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index: int = device.index  # that of a tensor has one

    @property
    def index(self) -> int | None:
        return self._index

    def handle(self) -> int:
        # torch.cuda.current_stream() makes an object each time, which takes ten times as long.
        return int(cast(Any, torch._C)._cuda_getCurrentRawStream(self._index))

    def stream(self, *, urgent: bool) -> Any:
        return _cuda.Stream(self._device, priority=-1 if urgent else 0)

    def event(self) -> Any:
        return _cuda.Event(blocking=True)

    def current(self) -> Any:
        return _cuda.current_stream(self._device)

    @contextlib.contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        # The device first: at its exit torch.cuda.stream restores the stream that was current
        # before with its device. On a new thread that is device 0, and would create a context
        # there.
        with _cuda.device(self._device), _cuda.stream(stream):
            yield

    def here(self) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], _cuda.device(self._device))

    def free_bytes(self) -> int:
        return int(_cuda.mem_get_info(self._device)[0])


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return _CudaStreams(device) if device.type == "cuda" else Streams()
