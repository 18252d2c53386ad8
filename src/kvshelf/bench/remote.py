"""Rows ``s3/*``: many objects at once between buffers and a bucket, near and far.

Owns what is compared: as many threads on both sides, the same server, proxy, bytes and buffers;
the floor neither verifies nor hashes. Distance is added by :mod:`kvshelf.bench.proxy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from kvshelf.backends import open_backend
from kvshelf.bench.bucket import Bucket, RawLoads, RawStores, bucket
from kvshelf.bench.measure import Goal, Row, Work, measure_pairs
from kvshelf.bench.samples import LARGE, TINY, fill, make_chunks, make_format
from kvshelf.bench.servers import BUCKET, MissingServerError
from kvshelf.bench.settings import Settings
from kvshelf.chunkfile import ObjectFormat
from kvshelf.identity import Chunk
from kvshelf.shelf import Shelf

_THREADS = 8
#: Of the rate of the fastest raw client at least 0.9.
_GOAL = Goal(1.11)


def bench_s3(settings: Settings) -> Iterator[Row]:
    """Measure verified loads and publications over S3, at once and at 20 ms."""
    sizes = [("16 × 4 MiB", make_format(LARGE, 8), 16), ("4 × 32 MiB", make_format(LARGE, 1), 4)]
    if settings.quick:
        sizes = [("4 × 64 KiB", make_format(TINY, 2), 4)]
    try:
        with bucket(settings.folder("s3")) as place:
            for delay in (0.0, 0.02):
                for label, fmt, count in sizes:
                    place.proxy.delay(delay)
                    yield from _rows(settings, place, label, fmt, count, delay)
    except MissingServerError as error:
        yield Row("s3", "loads and publications over S3", skipped=str(error))


def _rows(
    settings: Settings,
    place: Bucket,
    label: str,
    fmt: ObjectFormat,
    count: int,
    delay: float,
) -> Iterator[Row]:
    threads = min(_THREADS, count)
    pieces = [
        (chunk, shard)
        for chunk in make_chunks(fmt, -(-count // fmt.shards))
        for shard in range(fmt.shards)
    ][:count]
    images = [memoryview(bytearray(fmt.object_size(shard))) for _, shard in pieces]
    prefix = f"{fmt.shards}-{delay:g}"
    backend = open_backend(f"s3://{BUCKET}/{prefix}", storage_options=place.options())
    distance = f", {1e3 * delay:g} ms away" if delay else ""
    with Shelf(backend) as shelf, ThreadPoolExecutor(threads) as pool:
        for image, (chunk, shard) in zip(images, pieces, strict=True):
            fill(image)
            fmt.seal(image, chunk, shard)
            shelf.write(fmt, chunk, shard, [image])
        names = [f"{prefix}/{shelf.name(fmt, chunk, shard)}" for chunk, shard in pieces]

        def load(number: int) -> None:
            shelf.load(fmt, *pieces[number], images[number])

        with closing(RawLoads(place, names, images, threads)) as raw:
            times = measure_pairs(
                Work(lambda: list(pool.map(load, range(count)))), Work(raw.run), settings.pairs(15)
            )
            client = raw.client
        extra: dict[str, object] = {
            "bytes": sum(map(len, images)),
            "threads": threads,
            "raw_client": client,
        }
        name = f"{label.replace(' ', '').replace('×', 'x')}/{1e3 * delay:g}ms"
        yield Row(
            f"s3/load/{name}",
            f"verified load over S3, {label}{distance}",
            f"the same GETs by {client}, not verified",
            *times,
            goal=_GOAL,
            extra=extra,
        )
        writer = _Publications(fmt, shelf, pieces, images)
        with closing(RawStores(place, images, threads)) as stores:
            times = measure_pairs(
                Work(lambda: list(pool.map(writer.write, writer.turn())), writer.clear),
                Work(stores.run),
                settings.pairs(15),
            )
            client = stores.client
        yield Row(
            f"s3/publish/{name}",
            f"publish over S3, sealed objects, {label}{distance}",
            f"the same PUTs by {client}",
            *times,
            goal=_GOAL,
            extra={**extra, "raw_client": client},
        )


class _Publications:
    """Writes objects under names that none has yet, and deletes them again."""

    def __init__(
        self,
        fmt: ObjectFormat,
        shelf: Shelf,
        pieces: Sequence[tuple[Chunk, int]],
        images: Sequence[memoryview],
    ) -> None:
        self._fmt = fmt
        self._shelf = shelf
        self._pieces = pieces
        self._images = images
        self._turn = 0
        self._written: list[str] = []

    def turn(self) -> Iterator[int]:
        """Begin with fresh names; return the numbers of the objects."""
        self._turn += 1
        return iter(range(len(self._pieces)))

    def write(self, number: int) -> None:
        """Publish one object."""
        base, shard = self._pieces[number]
        key = base.key[:1] + (self._turn << 32 | base.index).to_bytes(31, "big")
        chunk = Chunk(key, base.parent, base.index, base.tokens)
        self._shelf.write(self._fmt, chunk, shard, [self._images[number]])
        self._written.append(self._shelf.name(self._fmt, chunk, shard))

    def clear(self) -> None:
        """Delete what was written."""
        for name in self._written:
            self._shelf.delete(name)
        self._written.clear()
