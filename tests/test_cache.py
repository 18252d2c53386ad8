"""ChunkCache: what was stored comes back in any form, or is said not to; never stuck."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf import (
    BlobKV,
    ChunkCache,
    Config,
    ModelFacts,
    PagedKV,
    PromptIdentity,
    Shelf,
    TupleKV,
    blob_of_tuples,
    empty_blob,
    empty_tuples,
    tuples_of_blob,
)
from kvshelf.backends import Backend, Touched, open_backend
from kvshelf.cache.named import Named
from kvshelf.capacity.uses import Uses
from kvshelf.errors import (
    BoundReachedError,
    ConfigError,
    DeviceUnavailableError,
    UnavailableStorageError,
    UnsupportedError,
)
from kvshelf.format.keys import KeyChain
from kvshelf.kv import sources
from kvshelf.kv.caches import HostKVCache
from kvshelf.kv.copy_plan import CopyPlan
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import PagedLayout
from kvshelf.memory.ring import rounded
from kvshelf.metrics import Counters
from kvshelf.shelf.lookup import LookupService
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.transfer.loads import Loads
from tests.server.node import LocalServer
from tests.sim.device import SimulatedStreams
from tests.sim.storage import FAR, Fault, FaultyStorage, posix
from tests.support.prompts import any_identity, prompt
from tests.support.waiting import PATIENCE, until

LAYERS, HEADS, SIZE, CHUNK = 3, 4, 8, 16
HIDDEN = HEADS * SIZE
BLOCK = 4

_numbers = itertools.count()


def facts(**changes: Any) -> ModelFacts:
    given = {
        "layers": LAYERS,
        "kv_heads": HEADS,
        "head_size": SIZE,
        "dtype": "bfloat16",
        "weights": "name:test",
        "name": "test",
    }
    return ModelFacts(**{**given, **changes})


def truth(tokens: Sequence[int]) -> torch.Tensor:
    """The KV of a prompt, a blob: of each token it depends on all tokens before, as KV does."""
    state, states = 7, []
    for token in tokens:
        state = (state * 1103515245 + token + 12345) % 2**31
        states.append(state)
    place = torch.arange(2 * LAYERS * HIDDEN).view(2, LAYERS, 1, HIDDEN)
    base = torch.tensor(states, dtype=torch.int64).view(1, 1, -1, 1)
    bits = (base * 31 + place * 7919) % 32000 + 1
    return bits.to(torch.int16).view(torch.bfloat16)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two blobs have the same bits."""
    return torch.equal(found.view(torch.int16), expected.view(torch.int16))


def check(held: Held, tokens: Sequence[int], mask: torch.Tensor) -> None:
    """The tokens of `mask` are right; others are right too, or as they were (zero)."""
    found, expected = held.read().view(torch.int16), truth(tokens).view(torch.int16)
    assert torch.equal(found[:, :, mask], expected[:, :, mask])
    assert bool(((found == expected) | (found == 0)).all())


@dataclass
class Held:
    """KV of a prompt in one form."""

    arguments: dict[str, Any]
    read: Callable[[], torch.Tensor]


def as_blob(blob: torch.Tensor) -> Held:
    mine = blob.clone()
    return Held({"kv": BlobKV(mine)}, lambda: mine)


def as_transformers(blob: torch.Tensor) -> Held:
    pairs = [(k.contiguous(), v.contiguous()) for k, v in tuples_of_blob(blob.clone(), HEADS)]
    return Held({"kv": pairs}, lambda: blob_of_tuples(pairs))


def as_tokens_first(blob: torch.Tensor) -> Held:
    # K and V of a layer in one tensor, rows of another layer between: strides of every kind.
    wide = blob.view(2, LAYERS, -1, HEADS, SIZE).permute(2, 1, 3, 0, 4).contiguous()
    pairs = [(wide[:, layer, :, 0], wide[:, layer, :, 1]) for layer in range(LAYERS)]
    kv = TupleKV(pairs, order="THD")
    return Held({"kv": kv}, lambda: blob_of_tuples(pairs, order="THD"))


def as_paged(blob: torch.Tensor, nhd: bool = False) -> Held:
    tokens = blob.shape[2]
    blocks = tokens // BLOCK + 3
    shape = (blocks, HEADS, BLOCK, 2 * SIZE)
    if nhd:
        shape = (blocks, BLOCK, HEADS, 2 * SIZE)
    caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
    if nhd:
        caches = [cache.transpose(1, 2) for cache in caches]
    slots = torch.randperm(blocks * BLOCK)[:tokens]
    at = (slots // BLOCK, slots % BLOCK)
    for layer, cache in enumerate(caches):
        for kv in range(2):
            rows = blob[kv, layer].view(tokens, HEADS, SIZE)
            cache[at[0], :, at[1], kv * SIZE : (kv + 1) * SIZE] = rows

    def read() -> torch.Tensor:
        found = torch.zeros_like(blob)
        for layer, cache in enumerate(caches):
            for kv in range(2):
                rows = cache[at[0], :, at[1], kv * SIZE : (kv + 1) * SIZE]
                found[kv, layer] = rows.reshape(tokens, HIDDEN)
        return found

    layout = PagedLayout.from_bhnc(caches[0], SIZE)
    return Held({"kv": PagedKV(caches, layout, slots)}, read)


def as_hidden(blob: torch.Tensor) -> Held:
    mine = blob.clone()
    return Held({"kv": [(mine[0, layer], mine[1, layer]) for layer in range(LAYERS)]}, lambda: mine)


def as_paged_pairs(blob: torch.Tensor) -> Held:
    tokens = blob.shape[2]
    blocks = tokens // BLOCK + 3
    # K and V of a layer differ in their strides.
    pairs = [
        (
            torch.zeros(blocks, BLOCK, HEADS, SIZE, dtype=torch.bfloat16),
            torch.zeros(blocks, HEADS, BLOCK, SIZE, dtype=torch.bfloat16).transpose(1, 2),
        )
        for _ in range(LAYERS)
    ]
    slots = torch.randperm(blocks * BLOCK)[:tokens]
    at = (slots // BLOCK, slots % BLOCK)
    for layer, pair in enumerate(pairs):
        for kv, cache in enumerate(pair):
            cache[at] = blob[kv, layer].view(tokens, HEADS, SIZE)

    def read() -> torch.Tensor:
        planes = [torch.stack([pair[kv][at] for pair in pairs]) for kv in range(2)]
        return torch.stack(planes).flatten(3)

    return Held({"kv": PagedKV(pairs, slot_mapping=slots)}, read)


FORMS: dict[str, Callable[[torch.Tensor], Held]] = {
    "blob": as_blob,
    "transformers": as_transformers,
    "tokens first": as_tokens_first,
    "paged HND": as_paged,
    "paged NHD": lambda blob: as_paged(blob, nhd=True),
    "hidden": as_hidden,
    "paged pairs": as_paged_pairs,
}


def nothing(tokens: int) -> torch.Tensor:
    return torch.zeros((2, LAYERS, tokens, HIDDEN), dtype=torch.bfloat16)


@pytest.fixture
def backend(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(posix(tmp_path / "shelf"))


@contextmanager
def on_device(streams: SimulatedStreams) -> Iterator[None]:
    """All tensors that are passed to caches lie on a simulated device."""

    def memory(calls: Any) -> HostKVCache | DeviceKVCache:
        if not any(calls.values()):
            return HostKVCache(calls)
        return DeviceKVCache(calls, streams=streams)

    with mock.patch.object(sources, "HostKVCache", memory), closing(streams):
        yield


#: Over a node server, memory is the server's: what it has is lent whatever becomes of the storage,
#: and nothing is kept in the process. What others store is found as on any shelf that is far away.
past_the_server = pytest.mark.parametrize("place", ["host", "device"], indirect=True)
#: Arguments are checked before anything is copied, wherever that would be to.
any_place = pytest.mark.parametrize("place", ["host"], indirect=True)


_SERVER = pytest.param("server", marks=[pytest.mark.slow, pytest.mark.real])


@pytest.fixture(params=["host", "device", _SERVER])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the tensors are that tests pass; with `server`, what is in front of the storage."""
    with ExitStack() as stack:
        if request.param == "device":
            # What tests do to their tensors they do at once, on the host.
            stack.enter_context(on_device(SimulatedStreams(engine_at_once=True)))
        yield request.param


Make = Callable[..., ChunkCache]


@pytest.fixture
def make(backend: Backend, place: str, tmp_path: Path) -> Iterator[Make]:
    """Make caches on one shelf; they are closed at the end, and must have leaked nothing."""
    with ExitStack() as stack:
        servers: dict[Backend, LocalServer] = {}

        def shelf_on(storage: Backend) -> Shelf:
            if place != "server":
                return Shelf(storage)
            server = servers.get(storage)
            if server is None:
                folder = tmp_path / f"node {len(servers)}"
                server = stack.enter_context(LocalServer(folder, storage))
                servers[storage] = server
            return server.open_shelf()

        def made(on: Backend | None = None, **options: Any) -> ChunkCache:
            model = options.pop("model", None) or facts()
            names = ("chunk_size", "shards", "version")
            of_namespace = {name: options.pop(name) for name in names if name in options}
            namespace = model.namespace(**{"chunk_size": CHUNK, **of_namespace})
            options = {"timeout_s": PATIENCE, "memory_bytes": 64 << 20, "drain_s": 0, **options}
            shelf = stack.enter_context(shelf_on(on or backend))
            return stack.enter_context(ChunkCache(shelf, namespace, **options))

        yield made


@pytest.fixture
def cache(make: Make) -> ChunkCache:
    return make()


def objects(cache: ChunkCache) -> list[str]:
    return sorted(entry.name for entry in cache.shelf.objects())


def put(cache: ChunkCache, tokens: Sequence[int], **arguments: Any) -> None:
    report = cache.store(tokens, kv=truth(tokens), **arguments)
    assert report.complete, report


def slot_bytes(cache: ChunkCache) -> int:
    """Bytes of a chunk in memory."""
    return sum(rounded(cache.fmt.object_size(shard)) for shard in range(cache.fmt.shards))


def fetch(cache: ChunkCache, tokens: Sequence[int], **arguments: Any) -> int:
    """Retrieve a prompt; return how many tokens came, having checked that they are right."""
    held = as_blob(nothing(len(tokens)))
    mask = cache.retrieve(tokens, **held.arguments, **arguments)
    assert mask.dtype == torch.bool
    assert mask.device == torch.device("cpu")
    check(held, tokens, mask)
    return int(mask.sum())


# ----------------------------------------------------------------------- what works


@settings(max_examples=40)
@given(data=st.data())
def test_retrieved_is_exactly_what_is_there_and_good(data: st.DataObject) -> None:
    """Prompts with common beginnings, objects deleted and damaged, any form, any mask."""
    size = data.draw(st.sampled_from([1, 4, 16, 24]), "chunk size")
    shards = data.draw(st.sampled_from([1, 2, 4]), "shards")
    lengths = st.integers(0, 6 * size)
    base = prompt(6 * size)
    prompts = []
    for seed in range(1, 4):
        common = data.draw(lengths)
        prompts.append(base[:common] + prompt(data.draw(lengths), seed))
    url = f"memory://cache-{next(_numbers)}"
    backend = open_backend(url)
    namespace = facts().namespace(chunk_size=size, shards=shards)
    with ExitStack() as stack:
        if data.draw(st.booleans(), "on a device"):
            stack.enter_context(on_device(SimulatedStreams(engine_at_once=True)))
        cache = stack.enter_context(ChunkCache(Shelf(backend), namespace, timeout_s=PATIENCE))
        good: set[bytes] = set()
        for tokens in prompts[: data.draw(st.integers(1, 3), "stored")]:
            first = data.draw(st.integers(0, len(tokens) // size))
            mask = [False] * first * size + [True] * (len(tokens) - first * size)
            form = data.draw(st.sampled_from(sorted(FORMS)))
            report = cache.store(tokens, mask, **FORMS[form](truth(tokens)).arguments)
            keys = cache.chunk_keys(tokens, mask)
            assert report.complete
            assert report.chunks == len(keys) == len(tokens) // size - first
            good.update(key.key for key in keys)
        names = st.sampled_from(objects(cache) or [""])
        for name in data.draw(st.lists(names, max_size=3, unique=True)):
            key = bytes.fromhex(name.rpartition("/")[2][:64])
            good.discard(key)
            if not name or backend.stat([name]) == [None]:
                continue
            if data.draw(st.booleans(), "deleted"):
                cache.shelf.delete(name)
            else:
                _damage(backend, name, data.draw(st.integers(0, 2**30)))
        for tokens in prompts:
            keys = cache.chunk_keys(tokens)
            run = list(itertools.takewhile(lambda key: key.key in good, keys))
            first = data.draw(st.integers(0, len(keys)))
            mask = torch.arange(len(tokens)) >= first * size
            held = FORMS[data.draw(st.sampled_from(sorted(FORMS)))](nothing(len(tokens)))
            got = cache.retrieve(tokens, mask, **held.arguments)
            wanted = list(itertools.takewhile(lambda key: key.key in good, keys[first:]))
            expected = torch.zeros(len(tokens), dtype=torch.bool)
            expected[first * size : (first + len(wanted)) * size] = True
            assert torch.equal(got, expected)
            check(held, tokens, got)
            assert not held.read()[:, :, : first * size].any()
            if not first:
                # What was found to be bad is remembered.
                assert cache.lookup(tokens) == len(run) * size


def _damage(backend: Backend, name: str, where: int) -> None:
    with backend.open(name) as reader:
        content = bytearray(reader.size)
        reader.read_into(memoryview(content), 0)
    content[where % len(content)] ^= 1
    backend.write(name, [content], "replace")


@any_place
def test_keys_are_those_of_the_chain(cache: ChunkCache) -> None:
    tokens = prompt(3 * CHUNK + 5)
    chain = KeyChain(cache.namespace.digest, CHUNK)
    chain.extend(tokens)
    expected = [(i * CHUNK, (i + 1) * CHUNK, chunk.key) for i, chunk in enumerate(chain.chunks)]
    assert cache.chunk_keys(tokens) == expected
    mask = [False] * CHUNK + [True] * (2 * CHUNK + 5)
    assert cache.chunk_keys(tokens, mask) == expected[1:]
    [(start, end, key)] = cache.chunk_keys(tokens[:CHUNK])
    assert (start, end, key) == expected[0]


def test_mask_leaves_out_what_the_caller_has(cache: ChunkCache) -> None:
    tokens = prompt(5 * CHUNK)
    put(cache, tokens)
    mask = torch.arange(5 * CHUNK) >= 2 * CHUNK
    assert fetch(cache, tokens, mask=mask) == 3 * CHUNK
    assert fetch(cache, tokens, mask=[False] * 5 * CHUNK) == 0


def test_slots_of_minus_one_are_skipped_by_loads_and_refused_by_stores(cache: ChunkCache) -> None:
    tokens = prompt(2 * CHUNK)
    held = as_paged(truth(tokens))
    put(cache, tokens)
    paged = held.arguments["kv"]
    slots = paged.slot_mapping.clone()
    slots[3] = -1
    with pytest.raises(ValueError, match="chunk 0"):
        cache.store(tokens, kv=PagedKV(paged.caches, paged.layout, slots))
    empty = as_paged(nothing(len(tokens)))
    paged = empty.arguments["kv"]
    skipped = int(paged.slot_mapping[3])
    paged.slot_mapping[3] = -1
    assert bool(cache.retrieve(tokens, kv=paged).all())
    assert not paged.caches[0][skipped // BLOCK, :, skipped % BLOCK].any()


@past_the_server
def test_handles_end_by_themselves(cache: ChunkCache) -> None:
    tokens = prompt(3 * CHUNK)
    stored = cache.submit_store(tokens, kv=truth(tokens))
    until(stored.poll)
    assert stored.result(0).published == 3
    looked = cache.submit_lookup(tokens)
    until(looked.poll)
    assert looked.result(0) == 3 * CHUNK
    held = as_blob(nothing(len(tokens)))
    retrieved = cache.submit_retrieve(tokens, **held.arguments)
    assert retrieved.wait(PATIENCE)
    assert bool(retrieved.result(0).all())
    assert same(held.read(), truth(tokens))
    prefetched = cache.submit_prefetch(tokens)
    assert prefetched.wait()
    assert prefetched.result() == 3 * CHUNK
    assert [repr(handle) for handle in (stored, looked, retrieved, prefetched)] == [
        f"<{name}, done>" for name in ("store", "lookup", "retrieve", "prefetch")
    ]


# ------------------------------------------------------------------------- on a device


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bound", [False, True], ids=["passed", "bound"])
@pytest.mark.parametrize("place", ["host"], indirect=True)
def test_copies_on_a_device_keep_the_order_of_the_callers_current_stream(
    make: Make, bound: bool, seed: int
) -> None:
    tokens = prompt(3 * CHUNK)
    streams = SimulatedStreams(seed)
    cache = make()
    caller = streams.stream(urgent=False)
    streams.slow_down(caller)

    def scatter_is_enqueued() -> bool:
        return any(
            stream is not caller and any(kind == "record" for kind, _ in list(stream.entries))
            for stream in list(streams.streams)
        )

    with on_device(streams), streams.use(caller):
        held = as_paged(nothing(len(tokens)))
        paged = held.arguments["kv"]
        late = as_paged(truth(tokens)).arguments["kv"]
        arguments: dict[str, Any] = {"kv": paged}
        if bound:
            cache.bind(paged.caches, paged.layout)
            arguments = {"slot_mapping": paged.slot_mapping}
        paged.slot_mapping.copy_(late.slot_mapping)
        with streams.hold():
            for mine, content in zip(paged.caches, late.caches, strict=True):
                streams.do(mine.copy_, content)
            stored = cache.submit_store(tokens, **arguments)
            for mine in paged.caches:
                streams.do(mine.zero_)
        assert stored.result().published == 3
        with streams.hold():
            for mine in paged.caches:
                streams.do(mine.fill_, 5)
            retrieved = cache.submit_retrieve(tokens, **arguments)
            until(scatter_is_enqueued)
        assert bool(retrieved.result().all())
        at = (paged.slot_mapping // BLOCK, slice(None), paged.slot_mapping % BLOCK)
        for mine, content in zip(paged.caches, late.caches, strict=True):
            assert same(mine[at], content[at])


@pytest.mark.parametrize("place", ["host"], indirect=True)
def test_close_while_a_load_waits_for_the_callers_stream_writes_nothing_later(make: Make) -> None:
    tokens = prompt(2 * CHUNK)
    streams = SimulatedStreams()
    cache = make()
    put(cache, tokens)
    with on_device(streams):
        paged = as_paged(nothing(len(tokens))).arguments["kv"]
        before = [content.clone() for content in paged.caches]
        with streams.hold():
            # The caller's own work, which the load has to come behind.
            streams.do(lambda: None)
            cache.submit_retrieve(tokens, kv=paged)
            until(lambda: ("copy", "urgent") in streams.log)
            cache.close()
        streams.finish()
        assert all(map(same, paged.caches, before))


@pytest.mark.parametrize("place", ["host"], indirect=True)
def test_device_that_failed_stores_nothing_and_refuses_loads(make: Make) -> None:
    tokens = prompt(4 * CHUNK)
    cache = make()
    put(cache, tokens[:CHUNK])
    streams = SimulatedStreams()
    with on_device(streams):
        held = as_blob(truth(tokens))
        streams.fail()
        report = cache.store(tokens, **held.arguments)
        assert (report.existed, report.dropped, report.pending) == (1, 3, 0)
        with pytest.raises(DeviceUnavailableError, match="illegal memory access"):
            cache.retrieve(tokens, **held.arguments)
    assert fetch(cache, tokens) == CHUNK


@pytest.mark.parametrize("place", ["device"], indirect=True)
def test_device_without_memory_drops_stores_and_misses(
    cache: ChunkCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(2 * CHUNK)
    put(cache, tokens[:CHUNK])
    held = as_blob(truth(tokens))
    full = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    with monkeypatch.context() as patch:
        patch.setattr(CopyPlan, "allocate", full)
        report = cache.store(tokens, **held.arguments)
        assert (report.existed, report.dropped) == (1, 1)
        assert not cache.retrieve(tokens, **held.arguments).any()
    assert cache.store(tokens, **held.arguments).complete


def test_tensors_of_two_devices_are_refused() -> None:
    calls = [
        mock.Mock(caches=[mock.Mock(device=torch.device("cuda", index))]) for index in range(2)
    ]
    with pytest.raises(UnsupportedError, match="lie on cuda:0 and cuda:1"):
        sources._memory_of({0: calls})


# ------------------------------------------------------------------- what goes wrong


@past_the_server
def test_damaged_chunk_that_another_has_repaired_is_found_after_a_store(
    make: Make, backend: FaultyStorage
) -> None:
    one, other = make(), make()
    tokens = prompt(CHUNK)
    put(one, tokens)
    _damage(backend, objects(one)[0], -1)
    assert fetch(one, tokens) == 0
    put(other, tokens)
    put(one, tokens)
    assert one.lookup(tokens) == CHUNK


@past_the_server
def test_chunk_that_was_not_tried_has_not_failed(cache: ChunkCache, backend: FaultyStorage) -> None:
    tokens = prompt(CHUNK)
    put(cache, tokens)
    backend.add(Fault("read", error=lambda: UnavailableStorageError("not tried")))
    assert fetch(cache, tokens) == 0
    backend.heal()
    assert fetch(cache, tokens) == CHUNK


@past_the_server
def test_chunks_for_which_a_bound_leaves_no_room_are_dropped_and_not_failed(
    cache: ChunkCache, backend: FaultyStorage
) -> None:
    tokens = prompt(2 * CHUNK)
    backend.add(Fault("write", "*safetensors", error=lambda: BoundReachedError("full")))
    report = cache.store(tokens, kv=truth(tokens))
    assert (report.dropped, report.failed) == (2, 0)


@past_the_server
def test_close_waits_for_stores_that_are_under_way(make: Make, backend: FaultyStorage) -> None:
    cache = make(drain_s=PATIENCE)
    tokens = prompt(2 * CHUNK)
    backend.add(Fault("write", wait=1.0))
    handle = cache.submit_store(tokens, kv=truth(tokens))
    cache.close()
    assert handle.result(0).complete


@past_the_server
def test_storage_that_hangs_ends_nothing_but_the_hit(make: Make, backend: FaultyStorage) -> None:
    cache = make(timeout_s=0.2)
    tokens = prompt(3 * CHUNK)
    put(cache, tokens, timeout=PATIENCE)
    gate = backend.hang("*")
    try:
        held = as_blob(nothing(len(tokens)))
        assert not cache.retrieve(tokens, **held.arguments).any()
        assert cache.lookup(tokens, timeout=0.05) == 0
        assert cache.prefetch(tokens, timeout=0.05) == 0
        other = prompt(3 * CHUNK, seed=1)
        report = cache.store(other, kv=truth(other), timeout=0.1)
        assert (report.chunks, report.pending, report.complete) == (3, 3, False)
    finally:
        gate.set()
    until(lambda: cache.lookup(other, timeout=PATIENCE) == len(other))
    assert not held.read().any()


@past_the_server
def test_retrieve_that_is_out_of_time_keeps_what_came_and_touches_nothing_later(
    make: Make, backend: FaultyStorage
) -> None:
    cache = make(io_threads=1)
    tokens = prompt(4 * CHUNK)
    put(cache, tokens)
    third = cache.chunk_keys(tokens)[2].key.hex()
    met = threading.Event()

    class Gate(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            met.set()
            return super().wait(timeout)

    gate = Gate()
    backend.add(Fault("read", pattern=f"*{third}*", wait=gate))
    held = as_blob(nothing(len(tokens)))
    handle = cache.submit_retrieve(tokens, **held.arguments)
    assert met.wait(PATIENCE)
    # What came before is delivered by another thread.
    time.sleep(0.1)
    mask = handle.result(0)
    assert int(mask.sum()) == 2 * CHUNK
    gate.set()
    assert fetch(cache, tokens) == 4 * CHUNK
    kv = truth(tokens)
    kv[:, :, 2 * CHUNK :] = 0
    assert same(held.read(), kv)


@past_the_server
@pytest.mark.parametrize("operation", ["stat", "read"])
def test_cancelled_retrieve_is_over_at_once(
    cache: ChunkCache, backend: FaultyStorage, operation: str
) -> None:
    tokens = prompt(3 * CHUNK)
    put(cache, tokens)
    gate, met = threading.Event(), threading.Event()
    backend.add(Fault(operation, error=lambda: met.set() or gate.wait() or OSError()))  # type: ignore[func-returns-value]
    held = as_blob(nothing(len(tokens)))
    handle = cache.submit_retrieve(tokens, **held.arguments)
    assert met.wait(PATIENCE)
    handle.cancel()
    assert handle.poll()
    assert not handle.result(0).any()
    gate.set()
    assert not held.read().any()


@past_the_server
@pytest.mark.parametrize("point", ["lookup answered", "load begins"])
def test_retrieve_cancelled_between_its_lookup_and_its_load_writes_nothing_later(
    cache: ChunkCache, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    tokens = prompt(3 * CHUNK)
    put(cache, tokens)
    reached, goes_on = threading.Event(), threading.Event()

    def paused(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **fields: Any) -> Any:
            reached.set()
            goes_on.wait()
            return function(*args, **fields)

        return call

    submit = LookupService.submit
    if point == "load begins":
        monkeypatch.setattr(Loads, "load", paused(Loads.load))
    else:
        monkeypatch.setattr(
            LookupService,
            "submit",
            lambda *args, on_done, **fields: submit(*args, on_done=paused(on_done), **fields),
        )
    memory = as_blob(nothing(len(tokens)))
    handle = cache.submit_retrieve(tokens, **memory.arguments)
    assert reached.wait(PATIENCE)
    canceller = threading.Thread(target=handle.cancel)
    canceller.start()
    canceller.join(1.0)
    # While a load begins, its end is waited for.
    assert canceller.is_alive() == (point == "load begins")
    goes_on.set()
    canceller.join(1.0)
    assert not canceller.is_alive()
    threading.Event().wait(1.0)
    assert not memory.read().any()
    assert not handle.result().any()


@past_the_server
def test_retrieved_chunks_are_used_with_those_before_them_and_others_are_not(
    make: Make, backend: FaultyStorage
) -> None:
    storage = FaultyStorage(backend, touched=Touched.TOUCHED)
    with closing(Uses(Counters())) as uses:
        cache = make(storage, uses=uses)
        tokens = prompt(3 * CHUNK)
        put(cache, tokens)
        assert cache.lookup(tokens) == cache.prefetch(tokens) == len(tokens)
        assert uses.flush(PATIENCE)
        assert not storage.touches
        assert fetch(cache, tokens[: 2 * CHUNK], mask=[False] * CHUNK + [True] * CHUNK) == CHUNK
        assert uses.flush(PATIENCE)
        assert len(storage.touches) == 2 * cache.fmt.shards


@past_the_server
def test_store_of_a_prompt_larger_than_the_memory_waits_and_is_complete(make: Make) -> None:
    chunk = slot_bytes(make())
    # The least: slots for two load threads, and two more.
    cache = make(memory_bytes=4 * chunk, io_threads=1)
    tokens = prompt(20 * CHUNK)
    put(cache, tokens)
    assert fetch(cache, tokens) == len(tokens)


@any_place
@any_identity
@pytest.mark.parametrize("group_by_salt", [False, True])
def test_identity_separates_prompts(
    make: Make, identity: PromptIdentity, group_by_salt: bool
) -> None:
    cache, tokens = make(group_by_salt=group_by_salt), prompt(CHUNK)
    put(cache, tokens, identity=identity)
    assert fetch(cache, tokens) == cache.lookup(tokens) == 0
    assert fetch(cache, tokens, identity=identity) == CHUNK
    folder = objects(cache)[0].split("/")[1]
    assert (folder != "_") == (group_by_salt and bool(identity.salt))


# ------------------------------------------------------------------------- prefetch


@past_the_server
def test_before_a_far_shelf_tiers_say_what_they_have_at_this_moment(
    make: Make, backend: FaultyStorage, tmp_path: Path
) -> None:
    # Too small a tier for any object.
    with closing(DiskTier(tmp_path / "tier", 1)) as tier:
        cache = make(FaultyStorage(backend, **FAR), disk_tier=tier)
        tokens = prompt(4 * CHUNK)
        near = [["memory"], ["memory", "disk"]]
        put(cache, tokens)
        assert [cache.lookup(tokens, tiers=tiers) for tiers in near] == [0, 0]
        assert cache.prefetch(tokens) == 4 * CHUNK
        assert [cache.lookup(tokens, tiers=tiers) for tiers in near] == [4 * CHUNK] * 2
        for found in cache.chunk_keys(tokens):
            assert cache.remove(found, tiers=["memory"])
        assert [cache.lookup(tokens, tiers=tiers) for tiers in near] == [0, 0]


@pytest.mark.parametrize("far", [False, True])
def test_chunk_that_is_removed_is_missing_and_can_be_stored_again(
    make: Make, backend: FaultyStorage, tmp_path: Path, far: bool
) -> None:
    identity = PromptIdentity(salt="someone")
    with closing(DiskTier(tmp_path / "tier", 1 << 30)) as tier:
        cache = make(
            FaultyStorage(backend, **FAR) if far else backend, disk_tier=tier, group_by_salt=True
        )
        tokens = prompt(4 * CHUNK)
        put(cache, tokens, identity=identity)
        assert tier.drain(PATIENCE)
        assert cache.prefetch(tokens, identity=identity) == 4 * CHUNK
        # A search on a far storage need not notice a hole in one tier.
        left = 3 if far else 1
        key = cache.chunk_keys(tokens, identity=identity)[left]

        def hit(*tiers: str) -> int:
            return cache.lookup(tokens, tiers=tiers or None, identity=identity)

        for tiers in ("memory", "disk", "shelf"):
            assert hit(tiers) == 4 * CHUNK
            assert cache.remove(key, tiers=[tiers], identity=identity)
            assert hit(tiers) == left * CHUNK
        assert hit() == left * CHUNK
        assert not cache.remove(key, identity=identity)
        assert fetch(cache, tokens, identity=identity) == left * CHUNK
        report = cache.store(tokens, kv=truth(tokens), identity=identity)
        assert (report.published, report.existed) == (1, 3)
        assert fetch(cache, tokens, identity=identity) == 4 * CHUNK
        # A copy in a tier is not on the shelf.
        assert tier.drain(PATIENCE)
        assert cache.remove(key, tiers=["shelf"], identity=identity)
        assert cache.store(tokens, kv=truth(tokens), identity=identity).published == 1
        with pytest.raises(ValueError, match="expected some of memory, disk, shelf"):
            cache.remove(key, tiers=["attic"], identity=identity)


@past_the_server
def test_prefetch_into_full_memory_evicts_the_oldest_chunks(make: Make) -> None:
    chunk = slot_bytes(make())
    # Slots for two load threads, and four more.
    cache = make(memory_bytes=6 * chunk, io_threads=1)
    prompts = [prompt(2 * CHUNK, seed) for seed in range(3)]
    for tokens in prompts:
        put(cache, tokens)
        assert cache.prefetch(tokens) == 2 * CHUNK
    in_memory = [cache.lookup(tokens, tiers=["memory"]) for tokens in prompts]
    assert in_memory == [0, 2 * CHUNK, 2 * CHUNK]


@past_the_server
def test_prefetch_of_a_prompt_larger_than_the_memory_keeps_its_beginning(make: Make) -> None:
    cache = make(memory_bytes=6 * slot_bytes(make()), io_threads=1)
    tokens = prompt(9 * CHUNK)
    put(cache, tokens)
    assert cache.prefetch(tokens) == 4 * CHUNK
    assert fetch(cache, tokens) == 9 * CHUNK


# ------------------------------------------------------------------------- arguments


def bound(cache: ChunkCache, **arguments: Any) -> object:
    """Retrieve to caches that are bound."""
    paged = as_paged(nothing(CHUNK)).arguments["kv"]
    cache.bind(paged.caches, paged.layout)
    return cache.retrieve(prompt(CHUNK), **arguments)


@any_place
@pytest.mark.parametrize(
    ("call", "error", "problem"),
    [
        (lambda c: c.store(kv=nothing(3)), ValueError, "tokens"),
        (lambda c: c.store([1]), ValueError, "kv"),
        (lambda c: c.retrieve([1]), ValueError, "kv"),
        (lambda c: c.store([1], slot_mapping=torch.arange(1)), ValueError, "kv"),
        (lambda c: PagedKV(), ValueError, "caches and layout and slot_mapping"),
        (lambda c: PagedKV([], slot_mapping=torch.arange(1)), ValueError, "layout"),
        (bound, ValueError, "slot_mapping"),
        (
            lambda c: bound(c, kv=nothing(CHUNK), slot_mapping=torch.arange(CHUNK)),
            ValueError,
            "both kv and slot_mapping",
        ),
        (
            lambda c: bound(c, slot_mapping=torch.zeros(CHUNK)),
            ValueError,
            "expected one integer for each token",
        ),
        (lambda c: c.lookup([1, -1]), ValueError, "not a token id"),
        (lambda c: c.lookup([1, 2**32]), ValueError, "not a token id"),
        (lambda c: c.lookup(["a"]), ValueError, "not a token id"),
        (lambda c: c.lookup(torch.zeros(2)), ValueError, "not a token id"),
        (
            lambda c: c.lookup(torch.zeros(1, 5, dtype=torch.int64)),
            ValueError,
            "one prompt at a time",
        ),
        (lambda c: c.lookup([1], tiers=[]), ValueError, "memory, disk, shelf"),
        (lambda c: c.lookup([1], tiers=["memory", "gpu"]), ValueError, "memory, disk, shelf"),
        (lambda _: PromptIdentity(salt=b"tenant"), TypeError, "^salt is a bytes.*; expected a "),  # type: ignore[arg-type]
        (lambda _: PromptIdentity(lora_digest="0"), TypeError, "^lora_digest is a str"),  # type: ignore[arg-type]
        (lambda _: PromptIdentity(items="image"), TypeError, "^an item of items is a str"),  # type: ignore[arg-type]
        (lambda c: c.lookup([1], identity="tenant"), TypeError, "^identity is a str"),
        (lambda c: c.prefetch([1], identity="tenant"), TypeError, "^identity is a str"),
        (lambda c: c.remove(b"key"), TypeError, "^key is a bytes"),
        (lambda _: ChunkCache.open("/mnt/kv", facts()), TypeError, "^config is a str"),  # type: ignore[arg-type]
        (lambda _: ChunkCache.open(Config(), "llama"), TypeError, "^model is a str"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_are_missing_or_of_another_form_are_refused(
    cache: ChunkCache,
    call: Callable[[ChunkCache], object],
    error: type[Exception],
    problem: str,
) -> None:
    with pytest.raises(error, match=problem):
        call(cache)


@any_place
@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        ([False] * (CHUNK + 1) + [True] * (2 * CHUNK - 1), "multiple of the chunk size"),
        ([False] * (CHUNK - 1) + [True] * (2 * CHUNK + 1), "multiple of the chunk size"),
        ([True] * CHUNK + [False] * 2 * CHUNK, "True before False"),
        ([False, True] * (3 * CHUNK // 2), "True before False"),
        ([True] * CHUNK, "one value for each of 48 tokens"),
        (torch.ones(3 * CHUNK), "expected bool"),
        (torch.ones(1, 3 * CHUNK, dtype=torch.bool), "one value for each"),
    ],
)
def test_masks_of_another_form_are_refused(cache: ChunkCache, mask: Any, problem: str) -> None:
    tokens, kv = prompt(3 * CHUNK), nothing(3 * CHUNK)
    for call in (
        lambda: cache.store(tokens, mask, kv=kv),
        lambda: cache.retrieve(tokens, mask, kv=kv),
        lambda: cache.prefetch(tokens, mask),
        lambda: cache.chunk_keys(tokens, mask),
    ):
        with pytest.raises(ValueError, match=problem):
            call()


TOKENS = 2 * CHUNK
BF16 = torch.bfloat16


@any_place
@pytest.mark.parametrize(
    ("kv", "problem"),
    [
        (lambda: nothing(TOKENS - 1), "KV of 31 tokens was given for 32 tokens"),
        (lambda: nothing(TOKENS)[:, :2], "2 layers was given; this namespace has 3"),
        (lambda: nothing(TOKENS)[..., :24], "expected \\[2, layers, tokens, 32\\]"),
        (lambda: nothing(TOKENS)[0], "expected \\[2, layers, tokens, hidden\\]"),
        (lambda: nothing(TOKENS).to(torch.float16), "float16; expected torch.bfloat16"),
        (lambda: nothing(TOKENS).to("meta"), "lies on meta"),
        (lambda: tuples_of_blob(nothing(TOKENS), HEADS)[:2], "2 layers was given"),
        (lambda: tuples_of_blob(nothing(TOKENS), 2 * HEADS), "expected \\[32, 4, 8\\]"),
        (lambda: [(torch.zeros(2, HEADS, 3, SIZE),) * 2] * LAYERS, "one sequence at a time"),
        (lambda: [(torch.zeros(HEADS, TOKENS, SIZE, dtype=BF16),) * 3] * LAYERS, "3 tensors"),
        (lambda: [torch.zeros(TOKENS, HIDDEN, dtype=BF16)] * LAYERS, "keeps K and V"),
        (
            lambda: [(torch.zeros(HEADS, n, SIZE), torch.zeros(HEADS, n, SIZE)) for n in (3, 4)],
            "same number",
        ),
        (lambda: TupleKV(tuples_of_blob(nothing(3), HEADS), order="DHT"), "expected HTD or THD"),
        (object, "kv is a object"),
        (lambda: ["x"] * LAYERS, "holds a str; expected tensors"),
        (lambda: [torch.zeros(3), None], "expected 2 dimensions"),
        (lambda: [(torch.zeros(TOKENS, 24, dtype=BF16),) * 2] * LAYERS, "expected \\[32, 4, 8\\]"),
        (lambda: _paged(blocks=20, allocated=9), "make the layout from these caches"),
        (lambda: _pairs(0, TOKENS, HEADS, SIZE), "slot_mapping holds 31"),
        (lambda: _pairs(2, BLOCK, HEADS, SIZE), "slot_mapping holds 31; expected"),
        (lambda: _pairs(9, BLOCK, HEADS, 2 * SIZE), "expected \\[9, 4, 4, 8\\]"),
        (lambda: _pairs(9, BLOCK, HEADS, SIZE, layers=2), "2 layers was given"),
        (lambda: PagedKV(_paged().caches, _pairs(9, 4, 4, 8).caches, torch.arange(3)), "layout is"),
        (lambda: PagedKV(3, _paged().layout, torch.arange(3)), "caches is a int"),
        (lambda: PagedKV("x", _paged().layout, torch.arange(3)), "expected tensors"),
        (lambda: PagedKV(_paged().caches, _paged().layout, [1, 2]), "slot_mapping is a list"),
        (
            lambda: PagedKV(_pairs(9, 4, 4, 8).caches, _paged().layout, torch.arange(TOKENS)),
            "leave layout out",
        ),
        (
            lambda: PagedKV(_paged().caches),
            "layout and slot_mapping, which is missing",
        ),
        (lambda: _paged(heads=2 * HEADS), "layout, heads or head size"),
        (lambda: _paged(dtype=torch.float16), "float16"),
        (lambda: _paged(layers=2), "2 layers"),
        (lambda: _strided(HEADS), "contiguous"),
    ],
)
def test_kv_that_does_not_fit_is_refused(
    cache: ChunkCache, kv: Callable[[], Any], problem: str
) -> None:
    tokens = prompt(TOKENS)
    for method in (cache.store, cache.retrieve):
        with pytest.raises((ValueError, UnsupportedError), match=problem):
            method(tokens, kv=kv())
    assert objects(cache) == []


def _paged(
    heads: int = HEADS,
    layers: int = LAYERS,
    dtype: torch.dtype = BF16,
    blocks: int = 9,
    allocated: int | None = None,
) -> PagedKV:
    caches = [torch.zeros(blocks, heads, BLOCK, 2 * SIZE, dtype=dtype) for _ in range(layers)]
    layout = PagedLayout.from_bhnc(caches[0], SIZE)
    caches = [cache[:allocated] for cache in caches]
    return PagedKV(caches, layout, torch.arange(TOKENS))


def _pairs(*shape: int, layers: int = LAYERS) -> PagedKV:
    pairs = [(torch.zeros(shape, dtype=BF16), torch.zeros(shape, dtype=BF16))] * layers
    return PagedKV(pairs, slot_mapping=torch.arange(TOKENS))


def test_kv_may_be_the_third_argument(cache: ChunkCache) -> None:
    tokens = prompt(TOKENS)
    found = nothing(TOKENS)
    assert cache.store(tokens, None, truth(tokens)).complete
    assert cache.submit_store(tokens, None, truth(tokens)).result().complete
    assert bool(cache.retrieve(tokens, None, found).all())
    assert same(found, truth(tokens))
    for second in (found, [(found, found)], ["x"]):
        with pytest.raises(ValueError, match="KV goes into kv"):
            cache.retrieve(tokens, second)


def _strided(heads: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tensor = torch.zeros(heads, TOKENS, 2 * SIZE, dtype=BF16)[..., ::2]
    return [(tensor, tensor)] * LAYERS


# ------------------------------------------------------------------- other namespaces


def test_native_namespaces_take_whole_blocks(make: Make) -> None:
    model = facts(layouts=(f"cpu-vec-bf16-b{BLOCK}",) * LAYERS)
    cache = make(model=model)
    tokens = prompt(2 * CHUNK)
    shape = (20, HEADS, BLOCK, 2 * SIZE)
    caches = [torch.randint(1, 9999, shape).to(torch.int16).view(BF16) for _ in range(LAYERS)]
    layout = PagedLayout.native_blocks(caches[0])
    blocks = torch.randperm(20)[: 2 * CHUNK // BLOCK]
    slots = (blocks.unsqueeze(1) * BLOCK + torch.arange(BLOCK)).view(-1)
    before = [paged.clone() for paged in caches]
    assert cache.store(tokens, kv=PagedKV(caches, layout, slots)).complete
    for paged in caches:
        paged.zero_()
    skipping = slots.clone()
    skipping[BLOCK : 2 * BLOCK] = -1
    assert bool(cache.retrieve(tokens, kv=PagedKV(caches, layout, skipping)).all())
    for paged, old in zip(caches, before, strict=True):
        assert same(paged[blocks[:1]], old[blocks[:1]])
        assert same(paged[blocks[2:]], old[blocks[2:]])
        assert not paged[blocks[1]].any()
    for wrong in (slots.roll(1), torch.arange(1, len(slots) + 1)):
        with pytest.raises(ValueError, match="not one whole block of 4"):
            cache.store(tokens, kv=PagedKV(caches, layout, wrong))
    with pytest.raises(ValueError, match="canonical"):
        cache.retrieve(tokens, kv=nothing(len(tokens)))


def test_layers_without_heads(make: Make) -> None:
    width = 24
    model = facts(layer_shapes=(f"*,{width}",) * LAYERS, mla_rank=20, attention=("mla",) * LAYERS)
    cache = make(model=model)
    tokens = prompt(3 * CHUNK)
    layers = [torch.randn(len(tokens), width).to(BF16) for _ in range(LAYERS)]
    assert cache.store(tokens, kv=TupleKV(layers)).complete
    blob = empty_blob(cache.fmt, len(tokens))
    assert tuple(blob.shape) == (1, LAYERS, len(tokens), width)
    assert bool(cache.retrieve(tokens, kv=blob).all())
    assert all(same(blob[0, i], layer) for i, layer in enumerate(layers))
    with pytest.raises(ValueError, match="single content"):
        empty_tuples(cache.fmt, 3)
    with pytest.raises(ValueError, match="single content"):
        cache.retrieve(tokens, kv=tuples_of_blob(nothing(len(tokens)), HEADS))


def test_stages_and_layers_of_several_kinds(make: Make) -> None:
    model = facts(layers=4, kv_heads=2, head_size=(8, 8, 16, 8), stages=(3, 1))
    cache = make(model=model)
    assert cache.fmt.shards == 4
    tokens = prompt(3 * CHUNK)
    source = empty_tuples(cache.fmt, len(tokens))
    assert [k.shape[-1] for k, _ in source] == [8, 8, 16, 8]
    for k, v in source:
        k.normal_()
        v.normal_()
    assert cache.store(tokens, kv=source).complete
    found = empty_tuples(cache.fmt, len(tokens), order="THD", batch=False)
    assert bool(cache.retrieve(tokens, kv=TupleKV(found, order="THD")).all())
    for old, new in zip(source, found, strict=True):
        for a, b in zip(old, new, strict=True):
            assert same(a[0].transpose(0, 1).contiguous(), b)
    for refused in (lambda: empty_blob(cache.fmt, 3), lambda: blob_of_tuples(source)):
        with pytest.raises(ValueError, match="blob"):
            refused()


@pytest.mark.parametrize("dtype", ["float16", "float32", "fp8_e4m3", "fp8_e5m2"])
def test_other_dtypes(make: Make, dtype: str) -> None:
    cache = make(model=facts(dtype=dtype))
    tokens = prompt(2 * CHUNK)
    source = empty_blob(cache.fmt, len(tokens))
    source.view(torch.uint8).random_(1, 100)
    assert cache.store(tokens, kv=source).complete
    found = torch.zeros_like(source)
    if source.element_size() == 1:
        found = found.view(torch.uint8)
    assert bool(cache.retrieve(tokens, kv=found).all())
    assert torch.equal(found.view(torch.uint8), source.view(torch.uint8))


def test_forms_convert_into_each_other() -> None:
    blob = truth(prompt(9))
    for order in ("HTD", "THD"):
        pairs = tuples_of_blob(blob, HEADS, order=order)
        assert all(k.data_ptr() >= blob.data_ptr() for k, _ in pairs)
        assert same(blob_of_tuples(pairs, order=order), blob)
    assert tuple(tuples_of_blob(blob, HEADS)[0][0].shape) == (1, HEADS, 9, SIZE)
    with pytest.raises(ValueError, match="multiple of 5 heads"):
        tuples_of_blob(blob, 5)


# ------------------------------------------------------------------------- instances


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(shared_storage_path=str(tmp_path / "named"), chunk_size=CHUNK)


def test_instances_have_names(config: Config) -> None:
    assert ChunkCache.get("mine") is None
    cache = ChunkCache.get_or_create("mine", config, facts())
    try:
        assert ChunkCache.get("mine") is cache
        assert ChunkCache.get_or_create("mine", config, facts()) is cache
        tokens = prompt(2 * CHUNK)
        put(cache, tokens)
        with pytest.raises(ValueError, match="another chunk_size, head_size:"):
            ChunkCache.get_or_create(
                "mine", config.model_copy(update={"chunk_size": 32}), facts(head_size=16)
            )
        other = ChunkCache.get_or_create("other", config, facts())
        assert other is not cache
        assert fetch(other, tokens) == len(tokens)
    finally:
        for name in ("mine", "other", "mine"):
            ChunkCache.destroy(name)
    assert ChunkCache.get("mine") is None
    with pytest.raises(ValueError, match="closed"):
        cache.lookup([1])


def test_cache_is_found_while_another_is_opened_on_a_storage_that_hangs() -> None:
    named: Named[int] = Named()
    made = partial(named.get_or_create, config=Config(), model=facts())
    made("good", make=lambda *_: 1)
    begun, go = threading.Event(), threading.Event()

    def hang(*_: Any) -> int:
        begun.set()
        assert go.wait(PATIENCE)
        return 2

    with ThreadPoolExecutor() as pool:
        opening = pool.submit(made, "hung", make=hang)
        assert begun.wait(PATIENCE)
        assert named.get("hung") is None
        assert named.get("good") == named.pop("good") == 1
        go.set()
        assert opening.result(PATIENCE) == named.get("hung") == 2


def test_configuration_decides_how_much_is_kept_in_memory(config: Config) -> None:
    tokens = prompt(2 * CHUNK)
    for memory, kept in ((1 << 24, True), (None, False)):
        with ChunkCache.open(config.model_copy(update={"memory": memory}), facts()) as cache:
            put(cache, tokens)
            assert fetch(cache, tokens) == len(tokens)
            found = cache.lookup(tokens, tiers=["memory"])
            assert found == (len(tokens) if kept else 0)
            assert cache.prefetch(tokens) == len(tokens)


def test_configuration_decides_the_namespace_and_its_folders(config: Config) -> None:
    tokens, identity = prompt(2 * CHUNK), PromptIdentity("tenant")
    found = []
    for changes in ({}, {"version": "2"}, {"group_by_salt": True}):
        with ChunkCache.open(config.model_copy(update=changes), facts()) as cache:
            found.append(cache.lookup(tokens, identity=identity))
            assert cache.store(tokens, kv=truth(tokens), identity=identity).complete
    # The salt is in the keys, and with this option in the folders as well.
    assert found == [0, 0, 0]


def test_configuration_that_cannot_be_used_is_refused(config: Config) -> None:
    with pytest.raises(ConfigError, match="weights is missing"):
        ChunkCache.open(config, facts(weights=None))


def test_without_a_place_the_shelf_is_private(caplog: pytest.LogCaptureFixture) -> None:
    with ChunkCache.open(Config(), facts()) as cache:
        assert Path(cache.shelf.url).stat().st_mode & 0o077 == 0
    assert "shared_storage_path is not set" in caplog.text
