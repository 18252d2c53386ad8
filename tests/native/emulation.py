"""The kernel without a GPU: its source compiled as C++, and run for every block and thread."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.ops import checks, dispatch, kernel
from kvshelf.kv.ops.checks import CopyCall

EMULATE = Path(__file__).with_name("emulate.cc")
BUILD = Path(__file__).resolve().parents[2] / "build"
OPTIONS = (
    *("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    *("-fPIC", "-shared", f"-I{kernel.SOURCE.parent}"),
    # What would be undefined in a kernel ends the test run.
    "-fsanitize=signed-integer-overflow,shift,integer-divide-by-zero,bounds,alignment",
    "-fsanitize-undefined-trap-on-error",
)


@functools.cache
def library_path() -> Path | None:
    """Build the library, once for each version of its sources; None without a compiler."""
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        return None
    sources = EMULATE.read_bytes() + kernel.SOURCE.read_bytes() + f"{compiler} {OPTIONS}".encode()
    path = BUILD / f"kernel-{hashlib.sha256(sources).hexdigest()[:16]}.so"
    if not path.exists():
        BUILD.mkdir(exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        subprocess.run([compiler, *OPTIONS, str(EMULATE), "-o", str(temporary)], check=True)
        temporary.rename(path)
    return path


#: Tests in simulated time start no compiler.
library_path()


@dataclass
class Launch:
    name: str
    grid: Sequence[int]
    block: Sequence[int]


@dataclass
class EmulatedKernels:
    """Kernels of a device that is made of loops, see :class:`kvshelf.kv.ops.kernel.Kernels`."""

    library: ctypes.CDLL
    processors: int = 132
    launches: list[Launch] = field(default_factory=list)

    def launch(
        self, name: str, arguments: np.ndarray, grid: Sequence[int], block: Sequence[int]
    ) -> None:
        assert np.prod(block) <= 256
        assert max(grid[1:]) < 1 << 16
        self.launches.append(Launch(name, grid, block))
        run = ctypes.cast(getattr(self.library, name), ctypes.c_void_p)
        sizes = [(ctypes.c_uint32 * 3)(*size) for size in (grid, block)]
        self.library.run(run, ctypes.c_void_p(arguments.ctypes.data), *sizes)


def _run_kernel(call: CopyCall[Any], *, gather: bool) -> bool:
    strided = isinstance(call.layout, PagedLayout)
    return strided and kernel.run_kernel(call, gather=gather)


@contextlib.contextmanager
def emulated() -> Iterator[EmulatedKernels]:
    """Let the kernel copy in CPU tensors; skips the test where there is no C++ compiler."""
    path = library_path()
    if path is None:
        pytest.skip("no C++ compiler to build the kernel with")
    kernels = EmulatedKernels(ctypes.CDLL(str(path)))
    checks._known_caches.clear()
    with (
        mock.patch.object(kernel, "kernels_of", return_value=kernels),
        mock.patch.object(dispatch, "run_compiled", _run_kernel),
    ):
        yield kernels
    checks._known_caches.clear()
