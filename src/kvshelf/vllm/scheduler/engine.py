"""The engine as the scheduler side knows it: what all its components are given.

Owns the engine's configuration and counters, the namespace and the lookup service that serves it,
the facts of the current step, the requests, and the orders for the workers.

Contracts
---------
* Until the namespace is known there are no hits and no stores.
* While the weights are compared (:mod:`kvshelf.vllm.handshake`) there are neither.
* An engine whose ranks hold only parts of shards stores nothing.
* If no thread can be started, the namespace is not in use, and the next report tries again.
* A step may wait where it probably computes nothing and no other rank or pipeline stage waits for
  it: not with several stages, nor with data parallelism over the experts of one model, whose ranks
  step together.
* Runs on the engine's step thread.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvshelf.capacity.uses import Uses
from kvshelf.config import Config
from kvshelf.format.kinds import FULL, Kind
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import LookupService
from kvshelf.shelf.view import ShelfView
from kvshelf.tiers.tiered import AnyShelf
from kvshelf.urls import cache_dir
from kvshelf.vllm.adapters import AdapterDigests, adapter_settings
from kvshelf.vllm.affinity import widen_cpu_affinity
from kvshelf.vllm.groups import CacheGroups
from kvshelf.vllm.handshake import Handshake
from kvshelf.vllm.messages import Outbox
from kvshelf.vllm.metadata import Orders
from kvshelf.vllm.namespace import topologies_of
from kvshelf.vllm.scheduler.requests import Requests
from kvshelf.vllm.speculation import draft_engine, drafter_has_kv
from kvshelf.weights.fingerprints import FingerprintCache

logger = logging.getLogger(__name__)


class SchedulerEngine:
    """One engine.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    get_shelf : Callable[[], AnyShelf or None]
        Returns the shelf, None while it is not open.
    groups : CacheGroups
        The engine's KV cache groups.
    ranks : int
        Number of workers that must report before the namespace is known.
    may_store : bool
        Whether the engine's ``kv_role`` allows to store; all roles load.
    hands_over : bool
        Whether requests may hand their KV over to other engines.
    counters : Counters, optional
    uses : Uses, optional
        Records what hits use; the caller closes it. Nothing is recorded without it.
    others_transfer : bool
        Whether another connector transfers the prompts of requests with ``do_remote_prefill``.
    is_consumer : bool
        Whether other engines prefill the prompts of requests that do not say so.

    Attributes
    ----------
    drafter_config : VllmConfig or None
        The drafter's configuration, if the engine has a drafter whose KV is stored.
    failed : FailedKeys
        Kind keys of chunks that could not be loaded, of any request.
    adapters : AdapterDigests
        What LoRA adapters are called in keys, and which of them are trusted.
    requests : Requests
    orders : Outbox of Orders
        What the workers must learn; all components write to it.
    handshake : Handshake
    shelf : AnyShelf or None
        None until the namespace is known.
    lookup_service : LookupService or None
        None until the namespace is known.
    views : dict
        The objects of each kind.
    ranks_of : dict
        The number of ranks that have layers of each kind.
    may_store : bool
        Whether this engine stores.
    tails : bool
        Whether tails can be stored and loaded.
    steps : int
        Steps so far.
    steps_in_flight : int
        How many steps may be scheduled before the first of them has finished, with it.
    step_began : float
        ``time.monotonic()`` of the last step.
    step_seconds : float
        From the step before to the last one, if that step computed anything; otherwise 0. A pause
        of the engine between the two counts.
    unanswered_in_step : int
        Requests that wait for a lookup or for the load of another, of those that vLLM has asked for
        since the last step.
    lookup_wait : float
        How many seconds the engine has waited for lookups since the last step.
    idle_steps : int
        Steps since the last one that computed anything, or that is not known to compute nothing.
    """

    def __init__(
        self,
        vllm_config: Any,
        config: Config,
        get_shelf: Callable[[], AnyShelf | None],
        groups: CacheGroups,
        *,
        ranks: int = 1,
        may_store: bool = True,
        hands_over: bool = True,
        counters: Counters | None = None,
        uses: Uses | None = None,
        others_transfer: bool = False,
        is_consumer: bool = False,
    ) -> None:
        self.vllm_config, self.config, self.groups = vllm_config, config, groups
        self.get_shelf, self.uses = get_shelf, uses
        self.ranks, self.hands_over, self.is_consumer = ranks, hands_over, is_consumer
        self.counters = counters = Counters() if counters is None else counters
        self.drafter_config: Any = draft_engine(vllm_config)
        self.failed = FailedKeys()
        self.adapters = AdapterDigests(
            FingerprintCache(cache_dir() / "fingerprints.json"),
            settings=adapter_settings(vllm_config),
            prefix_caching=bool(getattr(vllm_config.cache_config, "enable_prefix_caching", True)),
        )
        self.requests = Requests(vllm_config, config, counters, others_transfer=others_transfer)
        self.orders = Outbox(Orders)
        self.handshake = Handshake(vllm_config, config, ranks)
        self.shelf: AnyShelf | None = None
        self.lookup_service: LookupService | None = None
        self.views: dict[Kind, ShelfView] = {}
        self.ranks_of: dict[Kind, int] = {}
        self.may_store = may_store and not config.read_only
        self.tails = False
        # With asynchronous scheduling or pipeline stages, later steps are scheduled before earlier
        # ones finish.
        scheduling = getattr(vllm_config, "scheduler_config", None)
        stages = int(vllm_config.parallel_config.pipeline_parallel_size)
        self.steps_in_flight = stages + bool(getattr(scheduling, "async_scheduling", False))
        # vLLM sets data_parallel_size to 1 where the ranks do not depend on each other. It divides
        # batches into micro-batches only where it is more.
        ranks_step_together = int(vllm_config.parallel_config.data_parallel_size) > 1
        self._holds_up_others = stages > 1 or ranks_step_together
        self.steps = 0
        self.step_began = self.step_seconds = 0.0
        self.unanswered_in_step, self.lookup_wait = 0, 0.0
        self.idle_steps = self.steps_in_flight
        #: The requests of the last step that computed anything; None while they are not known.
        self._computed: Iterable[str] | None = ()

    # ------------------------------------------------------------- namespace

    @property
    def serves(self) -> bool:
        """Whether KV may be loaded and stored."""
        handshake = self.handshake
        return handshake.namespace is not None and not handshake.disabled and not handshake.checking

    @property
    def usable_lookup_service(self) -> LookupService | None:
        """None while the namespace is not known or the weights are compared."""
        return None if self.handshake.checking else self.lookup_service

    def unite(self) -> ObjectFormat | None:
        """Return the format of the namespace that the reports make; None when there is no new one.

        At the end of a comparison it may be that of before.
        """
        fmt = self.handshake.unite()
        if fmt is None:
            return None
        self._check_whole_shards(fmt)
        if drafter_has_kv(self.vllm_config):
            record: Mapping[str, Any] = fmt.namespace.record
            self.groups.narrow(record["layer_names"])
        return fmt

    def open(self, shelf: AnyShelf, fmt: ObjectFormat) -> None:
        """Look up in a namespace from now on, in place of the one of before.

        Raises
        ------
        RuntimeError
            If no thread can be started.
        """
        views: dict[Kind, ShelfView] = {kind: shelf.view(fmt.of(kind)) for kind in fmt.kinds}
        lookup_service = LookupService(
            *views.values(),
            rule=self.groups.hit_rule(self.config.chunk_size),
            counts_tier=self.config.disk_tier is not None and self.config.admission == "auto",
            failed=self.failed,
            counters=self.counters,
            on_thread_start=widen_cpu_affinity,
        )
        self.close_lookups()
        self.shelf, self.views, self.lookup_service = shelf, views, lookup_service
        self.ranks_of = ranks_with(fmt, self.ranks)
        self.tails = fmt.tails and not self.groups.hybrid and self.drafter_config is None
        logger.info("shelf %s, namespace %s", shelf.backend.url, fmt.namespace.folder)

    def _check_whole_shards(self, fmt: ObjectFormat) -> None:
        """Store nothing where no rank holds all heads of a shard."""
        topologies = topologies_of(self.vllm_config, fmt.namespace.record)
        topology = next((candidate for candidate in topologies.values() if candidate.divided), None)
        if not self.may_store or topology is None:
            return
        self.may_store = False
        logger.warning(
            "tensor_parallel_size=%d is more than the %d KV heads that all layers of this model"
            " have in common, so each rank holds only a part of a shard: this engine loads KV"
            " from the shelf and stores none. Other engines must store it, with"
            " tensor_parallel_size of at most %d",
            topology.tensor_parallel,
            topology.kv_heads,
            topology.kv_heads,
        )

    def prefix_cache_chunks(self) -> int | None:
        """Return how many chunks vLLM's prefix cache can hold; None if that is not known."""
        cache = self.vllm_config.cache_config
        if not getattr(cache, "enable_prefix_caching", True):
            return 0
        blocks = int(getattr(cache, "num_gpu_blocks", None) or 0)
        # The groups share the blocks. Windows and states need few of them.
        sizes = [group.block_size for group in self.groups.of(FULL) or tuple(self.groups)]
        tokens = int(blocks / sum(1 / size for size in sizes))
        return tokens // self.config.chunk_size if blocks else None

    def close_lookups(self) -> None:
        """Stop the lookups' threads."""
        if self.lookup_service is not None:
            self.lookup_service.close()

    # ------------------------------------------------------------- steps

    def begin_step(self, output: Any) -> None:
        """Begin a step with vLLM's ``SchedulerOutput``."""
        now = time.monotonic()
        self.step_seconds = 0.0 if self.idle_steps else now - self.step_began
        if output.total_num_scheduled_tokens == 0:
            self.idle_steps += 1
        else:
            self.idle_steps, self._computed = 0, output.num_scheduled_tokens
        self.steps += 1
        self.step_began = now
        self.unanswered_in_step, self.lookup_wait = 0, 0.0

    def lose_step(self) -> None:
        """Note that it is unknown what a step computes."""
        self.idle_steps, self._computed = 0, None

    @property
    def rests(self) -> bool:
        """Whether no step in flight computes anything."""
        return self.idle_steps >= self.steps_in_flight

    @property
    def may_wait(self) -> bool:
        """Whether nothing is computed, and no other rank depends on this engine's steps.

        Before a step is planned, as when vLLM asks for a request: what that step computes beside
        the request is not known.
        """
        if self._holds_up_others:
            return False
        if self.idle_steps >= self.steps_in_flight:
            return True
        # A step that computes may still be in flight, and the next one go on with its requests,
        # unless they have ended.
        return self._computed is not None and self.requests.keys().isdisjoint(self._computed)


def ranks_with(fmt: ObjectFormat, ranks: int) -> dict[Kind, int]:
    """Return how many of an engine's ranks have layers of each kind."""
    record: Mapping[str, Any] = fmt.namespace.record
    stages = record["stages"]
    layer_kinds = record.get("kinds") or [fmt.kind] * sum(stages)
    ends = list(itertools.accumulate(stages))
    of_stages = [
        set(layer_kinds[end - count : end]) for end, count in zip(ends, stages, strict=True)
    ]
    of_stage = ranks // len(stages)
    return {kind: of_stage * sum(kind in kinds for kinds in of_stages) for kind in fmt.kinds}
