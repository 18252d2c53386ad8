"""``make gpu``: the tests of tests/gpu, and what copies cost on this GPU, as one JSON file.

Needs a Python with torch for the GPU, numpy and pytest; no network, no vLLM, and no installation of
kvshelf. What is missing is said before anything runs. Each figure stands beside a floor of the same
run on the same bytes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAYERS, BLOCK, HEADS, SIZE, TOKENS = 32, 16, 8, 128, 256  # Llama 3 8B: 32 MiB a chunk
CHUNKS, SHARDS, SAMPLES = 16, 8, 7
Copies = Callable[[], object]


def missing() -> str:
    """Return what `make gpu` lacks here, and how to get it; empty where nothing is missing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no NVIDIA driver ({error})"
    absent = [n for n in ("torch", "numpy", "pytest") if importlib.util.find_spec(n) is None]
    if absent:
        return f"no {', '.join(absent)} in {sys.executable}; GPU_PYTHON names another Python"
    import torch

    from kvshelf.kv import ops
    from kvshelf.kv.ops import kernel

    kernel.prepare(torch.device("cuda", 0))
    problem = ops.kernel_problem("cuda:0", seconds=60)
    return f"no kernel: {problem}" if problem else ""


def seconds_of(work: Copies) -> float:
    """Return the median seconds of `work`, from an idle GPU to an idle GPU."""
    import torch

    took = []
    for _ in range(SAMPLES + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return median(took[1:])


def row(name: str, nbytes: int, took: float, floor: str, least: float) -> dict[str, Any]:
    """Print and return a figure: seconds of kvshelf's way and of its floor, and bytes moved."""
    rate = f"{nbytes / took / 1e9:.1f} GB/s"
    print(f"{name}: {took * 1e3:.3f} ms, {rate}, {least / took:.2f} of {floor}", flush=True)
    return {"name": name, "bytes": nbytes, "s": took, "floor": floor, "floor_s": least}


def rows() -> Iterator[dict[str, Any]]:
    """Yield all figures."""
    import torch

    from kvshelf import PagedLayout
    from kvshelf.kv import ops
    from kvshelf.kv.caches import LayerCall
    from kvshelf.kv.device import DeviceKVCache
    from kvshelf.kv.ops.checks import checked
    from kvshelf.kv.ops.kernel import run_kernel
    from kvshelf.memory.chunk_memory import ChunkMemory

    blocks = CHUNKS * TOKENS // BLOCK
    shape = (LAYERS, blocks, HEADS, BLOCK, 2 * SIZE)
    caches = list(torch.randn(shape, dtype=torch.bfloat16, device="cuda").unbind())
    layout = PagedLayout.from_bhnc(caches[0], SIZE)
    order = torch.randperm(blocks).view(-1, 1) * BLOCK + torch.arange(BLOCK)
    slots = order.view(CHUNKS, TOKENS)
    size = LAYERS * layout.chunk_bytes(TOKENS)

    flat = [part.transpose(1, 2).reshape(-1, HEADS, 2 * SIZE) for part in caches]
    index = slots[0].cuda()
    kv = [part.index_select(0, index) for part in flat]
    select = seconds_of(lambda: [part.index_select(0, index) for part in flat])
    copy = seconds_of(lambda: [flat[n].index_copy_(0, index, kv[n]) for n in range(LAYERS)])
    for shards in (1, SHARDS):
        out = torch.empty(shards, size // shards, dtype=torch.uint8, device="cuda")
        call = (caches, slots[0], out, layout, 0, HEADS // shards)
        took = seconds_of(partial(ops.gather_kv, *call))
        yield row(f"gather, {shards} objects", size, took, "index_select", select)
        scatter = seconds_of(partial(ops.scatter_kv, *call))
        yield row(f"scatter, {shards} objects", size, scatter, "index_copy_", copy)

        piece, heads = size // shards, HEADS // shards
        calls = {n: [LayerCall(caches, layout, 0, piece, heads, n * heads)] for n in range(shards)}
        memory = ChunkMemory(2 * size, device=out.device)
        path = DeviceKVCache(calls, buffer_bytes=256 << 20)
        payloads = [memory.tensor[n * piece : (n + 1) * piece] for n in range(shards)]
        on_device = list(out)

        def copies(to: list[Any], source: list[Any]) -> None:
            for target, one in [*zip(to, source, strict=True)] * CHUNKS:
                target.copy_(one, non_blocking=True)

        def store(path: Any = path, payloads: list[Any] = payloads) -> None:
            for n in range(CHUNKS):
                while (copied := path.gather(slots[n], payloads)) is None:
                    time.sleep(20e-6)  # the ring is full: it has fewer buffers than chunks
            copied.wait()

        def load(path: Any = path, payloads: list[Any] = payloads, shards: int = shards) -> None:
            fence = path.fence()
            with ThreadPoolExecutor(8) as threads:
                for n in range(CHUNKS):
                    threads.submit(path.scatter_chunk, range(shards), slots[n], payloads, fence)

        what = f"{CHUNKS} chunks of {shards} × {piece >> 20} MiB"
        for name, work, ends in (
            ("D2H: store", store, (payloads, on_device)),
            ("H2D: load", load, (on_device, payloads)),
        ):
            least = seconds_of(partial(copies, *ends))
            yield row(f"{name} {what}", CHUNKS * size, seconds_of(work), "plain copies", least)

        # The kernel may read page-locked memory itself. Then loads need no device buffer.
        arguments = (caches, slots[0], out, layout.as_ints(), 0, heads)
        host = memory.tensor[:size].view(shards, piece)
        direct = replace(checked(*arguments, gather=False), buffers=host)
        took = seconds_of(partial(run_kernel, direct, gather=False))
        by_buffer = seconds_of(partial(path.scatter_chunk, range(shards), slots[0], payloads))
        yield row(f"zero-copy scatter, {shards} objects", size, took, "by a buffer", by_buffer)

    yield from steps({"stored": store, "loaded": load})


def steps(copies: dict[str, Copies]) -> Iterator[dict[str, Any]]:
    """Yield what a decode step takes alone, and while chunks are stored or loaded.

    A step copies its inputs to the GPU, reads 4 GiB of weights in one graph, and waits for its
    tokens.
    """
    import torch

    cuda: Any = torch.cuda  # much of it has no types
    beside = cuda.Stream()
    weights = torch.ones(64, 1 << 12, 1 << 13, dtype=torch.bfloat16, device="cuda")
    inputs, tokens = torch.ones(1 << 13).bfloat16().pin_memory(), torch.empty(1024).pin_memory()
    vector, result = inputs.cuda(), torch.empty(64, 1 << 12, dtype=torch.bfloat16, device="cuda")
    torch.matmul(weights[0], vector, out=result[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(64):
            torch.matmul(weights[n], vector, out=result[n])

    def step() -> None:
        vector.copy_(inputs, non_blocking=True)
        graph.replay()
        tokens.copy_(result[63, :1024], non_blocking=True)
        torch.cuda.current_stream().synchronize()

    @contextmanager
    def repeated(work: Copies) -> Iterator[None]:
        going = [True]
        with ThreadPoolExecutor(1) as threads:

            def repeat() -> None:
                with torch.cuda.stream(beside):
                    while going[0]:
                        work()

            running = threads.submit(repeat)
            yield
            going[0] = False
            running.result()

    alone = seconds_of(step)
    for name, work in copies.items():
        with repeated(work):
            took = []
            for _ in range(200):
                start = time.perf_counter()
                step()
                took.append(time.perf_counter() - start)
        yield row(f"a decode step while chunks are {name}", 4 << 30, median(took), "alone", alone)


def main(out: Path) -> int:
    """Run the tests and measure; return the exit code."""
    if importlib.util.find_spec("xxhash") is None:
        sys.modules["xxhash"] = ModuleType("xxhash")  # no object is made or read here
    if problem := missing():
        print(f"make gpu: {problem}", file=sys.stderr)
        return 2
    import torch

    out.parent.mkdir(parents=True, exist_ok=True)
    # Without the options of the project: they need the packages of its own environment.
    command = ["-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT)]
    command += ["--import-mode=importlib", "--confcutdir=tests/gpu", "tests/gpu"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    process = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=False)
    tests = process.returncode
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tests": "passed" if tests == 0 else f"pytest ended with {tests}",
        "rows": list(rows()),
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"tests: {report['tests']}; all figures: {out}")
    return tests


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    sys.exit(main(Path(*sys.argv[1:] or ["build/gpu.json"])))
