"""What the scheduler side and the worker side of the connector tell each other.

Owns the records that travel with vLLM's steps: :class:`StepMetadata` from scheduler to
workers at the start of a step, :class:`WorkerMetadata` back at its end. Both are
pickled by vLLM when workers are other processes, and hold plain data only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvshelf.identity import Chunk

#: The block that stands for blocks which a request does not have (any more), such as those
#: that a sliding window has left behind. Its content means nothing and is never touched.
NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """The LoRA adapter that KV is addressed by.

    Attributes
    ----------
    number : int
        vLLM's id of it.
    digest : bytes
    """

    number: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StoreOp:
    """Store one chunk after this step's forward pass.

    Attributes
    ----------
    chunk : Chunk
    block_ids : list of int
        The blocks that hold the chunk's tokens, in order.
    repair : bool
        The object in place was found bad.
    age : float
        Seconds since the chunk was seen missing.
    adapter : AdapterContent, optional
    """

    chunk: Chunk
    block_ids: list[int]
    repair: bool
    age: float
    adapter: AdapterContent | None = None


@dataclass(frozen=True, slots=True)
class LoadOp:
    """Load tokens ``[start, end)`` of a request.

    Attributes
    ----------
    chunks : list of Chunk
        All chunks that overlap the tokens, in order; empty when they are not known,
        which makes the load fail.
    block_ids : list of int
        The request's blocks from position 0 on.
    adapter : AdapterContent, optional
    """

    request_id: str
    start: int
    end: int
    chunks: list[Chunk]
    block_ids: list[int]
    adapter: AdapterContent | None = None


@dataclass(frozen=True, slots=True)
class PrefetchOp:
    """Bring chunks of a request into memory while it waits for its turn.

    Attributes
    ----------
    chunks : list of Chunk
        Some more of the request's chunks, in order.
    """

    request_id: str
    chunks: list[Chunk]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, once a step.

    Attributes
    ----------
    idle : bool
        The step computes nothing, so the worker may wait for loads.
    namespace : tuple of (bytes, str), optional
        Record and slug of the namespace; sent until every worker has it.
    recheck_weights : bool
        Look whether the weight files are still those that were fingerprinted.
    prefetches : list of PrefetchOp
    waited : list of str
        Requests that do not wait any more and were not loaded either.
    """

    idle: bool = False
    namespace: tuple[bytes, str] | None = None
    stores: list[StoreOp] = field(default_factory=list)
    loads: list[LoadOp] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    recheck_weights: bool = False
    prefetches: list[PrefetchOp] = field(default_factory=list)
    waited: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """One worker's part of the namespace: what only a worker knows.

    Attributes
    ----------
    layer_names, layer_shapes, layer_dtypes, layouts, attention : tuple of str
        One entry for each layer, as in the namespace record.
    head_sizes, sliding_windows : tuple of int
        One entry for each layer.
    kv_scales : tuple of float
        The k and the v scale of each layer, empty for caches without.
    weights : str, optional
        The weights fingerprint; None until it is known, and always but for rank 0.
    problem : str
        Why nothing may be loaded or stored; empty when all is well.
    said : bool
        The problem stands in this worker's log already.
    """

    layer_names: tuple[str, ...]
    layer_shapes: tuple[str, ...]
    layer_dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    attention: tuple[str, ...]
    head_sizes: tuple[int, ...]
    sliding_windows: tuple[int, ...]
    kv_scales: tuple[float, ...] = ()
    weights: str | None = None
    problem: str = ""
    said: bool = False


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """One chunk that a worker could not load.

    Attributes
    ----------
    request_id : str
    chunk_index : int
    key : bytes
        Empty when no object is to blame.
    bad : bool
        The object is damaged.
    """

    request_id: str
    chunk_index: int
    key: bytes
    bad: bool


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, once a step; united over ranks by vLLM.

    Attributes
    ----------
    parts : dict
        Rank to its part of the namespace; sent until acknowledged by a namespace.
    failures : list of LoadFailure
    repaired : list of (bytes, int)
        Keys, and ranks that have replaced what they write of their bad objects.
    published : list of bytes
        Keys of chunks of which a rank has stored its part, where look-ups remember what was
        missing.
    resting : dict
        Rank to whether it gives the storage a rest, so that its loads would fail; sent when
        that changes, and with each load that failed for it.
    other_adapters : list of int
        Ids of LoRA adapters for which a rank loaded other content than KV is addressed by.
    """

    parts: dict[int, WorkerPart] = field(default_factory=dict)
    failures: list[LoadFailure] = field(default_factory=list)
    repaired: list[tuple[bytes, int]] = field(default_factory=list)
    published: list[bytes] = field(default_factory=list)
    resting: dict[int, bool] = field(default_factory=dict)
    other_adapters: list[int] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Unite with what another rank sent in the same step."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(
            {**self.parts, **other.parts},
            self.failures + other.failures,
            self.repaired + other.repaired,
            self.published + other.published,
            {**self.resting, **other.resting},
            self.other_adapters + other.other_adapters,
        )
