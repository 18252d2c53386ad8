"""CUDA's page-locking without a GPU: which memory is registered, and what a copy from it may be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshelf.memory.pages import address_of
from tests.support.waiting import until

INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED = 1, 2, 801
READ_ONLY = 8


class FakeCudart:
    """What ``torch.cuda.cudart()`` returns.

    Attributes
    ----------
    registered : dict of int to int
        Bytes of each registration, by address.
    most : int
        Bytes that are registered at most, over all registrations.
    reads_only : bool
        Memory that is mapped for reading only can be registered, if that is said.
    """

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.most = 1 << 62
        self.reads_only = True

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if flags & READ_ONLY and not self.reads_only:
            return NOT_SUPPORTED
        if not flags & READ_ONLY and not _is_writable(address):
            return INVALID_VALUE
        if sum(self.registered.values()) + nbytes > self.most:
            return OUT_OF_MEMORY
        ends = {start: start + size for start, size in self.registered.items()}
        assert all(end <= address or address + nbytes <= start for start, end in ends.items())
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return {
            INVALID_VALUE: "invalid argument",
            OUT_OF_MEMORY: "out of memory",
            NOT_SUPPORTED: "operation not supported",
        }[error]

    def holds(self, memory: torch.Tensor | memoryview) -> bool:
        """Whether a copy from or to memory is possible: it lies in one registration."""
        if isinstance(memory, memoryview):
            start, nbytes = address_of(memory), memory.nbytes
        else:
            start, nbytes = memory.data_ptr(), memory.numel()
        return any(
            first <= start and start + nbytes <= first + size
            for first, size in self.registered.items()
        )


def _is_writable(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, *_ = line.split()
        start, end = (int(part, 16) for part in place.split("-"))
        if start <= address < end:
            return "w" in access
    return False


_zeros = torch.zeros


def on_host(*size: int, device: str = "cpu", **options: Any) -> torch.Tensor:
    return _zeros(*size, **options)


@contextlib.contextmanager
def fake_cudart() -> Iterator[FakeCudart]:
    """As if there were a GPU, as far as page-locking is concerned."""
    runtime = FakeCudart()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        patch.setattr(torch.cuda, "device", contextlib.nullcontext)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: type("Properties", (), {}))
        patch.setattr(torch, "zeros", on_host)
        yield runtime
        # Threads that end page-locking ask torch for a device.
        until(lambda: not runtime.registered)
