"""The records that the scheduler side and the worker side of the connector exchange.

Owns the records that travel with vLLM's steps: :class:`StepMetadata` from the scheduler to the
workers at the start of a step, :class:`WorkerMetadata` back at its end. vLLM pickles both when
workers are other processes, so they hold plain data only.

What must arrive is named in each step until the other side has answered: loads that not all ranks
have begun, :class:`Orders`, and :class:`WorkerFacts` (:mod:`kvshelf.vllm.messages`). The rest is
about one step, or is repeated in each step for as long as it holds.

Block ids are tuples with one list for each KV cache group of the engine, in vLLM's order, because a
block id means something within its group only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, Kind

#: The block id that stands for a block which a request does not have (any more), such as one
#: that its sliding window has passed. The block's content means nothing and is never touched.
NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """The LoRA adapter that a request's chunk keys depend on.

    Attributes
    ----------
    number : int
        vLLM's id of the adapter.
    stamps : tuple of bytes
        Those that the adapter's files had whenever their content was this one. A stamp changes when
        the files do, and may change without them.
    """

    number: int
    stamps: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StoreOp:
    """Store one kind of one chunk after this step's forward pass.

    Attributes
    ----------
    chunk : Chunk
        May be a tail, where the engine is not hybrid and ``ObjectFormat.tails``.
    block_ids : tuple of list of int
        For each cache group of this kind, the blocks that hold the chunk's tokens, in order; of
        kind state, the one block with the state after the chunk's last token. Empty for groups of
        other kinds. Of kinds full and draft, those of groups that only the drafter has are there.
    repair : bool
        A load found the existing object damaged, so it must be replaced.
    age : float
        Seconds since the lookup found the chunk missing; since it began, if it has no answer yet.
    adapter : AdapterContent, optional
    round : int
        The weights round in whose namespace the chunk is; a worker that is in another drops the
        store.
    kind : Kind
        What of the chunk to store. Of kind draft, `chunk` is that of the drafter's namespace.
    attempt : str
        The attempt of the hand-over for which the chunk is stored, 32 hex digits; empty without
        one.
    request_id : str
        Whose the blocks are.
    late : bool
        It is complete only when vLLM has judged the step's drafts, or made new ones.
    """

    chunk: Chunk
    block_ids: tuple[list[int], ...]
    repair: bool
    age: float
    adapter: AdapterContent | None = None
    round: int = 0
    kind: Kind = FULL
    attempt: str = ""
    request_id: str = ""
    late: bool = False


@dataclass(frozen=True, slots=True)
class LoadOp:
    """Load tokens ``[start, end)`` of a request.

    Attributes
    ----------
    number : int
        The number of the load, from 1 on in the order in which the engine planned its loads.
    chunks : list of Chunk
        All chunks of kind full that overlap the tokens, in order. The last one may be a tail, and
        `end` inside it.
    block_ids : tuple of list of int
        For each cache group, the request's blocks from position 0 on. A window's table has the
        null block in place of blocks that the window has passed at `end`, and a state's in place
        of all but the last.
    adapter : AdapterContent, optional
    round : int
        The weights round in whose namespace the chunks are; a worker that is in another reports
        the load as failed.
    drafts : list of Chunk
        The same chunks in the drafter's namespace; empty without one.
    windows : list of Chunk
        The chunks of which kind window is to be loaded, in order: all that overlap both the tokens
        and the window before `end`.
    states : list of Chunk
        The chunk of which kind state is to be loaded, the one that ends at `end`.
    patience, at_once : tuple of float, int
        When the load is cut, and how many chunks are read at once, see
        :meth:`kvshelf.transfer.transfers.Transfers.load`.

    Without chunks of any kind these are not known, or the request has ended: the load fails.
    """

    number: int
    request_id: str
    start: int
    end: int
    chunks: list[Chunk]
    block_ids: tuple[list[int], ...]
    adapter: AdapterContent | None = None
    round: int = 0
    drafts: list[Chunk] = field(default_factory=list)
    windows: list[Chunk] = field(default_factory=list)
    states: list[Chunk] = field(default_factory=list)
    patience: tuple[float, ...] = ()
    at_once: int = 0


@dataclass(frozen=True, slots=True)
class PrefetchOp:
    """Read chunks of a waiting request into host memory before its load.

    Attributes
    ----------
    chunks : list of Chunk
        Further chunks of the request, in order.
    kind : Kind
        What of the chunks to read.
    """

    request_id: str
    chunks: list[Chunk]
    kind: Kind = FULL


@dataclass
class Orders:
    """What workers must learn besides their loads, in this order.

    Attributes
    ----------
    reset : bool
        Forget what is known of the shelf.
    cancelled : list of int
        Numbers of loads whose request ended while they ran.
    prefetch_ended : list of str
        Requests with prefetched chunks that no longer wait and need no load.
    released : list of str
        Requests that have ended and whose blocks no store needs any more: each worker reports them
        to vLLM.
    broken : list of str
        Attempts of hand-overs that have failed: the workers mark them.
    ranks_file : str
        The file that all ranks must find on the shelf.
    """

    reset: bool = False
    cancelled: list[int] = field(default_factory=list)
    prefetch_ended: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    ranks_file: str = ""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, once per step.

    Attributes
    ----------
    idle : bool
        Nothing is computed, and no other rank or pipeline stage waits for this worker's step, so
        the worker may wait for loads.
    namespace : tuple of (bytes, str), optional
        Record and slug of the namespace; sent until every worker has it.
    draft_namespace : tuple of (bytes, str), optional
        The same of the drafter's namespace.
    stores : list of StoreOp
    loads : list of LoadOp
        Those that not all ranks are known to have begun, by number.
    orders : list of (int, Orders)
        Those that not all ranks are known to have taken, with their numbers.
    heard : dict
        Rank to the number up to which its :class:`WorkerFacts` have been taken; of ranks that have
        sent some since the last step.
    weights_round : int
        The current round, see :mod:`kvshelf.vllm.worker.weights`.
    prefetches : list of PrefetchOp
    number : int
        The number of a step that brings stores, or before which chunks wait for room; 0 for others.
    waits_for_room : bool
        Chunks wait for room, so that an idle step may wait for it.
    timed_step : int
        The number of a step that is timed; 0 for others.
    """

    idle: bool = False
    namespace: tuple[bytes, str] | None = None
    draft_namespace: tuple[bytes, str] | None = None
    stores: list[StoreOp] = field(default_factory=list)
    loads: list[LoadOp] = field(default_factory=list)
    orders: list[tuple[int, Orders]] = field(default_factory=list)
    heard: dict[int, int] = field(default_factory=dict)
    weights_round: int = 0
    prefetches: list[PrefetchOp] = field(default_factory=list)
    number: int = 0
    waits_for_room: bool = False
    timed_step: int = 0


#: In place of a weights fingerprint: the digests of all ranks at the start name the weights.
BY_PARAMETERS = "params"


#: The k and the v scale of a layer; empty where it has none.
LayerScales: TypeAlias = tuple[float | tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What only a worker knows of the namespace: the layout of its layers' KV caches.

    Attributes
    ----------
    layer_names, layer_shapes, layer_dtypes, layouts, attention : tuple of str
        One entry for each layer, as in the namespace record.
    head_sizes, sliding_windows : tuple of int
        One entry for each layer.
    kv_scales : tuple of tuple
        Of each layer the k and the v scale: one for all heads, or a tuple with one for each head of
        this rank; empty for caches without scales.
    weights : str, optional
        The weights fingerprint; None until it is known, and on all ranks but rank 0.
        :data:`BY_PARAMETERS` where no file has one.
    kinds : tuple of str
        The kind of each layer; empty where there is only full.
    attention_temperature : tuple of str
        How this rank's layers scale queries by their position, as in the namespace record.
    precision : tuple of str
        In which precision this rank's layers compute, as in the namespace record.
    config, code : tuple of str
        What the model publishes beside its weights, as in the namespace record; empty until
        `weights` is known, and on all ranks but rank 0.
    """

    layer_names: tuple[str, ...]
    layer_shapes: tuple[str, ...]
    layer_dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    attention: tuple[str, ...]
    head_sizes: tuple[int, ...]
    sliding_windows: tuple[int, ...]
    kv_scales: tuple[LayerScales, ...] = ()
    weights: str | None = None
    kinds: tuple[str, ...] = ()
    attention_temperature: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    code: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What a rank's weights are now, see :mod:`kvshelf.vllm.worker.weights`.

    Attributes
    ----------
    round : int
        The last round that this rank knows.
    first : str, optional
        Digest of its parameters and buffers at the start, 64 hex digits; None while it is not
        known, and for ever if the weights may have changed before.
    digest : str, optional
        Digest of them in this round; None until it is known.
    packed : bool
        Some weights are in the digest only as those of the start.
    changed : bool
        A change was noticed since the round began, so there must be another.
    version : str
        The name that the trainer gave these weights; empty without one.
    problem : str
        Why there can be no digest; empty while there can.
    """

    round: int
    first: str | None
    digest: str | None
    packed: bool = False
    changed: bool = False
    version: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RefusedStore:
    """A full chunk that a rank was to store and has no memory for; the fields of its StoreOp."""

    request_id: str
    chunk: Chunk
    attempt: str
    round: int


@dataclass
class WorkerFacts:
    """What the scheduler side must learn of a rank.

    Attributes
    ----------
    begun : int
        The number of the last load that it has begun, or refused; 0 if there is none to tell.
    failures : list of (bytes, bool)
        Keys of kinds of chunks that it could not load or read ahead, and whether the object is
        damaged. A storage that could not be asked is no failure of a chunk.
    repaired : list of bytes
        Keys of kinds of chunks (:func:`~kvshelf.format.kinds.kind_key`) of which it has replaced
        its damaged objects.
    breaker_open : bool, optional
        Whether the breaker of its storage is open, so that its loads would fail; told when that
        changes, and with each load that failed for this reason.
    writes_refused : bool, optional
        Whether its storage takes no writes, or no marker of a hand-over that failed; told when that
        changes.
    other_adapters : list of int
        Ids of LoRA adapters for which it loaded other files than chunk keys stand for.
    without_drafts : list of (str, int)
        Requests of whose loads the drafter's KV is not complete, and the first token without it.
    refused : list of RefusedStore
    room : tuple of (int, int), optional
        The last :attr:`StepMetadata.number` of a step that it has ended, and for how many further
        full chunks its stores have memory; told when either changes.
    load_seconds : list of (int, str, float)
        Number and request of loads, and how long they took, or would have taken if they had not
        been cut.
    disabled, drafter_disabled : list of (str, bool)
        Why the rank loads and stores nothing any more, or nothing of the drafter, and whether it
        has logged this reason.
    ranks_file : str
        The file that rank 0 has written for the others.
    """

    begun: int = 0
    failures: list[tuple[bytes, bool]] = field(default_factory=list)
    repaired: list[bytes] = field(default_factory=list)
    breaker_open: bool | None = None
    writes_refused: bool | None = None
    other_adapters: list[int] = field(default_factory=list)
    without_drafts: list[tuple[str, int]] = field(default_factory=list)
    refused: list[RefusedStore] = field(default_factory=list)
    room: tuple[int, int] | None = None
    load_seconds: list[tuple[int, str, float]] = field(default_factory=list)
    disabled: list[tuple[str, bool]] = field(default_factory=list)
    drafter_disabled: list[tuple[str, bool]] = field(default_factory=list)
    ranks_file: str = ""


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, in steps in which there is something to say; vLLM merges all ranks'.

    Attributes
    ----------
    heard : dict
        Each rank that says something to the number up to which it has taken :class:`Orders`.
    facts : dict
        Rank to the facts that it does not know to be taken, with their numbers.
    reports : dict
        Rank to its report; sent until it serves the namespace that the scheduler has named.
    weights : dict
        Rank to the report about its weights; sent at the start, and from the moment when they may
        have changed until the scheduler answers with a namespace.
    draft_reports : dict
        As `reports`, for the drafter's layers; only of ranks of the last pipeline stage.
    timed_steps : dict
        Rank to the number of a timed step that it has ended.
    """

    heard: dict[int, int] = field(default_factory=dict)
    facts: dict[int, list[tuple[int, WorkerFacts]]] = field(default_factory=dict)
    reports: dict[int, WorkerReport] = field(default_factory=dict)
    weights: dict[int, WeightsReport] = field(default_factory=dict)
    draft_reports: dict[int, WorkerReport] = field(default_factory=dict)
    timed_steps: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Merge with what another rank sent in the same step."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(
            **{
                member.name: getattr(self, member.name) | getattr(other, member.name)
                for member in fields(self)
            }
        )
