"""Shelves for tests of capacity: objects with ages, on a storage whose clock a test sets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from kvshelf.capacity.evictor import Evictor
from kvshelf.capacity.limits import FANS
from kvshelf.config import CapacityConfig
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from tests.sim.storage import FaultyStorage, LaterBackend, posix
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks

DAY = 86400.0
FMT = make_format(native=False)
SIZE = sum(FMT.object_size(shard) for shard in range(FMT.shards))
HEX = "0123456789abcdef"


class Place:
    """A shelf in a folder, on which all files have the ages that a test gave them."""

    def __init__(self, root: Path, *, ahead: float = 3 * DAY) -> None:
        self.root = root
        self.later = LaterBackend(posix(root), ahead)
        self.faults = FaultyStorage(self.later)
        # Busy machines are late.
        self.shelf = Shelf(self.faults)
        self.backend = self.shelf.backend
        self.counters = Counters()
        self.now = self.later.now()

    def path(self, name: str) -> Path:
        return self.root / name

    def name(self, fmt: ObjectFormat, chunk: Chunk, shard: int = 0) -> str:
        return self.shelf.view(fmt).name(ObjectRef(chunk, shard))

    def age(self, path: Path, age: float, used: float | None = None) -> None:
        """Say how long ago a file was written and used."""
        last = age if used is None else used
        os.utime(path, (self.now - last, self.now - age))

    def put(
        self,
        fmt: ObjectFormat,
        chunks: Iterable[Chunk],
        age: float = 0.0,
        *,
        used: float | None = None,
        shards: Sequence[int] | None = None,
    ) -> list[str]:
        """Store all objects of some chunks; return their names."""
        names = []
        for chunk in chunks:
            for shard in range(fmt.shards) if shards is None else shards:
                data = sealed(fmt, chunk, shard)
                self.shelf.view(fmt).publish(ObjectRef(chunk, shard), data)
                names.append(self.name(fmt, chunk, shard))
                self.age(self.path(names[-1]), age, used)
        return names

    def write(self, name: str, data: bytes = b"x", age: float = 0.0) -> Path:
        """Write any file."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.age(path, age)
        return path

    def evictor(self, **capacity: object) -> Evictor:
        """Return the only evictor of this shelf, which is not started: :meth:`round` drives it."""
        config = CapacityConfig.model_validate(capacity)
        evictor = Evictor(self.shelf.backend, config, self.counters)
        evictor.budget.unknown = 0
        return evictor

    def round(self, evictor: Evictor) -> None:
        """Have an evictor sweep all of the shelf; raise what a sweep raises."""
        for _ in range(FANS):
            first = evictor._next
            evictor.sweep()
            if (evictor._next - first) % FANS == 0:
                return

    def count(self, name: str) -> float:
        return self.counters.snapshot().get(name, 0)

    def objects(self) -> set[str]:
        return {name for name in self.files() if name.endswith(".safetensors")}

    def files(self) -> set[str]:
        """Return the names of all files."""
        found = set()
        for folder, _, names in os.walk(self.root):
            found |= {os.path.relpath(os.path.join(folder, name), self.root) for name in names}
        return {name for name in found if self.path(name).is_file()}


def salted(chunk: Chunk, group: str) -> Chunk:
    return replace(chunk, salt_group=group)


def chunks(count: int, seed: int = 0) -> list[Chunk]:
    return make_chunks(FMT, count, seed)


def tail_of(seed: int = 0, fmt: ObjectFormat = FMT, group: str = "_") -> Chunk:
    """Return the tail of a prompt; with a salt, if it is in a salt group."""
    salt = "" if group == "_" else "salt"
    chain = KeyChain(fmt.namespace.digest, fmt.chunk_size, salt=salt, salt_group=group)
    chain.extend([seed] * 5)
    tail = chain.tail()
    assert tail is not None
    return tail
