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

When :meth:`ReadAheadPlan.plan` fails, a step names no chunks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any, Final

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, Kind
from kvshelf.vllm.metadata import PrefetchOp, StepMetadata
from kvshelf.vllm.scheduler.engine import SchedulerEngine
from kvshelf.vllm.scheduler.hits import Hits, Loadable
from kvshelf.vllm.scheduler.lookups import Lookups

#: Most waiting requests that a step looks at, and most chunks that it names.
_REQUESTS_PER_STEP: Final = 32
_CHUNKS_PER_STEP: Final = 64
#: Chunks assumed to be in the engine's prefix cache at most, where its size is not known.
_ENGINE_CHUNKS: Final = 4096


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


class ReadAheadPlan:
    """Plans prefetches; does nothing until :meth:`enable` is called.

    Parameters
    ----------
    engine : SchedulerEngine
    hits : Hits
    lookups : Lookups

    Attributes
    ----------
    waiting : dict
        The requests that vLLM has not admitted, by age.
    """

    def __init__(self, engine: SchedulerEngine, hits: Hits, lookups: Lookups) -> None:
        self._requests, self._orders = engine.requests, engine.orders
        self._hits, self._lookups = hits, lookups
        self._enabled = False
        self.waiting: OrderedDict[str, _Waiting] = OrderedDict()
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
        self.waiting.pop(request_id, None)
        queue = self.waiting.values()
        if not queue:
            # No step has planned since the last request stopped waiting.
            self._last_asked = None
        if first:
            self.waiting[request_id] = _Waiting(next(iter(queue)).place - 1 if queue else 0)
            self.waiting.move_to_end(request_id, last=False)
        else:
            self.waiting[request_id] = _Waiting(next(reversed(queue)).place + 1 if queue else 0)
        self._named.pop(request_id, None)

    def asked(self, request_id: str) -> None:
        """Note that vLLM could admit a request in this step, as far as it depends on vLLM."""
        waiting = self.waiting.get(request_id)
        if waiting is not None:
            waiting.asked = True
            last = self._last_asked
            self._last_asked = waiting.place if last is None else max(last, waiting.place)

    def loading(self, request_id: str) -> None:
        """Remove a request whose load was planned."""
        self.waiting.pop(request_id, None)

    def finished(self, request_id: str) -> None:
        """Remove a request; report it to the workers if chunks of it were named."""
        self.waiting.pop(request_id, None)
        if any(self._named.pop(request_id, {}).values()):
            self._orders.next.prefetch_ended.append(request_id)

    def plan(self, output: Any, meta: StepMetadata) -> None:
        """Name chunks of waiting requests to read in this step."""
        self._note_passed_over()
        if not self._enabled:
            return
        scheduled: Container[str] = output.num_scheduled_tokens
        stopped = self._lookups.loads_are_paused()
        budget, looked_at = _CHUNKS_PER_STEP, 0
        admitted: list[str] = []
        for request_id, waiting in self.waiting.items():
            if looked_at == _REQUESTS_PER_STEP:
                break
            if waiting.passed_over:
                continue
            looked_at += 1
            if request_id in scheduled:
                # Admitted without a load: vLLM had all of it, or the shelf has nothing.
                admitted.append(request_id)
                continue
            loadable = self._hits.loadable(self._requests[request_id])
            if loadable is None:
                continue
            # Others behind it may be admitted before it.
            looked_at -= loadable.grows
            if not waiting.ready:
                # The next step may admit it.
                waiting.ready = True
                continue
            if stopped or budget <= 0:
                continue
            for kind, chunks in self._next_chunks(request_id, loadable, budget):
                budget -= len(chunks)
                meta.prefetches.append(PrefetchOp(request_id, chunks, kind))
        for request_id in admitted:
            self.finished(request_id)

    def _next_chunks(
        self, request_id: str, loadable: Loadable, budget: int
    ) -> Iterable[tuple[Kind, list[Chunk]]]:
        """Name the next chunks of a request, `budget` at most."""
        named = self._named.setdefault(request_id, {})
        full = loadable.ranges.get(FULL, range(0))
        in_cache = len(full) > 0 and loadable.chunks[full[-1]].key in self._in_engine_cache
        for kind, indices in loadable.ranges.items():
            first = max(indices.start, named.get(kind, 0))
            if kind == FULL:
                while first < indices.stop and loadable.chunks[first].key in self._in_engine_cache:
                    first += 1
            elif in_cache:
                # vLLM probably has all that the load would bring.
                continue
            chunks = list(loadable.chunks[first : min(indices.stop, first + budget)])
            named[kind] = first + len(chunks)
            budget -= len(chunks)
            if chunks:
                yield kind, chunks

    def _note_passed_over(self) -> None:
        """Note which requests vLLM left waiting while it polled one behind them."""
        last, self._last_asked = self._last_asked, None
        for waiting in self.waiting.values():
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
