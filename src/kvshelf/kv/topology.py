"""The shards of a chunk that each worker of an engine reads and writes.

Owns the arithmetic that maps tensor-parallel ranks and pipeline stages to shards
(:class:`Topology`), and derives it from a namespace record (:meth:`Topology.of`,
:func:`shard_plans`). It is pure and independent of engines, tensors and storage.

A shard belongs to one pipeline stage and one group of heads. Each kind of KV has a
:class:`Topology` of its own; the heads of states are what :mod:`kvshelf.kv.states` divides, an
equal share for each rank. The workers of an engine hold KV heads as vLLM lays them out
(``QKVParallelLinear`` in ``vllm/model_executor/layers/linear.py``): with at least as many heads as
ranks, rank r holds heads [r·H/T, (r+1)·H/T); with fewer, T/H neighbouring ranks hold the same head.
Caches with one content for all heads (MLA) are the same on every rank.

Prefill context parallelism multiplies the ranks of a stage; all of them hold the heads of their
tensor-parallel rank. Decode context parallelism divides the tokens of ranks with the same heads
among groups of them. vLLM numbers the ranks of a stage by prefill-context rank, then by
tensor-parallel rank, and fills the groups in the other order (``initialize_model_parallel`` in
``vllm/distributed/parallel_state.py``).

Contracts
---------
* A worker reads exactly the shards of its heads. Together the workers read every shard, and
  those of replicated heads once per replica.
* Each shard of a chunk is written by exactly one worker, or by one group of workers that share
  its tokens. Replicas take turns by chunk index. Where layers have different numbers of KV heads,
  and there are more ranks than all layers have heads in common, no worker holds a whole shard, and
  none writes (:attr:`Topology.divided`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from kvshelf.errors import ConfigError
from kvshelf.format.kinds import SHARDS_FIELDS, Kind, layers_by_kind
from kvshelf.format.model import MAX_SHARDS
from kvshelf.format.tensors import is_state, parse_state, required_field, shape_heads


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The shards of one worker.

    Attributes
    ----------
    shards : tuple of int
        The shards of this worker's heads, counted over all stages, in the order of its
        heads, with equally many heads each.
    replicas : int
        Number of workers, or of groups of workers that share tokens, that hold these shards.
    replica : int
        The index of this worker, or of its group, among them, from 0.
    context_ranks : int
        Number of workers in a group that share the tokens of each block.
    context_rank : int
        This worker's index in its group, from 0.
    divided : bool
        The workers hold different heads of these shards in layers with more KV heads than others.
        Each loads the heads that it holds, and none can write the shards.
    """

    shards: tuple[int, ...]
    replicas: int = 1
    replica: int = 0
    context_ranks: int = 1
    context_rank: int = 0
    divided: bool = False

    @classmethod
    def whole(cls, shards: int) -> ShardPlan:
        """Return the plan of a worker that holds all heads of all layers."""
        return cls(tuple(range(shards)))

    def writes(self, chunk_index: int) -> tuple[int, ...]:
        """Return the shards of one chunk that this worker, or its group, writes."""
        if self.divided or chunk_index % self.replicas != self.replica:
            return ()
        return self.shards

    def part(self, parts: int) -> int:
        """Return which of `parts` equal parts of a shard's heads this worker holds."""
        holder = self.replica * self.context_ranks + self.context_rank
        return holder * parts // (self.replicas * self.context_ranks)


def head_groups(kv_heads: int, tensor_parallel: int) -> int:
    """Return how many tensor-parallel ranks hold KV heads of their own."""
    return min(kv_heads, tensor_parallel)


def fitting_shards(kv_heads: int, tensor_parallel: int, stages: int = 1) -> int:
    """Return the number of shards of a new namespace.

    That of the model, :func:`~kvshelf.format.model.default_shards`, or where it cannot be spread
    over the tensor-parallel ranks, the largest number that can.
    """
    distinct = head_groups(kv_heads, tensor_parallel)
    fitting = range(distinct, max(MAX_SHARDS, distinct) + 1, distinct)
    return max((count for count in fitting if kv_heads % count == 0), default=distinct) * stages


@dataclass(frozen=True, slots=True)
class Topology:
    """How an engine's workers divide heads and layers.

    Parameters
    ----------
    kv_heads : int
        KV heads of the whole model; where layers have different numbers, their greatest common
        divisor; 1 where all heads share one content.
    shards : int
        Shards of a chunk, over all stages.
    tensor_parallel : int
        Tensor-parallel ranks of each stage.
    stages : int
        Pipeline stages that have layers of this kind.
    whole_ranks : bool
        Each rank stores its KV as one shard, as it does if the layout is unknown.
    prefill_context : int
        Ranks of each stage for each tensor-parallel rank.
    decode_context : int
        Ranks that share the tokens of each block.
    most_kv_heads : int, optional
        KV heads of the layer that has most; `kv_heads` when absent.

    Raises
    ------
    ConfigError
        If the heads or the shards cannot be spread over the ranks.
    """

    kv_heads: int
    shards: int
    tensor_parallel: int = 1
    stages: int = 1
    whole_ranks: bool = False
    prefill_context: int = 1
    decode_context: int = 1
    most_kv_heads: int | None = None

    def __post_init__(self) -> None:
        ranks, heads = self.tensor_parallel, self.kv_heads
        split, remainder = divmod(self.shards, self.stages)
        if self.whole_ranks:
            if self.decode_context > 1:
                raise ConfigError(
                    "decode_context_parallel_size spreads the tokens of a block over ranks, so"
                    " blocks of an unknown layout cannot be stored: set it to 1"
                )
            if remainder or split != ranks:
                raise ConfigError(
                    f"the namespace has {self.shards} shards, but the layout of the KV cache is"
                    f" unknown, so each of the {ranks * self.stages} ranks stores whole blocks"
                )
            return
        if heads % ranks and ranks % heads:
            raise ConfigError(
                f"{heads} KV heads cannot be spread over tensor_parallel_size={ranks}"
            )
        # Ranks that hold the same heads count as one.
        distinct = head_groups(heads, ranks)
        if remainder or split < 1 or heads % split or split % distinct:
            fitting = fitting_shards(heads, ranks, self.stages)
            raise ConfigError(
                f"the namespace has {self.shards} shards, which cannot be spread over {heads} KV"
                f" heads, {self.stages} pipeline stages and {ranks} tensor-parallel ranks; expected"
                f" {fitting}, for instance"
            )
        alike = self.workers // head_groups(self.most_kv_heads or heads, ranks)
        if alike % self.decode_context:
            raise ConfigError(
                f"decode_context_parallel_size={self.decode_context} would spread the tokens of a"
                f" block over ranks with different KV heads: set it to a divisor of {alike}"
            )

    @classmethod
    def of(
        cls,
        record: Mapping[str, Any],
        tensor_parallel: int = 1,
        *,
        prefill_context: int = 1,
        decode_context: int = 1,
        more_heads: Iterable[int] = (),
    ) -> dict[Kind, Topology]:
        """Return how an engine's workers divide the layers of each kind, in the order of kinds.

        Parameters
        ----------
        record : Mapping
            A namespace record. Of a part of one, the numbers of shards that it lacks are those of
            a new namespace.
        tensor_parallel, prefill_context : int
            As for the class.
        decode_context : int
            As for the class, where all layers are of one kind.
        more_heads : Iterable of int
            KV heads of layers that the record does not name, where all layers are of one kind.

        Raises
        ------
        ConfigError
            If the record lacks a field, or the shards cannot be spread over the ranks.
        """
        stages = required_field(record, "stages")
        hybrid = "kinds" in record
        fields = {}
        for kind, members in layers_by_kind(stages, record.get("kinds", ())).items():
            numbers = [number for of_stage in members.values() for number in of_stage]
            stated = () if hybrid else (record["kv_heads"], *more_heads)
            heads, whole_ranks = _heads_of(record, numbers, stated)
            common = gcd(*heads)
            shards = record.get(SHARDS_FIELDS[kind])
            if shards is None:
                ranks = tensor_parallel * len(members)
                shards = (
                    ranks if whole_ranks else fitting_shards(common, tensor_parallel, len(members))
                )
            fields[kind] = cls(
                common,
                shards,
                tensor_parallel,
                len(members),
                whole_ranks=whole_ranks,
                prefill_context=prefill_context,
                decode_context=1 if hybrid else decode_context,
                most_kv_heads=max(heads),
            )
        return fields

    @property
    def workers(self) -> int:
        """Number of workers of one stage."""
        return self.tensor_parallel * self.prefill_context

    @property
    def divided(self) -> bool:
        """Whether ranks hold parts of shards, so that they load and cannot store.

        So it is with more ranks than the layers have KV heads in common: some layers have a head
        for each rank, and others have one for several.
        """
        heads = self.most_kv_heads or self.kv_heads
        return not self.whole_ranks and self._groups < head_groups(heads, self.tensor_parallel)

    @property
    def _groups(self) -> int:
        """Number of groups of ranks of one stage that hold the same shards."""
        return head_groups(self.kv_heads, self.tensor_parallel)

    @property
    def _holders(self) -> int:
        """Number of workers of one stage that hold the same shards."""
        return self.workers // self._groups

    def plan(self, worker: int) -> ShardPlan:
        """Return the shards of one worker.

        Parameters
        ----------
        worker : int
            (stage × prefill-context ranks + prefill-context rank) × tensor-parallel ranks
            + tensor-parallel rank. Stages without layers of this kind do not count.
        """
        stage, inside = divmod(worker, self.workers)
        copy, rank = divmod(inside, self.tensor_parallel)
        split = self.shards // self.stages
        first = stage * split
        if self.whole_ranks:
            return ShardPlan((first + rank,), self.prefill_context, copy)
        group, holder = divmod(rank * self.prefill_context + copy, self._holders)
        replica, context_rank = divmod(holder, self.decode_context)
        shards = split // self._groups
        begin = first + group * shards
        return ShardPlan(
            tuple(range(begin, begin + shards)),
            self._holders // self.decode_context,
            replica,
            self.decode_context,
            context_rank,
            self.divided,
        )


def shard_plans(
    record: Mapping[str, Any], topologies: Mapping[Kind, Topology], worker: int
) -> dict[Kind, ShardPlan]:
    """Return the shards of each kind that a worker holds.

    A kind of which the worker's pipeline stage has no layers is not in the answer.

    Parameters
    ----------
    record : Mapping
        The namespace record.
    topologies : Mapping
        Of :meth:`Topology.of`.
    worker : int
        As for :meth:`Topology.plan`, over all stages.
    """
    plans = {}
    for kind, members in layers_by_kind(record["stages"], record.get("kinds", ())).items():
        topology = topologies[kind]
        stage, inside = divmod(worker, topology.workers)
        if stage in members:
            plans[kind] = topology.plan(list(members).index(stage) * topology.workers + inside)
    return plans


def _heads_of(
    record: Mapping[str, Any], layers: Sequence[int], stated: Iterable[int]
) -> tuple[set[int], bool]:
    """Return the numbers of heads of layers of one kind, and whether ranks store whole blocks.

    `stated` are numbers of KV heads of the model, which layers with a single content for all heads
    do not have.
    """
    layouts = [record["layouts"][number] for number in layers]
    shapes = [record["layer_shapes"][number] for number in layers]
    if any(map(is_state, layouts)):
        dtypes = [record["layer_dtypes"][number] for number in layers]
        heads = {
            part.shape[part.divided]
            for shape, dtype in zip(shapes, dtypes, strict=True)
            for part in parse_state(shape, dtype)
            if part.divided is not None
        }
        return heads or {1}, any(layout != "state" for layout in layouts)
    whole_ranks = any(layout.startswith("opaque-") for layout in layouts)
    counts = {shape_heads(shape) for shape in shapes}
    heads = {count for count in counts if count}
    heads.update([1] if None in counts and not whole_ranks else stated)
    return heads or {1}, whole_ranks
