"""Engines that start slowly, and storages of several speeds: which way each request takes.

One client sends one prompt after the other, and the shelf has all of them. Each request's time is
compared with that of the better way at this moment: to compute the prompt, or to load all that is
stored of it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.vllm.scheduler.admission_rule import MOST_DELAY, AdmissionRule, Before, Hit

CHUNK: Final = 256
BLOCK: Final = 16
#: Bytes of a token, seconds of a step, a token and a pair: the small model of the benchmarks.
TOKEN_BYTES: Final = 14_000
STEP_SECONDS, TOKEN_SECONDS, PAIR_SECONDS = 0.03, 2.6e-4, 3e-8
STEP_TOKENS: Final = 2048
LATENCY: Final = 0.002
THREADS: Final = 8
CHANGE_SECONDS: Final = 300.0

RATES: Final = (2e9, 1e8, 3e7, 1e7, 5e6, 2e6)
PROMPTS: Final = {"2K": [2080], "256k+1": [2049], "mixed": [1056, 2080, 8000, 2049]}


@dataclass
class Engine:
    """An engine with one client, on a storage whose speed is known.

    Attributes
    ----------
    rates : Sequence of float
        Bytes per second. Several follow each other, for five minutes each.
    slow_steps : int
        So many steps of the engine are slow.
    slowness : float
        How many times as long they take.
    hybrid : bool
        Hits cannot be divided.
    """

    rates: Sequence[float]
    slow_steps: int = 0
    slowness: float = 1.0
    hybrid: bool = False
    now: float = 1e6

    def __post_init__(self) -> None:
        self.rule = AdmissionRule(STEP_TOKENS)
        self.began, self.last_step = self.now, -1e6

    @property
    def age(self) -> float:
        return self.now - self.began

    @property
    def rate(self) -> float:
        return self.rates[int(self.age // CHANGE_SECONDS) % len(self.rates)]

    def steps(self, start: int, end: int) -> Iterator[tuple[int, int, float]]:
        """Yield the steps that compute tokens, and how long they take."""
        slow_steps = self.slow_steps
        for begin in range(start, end, STEP_TOKENS):
            stop = min(begin + STEP_TOKENS, end)
            pairs = (stop * stop - begin * begin) / 2
            seconds = STEP_SECONDS + TOKEN_SECONDS * (stop - begin) + PAIR_SECONDS * pairs
            yield begin, stop, seconds * (self.slowness if slow_steps > 0 else 1.0)
            slow_steps -= 1

    def compute_seconds(self, start: int, end: int) -> float:
        return sum(seconds for _, _, seconds in self.steps(start, end))

    def compute(self, start: int, end: int) -> None:
        for begin, stop, seconds in list(self.steps(start, end)):
            paused = self.now - self.last_step > 0.05
            self.now += seconds
            self.slow_steps -= 1
            self.last_step = self.now
            began_slowly = paused and seconds < 0.05
            self.rule.prefill.learn([(begin, stop)], 0, seconds, began_slowly=began_slowly)

    def hit(self, end: int, tokens: int) -> Hit:
        nbytes = -(-end // CHUNK) * CHUNK * TOKEN_BYTES
        unit = CHUNK if self.hybrid else BLOCK
        return Hit(0, end, tokens, CHUNK, nbytes, not self.hybrid, unit=unit)

    def ask(self, tokens: int) -> tuple[float, float]:
        """Serve a prompt; return how long that took, and how long the better way takes."""
        end = (tokens - 1) // BLOCK * BLOCK
        end = min(end, tokens // CHUNK * CHUNK)
        if self.hybrid:
            end -= end % CHUNK
        whole = self.hit(end, tokens)
        loaded = LATENCY + whole.nbytes / self.rate + self.compute_seconds(end, tokens)
        better, began, start = min(loaded, self.compute_seconds(0, tokens)), self.now, 0
        end = self.rule.end_of_load(whole, Before(), self.now)
        if end:
            start = self._load(self.hit(end, tokens))
        else:
            self.rule.begin_computing(tokens, self.now)
        self.compute(start, tokens)
        return self.now - began, better

    def _load(self, hit: Hit) -> int:
        """Load a hit; return how many tokens are there when it ends, or is cut."""
        rule = self.rule
        patience = rule.patience(hit, Before())
        threads = min(THREADS, hit.chunks)
        if rule.admits(hit, Before()):
            threads = min(rule.at_once(hit, Before()), threads)
        rule.begin_load(hit, self.now)
        arrivals: list[float] = []
        while len(arrivals) < hit.chunks:
            batch = min(threads, hit.chunks - len(arrivals))
            begin = arrivals[-1] if arrivals else LATENCY
            arrivals += [begin + batch * CHUNK * TOKEN_BYTES / self.rate] * batch
        for place, arrival in enumerate(arrivals):
            cut = patience[min(place, len(patience) - 1)]
            if arrival > cut:
                taken = max(cut, arrivals[place - 1] if place else 0.0)
                reads = min(threads, hit.chunks - place)
                # As a worker reports it: of the first chunks under way all may have come.
                share = (place + reads / (2 if place else 1)) / hit.chunks
                self.now += taken
                rule.loads[False].learn(hit.nbytes, taken / share)
                return 0 if self.hybrid else place * CHUNK
        self.now += arrivals[-1]
        rule.loads[False].learn(hit.nbytes, arrivals[-1])
        return hit.end


@dataclass(slots=True)
class Judgement:
    """How an engine's requests compare with the better way.

    Attributes
    ----------
    first : float
        Seconds of the first request above 1.25 times what computing takes, and a second.
    median : float
        Of all from the fourth on, as a multiple.
    worst_sum : float
        The largest of sums over a hundred requests in turn, from the fourth on, as a multiple.
    """

    first: float
    median: float
    worst_sum: float


def judge(engine: Engine, lengths: Sequence[int], requests: int = 130) -> Judgement:
    """Serve requests and compare them."""
    computing = engine.compute_seconds(0, lengths[0])
    times = [engine.ask(lengths[place % len(lengths)]) for place in range(requests)]
    later = times[3:]
    sums = [
        sum(taken for taken, _ in window) / sum(better for _, better in window)
        for window in (later[place : place + 100] for place in range(len(later) - 99))
    ]
    median = statistics.median(taken / better for taken, better in later)
    return Judgement(times[0][0] - 1.25 * computing - 1.0, median, max(sums))


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("hybrid", [False, True])
def test_requests_after_any_start_take_the_better_way(name: str, *, hybrid: bool) -> None:
    starts = [(1, 1), (1, 20), (2, 5), (5, 20)]
    judgements = [
        judge(Engine([rate], *start, hybrid=hybrid), PROMPTS[name])
        for rate, start in itertools.product(RATES, starts)
    ]
    assert max(judgement.first for judgement in judgements) <= 0
    assert max(judgement.median for judgement in judgements) <= 1.15
    # Most of a sum is above where a storage is slow and five steps take twenty times as long.
    assert max(judgement.worst_sum for judgement in judgements) <= 1.15


@pytest.mark.parametrize("hybrid", [False, True])
def test_storage_whose_speed_changes_is_followed_after_trials(*, hybrid: bool) -> None:
    engine = Engine([1e8, 5e6, 2e9, 1e7, 2e6, 3e7], 2, 5.0, hybrid=hybrid)
    settled: list[tuple[float, float]] = []
    while engine.age < 6 * CHANGE_SECONDS:
        since_change = engine.age % CHANGE_SECONDS
        taken, better = engine.ask(2080)
        # A way that is not taken is tried each minute, or after 25 times what that costs.
        if since_change > 120.0:
            settled.append((taken, better))
    assert statistics.median(taken / better for taken, better in settled) <= 1.15
    assert sum(taken for taken, _ in settled) <= 1.15 * sum(better for _, better in settled)


@given(
    length=st.sampled_from([512, 4096, 32768]),
    start=st.sampled_from([0, 256, 8192]),
    pair_seconds=st.sampled_from([0.0, 1e-9, 3e-8]),
    share_of_computing=st.floats(0.01, 3.0),
)
def test_slack_is_that_of_the_moment_at_which_a_steady_load_is_latest(
    length: int, start: int, pair_seconds: float, share_of_computing: float
) -> None:
    rule, end = AdmissionRule(STEP_TOKENS), start + length
    for tokens in (256, 1024, STEP_TOKENS) * 3:
        taken = STEP_SECONDS + tokens * TOKEN_SECONDS + tokens**2 / 2 * pair_seconds
        rule.prefill.learn([(0, tokens)], 0, taken)
    seconds = rule.prefill.seconds
    hit = Hit(start, end, end + BLOCK, CHUNK, TOKEN_BYTES * length, divisible=True)
    load = share_of_computing * seconds(start, end)
    rule.loads[False].learn(hit.nbytes, load)
    late = max(
        place / length * load - seconds(start, start + place)
        for place in range(0, length + 1, length // 512)
    )
    expected = 1.0 + MOST_DELAY * seconds(start, end) - late
    assert rule._slack(hit, Before(unloaded=1.0)) == pytest.approx(expected, rel=1e-3)


def test_load_while_computing_is_unknown_may_take_as_long_as_usual() -> None:
    rule = AdmissionRule(STEP_TOKENS)
    hit = Hit(0, 1024, 1025, CHUNK, 1024 * TOKEN_BYTES)
    assert rule.patience(hit, Before()) == (1.0,)
    rule.loads[False].learn(hit.nbytes, 1.2)
    rule.prefill.learn([(1024, 1025)], 0, 2.0)
    assert rule.patience(hit, Before()) == pytest.approx((1.5,))


@pytest.mark.parametrize(("load_seconds", "admitted"), [(0.9, True), (1.1, False)])
def test_hit_that_cannot_be_divided_is_admitted_if_it_loads_before_its_cut(
    load_seconds: float, *, admitted: bool
) -> None:
    rule = AdmissionRule(STEP_TOKENS)
    hit = Hit(0, 512, 513, CHUNK, 512 * TOKEN_BYTES, divisible=False)
    for _ in range(3):
        rule.prefill.learn([(0, 512)], 0, 1.0)
        rule.loads[False].learn(hit.nbytes, load_seconds)
    (cut,) = rule.patience(hit, Before())
    assert (load_seconds < cut) == admitted
    assert rule.admits(hit, Before()) == admitted
