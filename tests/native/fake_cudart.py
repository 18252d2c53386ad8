"""CUDA's page-locking without a GPU: which memory is registered, and what a copy from it may be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvshelf.pages import address_of

OUT_OF_MEMORY = 2


class FakeCudart:
    """What ``torch.cuda.cudart()`` returns.

    Attributes
    ----------
    registered : dict of int to int
        Bytes of each registration, by address.
    most : int
        Bytes that are registered at most, over all registrations.
    flags : set of int
        With which flags.
    """

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.most = 1 << 62
        self.flags: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if sum(self.registered.values()) + nbytes > self.most:
            return OUT_OF_MEMORY
        ends = {start: start + size for start, size in self.registered.items()}
        assert all(end <= address or address + nbytes <= start for start, end in ends.items())
        self.registered[address] = nbytes
        self.flags.add(flags)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return {OUT_OF_MEMORY: "out of memory"}[error]

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
