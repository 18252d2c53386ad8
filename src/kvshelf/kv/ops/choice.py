"""Which implementation serves a device.

Owns the order: the compiled library where it supports the device, else Triton, else plain torch,
with a warning; an engine's caches on a GPU have plain torch on request only. Triton compiles once
for each device and process, in the first call of :func:`implementation` or ``prepare`` for the
device: when caches are registered, not in a step. Safe to call from any thread.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch

from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.kv.ops import library

logger = logging.getLogger(__name__)

Implementation: TypeAlias = Literal["cuda", "cpp", "triton", "torch"]


def implementation(device: torch.device | str = "cpu") -> Implementation:
    """Return the implementation that is used for caches on a device.

    Parameters
    ----------
    device : torch.device or str
        ``cpu``, ``cuda``, ``cuda:1``, …

    Raises
    ------
    ConfigError
        If ``KVSHELF_OPS`` has an unknown value, or names an implementation that is missing.
    """
    device = torch.device(device)
    if device.type in library.KERNEL_DEVICES and library.kernels(device.index) is not None:
        return "cuda"
    if device.type == "cpu":
        return "torch" if library.compiled_library() is None else "cpp"
    return "torch" if triton_copy(device) is None else "triton"


def check_served(device: torch.device) -> None:
    """Check that an engine's caches on a device are copied by more than plain torch.

    Raises
    ------
    UnsupportedError
        If nothing else serves the device, and plain torch was not asked for.
    ConfigError
        As for :func:`implementation`.
    """
    if device.type == "cpu" or implementation(device) != "torch" or library.requested() == "torch":
        return
    raise UnsupportedError(
        f"neither kvshelf's kernels nor Triton serve {device}, and plain torch takes launches for"
        " each layer, which lengthen the engine's steps: install a Triton for this device, or set"
        " KVSHELF_OPS=torch to use plain torch nevertheless"
    )


@functools.cache
def triton_copy(device: torch.device) -> Callable[..., None] | None:
    """Return the function that executes calls by Triton; None where Triton does not serve a device.

    Raises
    ------
    ConfigError
        As for :func:`implementation`.
    """
    if device.type == "cpu":
        return None
    requested = library.requested()
    if requested == "torch":
        logger.info("gather and scatter on %s: torch, by KVSHELF_OPS", device)
        return None
    try:
        from kvshelf.kv.ops import triton_strided

        triton_strided.compile_kernels(device)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if requested == "triton":
            raise ConfigError(
                f"KVSHELF_OPS=triton requires Triton, but it cannot be used on {device}: {problem};"
                " install a Triton for this device, or unset KVSHELF_OPS"
            ) from error
        logger.warning(
            "gather and scatter on %s: plain torch. kvshelf's kernels cannot be used: %s. Triton"
            " cannot be used: %s",
            device,
            library.kernel_problem(device),
            problem,
        )
        return None
    logger.info("gather and scatter on %s: triton", device)
    return triton_strided.run_triton
