"""Unites the workers' reports into the engine's namespace, on the scheduler's side.

Owns the reports (:class:`~kvshelf.vllm.metadata.WorkerReport`), the check that the ranks of a
pipeline stage agree, the namespace that follows from them, and whether the engine is disabled.

The hand-shake
--------------
1. Each worker sends its report in every step, rank 0 with the weights fingerprint once it is
   known.
2. When all ranks have reported and agree, :meth:`Handshake.unite` returns the namespace, and
   the scheduler side opens its lookups in it.
3. From :meth:`Handshake.settle` on, steps announce the namespace to the workers, until a step
   brings no report: then all workers have it.
4. A worker whose caches are registered again reports again, and has to report the same.

Contracts
---------
* Requests wait for the namespace until one deadline at most, which the first of them sets.
* An engine that is disabled stays so until it is restarted; the reason is logged once.
* Runs on the engine's step thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvshelf.config import Config
from kvshelf.errors import KVShelfError
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.vllm.metadata import WorkerReport
from kvshelf.vllm.namespace import build_namespace, stage_ranks

logger = logging.getLogger(__name__)


class Handshake:
    """What the workers have reported, and the namespace once it is known.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    ranks : int
        Number of workers that must report before the namespace is known.

    Attributes
    ----------
    ranks : int
    namespace : Namespace or None
        None until :meth:`settle`.
    disabled : bool
        Nothing is ever loaded or stored; the log says why.
    """

    def __init__(self, vllm_config: Any, config: Config, ranks: int) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self.ranks = ranks
        self.namespace: Namespace | None = None
        self.disabled = False
        self._reports: dict[int, WorkerReport] = {}
        #: One report of each pipeline stage, as the namespace was built from them.
        self._stages: list[WorkerReport] = []
        self._announcing = False
        self._deadline: float | None = None

    def may_wait(self) -> bool:
        """Whether a request may still wait for the namespace."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._config.identity_wait_s
        return now < self._deadline

    def receive(self, reports: Mapping[int, WorkerReport]) -> None:
        """Take the reports of some ranks; no reports acknowledge the namespace."""
        if not reports:
            self._announcing = False
        self._reports.update(reports)
        for report in reports.values():
            if report.disabled_reason:
                self._disable(report.disabled_reason, already_logged=report.already_logged)

    def unite(self) -> ObjectFormat | None:
        """Return the format of a namespace that became known; None when there is no new one."""
        if self.disabled or len(self._reports) < self.ranks:
            return None
        reports = [self._reports[rank] for rank in sorted(self._reports)]
        weights = reports[0].weights
        if weights is None:
            return None
        # Ranks are numbered stage by stage.
        degree = stage_ranks(self._vllm_config)
        reports = [replace(report, weights=None) for report in reports]
        for rank, report in enumerate(reports):
            first = rank // degree * degree
            if report != reports[first]:
                self._disable(
                    f"the KV caches of rank {rank} differ from those of rank {first} of the same"
                    " stage in layers, shapes, layout or scales: run all ranks on machines of one"
                    " kind, with one version of vLLM"
                )
                return None
        stages = reports[::degree]
        if self.namespace is not None:
            self._announcing = True
            if stages != self._stages:
                self._disable(
                    "the KV caches were registered again with other layers, shapes, layout or"
                    " scales: restart the engine"
                )
            return None
        try:
            fmt = ObjectFormat(build_namespace(self._vllm_config, self._config, stages, weights))
        except KVShelfError as error:
            self._disable(str(error))
            return None
        self._stages = stages
        return fmt

    def settle(self, namespace: Namespace) -> None:
        """Announce the namespace to the workers from now on."""
        self.namespace = namespace
        self._announcing = True

    @property
    def announcement(self) -> tuple[bytes, str] | None:
        """Record and slug of the namespace, while workers may not have it."""
        if self.namespace is None or not self._announcing:
            return None
        return self.namespace.encoded, self.namespace.slug

    def _disable(self, reason: str, *, already_logged: bool = False) -> None:
        if not self.disabled and not already_logged:
            logger.error("nothing is loaded from or stored on the shelf: %s", reason)
        self.disabled = True
