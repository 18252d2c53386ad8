"""The adapters against a node server that answers when the test says so."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch

from kvshelf import ModelFacts, PromptIdentity
from kvshelf.adapters import connection as connection_module
from kvshelf.adapters import worker as worker_module
from kvshelf.adapters.connection import AdapterThreads
from kvshelf.adapters.copies import EngineCaches
from kvshelf.adapters.names import MAX_HASH
from kvshelf.errors import ConfigError, UnavailableStorageError, UnsupportedError
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv import sources
from kvshelf.kv.caches import DONE, HostKVCache, PendingCopy
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.topology import ShardPlan, Topology
from kvshelf.server.client import (
    LoadStoreOp,
    SchedulerAdapter,
    WorkerAdapter,
    striding_block_hashes,
)
from tests.adapters.standin import ScriptedChannel
from tests.sim.device import SimulatedStreams
from tests.support.fake_cudart import fake_cudart
from tests.support.prompts import any_identity, prompt
from tests.support.waiting import until

LAYERS, HEADS, SIZE, CHUNK, BLOCK, BLOCKS = 3, 4, 8, 16, 4, 64
PER_CHUNK = CHUNK // BLOCK
URL = "ipc:///not/used"


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
def channel() -> ScriptedChannel:
    return ScriptedChannel(CHUNK)


def answer(scheduler: SchedulerAdapter, request_id: str) -> int:
    """Wait for the answer to a lookup."""
    until(lambda: scheduler.check_lookup_result(request_id) is not None)
    found = scheduler.check_lookup_result(request_id)
    assert found is not None
    return found


class Engine:
    """The adapters of one engine with one worker, and the worker's caches."""

    def __init__(
        self, kv: dict[str, torch.Tensor], channel: Any = None, url: str = URL, **options: Any
    ) -> None:
        self.kv = kv
        space = options.pop("namespace", None) or namespace()
        self.scheduler = SchedulerAdapter(
            url, space, BLOCK, channel=channel, timeout_s=options.pop("lookup_s", 30.0)
        )
        self.worker = WorkerAdapter(url, space, BLOCK, channel=channel, **options)
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
def make_engine(channel: ScriptedChannel) -> Iterator[Make]:
    made: list[Engine] = []

    def make(seed: int | None = None, **options: Any) -> Engine:
        made.append(Engine(caches(seed), channel, **options))
        return made[-1]

    yield make
    channel.holding = ()
    channel.answer()
    for engine in made:
        engine.shutdown()
    assert channel.segment.reserve(channel.segment.nbytes) is not None, "parts are in use"
    # A load has ended when its last chunk is there: what it leased may go back a moment later.
    until(lambda: all(loan.released for loan in channel.loans))
    assert all(loan.released == 1 for loan in channel.loans)
    # What was leased for lookups was let go of.
    assert not channel.sessions


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


def test_modes_are_domains_of_their_own(channel: ScriptedChannel, engine: Engine) -> None:
    ids = list(range(PER_CHUNK))
    engine.worker.submit_store_request("h", op("hashes", ids, 1), None)
    engine.worker.submit_store_request("t", op("tokens", ids, 1), None)
    engine.stored("h", "t")
    by_mode = {store.memory_only: store for store in channel.stores}
    digest = engine.worker.namespace.digest.hex()
    assert by_mode[True].name.startswith(f"hash/{digest}/")
    assert by_mode[False].name.startswith(engine.worker.namespace.folder + "/")
    # The hash of the chunk's last block.
    assert hashes(PER_CHUNK)[-1].hex() in by_mode[True].name


def test_hashes_of_another_model_find_nothing(channel: ScriptedChannel, make_engine: Make) -> None:
    one = make_engine(seed=1)
    one.store("a", op("hashes", range(PER_CHUNK), 1))
    other = make_engine(namespace=namespace(weights="name:other"))
    assert one.hit("b", **asked("hashes", 1)) == CHUNK
    assert other.hit("b", **asked("hashes", 1)) == 0


def test_chunks_named_by_hashes_say_what_comes_before_them(
    channel: ScriptedChannel, make_engine: Make
) -> None:
    """The server keeps the beginnings of prompts longest, and cannot tell from hashes."""
    engine = make_engine(seed=1, namespace=facts().namespace(chunk_size=CHUNK, shards=1))
    for first, chunks in ((0, 2), (2, 1)):
        work = op("hashes", range(chunks * PER_CHUNK), chunks, first=first)
        engine.worker.submit_store_request("a", work)
    engine.stored("a")
    stores = {store.name: store for store in channel.stores}
    ends = [one.hex() for one in striding_block_hashes(hashes(3 * PER_CHUNK), PER_CHUNK)]
    found = [next(name for name in stores if end in name) for end in ends]
    assert [stores[name].parent for name in found] == ["", *found[:-1]]
    engine.store("t", op("tokens", range(PER_CHUNK), 1))
    assert channel.stores[-1].parent == ""
    # Request "a" has finished: another one of this name begins anew.
    engine.store("a", op("hashes", range(PER_CHUNK), 1, seed=1))
    assert channel.stores[-1].parent == ""


def test_last_hash_of_each_chunk_is_taken() -> None:
    many = [bytes([number]) for number in range(11)]
    assert striding_block_hashes(many, 4) == [bytes([3]), bytes([7])]
    assert striding_block_hashes(many, 1) == many
    assert striding_block_hashes(many[:3], 4) == []


def test_chunk_size_is_the_servers(channel: ScriptedChannel) -> None:
    scheduler = SchedulerAdapter(URL, facts(), BLOCK, channel=channel)
    assert scheduler.chunk_size == CHUNK
    assert scheduler.num_blocks_per_chunk() == scheduler.blocks_in_chunk == PER_CHUNK
    worker = WorkerAdapter(URL, facts(), CHUNK, channel=channel)
    assert worker.num_blocks_per_chunk() == 1
    scheduler.shutdown()
    worker.shutdown()
    assert not channel.closed  # its owner closes it


def test_adapters_say_what_they_are(channel: ScriptedChannel) -> None:
    space = namespace()
    scheduler = SchedulerAdapter(URL, space, BLOCK, channel=channel)
    assert repr(scheduler) == f"<SchedulerAdapter of {URL}, {space.folder}, connected>"
    channel.connected = False
    assert repr(scheduler).endswith(", not connected>")


@pytest.mark.parametrize("adapter", [SchedulerAdapter, WorkerAdapter])
@pytest.mark.parametrize("block_size", [0, 5, 32])
def test_chunk_size_is_a_multiple_of_the_block_size(
    adapter: type[Any], block_size: int, channel: ScriptedChannel
) -> None:
    with pytest.raises(ValueError, match=f"is {CHUNK}.*size {block_size}.*KVSHELF_CHUNK_SIZE"):
        adapter(URL, facts(), block_size, channel=channel)


def test_namespace_has_the_servers_chunk_size(channel: ScriptedChannel) -> None:
    with pytest.raises(ConfigError, match=r"server is 16 tokens.*namespace is 32"):
        SchedulerAdapter(URL, facts().namespace(chunk_size=32), BLOCK, channel=channel)


def test_without_a_server_there_is_no_chunk_size(
    channel: ScriptedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "CONNECT_SECONDS", 0.0)
    channel.connected, channel.welcome = False, None
    with pytest.raises(UnavailableStorageError, match="chunk size is not known"):
        SchedulerAdapter(URL, facts(), BLOCK, channel=channel)
    engine = Engine(caches(1), channel)
    assert engine.hit("a", token_ids=prompt(CHUNK)) == 0
    engine.store("a", op("tokens", range(PER_CHUNK), 1))
    channel.welcome = ScriptedChannel(CHUNK).welcome
    channel.come_back()
    engine.store("b", op("tokens", range(PER_CHUNK), 1))
    assert engine.hit("b", token_ids=prompt(CHUNK)) == CHUNK
    engine.shutdown()


def test_server_that_comes_back_is_told_the_namespace(
    channel: ScriptedChannel, engine: Engine
) -> None:
    space = engine.worker.namespace
    for _ in range(2):
        engine.store("t", op("tokens", range(PER_CHUNK), 1))
        channel.lose()
        channel.come_back()
        assert list(channel.formats) == [space.digest.hex()[:16]]


# ------------------------------------------------------------------------------ scheduler


@pytest.mark.parametrize("mode", MODES)
def test_lookup_is_submitted_once(mode: str, channel: ScriptedChannel, engine: Engine) -> None:
    channel.holding = ("LookUpChunks",)
    engine.scheduler.maybe_submit_lookup_request("a", **asked(mode, 2))
    until(lambda: len(channel.held) == 1)
    # The second call with an id returns whatever its arguments.
    engine.scheduler.maybe_submit_lookup_request("a", None, None)
    engine.scheduler.maybe_submit_lookup_request("a", hashes(4), prompt(4))
    engine.scheduler.maybe_submit_lookup_request("a", **asked(mode, 3))
    assert engine.scheduler.check_lookup_result("a") is None
    channel.answer()
    assert answer(engine.scheduler, "a") == 0
    assert not channel.held


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
    mode: str, channel: ScriptedChannel, engine: Engine
) -> None:
    channel.holding = ("LookUpChunks",)
    short = {"token_ids": prompt(CHUNK - 1)} if mode == "tokens" else {"block_hashes": hashes(3)}
    engine.scheduler.maybe_submit_lookup_request("a", **short)
    assert engine.scheduler.check_lookup_result("a") == 0
    engine.scheduler.maybe_submit_lookup_request("empty", token_ids=[])
    assert engine.scheduler.check_lookup_result("empty") == 0
    assert not channel.held


def test_without_a_server_nothing_is_found(channel: ScriptedChannel, engine: Engine) -> None:
    channel.holding = ("LookUpChunks",)
    engine.scheduler.maybe_submit_lookup_request("before", token_ids=prompt(CHUNK))
    until(lambda: bool(channel.held))
    channel.lose()
    assert answer(engine.scheduler, "before") == 0
    assert engine.hit("after", token_ids=prompt(CHUNK)) == 0


def test_server_that_hangs_finds_nothing(channel: ScriptedChannel, make_engine: Make) -> None:
    engine = make_engine(seed=1, lookup_s=0.0)
    engine.store("s", op("tokens", range(PER_CHUNK), 1))
    channel.holding = ("LookUpChunks",)
    engine.scheduler.maybe_submit_lookup_request("a", token_ids=prompt(CHUNK))
    until(lambda: bool(channel.held))
    assert engine.scheduler.check_lookup_result("a") == 0
    channel.answer()
    # The answer that came too late changes nothing, and what it leased is let go of.
    until(lambda: "a" in channel.ended)
    assert engine.scheduler.check_lookup_result("a") == 0


def test_tokens_that_are_none_find_nothing(engine: Engine) -> None:
    assert engine.hit("a", token_ids=[-1] * CHUNK) == 0
    assert engine.hit("b", block_hashes=[b""] * PER_CHUNK) == 0
    assert engine.hit("c", block_hashes=[b"x" * (MAX_HASH + 1)] * PER_CHUNK) == 0


def test_all_shards_of_all_kinds_make_a_hit(channel: ScriptedChannel, make_engine: Make) -> None:
    hybrid = facts(
        layers=3,
        kinds=("full", "window", "full"),
        sliding_windows=(-1, 16, -1),
    ).namespace(chunk_size=CHUNK, shards=2)
    scheduler = SchedulerAdapter(URL, hybrid, BLOCK, channel=channel)
    asked_for: list[list[list[str]]] = []
    serve = channel.serve

    def spy(message: Any) -> Any:
        asked_for.append(getattr(message, "chains", []))
        return serve(message)

    channel.serve = spy  # type: ignore[method-assign]

    def hit(request_id: str) -> int:
        scheduler.maybe_submit_lookup_request(request_id, token_ids=prompt(2 * CHUNK))
        found = answer(scheduler, request_id)
        scheduler.end_session(request_id)
        return found

    assert hit("a") == 0
    [chains] = asked_for
    shards = {kind: scheduler.fmt.of(kind).shards for kind in scheduler.fmt.kinds}
    assert shards.keys() == {"full", "window"}
    assert [len(set(chain)) for chain in chains] == [sum(shards.values())] * 2
    for name in chains[0]:
        assert hit(f"without {name}") == 0
        channel.objects[name] = b""
    assert hit("b") == CHUNK
    with pytest.raises(UnsupportedError, match="full, window"):
        WorkerAdapter(URL, hybrid, BLOCK, channel=channel)
    scheduler.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_locks_are_freed_chunk_by_chunk(
    mode: str, channel: ScriptedChannel, engine: Engine
) -> None:
    engine.store("s", op(mode, range(4 * PER_CHUNK), 4))

    def held() -> int:
        return sum(map(len, channel.sessions.values())) // engine.worker.fmt.shards

    assert engine.hit("a", **asked(mode, 4)) == 4 * CHUNK
    assert held() == 4
    engine.scheduler.cleanup_lookup_result("a")
    assert held() == 4
    # A chunk of which only a part is freed is still wanted.
    engine.scheduler.free_lookup_locks(prompt(4 * CHUNK), 0, CHUNK - 1, "a")
    assert held() == 4
    engine.scheduler.free_lookup_locks(token_ids=[], start=0, end=CHUNK + 3, request_id="a")
    assert held() == 3
    engine.scheduler.free_lookup_locks(start=CHUNK + 1, end=3 * CHUNK, request_id="a")
    assert held() == 2
    engine.scheduler.free_lookup_locks(request_id="a")
    assert held() == 0
    engine.scheduler.free_lookup_locks(request_id="a")
    engine.scheduler.free_lookup_locks(request_id="unknown")


def test_end_of_a_session_frees_all(channel: ScriptedChannel, engine: Engine) -> None:
    engine.store("s", op("tokens", range(2 * PER_CHUNK), 2))
    assert engine.hit("a", token_ids=prompt(2 * CHUNK)) == 2 * CHUNK
    engine.scheduler.free_lookup_locks(start=0, end=CHUNK, request_id="a")
    engine.scheduler.end_session("a")
    engine.scheduler.end_session("a")
    engine.scheduler.end_session("unknown")
    assert not channel.sessions
    # The session may end before the answer comes.
    channel.holding = ("LookUpChunks",)
    engine.scheduler.maybe_submit_lookup_request("b", token_ids=prompt(2 * CHUNK))
    until(lambda: bool(channel.held))
    engine.scheduler.end_session("b")
    channel.answer()
    until(lambda: not channel.sessions)


@pytest.mark.parametrize("answers", [0, 1])
def test_session_that_ends_while_a_part_of_it_is_freed_leaves_no_lease(
    answers: int, channel: ScriptedChannel, engine: Engine
) -> None:
    engine.store("s", op("tokens", range(2 * PER_CHUNK), 2))
    assert engine.hit("a", token_ids=prompt(2 * CHUNK)) == 2 * CHUNK
    channel.holding = ("LookUpChunks",)
    # What is kept is leased in another session, and then again in this one.
    engine.scheduler.free_lookup_locks(start=0, end=CHUNK, request_id="a")
    for _ in range(answers):
        channel.held.pop()()
    engine.scheduler.end_session("a")
    while channel.held:
        channel.answer()
    assert not channel.sessions


def test_what_is_held_is_forgotten_with_its_leases(
    channel: ScriptedChannel, make_engine: Make
) -> None:
    channel.change_welcome(lease_seconds=0.0)
    engine = make_engine(lookup_s=0.0)
    for number in range(8):
        engine.scheduler.maybe_submit_lookup_request(str(number), token_ids=prompt(CHUNK))
    channel.ended.clear()
    for number in range(8):
        engine.scheduler.end_session(str(number))
    assert channel.ended == ["7"]


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
    channel: ScriptedChannel, engine: Engine
) -> None:
    engine.store("s", op("tokens", range(PER_CHUNK), 1))
    tokens = prompt(CHUNK)
    engine.scheduler.maybe_submit_lookup_request("a", token_ids=tokens)
    tokens[0] += 1
    assert answer(engine.scheduler, "a") == CHUNK
    # Its load ends the leases of the lookup.
    assert channel.sessions
    assert engine.load("a", op("tokens", range(PER_CHUNK), 1)) == set()
    assert not channel.sessions


def test_prompt_of_millions_of_tokens_is_looked_up_in_part(
    channel: ScriptedChannel, engine: Engine
) -> None:
    asked_for: list[int] = []
    serve = channel.serve

    def spy(message: Any) -> Any:
        asked_for.append(len(message.chains))
        return serve(message)

    channel.serve = spy  # type: ignore[method-assign]
    assert engine.hit("a", block_hashes=[b"x" * MAX_HASH] * (20_000 * PER_CHUNK)) == 0
    assert 1000 < asked_for[0] <= 8192


# ------------------------------------------------------------------------------ worker


def test_all_requests_of_a_batch_keep_their_blocks(
    channel: ScriptedChannel, engine: Engine
) -> None:
    """The original knows only the first request of a batch, and releases the blocks of others."""
    channel.holding = ("Store",)
    ids = ["a", "b", "c"]
    ops = [
        op("tokens", range(n * PER_CHUNK, (n + 1) * PER_CHUNK), 1, seed=n) for n in range(len(ids))
    ]
    engine.worker.batched_submit_store_requests(ids, ops, None)
    until(lambda: len(channel.held) == 3 * engine.worker.fmt.shards)
    assert engine.worker.get_finished({"b", "c", "other"}) == ({"other"}, set())
    assert engine.worker.get_finished({"a"}) == (set(), set())
    channel.answer()
    engine.stored(*ids)


def test_blocks_of_a_batch_are_read_before_they_are_released(
    channel: ScriptedChannel, make_engine: Make
) -> None:
    """The event has not passed: KV is still to be read from the blocks of all requests."""
    engine, other = make_engine(), make_engine()
    event = Event()
    ids = ["a", "b"]
    ops = [op("tokens", range(n * PER_CHUNK, (n + 1) * PER_CHUNK), 1, seed=n) for n in (0, 1)]
    engine.worker.batched_submit_store_requests(ids, ops, event)
    assert engine.worker.get_finished(set(ids)) == (set(), set())
    time.sleep(1.0)
    assert not channel.stores
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


def test_on_a_device_a_store_follows_its_event(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = mock.Mock()
    order.gather.return_value = DONE
    monkeypatch.setattr(EngineCaches, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "current_stream", order.stream)
    monkeypatch.setattr(HostKVCache, "gather", order.gather)
    event = Event()
    engine.worker.submit_store_request("a", op("tokens", range(PER_CHUNK), 1), event)
    # The stream waits for the event, and the step for nothing.
    assert [call[0] for call in order.mock_calls] == ["stream", "stream().wait_event", "gather"]
    assert order.mock_calls[1].args == (event,)


def test_memory_through_which_a_gpu_stores_and_loads_is_page_locked(
    channel: ScriptedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to other memory would wait for the engine's stream."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(EngineCaches, "device", device)
    with fake_cudart() as runtime, Engine(caches(1), channel):
        part = channel.segment.reserve(5000)
        assert part is not None
        assert runtime.holds(part.view)
        part.release()
        channel.segment.close()
    assert channel.locked_for == [device]


def test_device_that_failed_neither_stores_nor_loads(
    streams: SimulatedStreams, engine: Engine
) -> None:
    streams.fail()
    engine.worker.submit_store_request("a", WORK, None)
    engine.worker.submit_retrieve_request("a", WORK, None)
    engine.stored_and_loaded("a")
    assert engine.worker.get_block_ids_with_load_errors() == set(range(PER_CHUNK))


def test_failed_store_ends(channel: ScriptedChannel, engine: Engine) -> None:
    engine.store("probe", WORK)
    channel.refuses = {store.name for store in channel.stores}
    engine.store("a", WORK)


@pytest.mark.parametrize("where", ["gather", "wait", "seal"])
def test_any_error_in_one_chunk_ends_it_and_no_other(
    where: str,
    channel: ScriptedChannel,
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
        def wait(self) -> None:
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
    engine.store("a", op("tokens", range(3 * PER_CHUNK), 3))
    assert len(channel.objects) == 2


@pytest.mark.parametrize("error", [RuntimeError("broken"), UnavailableStorageError("gone")])
def test_any_error_of_a_copy_is_a_load_error(
    error: Exception, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = op("tokens", range(2 * PER_CHUNK), 2)
    engine.store("s", work)
    real = HostKVCache.scatter

    def scatter(self: HostKVCache, shard: int, slots: torch.Tensor, *args: Any) -> None:
        if int(slots[0]) == 0:
            raise error
        real(self, shard, slots, *args)

    monkeypatch.setattr(HostKVCache, "scatter", scatter)
    assert engine.load("a", work) == set(range(PER_CHUNK))


def test_store_ends_when_the_server_dies(channel: ScriptedChannel, engine: Engine) -> None:
    channel.holding = ("Store",)
    engine.worker.submit_store_request("a", op("tokens", range(PER_CHUNK), 1), None)
    until(lambda: bool(channel.held))
    assert engine.worker.get_finished({"a"}) == (set(), set())
    channel.lose()
    engine.stored("a")
    engine.worker.submit_store_request("b", op("tokens", range(PER_CHUNK), 1), None)
    assert engine.worker.get_finished({"b"}) == ({"b"}, set())


def test_server_that_hangs_ends_nothing_but_its_own_operations(
    channel: ScriptedChannel, make_engine: Make
) -> None:
    engine = make_engine(seed=1, timeout_s=0.2)
    make_engine(seed=1).store("before", WORK)
    channel.holding = ("Store", "Fetch")
    engine.worker.submit_store_request("one", WORK, None)
    engine.worker.submit_retrieve_request("one", WORK, None)
    until(lambda: len(channel.held) == 2 * engine.worker.fmt.shards)
    engine.stored_and_loaded("one")
    assert engine.worker.get_block_ids_with_load_errors() == set(range(PER_CHUNK))
    for cache in engine.kv.values():
        cache.zero_()
    channel.answer()
    # What arrives too late is not written: the blocks may belong to another request.
    until(lambda: bool(channel.loans) and all(loan.released for loan in channel.loans))
    assert not engine.blocks(range(PER_CHUNK)).any()


def test_chunks_without_room_are_not_stored() -> None:
    fmt = ObjectFormat(namespace())
    pages = sum(-(-fmt.object_size(shard) // 4096) for shard in range(fmt.shards))
    channel = ScriptedChannel(CHUNK, segment_bytes=2 * 4096 * pages)
    channel.holding = ("Store",)
    with Engine(caches(1), channel) as engine:
        engine.worker.submit_store_request("a", op("tokens", range(4 * PER_CHUNK), 4), None)
        until(lambda: len(channel.held) == 2 * fmt.shards)
        channel.answer()
        engine.stored("a")
        assert engine.hit("b", token_ids=prompt(4 * CHUNK)) == 2 * CHUNK


def test_missing_chunks_are_load_errors(channel: ScriptedChannel, engine: Engine) -> None:
    engine.store("s", op("tokens", range(PER_CHUNK), 1))
    ids = list(range(20, 20 + 3 * PER_CHUNK))
    assert engine.load("a", op("tokens", ids, 3)) == set(ids[PER_CHUNK:])
    assert engine.worker.get_block_ids_with_load_errors() == set()
    channel.lose()
    engine.worker.submit_retrieve_request("b", op("tokens", ids, 3), None)
    assert engine.worker.get_finished(set()) == (set(), {"b"})
    assert engine.worker.get_block_ids_with_load_errors() == set(ids)


def test_lease_that_expired_is_a_load_error(channel: ScriptedChannel, engine: Engine) -> None:
    engine.store("s", WORK)
    event = Event()
    engine.worker.submit_retrieve_request("a", WORK, event)
    until(lambda: bool(channel.loans))
    for loan in channel.loans:
        loan.good = False
    event.passed.set()
    assert engine.loaded("a") == set(range(PER_CHUNK))


@pytest.mark.parametrize("mode", MODES)
def test_another_object_is_a_load_error(
    mode: str, channel: ScriptedChannel, engine: Engine
) -> None:
    work = op(mode, range(PER_CHUNK), 1)
    engine.store("0", work)
    engine.store("1", op(mode, range(PER_CHUNK), 1, seed=1))
    first, second = list(channel.objects)[:: engine.worker.fmt.shards][:2]
    # Objects that hashes name do not say what they are, but how long they are.
    channel.objects[first] = channel.objects[second] + bytes(mode == "hashes")
    assert engine.load("a", work) == set(range(PER_CHUNK))


def test_first_tokens_of_a_load_are_skipped(channel: ScriptedChannel, make_engine: Make) -> None:
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
    channel.objects.clear()
    assert other.load("b", work) == set(ids[skipped:])


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


def test_caches_are_registered_first(channel: ScriptedChannel) -> None:
    worker = WorkerAdapter(URL, namespace(), BLOCK, channel=channel)
    with pytest.raises(ValueError, match="register_kv_caches first"):
        worker.submit_store_request("a", op("tokens", range(PER_CHUNK), 1), None)
    with pytest.raises(ConfigError, match="needs layout"):
        worker.register_kv_caches(caches())
    worker.shutdown()


def test_caches_fit_the_namespace(channel: ScriptedChannel) -> None:
    worker = WorkerAdapter(URL, namespace(), BLOCK, channel=channel)
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
    worker.shutdown()


def test_each_rank_stores_and_loads_its_heads(channel: ScriptedChannel) -> None:
    """Keys hold no rank: two ranks store what one loads, and the other way round."""
    space = namespace()
    shards = WorkerAdapter(URL, space, BLOCK, channel=channel).fmt.shards
    whole = Engine(caches(1), channel)
    topology = Topology(HEADS, shards, tensor_parallel=2)
    ranks = []
    for rank in range(2):
        heads = slice(rank * HEADS // 2, (rank + 1) * HEADS // 2)
        kv = {name: cache[:, heads].contiguous() for name, cache in whole.kv.items()}
        worker = WorkerAdapter(URL, space, BLOCK, plan=topology.plan(rank), channel=channel)
        worker.register_kv_caches(kv, layout_of(kv))
        ranks.append((worker, kv))
    work = op("tokens", range(2 * PER_CHUNK), 2)
    for number, (worker, _) in enumerate(ranks):
        worker.submit_store_request("a", work, None)
        until(lambda one=worker: one.get_finished({"a"})[0] == {"a"})
        assert whole.hit(f"after {number}", token_ids=prompt(2 * CHUNK)) == number * 2 * CHUNK
    into = caches()
    loader = Engine(into, channel)
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
    mode: str, channel: ScriptedChannel, make_engine: Make
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
    assert len(channel.stores) == len(channel.objects) == 8 * HEADS
    assert workers[0].hit("b", **asked(mode, 8)) == 8 * CHUNK
    workers[0].scheduler.end_session("b")


@pytest.mark.parametrize("window", [3, 0])
def test_load_leases_a_part_of_the_memory_at_a_time_or_one_object(
    window: int, channel: ScriptedChannel, engine: Engine
) -> None:
    ids = range(8 * PER_CHUNK)
    engine.store("s", op("tokens", ids, 8))
    channel.change_welcome(arena_bytes=8 * window * engine.worker.fmt.object_size(0))
    channel.holding = ("Fetch",)
    most = max(1, window)
    engine.worker.submit_retrieve_request("a", op("tokens", ids, 8), None)
    until(lambda: len(channel.held) == most)
    for _ in range(8 * engine.worker.fmt.shards):
        until(lambda: bool(channel.held))
        assert len(channel.held) <= most
        channel.held.pop()()
    assert engine.loaded("a") == set()


def test_load_that_is_out_of_time_asks_for_nothing_more(
    channel: ScriptedChannel, make_engine: Make
) -> None:
    engine = make_engine(seed=1, timeout_s=0.2)
    make_engine(seed=1).store("s", op("tokens", range(8 * PER_CHUNK), 8))
    channel.change_welcome(arena_bytes=8 * engine.worker.fmt.object_size(0))
    channel.holding = ("Fetch",)
    assert engine.load("a", op("tokens", range(8 * PER_CHUNK), 8)) == set(range(8 * PER_CHUNK))
    channel.answer()
    until(lambda: bool(channel.loans) and all(loan.released for loan in channel.loans))
    assert len(channel.fetches) == len(channel.loans) == 1


def test_thread_of_an_adapter_outlives_an_error() -> None:
    threads, done = AdapterThreads(1, mock.Mock()), threading.Event()
    for work in (mock.Mock(side_effect=RuntimeError), done.set):
        threads.put(work)
    assert done.wait(30)
    threads.close()


def test_shutdown_waits_for_stores_and_then_touches_nothing(channel: ScriptedChannel) -> None:
    engine = Engine(caches(1), channel)
    channel.holding = ("Store",)
    engine.worker.submit_store_request("a", op("tokens", range(PER_CHUNK), 1), None)
    until(lambda: bool(channel.held))
    closing = threading.Thread(target=engine.worker.shutdown)
    closing.start()
    channel.answer()
    closing.join(30)
    assert not closing.is_alive()
    assert engine.worker.get_finished({"a"}) == ({"a"}, set())
    engine.worker.shutdown()
    with pytest.raises(ValueError, match="was shut down"):
        engine.worker.submit_store_request("b", op("tokens", range(PER_CHUNK), 1), None)
    engine.scheduler.shutdown()
    engine.scheduler.shutdown()


def test_shutdown_does_not_wait_for_a_server_that_hangs(
    channel: ScriptedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "DRAIN_SECONDS", 0.05)
    engine = Engine(caches(1), channel)
    channel.holding = ("Store",)
    engine.worker.submit_store_request("a", op("tokens", range(PER_CHUNK), 1), None)
    until(lambda: bool(channel.held))
    engine.worker.shutdown()
    assert engine.worker.get_finished({"a"}) == ({"a"}, set())
