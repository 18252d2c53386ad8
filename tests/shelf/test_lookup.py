"""Look-ups: the longest stored prefix, found with few probes, never waited for in vain."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvshelf.backends import Deadlines, StatResults
from kvshelf.backends.base import Backend
from kvshelf.backends.guard import GuardedBackend
from kvshelf.errors import TransientStorageError
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, STATE, kind_key
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import Lookup, LookupService
from kvshelf.shelf.shelf import Shelf
from tests.sim.storage import Fault, FaultyStorage, NamesOnly, posix
from tests.support import prompts
from tests.support.formats import format_of_kinds, make_format
from tests.support.threads import none_can_be_started
from tests.support.waiting import PATIENCE, until

FMT = make_format(shards=2)
SIZE = FMT.chunk_size

#: A storage whose probes are dear.
far_away = functools.partial(FaultyStorage, probe_cost=0.02)


class Far:
    """Look-ups of chunks with many shards on a distant storage."""

    def __init__(self, seconds: float = 0.0, fmt: ObjectFormat = FMT) -> None:
        self.fmt = fmt
        self.backend = NamesOnly(seconds=seconds)
        self.failed = FailedKeys()
        self.counters = Counters()
        self.service = LookupService(
            Shelf(self.backend).view(fmt), failed=self.failed, counters=self.counters
        )

    def chunks(self, tokens: Sequence[int]) -> list[Chunk]:
        return KeyChain(self.fmt.namespace.digest, self.fmt.chunk_size).extend(tokens)

    def put(self, chunks: Iterable[Chunk], shards: Iterable[int] | None = None) -> None:
        for chunk in chunks:
            for shard in range(self.fmt.shards) if shards is None else shards:
                self.backend.sizes[self.name(chunk, shard)] = self.fmt.object_size(shard)

    def delete(self, chunk: Chunk, shard: int = 0) -> None:
        del self.backend.sizes[self.name(chunk, shard)]

    def name(self, chunk: Chunk, shard: int) -> str:
        name = object_name(chunk, shard, self.fmt.shards)
        return f"{self.fmt.namespace.folder}/{name}"

    def submit(self, tokens: Sequence[int], first_chunk: int = 0) -> Lookup:
        return self.service.submit(
            tokens,
            lambda: KeyChain(self.fmt.namespace.digest, self.fmt.chunk_size),
            first_chunk=first_chunk,
        )

    def hit(self, tokens: Sequence[int]) -> int:
        lookup = self.submit(tokens)
        assert lookup.wait(PATIENCE)
        return lookup.hit_chunks


class Rig:
    """A shelf, look-ups on it, and objects that appear and vanish without being written."""

    def __init__(self, backend: Backend, deadlines: Deadlines | None = None) -> None:
        self.faults = FaultyStorage(backend)
        self.shelf = Shelf(GuardedBackend(self.faults, deadlines))
        self.failed = FailedKeys()
        self.counters = Counters()
        self.service = LookupService(
            self.shelf.view(FMT), failed=self.failed, counters=self.counters
        )

    def hold(self, name: str = "*") -> threading.Event:
        """Let probes hang until the event is set."""
        gate = threading.Event()
        self.faults.add(Fault("stat", name, wait=gate))
        return gate

    def chain(self, tokens: list[int]) -> KeyChain:
        chain = KeyChain(FMT.namespace.digest, SIZE)
        chain.extend(tokens)
        return chain

    def name(self, chunk: Chunk, shard: int) -> str:
        return f"{FMT.namespace.folder}/{object_name(chunk, shard, FMT.shards)}"

    def put(self, tokens: list[int], index: int, shard: int, missing: int = 0) -> None:
        name = self.name(self.chain(tokens).chunks[index], shard)
        self.faults.inner.write(name, [bytes(FMT.object_size(shard) - missing)], "replace")

    def store(self, tokens: list[int], indices: Iterable[int]) -> None:
        for index in indices:
            for shard in range(FMT.shards):
                self.put(tokens, index, shard)

    def submit(self, tokens: list[int]) -> Lookup:
        return self.service.submit(tokens, lambda: KeyChain(FMT.namespace.digest, SIZE))

    def look(self, tokens: list[int]) -> Lookup:
        lookup = self.submit(tokens)
        assert lookup.wait(PATIENCE)
        return lookup


prompt = functools.partial(prompts.prompt, unit=SIZE)


@pytest.fixture(params=["near", "far"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    backend = posix(tmp_path / "shelf")
    rig = Rig(backend if request.param == "near" else far_away(backend))
    yield rig
    rig.service.close()


@pytest.fixture
def near(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(posix(tmp_path / "shelf"))
    yield rig
    rig.service.close()


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Rig]:
    """A rig whose probes have short deadlines."""
    rig = Rig(posix(tmp_path / "shelf"))
    yield rig
    rig.service.close()


@pytest.fixture
def far() -> Iterator[Far]:
    far = Far()
    yield far
    far.backend.gate.set()
    far.service.close()


def test_what_was_found_is_not_asked_for_again_and_only_the_rest_of_a_longer_prompt(
    far: Far,
) -> None:
    tokens = prompt(400)
    chunks = far.chunks(tokens)
    far.put(chunks[:300])
    assert far.hit(tokens[: 200 * SIZE]) == 200
    far.backend.asked.clear()
    assert far.hit(tokens[: 200 * SIZE]) == 200
    assert not far.backend.asked
    assert far.hit(tokens) == 300
    asked = {name for names in far.backend.asked for name in names}
    assert not asked & {far.name(chunk, shard) for chunk in chunks[1:199] for shard in (0, 1)}
    far.backend.asked.clear()
    # Another end of the same beginning.
    assert far.hit(tokens[: 90 * SIZE] + prompt(5, seed=1)) == 90
    assert far.name(chunks[89], 1) in far.backend.asked[0], "where the hit ends it is confirmed"
    assert len(far.backend.asked) == 1


def test_what_lies_before_the_first_chunk_of_a_lookup_does_not_matter(far: Far) -> None:
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
    assert not any(far.service._presence.has(one.key, seen=False) for one in far.chunks(other))


def test_a_hit_that_is_gone_is_believed_until_a_load_fails(far: Far) -> None:
    tokens = prompt(40)
    chunks = far.chunks(tokens)
    far.put(chunks)
    assert far.hit(tokens) == 40
    far.delete(chunks[11], 1)
    assert far.hit(tokens) == 40, "what is remembered may be gone"
    far.failed.add(chunks[11].key, bad=False)
    assert far.hit(tokens) == 11
    # It does not count as missing any more, and is the first chunk that is not remembered.
    far.failed.clear()
    assert far.hit(tokens) == 11
    far.put(chunks[11:12])
    assert far.hit(tokens) == 40


def test_lookups_of_one_prompt_share_their_probes(far: Far) -> None:
    tokens = prompt(30)
    far.put(far.chunks(tokens))
    far.backend.gate.clear()
    first = [far.submit(prompt(1, seed=seed)) for seed in (7, 8)]
    until(lambda: len(far.backend.asked) + far.backend.listed >= 2)
    lookups = [far.submit(tokens) for _ in range(8)]
    far.backend.gate.set()
    assert all(lookup.wait(PATIENCE) for lookup in [*first, *lookups])
    assert [lookup.hit_chunks for lookup in lookups] == [30] * 8
    names = [name for asked in far.backend.asked for name in asked]
    # The two threads may ask for the same.
    assert max(map(names.count, names)) <= 2


def test_each_kind_is_remembered_fails_and_is_asked_for_by_itself() -> None:
    fmt = format_of_kinds({FULL: 1, STATE: 2}, SIZE)
    tokens = prompt(8)
    chunks = KeyChain(fmt.namespace.digest, SIZE).extend(tokens)
    backend = NamesOnly()
    views = {kind: Shelf(backend).view(fmt.of(kind)) for kind in fmt.kinds}
    for kind in fmt.kinds:
        for chunk in chunks:
            for shard in range(fmt.of(kind).shards):
                name = object_name(chunk, shard, fmt.of(kind).shards, kind)
                backend.write(
                    f"{fmt.namespace.folder}/{name}", [bytes(fmt.of(kind).object_size(shard))]
                )
    failed, counters = FailedKeys(), Counters()
    service = LookupService(*views.values(), failed=failed, counters=counters)

    def look() -> Lookup:
        lookup = service.submit(tokens, lambda: KeyChain(fmt.namespace.digest, SIZE))
        assert lookup.wait(PATIENCE)
        return lookup

    state = f"{fmt.namespace.folder}/{object_name(chunks[7], 1, 2, STATE)}"
    backend.broken.add(state)
    assert look().hit_chunks == 7
    assert counters.snapshot()["probe_errors"] > 0
    backend.broken.clear()
    lookup = look()
    assert (lookup.hit_chunks, lookup.full_chunks) == (8, 8), "an error is not remembered"
    assert lookup.known == {STATE: {7}}
    backend.asked.clear()
    assert look().hit_chunks == 8
    assert not backend.asked
    del backend.sizes[state]
    failed.add(kind_key(chunks[7].key, STATE), bad=False)
    assert look().hit_chunks == 7, "it counts as missing"
    failed.clear()
    assert look().hit_chunks == 7, "it is asked for again"
    service.close()


def test_a_probe_of_a_directory_that_fails_is_counted(near: Rig) -> None:
    tokens = prompt(3)
    near.store(tokens, range(3))
    near.faults.add(Fault("stat", error=lambda: TransientStorageError(116, "ESTALE"), times=1))
    assert near.look(tokens).hit_chunks < 3
    assert near.counters.snapshot()["probe_errors"] == 1
    assert near.look(tokens).hit_chunks == 3


def test_a_busy_thread_with_ever_new_look_ups_is_not_stalled(far: Far) -> None:
    far.backend.gate.clear()
    lookups = [far.submit(prompt(2, seed=seed)) for seed in range(5)]
    until(lambda: len(far.backend.asked) + far.backend.listed >= 1)
    assert not far.service.stalled(60.0)
    far.backend.gate.set()
    assert all(lookup.wait(PATIENCE) for lookup in lookups)
    until(lambda: not far.service._busy)
    assert not far.service.stalled(0.0)


def test_a_prompt_without_address_is_a_miss(rig: Rig) -> None:
    lookup = rig.service.submit(prompt(3), lambda: None)
    assert lookup.wait(PATIENCE)
    assert lookup.hit_chunks == 0
    assert lookup.chain is None


@pytest.mark.parametrize("distant", [False, True])
def test_a_look_up_that_waits_for_its_keys_holds_up_no_other(
    rig: Rig, far: Far, distant: bool
) -> None:
    service = far.service if distant else rig.service
    tokens = prompt(3)
    ready: dict[str, Future[None]] = {name: Future() for name in ("held", "late", "gone", "bad")}

    def submit(name: str) -> Lookup:
        def chain() -> KeyChain:
            ready[name].result()
            return KeyChain(FMT.namespace.digest, SIZE)

        return service.submit(tokens, chain, ready=ready[name])

    held, late, gone, bad = map(submit, ready)
    other = service.submit(tokens, lambda: KeyChain(FMT.namespace.digest, SIZE))
    assert other.wait(PATIENCE)
    assert not held.done
    assert not service.answers_soon(held)
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
    service.close()
    ready["late"].set_result(None)
    assert late.given_up


def test_a_look_up_whose_search_raises_ends_alone_and_has_its_keys(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad, other = prompt(30), prompt(30, seed=1), prompt(30, seed=2)
    far.put([*far.chunks(good), *far.chunks(other)])
    stat, broken = far.backend.stat, {far.name(chunk, 0) for chunk in far.chunks(bad)}

    def ask(names: Sequence[str]) -> StatResults:
        answers = stat(names)
        if broken.intersection(names):
            raise RuntimeError("a bug")
        return answers

    monkeypatch.setattr(far.backend, "stat", ask)
    far.backend.gate.clear()
    # One for each thread, so that those behind share rounds.
    first = [far.submit(prompt(1, seed=7)), far.submit(prompt(1, seed=8))]
    until(lambda: len(far.backend.asked) + far.backend.listed >= 2)
    waiting = [far.submit(tokens) for tokens in (good, bad, other)]
    far.backend.gate.set()
    assert all(lookup.wait(PATIENCE) for lookup in [*first, *waiting])
    assert [lookup.hit_chunks for lookup in waiting] == [30, 0, 30]
    assert [lookup.chain and len(lookup.chain.chunks) for lookup in waiting] == [30] * 3


def test_a_look_up_that_raises_is_a_miss_and_logged_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> KeyChain:
        raise RuntimeError("broken")

    for _ in range(3):
        lookup = rig.service.submit(prompt(3), broken)
        assert lookup.wait(PATIENCE)
        assert (lookup.hit_chunks, lookup.chain) == (0, None)
    bad_tokens = rig.look([-1] * SIZE)
    assert (bad_tokens.hit_chunks, bad_tokens.chain) == (0, None)
    assert rig.counters.snapshot()["probe_errors"] == 4
    assert len(caplog.records) == 1
    assert rig.look(prompt(1)).chain is not None


def test_a_callback_that_raises_ends_no_thread(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def fail(lookup: Lookup) -> None:
        raise KeyError("nobody knows it")

    for seed in range(5):
        lookup = rig.service.submit(prompt(1, seed), lambda: rig.chain([]), on_done=fail)
        assert lookup.wait(PATIENCE)
    until(lambda: "a completion callback of a lookup raised" in caplog.text)
    assert rig.look(prompt(1)).chain is not None
    assert caplog.text.count("a completion callback of a lookup raised") == 1


@pytest.mark.long
def test_look_ups_go_on_when_threads_can_be_started_again(
    hasty: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, others = prompt(1), prompt(1, seed=1)
    hasty.store(others, range(1))
    first = hasty.chain(tokens).chunks[0]
    gate = hasty.hold(f"*{first.key.hex()}*")
    with none_can_be_started(monkeypatch, "kvshelf-lookup"):
        hangs = hasty.submit(tokens)
        behind = [hasty.submit(others) for _ in range(3)]
        assert hangs.wait(PATIENCE)
        # No thread is left that could come to them.
        assert all(lookup.wait(PATIENCE) and lookup.given_up for lookup in behind)
        assert not hasty.service.available
        assert hasty.look(others).given_up
    # The thread that hangs may have opened the breaker, which closes by itself.
    until(lambda: hasty.look(others).hit_chunks == 1)
    gate.set()


def test_while_the_storage_rests_look_ups_make_keys_and_find_nothing(hasty: Rig) -> None:
    tokens = prompt(3)
    hasty.store(tokens, range(3))
    assert hasty.look(tokens).hit_chunks == 3
    gate = threading.Event()
    hasty.faults.add(Fault("*", wait=gate))
    hanging = [hasty.submit(tokens) for _ in range(5)]
    assert all(lookup.wait(PATIENCE) for lookup in hanging)
    assert not hasty.service.available
    asked = hasty.faults.counts["stat"]
    lookup = hasty.look(prompt(3, seed=1))
    assert lookup.hit_chunks == 0
    assert lookup.chain is not None
    assert len(lookup.chain.chunks) == 3
    assert hasty.faults.counts["stat"] - asked <= 3  # Only those that try whether it is well.
    gate.set()
    until(lambda: hasty.service.available)
    assert hasty.look(tokens).hit_chunks == 3


class TestFailedKeys:
    @pytest.fixture
    def now(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        now = [1000.0]
        monkeypatch.setattr("kvshelf.shelf.failed_keys.time.monotonic", lambda: now[0])
        return now

    def test_keys_that_fail_again_back_off_to_a_bound(
        self, now: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvshelf.shelf.failed_keys._MOST_SECONDS", 60)
        keys = FailedKeys()
        for seconds in (10, 20, 40, 60, 60):
            keys.add(b"k", bad=False)
            # A second load that was under way makes no difference.
            keys.add(b"k", bad=False)
            now[0] += seconds - 1
            assert b"k" in keys
            now[0] += 1
            assert b"k" not in keys
        now[0] += 61
        keys.add(b"k", bad=False)
        now[0] += 10
        assert b"k" not in keys

    def test_a_key_that_fails_again_after_it_was_repaired_waits(self, now: list[float]) -> None:
        keys = FailedKeys()
        keys.add(b"k", bad=True)
        keys.forget(b"k")
        assert b"k" not in keys
        keys.add(b"k", bad=True)
        keys.forget(b"k")
        assert keys.is_bad(b"k")
        now[0] += 600
        assert b"k" not in keys

    def test_memory_is_bounded_and_the_newest_stay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvshelf.shelf.failed_keys._LIMIT", 3)
        keys = FailedKeys()
        for i in range(10):
            keys.add(bytes([i]), bad=True)
        assert len(keys._keys) == 3
        assert [bytes([i]) in keys for i in range(10)] == [False] * 7 + [True] * 3
