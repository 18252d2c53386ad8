"""``python -m benchmarks.traces``: what the order of eviction is worth, on traces of real requests.

Owns simulations of one bounded shelf, and the tables that compare kvshelf's order
(:mod:`kvshelf.capacity.eviction`, the code that engines and tools run) with other orders. No bytes
are moved; it needs neither vLLM nor a storage.

A trace is a file of JSON lines, plain or gzip, with ``timestamp`` (milliseconds), ``input_length``
(tokens) and ``hash_ids``: one id for each 512 tokens of the prompt, equal where the prefixes up to
there are equal. Two that Mooncake publishes lie in ``benchmarks/traces``. A chunk is one block of a
trace, 512 tokens.

What is simulated
-----------------
* One request after the other, at the times of the trace. Lookup, load and store take no time.
* A hit is as long as what the shelf holds allows: for plain models the leading run of chunks, for
  hybrid ones what their kinds allow (:class:`Family`). Then all chunks of the prompt are stored
  that are not there, and the windows and states that an engine would store.
* The bound is a share of the bytes that a shelf without bound would hold at the end.
* kvshelf: a sweep begins and ends at shares of the bound (`Watermarks`). A use is recorded if the
  chunk was never hit before, or its last recorded use is older than the resolution.
* FIFO, LRU, S3-FIFO and Belady evict single objects when there is no room, know each use at once
  and exactly, and use the whole bound. Belady knows the future. On hybrid models its future is the
  one of a shelf without bound, so it is no upper bound there.

The hit rate is the share of the chunks of all prompts that were hit.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import math
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.report import describe_run
from kvshelf.capacity.eviction import Units, choose
from kvshelf.format.forest import GONE, UNKNOWN
from kvshelf.format.kinds import FULL_BIT, STATE_BIT, WINDOW_BIT

TRACES: Final = Path(__file__).parent / "traces"
SHARES: Final = (0.01, 0.03, 0.1, 0.3)
#: Tokens of a block.
_BLOCK: Final = 512
#: Times of a trace begin at 0; ages are differences.
_START: Final = 1e6
_KINDS: Final = (FULL_BIT, WINDOW_BIT, STATE_BIT)

Integers: TypeAlias = "npt.NDArray[np.int64]"
Flags: TypeAlias = "npt.NDArray[np.bool_]"


class Trace:
    """The requests of a trace.

    Attributes
    ----------
    times : list of float
        Seconds.
    prompts : list of int64 arrays
        The chunks of each prompt, numbered from 0. The last one may be shorter than the others.
    whole : list of int
        How many chunks of each prompt are whole.
    index, parent : int64 array [chunks]
        Place of each chunk in its prompt; the chunk before it, or `GONE`.
    """

    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            rows = sorted(map(json.loads, lines), key=lambda row: float(row["timestamp"]))
        ids = np.concatenate([np.asarray(row["hash_ids"], np.int64) for row in rows])
        names, chunks = np.unique(ids, return_inverse=True)
        ends = np.cumsum([len(row["hash_ids"]) for row in rows])
        self.times = [row["timestamp"] / 1000 for row in rows]
        self.prompts: list[Integers] = np.split(chunks.astype(np.int64), ends[:-1])
        self.whole = [row["input_length"] // _BLOCK for row in rows]
        self.index = np.zeros(len(names), np.int64)
        self.parent = np.full(len(names), GONE, np.int64)
        for prompt in self.prompts:
            self.index[prompt] = np.arange(len(prompt))
            self.parent[prompt[1:]] = prompt[:-1]

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True, slots=True)
class Family:
    """How models of one sort divide their KV into kinds.

    Attributes
    ----------
    title : str
    sizes : tuple of int
        Bytes of a chunk's full, window and state objects, in some unit; 0: the models have none.
    window : int
        Number of last chunks whose windows a hit needs.
    interval, step : int
        Chunks between stored states; chunks of a step of prefill: a state exists where one ends.
    """

    title: str
    sizes: tuple[int, int, int] = (1, 0, 0)
    window: int = 0
    interval: int = 24
    step: int = 16

    @property
    def whole(self) -> bool:
        """Whether the last chunk of a prompt counts only if it is whole."""
        return any(self.sizes[1:])

    def hit(self, prompt: Integers, there: Flags) -> tuple[int, int]:
        """Return chunks of the hit and of the leading run of full objects; `there`: [3, chunks]."""
        missing = ~there[0, prompt]
        run = int(missing.argmax()) if missing.any() else len(prompt)
        possible = np.ones(run, np.bool_)
        if self.sizes[2]:
            possible &= there[2, prompt[:run]]
        if self.sizes[1]:
            # Chunks since the last one without a window, or from the beginning.
            gaps = np.where(there[1, prompt[:run]], -1, np.arange(run))
            length = np.arange(run) - np.maximum.accumulate(gaps) if run else gaps
            whole = there[1, prompt[:run]].cumsum() == np.arange(1, run + 1)
            possible &= whole | (length >= self.window)
        ends = np.flatnonzero(possible)
        return (int(ends[-1]) + 1 if len(ends) else 0), run

    def needs(self, hit: int) -> list[tuple[int, slice]]:
        """Return which kinds of which chunks of the prompt a hit needs."""
        found = [(0, slice(0, hit))]
        if self.sizes[1]:
            found.append((1, slice(max(0, hit - self.window), hit)))
        if self.sizes[2]:
            found.append((2, slice(hit - 1, hit)))
        return found

    def stores(self, hit: int, run: int, length: int) -> list[tuple[int, Integers]]:
        """Return which kinds of which chunks an engine stores that computes the rest."""
        found = [(0, np.arange(hit, length))]
        if self.sizes[1]:
            found.append((1, np.arange(hit, length)))
        if self.sizes[2]:
            ends = {length}
            if run > hit:
                ends.add(run)
            last = hit
            for end in range(hit + self.step, length, self.step):
                if end <= run or end - last >= self.interval:
                    ends.add(end)
                    last = end
            found.append((2, np.array(sorted(end - 1 for end in ends if end > hit), np.int64)))
        return found


FAMILIES: Final = (
    Family("plain"),
    # Qwen3-Next-80B: a state has the bytes of 3,100 tokens of KV.
    Family("states", (1, 0, 6)),
    # Gemma 3: five of six layers attend to the last 1,024 tokens.
    Family("windows", (1, 5, 0), window=2),
)


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of the bound at which a sweep begins, and ends."""

    high: float
    low: float


#: As :class:`kvshelf.capacity.rules.Rules` has them.
MARKS: Final = Watermarks(0.9, 0.8)


class Cache(ABC):
    """A bounded shelf: which objects are there, and which are evicted."""

    def __init__(self, trace: Trace, family: Family, capacity: float) -> None:
        self.there = np.zeros((3, len(trace)), np.bool_)
        self.capacity = capacity
        self.used = 0
        self._trace = trace
        self._family = family

    @abstractmethod
    def hit(self, kind: int, chunks: Integers, now: float) -> None:
        """Note that these objects, which are there, were hit."""

    @abstractmethod
    def store(self, kind: int, chunks: Integers, now: float) -> None:
        """Store those of these objects that are not there."""

    def finish(self, now: float) -> None:
        """Make room, after a request."""


class Single(Cache):
    """An order that evicts one object at a time, the moment there is no room for another.

    Objects are known by their numbers: kind · chunks + chunk.
    """

    def hit(self, kind: int, chunks: Integers, now: float) -> None:
        """Note uses, those deep in the prompt first."""
        for number in (chunks[::-1] + kind * len(self._trace)).tolist():
            self.touch(number)

    def store(self, kind: int, chunks: Integers, now: float) -> None:
        """Store, what is deep in the prompt first."""
        size = self._family.sizes[kind]
        first = kind * len(self._trace)
        there = self.there[kind]
        for chunk in chunks[::-1].tolist():
            if there[chunk]:
                self.touch(first + chunk)
                continue
            there[chunk] = True
            self.used += size
            self.add(first + chunk)
            while self.used > self.capacity:
                self.remove(self.evict())

    def remove(self, number: int) -> None:
        """Remove an object."""
        kind, chunk = divmod(number, len(self._trace))
        self.there[kind, chunk] = False
        self.used -= self._family.sizes[kind]

    @abstractmethod
    def touch(self, number: int) -> None:
        """Note a use."""

    @abstractmethod
    def add(self, number: int) -> None:
        """Note a store."""

    @abstractmethod
    def evict(self) -> int:
        """Forget and return the object to remove."""


class Fifo(Single):
    """What was stored first goes first."""

    def __init__(self, trace: Trace, family: Family, capacity: float) -> None:
        super().__init__(trace, family, capacity)
        self._order: OrderedDict[int, None] = OrderedDict()

    def touch(self, number: int) -> None:
        """Do nothing."""

    def add(self, number: int) -> None:
        """Put the object last."""
        self._order[number] = None

    def evict(self) -> int:
        """Return the first."""
        return self._order.popitem(last=False)[0]


class Lru(Fifo):
    """What was used longest ago goes first."""

    def touch(self, number: int) -> None:
        """Put the object last."""
        self._order.move_to_end(number)


class SweptLru(Lru):
    """Exact LRU that makes room as kvshelf does: in sweeps."""

    def __init__(self, trace: Trace, family: Family, capacity: float) -> None:
        super().__init__(trace, family, math.inf)
        self._bound = capacity

    def finish(self, now: float) -> None:
        """Sweep if there is too much."""
        if self.used > MARKS.high * self._bound:
            while self.used > MARKS.low * self._bound:
                self.remove(self.evict())


class S3Fifo(Single):
    """Three queues: a small one for new objects, one for what was used, one of names of the gone.

    As in Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023).
    """

    def __init__(self, trace: Trace, family: Family, capacity: float) -> None:
        super().__init__(trace, family, capacity)
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._small_used = 0
        self._uses: dict[int, int] = {}

    def touch(self, number: int) -> None:
        """Count at most three uses."""
        self._uses[number] = min(3, self._uses[number] + 1)

    def add(self, number: int) -> None:
        """Begin in the small queue, unless the object was evicted from there lately."""
        self._uses[number] = 0
        if number in self._ghosts:
            del self._ghosts[number]
            self._main.append(number)
        else:
            self._small.append(number)
            self._small_used += self._size(number)

    def evict(self) -> int:
        """Return an unused object."""
        while True:
            if self._small and (self._small_used >= self.capacity / 10 or not self._main):
                number = self._small.popleft()
                self._small_used -= self._size(number)
                if self._uses[number] > 1:
                    self._main.append(number)
                    continue
                self._ghosts[number] = None
                while len(self._ghosts) * self._family.sizes[0] > 0.9 * self.capacity:
                    self._ghosts.popitem(last=False)
            else:
                number = self._main.popleft()
                if self._uses[number]:
                    self._uses[number] -= 1
                    self._main.append(number)
                    continue
            del self._uses[number]
            return number

    def _size(self, number: int) -> int:
        return self._family.sizes[number // len(self._trace)]


class Belady(Single):
    """What is used again last goes first."""

    def __init__(self, trace: Trace, family: Family, capacity: float) -> None:
        super().__init__(trace, family, capacity)
        endless = Endless(trace, family, math.inf)
        _run(trace, family, endless)
        #: Numbers of the requests that use each object, the last one first.
        self._future = {number: uses[::-1] for number, uses in endless.uses.items()}
        self._next: dict[int, float] = {}
        self._heap: list[tuple[float, float, int]] = []
        self._request = 0

    def finish(self, now: float) -> None:
        """Go on to the next request."""
        self._request += 1

    def touch(self, number: int) -> None:
        """Look when the object is used again."""
        future = self._future.get(number, [])
        while future and future[-1] <= self._request:
            future.pop()
        again = future[-1] if future else math.inf
        self._next[number] = again
        depth = self._trace.index[number % len(self._trace)]
        heapq.heappush(self._heap, (-again, -float(depth), number))

    def add(self, number: int) -> None:
        """Look when the object is used again."""
        self.touch(number)

    def evict(self) -> int:
        """Return the one that is used again last, of several the deepest in its prompt."""
        while True:
            again, _, number = heapq.heappop(self._heap)
            if self._next.get(number) == -again:
                del self._next[number]
                return number


class Endless(Single):
    """A shelf without bound, which remembers the uses of each object."""

    def __init__(self, trace: Trace, family: Family, capacity: float) -> None:
        super().__init__(trace, family, capacity)
        self.uses: dict[int, list[int]] = {}
        self._request = 0

    def finish(self, now: float) -> None:
        """Go on to the next request."""
        self._request += 1

    def touch(self, number: int) -> None:
        """Remember the request."""
        self.uses.setdefault(number, []).append(self._request)

    def add(self, number: int) -> None:
        """Remember the request."""
        self.touch(number)

    def evict(self) -> int:
        """Do not evict."""
        raise AssertionError("there is room without end")


@dataclass(frozen=True, slots=True)
class Ours:
    """kvshelf's order.

    Attributes
    ----------
    marks : Watermarks
    resolution : float
        Seconds; most of them.
    turnover : bool
        Record uses eight times in the age at which chunks are evicted, if that is more often.
    """

    marks: Watermarks
    resolution: float = 3600.0
    turnover: bool = False

    def __call__(self, trace: Trace, family: Family, capacity: float) -> Cache:
        """Return a cache."""
        return Shelf(trace, family, capacity, self)


class Shelf(Cache):
    """A shelf that kvshelf keeps within its bound."""

    def __init__(self, trace: Trace, family: Family, capacity: float, ours: Ours) -> None:
        super().__init__(trace, family, capacity)
        self._ours = ours
        self._resolution = ours.resolution
        self._last = np.zeros(self.there.shape)
        self._born = np.zeros(self.there.shape)
        self._hits = np.zeros(self.there.shape, np.bool_)

    def hit(self, kind: int, chunks: Integers, now: float) -> None:
        """Record uses as coarsely as engines do."""
        last, hits = self._last[kind], self._hits[kind]
        chunks = chunks[~hits[chunks] | (now - last[chunks] >= self._resolution)]
        last[chunks] = now
        hits[chunks] = True

    def store(self, kind: int, chunks: Integers, now: float) -> None:
        """Store what is not there."""
        chunks = chunks[~self.there[kind, chunks]]
        self.there[kind, chunks] = True
        self._last[kind, chunks] = self._born[kind, chunks] = now
        self._hits[kind, chunks] = False
        self.used += len(chunks) * self._family.sizes[kind]

    def finish(self, now: float) -> None:
        """Sweep if there is too much."""
        if self.used <= self._ours.marks.high * self.capacity:
            return
        chunks = np.flatnonzero(self.there.any(axis=0))
        units = self._units(chunks)
        victims = choose(
            units,
            free=self.used - int(self._ours.marks.low * self.capacity),
            now=now,
            resolution=self._resolution,
            reach=self._family.window,
        )
        for kind, bit in enumerate(_KINDS):
            rows = victims.rows[(victims.kinds & bit) != 0]
            self.there[kind, chunks[rows]] = False
        self.used -= int(victims.nbytes.sum())
        left = chunks[self.there[0, chunks]]
        if self._ours.turnover and len(left):
            oldest = now - float(self._last[0, left].min())
            self._resolution = max(1.0, min(oldest / 8, self._ours.resolution))

    def _units(self, chunks: Integers) -> Units:
        """Return what a listing of the shelf would show."""
        trace = self._trace
        sizes = [
            np.where(self.there[kind, chunks], size, 0).astype(np.int64)
            for kind, size in enumerate(self._family.sizes)
        ]
        hybrid = any(self._family.sizes[1:])
        parent = np.full(len(chunks), UNKNOWN, np.int64)
        if hybrid:
            rows = np.full(len(trace) + 1, GONE, np.int64)
            rows[chunks] = np.arange(len(chunks))
            parent = rows[np.maximum(trace.parent[chunks], -1)]
        there = self.there[:, chunks]
        last = np.where(there, self._last[:, chunks], 0.0)
        return Units(
            used=last.max(axis=0),
            born=np.where(there, self._born[:, chunks], 0.0).max(axis=0),
            index=trace.index[chunks].astype(np.uint32),
            parent=parent,
            full=sizes[0],
            window=sizes[1],
            state=sizes[2],
            hit=np.logical_or.reduce(there & self._hits[:, chunks]),
            pinned=np.zeros(len(chunks), np.bool_),
            window_used=last[1] if hybrid else None,
            state_used=last[2] if hybrid else None,
        )


Order: TypeAlias = "Callable[[Trace, Family, float], Cache]"

OURS: Final = "kvshelf"
ORDERS: Final[Mapping[str, Order]] = {
    "FIFO": Fifo,
    "exact LRU": Lru,
    "S3-FIFO": S3Fifo,
    "Belady": Belady,
    OURS: Ours(MARKS, turnover=True),
}
#: Only for plain models.
MORE_ORDERS: Final[Mapping[str, Order]] = {
    "exact LRU, in sweeps": SweptLru,
    "kvshelf, sweeps from 95 to 90 %": Ours(Watermarks(0.95, 0.9), turnover=True),
    "kvshelf, uses recorded each minute": Ours(MARKS, 60.0),
    "kvshelf, uses recorded each hour": Ours(MARKS, 3600.0),
}


def _run(trace: Trace, family: Family, cache: Cache) -> float:
    """Run a trace; return the share of chunks that were hit."""
    hits = chunks = 0
    for time, prompt, whole in zip(trace.times, trace.prompts, trace.whole, strict=True):
        now = _START + time
        prompt = prompt[:whole] if family.whole else prompt
        hit, run = family.hit(prompt, cache.there)
        hits += hit
        chunks += len(prompt)
        for kind, part in reversed(family.needs(hit) if hit else []):
            cache.hit(kind, prompt[part], now)
        for kind, places in reversed(family.stores(hit, run, len(prompt))):
            cache.store(kind, prompt[places], now)
        cache.finish(now)
    return hits / chunks


@dataclass(slots=True)
class Result:
    """Hit rates of one family on one trace.

    Attributes
    ----------
    most : float
        Hit rate of a shelf without bound.
    nbytes : int
        What it holds at the end.
    rates : dict of str and list of float
        Hit rates of each order, for each of `SHARES`.
    """

    most: float
    nbytes: int
    rates: dict[str, list[float]] = field(default_factory=dict)


def compare(
    trace: Trace,
    family: Family,
    orders: Mapping[str, Order],
    shares: Sequence[float] = SHARES,
) -> Result:
    """Run a trace with each order and each bound."""
    endless = Endless(trace, family, math.inf)
    result = Result(_run(trace, family, endless), endless.used)
    for name, order in orders.items():
        caches = (order(trace, family, share * endless.used) for share in shares)
        result.rates[name] = [_run(trace, family, cache) for cache in caches]
    return result


def table(name: str, family: Family, result: Result, shares: Sequence[float]) -> Iterator[str]:
    """Yield the lines of a table: hit rates in per cent."""
    yield (
        f"| {name}, {family.title}: unlimited {result.most:.1%}"
        f" | {' | '.join(f'{share:.0%}' for share in shares)} |"
    )
    yield f"|---|{'---:|' * len(shares)}"
    for order, rates in result.rates.items():
        yield f"| {order} | {' | '.join(f'{100 * rate:.1f}' for rate in rates)} |"


def results_json(
    results: Mapping[str, Result], shares: Sequence[float], command: Sequence[str]
) -> dict[str, Any]:
    """Return all hit rates as one JSON value."""
    return {
        "kvshelf_traces": 1,
        **describe_run(command),
        "shares": list(shares),
        "results": {
            title: {
                "most": round(result.most, 6),
                "bytes": result.nbytes,
                "rates": {
                    order: [round(rate, 6) for rate in rates]
                    for order, rates in result.rates.items()
                },
            }
            for title, result in results.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, and write the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.traces",
        description="Compare orders of eviction on traces of requests: hit rates of a shelf that"
        " is bounded to 1, 3, 10 and 30 per cent of the bytes of one without bound.",
    )
    parser.add_argument(
        "traces",
        nargs="*",
        type=Path,
        metavar="TRACE",
        default=sorted(TRACES.glob("*.jsonl.gz")),
        help="JSON lines, or .gz; default: those in benchmarks/traces",
    )
    titles = [family.title for family in FAMILIES]
    parser.add_argument(
        "--families", nargs="+", choices=titles, default=titles, help="sorts of models"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args(arguments)
    results: dict[str, Result] = {}
    for path in options.traces:
        trace = Trace(path)
        name = path.name.split(".")[0].removeprefix("mooncake_")
        for family in FAMILIES:
            if family.title not in options.families:
                continue
            orders = {**ORDERS, **(MORE_ORDERS if family.title == titles[0] else {})}
            result = results[f"{name}, {family.title}"] = compare(trace, family, orders)
            for line in table(name, family, result, SHARES):
                sys.stdout.write(line + "\n")
            sys.stdout.write("\n")
            sys.stdout.flush()
    if options.json is not None:
        given = sys.argv[1:] if arguments is None else arguments
        report = results_json(results, SHARES, ["python", "-m", "benchmarks.traces", *given])
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
