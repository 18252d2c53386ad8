"""Streams and events of a GPU, as a parameter: tests have devices of their own.

Any thread may call all methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, cast

import torch

from kvshelf.kv.ops.driver import relaxed_captures

_cuda: Final = cast(Any, torch.cuda)  # much of it has no types


class Streams:
    """torch's streams and events of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self, *, urgent: bool) -> Any:
        """Make a stream, with high priority if `urgent`."""
        return _cuda.Stream(self._device, priority=-1 if urgent else 0)

    def event(self) -> Any:
        """Make an event."""
        return _cuda.Event()

    def current(self) -> Any:
        """Return the calling thread's stream."""
        return _cuda.current_stream(self._device)

    @contextlib.contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        """Make a stream and its device the calling thread's."""
        # The device first: at its exit torch.cuda.stream restores the stream that was current
        # before with its device. On a new thread that is device 0, and would create a context
        # there.
        with _cuda.device(self._device), _cuda.stream(stream):
            yield

    def here(self) -> AbstractContextManager[Any]:
        """Make the device the calling thread's."""
        return cast(AbstractContextManager[Any], _cuda.device(self._device))

    def relaxed(self) -> AbstractContextManager[None]:
        """Let the calling thread wait for the device while other threads capture graphs."""
        index = cast("int | None", self._device.index)
        return relaxed_captures(_cuda.current_device() if index is None else index)

    def enqueue(self, work: Callable[..., object], *arguments: Any) -> None:
        """Call `work`, which enqueues its work on the calling thread's stream.

        int64 tensors on the host are read during the call, all others when the work runs.
        """
        work(*arguments)

    def free_bytes(self) -> int:
        """Return the bytes of the device's memory that are free."""
        return int(_cuda.mem_get_info(self._device)[0])
