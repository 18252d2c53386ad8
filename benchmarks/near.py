"""Rows ``tier/*``: one object from a disk tier, against the same object from a local shelf.

The shelf behind the tier is never used. Both files lie on the same filesystem and in the page
cache, and are read into the same buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from benchmarks.measure import Goal, Row, Work, measure_pairs
from benchmarks.samples import LARGE, TINY, fill, make_chunks, make_format
from benchmarks.settings import Settings
from kvshelf.backends import open_backend
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.tiers.tiered import TieredShelf
from kvshelf.transfer.staging import StagingPool

_DRAIN_SECONDS = 60.0


def bench_tier(settings: Settings) -> Iterator[Row]:
    """Measure the verified load of one object in the disk tier."""
    formats = [("4 MiB", make_format(LARGE, 8)), ("32 MiB", make_format(LARGE, 1))]
    for label, fmt in [("64 KiB", make_format(TINY, 2))] if settings.quick else formats:
        yield _load_row(settings, label, fmt)


def _load_row(settings: Settings, label: str, fmt: ObjectFormat) -> Row:
    [chunk] = make_chunks(fmt, 1)
    size = fmt.object_size(0)
    buffers = StagingPool(8 * size, size).acquire_for_load()
    assert buffers is not None
    buffer = buffers[0].view[:size]
    fill(buffer)
    fmt.seal(buffer, chunk, 0)
    counters = Counters()
    tier = DiskTier(settings.folder(f"tier-{fmt.shards}"), 4 * size, counters=counters)
    with (
        Shelf(open_backend(str(settings.folder(f"near-{fmt.shards}")))) as local,
        closing(TieredShelf(Shelf(open_backend("memory://kvshelf-bench-tier")), [tier])) as tiered,
    ):
        ref, near, view = ObjectRef(chunk, 0), local.view(fmt), tiered.view(fmt)
        near.publish(ref, buffer)
        tier.keep(fmt, ref, buffer)
        if not tier.drain(_DRAIN_SECONDS):
            raise RuntimeError("the disk tier was not written to")
        times = measure_pairs(
            Work(lambda: view.load(ref, buffer)),
            Work(lambda: near.load(ref, buffer)),
            settings.pairs(51),
        )
        hits = int(counters.snapshot()["disk_tier_loaded_objects"])
        return Row(
            f"tier/{label.replace(' ', '')}/load",
            f"verified load from the disk tier, {label}, page cache → buffer",
            "the same from a local shelf",
            *times,
            goal=Goal(1.1),
            extra={
                "bytes": size,
                "filesystem": local.backend.properties.filesystem,
                "hits": hits,
            },
        )
