"""The drivers of NVIDIA's and AMD's GPUs, called by ctypes in torch's own context.

Owns the names of the vendors' libraries and functions, and the calls to the driver that torch has
no function for: the launch of a kernel, and how a thread's calls treat captures of other threads.

Contracts
---------
* Importing this module loads no library and initialises no device.
* Any thread may call all of it. A thread that is new has no context: each call makes torch's own
  current for as long as it takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

#: ``CU_STREAM_CAPTURE_MODE_RELAXED``, and HIP's.
_RELAXED: Final = 2


@dataclass(frozen=True, slots=True)
class Names:
    """What NVIDIA's and AMD's libraries call the same things.

    Attributes
    ----------
    compilers, drivers : tuple of str
        Libraries, the first one first.
    folders : str
        Pattern of the folders, below those of Python packages, in which compilers lie.
    rtc, driver : str
        Prefixes of the functions of the compiler and of the driver.
    code, target, launch, error : str
        The compiler's name for machine code and its option for the device; the driver's functions
        that launch a kernel and explain an error.
    """

    compilers: tuple[str, ...]
    drivers: tuple[str, ...]
    folders: str
    rtc: str
    driver: str
    code: str
    target: str
    launch: str
    error: str


NVIDIA: Final = Names(
    *(("libnvrtc.so.13", "libnvrtc.so.12"), ("libcuda.so.1",), "nvidia/*/lib", "nvrtc", "cu"),
    *("CUBIN", "--gpu-architecture=", "LaunchKernel", "GetErrorString"),
)
AMD: Final = Names(
    ("libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"),
    ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"),
    *("torch/lib", "hiprtc", "hip"),
    *("Code", "--offload-arch=", "ModuleLaunchKernel", "DrvGetErrorString"),
)


def names() -> Names:
    """Return the names for the devices of this torch."""
    return AMD if torch.version.hip else NVIDIA


def load_library(libraries: Sequence[str], folders: str = "") -> ctypes.CDLL:
    """Return a library that is loaded, or that the system has, or a package of Python.

    Raises
    ------
    RuntimeError
        If there is none.
    """
    paths = list(libraries)
    package, _, below = folders.partition("/")
    spec = importlib.util.find_spec(package) if package else None
    for folder in (spec and spec.submodule_search_locations) or ():
        paths += [str(path) for name in libraries for path in Path(folder).glob(f"{below}/{name}")]
    for path in paths:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    raise RuntimeError(f"{libraries[0]} was not found, nor an older one")


class Driver:
    """The driver, for one device and in torch's context there.

    Parameters
    ----------
    index : int
        Of the device.

    Raises
    ------
    RuntimeError
        If there is no driver, or it fails; says why.
    """

    def __init__(self, index: int) -> None:
        self._index, self._names = index, names()
        self._library = load_library(self._names.drivers)
        #: HIP needs none.
        self._context: ctypes.c_void_p | None = None
        if self._names is NVIDIA:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("DeviceGet", ctypes.byref(device), index)
            self.call("DevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._context = context

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function, named without its prefix.

        Raises
        ------
        RuntimeError
            If it fails; says what the driver says.
        """
        code = int(getattr(self._library, self._names.driver + name)(*arguments))
        if code:
            text = ctypes.c_char_p()
            explain = getattr(self._library, self._names.driver + self._names.error)
            explain(code, ctypes.byref(text))
            raise RuntimeError(f"{name} failed with error {code}: {(text.value or b'').decode()}")

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make torch's context the calling thread's."""
        with torch.cuda.device(self._index):
            if self._context is not None:
                self.call("CtxPushCurrent_v2", self._context)
            try:
                yield
            finally:
                if self._context is not None:
                    self.call("CtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def exchange_capture_mode(self, mode: ctypes.c_int) -> None:
        """Set the calling thread's mode; `mode` is then the one that it had."""
        # The context is made current for the call alone: the mode is the thread's.
        with self.current():
            self.call("ThreadExchangeStreamCaptureMode", ctypes.byref(mode))


@functools.cache
def driver_of(index: int) -> Driver:
    """Return the driver for a device; RuntimeError as for :class:`Driver`."""
    return Driver(index)


@contextlib.contextmanager
def relaxed_captures(index: int) -> Iterator[None]:
    """Let the calling thread wait for a device, load code and allocate while others capture graphs.

    By default such calls end the captures of all threads with an error. Nothing changes where the
    driver refuses.
    """
    mode = ctypes.c_int(_RELAXED)
    try:
        driver_of(index).exchange_capture_mode(mode)
    except (RuntimeError, AttributeError):
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):
            driver_of(index).exchange_capture_mode(mode)
