"""NVTX ranges: they name kvshelf's work on the threads of a timeline of Nsight Systems.

They are made by torch. Without a profiler each is two calls that do nothing; where torch has no
NVTX, or the process has not imported torch, there is none. Imports nothing of kvshelf. Any thread
may make ranges; each ends on the thread that began it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Final

_NOTHING: Final = contextlib.nullcontext()


class _Range:
    """A range of NVTX. Cheaper than a generator: there are several for each chunk."""

    __slots__ = ("_name", "_nvtx")

    def __init__(self, nvtx: Any, name: str) -> None:
        self._nvtx = nvtx
        self._name = name

    def __enter__(self) -> None:
        self._nvtx.range_push(self._name)

    def __exit__(self, *_: object) -> None:
        self._nvtx.range_pop()


@functools.cache
def _nvtx_of(torch: ModuleType) -> Any:
    """Return the NVTX of torch; None where it was built without."""
    try:
        nvtx = torch.cuda.nvtx
        nvtx.range_push("kvshelf")
        nvtx.range_pop()
    except (AttributeError, RuntimeError):
        return None
    return nvtx


def trace_range(name: str) -> AbstractContextManager[None]:
    """Return a range around work of the calling thread.

    Parameters
    ----------
    name : str
        As Nsight Systems shows it.
    """
    torch = sys.modules.get("torch")
    nvtx = None if torch is None else _nvtx_of(torch)
    return _NOTHING if nvtx is None else _Range(nvtx, name)
