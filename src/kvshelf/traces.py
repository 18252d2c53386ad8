"""NVTX ranges: they name kvshelf's work on the threads of a timeline of Nsight Systems.

They are made by torch, in processes that use a GPU. Imports nothing of kvshelf. Any thread may make
ranges; each ends on the thread that began it.
"""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from typing import Any, Final

_NOTHING: Final = contextlib.nullcontext()


def trace_range(name: str) -> AbstractContextManager[None]:
    """Return a range around work of the calling thread.

    Parameters
    ----------
    name : str
        As Nsight Systems shows it.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return _NOTHING
    found: AbstractContextManager[None] = torch.cuda.nvtx.range(name)
    return found
