"""``KVShelfConnector``: vLLM's KV connector interface on top of a shelf.

Owns the checks at an engine's start and the translation of vLLM's calls to
:mod:`kvshelf.vllm.scheduler` and :mod:`kvshelf.vllm.worker`, which do the work. vLLM makes one
instance for each role, and makes all calls on the engine's step thread.

The interface is ``vllm/distributed/kv_transfer/kv_connector/v1/base.py`` of vLLM 0.32;
0.33 adds the sleep hooks.

An exception from a method that vLLM calls in a step would end the engine. So each of these
methods is contained: the error is logged, and vLLM gets the answer of a connector without any
KV. The loads that vLLM waits for are reported all the same. The constructor and
``register_kv_caches`` do raise: a wrong configuration stops the start.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import vllm

from kvshelf.vllm import check_vllm_version, register

# Checked before the import of names that other versions lack, so that users get a clear message.
check_vllm_version(vllm.__version__)

# ruff: noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import iter_layer_specs
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvshelf.config import Config
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.format.namespace import Namespace
from kvshelf.logs import RateLimitedLog, prefixed
from kvshelf.metrics import Counters
from kvshelf.server import INSTALL
from kvshelf.tiers.runtime import Role, open_runtime
from kvshelf.urls import directory_of
from kvshelf.vllm.affinity import widen_cpu_affinity
from kvshelf.vllm.groups import CacheGroups, with_chunk_size
from kvshelf.vllm.metadata import StepMetadata, WorkerMetadata
from kvshelf.vllm.namespace import check_environment, context_ranks, local_ranks
from kvshelf.vllm.options import CONNECTOR_NAME, EARLIER_NAME
from kvshelf.vllm.scheduler import SchedulerEngine, SchedulerSide
from kvshelf.vllm.speculation import check_speculation, drafter_has_kv
from kvshelf.vllm.stats import ShelfPromMetrics, ShelfStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvshelf.kv.streams import Streams
    from kvshelf.server.connection import NodeClient
    from kvshelf.shelf.shelf import Shelf
    from kvshelf.vllm.worker.side import WorkerSide

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")
#: The log of each contained method.
_logs: dict[str, RateLimitedLog] = {}


def _contained(
    fallback: Callable[..., Any],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Log what a method raises, and return what `fallback` returns for the same arguments."""

    def contain(method: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(method)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                log = _logs.setdefault(method.__name__, RateLimitedLog(logger))
                log.error("%s failed; the engine goes on", method.__name__, exc_info=error)
                answer: _R = fallback(*args, **kwargs)
                return answer

        return call

    return contain


def _nothing(*_: object, **__: object) -> None:
    """Return None, the fallback of methods without an answer."""


class KVShelfConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores KV of prompts on a shelf and loads it from there.

    Parameters
    ----------
    vllm_config : VllmConfig
        ``kv_transfer_config.kv_connector_extra_config`` configures kvshelf, see
        :class:`kvshelf.config.Config`.
    role : KVConnectorRole
    kv_cache_config : KVCacheConfig, optional

    Raises
    ------
    ConfigError
        For configurations that contradict themselves or the engine.
    UnsupportedError
        For engines that this version of kvshelf does not support.
    """

    #: What vLLM's metrics call the source of hits.
    _cache_hit_source = CacheHitSource.DISK
    #: An instance has one of the two, by its role.
    _scheduler: SchedulerSide
    _worker: WorkerSide
    _side: SchedulerSide | WorkerSide

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _show_log_lines()
        transfer = vllm_config.kv_transfer_config
        self._config = Config.load(transfer.kv_connector_extra_config)
        _check_engine(vllm_config)
        self._groups = CacheGroups(vllm_config, kv_cache_config)
        self._config = with_chunk_size(self._config, self._groups)
        if (memory := self._config.memory) is not None:
            bytes_of_rank = memory // local_ranks(vllm_config)
            self._config = self._config.model_copy(update={"memory": bytes_of_rank})
        if self._config.save_decode and _answers_see_a_window(kv_cache_config):
            self._config = self._config.model_copy(update={"save_decode": False})
            if role is KVConnectorRole.SCHEDULER:
                logger.warning(
                    "save_decode is off for this model: a token sees the whole prompt and a window"
                    " of the answer, so the KV of an answer depends on where the prompt ended"
                )
        _recompute_failed_loads(transfer)
        other_connectors = _others_that_fill(vllm_config)
        _check_other_loads(vllm_config, other_connectors)
        url, server = self._config.shared_storage_path, self._config.server
        if server is not None or directory_of(url or "") is None:
            # A remote store. The tier from which a hit will come is not known here.
            self._cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED
        self._counters = Counters()
        device = getattr(vllm_config, "device_config", None)
        on_cpu = device is None or device.device_type == "cpu"
        copies = not on_cpu and role is not KVConnectorRole.SCHEDULER
        gpu = _current_gpu() if copies else None
        self._node = None if server is None else _connect(server)
        served = functools.partial(
            _open_served,
            self._node,
            self._config,
            self._counters,
            # A GPU copies from page-locked memory.
            in_place=not copies,
            gpu=gpu,
        )
        self._runtime = open_runtime(
            self._config,
            Role.ENGINE,
            self._counters,
            open_served=None if server is None else served,
            on_thread_start=widen_cpu_affinity,
        )
        self._bad_blocks: set[int] = set()
        context = context_ranks(vllm_config, kv_cache_config)
        refuses = _why_no_stores(self._config, transfer, context)
        if role is KVConnectorRole.SCHEDULER:
            logger.info(
                "shelf %s, %d tokens a chunk, %s",
                self._runtime.url,
                self._config.chunk_size,
                self._config.bounds_told,
            )
            if context > 1 and transfer.is_kv_producer:
                logger.warning("this engine loads KV from the shelf and stores none: %s", refuses)
            second_runner = getattr(vllm_config, "use_v2_model_runner", False)
            if other_connectors and second_runner and drafter_has_kv(vllm_config):
                logger.warning(
                    "the drafter's KV is not stored: vLLM's second model runner drafts when vLLM"
                    " may know already that the step is over, and %s may fill blocks meanwhile."
                    " Fewer drafts are accepted behind a hit",
                    ", ".join(other_connectors),
                )
            self._side = self._scheduler = SchedulerSide(
                SchedulerEngine(
                    vllm_config,
                    self._config,
                    self._runtime.shelf,
                    self._groups,
                    ranks=int(vllm_config.parallel_config.world_size),
                    may_store=not refuses,
                    hands_over=_is_first_in_multi_connector(),
                    counters=self._counters,
                    uses=self._runtime.uses,
                    others_transfer=_others_transfer(),
                    is_consumer=not transfer.is_kv_producer,
                )
            )
        else:
            # The modules that move KV take 0.1 s to import, and the scheduler does not need them.
            from kvshelf.vllm.worker.registration import Registration
            from kvshelf.vllm.worker.side import WorkerSide

            registration = Registration(
                vllm_config,
                self._config,
                self._runtime,
                kv_cache_config,
                int(vllm_config.parallel_config.rank),
                self._streams_of,
                None if self._node is None or self._config.read_only else self._node.share,
            )
            self._side = self._worker = WorkerSide(
                registration,
                may_store=not refuses,
                others_fill=bool(other_connectors),
            )

    def _streams_of(self, device: torch.device) -> Streams | None:
        """Return the streams to use on a device, None for its own; tests override this."""
        return None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a dropped store is only a later miss."""
        return False

    @property
    def config(self) -> Config:
        """The configuration."""
        return self._config

    # ------------------------------------------------------------- worker

    def drain(self, seconds: float) -> int:
        """Wait for this worker's stores; return how many chunks are still not stored."""
        return self._worker.drain(seconds)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's caches."""
        self._worker.register(kv_caches)

    @_contained(_nothing)
    def unregister_kv_caches(self) -> None:
        """Before sleep (vLLM 0.33): publish what is staged, and stop using the caches."""
        self._worker.fall_asleep()

    @_contained(_nothing)
    def restore_kv_caches(self) -> None:
        """After sleep (vLLM 0.33): compare layouts, and use the caches again."""
        self._worker.wake_up()

    def weights_changed(self, version: str = "") -> None:
        """Announce that this worker's weights are about to change in place.

        kvshelf notices when vLLM's own methods change weights, or the model's ``load_weights``.
        Code that changes them otherwise, such as a worker extension that writes into parameters,
        calls this in every worker before it begins.

        Parameters
        ----------
        version : str
            A name of the new weights, the same in every worker. Engines whose weights have the
            same name share KV, whatever their tensor-parallel degree. Without it the content of
            the parameters names the weights.
        """
        self._worker.weights_changed("weights_changed()", version)

    @_contained(_nothing)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            self._worker.bind(connector_metadata)

    @_contained(_nothing)
    def clear_connector_metadata(self) -> None:
        """End a step."""
        meta = self._connector_metadata
        super().clear_connector_metadata()
        if isinstance(meta, StepMetadata):
            self._worker.clear(meta)

    @_contained(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's loads, unless they started with it."""
        self._worker.loads.start()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM schedules requests only after their loads have finished."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: :meth:`wait_for_save` gathers all layers at once."""

    @_contained(_nothing)
    def finish_forward(self) -> None:
        """Gather what the forward pass completed; only vLLM's second model runner calls this."""
        self._worker.stores.finish_forward()

    @_contained(_nothing)
    def wait_for_save(self) -> None:
        """Gather what this step completed into memory, and is not gathered yet."""
        self._worker.stores.save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads are finished; those to compute as a whole as failed.

        And those that have ended and whose blocks are no longer needed.

        The blocks that these loads left without KV are kept for
        :meth:`get_block_ids_with_load_errors`, so that nothing can come between.
        """
        stores = self._worker.stores
        released, stores.released = stores.released, set()
        finished, failed, bad_blocks = self._take_ended()
        self._bad_blocks |= bad_blocks
        return KVConnectorTransferResults(released, finished, failed)

    @_contained(lambda *_: (set(), set(), set()))
    def _take_ended(self) -> tuple[set[str], set[str], set[int]]:
        return self._worker.loads.take_ended()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that failed loads left without KV, of an engine with one group."""
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    @_contained(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what the scheduler side has to know of this step."""
        return self._worker.worker_metadata()

    # ------------------------------------------------------------- scheduler

    @property
    def namespace(self) -> Namespace | None:
        """The engine's namespace; None while it is not known."""
        return self._scheduler.namespace

    @property
    def disabled(self) -> bool:
        """Whether nothing is loaded or stored any more; the log says why."""
        return self._scheduler.disabled

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return the cache groups that a load fills. vLLM zeroes the blocks of others."""
        scratch = self._groups.scratch
        return tuple(group.index for group in self._groups if group.index not in scratch)

    @_contained(_nothing)
    def on_new_request(self, request: Request) -> None:
        """Start the request's lookup."""
        self._scheduler.new_request(request)

    @_contained(lambda *_: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many further tokens the shelf has; None while that is not known."""
        matched_tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return matched_tokens, bool(matched_tokens)

    @_contained(
        lambda self, request, blocks, num_external_tokens: self._scheduler.loads.fail(
            request.request_id, num_external_tokens
        )
    )
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load of `num_external_tokens` into `blocks`."""
        if num_external_tokens:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @_contained(lambda *_: StepMetadata())
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the step's loads and stores; `scheduler_output` is only read.

        What the workers must learn of a step that fails here is part of the next one.
        """
        return self._scheduler.step_metadata(scheduler_output)

    @_contained(_nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers report. Facts that fail here come again."""
        meta = connector_output.kv_connector_worker_meta
        self._scheduler.take_output(
            connector_output.finished_recving or (),
            meta if isinstance(meta, WorkerMetadata) else None,
        )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request, as :meth:`request_finished_all_groups` does, of one cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @_contained(lambda *_: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; return whether it keeps its blocks, and what it hands over.

        Where the request wants a hand-over, the answer is what another engine needs to know
        (:mod:`kvshelf.vllm.handover`). If chunks of it are not stored yet, it keeps its blocks
        until :meth:`get_transfer_results` of all workers has named the request.
        """
        return self._scheduler.finished(request.request_id, block_ids)

    @_contained(lambda *_: False)
    def reset_cache(self) -> bool | None:
        """Forget lookups' results and let the workers compare their weights; objects stay."""
        return self._scheduler.reset()

    # ------------------------------------------------------------- both

    @_contained(_nothing)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the measurements since the last call."""
        source = "scheduler"
        if self.role is not KVConnectorRole.SCHEDULER:
            self._worker.set_gauges()
            source = f"rank {self._worker.rank}"
        return ShelfStats.of(self._counters, source)

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Return stats that hold `data`."""
        return ShelfStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Return the object that adds stats to Prometheus metrics."""
        return ShelfPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @_contained(_nothing)
    def shutdown(self) -> None:
        """Publish what is staged for a bounded time; log what was lost. Idempotent."""
        # All of these are closed, the last one first, whatever some of them raise.
        with ExitStack() as stack:
            for part in (self._node, self._runtime, self._side):
                if part is not None:
                    stack.callback(part.close)


# MultiConnector finds the stats classes of its children by the connector's name, even where vLLM
# found this connector by kv_connector_module_path and plugins are off.
register()


#: The class under its other name, for vLLM and for code that names it.
SharedStorageConnector = KVShelfConnector


def _show_log_lines() -> None:
    """Write kvshelf's log lines where vLLM writes its own."""
    ours = logging.getLogger("kvshelf")
    if not ours.handlers and not logging.getLogger().handlers:
        theirs = logging.getLogger("vllm")
        ours.handlers = [prefixed(handler) for handler in theirs.handlers]
        ours.setLevel(theirs.level)
        ours.propagate = False


def _current_gpu() -> torch.device | None:
    """Return the GPU of a worker, which vLLM has made current before it makes connectors."""
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _connect(server: str) -> NodeClient:
    """Return a connection to the node server, which is made in the background.

    Raises
    ------
    ConfigError
        If a package is missing, or the address is none of a server.
    """
    try:
        from kvshelf.server.connection import NodeClient
    except ImportError as error:
        raise ConfigError(
            f"server is {server}, but a package for node servers is missing ({error}): {INSTALL}"
        ) from error
    return NodeClient(server)


def _open_served(
    client: NodeClient | None,
    config: Config,
    counters: Counters,
    *,
    in_place: bool,
    gpu: torch.device | None,
) -> Shelf:
    from kvshelf.server.view import open_served

    assert client is not None
    return open_served(
        client, read_only=config.read_only, in_place=in_place, device=gpu, counters=counters
    )


def _check_engine(vllm_config: Any) -> None:
    """Refuse engines that this version does not support, before anything is stored.

    Raises
    ------
    UnsupportedError
    """
    check_environment()
    parallel = vllm_config.parallel_config
    alone = getattr(parallel, "distributed_executor_backend", None) == "external_launcher"
    if alone and int(parallel.world_size) > 1:
        raise UnsupportedError(
            "with distributed_executor_backend external_launcher each rank schedules for itself and"
            " gets no reports of other ranks, so no rank knows when a chunk is complete. Use mp or"
            " ray"
        )
    model = vllm_config.model_config
    if getattr(model, "is_encoder_decoder", False):
        raise UnsupportedError(
            "encoder-decoder models are not supported: their KV is not a function of a token"
            " prefix. Remove --kv-transfer-config for this model"
        )
    if model.use_mla and not vllm_config.scheduler_config.enable_chunked_prefill:
        raise UnsupportedError(
            "vLLM cannot continue a stored prefix with MLA here: where its backend cannot, as on"
            " CPUs without AMX, it turns chunked prefill and prefix caching off, and would compute"
            " tokens behind a loaded prefix wrongly. Remove --kv-transfer-config, or do not turn"
            " chunked prefill off"
        )
    if getattr(model, "is_diffusion", False) or not model.is_prefix_caching_supported:
        raise UnsupportedError(
            "this model cannot reuse KV of a prefix (vLLM's own prefix caching does not support"
            " it either); remove --kv-transfer-config for this model"
        )
    check_speculation(vllm_config)


def _answers_see_a_window(kv_cache_config: Any) -> bool:
    """Whether the model has R-SWA layers (RSWASpec of vllm/v1/kv_cache_interface.py)."""
    groups = getattr(kv_cache_config, "kv_cache_groups", ())
    specs = (spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec))
    return any(hasattr(spec, "rswa_window") for spec in specs)


def _why_no_stores(config: Config, transfer: Any, ranks: int) -> str:
    """Return why an engine stores nothing; empty if it stores.

    Where `ranks` share the tokens of a block, no rank holds all tokens of its heads.
    """
    if not transfer.is_kv_producer:
        return "kv_role is kv_consumer"
    if ranks > 1:
        return (
            f"decode_context_parallel_size spreads the tokens of each block over {ranks} ranks, so"
            " other engines must store it"
        )
    return "read_only is true" if config.read_only else ""


def _recompute_failed_loads(transfer: Any) -> None:
    """Let vLLM recompute tokens whose load fails.

    Raises
    ------
    ConfigError
        Inside a MultiConnector whose own policy is another one.
    """
    parent = _enclosing_multi_connector()
    decides = transfer if parent is None else parent._kv_transfer_config
    if decides.kv_load_failure_policy == "recompute":
        return
    if parent is not None:
        raise ConfigError(
            "inside MultiConnector kvshelf cannot choose what happens when a load fails: add"
            ' "kv_load_failure_policy": "recompute" to --kv-transfer-config, beside'
            ' "kv_connector": "MultiConnector"'
        )
    transfer.kv_load_failure_policy = "recompute"
    logger.debug("kv_load_failure_policy is set to recompute: vLLM computes what cannot be loaded")


#: Connectors that fetch the KV of a whole prompt from the engine that ``kv_transfer_params`` name.
_TRANSFERRING = (
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "MooncakeConnector",
    "MoRIIOConnector",
)


def _names_that_load() -> list[str]:
    """Return the names of the connectors inside the MultiConnector that load, this one's too."""
    transfer = getattr(_enclosing_multi_connector(), "_kv_transfer_config", None)
    children = getattr(transfer, "kv_connector_extra_config", {}).get("connectors", [])
    return [child["kv_connector"] for child in children if child.get("kv_role") != "kv_producer"]


def _others_transfer() -> bool:
    """Whether a connector beside this one transfers prompts between engines."""
    return any(name in _TRANSFERRING for name in _names_that_load())


def _others_that_fill(vllm_config: Any) -> list[str]:
    """Return the connectors beside this one that may fill blocks past the engine's stream.

    Those that load by RDMA do. OffloadingConnector waits for the stream
    (vllm/v1/kv_offload/cpu/gpu_worker.py), as kvshelf does.
    """
    device = getattr(vllm_config, "device_config", None)
    if device is not None and device.device_type == "cpu":
        return []
    connector_name = getattr(vllm_config.kv_transfer_config, "kv_connector", None)
    waiting = (connector_name, CONNECTOR_NAME, EARLIER_NAME, "OffloadingConnector")
    return [name for name in _names_that_load() if name not in waiting]


def _check_other_loads(vllm_config: Any, others: list[str]) -> None:
    """Refuse a MultiConnector in which `others` may fill blocks that are still read.

    With several batches in flight, the blocks of a request may be freed before its last step has
    run on the GPU. vLLM keeps them until then (Scheduler.defer_block_free in
    vllm/v1/core/sched/scheduler.py), but only where its own `kv_role` is that of a consumer. A
    connector that fills blocks past the GPU's streams (RDMA) would overwrite KV that is about to
    be stored, and the object would be wrong although its hash is right.

    Raises
    ------
    ConfigError
    """
    if not others:
        return
    role = getattr(_enclosing_multi_connector()._kv_transfer_config, "kv_role", None)
    if role == "kv_producer" and getattr(vllm_config, "max_concurrent_batches", 1) > 1:
        raise ConfigError(
            f"with kv_role kv_producer, vLLM frees blocks that a step in flight still reads, and"
            f" {', '.join(others)} may fill them before kvshelf has copied them: set"
            ' "kv_role": "kv_both" in --kv-transfer-config, beside "kv_connector":'
            ' "MultiConnector", or "kv_role": "kv_producer" for each connector that loads nothing'
        )


def _is_first_in_multi_connector() -> bool:
    """Whether no connector before this one in a MultiConnector is one of kvshelf as well.

    Only one of them hands over: vLLM ends the engine when two answer a request with the same
    fields.
    """
    earlier_connectors = getattr(_enclosing_multi_connector(), "_connectors", ())
    return not any(isinstance(connector, KVShelfConnector) for connector in earlier_connectors)


def _enclosing_multi_connector() -> Any:
    """Return the MultiConnector whose constructor is running; None without one.

    A child gets a copy of the configuration without its parent's policy, so the policy can only
    be read from the parent that is being constructed.
    """
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        maker = frame.f_locals.get("self")
        if type(maker).__name__ == "MultiConnector" and frame.f_code.co_name == "__init__":
            return maker
    return None
