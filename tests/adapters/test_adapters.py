"""The adapters against a node server in this process, whose storage does what the test says."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch

from kvshelf import ModelFacts, PromptIdentity
from kvshelf.adapters import (
    LoadStoreOp,
    SchedulerAdapter,
    WorkerAdapter,
    striding_block_hashes,
)
from kvshelf.adapters import connection as connection_module
from kvshelf.adapters import worker as worker_module
from kvshelf.adapters.copies import EngineCaches
from kvshelf.adapters.names import MAX_HASH, hashed_chunk, names_of
from kvshelf.errors import (
    ConfigError,
    TransientStorageError,
    UnavailableStorageError,
    UnsupportedError,
)
from kvshelf.format.keys import KeyChain
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv import sources
from kvshelf.kv.caches import HostKVCache, PendingCopy
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.topology import ShardPlan, Topology
from kvshelf.server.connection import NodeClient
from tests.server.node import LocalServer
from tests.sim.device import SimulatedStreams
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.fake_cudart import fake_cudart
from tests.support.prompts import any_identity, prompt
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.real

LAYERS, HEADS, SIZE, CHUNK, BLOCK, BLOCKS = 3, 4, 8, 16, 4, 64
PER_CHUNK = CHUNK // BLOCK
#: Memory of a worker.
MEMORY = 4 << 20


def facts(**changes: Any) -> ModelFacts:
    given: dict[str, Any] = {
        "layers": LAYERS,
        "kv_heads": HEADS,
        "head_size": SIZE,
        "dtype": "bfloat16",
        "weights": "name:test",
    }
    return ModelFacts(**{**given, **changes})


def namespace(**changes: Any) -> Namespace:
    return facts(**changes).namespace(chunk_size=CHUNK)


def names(count: int = LAYERS, first: int = 0) -> list[str]:
    return [f"model.layers.{i}.self_attn.attn" for i in range(first, first + count)]


def caches(seed: int | None = None, heads: int = HEADS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed or 0)
    shape = (BLOCKS, heads, BLOCK, 2 * SIZE)
    return {
        name: torch.zeros(shape, dtype=torch.bfloat16)
        if seed is None
        else torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name in names()
    }


def layout_of(kv: dict[str, torch.Tensor]) -> PagedLayout:
    return PagedLayout.from_bhnc(next(iter(kv.values())), SIZE)


def hashes(blocks: int, seed: int = 0) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(32) for _ in range(blocks)]


@dataclass
class Event:
    """An event of a device that passes when the test says so."""

    passed: threading.Event = field(default_factory=threading.Event)

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        assert self.passed.wait(30)


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(posix(tmp_path / "shelf"))


@pytest.fixture
def server(tmp_path: Path, storage: FaultyStorage) -> Iterator[LocalServer]:
    with LocalServer(tmp_path / "node", storage, chunk_size=CHUNK) as server:
        yield server
        storage.heal()


def answer(scheduler: SchedulerAdapter, request_id: str) -> int:
    """Wait for the answer to a lookup."""
    until(lambda: scheduler.check_lookup_result(request_id) is not None)
    found = scheduler.check_lookup_result(request_id)
    assert found is not None
    return found


class Engine:
    """The adapters of one engine with one worker, and the worker's caches."""

    def __init__(self, kv: dict[str, torch.Tensor], url: str, **options: Any) -> None:
        self.kv = kv
        space = options.pop("namespace", None) or namespace()
        self.scheduler = SchedulerAdapter(
            url, space, BLOCK, timeout_s=options.pop("lookup_s", PATIENCE)
        )
        options = {"memory_bytes": MEMORY, **options}
        self.worker = WorkerAdapter(url, space, BLOCK, **options)
        self.worker.register_kv_caches(kv, layout_of(kv))

    def store(self, request_id: str, work: LoadStoreOp) -> None:
        """Store, and wait for the end."""
        self.worker.submit_store_request(request_id, work)
        self.stored(request_id)

    def load(self, request_id: str, work: LoadStoreOp) -> set[int]:
        """Load, wait for the end, and return the blocks with errors."""
        self.worker.submit_retrieve_request(request_id, work)
        return self.loaded(request_id)

    def hit(self, request_id: str, **prompt_: Any) -> int:
        self.scheduler.maybe_submit_lookup_request(request_id, **prompt_)
        return answer(self.scheduler, request_id)

    def stored(self, *request_ids: str) -> None:
        """Wait until the stores of finished requests have ended."""
        wanted, found = set(request_ids), set[str]()

        def ended() -> bool:
            stores, _ = self.worker.get_finished(wanted)
            assert not stores & found
            found.update(stores)
            return found >= wanted

        until(ended)
        assert found == wanted

    def loaded(self, *request_ids: str) -> set[int]:
        """Wait until loads have ended; return the blocks with errors."""
        found = set[str]()
        errors = set[int]()

        def ended() -> bool:
            stores, loads = self.worker.get_finished(set())
            assert not stores and not loads & found
            found.update(loads)
            errors.update(self.worker.get_block_ids_with_load_errors())
            return found >= set(request_ids)

        until(ended)
        assert found == set(request_ids)
        return errors

    def stored_and_loaded(self, request_id: str) -> None:
        """Wait until a finished request's stores and loads have ended."""
        stores, loads = set[str](), set[str]()

        def ended() -> bool:
            some_stores, some_loads = self.worker.get_finished({request_id})
            stores.update(some_stores)
            loads.update(some_loads)
            return stores == loads == {request_id}

        until(ended)

    def blocks(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.stack([self.kv[name][list(ids)] for name in names()])

    def shutdown(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


Make: TypeAlias = Callable[..., Engine]


@pytest.fixture
def make_engine(server: LocalServer, storage: FaultyStorage) -> Iterator[Make]:
    made: list[Engine] = []

    def make(seed: int | None = None, **options: Any) -> Engine:
        made.append(Engine(caches(seed), server.url, **options))
        return made[-1]

    yield make
    storage.heal()
    for engine in made:
        engine.shutdown()
    # What was locked for lookups, and what was lent for loads, was let go of.
    until(lambda: server.stat("pinned_bytes") == server.stat("lent_bytes") == 0)


@pytest.fixture
def engine(make_engine: Make) -> Engine:
    return make_engine(seed=1)


MODES = ["tokens", "hashes"]


def op(mode: str, ids: Sequence[int], chunks: int, seed: int = 0, first: int = 0) -> LoadStoreOp:
    """An operation on `chunks` chunks of a prompt, from chunk `first` on."""
    end = (first + chunks) * CHUNK
    if mode == "tokens":
        return LoadStoreOp(list(ids), token_ids=prompt(end, seed), start=first * CHUNK, end=end)
    blocks = hashes((first + chunks) * PER_CHUNK, seed)[first * PER_CHUNK :]
    return LoadStoreOp(list(ids), block_hashes=blocks)


#: The whole of one chunk.
WORK = op("tokens", range(PER_CHUNK), 1)


def asked(mode: str, chunks: int, seed: int = 0) -> dict[str, Any]:
    if mode == "tokens":
        return {"token_ids": prompt(chunks * CHUNK, seed)}
    return {"block_hashes": hashes(chunks * PER_CHUNK, seed)}


# ------------------------------------------------------------------------------ both


def test_modes_are_domains_of_their_own(
    server: LocalServer, engine: Engine, tmp_path: Path
) -> None:
    ids = list(range(PER_CHUNK))
    engine.worker.submit_store_request("h", op("hashes", ids, 1), None)
    engine.worker.submit_store_request("t", op("tokens", ids, 1), None)
    engine.stored("h", "t")
    folders = {path.parents[2].name for path in (tmp_path / "shelf").rglob("*.safetensors")}
    # Block hashes name neither weights nor layout: nothing is published under them.
    assert folders == {engine.worker.namespace.folder}
    assert engine.worker.hashed_fmt.namespace.digest != engine.worker.namespace.digest
    assert engine.hit("a", **asked("hashes", 1)) == CHUNK
    assert engine.hit("b", **asked("tokens", 1)) == CHUNK
    engine.scheduler.end_session("a")
    engine.scheduler.end_session("b")


def test_hashes_of_another_model_find_nothing(make_engine: Make) -> None:
    one = make_engine(seed=1)
    one.store("a", op("hashes", range(PER_CHUNK), 1))
    other = make_engine(namespace=namespace(weights="name:other"))
    assert one.hit("b", **asked("hashes", 1)) == CHUNK
    assert other.hit("b", **asked("hashes", 1)) == 0


def test_chunk_that_a_hash_names_depends_on_nothing_else() -> None:
    fmt = ObjectFormat(namespace())
    chunk = hashed_chunk(fmt, b"x" * 32)
    assert chunk == hashed_chunk(ObjectFormat(namespace()), b"x" * 32)
    assert chunk.key != hashed_chunk(fmt, b"x" * 31 + b"y").key
    assert {hashed_chunk(fmt, bytes([byte])).index % 2 for byte in range(16)} == {0, 1}
    assert len(set(names_of(fmt, [chunk]))) == fmt.shards


def test_last_hash_of_each_chunk_is_taken() -> None:
    many = [bytes([number]) for number in range(11)]
    assert striding_block_hashes(many, 4) == [bytes([3]), bytes([7])]
    assert striding_block_hashes(many, 1) == many
    assert striding_block_hashes(many[:3], 4) == []


def test_chunk_size_is_the_servers(server: LocalServer) -> None:
    client = NodeClient(server.url)
    scheduler = SchedulerAdapter(server.url, facts(), BLOCK, client=client)
    assert scheduler.chunk_size == CHUNK
    assert scheduler.num_blocks_per_chunk() == scheduler.blocks_in_chunk == PER_CHUNK
    worker = WorkerAdapter(server.url, facts(), CHUNK, client=client)
    assert worker.num_blocks_per_chunk() == 1
    scheduler.shutdown()
    worker.shutdown()
    # Its owner closes it.
    assert client.is_connected
    client.close()


def test_adapters_say_what_they_are(server: LocalServer, make_engine: Make) -> None:
    scheduler = make_engine().scheduler
    text = f"<SchedulerAdapter of {server.url}, {namespace().folder}, connected>"
    assert repr(scheduler) == text
    server.close()
    until(lambda: repr(scheduler).endswith(", not connected>"))


@pytest.mark.parametrize("adapter", [SchedulerAdapter, WorkerAdapter])
@pytest.mark.parametrize("block_size", [0, 5, 32])
def test_chunk_size_is_a_multiple_of_the_block_size(
    adapter: type[Any], block_size: int, server: LocalServer
) -> None:
    with pytest.raises(ValueError, match=f"is {CHUNK}.*size {block_size}.*KVSHELF_CHUNK_SIZE"):
        adapter(server.url, facts(), block_size)


def test_namespace_has_the_servers_chunk_size(server: LocalServer) -> None:
    with pytest.raises(ConfigError, match=r"server is 16 tokens.*namespace is 32"):
        SchedulerAdapter(server.url, facts().namespace(chunk_size=32), BLOCK)


def test_namespace_of_several_kinds_is_refused(server: LocalServer) -> None:
    hybrid = facts(
        layers=3, kinds=("full", "window", "full"), sliding_windows=(-1, 16, -1)
    ).namespace(chunk_size=CHUNK, shards=2)
    for adapter in (SchedulerAdapter, WorkerAdapter):
        with pytest.raises(UnsupportedError, match="full, window"):
            adapter(server.url, hybrid, BLOCK)


def test_without_a_server_there_is_no_chunk_size(
    tmp_path: Path, storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "CONNECT_SECONDS", 0.0)
    url = f"ipc://{tmp_path}/node/node.sock"
    with pytest.raises(UnavailableStorageError, match="chunk size is not known"):
        SchedulerAdapter(url, facts(), BLOCK)
    with Engine(caches(1), url) as engine:
        assert engine.hit("a", token_ids=prompt(CHUNK)) == 0
        engine.store("a", op("tokens", range(PER_CHUNK), 1))
        with LocalServer(tmp_path / "node", storage, chunk_size=CHUNK):
            until(lambda: "not connected" not in f"{engine.scheduler!r}{engine.worker!r}")
            engine.store("b", op("tokens", range(PER_CHUNK), 1))
            assert engine.hit("b", token_ids=prompt(CHUNK)) == CHUNK


# ------------------------------------------------------------------------------ scheduler


@pytest.mark.parametrize("mode", MODES)
def test_lookup_is_submitted_once(mode: str, server: LocalServer, engine: Engine) -> None:
    with server.hanging():
        engine.scheduler.maybe_submit_lookup_request("a", **asked(mode, 2))
        # The second call with an id returns whatever its arguments.
        engine.scheduler.maybe_submit_lookup_request("a", None, None)
        engine.scheduler.maybe_submit_lookup_request("a", hashes(4), prompt(4))
        engine.scheduler.maybe_submit_lookup_request("a", **asked(mode, 3))
        assert engine.scheduler.check_lookup_result("a") is None
    assert answer(engine.scheduler, "a") == 0


def test_exactly_one_of_hashes_and_tokens(engine: Engine) -> None:
    with pytest.raises(ValueError, match="'a' got neither of block_hashes and token_ids"):
        engine.scheduler.maybe_submit_lookup_request("a")
    with pytest.raises(ValueError, match="'a' got both of block_hashes and token_ids"):
        engine.scheduler.maybe_submit_lookup_request("a", hashes(4), prompt(16))
    with pytest.raises(ValueError, match="'a' has no lookup"):
        engine.scheduler.check_lookup_result("a")


def test_lookup_that_is_not_known_is_named(engine: Engine) -> None:
    with pytest.raises(ValueError, match="'never' has no lookup"):
        engine.scheduler.check_lookup_result("never")
    assert engine.hit("a", token_ids=prompt(3)) == 0
    engine.scheduler.cleanup_lookup_result("a")
    engine.scheduler.cleanup_lookup_result("a")
    with pytest.raises(ValueError, match="'a' has no lookup"):
        engine.scheduler.check_lookup_result("a")


@pytest.mark.parametrize("mode", MODES)
def test_prompt_shorter_than_a_chunk_finds_nothing(
    mode: str, server: LocalServer, engine: Engine
) -> None:
    short = {"token_ids": prompt(CHUNK - 1)} if mode == "tokens" else {"block_hashes": hashes(3)}
    before = server.server.stats()["requests"]
    engine.scheduler.maybe_submit_lookup_request("a", **short)
    assert engine.scheduler.check_lookup_result("a") == 0
    engine.scheduler.maybe_submit_lookup_request("empty", token_ids=[])
    assert engine.scheduler.check_lookup_result("empty") == 0
    assert server.server.stats()["requests"] == before


def test_without_a_server_nothing_is_found(server: LocalServer, engine: Engine) -> None:
    with server.hanging():
        engine.scheduler.maybe_submit_lookup_request("before", token_ids=prompt(CHUNK))
        server.server.stop()
    assert answer(engine.scheduler, "before") == 0
    assert engine.hit("after", token_ids=prompt(CHUNK)) == 0


def test_server_that_hangs_finds_nothing(server: LocalServer, make_engine: Make) -> None:
    engine = make_engine(seed=1, lookup_s=0.0)
    engine.store("s", op("tokens", range(PER_CHUNK), 1))
    with server.hanging():
        engine.scheduler.maybe_submit_lookup_request("a", token_ids=prompt(CHUNK))
        assert engine.scheduler.check_lookup_result("a") == 0
    # The answer that came too late changes nothing, and locks nothing.
    other = make_engine()
    assert other.hit("b", token_ids=prompt(CHUNK)) == CHUNK
    other.scheduler.end_session("b")
    assert engine.scheduler.check_lookup_result("a") == 0
    until(lambda: server.stat("lent_bytes") == 0)


def test_tokens_that_are_none_find_nothing(engine: Engine) -> None:
    assert engine.hit("a", token_ids=[-1] * CHUNK) == 0
    assert engine.hit("b", block_hashes=[b""] * PER_CHUNK) == 0
    assert engine.hit("c", block_hashes=[b"x" * (MAX_HASH + 1)] * PER_CHUNK) == 0


def test_all_shards_make_a_hit(tmp_path: Path, make_engine: Make) -> None:
    engine = make_engine(seed=1, namespace=facts().namespace(chunk_size=CHUNK, shards=2))
    engine.store("s", op("tokens", range(2 * PER_CHUNK), 2))
    # A server of its own, whose memory holds nothing.
    with LocalServer(tmp_path / "other", posix(tmp_path / "shelf"), chunk_size=CHUNK) as other:
        chain = KeyChain(engine.worker.namespace.digest, CHUNK)
        chunks = chain.extend(prompt(2 * CHUNK))
        (*_, last) = names_of(engine.worker.fmt, chunks)
        path = tmp_path / "shelf" / last
        data = path.read_bytes()
        path.unlink()
        scheduler = SchedulerAdapter(other.url, engine.worker.namespace, BLOCK)
        for request_id, chunks_found in (("a", 1), ("b", 2)):
            scheduler.maybe_submit_lookup_request(request_id, token_ids=prompt(2 * CHUNK))
            assert answer(scheduler, request_id) == chunks_found * CHUNK
            path.write_bytes(data)
        scheduler.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_locks_are_freed_chunk_by_chunk(mode: str, server: LocalServer, engine: Engine) -> None:
    engine.store("s", op(mode, range(4 * PER_CHUNK), 4))
    until(lambda: server.stat("pinned_bytes") == 0)
    chunk_bytes = sum(
        -(-engine.worker.fmt.object_size(shard) // 4096) * 4096
        for shard in range(engine.worker.fmt.shards)
    )

    def until_locked(chunks: int) -> None:
        until(lambda: server.stat("lent_bytes") == chunks * chunk_bytes)

    assert engine.hit("a", **asked(mode, 4)) == 4 * CHUNK
    until_locked(4)
    engine.scheduler.cleanup_lookup_result("a")
    # A chunk of which only a part is freed is still wanted.
    engine.scheduler.free_lookup_locks(prompt(4 * CHUNK), 0, CHUNK - 1, "a")
    engine.scheduler.free_lookup_locks(token_ids=[], start=0, end=CHUNK + 3, request_id="a")
    until_locked(3)
    engine.scheduler.free_lookup_locks(start=CHUNK + 1, end=3 * CHUNK, request_id="a")
    until_locked(2)
    engine.scheduler.free_lookup_locks(request_id="a")
    until_locked(0)
    engine.scheduler.free_lookup_locks(request_id="a")
    engine.scheduler.free_lookup_locks(request_id="unknown")


def test_end_of_a_session_frees_all(server: LocalServer, engine: Engine) -> None:
    engine.store("s", op("tokens", range(2 * PER_CHUNK), 2))
    assert engine.hit("a", token_ids=prompt(2 * CHUNK)) == 2 * CHUNK
    until(lambda: server.stat("lent_bytes") > 0)
    engine.scheduler.end_session("a")
    engine.scheduler.end_session("a")
    engine.scheduler.end_session("unknown")
    until(lambda: server.stat("lent_bytes") == 0)
    # The session may end before the answer comes.
    with server.hanging():
        engine.scheduler.maybe_submit_lookup_request("b", token_ids=prompt(2 * CHUNK))
        engine.scheduler.end_session("b")
    engine.store("s", op("tokens", range(2 * PER_CHUNK), 2))
    assert server.stat("lent_bytes") == 0


@any_identity
def test_identity_separates_prompts(identity: PromptIdentity, engine: Engine) -> None:
    engine.worker.submit_store_request("s", WORK, None, identity=identity)
    engine.stored("s")
    assert engine.hit("a", token_ids=prompt(CHUNK)) == 0
    assert engine.hit("b", token_ids=prompt(CHUNK), identity=identity) == CHUNK
    engine.worker.batched_submit_retrieve_requests(["a", "b"], [WORK, WORK])
    assert engine.loaded("a", "b") == set(range(PER_CHUNK))
    engine.worker.batched_submit_retrieve_requests(["c"], [WORK], identities=[identity])
    assert engine.loaded("c") == set()
    engine.scheduler.end_session("b")


def test_tokens_that_the_engine_changes_afterwards_are_looked_up_as_they_were(
    server: LocalServer, engine: Engine
) -> None:
    engine.store("s", op("tokens", range(PER_CHUNK), 1))
    tokens = prompt(CHUNK)
    with server.hanging():
        engine.scheduler.maybe_submit_lookup_request("a", token_ids=tokens)
        tokens[0] += 1
    assert answer(engine.scheduler, "a") == CHUNK
    engine.scheduler.end_session("a")


def test_prompt_of_millions_of_tokens_is_looked_up_with_few_questions(
    server: LocalServer, engine: Engine
) -> None:
    before = server.server.stats()["requests"]
    assert engine.hit("a", block_hashes=[b"x" * MAX_HASH] * (20_000 * PER_CHUNK)) == 0
    assert server.server.stats()["requests"] - before < 20


# ------------------------------------------------------------------------------ worker


def test_all_requests_of_a_batch_keep_their_blocks(storage: FaultyStorage, engine: Engine) -> None:
    """The original knows only the first request of a batch, and releases the blocks of others."""
    gate = storage.hang("write")
    ids = ["a", "b", "c"]
    ops = [
        op("tokens", range(n * PER_CHUNK, (n + 1) * PER_CHUNK), 1, seed=n) for n in range(len(ids))
    ]
    engine.worker.batched_submit_store_requests(ids, ops, None)
    until(lambda: storage.counts["write"] > 0)
    assert engine.worker.get_finished({"b", "c", "other"}) == ({"other"}, set())
    assert engine.worker.get_finished({"a"}) == (set(), set())
    gate.set()
    engine.stored(*ids)


def test_blocks_of_a_batch_are_read_before_they_are_released(
    storage: FaultyStorage, make_engine: Make
) -> None:
    """The event has not passed: KV is still to be read from the blocks of all requests."""
    engine, other = make_engine(), make_engine()
    event = Event()
    ids = ["a", "b"]
    ops = [op("tokens", range(n * PER_CHUNK, (n + 1) * PER_CHUNK), 1, seed=n) for n in (0, 1)]
    engine.worker.batched_submit_store_requests(ids, ops, event)
    assert engine.worker.get_finished(set(ids)) == (set(), set())
    time.sleep(0.2)
    assert not storage.counts["write"]
    for name, computed in caches(1).items():
        engine.kv[name].copy_(computed)
    truth = engine.blocks(range(2 * PER_CHUNK)).clone()
    event.passed.set()
    engine.stored(*ids)
    # Released: other requests overwrite the blocks.
    for cache in engine.kv.values():
        cache.zero_()
    other.worker.batched_submit_retrieve_requests(ids, ops, None)
    assert other.loaded(*ids) == set()
    assert torch.equal(other.blocks(range(2 * PER_CHUNK)), truth)


def test_kv_is_copied_before_a_store_returns(make_engine: Make) -> None:
    """An engine that preempts a request overwrites its blocks without asking."""
    engine, other = make_engine(seed=1), make_engine()
    truth = engine.blocks(range(PER_CHUNK)).clone()
    passed = Event()
    passed.passed.set()
    engine.worker.submit_store_request("a", op("tokens", range(PER_CHUNK), 1), None)
    engine.worker.submit_store_request("b", op("tokens", range(PER_CHUNK), 1, seed=1), passed)
    for cache in engine.kv.values():
        cache.zero_()
    engine.stored("a", "b")
    for request_id, seed in (("a", 0), ("b", 1)):
        work = op("tokens", range(PER_CHUNK), 1, seed=seed)
        assert other.load(request_id, work) == set()
        assert torch.equal(other.blocks(range(PER_CHUNK)), truth)


def test_load_waits_for_its_event(make_engine: Make) -> None:
    one, other = make_engine(seed=1), make_engine()
    one.store("a", WORK)
    event = Event()
    other.worker.submit_retrieve_request("a", WORK, event)
    assert other.worker.get_finished(set()) == (set(), set())
    assert not other.blocks(range(PER_CHUNK)).any()
    event.passed.set()
    assert other.loaded("a") == set()
    assert torch.equal(other.blocks(range(PER_CHUNK)), one.blocks(range(PER_CHUNK)))


@pytest.fixture
def streams() -> Iterator[SimulatedStreams]:
    """All caches lie on a simulated device."""
    streams = SimulatedStreams()
    with (
        mock.patch.object(
            sources, "HostKVCache", lambda calls: DeviceKVCache(calls, streams=streams)
        ),
        closing(streams),
    ):
        yield streams


def test_on_a_device_copies_keep_the_order_of_the_engines_stream(
    streams: SimulatedStreams, make_engine: Make
) -> None:
    engine, truth = make_engine(), caches(1)
    ids = list(range(PER_CHUNK))
    work = op("tokens", ids, 1)
    streams.slow_down(streams.engine)

    def scatter_is_enqueued() -> bool:
        return any(
            stream is not streams.engine and any(kind == "record" for kind, _ in stream.entries)
            for stream in list(streams.streams)
        )

    with streams.hold():
        for name, cache in engine.kv.items():
            streams.do(cache.copy_, truth[name])
        engine.worker.submit_store_request("a", work, None)
        for cache in engine.kv.values():
            streams.do(cache.zero_)
        assert engine.worker.get_finished({"a"}) == (set(), set())
    engine.stored("a")
    with streams.hold():
        # The last work of another request, whose blocks these were.
        for cache in engine.kv.values():
            streams.do(cache.fill_, 5)
        engine.worker.submit_retrieve_request("a", work, None)
        until(scatter_is_enqueued)
        assert engine.worker.get_finished(set()) == (set(), set())
    assert engine.loaded("a") == set()
    streams.finish()
    assert torch.equal(engine.blocks(ids), torch.stack([truth[name][ids] for name in names()]))


def test_on_a_device_operations_follow_their_event(monkeypatch: pytest.MonkeyPatch) -> None:
    order = mock.Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", order.stream)
    event, device = Event(), torch.device("cuda", 0)
    # The stream waits for the event, and the step for nothing.
    assert worker_module._may_begin(event, device)
    assert [call[0] for call in order.mock_calls] == ["stream", "stream().wait_event"]
    assert order.mock_calls[1].args == (event,)
    assert not worker_module._may_begin(event, torch.device("cpu"))


def test_memory_through_which_a_gpu_stores_and_loads_is_page_locked(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to other memory would wait for the engine's stream."""
    monkeypatch.setattr(EngineCaches, "device", torch.device("cuda", 0))
    with fake_cudart() as runtime, Engine(caches(1), server.url) as engine:
        until(lambda: engine.worker._client.is_page_locked)
        assert sorted(runtime.registered.values()) == [MEMORY, server.arena.nbytes]


def test_device_that_failed_neither_stores_nor_loads(
    streams: SimulatedStreams, engine: Engine
) -> None:
    streams.fail()
    engine.worker.submit_store_request("a", WORK, None)
    engine.worker.submit_retrieve_request("a", WORK, None)
    engine.stored_and_loaded("a")
    assert engine.worker.get_block_ids_with_load_errors() == set(range(PER_CHUNK))


def test_failed_store_ends(storage: FaultyStorage, engine: Engine) -> None:
    storage.add(Fault("write", error=lambda: TransientStorageError("no")))
    engine.store("a", WORK)
    assert engine.hit("b", token_ids=prompt(CHUNK)) == 0


@pytest.mark.parametrize("where", ["gather", "wait", "seal"])
def test_any_error_in_one_chunk_ends_it_and_no_other(
    where: str,
    tmp_path: Path,
    make_engine: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(seed=1, namespace=facts().namespace(chunk_size=CHUNK, shards=1))
    real_gather, real_seal = HostKVCache.gather, ObjectFormat.seal
    calls = itertools.count()

    def fail_in(place: str) -> None:
        if place == where and next(calls) == 1:
            raise RuntimeError("broken")

    class Pending(PendingCopy):
        def wait(self, deadline: float | None = None) -> None:
            fail_in("wait")

    def gather(self: HostKVCache, *args: Any) -> PendingCopy:
        fail_in("gather")
        real_gather(self, *args)
        return Pending()

    def seal(self: ObjectFormat, *args: Any) -> None:
        fail_in("seal")
        real_seal(self, *args)

    monkeypatch.setattr(HostKVCache, "gather", gather)
    monkeypatch.setattr(ObjectFormat, "seal", seal)
    # Chunks that follow none.
    engine.store("a", op("hashes", range(3 * PER_CHUNK), 3))
    hits = [
        engine.hit(str(n), block_hashes=hashes(3 * PER_CHUNK)[n * PER_CHUNK :][:PER_CHUNK])
        for n in range(3)
    ]
    assert sorted(hits) == [0, CHUNK, CHUNK]
    for n in range(3):
        engine.scheduler.end_session(str(n))


@pytest.mark.parametrize("error", [RuntimeError("broken"), UnavailableStorageError("gone")])
def test_any_error_of_a_copy_is_a_load_error(
    error: Exception, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = op("tokens", range(2 * PER_CHUNK), 2)
    engine.store("s", work)
    real = HostKVCache.scatter

    def scatter(self: HostKVCache, shard: int, slots: torch.Tensor, *args: Any) -> None:
        if int(slots[0]) == CHUNK:
            raise error
        real(self, shard, slots, *args)

    monkeypatch.setattr(HostKVCache, "scatter", scatter)
    assert engine.load("a", work) == set(range(PER_CHUNK, 2 * PER_CHUNK))


def test_store_ends_when_the_server_dies(
    server: LocalServer, storage: FaultyStorage, engine: Engine
) -> None:
    gate = storage.hang("write")
    engine.worker.submit_store_request("a", op("tokens", range(PER_CHUNK), 1), None)
    until(lambda: storage.counts["write"] > 0)
    assert engine.worker.get_finished({"a"}) == (set(), set())
    server.server.stop()
    engine.stored("a")
    gate.set()
    until(lambda: "not connected" in repr(engine.worker))
    engine.worker.submit_store_request("b", op("tokens", range(PER_CHUNK), 1), None)
    assert engine.worker.get_finished({"b"}) == ({"b"}, set())


def test_server_that_hangs_ends_nothing_but_its_own_operations(
    server: LocalServer, make_engine: Make
) -> None:
    engine = make_engine(seed=1, timeout_s=0.2)
    make_engine(seed=1).store("before", WORK)
    until(lambda: server.stat("pinned_bytes") == 0)
    with server.hanging():
        engine.worker.submit_store_request("one", WORK, None)
        engine.worker.submit_retrieve_request("one", WORK, None)
        engine.stored_and_loaded("one")
        assert engine.worker.get_block_ids_with_load_errors() == set(range(PER_CHUNK))
        for cache in engine.kv.values():
            cache.zero_()
    # What arrives too late is not written: the blocks may belong to another request.
    until(lambda: server.stat("memory_hits") > 0 and server.stat("lent_bytes") == 0)
    assert not engine.blocks(range(PER_CHUNK)).any()


def test_chunks_without_room_are_not_stored(
    server: LocalServer, storage: FaultyStorage, make_engine: Make
) -> None:
    fmt = ObjectFormat(namespace())
    chunk_bytes = sum(-(-fmt.object_size(shard) // 4096) * 4096 for shard in range(fmt.shards))
    # Spare slots for three threads that load; stores have half of the rest.
    engine = make_engine(seed=1, memory_bytes=7 * chunk_bytes)
    gate = storage.hang("write")
    engine.worker.submit_store_request("a", op("tokens", range(4 * PER_CHUNK), 4), None)
    until(lambda: storage.counts["write"] > 0)
    gate.set()
    engine.stored("a")
    assert engine.hit("b", token_ids=prompt(4 * CHUNK)) == 2 * CHUNK
    engine.scheduler.end_session("b")


def test_load_that_cannot_begin_is_a_load_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise RuntimeError("no thread")

    engine.store("s", op("tokens", range(PER_CHUNK), 1))
    monkeypatch.setattr(engine.worker._transfers, "load", load)
    assert engine.load("a", op("tokens", range(PER_CHUNK), 1)) == set(range(PER_CHUNK))


def test_missing_chunks_are_load_errors(server: LocalServer, engine: Engine) -> None:
    engine.store("s", op("tokens", range(PER_CHUNK), 1))
    ids = list(range(20, 20 + 3 * PER_CHUNK))
    assert engine.load("a", op("tokens", ids, 3)) == set(ids[PER_CHUNK:])
    assert engine.worker.get_block_ids_with_load_errors() == set()
    server.server.stop()
    until(lambda: "not connected" in repr(engine.worker))
    engine.worker.submit_retrieve_request("b", op("tokens", ids, 3), None)
    assert engine.worker.get_finished(set()) == (set(), {"b"})
    assert engine.worker.get_block_ids_with_load_errors() == set(ids)


def test_first_tokens_of_a_load_are_skipped(make_engine: Make) -> None:
    one, other = make_engine(seed=1), make_engine()
    ids = list(range(2 * PER_CHUNK))
    work = op("tokens", ids, 2)
    work.skip_first_n_tokens = CHUNK + BLOCK
    # A store skips nothing.
    one.store("s", work)
    assert one.load("s", op("tokens", ids, 2)) == set()
    assert other.load("a", work) == set()
    skipped = PER_CHUNK + 1
    assert not other.blocks(ids[:skipped]).any()
    assert torch.equal(other.blocks(ids[skipped:]), one.blocks(ids[skipped:]))
    # Blocks that are not written cannot fail either.
    missing = op("tokens", ids, 2, seed=5)
    missing.skip_first_n_tokens = CHUNK + BLOCK
    assert other.load("b", missing) == set(ids[skipped:])
    missing.skip_first_n_tokens = 2 * CHUNK
    assert other.load("c", missing) == set()


def test_part_of_a_prompt(make_engine: Make) -> None:
    one, other = make_engine(seed=1), make_engine()
    ids = list(range(3 * PER_CHUNK))
    one.worker.submit_store_request("s", op("tokens", ids[:PER_CHUNK], 1), None)
    rest = op("tokens", ids[PER_CHUNK:], 2, first=1)
    rest.token_ids = prompt(3 * CHUNK)
    one.store("s", rest)
    other.worker.submit_retrieve_request("a", op("tokens", ids, 3), None)
    assert other.loaded("a") == set()


def test_operations_have_a_length_and_defaults() -> None:
    one = LoadStoreOp([1, 2, 3])
    assert len(one) == 3
    assert (one.token_ids, one.block_hashes, one.start, one.end) == (None, None, 0, 0)


BAD: list[tuple[LoadStoreOp, str]] = [
    (LoadStoreOp([0]), "neither of block_hashes and token_ids"),
    (LoadStoreOp([0], prompt(CHUNK), hashes(4)), "both of block_hashes and token_ids"),
    (LoadStoreOp([0], prompt(CHUNK), start=1, end=CHUNK), "multiple of the chunk size"),
    (LoadStoreOp([0], prompt(CHUNK), start=0, end=CHUNK + 1), "tokens 0 … 17 of 16"),
    (LoadStoreOp([0], prompt(CHUNK), start=CHUNK, end=0), "tokens 16 … 0"),
    (LoadStoreOp([0, 1], prompt(CHUNK), start=0, end=CHUNK), "2 blocks for 1 chunks"),
    (LoadStoreOp([0, 1], None, hashes(4)), "2 blocks for 1 chunks"),
    (LoadStoreOp([0, 1, 2, BLOCKS], prompt(CHUNK), end=CHUNK), "slot_mapping holds"),
    (LoadStoreOp([0, 1, 2, -1], prompt(CHUNK), end=CHUNK), "block id -1"),
    (LoadStoreOp([0, 1, 2, 3], None, [b""] * 4), "block hash of 0 bytes"),
]


@pytest.mark.parametrize(("bad", "text"), BAD)
@pytest.mark.parametrize("method", ["submit_store_request", "submit_retrieve_request"])
def test_malformed_operations_are_refused(
    method: str, bad: LoadStoreOp, text: str, engine: Engine
) -> None:
    with pytest.raises(ValueError, match=text):
        getattr(engine.worker, method)("a", bad, None)
    assert engine.worker.get_finished({"a"}) == ({"a"}, set())


def test_batches_have_equal_lengths(engine: Engine) -> None:
    with pytest.raises(ValueError, match="zip"):
        engine.worker.batched_submit_store_requests(["a", "b"], [LoadStoreOp([0])], None)
    with pytest.raises(ValueError, match="zip"):
        engine.worker.batched_submit_retrieve_requests(["a"], [], None)


@pytest.mark.parametrize("mode", MODES)
def test_operations_without_a_whole_chunk_end(mode: str, engine: Engine) -> None:
    short = LoadStoreOp([0, 1], prompt(7), end=7) if mode == "tokens" else op(mode, [], 0)
    engine.worker.submit_store_request("a", short, None)
    engine.worker.submit_retrieve_request("a", short, None)
    assert engine.worker.get_finished({"a"}) == ({"a"}, {"a"})


def test_caches_are_registered_first(server: LocalServer) -> None:
    worker = WorkerAdapter(server.url, namespace(), BLOCK, memory_bytes=MEMORY)
    with pytest.raises(ValueError, match="register_kv_caches first"):
        worker.submit_store_request("a", op("tokens", range(PER_CHUNK), 1), None)
    with pytest.raises(ConfigError, match="needs layout"):
        worker.register_kv_caches(caches())
    worker.shutdown()


def test_caches_fit_the_namespace(server: LocalServer) -> None:
    worker = WorkerAdapter(server.url, namespace(), BLOCK, memory_bytes=MEMORY)
    kv = caches()
    with pytest.raises(ConfigError, match=r"layers\.2\.self_attn"):
        worker.register_kv_caches({name: kv[name] for name in names(2)}, layout_of(kv))
    half = caches(heads=HEADS // 2)
    with pytest.raises(ConfigError, match="2 KV heads"):
        worker.register_kv_caches(half, layout_of(half))
    floats = {name: cache.float() for name, cache in kv.items()}
    with pytest.raises(ConfigError):
        worker.register_kv_caches(floats, layout_of(floats))
    by_layer = {name: layout_of(kv) for name in kv}
    worker.register_kv_caches(kv, by_layer)
    with pytest.raises(ValueError, match="registered already"):
        worker.register_kv_caches(kv, by_layer)
    worker.shutdown()


def test_each_rank_stores_and_loads_its_heads(server: LocalServer) -> None:
    """Keys hold no rank: two ranks store what one loads, and the other way round."""
    space = namespace()
    shards = ObjectFormat(space).shards
    whole = Engine(caches(1), server.url)
    topology = Topology(HEADS, shards, tensor_parallel=2)
    ranks = []
    for rank in range(2):
        heads = slice(rank * HEADS // 2, (rank + 1) * HEADS // 2)
        kv = {name: cache[:, heads].contiguous() for name, cache in whole.kv.items()}
        worker = WorkerAdapter(
            server.url, space, BLOCK, plan=topology.plan(rank), memory_bytes=MEMORY
        )
        worker.register_kv_caches(kv, layout_of(kv))
        ranks.append((worker, kv))
    work = op("tokens", range(2 * PER_CHUNK), 2)
    for number, (worker, _) in enumerate(ranks):
        worker.submit_store_request("a", work, None)
        until(lambda one=worker: one.get_finished({"a"})[0] == {"a"})
        assert whole.hit(f"after {number}", token_ids=prompt(2 * CHUNK)) == number * 2 * CHUNK
    into = caches()
    loader = Engine(into, server.url)
    assert loader.load("l", work) == set()
    assert torch.equal(loader.blocks(range(2 * PER_CHUNK)), whole.blocks(range(2 * PER_CHUNK)))
    for worker, kv in ranks:
        truth = {name: cache.clone() for name, cache in kv.items()}
        for cache in kv.values():
            cache.zero_()
        worker.submit_retrieve_request("l", work, None)
        until(lambda one=worker: one.get_finished(set())[1] == {"l"})
        for name, cache in kv.items():
            used = list(range(2 * PER_CHUNK))
            assert torch.equal(cache[used], truth[name][used])
        worker.shutdown()
    for engine in (whole, loader):
        engine.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_replicas_share_the_chunks_of_a_prompt(
    mode: str, server: LocalServer, make_engine: Make
) -> None:
    workers = [
        make_engine(
            seed=1,
            plan=ShardPlan(ShardPlan.whole(HEADS).shards, replicas=2, replica=replica),
            namespace=facts().namespace(chunk_size=CHUNK, shards=HEADS),
        )
        for replica in range(2)
    ]
    for engine in workers:
        engine.store("a", op(mode, range(8 * PER_CHUNK), 8))
    assert server.stat("stored_objects") == 8 * HEADS
    assert workers[0].hit("b", **asked(mode, 8)) == 8 * CHUNK
    workers[0].scheduler.end_session("b")


def test_shutdown_waits_for_stores_and_then_touches_nothing(
    server: LocalServer, storage: FaultyStorage
) -> None:
    engine = Engine(caches(1), server.url)
    gate = storage.hang("write")
    engine.worker.submit_store_request("a", op("tokens", range(PER_CHUNK), 1), None)
    until(lambda: storage.counts["write"] > 0)
    closing = threading.Thread(target=engine.worker.shutdown)
    closing.start()
    gate.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert engine.worker.get_finished({"a"}) == ({"a"}, set())
    engine.worker.shutdown()
    with pytest.raises(ValueError, match="was shut down"):
        engine.worker.submit_store_request("b", op("tokens", range(PER_CHUNK), 1), None)
    engine.scheduler.shutdown()
    engine.scheduler.shutdown()


def test_shutdown_does_not_wait_for_a_server_that_hangs(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "DRAIN_SECONDS", 0.05)
    engine = Engine(caches(1), server.url)
    with server.hanging():
        engine.worker.submit_store_request("a", op("tokens", range(PER_CHUNK), 1), None)
        engine.worker.submit_retrieve_request("b", op("tokens", range(PER_CHUNK), 1), None)
        engine.worker.shutdown()
        assert engine.worker.get_finished({"a"}) == ({"a"}, {"b"})
    engine.scheduler.shutdown()
