"""The kernels without a GPU: builds and uses cuda/emulation, a device made of loops.

Device 0 does everything at once. Streams of tests that are used as devices of the library (see
:class:`NativeDevice`) get numbers from 1 on: the library asks them, in Python, for whatever it
would ask a driver.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from kvshelf.kv.ops import checks as checks_module
from kvshelf.kv.ops import library as library_module

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    "src/binding.cc",
    "src/binding_device.cc",
    "src/binding_copier.cc",
    "src/copier.cc",
    "src/link.cc",
    "src/copy_cpu.cc",
    "src/permuted_cpu.cc",
    "emulation/emulate.cc",
]
OPTIONS = [
    *("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"),
    *("-fvisibility=hidden", '-DKVSHELF_CUDA_ARCHITECTURES="emulation"'),
    # What would be undefined in a kernel ends the test run.
    "-fsanitize=signed-integer-overflow,shift,integer-divide-by-zero,bounds,alignment",
    "-fsanitize-undefined-trap-on-error",
]


@functools.cache
def library_path() -> Path | None:
    """The emulation, built at most once for each version of its sources; None: no compiler."""
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        return None
    import tvm_ffi

    cuda = ROOT / "cuda"
    digest = hashlib.sha256(f"{compiler} {OPTIONS} {tvm_ffi.__version__}".encode())
    for path in sorted([*cuda.rglob("*.h"), *(cuda / source for source in SOURCES)]):
        digest.update(path.read_bytes())
    built = ROOT / "build" / f"emulation-{digest.hexdigest()[:16]}.so"
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        temporary = built.with_name(f"{built.name}.{os.getpid()}")
        includes = [f"-I{cuda / 'include'}"]
        for folder in (
            tvm_ffi.libinfo.find_include_path(),
            tvm_ffi.libinfo.find_dlpack_include_path(),
        ):
            includes += ["-isystem", folder]
        subprocess.run(
            [
                *(compiler, *OPTIONS, *includes),
                *(str(cuda / source) for source in SOURCES),
                *("-o", str(temporary), tvm_ffi.libinfo.find_libtvm_ffi()),
            ],
            check=True,
        )
        temporary.rename(built)
    return built


@dataclass
class Counts:
    """How often each byte of one piece of memory was loaded and stored."""

    loads: NDArray[np.uint8]
    stores: NDArray[np.uint8]


class NativeDevice(Protocol):
    """Streams of a test that the library can use, see :class:`kvshelf.kv.streams.Streams`."""

    def stream(self, *, urgent: bool) -> Any: ...

    def event(self) -> Any: ...

    def nanoseconds(self, first: Any, second: Any) -> int:
        """The time between two events of one stream."""

    def work(self, stream: Any, run: Callable[[], None], nbytes: int) -> None:
        """Enqueue work: a copy between device and host, or, with 0 bytes, a kernel."""


class Emulation:
    """The emulated library, and what its device saw."""

    def __init__(self, path: Path) -> None:
        import tvm_ffi

        self.library = library_module._load_library(path)
        module = tvm_ffi.load_module(path)
        self._watch = module.get_function("emulation_watch")
        self._unwatch = module.get_function("emulation_unwatch")
        self._seen = module.get_function("emulation_seen")
        self.divide = module.get_function("emulation_divide")
        #: Lets launches have at most so many blocks; 0: any number.
        self.limit = module.get_function("emulation_limit")
        self._counts: list[Counts] = []  # the library writes into them
        self.run = module.get_function("emulation_run")
        self._devices: list[NativeDevice] = []
        #: Streams and events, by the addresses that the library knows.
        self._objects: dict[int, Any] = {}
        self._addresses: dict[int, int] = {}
        self._timed: set[int] = set()
        self._next = itertools.count(1)
        module.get_function("emulation_simulate")(self._ask)

    def unwatch(self) -> None:
        self._unwatch()
        self._counts.clear()

    def watch(self, memory: Tensor | NDArray[np.uint8]) -> Counts:
        """Count what happens to memory, until :meth:`unwatch`."""
        if isinstance(memory, Tensor):
            start, size = memory.data_ptr(), memory.numel() * memory.element_size()
        else:
            start, size = memory.ctypes.data, memory.nbytes
        counts = Counts(np.zeros(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8))
        self._counts.append(counts)
        self._watch(start, size, counts.loads.ctypes.data, counts.stores.ctypes.data)
        return counts

    def index_of(self, device: NativeDevice) -> int:
        """The number of a simulated device, from 1 on."""
        if device not in self._devices:
            self._devices.append(device)
        return 1 + self._devices.index(device)

    def address_of(self, stream_or_event: object) -> int:
        address = self._addresses.get(id(stream_or_event))
        if address is None:
            address = self._addresses[id(stream_or_event)] = next(self._next)
            self._objects[address] = stream_or_event
        return address

    def _ask(self, device: int, what: str, a: int, b: int, nbytes: int) -> int:
        """What cuda/emulation/emulate.cc asks instead of a driver."""
        of, at = self._devices[device - 1], self._objects
        if what == "stream":
            return self.address_of(of.stream(urgent=bool(a)))
        if what == "event":
            address = self.address_of(of.event())
            if a:
                self._timed.add(address)
            return address
        if what == "free":
            self._addresses.pop(id(at.pop(a)), None)
        elif what == "record":
            at[a].record(at[b])
        elif what == "wait":
            at[a].wait_event(at[b])
        elif what == "synchronize":
            at[a].synchronize()
        elif what == "finish":
            at[a].finish()
        elif what == "query":
            return int(at[a].query())
        elif what == "nanoseconds":
            assert {a, b} <= self._timed, "CUDA tells the time of events that are made for it"
            return of.nanoseconds(at[a], at[b])
        else:
            assert what == "work"
            of.work(at[a], functools.partial(self.run, b), nbytes)
        return 0

    @property
    def violations(self) -> int:
        """Loads and stores that were not aligned, or outside all watched memory."""
        return int(self._seen(0))

    @property
    def launches(self) -> int:
        return int(self._seen(1))

    @property
    def blocks(self) -> int:
        return int(self._seen(2))

    @property
    def copies(self) -> int:
        return int(self._seen(3))

    @property
    def width(self) -> int:
        return int(self._seen(4))

    @property
    def exposed(self) -> int:
        """Waits and questions that would make the capture of a graph on another thread fail."""
        return int(self._seen(5))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """CPU tensors are on the emulated device."""
        checks_module._known_caches.clear()
        with (
            mock.patch.object(library_module, "KERNEL_DEVICES", frozenset({"cpu"})),
            mock.patch.object(library_module, "compiled_library", return_value=self.library),
            mock.patch.object(library_module, "_load_kernels", return_value=self.library),
        ):
            try:
                yield
            finally:
                checks_module._known_caches.clear()
                self.unwatch()


@functools.cache
def _emulation() -> Emulation | None:
    path = library_path()
    return None if path is None else Emulation(path)


def emulation() -> Emulation:
    """The emulation; skips the test where there is no C++ compiler."""
    found = _emulation()
    if found is None:
        pytest.skip("no C++ compiler to build the emulation with")
    return found
