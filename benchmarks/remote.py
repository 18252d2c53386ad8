"""Rows ``s3/*``: many objects at once between buffers and a bucket, without and with latency.

Owns the comparison: equally many threads on both sides, the same server, proxy, bytes and buffers;
the floor neither verifies nor hashes. :mod:`benchmarks.proxy` adds the latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from benchmarks.bucket import Bucket, RawLoads, RawStores, bucket
from benchmarks.measure import Goal, Row, Work, measure_pairs
from benchmarks.samples import LARGE, TINY, fill, make_chunks, make_format
from benchmarks.servers import BUCKET, MissingServerError
from benchmarks.settings import Settings
from kvshelf.backends import open_backend
from kvshelf.format.keys import Chunk
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef

_THREADS = 8
#: At least 0.9 of the throughput of the fastest raw client.
_GOAL = Goal(1.11)


def bench_s3(settings: Settings) -> Iterator[Row]:
    """Measure verified loads and stores over S3, without latency and with 20 ms."""
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
        yield Row("s3", "loads and stores over S3", skipped=str(error))


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
    buffers = [memoryview(bytearray(fmt.object_size(shard))) for _, shard in pieces]
    prefix = f"{fmt.shards}-{delay:g}"
    backend = open_backend(f"s3://{BUCKET}/{prefix}", storage_options=place.options())
    distance = f", {1e3 * delay:g} ms away" if delay else ""
    with Shelf(backend) as shelf, ThreadPoolExecutor(threads) as pool:
        for buffer, (chunk, shard) in zip(buffers, pieces, strict=True):
            fill(buffer)
            fmt.seal(buffer, chunk, shard)
            shelf.view(fmt).publish(ObjectRef(chunk, shard), buffer)
        names = [
            f"{prefix}/{shelf.view(fmt).name(ObjectRef(chunk, shard))}" for chunk, shard in pieces
        ]

        def load(number: int) -> None:
            shelf.view(fmt).load(ObjectRef(*pieces[number]), buffers[number])

        with closing(RawLoads(place, names, buffers, threads)) as raw:
            times = measure_pairs(
                Work(lambda: list(pool.map(load, range(count)))), Work(raw.run), settings.pairs(15)
            )
            client = raw.client
        extra: dict[str, object] = {
            "bytes": sum(map(len, buffers)),
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
        writer = _Publications(fmt, shelf, pieces, buffers)
        with closing(RawStores(place, buffers, threads)) as stores:
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
    """Writes objects with unused names, and deletes them."""

    def __init__(
        self,
        fmt: ObjectFormat,
        shelf: Shelf,
        pieces: Sequence[tuple[Chunk, int]],
        buffers: Sequence[memoryview],
    ) -> None:
        self._fmt = fmt
        self._shelf = shelf
        self._pieces = pieces
        self._images = buffers
        self._turn = 0
        self._written: list[str] = []

    def turn(self) -> Iterator[int]:
        """Switch to unused names; return the numbers of the objects."""
        self._turn += 1
        return iter(range(len(self._pieces)))

    def write(self, number: int) -> None:
        """Publish one object."""
        base, shard = self._pieces[number]
        key = base.key[:1] + (self._turn << 32 | base.index).to_bytes(31, "big")
        chunk = Chunk(key, base.parent, base.index, base.tokens)
        self._shelf.view(self._fmt).publish(ObjectRef(chunk, shard), self._images[number])
        self._written.append(self._shelf.view(self._fmt).name(ObjectRef(chunk, shard)))

    def clear(self) -> None:
        """Delete the written objects."""
        for name in self._written:
            self._shelf.delete(name)
        self._written.clear()
