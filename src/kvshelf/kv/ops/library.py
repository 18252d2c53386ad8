"""The compiled library: whether it is used, and whether its kernels support a device.

Owns the environment variable ``KVSHELF_OPS``, read once, and the functions that the library
exports. Safe to call from any thread. The first call loads the library, and the first
call for a device its kernels.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from kvshelf.errors import ConfigError

logger = logging.getLogger(__name__)

_T = TypeVar("_T", bound=Any)

#: Version of the functions that the compiled library exports. A library of another version, for
#: instance of an older installation, is not used.
_LIBRARY_VERSION: Final = 7
_LIBRARY_NAME: Final = "libkvshelf_ops.so"
#: Values of ``KVSHELF_OPS`` with which the library may be missing.
_OPTIONAL: Final = ("auto", "triton")

#: Device types that the kernels support.
KERNEL_DEVICES: frozenset[str] = frozenset({"cuda"})


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """The toolkit and the architectures of the GPU kernels in the compiled library.

    Attributes
    ----------
    toolkit : str
        Version of CUDA, for instance ``13.0``.
    architectures : str
        For instance ``75-real 80-real 100``: machine code for compute capability 7.5 to 10.0,
        and PTX of 10.0 for later devices.
    """

    toolkit: str
    architectures: str


def kernel_build() -> KernelBuild | None:
    """Return how the kernels were built; None without kernels.

    Raises
    ------
    ConfigError
        If ``KVSHELF_OPS`` has an unknown value, or names an implementation that is missing.
    """
    library = compiled_library()
    if library is None or library.device is None:
        return None
    version = library.device.toolkit()
    return KernelBuild(f"{version // 1000}.{version % 1000 // 10}", library.device.architectures())


def kernel_problem(device: torch.device | str = "cuda") -> str | None:
    """Return why the kernels do not support a device, as text; None if they do."""
    device = torch.device(device)
    if device.type not in KERNEL_DEVICES:
        return f"there are none for devices of type {device.type}"
    kernels(device.index)
    return _kernel_problems.get(_kernel_device(device.index))


@dataclass(frozen=True, slots=True)
class CopierFunctions:
    """Functions for stores and loads; see cuda/src/binding_copier.cc for their arguments."""

    open: Callable[..., int]
    close: Callable[[int], None]
    add_buffer: Callable[[int, int, int, bool], None]
    limit: Callable[[int, int], None]
    bind: Callable[[int, int, int], None]
    store: Callable[[int, int, int, int, int, int], int]
    wait: Callable[..., None]
    forget: Callable[..., None]
    drain: Callable[[int], None]
    run: Callable[[int], None]
    stop: Callable[[int], None]
    load: Callable[[int, int, int, int, int, int, int], int]
    check: Callable[[int], None]
    fence: Callable[[int, int], int]
    unfence: Callable[[int, int], None]
    rate: Callable[[int, bool], float]


@dataclass(frozen=True, slots=True)
class DeviceFunctions:
    """Functions for caches on a device; see cuda/src/binding_device.cc for their arguments."""

    gather: Callable[..., int]
    scatter: Callable[..., int]
    count: Callable[[], int]
    kernel: Callable[[int, bool, int, int], int]
    toolkit: Callable[[], int]
    architectures: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Library:
    """Functions of the compiled library; see cuda/src/binding.cc for their arguments."""

    path: Path
    gather: Callable[..., int]
    scatter: Callable[..., int]
    gather_permuted: Callable[..., int]
    scatter_permuted: Callable[..., int]
    check_slots: Callable[[int, int, int], int]
    device: DeviceFunctions | None
    copier: CopierFunctions | None


def requested() -> str:
    """Return the value of ``KVSHELF_OPS``.

    Raises
    ------
    ConfigError
        If it is unknown.
    """
    value = os.environ.get("KVSHELF_OPS", "auto") or "auto"
    if value not in ("auto", "cpp", "cuda", "triton", "torch"):
        raise ConfigError(f"KVSHELF_OPS is {value!r}; expected auto, cpp, cuda, triton or torch")
    return value


@functools.lru_cache(maxsize=1)
def compiled_library() -> Library | None:
    """Return the library if it is used. The first call loads it.

    Raises
    ------
    ConfigError
        If ``KVSHELF_OPS`` has an unknown value, or names an implementation that is missing.
    """
    chosen = requested()
    if chosen == "torch":
        logger.info("gather and scatter on cpu: torch, by KVSHELF_OPS")
        return None
    problem = "it is not installed (no C++ compiler was found when kvshelf was installed)"
    for path in _library_paths():
        try:
            library = _load_library(path)
        except Exception as error:  # noqa: BLE001  torch replaces a broken library
            problem = f"{path} cannot be used: {error}"
            if chosen in _OPTIONAL:
                warnings.warn(
                    f"kvshelf's compiled copy functions {problem}; using plain torch, which is "
                    "slower. Reinstall kvshelf to rebuild them, or set KVSHELF_OPS=torch to "
                    "silence this",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return None
        else:
            logger.info("gather and scatter on cpu: cpp, %s", path)
            return library
    if chosen not in _OPTIONAL:
        raise ConfigError(
            f"KVSHELF_OPS={chosen} requires kvshelf's compiled library, but {problem}; reinstall "
            "kvshelf with a C++ compiler, or unset KVSHELF_OPS"
        )
    logger.info("gather and scatter on cpu: torch, the compiled library is not installed")
    return None


def _library_paths() -> list[Path]:
    # In an editable install the Python files lie in the repository and the library in
    # site-packages; the package's __path__ names both.
    package = sys.modules["kvshelf"]
    paths = [Path(entry) / _LIBRARY_NAME for entry in package.__path__]
    return [path for path in paths if path.is_file()]


def _load_library(path: Path) -> Library:
    import tvm_ffi

    module = tvm_ffi.load_module(path)
    version = module.get_function("version")()
    if version != _LIBRARY_VERSION:
        raise RuntimeError(f"it has version {version}, expected {_LIBRARY_VERSION}")

    def functions(form: type[_T], prefix: str) -> _T | None:
        if not module.implements_function(f"{prefix}{fields(form)[0].name}"):
            return None
        found: _T = form(*(module.get_function(f"{prefix}{part.name}") for part in fields(form)))
        return found

    own: dict[str, Any] = {
        part.name: module.get_function(part.name) for part in fields(Library)[1:-2]
    }
    device, copier = functions(DeviceFunctions, "device_"), functions(CopierFunctions, "copier_")
    return Library(path, device=device, copier=copier, **own)


#: Why the kernels do not support a device, by its index.
_kernel_problems: Final[dict[int, str]] = {}
_WIDTHS: Final = (16, 8, 4, 1)


def _kernel_device(index: int | None) -> int:
    if index is not None:
        return index
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def kernels(index: int | None) -> Library | None:
    """Return the library if its kernels support this device. The first call loads them."""
    return _load_kernels(_kernel_device(index))


@functools.cache
def _load_kernels(index: int) -> Library | None:
    library = compiled_library()
    chosen = requested()
    name = f"cuda:{index}"
    if library is None or chosen == "triton":
        problem = "the compiled library is not used"
    elif library.device is None:
        problem = "the compiled library was built without a CUDA compiler"
    else:
        try:
            if index >= library.device.count():
                raise RuntimeError("there is no such device")
            for gather in (True, False):
                for width in _WIDTHS:
                    code = library.device.kernel(index, gather, width, 3)
        except RuntimeError as error:
            problem = str(error).strip()
        else:
            logger.info(
                "gather and scatter on %s: cuda, machine code of sm_%d, built for %s",
                name,
                code,
                library.device.architectures(),
            )
            return library
    _kernel_problems[index] = problem
    if chosen == "cuda":
        raise ConfigError(
            f"KVSHELF_OPS=cuda requires kvshelf's kernels, but they cannot be used on {name}: "
            f"{problem}; reinstall kvshelf with a CUDA compiler, or unset KVSHELF_OPS"
        )
    logger.info("kvshelf's kernels cannot be used on %s: %s", name, problem)
    return None
