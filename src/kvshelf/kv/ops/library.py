"""The compiled library, whose functions gather and scatter on CPUs.

Owns the environment variable ``KVSHELF_OPS``, and the functions that the library exports. Safe to
call from any thread. The first call of :func:`compiled_library` loads the library.
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
from typing import Final

from kvshelf.errors import ConfigError

logger = logging.getLogger(__name__)

#: Version of the functions that the compiled library exports. A library of another version, for
#: instance of an older installation, is not used.
_LIBRARY_VERSION: Final = 7
_LIBRARY_NAME: Final = "libkvshelf_ops.so"


@dataclass(frozen=True, slots=True)
class Library:
    """Functions of the compiled library; see cuda/src/binding.cc for their arguments."""

    path: Path
    gather: Callable[..., int]
    scatter: Callable[..., int]
    gather_permuted: Callable[..., int]
    scatter_permuted: Callable[..., int]
    check_slots: Callable[[int, int, int], int]


def requested() -> str:
    """Return the value of ``KVSHELF_OPS``.

    Raises
    ------
    ConfigError
        If it is unknown.
    """
    value = os.environ.get("KVSHELF_OPS", "auto") or "auto"
    if value in ("auto", "cpp", "cuda", "torch"):
        return value
    reason = ""
    if value == "triton":
        reason = ". kvshelf compiles its own kernel for the GPU that is there, and uses no Triton"
    raise ConfigError(f"KVSHELF_OPS is {value!r}; expected auto, cpp, cuda or torch{reason}")


@functools.lru_cache(maxsize=1)
def compiled_library() -> Library | None:
    """Return the library if it is used. The first call loads it.

    Raises
    ------
    ConfigError
        If ``KVSHELF_OPS`` has an unknown value, or is ``cpp`` and the library is missing.
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
            if chosen != "cpp":
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
    if chosen == "cpp":
        raise ConfigError(
            f"KVSHELF_OPS=cpp requires kvshelf's compiled library, but {problem}; reinstall "
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
    return Library(path, *(module.get_function(part.name) for part in fields(Library)[1:]))
