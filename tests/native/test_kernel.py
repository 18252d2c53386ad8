"""The kernel for GPUs on a machine without one: compiled for several, loaded by a driver that is a
fake, and run on the host for every block and thread.

:mod:`tests.kv.test_ops` compares what it copies with the other implementations.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvshelf.cli import doctor
from kvshelf.errors import ConfigError
from kvshelf.kv import ops
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.ops import driver as drivers
from kvshelf.kv.ops import kernel
from kvshelf.kv.ops.kernel import Kernels, compile_source
from tests.native.emulation import EmulatedKernels, emulated
from tests.support.paged import Paged, make_paged
from tests.support.paged_cases import Buffers, Case

pytestmark = pytest.mark.real

GPU = torch.device("cuda", 0)


# --- its source ----------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_kernel_compiled_for_each_architecture_spills_no_register(architecture: str) -> None:
    image, log = compile_source(architecture, "--ptxas-options=-v")
    assert image.startswith(b"\x7fELF")
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", log)
    assert len(spills) == 2 * len(kernel.WIDTHS)
    assert {int(nbytes) for spill in spills for nbytes in spill} == {0}
    # 64 registers leave room for four blocks of 256 threads on each multiprocessor.
    assert max(map(int, re.findall(r"Used (\d+) registers", log))) <= 64
    assert "warning" not in log


def test_source_with_an_error_is_refused_with_the_compilers_first_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "kernel.cu"
    broken.write_text("int x = unknown;\n" * 9)
    monkeypatch.setattr(kernel, "SOURCE", broken)
    with pytest.raises(RuntimeError, match=r"nvrtc cannot compile for sm_90: .*\(1\): error"):
        compile_source("sm_90")


def test_package_of_another_vendor_is_named_where_no_compiler_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(RuntimeError, match=r"libhiprtc.so.7 was not found"):
        compile_source("gfx942")


# --- loaded and launched -------------------------------------------------------------


class FakeDriver:
    """What the kernel's loader calls of NVIDIA's driver."""

    def __init__(self) -> None:
        self.version = 13000
        self.failing = ""
        self.calls: list[tuple[object, ...]] = []
        #: Contexts that are current, of each thread.
        self.current = threading.local()
        self._next = 1

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            return self._call(name, *arguments)

        return call

    def _call(self, name: str, *arguments: Any) -> int:
        if name == self.failing:
            return 700
        contexts = self.current.__dict__.setdefault("contexts", [])
        if name == "cuGetErrorString":
            arguments[1]._obj.value = b"an illegal memory access"
        elif name == "cuDriverGetVersion":
            arguments[0]._obj.value = self.version
        elif name == "cuCtxPushCurrent_v2":
            contexts.append(arguments[0].value)
        elif name == "cuCtxPopCurrent_v2":
            contexts.pop()
        elif name == "cuThreadExchangeStreamCaptureMode":
            assert contexts, "no context is current"
            mode = arguments[0]._obj
            mode.value, self.current.mode = getattr(self.current, "mode", 0), mode.value
        elif name == "cuLaunchKernel":
            assert contexts, "no context is current"
            self.calls.append((arguments[0].value, *arguments[1:8], arguments[8].value))
        elif name == "cuModuleLoadData":
            assert contexts, "no context is current"
            assert arguments[1].startswith(b"\x7fELF")
        else:
            self._next += 1
            arguments[0]._obj.value = self._next if name != "cuDeviceGet" else arguments[1]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Two GPUs of capability 9.0, and no kernel compiled yet."""
    driver = FakeDriver()
    about = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.delenv("KVSHELF_OPS", raising=False)
    load = drivers.load_library

    def loaded(libraries: tuple[str, ...], folders: str = "") -> Any:
        return driver if "libcuda.so.1" in libraries else load(libraries, folders)

    for module in (kernel, drivers):
        monkeypatch.setattr(module, "load_library", loaded)
    monkeypatch.setattr(drivers, "driver_of", functools.cache(drivers.Driver))
    monkeypatch.setattr(kernel, "driver_of", drivers.driver_of)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 40 + index, False)
    monkeypatch.setattr(kernel, "_compilations", {})
    yield driver
    for compilation in kernel._compilations.values():
        assert compilation.ended.wait(60)


def test_launch_on_a_new_thread_has_the_devices_context_and_stream(driver: FakeDriver) -> None:
    kernels = Kernels(1)
    arguments = np.zeros((), kernel.ARGUMENTS)
    thread = threading.Thread(
        target=kernels.launch, args=("scatter_16", arguments, (3, 2, 1), (32, 8, 1))
    )
    thread.start()
    thread.join()
    function = kernels._functions["scatter_16"].value
    assert driver.calls == [(function, 3, 2, 1, 32, 8, 1, 0, 41)]
    assert not driver.current.contexts


def test_launch_that_fails_says_what_the_driver_said(driver: FakeDriver) -> None:
    kernels = Kernels(0)
    driver.failing = "cuLaunchKernel"
    with pytest.raises(RuntimeError, match="error 700: an illegal memory access"):
        kernels.launch("gather_1", np.zeros((), kernel.ARGUMENTS), (1, 1, 1), (1, 1, 1))
    assert not driver.current.contexts


@pytest.mark.parametrize("failing", ["", "cuThreadExchangeStreamCaptureMode", "cuDeviceGet"])
def test_thread_that_asks_a_device_relaxes_its_own_captures_alone(
    driver: FakeDriver, failing: str
) -> None:
    driver.failing, modes = failing, []

    def ask() -> None:
        driver.current.mode = 1
        with drivers.relaxed_captures(1):
            modes.append(driver.current.mode)
        modes.append(driver.current.mode)
        assert not driver.current.__dict__.get("contexts")

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert modes == [1 if failing else 2, 1]
    assert not hasattr(driver.current, "mode")


def test_kernels_are_compiled_once_for_each_device(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="kvshelf.kv.ops"):
        for index in (0, 1, 0):
            kernel.prepare(torch.device("cuda", index))
            assert ops.kernel_problem(f"cuda:{index}", seconds=60) == ""
            assert ops.implementation(f"cuda:{index}") == "cuda"
    first, second = (kernel.kernels_of(torch.device("cuda", index)) for index in (0, 1))
    assert first is not None
    assert first is not second
    for index, line in enumerate(caplog.messages):
        assert f"on cuda:{index}: cuda, sm_90 by" in line
        assert "libnvrtc.so.13, driver for CUDA 13.0" in line


def no_compiler(patch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    patch.setattr(ctypes, "CDLL", lambda path: (_ for _ in ()).throw(OSError(path)))


def old_driver(patch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    driver.version = 12000


def old_device(patch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    about = SimpleNamespace(major=6, minor=1, multi_processor_count=28)
    patch.setattr(torch.cuda, "get_device_properties", lambda index: about)


def broken_source(patch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    patch.setattr(kernel, "SOURCE", Path(__file__))


def refused_image(patch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    driver.failing = "cuModuleLoadData"


PROBLEMS = [
    (no_compiler, "libnvrtc.so.13 was not found"),
    (old_driver, r"driver is for CUDA 12.0; 12.1 \(driver 530\) is needed"),
    (old_device, "sm_61 is older than sm_70"),
    (broken_source, "nvrtc cannot compile for sm_90"),
    (refused_image, "ModuleLoadData failed with error 700"),
]


@pytest.mark.parametrize(("spoil", "reason"), PROBLEMS)
def test_without_kernels_torch_serves_and_one_warning_says_why(
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[pytest.MonkeyPatch, FakeDriver], None],
    reason: str,
) -> None:
    spoil(monkeypatch, driver)
    for _ in range(2):
        kernel.prepare(GPU)
        assert re.search(reason, ops.kernel_problem(GPU, seconds=60))
    assert ops.implementation(GPU) == "torch"
    assert kernel.kernels_of(GPU) is None
    (line,) = caplog.messages
    assert re.search(f"on cuda:0: torch's index operations.*{reason}", line)
    # Asked for by name, they are an error.
    monkeypatch.setenv("KVSHELF_OPS", "cuda")
    with pytest.raises(ConfigError, match=f"cannot be used on cuda:0: .*{reason}"):
        kernel.prepare(GPU)


@pytest.mark.parametrize("has_kernel", [True, False])
def test_doctor_says_what_copies_on_a_gpu(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, has_kernel: bool
) -> None:
    assert list(doctor._gpu()) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    if not has_kernel:
        driver.version = 12000
    kernels, memory = doctor._gpu()
    expected = "kvshelf's kernel, sm_90 by .*libnvrtc.so.13, driver for CUDA 13.0"
    if not has_kernel:
        expected = "torch, not kvshelf's kernel: the driver is for CUDA 12.0"
    assert re.match(expected, kernels.found)
    assert memory.found == "8192 KiB (ulimit -l)"


def test_ops_torch_compiles_nothing(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_OPS", "torch")
    kernel.prepare(GPU)
    assert ops.kernel_problem(GPU) == "KVSHELF_OPS is torch"
    assert not kernel._compilations


def test_imports_and_forks_touch_no_device() -> None:
    program = """
import os, sys
import kvshelf.kv.ops, kvshelf.kv.device, kvshelf.kv.sources, kvshelf.memory.chunk_memory, torch
for child in (False, True):
    maps = open('/proc/self/maps').read()
    assert not any(name in maps for name in ('libnvrtc', 'libcuda.so', 'libkvshelf_ops', 'triton'))
    assert not torch.cuda.is_initialized()
    if not child and (pid := os.fork()):
        sys.exit(os.waitpid(pid, 0)[1])
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ)


# --- what it copies ------------------------------------------------------------------


@pytest.fixture
def kernels() -> Iterator[EmulatedKernels]:
    with emulated() as kernels:
        yield kernels


def check(kernels: EmulatedKernels, case: Case, buffers: Buffers) -> int:
    """Gather, scatter other bytes, compare all memory; return the width of the vectors."""
    kernels.launches.clear()
    arguments = (case.paged.layout, case.first_head, case.heads)
    ops.gather_kv(case.paged.caches, case.mapping, buffers.view, *arguments)
    np.testing.assert_array_equal(buffers.view.numpy(), case.gathered())
    assert (buffers.memory.numpy()[~buffers.used] == 0xAB).all()
    incoming = case.random_buffers()
    after = case.scattered(incoming)
    buffers.view.copy_(incoming)
    ops.scatter_kv(case.paged.caches, case.mapping, buffers.view, *arguments)
    for memory, want in zip(case.paged.memory, after, strict=True):
        np.testing.assert_array_equal(memory, want)
    (width,) = {int(launch.name.rpartition("_")[2]) for launch in kernels.launches}
    return width


@pytest.mark.parametrize(
    ("shape", "strides", "first_head", "lead", "width"),
    [
        # [2, blocks, block_size, heads, row]; what is used once has no say in the width.
        ((2, 1, 1, 1, 32), (36, 1, 1, 1, 1), 0, 0, 4),
        ((2, 1, 1, 1, 32), (48, 1, 1, 1, 1), 0, 0, 16),
        ((2, 1, 1, 2, 32), (128, 1, 1, 34, 1), 1, 0, 1),
        ((2, 1, 1, 2, 32), (128, 1, 1, 34, 1), 0, 0, 16),
        ((2, 1, 3, 1, 32), (192, 1, 40, 1, 1), 0, 0, 8),
        ((2, 3, 1, 1, 32), (192, 36, 1, 1, 1), 0, 0, 4),
        ((2, 3, 1, 1, 32), (192, 32, 1, 1, 1), 0, 8, 8),
        ((2, 3, 1, 1, 32), (192, 32, 1, 1, 1), 0, 3, 1),
    ],
)
def test_vectors_are_as_wide_as_strides_and_addresses_allow(
    kernels: EmulatedKernels,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    first_head: int,
    lead: int,
    width: int,
) -> None:
    memory = torch.randint(1, 256, (512,), dtype=torch.uint8)
    cache = memory.as_strided(shape, strides)
    layout = PagedLayout.from_2bnhd(cache)
    paged = Paged("2bnhd", [memory], [cache], layout)
    case = Case(paged, [layout.num_slots - 1, 0][: layout.num_slots], 1, first_head, 1)
    assert check(kernels, case, Buffers.of(case, lead)) == width


@pytest.mark.parametrize("row", [257, 514, 1283])
def test_lanes_that_do_not_fill_their_blocks_are_copied(kernels: EmulatedKernels, row: int) -> None:
    memory = [torch.randint(1, 256, (12 * row,), dtype=torch.uint8) for _ in range(2)]
    caches = [part.view(3, 4, row) for part in memory]
    paged = Paged("mla", memory, caches, PagedLayout.from_mla(caches[0]))
    case = Case(paged, [7, -1, 0, 11, 5, 3], 1, 0, 1)
    check(kernels, case, Buffers.of(case, lead=1))


@pytest.mark.parametrize(
    ("layers", "tokens", "launches"),
    [(128, 3, 1), (300, 3, 3), (2, 512, 1), (2, 513, 2), (129, 1100, 6)],
)
def test_launch_takes_128_layers_and_512_tokens(
    kernels: EmulatedKernels, layers: int, tokens: int, launches: int
) -> None:
    paged = make_paged("mla", torch.uint8, layers=layers, blocks=tokens, block_size=1, head_size=2)
    order = np.random.default_rng(5).permutation(tokens).tolist()
    order[tokens // 2] = -1
    case = Case(paged, order, 1, 0, 1)
    check(kernels, case, Buffers.of(case, gap=16))
    assert len(kernels.launches) == 2 * launches


def test_all_layers_and_shards_take_one_launch_that_uses_all_processors(
    kernels: EmulatedKernels,
) -> None:
    paged = make_paged("bhnc-nhd", torch.bfloat16, layers=4, blocks=64, heads=8, head_size=16)
    case = Case(paged, list(range(256)), 8, 0, 1)
    assert check(kernels, case, Buffers.of(case)) == 16
    gather, _ = kernels.launches
    assert gather.name == "gather_16"
    blocks = {1: 0, 132: 0}
    for kernels.processors in blocks:
        check(kernels, case, Buffers.of(case))
        blocks[kernels.processors] = int(np.prod(kernels.launches[-1].grid))
    assert blocks[1] < blocks[132]


def test_places_of_layers_leave_the_rest_of_a_buffer(kernels: EmulatedKernels) -> None:
    paged = make_paged("bhnc-nhd", torch.bfloat16, layers=2)
    case = Case(paged, [3, -1, 0], 2, 0, 1)
    size = paged.layout.chunk_bytes(3, 1)
    out = torch.full((2, 3 * size + 8), 0xAB, dtype=torch.uint8)
    arguments = (paged.caches, case.mapping, out, paged.layout, 0, 1)
    starts = [2 * size + 8, 0]
    ops.gather_kv(*arguments, starts)
    want = torch.full_like(out, 0xAB)
    for layer, start in enumerate(starts):
        want[..., start : start + size] = case.gathered()[..., layer * size : (layer + 1) * size]
    assert torch.equal(out, want)
    assert len(kernels.launches) == 1
    with pytest.raises(ValueError, match="expected one place for each of 2 layers, within"):
        ops.scatter_kv(*arguments, [2 * size + 9, 0])


def test_more_than_32_bits_count_is_left_to_torch(
    kernels: EmulatedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = make_paged("mla", torch.float32)
    case = Case(paged, [3, 1], 1, 0, 1)
    monkeypatch.setattr(kernel, "_MOST", paged.layout.num_slots)
    out = torch.empty(case.buffer_bytes, dtype=torch.uint8)
    ops.gather_kv(paged.caches, case.mapping, out, paged.layout)
    assert not kernels.launches
    np.testing.assert_array_equal(out.numpy(), case.gathered().reshape(-1))


def test_launch_error_is_raised_in_the_devices_words(
    kernels: EmulatedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = make_paged("mla", torch.float32)
    out = torch.empty(2 * paged.layout.chunk_bytes(1), dtype=torch.uint8)

    def fail(*_: object) -> None:
        raise RuntimeError("LaunchKernel failed with error 700: an illegal memory access")

    broken = replace(kernels)
    broken.launch = fail  # type: ignore[method-assign]
    monkeypatch.setattr(kernel, "kernels_of", lambda device: broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        ops.gather_kv(paged.caches, torch.tensor([1]), out, paged.layout)


def test_prepare_checks_caches() -> None:
    paged = make_paged("mla", torch.float32)
    ops.prepare(paged.caches, paged.layout)
    with pytest.raises(ValueError, match="the layout reaches"):
        ops.prepare([cache[:1] for cache in paged.caches], paged.layout)
