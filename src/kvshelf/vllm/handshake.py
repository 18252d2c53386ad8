"""Unites the workers' reports into the engine's namespace, on the scheduler's side.

Owns the reports (:class:`~kvshelf.vllm.metadata.WorkerReport` and
:class:`~kvshelf.vllm.metadata.WeightsReport`), the check that the ranks of a pipeline stage agree,
the names of weights, the namespace that follows from all this, and whether the engine is disabled.

The hand-shake
--------------
1. Each worker sends its report in every step, rank 0 with the weights fingerprint once it is
   known.
2. When all ranks have reported and agree, :meth:`Handshake.unite` returns the namespace, and
   the scheduler side opens its lookups in it. Scales of single heads are those of the rank's own.
3. From :meth:`Handshake.settle` on, steps announce the namespace to the workers, until all of them
   speak in a step and none reports: then all serve it, and hits are offered.

Rounds
------
When the weights may have changed, :meth:`Handshake.begin_round` has all ranks digest their weights
(:mod:`kvshelf.vllm.worker.weights`); until all have reported, :attr:`Handshake.checking` is true.
The digests of all ranks together name the weights:

* digests that have a name already: that name. Those of the start have the name that the weights had
  then, from the files that vLLM loaded, or, where these are unknown, from the digests as in the
  last case;
* a `version` that the trainer gave to all ranks: ``version:<version>``;
* other ones: ``params:<SHA-256>`` of the digests of all ranks in order, the parallelism that
  decides what a rank holds, and the quantization.

Weights that some rank cannot read, or of which other engines hold a part, have a name only by a
`version`; without one the round does not end.

Contracts
---------
* Requests wait for the first namespace until all workers serve it, or until one deadline, which the
  first of them sets.
* An engine that is disabled stays so until it is restarted; the reason is logged once.
* Runs on the engine's step thread.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvshelf.config import Config
from kvshelf.errors import KVShelfError
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.vllm.metadata import BY_PARAMETERS, WeightsReport, WorkerReport
from kvshelf.vllm.namespace import build_namespace, stage_ranks, unite_ranks

logger = logging.getLogger(__name__)

#: Seconds that the first requests of a new engine wait until its weights and layout are identified
#: and the shelf is open, counted from the first that asks: a small model is read in less, and a
#: large one is not worth the wait of a user.
IDENTITY_SECONDS: Final = 2.0

_SAY_DISABLED: Final = functools.partial(
    logger.error, "nothing is loaded from or stored on the shelf: %s"
)


class Handshake:
    """The workers' reports, and the namespace once it is known.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    ranks : int
        Number of workers that must report before the namespace is known.
    say_disabled : Callable
        Logs a reason why nothing is ever loaded or stored.

    Attributes
    ----------
    ranks : int
    round : int
        Number of the last round; 0 before the first.
    checking : bool
        A round is under way: nothing may be loaded or stored.
    computes : bool
        A step that computes something was handed out since the round began.
    announcing : bool
        Some worker may not serve the namespace yet, and would refuse a load.
    namespace : Namespace or None
        None until :meth:`settle`; the last one during a round.
    disabled : bool
        Nothing is ever loaded or stored; the log says why.
    """

    def __init__(
        self,
        vllm_config: Any,
        config: Config,
        ranks: int,
        say_disabled: Callable[[str], None] = _SAY_DISABLED,
    ) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._say_disabled = say_disabled
        self.ranks = ranks
        self.namespace: Namespace | None = None
        self.disabled = False
        self.round = 0
        self.checking = self.computes = self.announcing = False
        self._reports: dict[int, WorkerReport] = {}
        #: The last report of each rank.
        self._weights: dict[int, WeightsReport] = {}
        #: Something that changes weights was noticed since the last comparison; and so late that KV
        #: was computed meanwhile.
        self._noticed = self._noticed_late = False
        #: Digest of all ranks together, of this round and of the last one that was settled; empty
        #: where there is none.
        self._united = ""
        self._settled: str | None = None
        #: The names of weights by digest, and the digests of versions.
        self._names: dict[str, str] = {}
        self._versions: dict[str, str] = {}
        #: The last round that lacked a version.
        self._unnamed_round = 0
        self._deadline: float | None = None

    def may_wait(self) -> bool:
        """Whether a request may still wait for the namespace."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + IDENTITY_SECONDS
        return now < self._deadline

    def receive(
        self,
        reports: Mapping[int, WorkerReport],
        weights: Mapping[int, WeightsReport],
        *,
        all_spoke: bool,
    ) -> bool:
        """Take the reports of some ranks.

        Parameters
        ----------
        reports, weights : Mapping
        all_spoke : bool
            All ranks have said something in this step. Then no reports acknowledge the namespace.

        Returns
        -------
        bool
            Whether weights changed since the round began, so that there must be another.
        """
        if all_spoke and not reports and not weights:
            # After a change of weights no request waits.
            self.announcing, self._deadline = False, 0.0
        self._reports.update(reports)
        self._weights.update(weights)
        changed = [report for report in weights.values() if report.changed]
        if changed:
            self._noticed = self._noticed_late = True
        return any(report.round == self.round for report in changed)

    @property
    def weights_changed(self) -> bool:
        """Whether the weights differ from those of the round before, or did for a while."""
        return self._noticed_late or not self._united or self._united != self._settled

    @property
    def needs_version(self) -> bool:
        """Whether nothing is loaded or stored until a trainer gives the weights a version."""
        return self.checking and self._unnamed_round == self.round

    def begin_round(self, *, noticed: bool) -> None:
        """Let all ranks digest their weights.

        Parameters
        ----------
        noticed : bool
            Whether something is known that may have changed them.
        """
        self._noticed |= noticed
        # What was computed since an unfinished round began has weights without a name.
        self._noticed_late |= self.checking and self.computes
        self.round += 1
        self.checking, self.computes = True, False

    def unite(self) -> ObjectFormat | None:
        """Return the format of a namespace that became known; None when there is no new one.

        At the end of a round it may be the namespace of before.
        """
        if self.disabled or len(self._reports) < self.ranks:
            return None
        reports = [self._reports[rank] for rank in sorted(self._reports)]
        weights = self._name_of_weights()
        if weights is None:
            return None
        # Ranks are numbered stage by stage.
        degree = stage_ranks(self._vllm_config)
        try:
            stages = [
                unite_ranks(self._vllm_config, reports[first : first + degree], first)
                for first in range(0, len(reports), degree)
            ]
        except KVShelfError as error:
            self.disable(str(error))
            return None
        if self.namespace is not None:
            self.announcing = True
            if not self.checking:
                return None
        try:
            return ObjectFormat(build_namespace(self._vllm_config, self._config, stages, weights))
        except KVShelfError as error:
            self.disable(str(error))
            return None

    def _name_of_weights(self) -> str | None:
        """Return what the namespace calls the weights; None while that is not known."""
        if self._reports[0].weights is None:
            # With it rank 0 reports what else the namespace needs of the model's files.
            return None
        at_start = self._name_at_start()
        if not self.checking:
            return at_start
        reports = [report for report in self._weights.values() if report.round == self.round]
        problem = next((report.problem for report in reports if report.problem), "")
        digests = {
            rank: report.digest for rank, report in self._weights.items() if report in reports
        }
        if len(reports) < self.ranks or not (problem or all(digests.values())):
            return None
        first = self._united_first
        if self._settled is None:
            self._settled = first
        self._united = "" if problem else self._unite(digests)
        if self._holds_a_part and (self._noticed or self.weights_changed):
            problem = problem or "other engines hold a part of them (expert parallelism)"
        if not problem and (self._united in self._names or self._united == first):
            return self._names.get(self._united, at_start)
        name = self._version(reports)
        if name is None and problem:
            self._say_unnamed(problem)
        elif name is None and not any(report.packed for report in reports):
            name = f"params:{self._united}"
        elif name is None and at_start is not None:
            # The digests stand for packed weights only in this engine and its like.
            lines = f"{self._united}\n{at_start}\n"
            name = f"params:{hashlib.sha256(lines.encode()).hexdigest()}"
        if name is not None and self._united:
            self._names[self._united] = name
        return name

    def _name_at_start(self) -> str | None:
        """Return the name of the weights of the start; None while there is none."""
        name = self._reports[0].weights
        if name != BY_PARAMETERS:
            return name
        first = self._united_first
        problem = next((report.problem for report in self._weights.values() if report.problem), "")
        if any(report.packed for report in self._weights.values()):
            problem = "vLLM has packed parameters into memory that cannot be read"
        elif self._holds_a_part:
            problem = "other engines hold a part of them (expert parallelism)"
        elif first is not None:
            return f"params:{first}"
        if not problem:
            return None
        self.disable(
            "the log of rank 0 says why no file identifies the weights, and the loaded parameters"
            f" cannot: {problem}. Set `weights` to"
            " `name:` and a text that identifies them"
        )
        return None

    @property
    def _united_first(self) -> str | None:
        digests = {rank: report.first for rank, report in self._weights.items() if report.first}
        return self._unite(digests) if len(digests) == self.ranks else None

    def _version(self, reports: Sequence[WeightsReport]) -> str | None:
        """Return the name that the trainer gave; None without one, or if it had other weights."""
        versions = {report.version for report in reports}
        version = versions.pop()
        if versions or not version:
            return None
        if self._united and self._versions.setdefault(version, self._united) != self._united:
            logger.warning(
                "version %r was the name of other weights before, so it is not used; give each set"
                " of weights a version of its own",
                version,
            )
            return None
        return f"version:{version}"

    def _say_unnamed(self, problem: str) -> None:
        """Log once in a round that the weights need a version."""
        if self._unnamed_round != self.round:
            self._unnamed_round = self.round
            logger.error(
                "the weights may have changed in place, and it is not known to what: %s. Nothing is"
                " loaded or stored until they have a version (weights_changed(version=...)), or the"
                " engine is restarted",
                problem,
            )

    def _unite(self, digests: Mapping[int, str | None]) -> str:
        """Return the digest of all ranks together."""
        parallel = self._vllm_config.parallel_config
        names = "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"
        degrees = [getattr(parallel, name, 1) for name in names]
        quantization = self._vllm_config.model_config.quantization
        of_ranks = [digests[rank] for rank in range(self.ranks)]
        lines = [" ".join(map(str, degrees)), str(quantization), *of_ranks]
        return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()

    @property
    def _holds_a_part(self) -> bool:
        """Whether other engines hold a part of the weights that this one computes with."""
        parallel = self._vllm_config.parallel_config
        return bool(
            getattr(parallel, "enable_expert_parallel", False)
            and int(getattr(parallel, "data_parallel_size", 1)) > 1
        )

    def settle(self, namespace: Namespace) -> None:
        """Announce the namespace to the workers from now on."""
        self.namespace = namespace
        if self.checking:
            self._settled = self._united
        self.checking = self._noticed = self._noticed_late = False
        self.announcing = True

    @property
    def announcement(self) -> tuple[bytes, str] | None:
        """Record and slug of the namespace, while workers may not have it."""
        if self.namespace is None or self.checking or not self.announcing:
            return None
        return self.namespace.encoded, self.namespace.slug

    def disable(self, reason: str, *, already_logged: bool = False) -> None:
        """Load and store nothing from now on."""
        if not self.disabled and not already_logged:
            self._say_disabled(reason)
        self.disabled = True
