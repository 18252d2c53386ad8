"""Lookups: the longest stored prefix, found with few probes, never waited for in vain.

The model in :mod:`tests.shelf.test_lookup_model` draws what happens to a short prompt. Here are
long prompts, the number of probes, several kinds of KV, and mistakes of callers.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, STATE, Kind, kind_key
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf import failed_keys
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import Lookup, LookupService
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import Presence
from tests.sim.storage import NamesOnly
from tests.support import prompts
from tests.support.formats import format_of_kinds, make_format
from tests.support.threads import none_can_be_started
from tests.support.waiting import PATIENCE, until

FMT = make_format(shards=2)
SIZE = FMT.chunk_size
NEAR, FAR = 0.0, 0.02

prompt = functools.partial(prompts.prompt, unit=SIZE)


class Lookups:
    """Lookups on a storage of names and sizes, on which chunks appear and vanish."""

    def __init__(self, probe_cost: float = FAR, fmt: ObjectFormat = FMT) -> None:
        self.fmt = fmt
        self.storage = NamesOnly(probe_cost)
        self.failed = FailedKeys()
        self.counters = Counters()
        self.shelf = Shelf(self.storage)
        self.service = LookupService(
            *(self.shelf.view(fmt.of(kind)) for kind in fmt.kinds),
            failed=self.failed,
            counters=self.counters,
        )

    def chain(self) -> KeyChain:
        return KeyChain(self.fmt.namespace.digest, SIZE)

    def chunks(self, tokens: Sequence[int]) -> list[Chunk]:
        return self.chain().extend(tokens)

    def name(self, chunk: Chunk, shard: int, kind: Kind = FULL) -> str:
        name = object_name(chunk, shard, self.fmt.of(kind).shards, kind)
        return f"{self.fmt.namespace.folder}/{name}"

    def put(self, chunks: Iterable[Chunk], *shards: int, kind: Kind = FULL) -> None:
        fmt = self.fmt.of(kind)
        for chunk in chunks:
            for shard in shards or range(fmt.shards):
                self.storage.sizes[self.name(chunk, shard, kind)] = fmt.object_size(shard)

    def delete(self, chunk: Chunk, shard: int, kind: Kind = FULL) -> None:
        del self.storage.sizes[self.name(chunk, shard, kind)]

    def submit(self, tokens: Sequence[int], first_chunk: int = 0) -> Lookup:
        return self.service.submit(tokens, self.chain, first_chunk=first_chunk)

    def look(self, tokens: Sequence[int]) -> Lookup:
        lookup = self.submit(tokens)
        assert lookup.wait(PATIENCE)
        return lookup

    def hit(self, tokens: Sequence[int]) -> int:
        return self.look(tokens).hit_chunks

    def close(self) -> None:
        self.storage.let_go()
        self.storage.gate.set()
        self.service.close()


@pytest.fixture(params=[NEAR, FAR], ids=["near", "far"])
def lookups(request: pytest.FixtureRequest) -> Iterator[Lookups]:
    lookups = Lookups(request.param)
    yield lookups
    lookups.close()


@pytest.fixture
def far() -> Iterator[Lookups]:
    lookups = Lookups()
    yield lookups
    lookups.close()


# ------------------------------------------------------------------------------- what is found


def test_lookup_of_a_known_prefix_asks_only_for_what_is_behind_it(far: Lookups) -> None:
    tokens = prompt(400)
    chunks = far.chunks(tokens)
    far.put(chunks[:300])
    assert far.hit(tokens[: 200 * SIZE]) == 200
    far.storage.asked.clear()
    assert far.hit(tokens[: 200 * SIZE]) == 200
    assert not far.storage.asked
    assert far.hit(tokens) == 300
    asked = {name for names in far.storage.asked for name in names}
    assert not asked & {far.name(chunk, shard) for chunk in chunks[1:199] for shard in (0, 1)}
    far.storage.asked.clear()
    # Another end of the same beginning.
    assert far.hit(tokens[: 90 * SIZE] + prompt(5, seed=1)) == 90
    assert far.name(chunks[89], 1) in far.storage.asked[0], "where the hit ends it is confirmed"
    assert len(far.storage.asked) == 1


@example(20, 60, [60, 60])
@given(st.integers(0, 60), st.integers(0, 60), st.lists(st.integers(1, 60), max_size=4))
def test_lookups_of_chunks_that_miss_a_shard_end_where_the_first_of_them_is(
    whole: int, begun: int, lengths: list[int]
) -> None:
    """Nothing that was seen of a chunk says that all of it is there."""
    lookups, tokens = Lookups(), prompt(60)
    chunks = lookups.chunks(tokens)
    lookups.put(chunks[:whole])
    lookups.put(chunks[whole:begun], 0)
    try:
        for length in lengths:
            assert lookups.hit(tokens[: length * SIZE]) == min(length, whole)
    finally:
        lookups.close()


def test_lookup_with_a_first_chunk_ignores_what_lies_before_it(far: Lookups) -> None:
    tokens = prompt(20)
    chunks = far.chunks(tokens)
    far.put(chunks[:3] + chunks[4:])
    far.failed.add(chunks[3].key, bad=True)
    lookup = far.submit(tokens, first_chunk=4)
    assert lookup.wait(PATIENCE) and lookup.hit_chunks == 16
    assert far.hit(tokens) == 3
    # Nor is it known then.
    other = prompt(20, seed=1)
    lookup = far.submit(other, first_chunk=10)
    assert lookup.wait(PATIENCE) and lookup.hit_chunks == 0
    far.put(far.chunks(other)[5:])
    assert far.hit(other) == 0


def test_remembered_answer_is_not_renewed_by_its_use(far: Lookups) -> None:
    tokens = prompt(30)
    chunks = far.chunks(tokens)
    far.put(chunks)
    assert far.hit(tokens) == 30
    time.sleep(40)
    far.delete(chunks[5], 0)
    assert far.hit(tokens) == 30
    time.sleep(30)
    assert far.hit(tokens) == 5


def test_each_kind_is_remembered_fails_and_is_asked_for_by_itself() -> None:
    lookups = Lookups(fmt=format_of_kinds({FULL: 1, STATE: 2}, SIZE))
    tokens = prompt(8)
    chunks = lookups.chunks(tokens)
    last = lookups.name(chunks[7], 1, STATE)
    for kind in (FULL, STATE):
        lookups.put(chunks, kind=kind)
    lookups.storage.broken.add(last)
    assert lookups.hit(tokens) == 7
    assert lookups.counters.snapshot()["probe_errors"] > 0
    lookups.storage.broken.clear()
    lookup = lookups.look(tokens)
    assert (lookup.hit_chunks, lookup.full_chunks) == (8, 8), "an error is not remembered"
    assert lookup.known == {STATE: {7}}
    lookups.storage.asked.clear()
    assert lookups.hit(tokens) == 8
    assert not lookups.storage.asked
    lookups.failed.add(kind_key(chunks[7].key, STATE), bad=False)
    assert lookups.hit(tokens) == 7, "what has failed counts as missing, also where it is there"
    lookups.delete(chunks[7], 1, STATE)
    lookups.failed.clear()
    assert lookups.hit(tokens) == 7, "it is asked for again"
    lookups.close()


@pytest.mark.parametrize("raises", [False, True])
def test_probe_that_fails_is_counted_and_leaves_the_keys(lookups: Lookups, raises: bool) -> None:
    tokens = prompt(3)
    chunks = lookups.chunks(tokens)
    lookups.put(chunks)
    with pytest.MonkeyPatch.context() as patch:
        if raises:
            patch.setattr(lookups.storage, "stat", lambda _: 1 / 0)
        patch.setattr(lookups.storage, "broken", {lookups.name(chunks[2], 0)})
        lookup = lookups.look(tokens)
    assert lookup.hit_chunks == (0 if raises else 2)
    assert lookup.chain is not None and len(lookup.chain.chunks) == 3
    assert lookups.counters.snapshot()["probe_errors"] >= 1
    assert lookups.hit(tokens) == 3


def test_service_is_stalled_while_all_threads_are_at_one_lookup_for_too_long(far: Lookups) -> None:
    far.storage.gate.clear()
    waiting = [far.submit(prompt(2, seed=0))]
    until(lambda: len(far.storage.asked) >= 1)
    time.sleep(0.4)
    waiting += [far.submit(prompt(2, seed=seed)) for seed in range(1, far.service._count)]
    until(lambda: len(far.storage.asked) >= far.service._count)
    assert not far.service.stalled(0.3), "another thread has just begun"
    time.sleep(0.35)
    assert far.service.stalled(0.3)
    far.storage.gate.set()
    assert all(lookup.wait(PATIENCE) for lookup in waiting)
    until(lambda: not far.service.stalled(0.0))


def test_share_in_a_disk_tier_is_that_of_the_hit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups, tokens = Lookups(NEAR), prompt(8)
    chunks = lookups.chunks(tokens)
    lookups.put(chunks)
    view, service = lookups.shelf.view(FMT), lookups.service
    counting = LookupService(view, failed=FailedKeys(), counters=Counters(), counts_tier=True)
    in_tier = {chunk.key for chunk in chunks[:6]}
    monkeypatch.setattr(
        view,
        "nearby",
        lambda refs: [Presence.PRESENT if ref.chunk.key in in_tier else None for ref in refs],
    )
    for lookups.service, expected in ((service, 0.0), (counting, 0.5)):
        lookup = lookups.submit(tokens, first_chunk=4)
        assert lookup.wait(PATIENCE) and lookup.hit_chunks == 4
        assert lookup.in_disk_tier == expected
        lookups.close()


def test_cancelled_lookup_asks_the_storage_for_nothing_more(lookups: Lookups) -> None:
    tokens = prompt(400)
    lookups.put(lookups.chunks(tokens)[:300])
    lookups.storage.gate.clear()
    lookup = lookups.submit(tokens)
    until(lambda: len(lookups.storage.asked) == 1)
    lookup.cancel()
    lookups.storage.gate.set()
    assert lookup.wait(PATIENCE) and not lookup.hit_chunks
    assert len(lookups.storage.asked) == 1


def test_closed_service_is_forgotten_by_all_that_live_longer() -> None:
    lookups = Lookups()
    lookups.hit(prompt(1))
    service = weakref.ref(lookups.service)
    lookups.close()
    del lookups.service

    def is_forgotten() -> bool:
        gc.collect()
        return service() is None

    until(is_forgotten, seconds=0.2)


# ------------------------------------------------------------------------------- keys


def test_lookup_whose_keys_have_to_wait_holds_up_no_other(lookups: Lookups) -> None:
    tokens = prompt(3)
    ready: dict[str, Future[None]] = {name: Future() for name in ("held", "late", "gone", "bad")}

    def submit(name: str) -> Lookup:
        def chain() -> KeyChain:
            ready[name].result()
            return lookups.chain()

        return lookups.service.submit(tokens, chain, ready=ready[name])

    held, late, gone, bad = map(submit, ready)
    assert lookups.look(tokens).chain is not None
    assert not held.done
    assert not lookups.service.answers_soon(held)
    gone.cancel()
    ready["held"].set_result(None)
    assert held.wait(PATIENCE)
    assert held.chain is not None
    assert len(held.chain.chunks) == 3
    ready["gone"].set_result(None)
    assert gone.wait(PATIENCE)
    ready["bad"].set_exception(ValueError("no"))
    assert bad.wait(PATIENCE)
    assert bad.given_up
    lookups.service.close()
    ready["late"].set_result(None)
    assert late.given_up


def raises() -> KeyChain:
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("make_chain", "tokens", "errors"),
    [(lambda: None, prompt(3), 0), (raises, prompt(3), 1), (None, [-1] * SIZE, 1)],
    ids=["no content address", "no chain", "no tokens"],
)
def test_lookup_without_keys_is_a_miss_and_logged_once(
    lookups: Lookups,
    caplog: pytest.LogCaptureFixture,
    make_chain: Callable[[], KeyChain | None] | None,
    tokens: list[int],
    errors: int,
) -> None:
    for _ in range(3):
        lookup = lookups.service.submit(tokens, make_chain or lookups.chain)
        assert lookup.wait(PATIENCE)
        assert (lookup.hit_chunks, lookup.chain, lookup.given_up) == (0, None, errors > 0)
    assert lookups.counters.snapshot().get("probe_errors", 0) == 3 * errors
    assert len(caplog.records) == errors
    assert lookups.look(prompt(1)).chain is not None


# ------------------------------------------------------------------------------- trouble


def test_callback_that_raises_ends_no_thread(
    lookups: Lookups, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(lookup: Lookup) -> None:
        raise KeyError("nobody knows it")

    for seed in range(5):
        lookup = lookups.service.submit(prompt(1, seed), lookups.chain, on_done=fail)
        assert lookup.wait(PATIENCE)
    until(lambda: "a completion callback of a lookup raised" in caplog.text)
    assert lookups.look(prompt(1)).chain is not None
    assert caplog.text.count("a completion callback of a lookup raised") == 1


@pytest.mark.long
def test_lookups_are_given_up_while_no_thread_can_be_started(
    lookups: Lookups, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(1, seed=1)
    lookups.put(lookups.chunks(tokens))
    lookups.storage.gate.clear()
    with none_can_be_started(monkeypatch, "kvshelf-lookup"):
        waiting = [lookups.submit(prompt(1, seed)) for seed in range(40)]
        # No thread is left that could come to the last.
        assert all(lookup.wait(PATIENCE) and lookup.given_up for lookup in waiting)
        assert not lookups.service.available
        assert lookups.look(tokens).given_up
    lookups.storage.gate.set()
    # The thread that hangs may have opened the breaker, which closes by itself.
    until(lambda: lookups.hit(tokens) == 1)


def test_lookup_while_the_storage_rests_makes_keys_and_finds_nothing(lookups: Lookups) -> None:
    tokens = prompt(3)
    lookups.put(lookups.chunks(tokens))
    assert lookups.hit(tokens) == 3
    gate = threading.Event()
    lookups.storage.gate = gate
    hanging = [lookups.submit(prompt(3, seed)) for seed in range(1, 6)]
    assert all(lookup.wait(PATIENCE) for lookup in hanging)
    until(lambda: not lookups.service.available)
    asked = lookups.storage.rounds
    # Also where the answer of the storage is remembered.
    for known in (tokens, prompt(3, seed=9)):
        lookup = lookups.look(known)
        assert lookup.hit_chunks == 0
        assert lookup.chain is not None
        assert len(lookup.chain.chunks) == 3
    assert lookups.storage.rounds - asked <= 3  # Only those that try whether it is well.
    gate.set()
    until(lambda: lookups.service.available)
    assert lookups.hit(tokens) == 3


# ------------------------------------------------------------------------------- failed keys


def test_key_that_fails_again_waits_twice_as_long_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failed_keys, "_MOST_SECONDS", 60)
    keys = FailedKeys()
    for seconds in (10, 20, 40, 60, 60):
        keys.add(b"k", bad=False)
        # A second load that was under way makes no difference.
        keys.add(b"k", bad=False)
        time.sleep(seconds - 1)
        assert b"k" in keys
        time.sleep(1)
        assert b"k" not in keys
    time.sleep(61)
    keys.add(b"k", bad=False)
    time.sleep(10)
    assert b"k" not in keys


def test_key_that_fails_again_after_its_repair_waits() -> None:
    keys = FailedKeys()
    keys.add(b"k", bad=True)
    # A second load that was under way found something else wrong.
    keys.add(b"k", bad=False)
    assert keys.is_bad(b"k")
    keys.forget(b"k")
    assert b"k" not in keys
    keys.add(b"k", bad=True)
    keys.forget(b"k")
    assert keys.is_bad(b"k")
    time.sleep(600)
    assert b"k" not in keys


def test_failed_keys_beyond_the_limit_are_forgotten_oldest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failed_keys, "_LIMIT", 3)
    keys = FailedKeys()
    for number in range(10):
        keys.add(bytes([number]), bad=True)
    assert [bytes([number]) in keys for number in range(10)] == [False] * 7 + [True] * 3


def test_key_counts_as_failed_until_its_own_time_is_over() -> None:
    keys, seen_at = FailedKeys(), time.monotonic()
    time.sleep(1)
    keys.add(b"bad", bad=True)
    keys.add(b"k", bad=False)
    assert keys.leading([b"other", b"bad"]) == 1
    time.sleep(20)
    assert keys.leading([b"k", b"bad"]) == 1 and not keys.is_bad(b"k")
    # What was seen before a key failed proves nothing, also when it may be tried again.
    assert keys.refutes(b"k", seen_at) and not keys.refutes(b"k", time.monotonic())
