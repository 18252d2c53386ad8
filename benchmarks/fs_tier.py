"""Rows ``fs-tier/*``: a prompt's KV through vLLM's filesystem tier, and through kvshelf.

Owns the calls of vLLM's ``FileSystemTierManager`` as its scheduler makes them, without an engine:
the tier moves bytes between files and host memory, from where vLLM copies them to the GPU. kvshelf
does all of its part: keys, lookup, read, verification, and the copy to or from the paged cache.

Both run in this process, on the same filesystem. vLLM's tier passes by the page cache where the
filesystem allows it.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.child import MissingEngineError, require_engine
from benchmarks.measure import Row, Work, measure_pairs
from benchmarks.paged import paged_kv
from benchmarks.samples import BLOCK_TOKENS, CHUNK_TOKENS, LARGE, TINY, make_format, make_prompt
from benchmarks.settings import Settings
from kvshelf.backends import open_backend
from kvshelf.cache import ChunkCache
from kvshelf.shelf.shelf import Shelf

_CHUNKS: Final = 16
_PAIRS: Final = 31
_THREADS: Final = 2
_LONGEST_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 1e-4


class _FsTier:
    """vLLM's tier on one folder, and the memory in front of it.

    Parameters
    ----------
    folder : Path
    chunk_bytes : int
    """

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        import numpy as np
        from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        # Files that pass by the page cache are read and written in whole pages.
        nbytes = -(-chunk_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory: Any = np.frombuffer(mmap.mmap(-1, _CHUNKS * nbytes), dtype=np.uint8)
        memory[:] = 1
        self._job: Any = TransferJob
        self._context: Any = ReqContext
        self._ended = ScheduleEndContext((), ())
        self._places = np.arange(_CHUNKS)
        self._numbers = itertools.count()
        self.manager: Any = FileSystemTierManager(
            # What names files; the tier takes it from the engine.
            SimpleNamespace(
                blocks_per_chunk=CHUNK_TOKENS // BLOCK_TOKENS,
                config=SimpleNamespace(
                    groups=[],
                    canonical_layout=False,
                    replicated_layout=False,
                    model=SimpleNamespace(name="bench", dtype="bfloat16"),
                    cache=SimpleNamespace(tokens_per_hash=BLOCK_TOKENS),
                    parallel=SimpleNamespace(
                        tp_size=1,
                        pp_size=1,
                        pcp_size=1,
                        dcp_size=1,
                        rank=0,
                        is_parallelism_agnostic=True,
                    ),
                ),
            ),
            memoryview(memory.reshape(_CHUNKS, nbytes)),
            "fs",
            str(folder),
            n_read_threads=_THREADS,
            n_write_threads=_THREADS,
        )
        digests = (hashlib.sha256(bytes([place])).digest() for place in range(_CHUNKS))
        self._keys = [make_offload_key(digest, 0) for digest in digests]
        self.passes_by = bool(self.manager._use_o_direct)

    def load(self) -> None:
        """Look all chunks up, and read them."""
        context, lookup = self._context(f"request-{next(self._numbers)}"), self.manager.lookup
        self.manager.on_new_request(context)

        def is_hit() -> bool:
            found = [lookup(key, context).name for key in self._keys]
            self.manager.on_schedule_end(self._ended)
            if "MISS" in found:
                raise RuntimeError("the tier misses what it has stored")
            return "RETRY" not in found

        _wait(is_hit)
        self._run(self.manager.submit_load, context, is_promotion=True)
        self.manager.on_request_finished(context)

    def store(self) -> None:
        """Write all chunks."""
        context = self._context(f"request-{next(self._numbers)}")
        self._run(self.manager.submit_store, context, is_promotion=False)

    def _run(self, submit: Callable[[Any], None], context: Any, *, is_promotion: bool) -> None:
        submit(self._job(next(self._numbers), self._keys, self._places, is_promotion, context))
        done: list[Any] = []

        def is_done() -> bool:
            done.extend(self.manager.get_finished_jobs())
            return bool(done)

        _wait(is_done)
        if not done[0].success:
            raise RuntimeError("a transfer of the tier failed")

    def close(self) -> None:
        """Stop its threads."""
        self.manager.shutdown()


def _wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _LONGEST_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError("vLLM's tier did not answer")
        time.sleep(_POLL_SECONDS)


def _delete(folder: Path) -> None:
    for path in folder.rglob("*.bin"):
        path.unlink()


def bench_fs_tier(settings: Settings) -> Iterator[Row]:
    """Measure stores and loads of one prompt, each against vLLM's filesystem tier."""
    shape = TINY if settings.quick else LARGE
    fmt = make_format(shape, 1)
    size = f"{_CHUNKS} chunks of {fmt.object_size(0) / 2**20:.1f} MiB"
    stores = Row(
        "fs-tier/store",
        f"store of a prompt, {size}: from the paged cache to files",
        "vLLM's fs tier: from host memory to files",
    )
    loads = Row(
        "fs-tier/load",
        f"lookup and load of a prompt, {size}: from files to the paged cache, verified",
        "vLLM's fs tier: lookup, and from files to host memory",
    )
    try:
        require_engine()
    except MissingEngineError as error:
        for row in (stores, loads):
            yield replace(row, skipped=str(error))
        return
    tokens = make_prompt(_CHUNKS * CHUNK_TOKENS)
    kv = paged_kv(shape, len(tokens))
    folder, theirs = settings.folder("fs-tier"), settings.folder("fs-tier-vllm")
    settings.progress("vLLM's filesystem tier")
    with ExitStack() as stack:
        tier = _FsTier(theirs, fmt.object_size(0) - fmt.data_offset)
        stack.callback(tier.close)
        shelf = stack.enter_context(Shelf(open_backend(str(folder))))
        cache = stack.enter_context(
            ChunkCache(shelf, fmt, prefetch_bytes=0, io_threads=_THREADS, timeout_s=60.0)
        )

        def store() -> None:
            if not cache.store(tokens, kv=kv).complete:
                raise RuntimeError("the prompt was not stored")

        def remove() -> None:
            for key in cache.chunk_keys(tokens):
                cache.remove(key)

        def load() -> None:
            if not bool(cache.retrieve(tokens, kv=kv).all()):
                raise RuntimeError("a stored prompt was not retrieved")

        extra: dict[str, object] = {
            "bytes": _CHUNKS * (fmt.object_size(0) - fmt.data_offset),
            "passes_by_the_page_cache": tier.passes_by,
        }
        times = measure_pairs(
            Work(store, remove),
            Work(tier.store, lambda: _delete(theirs)),
            settings.pairs(_PAIRS),
            warm_up=2,
        )
        yield replace(stores, ours=times[0], floors=times[1], extra=extra)
        store()
        tier.store()
        times = measure_pairs(Work(load), Work(tier.load), settings.pairs(_PAIRS), warm_up=2)
        yield replace(loads, ours=times[0], floors=times[1], extra=extra)
