"""The engine's requests: what is known of each, and which may be looked up, loaded and stored.

Owns the state of a request from its arrival to its end. Each field belongs to one component, which
alone writes it; the others read it.

Contracts
---------
* A request whose KV is no function of tokens that never change is neither stored nor loaded, nor is
  one with an image by a name that a client may have chosen (:mod:`kvshelf.vllm.item_ids`).
* Requests for which vLLM would ignore a hit are not delayed, prefetched or counted; they are stored
  like others. These are requests that skip the prefix cache (log probabilities of the prompt), and
  all requests of engines that return the routed experts: vLLM takes KV only together with the
  experts that the tokens were computed with, and an object does not have these.
* A request whose prompt another connector transfers (``do_remote_prefill`` with that connector's
  fields, beside NixlConnector and its like) is neither delayed nor loaded: it has all of it.
* Runs on the engine's step thread.
"""

from __future__ import annotations

import logging
import math
import secrets
import sys
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from kvshelf.config import Config
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, KINDS, Kind
from kvshelf.format.namespace import Namespace
from kvshelf.metrics import Counters
from kvshelf.shelf.lookup import Lookup
from kvshelf.shelf.waits import Wait
from kvshelf.vllm.groups import CacheGroups
from kvshelf.vllm.handover import Handover, is_foreign
from kvshelf.vllm.item_ids import ItemIds
from kvshelf.vllm.metadata import LoadOp

logger = logging.getLogger(__name__)

HandoverOutcome: TypeAlias = Literal[
    "complete", "gave_up", "late", "vain", "other_namespace", "invalid", "refused", "unneeded"
]

#: Seconds in which the first piece of a bare hand-over must appear.
FIRST_SECONDS: Final = 1.0
#: The shortest time that a piece takes, in seconds, and how much longer the next one may.
_LEAST_GAP: Final = 0.1
_LONGER: Final = 2


@dataclass(slots=True)
class Patience:
    """How long a request waits for KV that nobody has promised: its hand-over is *bare*.

    Attributes
    ----------
    longest : float
        Most seconds that it may wait in all.
    ends : float
        When it waits no longer; infinite before vLLM has asked for it.
    is_hopeful : bool
        Whether anything new was seen.
    one_in : int
        One in so many requests waited when this one arrived.
    """

    longest: float
    ends: float = math.inf
    is_hopeful: bool = False
    one_in: int = 1
    _gap: float = _LEAST_GAP
    _last: float = 0.0

    def begin(self, now: float) -> None:
        """Begin to wait."""
        self._last, self.ends = now, now + FIRST_SECONDS

    def note_new(self, now: float) -> None:
        """Note that pieces have appeared."""
        self._gap = max(self._gap, now - self._last)
        self._last, self.ends, self.is_hopeful = now, now + _LONGER * self._gap, True


@dataclass(slots=True, eq=False)
class Awaited:
    """The hand-over that one request brought; :mod:`~kvshelf.vllm.scheduler.handovers` writes it.

    Attributes
    ----------
    handover : Handover
    arrived, deadline : float
        By the clock of :class:`~kvshelf.vllm.scheduler.handovers.Handovers`. Of a bare hand-over,
        from when vLLM first asks.
    patience : Patience or None
        How long the request waits of that, if its hand-over is bare.
    outcome : HandoverOutcome or None
        How the wait ended; None while the request waits.
    tail : Chunk or None
        The tail, once its key was compared.
    wait : Wait or None
        None until it is known what is missing.
    first, seen : int
        Full chunks that the lookup had seen when the wait began, and pieces that the wait had when
        vLLM last asked.
    retry_at : float
        No lookup is started before that.
    """

    handover: Handover
    arrived: float
    deadline: float
    patience: Patience | None = None
    outcome: HandoverOutcome | None = None
    tail: Chunk | None = None
    wait: Wait | None = None
    first: int = 0
    seen: int = 0
    retry_at: float = -math.inf

    @property
    def until(self) -> float:
        """When the wait ends if nothing more appears."""
        return self.deadline if self.patience is None else min(self.patience.ends, self.deadline)

    @property
    def hit_tokens(self) -> int:
        """Leading tokens of the prompt of which all was seen; 0 unless the wait is complete."""
        handover = self.handover
        if self.outcome != "complete":
            return 0
        return handover.tokens if self.tail is not None else handover.tokens - handover.tail

    def is_overdue(self, now: float) -> bool:
        """Whether the wait failed (late, or the producer gave up) and its deadline has passed."""
        return self.outcome in ("late", "gave_up") and now >= self.deadline

    def drop(self) -> None:
        """Forget what was seen, and cancel the wait."""
        if self.wait is not None:
            self.wait.cancel()
        self.wait = None


class Promise:
    """What is promised to another engine of one prompt so far.

    Only what was seen on the shelf, was handed to the workers, or waits for their room is promised,
    all of it in one namespace. If a store fails later, the workers inform the consumer by a marker.

    Attributes
    ----------
    attempt : str
        Random id of this attempt at a hand-over, 32 hex digits.
    tail : Chunk or None
        The tail, once its store is planned.
    """

    def __init__(self) -> None:
        self.attempt = secrets.token_hex(16)
        self.tail: Chunk | None = None
        self._namespace: Namespace | None = None
        self._chunks: dict[int, Chunk] = {}
        self._kinds: dict[Kind, set[int]] = {kind: set() for kind in KINDS}

    def add(self, namespace: Namespace, kind: Kind, chunk: Chunk) -> None:
        """Note that a kind of a chunk was seen on the shelf, or is planned to be stored.

        The weights may have changed since the last one: what is in another namespace is forgotten.
        """
        if namespace != self._namespace:
            self._namespace = namespace
            self.tail = None
            self._chunks.clear()
            for indices in self._kinds.values():
                indices.clear()
        if chunk.tail:
            self.tail = chunk
        else:
            self._chunks[chunk.index] = chunk
            self._kinds[kind].add(chunk.index)

    def discard(self, chunk: Chunk) -> None:
        """Promise a full chunk or a tail no longer, because a worker has refused its store."""
        if chunk.tail:
            self.tail = None
        else:
            self._kinds[FULL].discard(chunk.index)

    def handover(self, groups: CacheGroups, prompt: int, chunk_size: int) -> Handover | None:
        """Return what may be promised; None if nothing may.

        Parameters
        ----------
        groups : CacheGroups
            The engine's.
        prompt : int
            Tokens of the prompt.
        chunk_size : int
            Tokens.
        """
        # Behind a state at the prompt's end, vLLM could not compute the last token once more.
        last = (prompt - 1 if groups.hybrid else prompt) // chunk_size
        end = groups.hit_rule(chunk_size).longest(range(1, last + 1), self._kinds)
        tail = self.tail if end == prompt // chunk_size else None
        if self._namespace is None or not (end or tail):
            return None
        return Handover(
            self._namespace.digest,
            end * chunk_size + (tail.tokens if tail else 0),
            (tail or self._chunks[end - 1]).key,
            tail.tokens if tail else 0,
            self.attempt,
        )


@dataclass(slots=True, eq=False)
class StorePlan:
    """How far the stores of a request are planned; :mod:`~kvshelf.vllm.scheduler.stores` writes it.

    Attributes
    ----------
    next_chunk : int
        Index of the first chunk that was not complete when stores were last planned.
    next_full : int
        Index of the first chunk whose full KV was not handed out, and not seen on the shelf. Full
        chunks from here to `next_chunk` are the request's backlog.
    has_tail : bool
        The tail was handed out.
    next_boundary : tuple of (int, int)
        `next_chunk`, and the first token behind which there is more to store with it.
    at : int
        The last step that was to store anything of the request; 0 before.
    last_state : int
        Index of the last chunk whose state was planned to be stored; −1 before.
    windows_from : int
        Index of the chunk behind the last one of which vLLM had freed windows that were to be
        stored: no windows are stored for hits that need these.
    cut : int
        From this token on the KV does not depend on the prefix alone.
    """

    next_chunk: int = 0
    next_full: int = 0
    has_tail: bool = False
    next_boundary: tuple[int, int] = (0, 0)
    at: int = 0
    last_state: int = -1
    windows_from: int = 0
    cut: int = sys.maxsize


@dataclass(slots=True, eq=False)
class RequestState:
    """How far one request of the engine is.

    Parameters
    ----------
    request : Request
    addressable : bool
        Whether its KV has a content address.
    reads : bool
        Whether a hit would be used, if its KV has a content address.
    """

    request: Any
    addressable: bool
    reads: bool
    #: The request's id.
    id: str = field(init=False)
    #: How often vLLM had preempted it when it was admitted last.
    admission: int = field(init=False)

    # Its lookup, which lookups and the answers to vLLM write.
    #: What was seen of its chunks.
    lookup: Lookup | None = None
    #: A lookup that replaces the other once it has an answer, since that answer is old.
    newer: Lookup | None = None
    #: Since when it waits for a lookup.
    waiting_since: float | None = None
    #: Its lookup took too long.
    gave_up: bool = False
    #: An open breaker kept it from a lookup, and was counted.
    refused: bool = False
    #: Its hit was counted.
    counted: bool = False
    #: Tokens that vLLM had when it last asked.
    offered_from: int = 0
    #: Since when vLLM asks for it in vain, by the clock of the admission.
    unanswered: float | None = None
    #: For how many seconds vLLM did so before the last answer.
    answered_after: float = 0.0

    # Its load, which the loads write.
    #: A load was planned since it was admitted.
    loaded: bool = False
    #: Its load runs.
    loading: bool = False
    #: The number of its last load; 0 before the first.
    load: int = 0
    #: The loads of other requests for which it waits, or has waited.
    shared: list[LoadOp] = field(default_factory=list)

    # Its stores and hand-overs.
    #: How far its stores are planned.
    stores: StorePlan = field(default_factory=StorePlan)
    #: The period of its oldest block, see :mod:`kvshelf.vllm.scheduler.periods`.
    period: int = 0
    #: What is promised of it, if it wants a hand-over.
    promise: Promise | None = None
    #: The hand-over that it brought.
    awaited: Awaited | None = None

    def __post_init__(self) -> None:
        self.id = str(self.request.request_id)
        self.reads = self.addressable and self.reads
        # A request that was preempted since then is admitted anew.
        self.admission = self.request.num_preemptions

    @property
    def waits(self) -> bool:
        """Whether nothing of the request is computed or being loaded."""
        return self.request.num_computed_tokens == 0 and not self.loading

    def admit_again(self) -> None:
        """Begin anew after a preemption. What was seen of the request's chunks still counts."""
        self.admission = self.request.num_preemptions
        self.loaded = self.gave_up = False
        self.waiting_since = None
        if self.awaited is not None and self.awaited.outcome is not None:
            # Promised chunks are there, or are not waited for again.
            self.awaited.deadline = math.inf

    def cancel_lookups(self) -> None:
        """Note that no answer is needed any more."""
        for lookup in (self.lookup, self.newer):
            if lookup is not None:
                lookup.cancel()

    def drop_lookup(self) -> None:
        """Forget what was seen of the request's chunks."""
        self.cancel_lookups()
        if self.awaited is not None:
            self.awaited.drop()
        self.lookup = self.newer = None
        self.waiting_since = None

    def drop_awaited(self) -> None:
        """Forget the hand-over that the request brought, once its wait has ended."""
        if self.awaited is not None and self.awaited.outcome is not None:
            self.awaited = None


class Requests(dict[str, RequestState]):
    """The requests of an engine that have not ended, by id.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    counters : Counters
    others_transfer : bool
        Whether another connector transfers the prompts of requests with ``do_remote_prefill``.

    Attributes
    ----------
    item_ids : ItemIds
        What images are called in keys.
    """

    def __init__(
        self, vllm_config: Any, config: Config, counters: Counters, *, others_transfer: bool
    ) -> None:
        super().__init__()
        self.item_ids = ItemIds(vllm_config, config.trust_uuids, counters)
        self._others_transfer = others_transfer
        outputs = getattr(vllm_config, "aux_output_config", None)
        self._hits_are_used = outputs is None or not outputs.enabled
        if not self._hits_are_used:
            logger.warning(
                "the engine returns the experts of all tokens (enable_return_routed_experts), and"
                " a shelf does not have them: this engine stores KV and loads none"
            )

    def add(self, request: Any) -> RequestState:
        """Return the state of a new request."""
        addressable = _has_address(request) and self.item_ids.may_enter_keys(request)
        reads = self._hits_are_used and not request.skip_reading_prefix_cache
        state = self[request.request_id] = RequestState(request, addressable, reads)
        return state

    def is_transferred(self, request: Any) -> bool:
        """Whether another connector transfers a prompt; it reports the end of that itself."""
        return self._others_transfer and is_foreign(request.kv_transfer_params)


def items_of(request: Any) -> list[tuple[int, int]]:
    """Return where the multimodal items of a request begin and end, in order."""
    positions = [feature.mm_position for feature in request.mm_features]
    return sorted((position.offset, position.offset + position.length) for position in positions)


def scheduled(output: Any) -> list[tuple[str, int, int]]:
    """Return the requests of a step, with their tokens with KV before and after it.

    vLLM's second model runner lists resumed requests among the new ones, its first among the
    cached ones; both lists say how many tokens were computed before the step.
    """
    counts, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    computed = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return [(req_id, start, start + counts[req_id]) for req_id, start in computed]


def _has_address(request: Any) -> bool:
    """Whether a request's KV is a function of tokens that never change.

    Embeddings have no content address, and a streaming session replaces tokens.
    """
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and request.prompt_is_token_ids is None
        and not request.resumable
    )
