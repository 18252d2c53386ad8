"""Which hits are loaded, by the times that an engine's steps and loads have taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.tiers.tiered import AnyShelf, TieredShelf
from kvshelf.vllm.handover import Handover
from kvshelf.vllm.metadata import LoadOp
from kvshelf.vllm.scheduler.requests import RequestState
from tests.server.node import LocalServer
from tests.sim.engine import Start
from tests.sim.engine_sides import (
    CHUNK,
    PART,
    LoneScheduler,
    Request,
    give_lookups,
    lookup_of,
    set_clock,
    take_lookups,
)
from tests.sim.storage import posix
from tests.support.clocks import Clock
from tests.support.formats import hold_buffer, sealed
from tests.support.prompts import prompt
from tests.support.waiting import until

#: Seconds that computing a token takes.
TOKEN = 0.01
COUNTED = ("expected", "measured")


class Engine:
    """A scheduler side whose steps and loads take as long as a test says."""

    def __init__(self, root: Path, shelf: AnyShelf | None = None, **options: Any) -> None:
        self.side = LoneScheduler(root, known=False, **{"admission": "auto", **options})
        self.side.shelf = shelf or self.side.shelf
        self.side.report(reports={0: PART})
        self.side.report()
        self.clock = self.side.side.admission.clock = Clock(1e6)
        self.count = 0

    def compute(self, tokens: int = 64, seconds: float | None = None) -> None:
        """Compute a prompt that is not on the shelf in one step."""
        self.count += 1
        name = f"computed {self.count}"
        assert self.side.ask(Request(name, prompt(tokens, 100_000 + self.count))) == 0
        meta = self.side.step({name: (0, tokens)}, new=(name,))
        self.clock.now += TOKEN * tokens if seconds is None else seconds
        self.side.report(timed_steps={0: meta.timed_step} if meta.timed_step else {})
        self.side.side.finished(name, ())

    def request(self, tokens: int, **options: Any) -> Request:
        """A prompt of which all but the last token is on the shelf."""
        self.count += 1
        request = Request(f"r{self.count}", prompt(tokens, self.count), **options)
        self.side.put(request.prompt_token_ids)
        return request

    def load(self, tokens: int, seconds: float) -> LoadOp:
        """Load a prompt in so many seconds, a minute later: also one that is refused otherwise.

        So a storage that stays slow is tried once a minute.
        """
        self.clock.now += 61.0
        self.compute()
        request = self.request(tokens)
        found = self.side.ask(request)
        assert found == (tokens - 1) // CHUNK * CHUNK
        self.side.load(request, found)
        (op,) = self.side.step().loads
        self.end(request.request_id, seconds)
        return op

    def patience(self, request: Request) -> Sequence[float]:
        """Begin to load what there is of a prompt; return when that is cut."""
        self.side.load(request, self.side.ask(request))
        (op,) = self.side.step().loads
        self.side.side.loads.done({request.request_id})
        return op.patience

    def end(self, name: str, seconds: float) -> None:
        self.clock.now += seconds
        self.side.side.loads.done({name})
        self.side.took(name, seconds)
        self.side.side.finished(name, ())

    def learn_computing(self) -> None:
        """Learn for certain what prompts take."""
        for _ in range(5):
            self.compute()

    def learn(self, load_seconds: float) -> None:
        """Learn for certain what prompts take, and that a load takes so long."""
        self.learn_computing()
        for _ in range(3):
            self.load(65, load_seconds)

    def counted(self, name: str) -> float:
        return self.side.side.counters.snapshot().get(name, 0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "shelf"


@pytest.fixture
def engine(root: Path) -> Iterator[Engine]:
    engine = Engine(root)
    yield engine
    engine.side.close()


def test_before_anything_is_computed_loads_are_cut_after_a_second(engine: Engine) -> None:
    requests = [engine.request(65) for _ in range(3)]
    # Steps may pass until there is an answer.
    found = [engine.side.ask(request) for request in requests]
    for request, tokens in zip(requests, found, strict=True):
        engine.side.load(request, tokens)
    assert [op.patience for op in engine.side.step().loads] == [(1.0,), (2.0,), (3.0,)]


@pytest.mark.parametrize("seconds", [0.3, 0.9])
def test_what_is_computed_behind_a_cut_load_says_enough(engine: Engine, seconds: float) -> None:
    cut = engine.request(65)
    assert engine.patience(cut) == (1.0,)
    engine.side.took(cut.request_id, seconds)
    # After a pause, as in an engine that has one request at a time.
    engine.clock.now += 1.0
    engine.compute(64)
    assert (engine.side.ask(engine.request(65)) > 0) == (seconds < 0.64)


@pytest.mark.parametrize("seconds", [0.1, 0.5, 0.8, 5.0])
def test_hit_is_loaded_only_where_computing_takes_longer(engine: Engine, seconds: float) -> None:
    engine.learn(seconds)
    found = engine.side.ask(engine.request(65))
    # Computing it takes 0.64 s.
    assert found == (64 if seconds < 0.64 else 0)


@pytest.mark.parametrize(
    ("lengths", "seconds", "short", "long"),
    # The last hit is longer than any that was loaded.
    [(16 * (33, 65, 129, 201), 0.2, 33, 201), (3 * (17,), 0.5, 65, 97)],
)
def test_long_hits_are_loaded_from_a_storage_that_is_too_slow_for_short_ones(
    engine: Engine, lengths: tuple[int, ...], seconds: float, short: int, long: int
) -> None:
    engine.learn_computing()
    for tokens in lengths:
        engine.load(tokens, seconds)
    # The first chunk must not be later than a quarter of what computing takes.
    assert engine.side.ask(engine.request(short)) == 0
    assert engine.side.ask(engine.request(long)) == long - 1


def test_refused_hit_is_counted_once_and_noted(engine: Engine) -> None:
    engine.learn(5.0)
    request = engine.request(65)
    for _ in range(3):
        assert engine.side.ask(request) == 0
    assert engine.counted("refused_hits") == 1
    assert engine.counted("refused_tokens") == 64
    assert engine.counted("hit_tokens") == 4 * 64
    engine.side.side.finished(request.request_id, ())


def test_always_loads_everything_and_cuts_nothing(root: Path) -> None:
    engine = Engine(root, admission="always")
    engine.learn(5.0)
    assert engine.load(65, 5.0).patience == ()
    engine.side.close()


def test_load_is_cut_when_computing_the_rest_is_sooner(engine: Engine) -> None:
    engine.learn(0.1)
    # Of eight chunks, with so many of them there.
    expected = [1.25 * TOKEN * 64 - TOKEN * (64 - 8 * chunks) for chunks in range(8)]
    assert engine.patience(engine.request(65)) == pytest.approx(expected, rel=0.05)


def test_what_kvshelf_makes_a_request_wait_counts_and_nothing_else(engine: Engine) -> None:
    engine.learn(0.1)
    alone = engine.patience(engine.request(65))
    request, side = engine.request(65), engine.side.side
    # For blocks.
    for _ in range(3):
        assert engine.side.ask(request) == 64
        engine.clock.now += 10.0
    # For an answer.
    lookups = take_lookups(side)
    assert side.matched_tokens(request, 0) is None
    engine.clock.now += 0.05
    give_lookups(side, lookups)
    later = [seconds - 0.05 for seconds in alone]
    assert engine.patience(request) == pytest.approx(later)
    engine.clock.now += 10.0
    # After a preemption.
    request.num_preemptions += 1
    assert engine.patience(request) == pytest.approx(alone)


def test_wait_for_a_hand_over_does_not_count(engine: Engine) -> None:
    engine.learn(0.1)
    alone = engine.patience(engine.request(65))
    tokens = prompt(97, 500)
    chunks = engine.side.chunks(tokens)
    params = Handover(engine.side.fmt.namespace.digest, 96, chunks[11].key, 0, "0" * 32).params()
    request = Request("late", tokens, kv_transfer_params=params)
    engine.side.put(tokens, 8)
    waits = set_clock(engine.side.side, engine.clock.now)
    assert engine.side.side.matched_tokens(request, 0) is None
    for clock in (engine.clock, waits):
        clock.now += 30.0
    assert engine.patience(request) == pytest.approx(alone)


def test_load_costs_nothing_while_other_prompts_are_computed(engine: Engine) -> None:
    engine.learn(0.8)
    assert engine.side.ask(engine.request(65)) == 0
    other = Request("other", prompt(500, 77))
    engine.side.side.new_request(other)
    engine.side.step({"other": (0, 64)}, new=("other",))
    other.num_computed_tokens = 64
    request = engine.request(65)
    assert engine.side.ask(request) == 64
    engine.side.load(request, 64)
    (op,) = engine.side.step().loads
    assert op.patience[0] == pytest.approx(TOKEN * (436 + 16), rel=0.05)


def test_request_that_is_computed_counts_before_its_step(engine: Engine) -> None:
    engine.learn(0.8)
    first, second = engine.request(65), engine.request(65)
    for request in (first, second):
        engine.side.side.new_request(request)
        lookup = lookup_of(engine.side.side, request.request_id)
        assert lookup is not None
        until(lambda lookup=lookup: lookup.done)
    # Computing takes 0.64 s, and the second prompt waits as long.
    assert engine.side.ask(first) == 0
    assert engine.side.ask(second) == 64
    # When it is over, the next one is alone again.
    engine.side.step()
    assert engine.side.ask(engine.request(65)) == 0


def test_loads_that_run_at_once_are_not_all_cut(engine: Engine) -> None:
    """They share the storage; computed, each prompt would wait for those before it."""
    engine.learn(0.065)
    requests = [engine.request(65) for _ in range(8)]
    # Steps may pass until there is an answer.
    found = [engine.side.ask(request) for request in requests]
    for request, tokens in zip(requests, found, strict=True):
        engine.side.load(request, tokens)
    loads = engine.side.step().loads
    assert len(loads) == 8
    for before, op in enumerate(loads):
        assert op.patience[0] == pytest.approx(TOKEN * (65 * before + 16), rel=0.05)


def test_load_that_failed_is_in_the_way_of_no_other(engine: Engine) -> None:
    engine.learn(0.195)
    failed = [engine.request(201) for _ in range(8)]
    for request in failed:
        engine.side.load(request, engine.side.ask(request))
    engine.side.step()
    assert engine.side.ask(engine.request(65)) == 0
    # Their requests are computed, and no time is reported of a load that failed.
    engine.side.side.loads.done({request.request_id for request in failed})
    assert engine.side.ask(engine.request(65)) == 64


def test_request_counts_its_wait_for_the_load_of_another(engine: Engine) -> None:
    engine.learn(0.1)
    first = engine.request(201)
    engine.side.load(first, engine.side.ask(first))
    (cut,) = engine.side.step().loads
    second = engine.side.known("second", prompt(201, engine.count))
    assert engine.side.side.matched_tokens(second, 0) is None
    engine.clock.now += 0.5
    engine.side.side.loads.done({first.request_id})
    engine.side.load(second, engine.side.ask(second))
    (op,) = engine.side.step().loads
    assert op.patience[0] == pytest.approx(cut.patience[0] - 0.5)


def test_request_whose_hit_is_refused_waits_for_no_load(engine: Engine) -> None:
    engine.learn(5.0)
    # Once a minute a hit is loaded all the same.
    engine.clock.now += 61.0
    first = engine.request(65)
    engine.side.load(first, engine.side.ask(first))
    second = engine.side.known("second", prompt(65, engine.count))
    assert engine.side.side.matched_tokens(second, 0) == 0


def test_what_is_handed_over_is_always_loaded(engine: Engine) -> None:
    engine.learn(5.0)
    tokens = prompt(65, 500)
    chunks = engine.side.chunks(tokens)
    params = Handover(engine.side.fmt.namespace.digest, 64, chunks[7].key, 0, "0" * 32).params()
    request = Request("handed over", tokens, kv_transfer_params=params)
    engine.side.put(tokens)
    assert engine.side.ask(request) == 64
    engine.side.load(request, 64)
    (op,) = engine.side.step().loads
    assert op.patience == ()


@pytest.mark.parametrize(("seconds", "expected"), [(0.1, 64), (5.0, 0)])
def test_what_nobody_has_promised_is_loaded_where_that_pays(
    engine: Engine, seconds: float, expected: int
) -> None:
    engine.learn(seconds)
    tokens = prompt(64, 500)
    engine.side.put(tokens, 7)
    request = engine.side.known("r", tokens, kv_transfer_params={"do_remote_prefill": True})
    assert engine.side.side.matched_tokens(request, 0) is None
    engine.side.put(tokens)
    assert engine.side.ask(request) == expected
    engine.side.load(request, expected)
    assert [len(op.patience) for op in engine.side.step().loads] == [8] * (expected // 64)


def test_saturated_engine_has_time_for_each_load(start: Start) -> None:
    prompts = [prompt(203, number) for number in range(12)]
    start().run(*prompts)
    # Blocks for two of them.
    engine = start(blocks=60, admission="auto")
    admission = engine.side.admission
    admission.clock = clock = Clock(1e6)
    admission._rule.prefill.learn([(0, 203)], 0, 203 * TOKEN)
    for number, tokens in enumerate(prompts):
        engine.add(f"r{number}", tokens, answer=8)
        engine.wait_for_lookup(f"r{number}")
    while engine.scheduler.has_requests():
        engine.step()
        clock.now += 0.5
    loads = [op for meta in engine.metas for op in meta.loads]
    assert len(loads) >= len(prompts)
    assert all(op.patience[0] > 0 for op in loads)


def test_question_costs_the_same_whatever_waits_and_runs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.learn(0.1)
    field: Any = RequestState.__dict__["loading"]
    looks: list[str] = []

    def looked_at(state: RequestState) -> Any:
        looks.append(state.id)
        return field.__get__(state)

    monkeypatch.setattr(RequestState, "loading", property(looked_at, field.__set__))

    def question() -> int:
        request = engine.request(65)
        engine.side.side.new_request(request)
        engine.side.looked_up(request.request_id)
        engine.side.step()
        looks.clear()
        assert engine.side.ask(request) == 64
        engine.side.load(request, 64)
        return len(looks)

    alone = question()
    for number in range(200):
        engine.side.side.new_request(Request(f"waits {number}", prompt(20, 30_000 + number)))
    for _ in range(20):
        assert question() == alone


def test_storage_that_has_become_fast_is_used_again(engine: Engine) -> None:
    """A hit is loaded where none was for a minute, all of it at once, and cut as others are."""
    engine.learn(5.0)
    explored = engine.counted("explored_loads")
    engine.clock.now += 50.0
    assert engine.side.ask(engine.request(65)) == 0
    op = engine.load(65, 0.01)
    assert (op.patience[0], op.at_once) == (pytest.approx(0.16, rel=0.05), 0)
    assert engine.counted("explored_loads") == explored + 1
    assert engine.side.ask(engine.request(65)) == 64


# ------------------------------------------------------------------------- tiers


@pytest.fixture(params=["own memory", pytest.param("node server", marks=pytest.mark.real)])
def tiered(request: pytest.FixtureRequest, root: Path, tmp_path: Path) -> Iterator[Engine]:
    """An engine with memory for 16 chunks, which knows what prompts take."""
    engine = Engine(root)
    nbytes = 16 * sum(map(engine.side.fmt.object_size, range(engine.side.fmt.shards)))
    engine.side.close()
    with ExitStack() as stack:
        if request.param == "own memory":
            engine = Engine(root, memory=nbytes)
        else:
            server = LocalServer(tmp_path / "node", posix(root), nbytes)
            stack.callback(server.close)
            engine = Engine(root, stack.enter_context(server.open_shelf()))
        stack.callback(engine.side.close)
        engine.learn_computing()
        yield engine


def again(engine: Engine, request: Request, seconds: float | None = None) -> int:
    """Ask for a prompt once more, and load it in so many seconds; return the hit."""
    request = Request(f"{request.request_id} again", request.prompt_token_ids)
    found = engine.side.ask(request)
    if found and seconds is not None:
        engine.side.load(request, found)
        engine.side.step()
        engine.end(request.request_id, seconds)
    return int(found)


def learn_both(engine: Engine, tokens: int) -> Request:
    """Learn that the storage is slow and memory fast; return a prompt that is in memory."""
    for _ in range(3):
        request = engine.request(tokens)
        again(engine, request, 5.0)
    again(engine, request, 0.1)
    return request


def test_what_lies_in_a_tier_is_loaded_though_the_storage_is_slow(tiered: Engine) -> None:
    request = learn_both(tiered, 65)
    assert again(tiered, tiered.request(65)) == 0
    assert again(tiered, request) == 64


def test_of_memory_nothing_is_known_of_the_storage(tiered: Engine) -> None:
    request = tiered.request(65)
    tiered.side.put(request.prompt_token_ids)
    for seconds in (0.1, 5.0, 5.0, 5.0):
        again(tiered, request, seconds)
    # From the storage the first has come.
    assert again(tiered, request) == 0
    assert again(tiered, tiered.request(65)) == 64


def test_what_no_longer_fits_into_memory_counts_as_on_the_storage(tiered: Engine) -> None:
    request = learn_both(tiered, 65)
    other = Request("other", prompt(16 * CHUNK, 50_000))
    assert tiered.side.ask(other) == 0
    assert len(tiered.side.step({"other": (0, 16 * CHUNK)}, new=("other",)).stores) == 16
    assert again(tiered, request) == 0


class BehindDiskTier(Engine):
    """An engine that knows what prompts take, and prompts that only a disk tier has copies of."""

    def __init__(self, root: Path, folder: Path) -> None:
        tier = DiskTier(folder, 1 << 30)
        place = {"path": str(folder), "max_bytes": "1GiB"}
        super().__init__(root, TieredShelf(Shelf(posix(root)), [tier]), disk_tier=place)
        self.learn_computing()
        self.far, self.near = ([self.request(65) for _ in range(4)] for _ in range(2))
        fmt = self.side.fmt
        chunks = [chunk for one in self.near for chunk in self.side.chunks(one.prompt_token_ids)]
        refs = [ObjectRef(chunk, shard) for chunk in chunks for shard in range(fmt.shards)]
        for ref in refs:
            tier.keep(fmt, ref, sealed(fmt, *ref), hold_buffer)
        until(lambda: all(tier.holds(fmt, refs)))

    def learn_loads(self, far: float, near: float) -> None:
        """Learn what loads take, from the storage and from the tier."""
        for requests, seconds in ((self.far, far), (self.near, near)):
            for request in requests[:3]:
                assert again(self, request, seconds) == 64


@pytest.fixture
def behind_disk_tier(root: Path, tmp_path: Path) -> Iterator[BehindDiskTier]:
    engine = BehindDiskTier(root, tmp_path / "tier")
    yield engine
    engine.side.close()


def test_what_a_disk_tier_has_is_loaded_though_this_engine_never_saw_it(
    behind_disk_tier: BehindDiskTier,
) -> None:
    behind_disk_tier.learn_loads(far=5.0, near=0.1)
    assert again(behind_disk_tier, behind_disk_tier.far[3]) == 0
    assert again(behind_disk_tier, behind_disk_tier.near[3]) == 64


def test_tier_that_has_become_fast_says_nothing_of_the_storage(
    behind_disk_tier: BehindDiskTier,
) -> None:
    engine = behind_disk_tier
    engine.learn_loads(far=5.0, near=5.0)
    engine.clock.now += 61.0
    assert again(engine, engine.far[3], 5.0) == 64
    assert again(engine, engine.near[3], 0.01) == 64
    assert again(engine, engine.near[3]) == 64
    assert again(engine, engine.far[3]) == 0


def test_hits_that_lie_in_both_are_judged_by_where_most_of_them_lies(tiered: Engine) -> None:
    """A small part in memory keeps none from being refused, nor a small part that is not there."""
    short = learn_both(tiered, 33)
    for more, expected in ((8, 0), (2, 48)):
        tokens = [*short.prompt_token_ids[:32], *prompt(more * CHUNK + 1, 60_000 + more)]
        tiered.side.put(tokens)
        assert tiered.side.ask(Request(f"{more} more", tokens)) == expected


def test_what_a_failed_load_did_not_bring_is_not_in_memory(tiered: Engine) -> None:
    learn_both(tiered, 65)
    tokens = prompt(65, 500)
    chunks = tiered.side.chunks(tokens)
    params = Handover(tiered.side.fmt.namespace.digest, 64, chunks[7].key, 0, "0" * 32).params()
    failed = Request("failed", tokens, kv_transfer_params=params)
    tiered.side.put(tokens)
    assert tiered.side.ask(failed) == 64
    tiered.side.load(failed, 64)
    tiered.side.step()
    tiered.side.side.loads.done({"failed"})
    assert again(tiered, Request("same", tokens)) == 0


# ------------------------------------------------------------------------- what is timed


def test_what_was_expected_is_counted_beside_what_it_took(engine: Engine) -> None:
    engine.learn(0.1)
    names = [f"{how}_{what}_seconds" for what in ("prefill", "load") for how in COUNTED]
    before = list(map(engine.counted, names))
    engine.load(65, 0.1)
    counted = [engine.counted(name) - old for name, old in zip(names, before, strict=True)]
    assert counted[1::2] == pytest.approx([TOKEN * 64, 0.1])
    assert counted[::2] == pytest.approx([TOKEN * 64, 0.1], rel=0.1)


def test_small_steps_after_a_pause_are_not_learned(engine: Engine) -> None:
    """They begin slowly; an engine with little to do learns from others."""
    expected = engine.side.side.admission._rule.prefill.seconds
    engine.compute()
    for _ in range(20):
        engine.clock.now += 1.0
        engine.compute(8, seconds=0.045)
    assert expected(0, 64) == pytest.approx(0.64, rel=0.05)
    for _ in range(20):
        engine.clock.now += 1.0
        engine.compute(seconds=1.28)
    assert expected(0, 64) == pytest.approx(1.28, rel=0.1)


def test_steps_without_prompts_are_not_timed(engine: Engine) -> None:
    def timed(scheduled: dict[str, tuple[int, int]]) -> bool:
        return engine.side.step(scheduled).timed_step > 0

    engine.side.side.new_request(Request("r", prompt(200)))
    assert timed({"r": (0, 64)})
    assert timed({"r": (64, 64)})
    assert timed({"r": (128, 71)})
    assert timed({"r": (199, 1)})
    assert not timed({"r": (200, 1)})
    assert timed({"r": (201, 64)})
    assert not timed({})


def test_steps_that_overlap_are_timed_from_the_end_of_the_one_before(engine: Engine) -> None:
    """With asynchronous scheduling a step is planned while the one before it runs."""
    engine.learn(0.1)
    names = [f"n{number}" for number in range(40)]
    for name in names:
        engine.side.side.new_request(Request(name, prompt(64, hash(name) % 10_000)))
    numbers: list[int] = []
    for name in names:
        numbers.append(engine.side.step({name: (0, 64)}, new=(name,)).timed_step)
        if len(numbers) > 1:
            engine.clock.now += TOKEN * 64
            engine.side.report(timed_steps={0: numbers.pop(0)})
    taken = engine.side.side.admission._rule.prefill.seconds(0, 64)
    assert taken == pytest.approx(TOKEN * 64, rel=0.1)
