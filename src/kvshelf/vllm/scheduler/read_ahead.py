"""Chooses which chunks of waiting requests the workers read ahead of their loads.

Owns the queue of requests that vLLM has not admitted yet, and a guess of which chunks the
engine's own prefix cache holds, so that these are not read.

A request that a step could have admitted and did not (there are too many requests, or too few
blocks) will wait for some time. Meanwhile the workers read into host memory what its load will
bring: of each kind of KV the chunks that a load needs.

Contracts
---------
* Oldest requests first; a step looks at a bounded number of requests and names a bounded number
  of chunks. Of requests that wait for a hand-over, the chunks that have appeared are named; there
  is a bound on these requests elsewhere, and they do not count.
* A request that vLLM passes over is ignored until vLLM polls it again. vLLM polls requests in the
  order in which they wait, and passes over those that it cannot admit yet, such as one whose
  grammar is not compiled, or whose LoRA adapter would be one too many in a step.
* A kind of a chunk is named at most once for each time that its request is admitted.
* The workers learn of each request with named chunks when it stops waiting: by its load, or by
  an order.
* Runs on the engine's step thread.

When this part fails, a step names no chunks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, Kind
from kvshelf.vllm.messages import Outbox
from kvshelf.vllm.metadata import Orders, PrefetchOp, StepMetadata
from kvshelf.vllm.scheduler.part import Part
from kvshelf.vllm.scheduler.requests import RequestState

#: Most waiting requests that a step looks at, and most chunks that it names.
_REQUESTS_PER_STEP: Final = 32
_CHUNKS_PER_STEP: Final = 64
#: Chunks assumed to be in the engine's prefix cache at most, where its size is not known.
_ENGINE_CHUNKS: Final = 4096


@dataclass(frozen=True, slots=True)
class Loadable:
    """What a load of a waiting request would bring now.

    Attributes
    ----------
    chunks : Sequence of Chunk
        The request's chunks, from the first one on.
    ranges : Mapping[Kind, range]
        For each kind, the indices of the chunks that would be loaded.
    grows : bool
        The request waits for more.
    """

    chunks: Sequence[Chunk] = ()
    ranges: Mapping[Kind, range] = field(default_factory=dict)
    grows: bool = False


@dataclass(slots=True)
class _Waiting:
    """A request that vLLM has not admitted.

    Attributes
    ----------
    place : int
        Grows with the order in which vLLM polls requests.
    ready : bool
        A step has passed since its lookup was done.
    asked : bool
        vLLM has polled it since the last step.
    passed_over : bool
        vLLM has polled others behind it and not this one.
    """

    place: int
    ready: bool = False
    asked: bool = False
    passed_over: bool = False


class ReadAheadPlan(Part):
    """Plans prefetches; does nothing until :meth:`enable` is called.

    Parameters
    ----------
    loadable : Callable
        Returns what a load of a request would bring now; None while its lookup is not done.
    paused : Callable
        Whether nothing can be loaded now.
    orders : Outbox of Orders
        What the workers must learn.
    """

    failure = "prefetches of a step could not be planned"

    def __init__(
        self,
        loadable: Callable[[str], Loadable | None],
        paused: Callable[[], bool],
        orders: Outbox[Orders],
    ) -> None:
        self._orders = orders
        self._loadable = loadable
        self._paused = paused
        self._enabled = False
        #: By age.
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        #: The highest place of a request that vLLM has polled since the last step.
        self._last_asked: int | None = None
        #: For each request and kind, the number of leading chunks that were named or need not be.
        self._named: dict[str, dict[Kind, int]] = {}
        self._most_engine_chunks = _ENGINE_CHUNKS
        #: Keys of chunks that are probably in the engine's prefix cache, the latest last.
        self._in_engine_cache: OrderedDict[bytes, None] = OrderedDict()

    def enable(self, engine_chunks: int | None) -> None:
        """Start to plan.

        Parameters
        ----------
        engine_chunks : int, optional
            Number of chunks that the engine's prefix cache can hold; 0 when the engine has
            none, None when its size is not known.
        """
        self._enabled = True
        if engine_chunks is not None:
            self._most_engine_chunks = engine_chunks

    def wait(self, request_id: str, *, first: bool = False) -> None:
        """Add a request that waits to be admitted: as the last, or after a preemption `first`."""
        self._waiting.pop(request_id, None)
        others = self._waiting.values()
        if first:
            self._waiting[request_id] = _Waiting(next(iter(others)).place - 1 if others else 0)
            self._waiting.move_to_end(request_id, last=False)
        else:
            self._waiting[request_id] = _Waiting(next(reversed(others)).place + 1 if others else 0)
        self._named.pop(request_id, None)

    def asked(self, request_id: str) -> None:
        """Note that vLLM could admit a request in this step, as far as it depends on vLLM."""
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            waiting.asked = True
            last = self._last_asked
            self._last_asked = waiting.place if last is None else max(last, waiting.place)

    def loading(self, request_id: str) -> None:
        """Remove a request whose load was planned."""
        self._waiting.pop(request_id, None)

    def finished(self, state: RequestState) -> None:
        """Remove a request; report it to the workers if chunks of it were named."""
        self._end(state.id)

    def _end(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        if any(self._named.pop(request_id, {}).values()):
            self._orders.next.prefetch_ended.append(request_id)

    def plan(self, output: Any, meta: StepMetadata) -> None:
        """Name chunks of waiting requests to read in this step."""
        self._note_passed_over()
        if not self._enabled:
            return
        scheduled: Container[str] = output.num_scheduled_tokens
        stopped = self._paused()
        left, looked_at = _CHUNKS_PER_STEP, 0
        admitted: list[str] = []
        for request_id, waiting in self._waiting.items():
            if looked_at == _REQUESTS_PER_STEP:
                break
            if waiting.passed_over:
                continue
            looked_at += 1
            if request_id in scheduled:
                # Admitted without a load: vLLM had all of it, or the shelf has nothing.
                admitted.append(request_id)
                continue
            found = self._loadable(request_id)
            if found is None:
                continue
            # Others behind it may be admitted before it.
            looked_at -= found.grows
            if not waiting.ready:
                # The next step may admit it.
                waiting.ready = True
                continue
            if stopped or left <= 0:
                continue
            for kind, wanted in self._wanted(request_id, found, left):
                left -= len(wanted)
                meta.prefetches.append(PrefetchOp(request_id, wanted, kind))
        for request_id in admitted:
            self._end(request_id)

    def _wanted(
        self, request_id: str, found: Loadable, most: int
    ) -> Iterable[tuple[Kind, list[Chunk]]]:
        """Name the next chunks of a request, `most` at most."""
        named = self._named.setdefault(request_id, {})
        full = found.ranges.get(FULL, range(0))
        in_cache = len(full) > 0 and found.chunks[full[-1]].key in self._in_engine_cache
        for kind, indices in found.ranges.items():
            first = max(indices.start, named.get(kind, 0))
            if kind == FULL:
                while first < indices.stop and found.chunks[first].key in self._in_engine_cache:
                    first += 1
            elif in_cache:
                # vLLM probably has all that the load would bring.
                continue
            wanted = list(found.chunks[first : min(indices.stop, first + most)])
            named[kind] = first + len(wanted)
            most -= len(wanted)
            if wanted:
                yield kind, wanted

    def _note_passed_over(self) -> None:
        """Note which requests vLLM left waiting while it polled one behind them."""
        last, self._last_asked = self._last_asked, None
        for waiting in self._waiting.values():
            if last is None or waiting.place > last:
                break
            waiting.passed_over, waiting.asked = not waiting.asked, False

    def note_in_engine_cache(self, chunks: Iterable[Chunk]) -> None:
        """Note that the engine's prefix cache is about to hold these chunks."""
        if not self._enabled:
            return
        for chunk in chunks:
            self._in_engine_cache[chunk.key] = None
            self._in_engine_cache.move_to_end(chunk.key)
        while len(self._in_engine_cache) > self._most_engine_chunks:
            self._in_engine_cache.popitem(last=False)

    def engine_cache_was_reset(self) -> None:
        """Note that the engine's prefix cache is empty."""
        self._in_engine_cache.clear()
