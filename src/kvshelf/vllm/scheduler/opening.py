"""The engine's namespace, and what is open once it is known.

Owns the way from the workers' reports (:mod:`kvshelf.vllm.handshake`) to a service that looks up.

Contracts
---------
* Until the namespace is known there are no hits and no stores.
* While the weights are compared there are neither.
* An engine whose ranks hold only parts of shards stores nothing.
* If no thread can be started, the namespace is not in use, and the next report tries again.
* Runs on the engine's step thread.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Any

from kvshelf.format.kinds import FULL, Kind
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.lookup import LookupService
from kvshelf.shelf.view import ShelfView
from kvshelf.tiers.tiered import AnyShelf
from kvshelf.vllm.affinity import widen_cpu_affinity
from kvshelf.vllm.handshake import Handshake
from kvshelf.vllm.namespace import topologies_of
from kvshelf.vllm.scheduler.engine import Engine
from kvshelf.vllm.speculation import drafter_has_kv

logger = logging.getLogger(__name__)


class Opening:
    """What is open of one engine.

    Parameters
    ----------
    engine : Engine

    Attributes
    ----------
    handshake : Handshake
    shelf : AnyShelf or None
    lookups : LookupService or None
        None until the namespace is known.
    views : dict
        The objects of each kind.
    ranks_of : dict
        The number of ranks that have layers of each kind.
    may_store : bool
        Whether this engine stores.
    tails : bool
        Whether tails can be stored and loaded.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._vllm_config, self._config = engine.vllm_config, engine.config
        self._groups = engine.groups
        self.handshake = Handshake(engine.vllm_config, engine.config, engine.ranks)
        self.shelf: AnyShelf | None = None
        self.lookups: LookupService | None = None
        self.views: dict[Kind, ShelfView] = {}
        self.ranks_of: dict[Kind, int] = {}
        self.may_store = engine.may_store and not engine.config.read_only
        self.tails = False

    @property
    def namespace(self) -> Namespace | None:
        """The engine's namespace; None while it is not known."""
        return self.handshake.namespace

    @property
    def serves(self) -> bool:
        """Whether KV may be loaded and stored."""
        handshake = self.handshake
        return handshake.namespace is not None and not handshake.disabled and not handshake.checking

    @property
    def looks_up(self) -> LookupService | None:
        """What looks up now; None while the namespace is not known or the weights are compared."""
        return None if self.handshake.checking else self.lookups

    def unite(self) -> ObjectFormat | None:
        """Return the format of the namespace that the reports make; None when there is no new one.

        At the end of a comparison it may be that of before.
        """
        fmt = self.handshake.unite()
        if fmt is None:
            return None
        self._check_whole_shards(fmt)
        if drafter_has_kv(self._vllm_config):
            record: Mapping[str, Any] = fmt.namespace.record
            self._groups.narrow(record["layer_names"])
        return fmt

    def open(self, shelf: AnyShelf, fmt: ObjectFormat) -> None:
        """Look up in a namespace from now on, in place of the one of before.

        Raises
        ------
        RuntimeError
            If no thread can be started.
        """
        views: dict[Kind, ShelfView] = {kind: shelf.view(fmt.of(kind)) for kind in fmt.kinds}
        lookups = LookupService(
            *views.values(),
            rule=self._groups.hit_rule(self._config.chunk_size),
            counts_tier=self._config.disk_tier is not None and self._config.admission == "auto",
            failed=self._engine.failed,
            counters=self._engine.counters,
            on_thread_start=widen_cpu_affinity,
        )
        self.close()
        self.shelf, self.views, self.lookups = shelf, views, lookups
        self.ranks_of = ranks_with(fmt, self.handshake.ranks)
        self.tails = fmt.tails and not self._groups.hybrid and self._engine.drafter is None
        logger.info("shelf %s, namespace %s", shelf.backend.url, fmt.namespace.folder)

    def _check_whole_shards(self, fmt: ObjectFormat) -> None:
        """Store nothing where no rank holds all heads of a shard."""
        topologies = topologies_of(self._vllm_config, fmt.namespace.record)
        topology = next((one for one in topologies.values() if one.divided), None)
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

    def engine_chunks(self) -> int | None:
        """Return how many chunks vLLM's prefix cache can hold; None if that is not known."""
        cache = self._vllm_config.cache_config
        if not getattr(cache, "enable_prefix_caching", True):
            return 0
        blocks = int(getattr(cache, "num_gpu_blocks", None) or 0)
        # The groups share the blocks. Windows and states need few of them.
        sizes = [group.block_size for group in self._groups.of(FULL) or tuple(self._groups)]
        tokens = int(blocks / sum(1 / size for size in sizes))
        return tokens // self._config.chunk_size if blocks else None

    def close(self) -> None:
        """Stop the lookups' threads."""
        if self.lookups is not None:
            self.lookups.close()


def ranks_with(fmt: ObjectFormat, ranks: int) -> dict[Kind, int]:
    """Return how many of an engine's ranks have layers of each kind."""
    record: Mapping[str, Any] = fmt.namespace.record
    stages = record["stages"]
    kinds = record.get("kinds") or [fmt.kind] * sum(stages)
    ends = list(itertools.accumulate(stages))
    of_stages = [set(kinds[end - count : end]) for end, count in zip(ends, stages, strict=True)]
    of_stage = ranks // len(stages)
    return {kind: of_stage * sum(kind in found for found in of_stages) for kind in fmt.kinds}
