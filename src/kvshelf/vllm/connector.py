"""``SharedStorageConnector``: vLLM's KV connector interface on top of a shelf.

Owns the checks made when an engine starts and the translation of vLLM's calls; the work
is done by :mod:`kvshelf.vllm.scheduler` and :mod:`kvshelf.vllm.worker`. vLLM makes one
instance for each role; all calls come on the engine's step thread.

The interface is ``vllm/distributed/kv_transfer/kv_connector/v1/base.py`` of vLLM 0.32;
0.33 adds the sleep hooks.

An exception in a method that vLLM calls in a step would end the engine. So each of these
methods is contained: what goes wrong is logged, and vLLM gets the answer of a connector
that has nothing. The constructor and ``register_kv_caches`` do raise: what is wrong with
the configuration stops the start.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import vllm

from kvshelf.vllm import check_vllm_version, register

# Before anything that other versions do not have, so that they get a message to act on.
check_vllm_version(vllm.__version__)

# ruff: noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvshelf.config import Config, DiskTierConfig, default_shelf_path
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.identity import Namespace
from kvshelf.metrics import Counters
from kvshelf.shelf import Shelf, open_shelf
from kvshelf.vllm.metadata import StepMetadata, WorkerMetadata
from kvshelf.vllm.namespace import manager_block_size
from kvshelf.vllm.opening import OpeningShelf
from kvshelf.vllm.processors import spread_out
from kvshelf.vllm.scheduler import SchedulerSide
from kvshelf.vllm.stats import ShelfPromMetrics, ShelfStats, stats_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvshelf.device import Streams
    from kvshelf.vllm.worker import WorkerSide

logger = logging.getLogger(__name__)

# Draft methods without KV of their own.
_DRAFTS_WITHOUT_KV = {"ngram", "ngram_gpu", "suffix"}
_LOG_SECONDS = 60.0

_P = ParamSpec("_P")
_R = TypeVar("_R")
_next_logs: dict[str, float] = {}


def _contained(
    fallback: Callable[..., Any],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Answer with `fallback`, called with the same arguments, where a method raises."""

    def contain(method: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(method)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                now = time.monotonic()
                if now >= _next_logs.get(method.__name__, 0.0):
                    _next_logs[method.__name__] = now + _LOG_SECONDS
                    logger.error("%s failed; the engine goes on", method.__name__, exc_info=error)
                answer: _R = fallback(*args, **kwargs)
                return answer

        return call

    return contain


def _nothing(*_: object, **__: object) -> None:
    """Answer of a method from which nothing is expected."""


class SharedStorageConnector(KVConnectorBase_V1):
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
        For engines that this version does not serve.
    """

    _cache_hit_source = CacheHitSource.DISK

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
        _check_engine(vllm_config, kv_cache_config)
        _recompute_failed_loads(transfer)
        self._counters = Counters()
        scheduling = role is KVConnectorRole.SCHEDULER
        self._shelf = _open(self._config, self._counters, scheduling=scheduling)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if scheduling:
            self._scheduler = SchedulerSide(
                vllm_config,
                self._config,
                self._shelf.get,
                block_size=manager_block_size(vllm_config, kv_cache_config),
                ranks=int(vllm_config.parallel_config.world_size),
                may_store=transfer.is_kv_producer,
                may_load=True,
                on_thread_start=spread_out,
                counters=self._counters,
            )
        else:
            # What moves KV takes a tenth of a second to import, and the scheduler does not need it.
            from kvshelf.vllm.worker import WorkerSide

            self._worker = WorkerSide(
                vllm_config,
                self._config,
                self._shelf.get,
                kv_cache_config=kv_cache_config,
                rank=int(vllm_config.parallel_config.rank),
                counters=self._counters,
                streams=self._streams_of,
            )

    def _streams_of(self, device: torch.device) -> Streams | None:
        """Return streams to use in place of a device's own: tests have devices of their own."""
        return None

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is only a later miss."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Say that an engine may sleep: nothing touches the caches meanwhile."""
        return True

    @property
    def config(self) -> Config:
        """The configuration."""
        return self._config

    # ------------------------------------------------------------- worker

    def drain(self, seconds: float) -> int:
        """Wait until the stores of this worker are over; return how many chunks are not."""
        return self._as_worker().drain(seconds)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's caches."""
        self._as_worker().register(kv_caches)

    @_contained(_nothing)
    def unregister_kv_caches(self) -> None:
        """Before sleep (vLLM 0.33): publish what is staged; caches are not touched from then on."""
        self._as_worker().fall_asleep()

    @_contained(_nothing)
    def restore_kv_caches(self, kv_caches: dict[str, torch.Tensor] | None = None) -> None:
        """After sleep (vLLM 0.33): compare layouts; pointers are read at each call."""
        self._as_worker().wake_up(kv_caches)

    def weights_changed(self) -> None:
        """Take note that this worker's weights are changed in place: nothing is loaded or stored.

        kvshelf notices vLLM's own ways to do that. For code that has another way, such as a
        worker extension, to call in every worker before it begins.
        """
        self._as_worker().weights_changed("weights_changed()")

    @_contained(_nothing)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            self._as_worker().bind(connector_metadata)

    @_contained(_nothing)
    def clear_connector_metadata(self) -> None:
        """End a step."""
        super().clear_connector_metadata()
        self._as_worker().clear()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Nothing to do: a gather comes before all that later steps enqueue for its blocks."""

    @_contained(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start loads that did not start with the step."""
        self._as_worker().start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are asynchronous, their requests not yet scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: all layers are gathered at once in :meth:`wait_for_save`."""

    @_contained(_nothing)
    def wait_for_save(self) -> None:
        """Gather what this step completed into staging."""
        self._as_worker().save()

    @_contained(lambda *_: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return (None, requests whose loads are over)."""
        return None, self._as_worker().finished_loads() or None

    @_contained(lambda *_: KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads are over; as failed those that must begin anew."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self._as_worker().take_useless_loads()
        return results

    @_contained(lambda *_: set())
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that failed loads left without KV."""
        return self._as_worker().take_bad_blocks()

    @_contained(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what the scheduler side has to know."""
        return self._as_worker().worker_metadata()

    # ------------------------------------------------------------- scheduler

    @property
    def namespace(self) -> Namespace | None:
        """The engine's namespace; None while it is not known."""
        return self._as_scheduler().namespace

    @property
    def disabled(self) -> bool:
        """Whether nothing is ever loaded or stored; the log says why."""
        return self._as_scheduler().disabled

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return the cache groups that a load fills: the only one there is."""
        return (0,)

    @_contained(_nothing)
    def on_new_request(self, request: Request) -> None:
        """Start the request's look-up."""
        self._as_scheduler().new_request(request)

    @_contained(lambda *_: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many further tokens the shelf has, None while that is not known."""
        return self._as_scheduler().matched_tokens(request, num_computed_tokens)

    @_contained(_nothing)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load of `num_external_tokens` into `blocks`."""
        if num_external_tokens:
            self._as_scheduler().allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the step's loads and stores; `scheduler_output` is only read."""
        return self._as_scheduler().step_metadata(scheduler_output)

    @_contained(_nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learn what workers report."""
        scheduler = self._as_scheduler()
        meta = connector_output.kv_connector_worker_meta
        scheduler.loads_done(connector_output.finished_recving or set())
        if isinstance(meta, WorkerMetadata):
            scheduler.worker_output(meta)

    @_contained(lambda *_: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. Its blocks are free: what is stored is copied before they change."""
        self._as_scheduler().finished(request.request_id)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return nothing: vLLM's events name its own block hashes, which chunks have none of."""
        return ()

    def get_finished_count(self) -> int | None:
        """Every worker reports every load."""
        return None

    @_contained(lambda *_: False)
    def reset_cache(self) -> bool | None:
        """Drop memos and have the weight files checked; objects on the shelf stay."""
        return self._as_scheduler().reset()

    # ------------------------------------------------------------- both

    @_contained(_nothing)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what was counted since the last call."""
        source = "scheduler"
        if self._worker is not None:
            self._worker.set_gauges()
            source = f"rank {self._worker.rank}"
        return stats_of(self._counters.take(), source)

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
        """Return what puts the stats into Prometheus metrics."""
        return ShelfPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @_contained(_nothing)
    def shutdown(self) -> None:
        """Publish what is staged for a bounded time; say what was lost. Idempotent."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        self._shelf.close()

    def _as_worker(self) -> WorkerSide:
        assert self._worker is not None, "called on the scheduler's instance"
        return self._worker

    def _as_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "called on a worker's instance"
        return self._scheduler


# MultiConnector finds the classes of its children's stats by name, also where this one was
# found by kv_connector_module_path and plugins are off.
register()


def _show_log_lines() -> None:
    """Let kvshelf's log lines appear among vLLM's."""
    ours = logging.getLogger("kvshelf")
    if not ours.handlers and not logging.getLogger().handlers:
        theirs = logging.getLogger("vllm")
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def _open(config: Config, counters: Counters, *, scheduling: bool) -> OpeningShelf:
    url = config.shared_storage_path
    if url is None:
        url = str(default_shelf_path())
        logger.warning(
            "shared_storage_path is not set: KV is kept in %s, which only this user on this"
            " machine can read. Set it to a directory or URL that your engines share.",
            url,
        )

    options: dict[str, Any] = {
        "storage_options": config.storage_options,
        "read_only": config.read_only,
        "counters": counters,
        "deadlines": config.deadlines,
    }
    tier = config.disk_tier
    if tier is None:
        return OpeningShelf(url, functools.partial(open_shelf, url, **options))
    return OpeningShelf(
        url,
        functools.partial(_open_behind_tier, tier, url, options, counters, scheduling=scheduling),
    )


def _open_behind_tier(
    options: DiskTierConfig,
    url: str,
    shelf_options: dict[str, Any],
    counters: Counters,
    *,
    scheduling: bool,
) -> Shelf:
    # What copies objects takes a moment to import, and most engines do not need it.
    from kvshelf.tiers import DiskTier, FindsInTiers, LoadsFromTiers, open_behind

    tier = DiskTier(options.path, options.max_bytes, counters=counters, on_thread_start=spread_out)
    try:
        shelf = open_behind(tier, url, **shelf_options)
    except BaseException:
        tier.close()
        raise
    return FindsInTiers(shelf, [tier]) if scheduling else LoadsFromTiers(shelf, [tier])


def _check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse what this version does not serve, before anything is stored."""
    parallel = vllm_config.parallel_config
    for name, flag in (
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise UnsupportedError(
                f"{name} is {size}: context parallelism spreads the tokens of a block over"
                f" workers, which kvshelf does not serve. Start vLLM with {flag} 1; tensor and"
                " pipeline parallelism are served, and replicas share one shelf"
            )
    alone = getattr(parallel, "distributed_executor_backend", None) == "external_launcher"
    if alone and int(parallel.world_size) > 1:
        raise UnsupportedError(
            "with distributed_executor_backend external_launcher each rank schedules for itself and"
            " hears of no other, so none knows when a chunk is complete. Use mp or ray"
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
            " CPUs without AMX, it turns chunked prefill and prefix caching off, and tokens behind"
            " a loaded prefix would be computed wrongly. Remove --kv-transfer-config, or do not"
            " turn chunked prefill off"
        )
    if getattr(model, "is_diffusion", False) or not model.is_prefix_caching_supported:
        raise UnsupportedError(
            "this model cannot reuse KV of a prefix (vLLM's own prefix caching does not support"
            " it either); remove --kv-transfer-config for this model"
        )
    groups = getattr(kv_cache_config, "kv_cache_groups", None)
    if groups is not None and len(groups) != 1:
        raise UnsupportedError(
            f"the model has {len(groups)} KV cache groups; this version of kvshelf serves models"
            " with one. Start vLLM with --disable-hybrid-kv-cache-manager where the model allows"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _DRAFTS_WITHOUT_KV:
        raise UnsupportedError(
            f"speculative decoding by {speculative.method!r} keeps KV of its own, which this"
            f" version of kvshelf does not store; use one of {sorted(_DRAFTS_WITHOUT_KV)}"
        )
    if speculative is not None and int(parallel.pipeline_parallel_size) > 1:
        raise UnsupportedError(
            "with speculative decoding vLLM ends a step of a connector on the last pipeline stage"
            " only, so no chunk would ever be stored whole. Use tensor parallelism, or no drafts"
        )


def _recompute_failed_loads(transfer: Any) -> None:
    """Have tokens recomputed whose load failed; vLLM's default fails the request."""
    parent = _enclosing_multi_connector()
    if parent is not None:
        if parent._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ConfigError(
                "inside MultiConnector kvshelf cannot choose what happens when a load fails:"
                ' add "kv_load_failure_policy": "recompute" to --kv-transfer-config, beside'
                ' "kv_connector": "MultiConnector"'
            )
    elif transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        logger.info(
            "kv_load_failure_policy is set to recompute: tokens whose load fails are computed"
        )


def _enclosing_multi_connector() -> Any:
    """Return the MultiConnector that is making us, None when the engine does.

    A child is given a copy of the configuration without its parent's policy, so the
    only place to learn it is the constructor that is running.
    """
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        maker = frame.f_locals.get("self")
        if type(maker).__name__ == "MultiConnector" and frame.f_code.co_name == "__init__":
            return maker
    return None
