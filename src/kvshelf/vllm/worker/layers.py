"""The layers whose KV one namespace holds: those of a worker's model, or of its drafter.

Owns the described caches, this worker's report to the scheduler, the thread that fingerprints the
weights, the namespace, and whether KV of the layers is given up. What moves the KV is in
:mod:`kvshelf.vllm.worker.registration`.

A drafter keeps the KV of its layers in the blocks of the model's KV. If a load filled the model's
layers only, the drafter would read what earlier owners of the blocks left there, and few of its
drafts would be accepted. So its KV is stored in a namespace of its own.

States
------
========== =============================================== ===================================
state      means                                           next
========== =============================================== ===================================
unknown    no caches are registered                        ``describe`` → reporting
reporting  each step's metadata carries the report; rank   serving, once the scheduler has sent
           0 adds the weights fingerprint when it is known  a namespace
serving    the namespace is known, KV moves                the next namespace, when the weights
                                                           have another one
disabled   nothing is loaded or stored any more; a fact    none: the engine must be restarted
           tells the scheduler why
========== =============================================== ===================================

Contracts
---------
* All methods run on the worker's step thread, except :meth:`StoredLayers.disable`, which any
  thread may call, and ``_weights_known``, which runs on the fingerprinting thread. `_lock` guards
  the reason why the layers are disabled.
* A configuration that does not fit the engine is refused in :meth:`StoredLayers.describe`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvshelf.config import Config
from kvshelf.errors import ConfigError, size_text
from kvshelf.format.kinds import Kind
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.caches import KVCache
from kvshelf.kv.topology import ShardPlan, shard_plans
from kvshelf.vllm.metadata import WorkerReport
from kvshelf.vllm.namespace import (
    WeightsIdentity,
    build_namespace,
    config_overrides,
    context_ranks,
    make_topologies,
    stage_ranks,
    topologies_of,
)
from kvshelf.vllm.published import Published
from kvshelf.vllm.speculation import (
    WITHOUT_DRAFTS,
    draft_config,
    draft_engine,
    draft_layers,
    drafter_has_kv,
)
from kvshelf.vllm.worker.registered_caches import RegisteredCaches, describe_caches
from kvshelf.vllm.worker.slots import GroupSlots

logger = logging.getLogger(__name__)

# Takes the place of the fingerprint while it is not known: sizes do not depend on it.
_ANY_WEIGHTS = "sha256:" + "0" * 64


@dataclass(frozen=True, slots=True)
class KindCache:
    """The caches of one kind, whatever the weights.

    Attributes
    ----------
    fmt : ObjectFormat
        Of the first namespace; objects of later ones have the same sizes.
    cache : KVCache
    plan : ShardPlan
        The shards whose heads this worker holds.
    slots : tuple of GroupSlots
        How chunks lie in the blocks of the cache groups.
    """

    fmt: ObjectFormat
    cache: KVCache
    plan: ShardPlan
    slots: tuple[GroupSlots, ...]

    def fits(self, fmt: ObjectFormat) -> bool:
        """Whether objects of another namespace have the same tensors."""
        return fmt.shards == self.fmt.shards and all(
            fmt.tensors(shard) == self.fmt.tensors(shard)
            and fmt.object_size(shard) == self.fmt.object_size(shard)
            for shard in self.plan.shards
        )


@dataclass(eq=False)
class StoredLayers:
    """The layers of a model or of its drafter, and their way to a namespace.

    Parameters
    ----------
    vllm_config : VllmConfig
        Of a drafter what :func:`kvshelf.vllm.speculation.draft_engine` returns.
    config : Config
    kv_cache_config : KVCacheConfig or None
        The cache groups; layer names come from the registered caches without it.
    rank : int
        Of a drafter that in its pipeline stage.
    of_drafter : bool

    Attributes
    ----------
    caches : RegisteredCaches or None
    kinds : dict of Kind to KindCache
        Empty while sizes are not known; a drafter has kind DRAFT.
    namespace : Namespace or None
        The one whose KV moves.
    disabled_reason : str
        Empty unless disabled.
    """

    vllm_config: Any
    config: Config
    kv_cache_config: Any = None
    rank: int = 0
    of_drafter: bool = False
    caches: RegisteredCaches | None = field(default=None, init=False)
    kinds: dict[Kind, KindCache] = field(default_factory=dict, init=False)
    namespace: Namespace | None = field(default=None, init=False)
    disabled_reason: str = field(default="", init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    #: The reason, until a fact for the scheduler has it, and whether it is logged already.
    _untold: list[tuple[str, bool]] = field(default_factory=list, init=False)
    _report: WorkerReport | None = field(default=None, init=False)
    _identity: WeightsIdentity | None = field(default=None, init=False)

    @property
    def serves(self) -> bool:
        """Whether KV moves: the state is serving, see the module."""
        return self.namespace is not None and not self.disabled_reason

    # ------------------------------------------------------------- caches and weights

    def describe(
        self, kv_caches: Mapping[str, torch.Tensor], modules: Sequence[torch.nn.Module] = ()
    ) -> ObjectFormat | None:
        """Describe the engine's caches; refuse a configuration that does not fit.

        Returns
        -------
        ObjectFormat or None
            That of any weights. None where other pipeline stages have layers.

        Raises
        ------
        UnsupportedError
            If kvshelf does not support a cache of this kind.
        ConfigError
            If the configuration does not fit the caches or the engine.
        """
        vllm_config, config, groups = self.vllm_config, self.config, self.kv_cache_config
        self.caches = describe_caches(
            kv_caches, vllm_config, config, groups, modules, of_drafter=self.of_drafter
        )
        self._report = report = self.caches.report
        stages = int(vllm_config.parallel_config.pipeline_parallel_size)
        if stages > 1:
            config_overrides(vllm_config.model_config, config)
            ranks = context_ranks(vllm_config, groups)
            make_topologies(vllm_config, [report] * stages, decode_context=ranks)
            return None
        fmt = ObjectFormat(build_namespace(vllm_config, config, [report], _ANY_WEIGHTS))
        if not self.of_drafter and not self.rank:
            check_bound(fmt, vllm_config.model_config, config)
        return fmt

    def fingerprint(self, modules: Sequence[torch.nn.Module] = ()) -> None:
        """Start to fingerprint the weights, which rank 0 does for all ranks."""
        if not self.rank:
            self._identity = WeightsIdentity(
                self.vllm_config,
                self.config,
                on_known=self._weights_known,
                on_problem=self.disable,
                modules=modules,
            )
            self._identity.start()

    def cancel_weights(self) -> None:
        """Stop fingerprinting; a running thread reports nothing any more."""
        if self._identity is not None:
            self._identity.cancel()

    def _weights_known(self, weights: str, published: Published) -> None:
        """Complete the report."""
        assert self._report is not None
        self._report = replace(
            self._report, weights=weights, config=published.config, code=published.code
        )

    def plans(self, fmt: ObjectFormat) -> dict[Kind, ShardPlan]:
        """Return the shards of each kind that this worker holds."""
        record: Mapping[str, Any] = fmt.namespace.record
        ranks = context_ranks(self.vllm_config, self.kv_cache_config)
        topologies = topologies_of(self.vllm_config, record, decode_context=ranks)
        return shard_plans(record, topologies, self.rank)

    # ------------------------------------------------------------- scheduler

    def report(self) -> WorkerReport | None:
        """Return the report, which each step sends until the layers serve or are disabled."""
        return None if self.namespace is not None or self.disabled_reason else self._report

    def disable(self, reason: str, *, already_logged: bool = False) -> None:
        """Load and store nothing any more. Any thread; the first reason counts."""
        with self._lock:
            if not self.disabled_reason:
                self.disabled_reason = reason
                self._untold.append((reason, already_logged))

    def take_disabled(self) -> list[tuple[str, bool]]:
        """Return what :attr:`WorkerFacts.disabled` tells the scheduler; then it is empty."""
        for kind in self.kinds.values():
            if kind.cache.problem:
                # The device's own code has logged its failure.
                self.disable(kind.cache.problem, already_logged=True)
        with self._lock:
            untold, self._untold = self._untold, []
        return untold

    # ------------------------------------------------------------- sleep

    def resume(self) -> None:
        """Use the caches again after the engine slept. Idempotent.

        Nothing is written to them: only shapes, strides, dtypes and devices of the caches that
        the layers are bound to are compared with those that were learned.
        """
        layers = self.vllm_config.compilation_config.static_forward_context
        if self.caches is not None and not self.caches.rebind(layers):
            self.disable(
                "the engine's KV caches came back from sleep in another layout; nothing is stored"
                " or loaded until the engine is restarted"
            )
        if not self.disabled_reason:
            for kind in self.kinds.values():
                kind.cache.resume()


def drafter_of(
    vllm_config: Any, config: Config, kv_cache_config: Any = None, rank: int = 0
) -> StoredLayers | None:
    """Return the drafter's layers of a worker; None where it has none or they are left out.

    The arguments are those of the worker's model, see :class:`StoredLayers`.
    """
    if not drafter_has_kv(vllm_config):
        return None
    stage, rank = divmod(rank, stage_ranks(vllm_config))
    if stage < int(vllm_config.parallel_config.pipeline_parallel_size) - 1:
        return None
    drafts = draft_engine(vllm_config)
    if drafts is None:
        if rank == 0:
            logger.warning(
                WITHOUT_DRAFTS,
                "kvshelf does so only where the drafter has the model's tensor parallel degree,"
                " without context parallelism, and with a fixed number of drafts",
            )
        return None
    config = draft_config(vllm_config, config, None)
    return StoredLayers(drafts, config, kv_cache_config, rank, of_drafter=True)


def has_own_layers(drafter: StoredLayers) -> bool:
    """Whether any layer of a drafter has KV of its own; others read the model's."""
    layers = drafter.vllm_config.compilation_config.static_forward_context
    return not all(
        getattr(layers.get(name), "kv_sharing_target_layer_name", None)
        for name in draft_layers(drafter.vllm_config)
    )


def check_bound(fmt: ObjectFormat, model_config: Any, config: Config) -> None:
    """Refuse a bound of the shelf that two chunks exceed; warn of one that a prompt exceeds."""
    bound = config.capacity.max_bytes
    if bound is None or config.read_only:
        return
    formats = [fmt.of(kind) for kind in fmt.kinds]
    chunk = sum(part.object_size(shard) for part in formats for shard in range(part.shards))
    if bound < 2 * chunk:
        raise ConfigError(
            f"capacity.max_bytes is {size_text(bound)}, and a chunk of this model has"
            f" {size_text(chunk)}: expected at least {size_text(2 * chunk)}, for two chunks"
        )
    tokens = int(model_config.max_model_len)
    if bound < (needed := tokens // fmt.chunk_size * chunk):
        logger.warning(
            "capacity.max_bytes is %s, and a prompt of %d tokens (--max-model-len) needs %s:"
            " of such prompts only a part is stored. Give more, or set --max-model-len lower",
            size_text(bound),
            tokens,
            size_text(needed),
        )
