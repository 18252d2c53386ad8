"""Gather and scatter on GPUs: one kernel, compiled by NVRTC or HIPRTC for the device at hand.

Owns the kernels of each device, their compilation and their launches, all of it through
:mod:`kvshelf.kv.ops.driver`. ``kernel.cu`` beside this module is the source, part of the package.

Contracts
---------
* Importing this module loads no library and initialises no device.
* :func:`prepare` compiles on a thread of its own, once for each device and process, in about a
  third of a second. Until then, and where that fails, :func:`run_kernel` returns False: plain
  torch copies the same bytes. One warning says why it failed. Nothing is kept on disk.
* A launch is enqueued on the calling thread's current stream of the caches' device. It allocates
  nothing and waits for nothing, so a CUDA graph can capture it. Any thread may launch.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch

from kvshelf.background import THREAD_LIMIT, try_to_start
from kvshelf.errors import ConfigError
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.ops.checks import CopyCall, check_slots
from kvshelf.kv.ops.driver import AMD, driver_of, load_library, names, relaxed_captures
from kvshelf.kv.ops.library import requested

logger = logging.getLogger(__name__)

#: Device types that the kernels serve.
KERNEL_DEVICES: frozenset[str] = frozenset({"cuda"})
SOURCE: Final = Path(__file__).with_name("kernel.cu")
WIDTHS: Final = (16, 8, 4, 1)
#: Layers and tokens of one launch, as in the source.
LAYERS: Final = 128
TOKENS: Final = 512
_THREADS: Final = 256
#: ``Arguments`` of the source: 6 KB by value, which takes compute capability 7.0 and CUDA 12.1.
ARGUMENTS: Final = np.dtype(
    [
        *((name, "<i8") for name in ("buffers", "kv_stride", "head_stride", "shard_step")),
        *((name, "<i8") for name in ("buffer_kv", "buffer_token", "buffer_head")),
        *((name, "<u4") for name in ("tokens", "layers", "lanes", "heads", "shard_heads")),
        *((name, "<u4") for name in ("planes", "vectors", "kv_inside")),
        *(("caches", "<i8", LAYERS), ("starts", "<i8", LAYERS), ("places", "<i8", TOKENS)),
    ]
)
_OLDEST_CAPABILITY: Final = (7, 0)
_OLDEST_DRIVER: Final = 12010
#: More than a kernel counts in 32 bits is left to torch.
_MOST: Final = 2**31
#: Plans that are kept for each group of caches.
_MAX_PLANS: Final = 64


# ------------------------------------------------------------------------- compilation


def compiler() -> ctypes.CDLL:
    """Return the library of the compiler.

    Raises
    ------
    RuntimeError
        If there is none.
    """
    of = names()
    # That of torch's own CUDA first: its code is for the drivers that torch runs with.
    major = f".{str(torch.version.cuda).partition('.')[0]}"
    return load_library(sorted(of.compilers, key=lambda name: not name.endswith(major)), of.folders)


def compile_source(architecture: str, *options: str) -> tuple[bytes, str]:
    """Return the machine code for an architecture, as ``sm_90`` or ``gfx942``, and the log.

    Raises
    ------
    RuntimeError
        If there is no compiler, or it refuses; says why.
    """
    of, library = names(), compiler()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def call(name: str, *arguments: Any) -> int:
        return int(getattr(library, of.rtc + name)(*arguments))

    def read(name: str) -> bytes:
        failed = call(f"Get{name}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        if failed or call(f"Get{name}", program, content):
            raise RuntimeError(f"{of.rtc} has no {name} for {architecture}")
        return content.raw

    source, pointer = SOURCE.read_bytes(), ctypes.byref(program)
    if call("CreateProgram", pointer, source, SOURCE.name.encode(), 0, None, None):
        raise RuntimeError(f"{of.rtc} takes no program")
    given = [text.encode() for text in (of.target + architecture, "--std=c++17", *options)]
    try:
        failed = call("CompileProgram", program, len(given), (ctypes.c_char_p * len(given))(*given))
        log = read("ProgramLog").decode(errors="replace").rstrip("\0").strip()
        if failed:
            first = " ".join(log.splitlines()[:3]) or f"error {failed}"
            raise RuntimeError(f"{of.rtc} cannot compile for {architecture}: {first}")
        return read(of.code), log
    finally:
        call("DestroyProgram", pointer)


class Kernels:
    """The kernels of one device, in torch's own context.

    Parameters
    ----------
    index : int
        Of the device.

    Attributes
    ----------
    architecture : str
    processors : int
        Multiprocessors of the device.
    origin : str
        What compiled and loaded them, for messages.

    Raises
    ------
    RuntimeError
        If they cannot be compiled or loaded; says why.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        about = torch.cuda.get_device_properties(index)
        self.processors = int(about.multi_processor_count)
        self._driver = driver_of(index)
        driver_text = ""
        if names() is AMD:
            self.architecture = str(about.gcnArchName).partition(":")[0]
        else:
            self.architecture = f"sm_{about.major}{about.minor}"
            driver_text = f", driver for {self._check_nvidia((about.major, about.minor))}"
        image, _ = compile_source(self.architecture)
        self.origin = f"{self.architecture} by {compiler()._name}{driver_text}"
        self._functions: dict[str, ctypes.c_void_p] = {}
        with relaxed_captures(index), self._driver.current():
            module = ctypes.c_void_p()
            self._driver.call("ModuleLoadData", ctypes.byref(module), image)
            for name in (f"{do}_{width}" for do in ("gather", "scatter") for width in WIDTHS):
                function = self._functions[name] = ctypes.c_void_p()
                self._driver.call(
                    "ModuleGetFunction", ctypes.byref(function), module, name.encode()
                )

    def _check_nvidia(self, capability: tuple[int, int]) -> str:
        """Refuse what takes no arguments of 6 KB; return the driver's version of CUDA."""
        if capability < _OLDEST_CAPABILITY:
            raise RuntimeError(f"{self.architecture} is older than sm_70, the oldest that serves")
        version = ctypes.c_int()
        self._driver.call("DriverGetVersion", ctypes.byref(version))
        cuda = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
        if version.value < _OLDEST_DRIVER:
            raise RuntimeError(f"the driver is for {cuda}; 12.1 (driver 530) is needed")
        return cuda

    def launch(
        self, name: str, arguments: np.ndarray, grid: Sequence[int], block: Sequence[int]
    ) -> None:
        """Enqueue a kernel on the current stream; `arguments` may change afterwards.

        Raises
        ------
        RuntimeError
            If the device fails.
        """
        stream = ctypes.c_void_p(cast(Any, torch._C)._cuda_getCurrentRawStream(self._index))
        pointers = (ctypes.c_void_p * 1)(arguments.ctypes.data)
        function = self._functions[name]
        with self._driver.current():
            self._driver.call(names().launch, function, *grid, *block, 0, stream, pointers, None)


@dataclass(eq=False)
class _Compilation:
    """The kernels of a device once they are there, or why they will not be."""

    kernels: Kernels | None = None
    problem: str = "they are being compiled"
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self, index: int) -> None:
        try:
            self.kernels = Kernels(index)
        except Exception as error:  # noqa: BLE001 - torch copies instead
            self.problem = str(error).strip() or type(error).__name__
            logger.warning(
                "gather and scatter on cuda:%d: torch's index operations, which take a launch for"
                " each layer, since kvshelf's kernel cannot be used: %s",
                index,
                self.problem,
            )
        else:
            self.problem = ""
            logger.info("gather and scatter on cuda:%d: cuda, %s", index, self.kernels.origin)
        finally:
            self.ended.set()


_compilations: Final[dict[int, _Compilation]] = {}
_lock: Final = threading.Lock()


def _index_of(device: torch.device) -> int:
    index = cast("int | None", device.index)
    return torch.cuda.current_device() if index is None else index


def prepare(device: torch.device) -> None:
    """Begin to compile the kernels for a device, unless that has been done.

    With ``KVSHELF_OPS=cuda`` it also waits until they are there.

    Raises
    ------
    ConfigError
        If ``KVSHELF_OPS=cuda``, and they cannot be used.
    """
    chosen = requested()
    if device.type not in KERNEL_DEVICES or chosen == "torch":
        return
    index = _index_of(device)
    with _lock:
        compilation = _compilations.get(index)
        if compilation is None:
            compilation = _compilations[index] = _Compilation()
            thread = threading.Thread(
                target=compilation.run, args=(index,), name="kvshelf-compile", daemon=True
            )
            if not try_to_start(thread):
                compilation.problem = THREAD_LIMIT
                compilation.ended.set()
    if chosen == "cuda":
        compilation.ended.wait()
        if compilation.kernels is None:
            raise ConfigError(
                "KVSHELF_OPS=cuda requires kvshelf's kernel, but it cannot be used on"
                f" cuda:{index}: {compilation.problem}; correct that, or unset KVSHELF_OPS"
            )


def kernels_of(device: torch.device) -> Kernels | None:
    """Return the kernels of a device, if they are there by now."""
    compilation = _compilations.get(_index_of(device))
    return None if compilation is None else compilation.kernels


def kernel_problem(device: torch.device | str = "cuda", *, seconds: float = 0.0) -> str:
    """Return why the kernels do not serve a device now; empty if they do.

    Parameters
    ----------
    device : torch.device or str
    seconds : float
        Wait so long for a compilation that has begun.
    """
    device = torch.device(device)
    if device.type not in KERNEL_DEVICES:
        return f"there are none for devices of type {device.type}"
    if requested() == "torch":
        return "KVSHELF_OPS is torch"
    compilation = _compilations.get(_index_of(device))
    if compilation is None:
        return "nothing has been copied there yet"
    compilation.ended.wait(seconds)
    return compilation.problem


class Served(NamedTuple):
    """What copies on a GPU: the kernel's origin, or why there is none."""

    origin: str
    problem: str


def first_gpu() -> Served | None:
    """Compile the kernel for the first GPU, and say what serves it; None without one.

    Raises
    ------
    ConfigError
        As for :func:`prepare`.
    """
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", 0)
    prepare(device)
    problem = kernel_problem(device, seconds=60)
    kernels = kernels_of(device)
    return Served("" if kernels is None else kernels.origin, problem)


# ------------------------------------------------------------------------- launches


@dataclass(frozen=True, slots=True)
class _Plan:
    """What calls for the same caches, counts and alignment have in common.

    Attributes
    ----------
    width : int
        Bytes of a vector.
    tiles : int
        Blocks that the lanes of a token take.
    block : tuple of int
        Threads of a block.
    parts : list of ndarray
        Arguments for each group of layers, without buffers, tokens and places.
    """

    width: int
    tiles: int
    block: tuple[int, int, int]
    parts: list[np.ndarray]


def run_kernel(call: CopyCall[PagedLayout], *, gather: bool) -> bool:
    """Enqueue a checked call; return False where torch has to copy it.

    Raises
    ------
    ValueError
        If a slot is not in the cache.
    RuntimeError
        If the device fails.
    """
    kernels = kernels_of(call.known.device)
    if kernels is None:
        return False
    # A copy: what is checked is what is used, whatever other threads do to the mapping.
    slots = call.slots.clone()
    check_slots(slots, call.layout)
    plan = _plan_of(call) if call.tokens else None
    if plan is None:
        return not call.tokens
    for arguments, grid in _launches(call, plan, slots.numpy(), kernels.processors):
        name = f"{'gather' if gather else 'scatter'}_{plan.width}"
        kernels.launch(name, arguments, grid, plan.block)
    return True


def _plan_of(call: CopyCall[PagedLayout]) -> _Plan | None:
    """Return the plan of a call, made at most once for calls alike; None beyond 32 bits."""
    address = call.buffers.data_ptr()
    counts = (call.first_head, call.tokens, call.shards, call.num_heads, call.shard_stride)
    key = (*counts, *call.starts, address % max(WIDTHS))
    plans = call.known.plans
    plan = plans.get(key)
    if plan is None:
        plan = _make_plan(call, address)
        if len(plans) >= _MAX_PLANS:
            plans.clear()
        plans[key] = plan
    return cast("_Plan | None", plan)


def _make_plan(call: CopyCall[PagedLayout], address: int) -> _Plan | None:
    layout, row = call.layout, call.layout.row_bytes
    heads = call.num_heads * call.shards
    layer_bytes = layout.chunk_bytes(call.tokens, call.num_heads)
    bases = np.array(call.known.addresses, np.uint64).astype(np.int64)
    bases += call.first_head * layout.head_stride
    starts = call.starts or range(0, layer_bytes * len(bases), layer_bytes)
    strides = (
        (layout.block_stride, layout.num_blocks),
        (layout.token_stride, layout.block_size),
        (layout.kv_stride, layout.kv_planes),
        (layout.head_stride, heads),
        (call.shard_stride, call.shards),
    )
    used = [stride for stride, count in strides if count > 1]
    # The widest vector that divides all addresses and steps.
    width = int(np.bitwise_or.reduce([max(WIDTHS), row, address, *used, *bases, *starts]))
    width &= -width
    width = 1 if width == 2 else width
    lanes = layout.kv_planes * heads * (row // width)
    if max(lanes, row, layout.num_slots) >= _MOST:
        return None
    tiles = -(-lanes // _THREADS)
    across = -(-lanes // tiles)
    parts = []
    for first in range(0, len(bases), LAYERS):
        part = np.zeros((), ARGUMENTS)
        count = min(LAYERS, len(bases) - first)
        part["kv_stride"], part["head_stride"] = layout.kv_stride, layout.head_stride
        part["shard_step"], part["buffer_head"] = call.shard_stride, row
        part["buffer_token"] = call.num_heads * row
        part["buffer_kv"] = call.tokens * call.num_heads * row
        part["layers"], part["lanes"] = count, lanes
        part["heads"], part["shard_heads"] = heads, call.num_heads
        part["planes"], part["vectors"] = layout.kv_planes, row // width
        part["kv_inside"] = layout.kv_stride < layout.head_stride
        part["caches"][:count] = bases[first : first + count]
        part["starts"][:count] = list(starts)[first : first + count]
        parts.append(part)
    return _Plan(width, tiles, (across, max(1, _THREADS // across), 1), parts)


def _launches(
    call: CopyCall[PagedLayout], plan: _Plan, slots: np.ndarray, processors: int
) -> Iterator[tuple[np.ndarray, tuple[int, int, int]]]:
    """Yield the arguments and the grid of each launch of a call."""
    layout = call.layout
    blocks, offsets = np.divmod(slots, layout.block_size)
    places = blocks * layout.block_stride + offsets * layout.token_stride
    places[slots < 0] = -1
    for first in range(0, len(places), TOKENS):
        some = places[first : first + TOKENS]
        for part in plan.parts:
            arguments = part.copy()
            arguments["buffers"] = call.buffers.data_ptr() + first * int(part["buffer_token"])
            arguments["tokens"] = len(some)
            arguments["places"][: len(some)] = some
            layers, steps = int(part["layers"]), 16
            # Each thread walks over 16 tokens, or fewer where processors would be idle.
            while (
                steps > 4
                and -(-len(some) // (plan.block[1] * steps)) * plan.tiles * layers < 2 * processors
            ):
                steps //= 2
            yield arguments, (plan.tiles, -(-len(some) // (plan.block[1] * steps)), layers)
