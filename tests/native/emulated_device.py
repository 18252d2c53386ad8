"""An emulated device for ``first_light.py --emulated``, with a fault where a test wants one.

The environment variable ``SEEDED_FAULT`` names the fault; each is in what the code under test
sees, not in what tests it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from emulation import emulation
from simulated_device import SimulatedStreams

from kvshelf.kv import device as device_module
from kvshelf.kv.ops import library as native

Launch = Callable[..., int]


def one_byte(launch: Launch) -> Launch:
    """The first byte of each gather's buffers is wrong."""

    def spoiled(*arguments: int) -> int:
        width = launch(*arguments)
        if width > 0:
            ctypes.c_uint8.from_address(arguments[4]).value ^= 1
        return width

    return spoiled


def hang(launch: Launch) -> Launch:
    """The tenth gather never ends."""
    calls = iter(range(10))

    def stuck(*arguments: int) -> int:
        if next(calls, None) is None:
            while True:
                time.sleep(1)
        return launch(*arguments)

    return stuck


def illegal_address(launch: Launch) -> Launch:
    """After the tenth gather each call fails, for as long as the process lives."""
    calls = iter(range(10))

    def failing(*arguments: int) -> int:
        if next(calls, None) is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return launch(*arguments)

    return failing


def crash(launch: Launch) -> Launch:
    """The first gather ends the process."""

    def crashing(*_: int) -> int:
        ctypes.string_at(0)
        return 0

    return crashing


def refused(launch: Launch) -> Launch:
    """The kernels leave each gather to plain torch, as if it were too large."""
    return lambda *_: -1


@contextlib.contextmanager
def unloadable() -> Iterator[None]:
    """The library is no library."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "libkvshelf_ops.so")
        path.write_bytes(b"\x7fELF, and nothing more")
        with (
            mock.patch.object(native, "KERNEL_DEVICES", frozenset({"cpu"})),
            mock.patch.object(native, "_library_paths", return_value=[path]),
        ):
            yield


@contextlib.contextmanager
def device() -> Iterator[None]:
    fault = os.environ.get("SEEDED_FAULT", "")
    if os.environ["KVSHELF_OPS"] != "cuda":
        yield  # the fallback runs on the CPU
        return
    if fault == "unloadable":
        with unloadable():
            yield
        return
    emulated = emulation()
    kept = emulated.library
    assert kept.device is not None
    if fault == "torch_copies":
        # Stores and loads by torch's copies, as if the library could not open a copier.
        emulated.library = dataclasses.replace(kept, copier=None)
    elif fault:
        gather = globals()[fault](kept.device.gather)
        emulated.library = dataclasses.replace(
            kept, device=dataclasses.replace(kept.device, gather=gather)
        )
    streams = SimulatedStreams(engine_at_once=True)
    with (
        emulated.in_use(),
        mock.patch.object(device_module, "streams_of", return_value=streams),
    ):
        yield
    streams.close()
