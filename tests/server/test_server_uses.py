"""The node server records what its clients use, in the way and as often as it is configured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kvshelf.backends import Touched
from kvshelf.capacity.uses import Uses
from kvshelf.format.keys import Chunk
from kvshelf.metrics import Counters
from kvshelf.server.messages import Fault, LookedUp, Result
from kvshelf.server.shelf import open_served
from tests.server.desk import Desk, name_of
from tests.server.node import LocalServer
from tests.sim.storage import FaultyStorage, posix
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks, make_tail
from tests.support.waiting import PATIENCE, until

FMT = make_format()
CLIENT = b"c" * 16


class Used:
    """A service that records uses, on a shelf with the chunks of one prompt."""

    def __init__(self, root: Path, answer: Touched = Touched.TOUCHED, **options: Any) -> None:
        self.counters = Counters()
        self.touches = FaultyStorage(posix(root), touched=answer)
        self.uses = Uses(self.counters, **options)
        self.desk = Desk(self.touches, uses=self.uses)
        self.desk.service.register(FMT.namespace.encoded)
        self.chunks = make_chunks(FMT, 4)
        for chunk in self.chunks:
            for shard in range(FMT.shards):
                self.touches.write(name_of(FMT, chunk, shard), [sealed(FMT, chunk, shard)])

    def names(self, chunk: Chunk) -> list[str]:
        return [name_of(FMT, chunk, shard) for shard in range(FMT.shards)]

    def recorded(self) -> list[str]:
        assert self.uses.flush(PATIENCE)
        return self.touches.touches

    def close(self) -> None:
        self.uses.close()
        self.desk.close()


MakeUsed: TypeAlias = Callable[..., Used]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeUsed]:
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(
            closing(Used(tmp_path, *args, **options))
        )


def test_what_a_lookup_finds_is_used(make: MakeUsed) -> None:
    used = make()
    (absent,) = make_chunks(FMT, 1, seed=1)
    chains = [used.names(chunk) for chunk in [*used.chunks[:3], absent, used.chunks[3]]]
    # From the storage, and from memory.
    for _ in range(2):
        assert used.desk.ask("lookup", CLIENT, "s", chains) == LookedUp(3)
        used.desk.settle()
        assert used.recorded() == [name for names in chains[:3] for name in names]


def test_what_is_in_memory_only_is_not_recorded(make: MakeUsed) -> None:
    used = make()
    used.desk.remember(CLIENT, "hash/one", b"x" * 64)
    assert used.desk.ask("lookup", CLIENT, "s", [["hash/one"]]) == LookedUp(1)
    assert used.recorded() == []


def test_what_a_client_says_it_has_used_is_recorded_by_the_server(make: MakeUsed) -> None:
    used = make()
    names = [*used.names(used.chunks[0]), name_of(FMT, make_tail(FMT))]
    for name in names * 2:
        answer = used.desk.ask("call", CLIENT, "touch", [name, 0.0], b"")
        assert answer == Result(Touched.TOUCHED.value)
    assert used.recorded() == names


def test_of_foreign_names_the_storage_is_asked(make: MakeUsed) -> None:
    used = make()
    assert used.desk.ask("call", CLIENT, "touch", ["some/file", 0.0], b"") == Result("touched")
    assert used.touches.touches.pop() == "some/file"
    assert isinstance(used.desk.ask("call", CLIENT, "touch", [5], b""), Fault)
    assert used.recorded() == []


@pytest.mark.real
def test_engines_hits_reach_the_server(tmp_path: Path) -> None:
    """As the connector records them: each object of the whole prefix."""
    storage = FaultyStorage(posix(tmp_path / "shelf"))
    chunks = make_chunks(FMT, 3)
    for chunk in chunks:
        for shard in range(FMT.shards):
            storage.write(name_of(FMT, chunk, shard), [sealed(FMT, chunk, shard)])
    server_counts, counts = Counters(), Counters()
    with ExitStack() as stack:
        of_server = stack.enter_context(closing(Uses(server_counts)))
        server = stack.enter_context(LocalServer(tmp_path / "s", storage, uses=of_server))
        shelf = stack.enter_context(closing(open_served(server.url)))
        uses = stack.enter_context(closing(Uses(counts, every=60.0)))
        uses.note(shelf.view(FMT), chunks)
        assert uses.flush(PATIENCE)
        assert counts.snapshot()["touched_objects"] == 3 * FMT.shards
        until(lambda: bool(of_server.flush(PATIENCE) and server_counts.snapshot()))
        assert server_counts.snapshot() == {"touched_objects": 3 * FMT.shards}
        assert sorted(storage.touches) == sorted(
            name_of(FMT, chunk, shard) for chunk in chunks for shard in range(FMT.shards)
        )
