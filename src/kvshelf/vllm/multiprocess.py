"""The node server's adapters under the names and signatures of vLLM's LMCache adapters.

Owns :class:`MPSchedulerAdapter` and :class:`MPWorkerAdapter`, which extend those of
:mod:`kvshelf.adapters`. They take arguments in the order of
vllm/distributed/kv_transfer/kv_connector/v1/lmcache_integration/multi_process_adapter.py, or in
that of its earlier versions, and the keyword arguments that vLLM's own connector
(lmcache_mp_connector.py beside it) passes to LMCache's adapters. ``adapters/README.md``
compares them row by row.

A model's name does not say which weights and which layout an engine has. So the namespace is given
by the keyword `namespace`, or follows from vLLM's configuration, see
:mod:`kvshelf.vllm.engine_facts`.

Threads
-------
As :mod:`kvshelf.adapters.scheduler` and :mod:`kvshelf.adapters.worker`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from kvshelf.adapters.copies import Layout, LoadStoreOp
from kvshelf.adapters.names import striding_block_hashes
from kvshelf.adapters.scheduler import LOOKUP_SECONDS, SchedulerAdapter
from kvshelf.adapters.worker import OPERATION_SECONDS, Event, WorkerAdapter
from kvshelf.cache import PromptIdentity
from kvshelf.errors import ConfigError
from kvshelf.format.kinds import FULL
from kvshelf.format.model import ModelFacts
from kvshelf.format.namespace import Namespace
from kvshelf.format.tensors import required_field
from kvshelf.kv.topology import ShardPlan, Topology
from kvshelf.vllm.engine_facts import learn_layouts, model_facts

__all__ = [
    "LMCacheMPSchedulerAdapter",
    "LMCacheMPWorkerAdapter",
    "LoadStoreOp",
    "MPSchedulerAdapter",
    "MPWorkerAdapter",
    "ParallelStrategy",
    "learn_layouts",
    "model_facts",
    "striding_block_hashes",
]


@dataclass
class ParallelStrategy:
    """Where a worker stands among an engine's ranks; see vLLM's class of this name.

    Attributes
    ----------
    use_mla : bool
        All ranks of a stage hold the same KV, and only the first of them stores.
    kv_world_size, kv_worker_id : int
        Not used: keys hold no rank.
    actual_world_size : int
        Number of ranks.
    actual_worker_id : int
        Number of this rank, from 0 on.
    tp_size : int
        Tensor-parallel ranks of each pipeline stage.
    pp_size : int
        Pipeline stages.
    """

    use_mla: bool
    kv_world_size: int
    kv_worker_id: int
    actual_world_size: int
    actual_worker_id: int
    tp_size: int
    pp_size: int

    def shard_plan(self, namespace: Namespace) -> ShardPlan:
        """Return the shards that the worker holds.

        Raises
        ------
        ConfigError
            If the namespace does not fit the ranks.
        """
        record = namespace.record
        stages = len(required_field(record, "stages"))
        if stages != self.pp_size:
            raise ConfigError(
                f"the namespace has {stages} pipeline stages, the engine {self.pp_size}: state the"
                " layers of each stage in the facts"
            )
        topology = Topology.of(record, self.tp_size)[FULL]
        plan = topology.plan(self.actual_worker_id)
        # With MLA the connector calls only the first rank for stores.
        return replace(plan, replicas=1, replica=0) if self.use_mla else plan


def _model(
    model_name: str, namespace: Namespace | ModelFacts | None, vllm_config: Any
) -> Namespace | ModelFacts:
    if namespace is not None:
        return namespace
    if vllm_config is None:
        raise ConfigError(
            f"the name {model_name!r} does not say which weights and layout the model has: pass the"
            " keyword namespace, for example ModelFacts(…, weights=pathlib.Path(folder)), or"
            " vllm_config, from which it follows"
        )
    return model_facts(vllm_config)


def _stages(model: Namespace | ModelFacts) -> int:
    """Return the number of pipeline stages."""
    if isinstance(model, Namespace):
        return len(required_field(model.record, "stages"))
    return len(model.stages or (model.layers,))


def _engine(
    model: Namespace | ModelFacts, given: Sequence[Any], named: Mapping[str, Any]
) -> tuple[int, ParallelStrategy]:
    """Return the block size and the strategy in the arguments after the model's name."""
    names: tuple[str, ...] = ("vllm_block_size", "parallel_strategy")
    if len(given) + len(named) != len(names):
        names = ("world_size", "kv_rank", "vllm_block_size")
    engine = {**dict(zip(names, given, strict=False)), **named}
    if len(given) + len(named) != len(names) or set(engine) != set(names):
        raise TypeError(
            f"after the model's name {len(given)} arguments and {', '.join(named) or 'no names'}"
            " were given; expected vllm_block_size and parallel_strategy, or world_size, kv_rank"
            " and vllm_block_size"
        )
    block_size, strategy = engine["vllm_block_size"], engine.get("parallel_strategy")
    if strategy is None and "world_size" in engine:
        strategy = _strategy(model, engine["world_size"], engine["kv_rank"])
    elif not isinstance(strategy, ParallelStrategy):
        try:
            values = {
                field.name: getattr(strategy, field.name) for field in fields(ParallelStrategy)
            }
        except AttributeError:
            raise TypeError(
                f"parallel_strategy is {strategy!r}; expected a ParallelStrategy"
            ) from None
        strategy = ParallelStrategy(**values)
    if not isinstance(block_size, int):
        raise TypeError(f"vllm_block_size is {block_size!r}; expected a number of tokens")
    return block_size, strategy


def _strategy(model: Namespace | ModelFacts, world_size: int, kv_rank: int) -> ParallelStrategy:
    """Return the strategy of ranks that are only counted: the stages are those of the model."""
    stages = _stages(model)
    if world_size < 1 or world_size % stages or not 0 <= kv_rank < world_size:
        raise ConfigError(
            f"kv_rank is {kv_rank} and world_size {world_size}; expected a rank from 0 on, of a"
            f" multiple of the model's pipeline stages ({stages})"
        )
    ranks = world_size // stages
    return ParallelStrategy(False, world_size, kv_rank, world_size, kv_rank, ranks, stages)


class _OfEngine:
    """What vLLM's connector reads of both adapters."""

    model_name: str
    parallel_strategy: ParallelStrategy

    @property
    def world_size(self) -> int:
        """Number of ranks with KV of their own."""
        return self.parallel_strategy.kv_world_size

    @property
    def worker_id(self) -> int:
        """The number of this rank among them."""
        return self.parallel_strategy.kv_worker_id


class MPSchedulerAdapter(_OfEngine, SchedulerAdapter):
    """:class:`~kvshelf.adapters.scheduler.SchedulerAdapter` with the arguments of vLLM's class.

    Parameters
    ----------
    server_url : str
        ``ipc://`` and the path of the socket of ``kvshelf serve``.
    context : zmq.Context
        Not used: the connection has one of its own, which survives a fork.
    model_name : str
        For messages.
    vllm_block_size : int
        Tokens in a block.
    parallel_strategy : ParallelStrategy
        Not used: keys hold no rank.
    world_size : int
        Ranks with KV of their own. With `kv_rank` in place of `parallel_strategy`, and then before
        `vllm_block_size`, as earlier versions of vLLM's class have it.
    kv_rank : int
        The number of this rank among them.
    namespace : Namespace or ModelFacts, optional
        Identifies weights and layout.
    vllm_config : VllmConfig, optional
        Needed where `namespace` is absent.
    mq_timeout : float
        As `timeout_s` of the base class, but two seconds at most: requests wait for their lookups,
        and vLLM's connector passes five minutes.
    heartbeat_interval : float, optional
        Not used: the end of a process ends its connection.

    Raises
    ------
    ConfigError
        If neither `namespace` nor `vllm_config` is given; and as for the base class.
    """

    def __init__(
        self,
        server_url: str,
        context: Any,
        model_name: str,
        *engine: Any,
        namespace: Namespace | ModelFacts | None = None,
        vllm_config: Any = None,
        mq_timeout: float = LOOKUP_SECONDS,
        heartbeat_interval: float | None = None,
        **named: Any,
    ) -> None:
        model = _model(model_name, namespace, vllm_config)
        block_size, self.parallel_strategy = _engine(model, engine, named)
        timeout_s = min(mq_timeout, LOOKUP_SECONDS)
        super().__init__(server_url, model, block_size, timeout_s=timeout_s)
        self.model_name = model_name

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return self.parallel_strategy.tp_size

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        block_hashes: Sequence[bytes] | None = None,
        token_ids: Sequence[int] | None = None,
        *,
        identity: PromptIdentity | None = None,
        cache_salt: str = "",
    ) -> None:
        """See the base class; `cache_salt` stands for an identity that has only a salt."""
        super().maybe_submit_lookup_request(
            request_id,
            block_hashes,
            token_ids,
            identity=identity or PromptIdentity(cache_salt or ""),
        )

    def report_block_allocations(self, records: Sequence[Any]) -> None:
        """Do nothing: LMCache's server counts an engine's blocks, ours counts objects."""


class MPWorkerAdapter(_OfEngine, WorkerAdapter):
    """:class:`~kvshelf.adapters.worker.WorkerAdapter` with the arguments of vLLM's class.

    Parameters
    ----------
    server_url, context, model_name
        As for :class:`MPSchedulerAdapter`.
    vllm_block_size : int
        Tokens in a block.
    parallel_strategy : ParallelStrategy
        Says which heads and layers the worker holds.
    world_size, kv_rank : int
        In place of `parallel_strategy`, as for :class:`MPSchedulerAdapter`: with the pipeline
        stages of the namespace they say which heads and layers the worker holds.
    namespace, vllm_config, heartbeat_interval
        As for :class:`MPSchedulerAdapter`.
    kv_cache_config : KVCacheConfig, optional
        See :func:`kvshelf.vllm.engine_facts.learn_layouts`.
    mq_timeout : float
        As `timeout_s` of the base class.

    Raises
    ------
    ConfigError
        If neither `namespace` nor `vllm_config` is given, or the namespace does not fit the ranks;
        and as for the base class.
    """

    def __init__(
        self,
        server_url: str,
        context: Any,
        model_name: str,
        *engine: Any,
        namespace: Namespace | ModelFacts | None = None,
        vllm_config: Any = None,
        kv_cache_config: Any = None,
        mq_timeout: float = OPERATION_SECONDS,
        heartbeat_interval: float | None = None,
        **named: Any,
    ) -> None:
        model = _model(model_name, namespace, vllm_config)
        block_size, self.parallel_strategy = _engine(model, engine, named)
        plan = self.parallel_strategy.shard_plan
        super().__init__(server_url, model, block_size, plan=plan, timeout_s=mq_timeout)
        self.model_name = model_name
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config

    @property
    def use_mla(self) -> bool:
        """Whether all ranks of a stage hold the same KV."""
        return self.parallel_strategy.use_mla

    @property
    def is_first_rank_of_pp_group(self) -> bool:
        """Whether this is the first rank of its pipeline stage."""
        return self.parallel_strategy.actual_worker_id % self.parallel_strategy.tp_size == 0

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, Tensor],
        layout: Layout | Mapping[str, Layout] | None = None,
    ) -> None:
        """See the base class; without a layout, it is learned where `vllm_config` was given."""
        if layout is None and self._vllm_config is not None:
            layout = learn_layouts(self._vllm_config, kv_caches, self._kv_cache_config)
        super().register_kv_caches(kv_caches, layout)

    def batched_submit_store_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: Event | None = None,
        *,
        identities: Sequence[PromptIdentity] | None = None,
        cache_salts: Sequence[str] | None = None,
    ) -> None:
        """See the base class; salts stand for identities that have only a salt."""
        super().batched_submit_store_requests(
            request_ids, ops, event, identities=_identities(identities, cache_salts)
        )

    def batched_submit_retrieve_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: Event | None = None,
        *,
        identities: Sequence[PromptIdentity] | None = None,
        cache_salts: Sequence[str] | None = None,
    ) -> None:
        """See the base class; salts stand for identities that have only a salt."""
        super().batched_submit_retrieve_requests(
            request_ids, ops, event, identities=_identities(identities, cache_salts)
        )


def _identities(
    identities: Sequence[PromptIdentity] | None, salts: Sequence[str] | None
) -> Sequence[PromptIdentity] | None:
    if identities is not None or salts is None:
        return identities
    return [PromptIdentity(salt or "") for salt in salts]


LMCacheMPSchedulerAdapter = MPSchedulerAdapter
LMCacheMPWorkerAdapter = MPWorkerAdapter
