"""``python -m benchmarks.state_policy TRACE...``: which states of a hybrid model are worth storing.

Owns a simulation of engines behind one shelf, over traces of real requests, and the table that
compares rules for storing states. No bytes are moved; it needs neither vLLM nor a storage.

A trace is a file of JSON lines, plain or gzip, with ``timestamp`` (milliseconds), ``input_length``,
``output_length`` (tokens) and ``hash_ids``: one id for each 512 tokens of the prompt, equal where
the prefixes up to there are equal (the format of the traces that Mooncake publishes). What two
prompts share inside 512 tokens is not known, so chunks must be multiples of 512 tokens.

What is simulated
-----------------
* Steps as vLLM 0.32 makes them for models with states (``Scheduler._mamba_block_aligned_split`` of
  v1/core/sched/scheduler.py): running requests first, then waiting ones, until the token budget is
  spent; a prefill step ends at a multiple of the block, at the last full block before the prompt's
  end, and at junctions. A state exists where a step ends, nowhere else.
* The prefix cache of each engine: least recently used blocks, a state costs `STATE_BLOCKS` of them;
  states only at the last full block of a prompt and at junctions (retention interval 0). A junction
  is where a prompt leaves what the engine's own cache has of full attention, if the cache has no
  state there (``HybridKVCacheCoordinator.find_longest_cache_hit``).
* A shelf without limit that all engines share: every full chunk, and the states that the rule
  selects. A request takes the longer one of its engine's own hit and the shelf's.

Chunks are as large as blocks. Storing and loading take no time. Requests go to the engines in turn.
All runs over two traces of 16,000 requests take a minute.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TRACE_BLOCK = 512  # tokens
STATE_BLOCKS = 3  # blocks of a state: three groups of state layers, as in Qwen3-Next
_STEP_SECONDS = 0.01
_TOKENS_PER_SECOND = 80_000.0  # of all engines together
_DECODE_SECONDS = 0.03  # for each token


@dataclass(frozen=True, slots=True)
class Rule:
    """Which states are stored, besides the one at the last full chunk before a prompt's end.

    Attributes
    ----------
    interval : int
        Those so many chunks after the last one that is stored; 0: none.
    junctions : bool
        Those at junctions.
    shared : bool
        Those inside the prefix whose full chunks the shelf has.
    dense : bool
        One after each chunk that is computed, whether a step ends there or not.
    """

    interval: int = 0
    junctions: bool = True
    shared: bool = True
    dense: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """Engines behind one shelf.

    Attributes
    ----------
    chunk, budget : int
        Tokens of a chunk and of a block; most tokens of a step.
    engines : int
    cache_tokens : int
        Tokens that fit into each engine's own cache.
    """

    chunk: int = 512
    budget: int = 8192
    engines: int = 4
    cache_tokens: int = 1 << 20


@dataclass(slots=True)
class Outcome:
    """Sums over a trace: tokens of prompts, tokens found, states stored."""

    tokens: int = 0
    local: int = 0
    shelf: int = 0
    states: int = 0

    @property
    def hits(self) -> int:
        """Tokens that no engine computed."""
        return self.local + self.shelf


@dataclass(slots=True)
class Prompt:
    """A request: its arrival in seconds, the ids of its prefixes, and its progress in tokens."""

    arrival: float
    length: int
    output: int
    ids: Sequence[int]
    keys: Sequence[int] = ()
    computed: int = 0
    junction: int = 0
    shared: int = 0
    loaded: bool = False
    stored: int = 0  # the last boundary of which the shelf has the state

    def start(self, chunk: int) -> Prompt:
        """Return the request before its first step, with a key for each whole chunk."""
        per = chunk // TRACE_BLOCK
        keys = self.ids[per - 1 : self.length // TRACE_BLOCK : per]
        return Prompt(self.arrival, self.length, self.output, self.ids, keys)

    def last_boundary(self, chunk: int) -> int:
        """Tokens before the last full chunk's end that a hit can reach."""
        return (self.length - 1) // chunk * chunk


def read_trace(path: Path) -> list[Prompt]:
    """Return the requests of a trace in the order of their arrival."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [json.loads(line) for line in lines]
    return sorted(
        (
            Prompt(
                row["timestamp"] / 1000, row["input_length"], row["output_length"], row["hash_ids"]
            )
            for row in rows
        ),
        key=lambda prompt: prompt.arrival,
    )


class PrefixCache:
    """An engine's own blocks and states by key, the least recently used first."""

    def __init__(self, blocks: int) -> None:
        self._left = blocks
        self._costs: dict[int, int] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._costs

    def use(self, key: int, cost: int) -> None:
        """Add a block or state, or mark it as used now."""
        if self._costs.pop(key, 0):
            self._costs[key] = cost
            return
        self._costs[key] = cost
        self._left -= cost
        while self._left < 0:
            self._left += self._costs.pop(next(iter(self._costs)))


def leading(keys: Sequence[int], known: set[int] | PrefixCache) -> int:
    """Return how many leading keys are known."""
    for count, key in enumerate(keys):
        if key not in known:
            return count
    return len(keys)


def deepest(keys: Sequence[int], limit: int, states: set[int] | PrefixCache) -> int:
    """Return the largest number of chunks, at most `limit`, after which a state is known."""
    return next((count for count in range(limit, 0, -1) if ~keys[count - 1] in states), 0)


class Engine:
    """One engine: its queue, its running requests, its prefix cache, its clock in seconds."""

    def __init__(
        self, setting: Setting, rule: Rule, full: set[int], states: set[int], outcome: Outcome
    ) -> None:
        self._setting = setting
        self._rule = rule
        self._full = full
        self._states = states  # ~key of the last chunk before the state
        self._outcome = outcome
        self._cache = PrefixCache(setting.cache_tokens // setting.chunk)
        self._prefills: list[Prompt] = []
        self._decodes: list[float] = []
        self.waiting: deque[Prompt] = deque()
        self.clock = 0.0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to prefill."""
        return not self._prefills and not self.waiting

    def step(self) -> None:
        """Run one step: prefills as far as the budget reaches, one token for each decode."""
        while self._decodes and self._decodes[0] <= self.clock:
            heapq.heappop(self._decodes)
        budget = left = max(self._setting.chunk, self._setting.budget - len(self._decodes))
        ends: list[tuple[Prompt, int]] = []
        for prompt in self._prefills:
            end = self._split(prompt, left)
            left -= end - prompt.computed
            ends.append((prompt, end))
        while self.waiting and left > 0:
            prompt = self._admit(self.waiting[0])
            end = self._split(prompt, left)
            if end == prompt.computed:
                break
            self.waiting.popleft()
            self._count(prompt)
            left -= end - prompt.computed
            ends.append((prompt, end))
        self.clock += _STEP_SECONDS + (budget - left) * self._setting.engines / _TOKENS_PER_SECOND
        for prompt, end in ends:
            self._finish(prompt, end)
        self._prefills = [prompt for prompt, end in ends if end < prompt.length]

    def _admit(self, arrived: Prompt) -> Prompt:
        """Look the prompt up in the engine's cache and on the shelf."""
        chunk = self._setting.chunk
        prompt = arrived.start(chunk)
        most = prompt.keys[: (prompt.length - 1) // chunk]
        own = leading(most, self._cache)
        local = deepest(most, own, self._cache)
        prompt.shared = leading(most, self._full) * chunk
        found = deepest(most, prompt.shared // chunk, self._states)
        prompt.junction = own * chunk if own > local else 0
        prompt.computed = max(local, found) * chunk
        prompt.stored = found * chunk
        prompt.loaded = found > local
        if prompt.loaded:
            for key in most[:found]:
                self._cache.use(key, 1)
        return prompt

    def _count(self, prompt: Prompt) -> None:
        self._outcome.tokens += prompt.length
        if prompt.loaded:
            self._outcome.shelf += prompt.computed
        else:
            self._outcome.local += prompt.computed

    def _split(self, prompt: Prompt, left: int) -> int:
        """Return where the prompt's next step ends."""
        chunk, start = self._setting.chunk, prompt.computed
        end = min(prompt.length, start + left)
        if end < prompt.length:
            end = max(start, end // chunk * chunk)
        stops = (prompt.last_boundary(chunk), prompt.junction)
        return min((stop for stop in stops if start < stop < end), default=end)

    def _finish(self, prompt: Prompt, end: int) -> None:
        """Cache and store what a step computed."""
        chunk, rule, start = self._setting.chunk, self._rule, prompt.computed
        new = prompt.keys[start // chunk : end // chunk]
        for key in new:
            self._cache.use(key, 1)
        self._full.update(new)
        if rule.dense:
            self._store(~key for key in new)
        elif end % chunk == 0 and end > start:
            last, junction = end == prompt.last_boundary(chunk), end == prompt.junction
            state = ~prompt.keys[end // chunk - 1]
            if last or junction:
                self._cache.use(state, STATE_BLOCKS)
            if (
                last
                or (rule.junctions and junction)
                or (rule.shared and end <= prompt.shared)
                or (rule.interval and end - prompt.stored >= rule.interval * chunk)
            ):
                self._store((state,))
                prompt.stored = end
        prompt.computed = end
        if end == prompt.length:
            heapq.heappush(self._decodes, self.clock + prompt.output * _DECODE_SECONDS)
            for key in reversed(prompt.keys):
                self._cache.use(key, 1)

    def _store(self, states: Iterable[int]) -> None:
        before = len(self._states)
        self._states.update(states)
        self._outcome.states += len(self._states) - before


def simulate(prompts: Sequence[Prompt], setting: Setting, rule: Rule) -> Outcome:
    """Run a trace: each request goes to the next engine in turn."""
    outcome = Outcome()
    full: set[int] = set()
    states: set[int] = set()
    engines = [Engine(setting, rule, full, states, outcome) for _ in range(setting.engines)]
    for number, prompt in enumerate(prompts):
        # Engines write to one shelf: all steps that begin before this arrival are run first.
        while True:
            engine = min((e for e in engines if not e.idle), key=lambda e: e.clock, default=None)
            if engine is None or engine.clock >= prompt.arrival:
                break
            engine.step()
        engine = engines[number % len(engines)]
        if engine.idle:
            engine.clock = max(engine.clock, prompt.arrival)
        engine.waiting.append(prompt)
    while busy := [engine for engine in engines if not engine.idle]:
        min(busy, key=lambda e: e.clock).step()
    return outcome


STEP_ENDS: Final = "all step ends"
RULES: Final = {
    "last full chunk only": Rule(junctions=False, shared=False),
    "+ junctions": Rule(shared=False),
    "+ shared prefixes": Rule(),
    "+ every 64 chunks": Rule(64),
    "+ every 32 chunks": Rule(32),
    "+ every 24 chunks": Rule(24),
    "+ every 16 chunks": Rule(16),
    "+ every 8 chunks": Rule(8),
    "every 24 chunks, without shared prefixes": Rule(24, shared=False),
    STEP_ENDS: Rule(1),
    "after each chunk, which no engine has": Rule(dense=True),
}


def table(traces: Mapping[str, Sequence[Prompt]], chunk: int) -> Iterable[str]:
    """Yield the lines of a table of all rules, relative to storing the states of all step ends."""
    settings = {
        f"{name}, {budget}": (prompts, Setting(chunk, budget))
        for name, prompts in traces.items()
        for budget in (8192, 2048)
    }
    ends = {title: simulate(*setting, RULES[STEP_ENDS]) for title, setting in settings.items()}
    yield f"| states stored, chunks of {chunk} tokens | {' | '.join(settings)} |"
    yield f"|---|{'---:|' * len(settings)}"
    for name, rule in RULES.items():
        cells = []
        for title, setting in settings.items():
            outcome = ends[title] if name == STEP_ENDS else simulate(*setting, rule)
            hits, states = outcome.hits / ends[title].hits, outcome.states / ends[title].states
            cells.append(f"{hits:.1%} / {states:.1%}")
        yield f"| {name} | {' | '.join(cells)} |"
    sums = (f"{all_.hits / all_.tokens:.1%} / {all_.states:,}" for all_ in ends.values())
    yield f"| *{STEP_ENDS}: hit tokens of all tokens / states* | {' | '.join(sums)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.state_policy",
        description="Compare rules for storing the states of hybrid models on traces of requests:"
        " hit tokens / stored states, in per cent of those of storing all states that exist.",
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="JSON lines, or .gz")
    parser.add_argument(
        "--chunk", nargs="+", type=int, default=[512, 1024], help="multiples of 512 tokens"
    )
    options = parser.parse_args(arguments)
    if any(chunk < TRACE_BLOCK or chunk % TRACE_BLOCK for chunk in options.chunk):
        parser.error(f"--chunk must be multiples of {TRACE_BLOCK}")
    traces = {
        path.name.split(".")[0].replace("_", " "): read_trace(path) for path in options.traces
    }
    for chunk in options.chunk:
        for line in table(traces, chunk):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
