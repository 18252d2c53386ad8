"""Decides which hits an engine loads, and learns from its times.

:mod:`~kvshelf.vllm.scheduler.admission_rule` is the rule. This module owns the times of steps and
loads, the work before each request, and how much of a hit lies in tiers.

Contracts
---------
* With ``admission: always`` everything is loaded, and nothing is timed.
* What a hand-over promises is loaded in any case, and never cut.
* Steps without prompts are not learned. A small one after a pause is only if it took less than
  expected. The tokens behind a hit are a prompt, even a single one.
* What runs before a request is a sum that is kept: a question costs the same however many requests
  wait, compute or load.
* A hit may be offered shorter than it is, so that what is left shows how long computing takes.
* Runs on the engine's step thread.

When :meth:`Admission.plan` fails, hits are loaded as before.
"""

from __future__ import annotations

import operator
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import DRAFT, Kind, kind_key
from kvshelf.vllm.metadata import StepMetadata, WorkerFacts
from kvshelf.vllm.scheduler.admission_rule import AdmissionRule, Before, Hit
from kvshelf.vllm.scheduler.costs import work
from kvshelf.vllm.scheduler.engine import SchedulerEngine
from kvshelf.vllm.scheduler.hits import Hits
from kvshelf.vllm.scheduler.requests import RequestState, scheduled

#: Seconds without a step after which the next one begins slowly: its time is what that takes if it
#: takes no longer, unless it computes about as many tokens as others.
_PAUSE_SECONDS: Final = 0.05


class _Step(NamedTuple):
    """A step that is timed: its prompts' tokens, its decodes, and when it was planned."""

    parts: list[tuple[int, int]]
    decodes: int
    began: float
    after_pause: bool


class _AdmittedLoad(NamedTuple):
    """A load whose time is learned: what it brings, and what its time is learned by."""

    hit: Hit
    nbytes: int
    chunks: Mapping[Kind, Sequence[Chunk]]


class Sums:
    """Some numbers of each of several requests, and their sums, which are kept.

    Of whole and half numbers, sums are exact.

    Parameters
    ----------
    count : int
        How many numbers each has.

    Attributes
    ----------
    totals : tuple of float
    """

    def __init__(self, count: int) -> None:
        self._each: dict[str, tuple[float, ...]] = {}
        self.totals: tuple[float, ...] = (0.0,) * count

    def __len__(self) -> int:
        """Return how many requests there are."""
        return len(self._each)

    def put(self, name: str, *numbers: float) -> None:
        """Set the numbers of a request."""
        self.drop(name)
        self._each[name] = numbers
        self.totals = tuple(map(operator.add, self.totals, numbers))

    def drop(self, name: str) -> None:
        """Forget a request, if it is known."""
        numbers = self._each.pop(name, None)
        if numbers is not None:
            self.totals = tuple(map(operator.sub, self.totals, numbers))


class InMemory:
    """Which chunks lie in the memory of this machine, as far as one engine can know.

    What the engine stored and loaded last, each kind of a chunk by its kind key, as long as the
    memory that keeps it: that of its workers, or that of a node server. What other
    engines have a node server keep or evict, and what lay there before, it does not know.
    """

    def __init__(self) -> None:
        self._nbytes_of: OrderedDict[bytes, int] = OrderedDict()
        self._nbytes = 0

    def note(self, key: bytes, nbytes: int, room: int) -> None:
        """Note that a kind of a chunk is stored or loaded, and forget the least recent ones.

        Parameters
        ----------
        key : bytes
        nbytes : int
            Of all ranks.
        room : int
            Bytes that the memory can hold.
        """
        self._nbytes += nbytes - self._nbytes_of.pop(key, 0)
        self._nbytes_of[key] = nbytes
        while self._nbytes > room:
            self._nbytes -= self._nbytes_of.popitem(last=False)[1]

    def __contains__(self, key: bytes) -> bool:
        return key in self._nbytes_of

    def __len__(self) -> int:
        return len(self._nbytes_of)


class Admission:
    """What one engine has learned, and what it admits.

    Parameters
    ----------
    engine : SchedulerEngine
    hits : Hits

    Attributes
    ----------
    clock : Callable
        Seconds.
    always : bool
        Everything is loaded, and nothing is learned. May be changed while there are no requests.
    """

    def __init__(self, engine: SchedulerEngine, hits: Hits) -> None:
        self._engine, self._hits = engine, hits
        self._groups, self._requests = engine.groups, engine.requests
        self.clock: Callable[[], float] = time.monotonic
        self.always = engine.config.admission == "always"
        scheduler = engine.vllm_config.scheduler_config
        self._rule = AdmissionRule(int(scheduler.max_num_batched_tokens))
        #: A step that computes more tokens of a request computes its prompt.
        speculative = engine.vllm_config.speculative_config
        self._most_decoded = 1 + int(getattr(speculative, "num_speculative_tokens", 0) or 0)
        self._timed: OrderedDict[int, _Step] = OrderedDict()
        #: The remaining :func:`~kvshelf.vllm.scheduler.costs.work` of prompts in computation.
        self._computing = Sums(2)
        #: Those of them that may not be: they were asked for since the last step.
        self._asked: list[str] = []
        #: The loads that run: the work that they spare, their bytes on the storage, and in tiers.
        self._running = Sums(4)
        #: When workers last reported a step, and when the engine last computed: 0 after a step
        #: that computed nothing.
        self._ended = self._computed = 0.0
        #: The loads of which no time is known yet.
        self._loading: dict[str, _AdmittedLoad] = {}
        #: What the memory in front of the storage has.
        self._memory = InMemory()
        #: The requests of which something was read before their load.
        self._read_ahead_for: set[str] = set()

    # ------------------------------------------------------------- what is decided

    def _is_free(self, state: RequestState) -> bool:
        """Whether everything that is found is loaded for a request."""
        awaited = state.awaited
        promised = awaited is not None and awaited.patience is None and awaited.hit_tokens > 0
        return self.always or promised

    def end_of_load(self, state: RequestState, start: int, end: int) -> int:
        """Return up to which token a hit of tokens ``[start, end)`` is to be loaded."""
        if self._is_free(state):
            return end
        return self._rule.end_of_load(
            self._hit(state, start, end), self._comes_before(), self.clock()
        )

    def computes(self, state: RequestState, start: int) -> None:
        """Note that vLLM computes a request from token `start` on, from the next step on."""
        if not self.always:
            tokens = state.request.num_tokens
            self._asked.append(state.id)
            self._computing.put(state.id, *work(start, tokens))
            self._rule.begin_computing(tokens - start, self.clock())

    def begin(self, state: RequestState, start: int, end: int) -> tuple[tuple[float, ...], int]:
        """Note that a load begins; return when it is cut, and how many chunks are read at once.

        Both as :meth:`kvshelf.transfer.transfers.Transfers.load` takes them.
        """
        if self.always:
            return (), 0
        rule, hit, loads_before = self._rule, self._hit(state, start, end), self._comes_before()
        patience: tuple[float, ...] = ()
        at_once = hit.chunks
        if not self._is_free(state):
            patience = rule.patience(hit, loads_before, state.answered_after)
            if rule.admits(hit, loads_before):
                at_once = rule.at_once(hit, loads_before)
            else:
                # Of a storage that is fast now but answers late, few at once would hide that.
                self._engine.counters.add("explored_loads")
        rule.begin_load(hit, self.clock())
        chunks = self._hits.to_load(state, start, end)
        self._loading[state.id] = _AdmittedLoad(hit, rule.bytes_on_way(hit, loads_before), chunks)
        nbytes = (0, hit.nbytes) if hit.is_near else (hit.nbytes, 0)
        self._running.put(state.id, *work(start, hit.tokens), *nbytes)
        return patience, at_once if at_once < hit.chunks else 0

    def _hit(self, state: RequestState, start: int, end: int) -> Hit:
        ranges, lookup = self._hits.ranges(start, end), state.lookup
        views = self._engine.views
        nbytes = sum(len(indices) * views[kind].chunk_bytes for kind, indices in ranges.items())
        in_tiers = 0 if lookup is None else lookup.in_disk_tier * nbytes
        if self._memory:
            in_memory = sum(
                views[kind].chunk_bytes
                for kind, chunks in self._hits.to_load(state, start, end).items()
                for chunk in chunks
                if kind_key(chunk.key, kind) in self._memory
            )
            in_tiers = max(in_tiers, in_memory)
        tokens, divisible = state.request.num_tokens, not self._groups.hybrid
        unit = self._groups.alignment
        is_near = 2 * in_tiers > nbytes
        return Hit(
            start, end, tokens, self._engine.config.chunk_size, nbytes, divisible, is_near, unit
        )

    def _note(self, kind: Kind, chunks: Iterable[Chunk]) -> None:
        """Note that chunks were loaded or are stored: then memory has them, if there is any."""
        view, shelf = self._engine.views[kind], self._engine.shelf
        # Ranks with the same heads have the same in memory.
        record: Mapping[str, Any] = view.fmt.namespace.record
        holders = min(self._engine.ranks, view.fmt.shards * len(record["stages"]))
        room = self._engine.config.memory_bytes * holders
        room += 0 if shelf is None else shelf.memory_bytes
        if room:
            for chunk in chunks:
                self._memory.note(kind_key(chunk.key, kind), view.chunk_bytes, room)

    def _comes_before(self) -> Before:
        """Return what runs now.

        Loads that run at the same time share the storage. Were each given only the time of its
        own prompt, all would be cut, and then wait for each other.
        """
        tokens, pairs, on_storage, in_tiers = self._running.totals
        computing = self._rule.prefill.seconds_of(*self._computing.totals)
        unloaded = computing + self._rule.prefill.seconds_of(tokens, pairs)
        return Before(computing, unloaded, int(on_storage), int(in_tiers), len(self._running))

    def load_ended(self, state: RequestState) -> None:
        """Note that a load has ended, however it did: vLLM computes what it has not brought."""
        self._running.drop(state.id)
        self._note_computed(state, state.request.num_computed_tokens)

    def _note_computed(self, state: RequestState, tokens: int) -> None:
        """Note how many tokens of a prompt have KV, and count what is left, if it was begun."""
        prompt = state.request.num_prompt_tokens
        if 0 < tokens < prompt:
            self._computing.put(state.id, *work(tokens, prompt))
        else:
            self._computing.drop(state.id)

    # ------------------------------------------------------------- what is learned

    def plan(self, output: Any, meta: StepMetadata) -> None:
        """Time a step that computes prompts, and note what is stored."""
        for op in meta.stores:
            if op.kind != DRAFT:
                self._note(op.kind, [op.chunk])
        # Their loads end sooner than others from there.
        self._read_ahead_for.update(op.request_id for op in meta.prefetches)
        now = self.clock()
        paused = now - self._computed > _PAUSE_SECONDS
        was_asked = bool(self._asked)
        self.lose()
        for name in output.preempted_req_ids or ():
            self._computing.drop(name)
        if not output.total_num_scheduled_tokens:
            self._computed = 0.0
            return
        self._computed = now
        counts, most_decoded, parts = output.num_scheduled_tokens, self._most_decoded, []
        if was_asked or self._computing or max(counts.values()) > most_decoded:
            for name, start, end in scheduled(output):
                state = self._requests.get(name)
                if state is not None:
                    self._note_computed(state, end)
                if end - start > most_decoded or (
                    state and start < state.request.num_prompt_tokens
                ):
                    parts.append((start, end))
        if not parts:
            return
        meta.timed_step = self._engine.steps
        self._timed[meta.timed_step] = _Step(parts, len(counts) - len(parts), now, paused)
        while len(self._timed) > self._engine.steps_in_flight + 1:
            self._timed.popitem(last=False)

    def lose(self) -> None:
        """Forget what the next step was to compute of the requests that were asked for."""
        for name in self._asked:
            self._computing.drop(name)
        self._asked.clear()

    def take_times(self, timed_steps: Collection[int]) -> None:
        """Learn how long steps took that workers report now, by their numbers."""
        now = self.clock()
        for number in set(timed_steps):
            step = self._timed.pop(number, None)
            if step is not None:
                # A step may be planned before the one before it has ended.
                taken = now - max(step.began, self._ended)
                expected = self._rule.prefill.learn(
                    step.parts,
                    step.decodes,
                    taken,
                    began_slowly=step.after_pause and taken < _PAUSE_SECONDS,
                )
                self._count("prefill", expected, taken)
        self._ended = now
        if self._computed:
            self._computed = now

    def take_facts(self, facts: WorkerFacts) -> None:
        """Learn how long loads took."""
        for number, request_id, taken in facts.load_seconds:
            state = self._requests.get(request_id)
            if state is None or state.load != number or request_id not in self._loading:
                continue
            loading = self._loading.pop(request_id)
            for kind, chunks in loading.chunks.items():
                self._note(kind, chunks)
            if request_id not in self._read_ahead_for:
                expected = self._rule.loads[loading.hit.is_near].learn(loading.nbytes, taken)
                self._count("load", expected, taken)

    def _count(self, what: str, expected: float, taken: float) -> None:
        if not expected:
            # The first.
            return
        self._engine.counters.add(f"expected_{what}_seconds", expected)
        self._engine.counters.add(f"measured_{what}_seconds", taken)

    def finished(self, state: RequestState) -> None:
        """Forget a request that has ended."""
        self._loading.pop(state.id, None)
        self._running.drop(state.id)
        self._computing.drop(state.id)
        self._read_ahead_for.discard(state.id)
