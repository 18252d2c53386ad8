"""``make gpu``: the tests of tests/gpu, and what copies cost on this GPU, as one JSON file.

Needs a Python with torch for the GPU, the packages of :data:`NEEDED` and kvshelf's compiled library
with kernels, but no network and no vLLM; cuda/README.md says how to bring them. What is missing is
said before anything runs. Each figure stands beside a floor of the same run on the same bytes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (
    *("torch", "numpy", "pytest", "tvm_ffi", "fsspec", "xxhash", "safetensors"),
    *("pydantic", "pydantic_settings", "yaml", "rich"),
)
LAYERS, BLOCK, HEADS, SIZE, TOKENS = 32, 16, 8, 128, 256  # Llama 3 8B: 32 MiB a chunk
CHUNKS, SHARDS, SAMPLES = 16, 8, 7


def missing() -> str:
    """Return what `make gpu` lacks here, and how to get it; empty where nothing is missing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no NVIDIA driver ({error})"
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        return f"no {', '.join(absent)} in {sys.executable}; GPU_PYTHON names another Python"
    from kvshelf import ops

    problem = ops.kernel_problem("cuda")
    return f"no kernels: {problem}; cuda/README.md says how to build them" if problem else ""


def seconds_of(work: Callable[[], object]) -> float:
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

    from kvshelf import PagedLayout, ops
    from kvshelf.kv.caches import LayerCall
    from kvshelf.kv.device import DeviceKVCache
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
        out = torch.empty(1, shards, size // shards, dtype=torch.uint8, device="cuda")
        call = (caches, slots[:1], out, layout, 0, HEADS // shards)
        took = seconds_of(partial(ops.gather_kv, *call))
        yield row(f"gather, {shards} objects", size, took, "index_select", select)
        took = seconds_of(partial(ops.scatter_kv, *call))
        yield row(f"scatter, {shards} objects", size, took, "index_copy_", copy)

        piece, heads = size // shards, HEADS // shards
        calls = {n: [LayerCall(caches, layout, 0, piece, heads, n * heads)] for n in range(shards)}
        memory = ChunkMemory(2 * size, device=out.device)
        path = DeviceKVCache(calls, ring=CHUNKS, loads=8, pinned=memory.is_page_locked)
        payloads = [memory.tensor[n * piece : (n + 1) * piece] for n in range(shards)]
        on_device = list(out[0])

        def copies(to: list[Any], source: list[Any]) -> None:
            for target, one in [*zip(to, source, strict=True)] * CHUNKS:
                target.copy_(one, non_blocking=True)

        def store(path: Any = path, payloads: list[Any] = payloads) -> None:
            for copied in [path.gather(slots[n], payloads) for n in range(CHUNKS)]:
                copied.wait()

        def load(path: Any = path, payloads: list[Any] = payloads, shards: int = shards) -> None:
            fence = path.fence()
            with ThreadPoolExecutor(8) as threads:
                for n in range(CHUNKS):
                    threads.submit(path.scatter_chunk, range(shards), slots[n], payloads, fence)

        what = f"{CHUNKS} chunks of {shards} × {piece >> 20} MiB"
        for name, work, ends in (
            ("store", store, (payloads, on_device)),
            ("load", load, (on_device, payloads)),
        ):
            least = seconds_of(partial(copies, *ends))
            yield row(f"{name} {what}", CHUNKS * size, seconds_of(work), "plain copies", least)

    # Steps that read 4 GiB of weights each, alone and while chunks are stored.
    weights = torch.ones(1 << 15, 1 << 16, dtype=torch.bfloat16, device="cuda")
    alone = seconds_of(lambda: weights @ weights[0])
    with ThreadPoolExecutor(1) as threads:
        going = [True]

        def keep_storing() -> None:
            while going[0]:
                store()

        beside = threads.submit(keep_storing)
        took = seconds_of(lambda: weights @ weights[0])
        going[0] = False
        beside.result()
    yield row("a step while chunks are stored", 4 << 30, took, "alone", alone)


def main(out: Path) -> int:
    """Run the tests and measure; return the exit code."""
    if problem := missing():
        print(f"make gpu: {problem}", file=sys.stderr)
        return 2
    import torch

    out.parent.mkdir(parents=True, exist_ok=True)
    command = ["-m", "pytest", "-q", "--confcutdir=tests/gpu", "tests/gpu"]
    tests = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
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
