"""Rows ``lookup/*``: finding stored tokens in a local directory, without a model.

Owns two measurements: the duration of a lookup of 131,072 tokens, 512 chunks of 8 shards, in the
background; and the effect of a hundred thousand other objects.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import Goal, Row, Work, measure_pairs
from benchmarks.samples import (
    LARGE,
    TINY,
    make_chunks,
    make_format,
    make_hollow_objects,
    make_prompt,
)
from benchmarks.settings import Settings
from kvshelf.backends import open_backend
from kvshelf.format.keys import KeyChain
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import LookupService
from kvshelf.shelf.shelf import Shelf


def bench_lookup(settings: Settings) -> Iterator[Row]:
    """Measure lookups in the background, and on a shelf of many objects."""
    chunks, shape, shards = (4, TINY, 2) if settings.quick else (512, LARGE, 8)
    fmt, root = make_format(shape, shards), settings.folder("lookup")
    paths = make_hollow_objects(root, fmt, make_chunks(fmt, chunks))

    def stat_all() -> None:
        for path in paths:
            os.stat(path)

    with Shelf(open_backend(str(root))) as shelf:
        service = _service(shelf, fmt)
        search = _search(service, fmt, chunks)
        yield Row(
            "lookup/background",
            f"lookup of {chunks} chunks × {shards} shards: keys, search, confirmation",
            f"os.stat of the {len(paths)} files",
            *measure_pairs(Work(search), Work(stat_all), settings.pairs(31)),
            goal=Goal(25e-3, "seconds"),
        )
        service.close()
    yield _many_objects(settings, fmt)


def _many_objects(settings: Settings, fmt: ObjectFormat) -> Row:
    """Compare a shelf with 100,000 objects with one of 100."""
    few, many = 12, 125 if settings.quick else 12_500
    settings.progress(f"a shelf of {many * fmt.shards} objects")
    small, large = settings.folder("lookup-few"), settings.folder("lookup-many")
    for root in (small, large):
        make_hollow_objects(root, fmt, make_chunks(fmt, few))
    others = [replace(chunk, index=0) for chunk in make_chunks(fmt, many - few, seed=1)]
    make_hollow_objects(large, fmt, others)

    def open_and_look_up(root: Path) -> None:
        with Shelf(open_backend(str(root))) as shelf:
            service = _service(shelf, fmt)
            _search(service, fmt, few)()
            service.close()

    return Row(
        "lookup/objects",
        f"opening a shelf of {many * fmt.shards:,} objects, lookup of {few} chunks",
        f"a shelf of {few * fmt.shards} objects",
        *measure_pairs(
            Work(lambda: open_and_look_up(large)),
            Work(lambda: open_and_look_up(small)),
            settings.pairs(51),
        ),
        goal=Goal(1.1),
    )


def _service(shelf: Shelf, fmt: ObjectFormat) -> LookupService:
    return LookupService(shelf.view(fmt), failed=FailedKeys(), counters=Counters())


def _search(service: LookupService, fmt: ObjectFormat, chunks: int) -> Callable[[], None]:
    """Return a function that runs one lookup, without remembered results, and waits for it."""
    prompt = make_prompt(chunks * fmt.chunk_size)

    def search() -> None:
        lookup = service.submit(prompt, lambda: KeyChain(fmt.namespace.digest, fmt.chunk_size))
        if not lookup.wait(60.0) or lookup.hit_chunks != chunks:
            raise RuntimeError(f"the lookup found {lookup.hit_chunks} of {chunks} chunks")

    return search
