"""Which shards of a chunk each worker of an engine reads and writes.

Owns the arithmetic that maps tensor-parallel ranks and pipeline stages onto shards. It is
pure: nothing here knows an engine, a tensor or a storage.

A shard belongs to one pipeline stage and one group of KV heads. The workers of an engine
hold KV heads as vLLM lays them out (``QKVParallelLinear`` in
``vllm/model_executor/layers/linear.py``): with at least as many heads as ranks, rank r
holds heads [r·H/T, (r+1)·H/T); with fewer, T/H neighbouring ranks hold the same head.
Caches with one content for all heads (MLA) are the same on every rank.

Contracts
---------
* A worker reads all shards of its heads and only those; together the workers read every
  shard, those of replicated heads once for each replica.
* Of each chunk every shard is written by exactly one worker. Replicas take turns by chunk
  index.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from kvshelf.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The shards of one worker.

    Attributes
    ----------
    shards : tuple of int
        The shards whose heads this worker holds, counted over all stages, in the order of
        its heads, each with equally many of them.
    replicas : int
        How many workers hold these very shards.
    replica : int
        This worker's place among them, from 0.
    """

    shards: tuple[int, ...]
    replicas: int = 1
    replica: int = 0

    @classmethod
    def whole(cls, shards: int) -> ShardPlan:
        """Return the plan of a worker that holds all heads of all layers."""
        return cls(tuple(range(shards)))

    def writes(self, chunk_index: int) -> tuple[int, ...]:
        """Return the shards of one chunk that this worker writes."""
        return self.shards if chunk_index % self.replicas == self.replica else ()


def head_groups(kv_heads: int, tensor_parallel: int) -> int:
    """Return how many tensor-parallel ranks hold KV heads of their own."""
    return min(kv_heads, tensor_parallel)


@dataclass(frozen=True, slots=True)
class Topology:
    """How an engine's workers divide heads and layers.

    Parameters
    ----------
    kv_heads : int
        KV heads of the whole model; 1 where all heads share one content.
    shards : int
        Shards of a chunk, over all stages.
    tensor_parallel : int
        Ranks of each stage.
    stages : int
        Pipeline stages.
    whole_ranks : bool
        Each rank stores what it holds as one shard, as where a layout is unknown.

    Raises
    ------
    ConfigError
        If the shards cannot be spread over the ranks; the message names a number that can.
    """

    kv_heads: int
    shards: int
    tensor_parallel: int = 1
    stages: int = 1
    whole_ranks: bool = False

    def __post_init__(self) -> None:
        ranks, heads = self.tensor_parallel, self.kv_heads
        split, rest = divmod(self.shards, self.stages)
        if rest or split < 1:
            raise ConfigError(
                f"shards={self.shards} is no multiple of the {self.stages} pipeline stages:"
                " leave it out or set a multiple"
            )
        if self.whole_ranks:
            if split != ranks:
                raise ConfigError(
                    f"shards={self.shards} cannot be: the layout of the KV cache is unknown, so"
                    f" that each of the {ranks * self.stages} ranks stores its blocks whole."
                    " Leave shards out"
                )
            return
        if heads % split:
            possible = [n * self.stages for n in range(1, heads + 1) if heads % n == 0]
            raise ConfigError(
                f"shards={self.shards} does not divide the model's {heads} KV heads over"
                f" {self.stages} stages: leave it out or set one of {possible}"
            )
        if heads % ranks and ranks % heads:
            raise ConfigError(
                f"{heads} KV heads cannot be spread over tensor_parallel_size={ranks}"
            )
        # Ranks that hold the same heads count as one.
        distinct = head_groups(heads, ranks)
        if split % distinct:
            both = lcm(split, distinct)
            fitting = both if heads % both == 0 else distinct
            raise ConfigError(
                f"a chunk's {split} shards cannot be spread over"
                f" {distinct} tensor-parallel ranks with KV heads of their own: set"
                f" shards={fitting * self.stages} alike on all engines that share the shelf"
            )

    @property
    def workers(self) -> int:
        """Number of workers, which are numbered stage by stage."""
        return self.tensor_parallel * self.stages

    def stage_of(self, worker: int) -> int:
        """Return the pipeline stage of a worker."""
        return worker // self.tensor_parallel

    def plan(self, worker: int) -> ShardPlan:
        """Return the shards of one worker.

        Parameters
        ----------
        worker : int
            stage × ranks + tensor-parallel rank.
        """
        stage, rank = divmod(worker, self.tensor_parallel)
        split = self.shards // self.stages
        first = stage * split
        if self.whole_ranks:
            return ShardPlan((first + rank,))
        distinct = head_groups(self.kv_heads, self.tensor_parallel)
        replicas = self.tensor_parallel // distinct
        group, replica = divmod(rank, replicas)
        each = split // distinct
        begin = first + group * each
        return ShardPlan(tuple(range(begin, begin + each)), replicas, replica)
