"""Rows ``scale/*``: long prompts of large models through the parts of one rank, without a model.

Owns prompts of 32K and 128K tokens whose KV has the bytes of one rank: of a model of 8B parameters
at a tensor-parallel degree of 4 (32 KiB a token), and of small ones (16 KiB) in chunks of several
sizes. Lookup, reads, verification and the scatter are those of engines. The paged cache is small:
requests that run at once write over each other's blocks, which changes no time.

The floor reads the same files by plain calls, with as many threads. Both run with the files in the
page cache as far as memory allows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.measure import Row, Work, measure_pairs
from benchmarks.paged import paged_kv
from benchmarks.samples import TINY, Shape, make_format, make_prompt
from benchmarks.settings import Settings
from kvshelf.backends import open_backend
from kvshelf.cache import ChunkCache
from kvshelf.shelf.shelf import Shelf

#: One rank's part: 8 KV heads of 128 in 32 layers, by 4; and 40 layers with one such head.
_RANK_OF_8B: Final = Shape(32, 2)
_SMALL_KV: Final = Shape(32, 1)
_THREADS: Final = 2
_PAIRS: Final = 5
_TIMEOUT: Final = 300.0


@dataclass(frozen=True, slots=True)
class Point:
    """What is measured.

    Attributes
    ----------
    shape : Shape
    tokens : int
        Of each prompt.
    requests : int
        At once.
    chunk_tokens : int
    prompts : int
        Distinct ones; the requests share them in turn.
    """

    shape: Shape
    tokens: int
    requests: int
    chunk_tokens: int = 256
    prompts: int = 1

    @property
    def name(self) -> str:
        """Of its row."""
        token = self.shape.chunk_bytes(1) >> 10
        return f"scale/{token}KiB/{self.tokens >> 10}Kx{self.requests}/{self.chunk_tokens}"


POINTS: Final = (
    *(Point(_RANK_OF_8B, 32 << 10, count, prompts=min(count, 2)) for count in (1, 4, 16)),
    *(Point(_RANK_OF_8B, 128 << 10, count) for count in (1, 4)),
    *(Point(_SMALL_KV, 32 << 10, 1, chunk) for chunk in (256, 512, 1024, 2048, 4096)),
)


def bench_scale(settings: Settings) -> Iterator[Row]:
    """Measure loads of long prompts at each of `POINTS`."""
    points: Sequence[Point] = POINTS
    if settings.quick:
        points = (Point(TINY, 1024, 2, prompts=2), Point(TINY, 1024, 1, 512))
    for place, point in enumerate(points):
        yield _row(settings, point, place)


def _row(settings: Settings, point: Point, place: int) -> Row:
    fmt = make_format(point.shape, 1, point.chunk_tokens)
    folder = settings.folder(f"scale-{place}")
    shape, tokens = point.shape, point.tokens
    kv = paged_kv(shape, tokens)
    prompts = [make_prompt(tokens, seed) for seed in range(point.prompts)]
    with ExitStack() as stack:
        shelf = stack.enter_context(Shelf(open_backend(str(folder))))
        cache = stack.enter_context(
            ChunkCache(shelf, fmt, prefetch_bytes=0, io_threads=_THREADS, timeout_s=_TIMEOUT)
        )
        for prompt in prompts:
            settings.progress(f"{point.name}: storing")
            if not cache.store(prompt, kv=kv).complete:
                raise RuntimeError("the prompt was not stored")
        settings.progress(point.name)
        files = sorted(folder.rglob("*.safetensors"))
        pool = stack.enter_context(ThreadPoolExecutor(_THREADS))
        nbytes = point.requests * tokens * shape.chunk_bytes(1)

        def load() -> None:
            handles = [
                cache.submit_retrieve(prompts[number % len(prompts)], kv=kv)
                for number in range(point.requests)
            ]
            if not all(bool(handle.result(_TIMEOUT).all()) for handle in handles):
                raise RuntimeError("a stored prompt was not retrieved")

        buffers = [bytearray(fmt.object_size(0)) for _ in range(_THREADS)]

        def read() -> None:
            count = len(files) * point.requests // len(prompts)
            wanted = [files[number % len(files)] for number in range(count)]
            parts = [wanted[thread::_THREADS] for thread in range(_THREADS)]
            list(pool.map(_read, parts, buffers))

        times = measure_pairs(Work(load), Work(read), settings.pairs(_PAIRS), warm_up=1)
    for path in files:
        path.unlink()
    return Row(
        point.name,
        f"load of {point.requests} × {tokens:,} tokens, {nbytes / 2**30:.1f} GiB in chunks of"
        f" {point.chunk_tokens} tokens",
        f"the same files, read by {_THREADS} threads",
        *times,
        extra={"bytes": nbytes, "chunk_tokens": point.chunk_tokens},
    )


def _read(files: Sequence[Path], buffer: bytearray) -> None:
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.preadv(fd, [buffer], 0)
        finally:
            os.close(fd)
