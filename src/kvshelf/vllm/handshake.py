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
3. From :meth:`Handshake.settle` on, steps announce the namespace to the workers, until a step
   brings no report: then all workers have it.
4. A worker whose caches are registered again reports again, and has to report the same.

Rounds
------
When the weights may have changed, :meth:`Handshake.begin_round` has all ranks digest their weights
(:mod:`kvshelf.vllm.worker.loaded_weights`); until all have reported, :attr:`Handshake.checking` is
true.
The digests of all ranks together name the weights:

* the digests of the start: the name that the weights had then, from the files that vLLM loaded,
  or, where these are unknown, from the digests as in the last case;
* digests that have a name already: that name;
* a `version` that the trainer gave to all ranks: ``version:<version>``. It names only weights that
  have no name yet, and waits, with a warning, for a round that finds such: the trainer may give it
  before the first parameter changes. Where other engines hold a part of the weights, it counts
  although this engine's part may be the same;
* other ones: ``params:<SHA-256>`` of the digests of all ranks in order, the parallelism that
  decides what a rank holds, and the quantization.

Experts that vLLM moves between ranks (expert parallel load balancing) enter these digests by their
numbers in the model, so that moving and multiplying them changes no name.

Contracts
---------
* Requests wait for the namespace until one deadline at most, which the first of them sets.
* An engine that is disabled stays so until it is restarted; the reason is logged once.
* Runs on the engine's step thread.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from kvshelf.config import Config
from kvshelf.errors import KVShelfError
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.vllm.metadata import BY_PARAMETERS, ExpertDigests, WeightsReport, WorkerReport
from kvshelf.vllm.namespace import build_namespace, stage_ranks, unite_ranks

logger = logging.getLogger(__name__)

#: Seconds that the first requests of a new engine wait until its weights and layout are identified
#: and the shelf is open, counted from the first that asks: a small model is read in less, and a
#: large one is not worth the wait of a user.
IDENTITY_SECONDS: Final = 2.0

_SAY_DISABLED: Final = functools.partial(
    logger.error, "nothing is loaded from or stored on the shelf: %s"
)

#: By layer and number in the model, the digests of an expert wherever it is.
_Experts: TypeAlias = dict[tuple[str, int], frozenset[bytes]]


def _by_number(ranks: Iterable[ExpertDigests]) -> _Experts:
    """Return the experts of all ranks together."""
    found: dict[tuple[str, int], set[bytes]] = {}
    for layers in ranks:
        for layer, (numbers, digests) in layers.items():
            for place, number in enumerate(numbers):
                digest = digests[16 * place : 16 * place + 16]
                found.setdefault((layer, number), set()).add(digest)
    return {name: frozenset(digests) for name, digests in found.items()}


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
        self.checking = False
        self._reports: dict[int, WorkerReport] = {}
        #: The reports of the current round.
        self._weights: dict[int, WeightsReport] = {}
        #: Digest of each rank at the start.
        self._first: dict[int, str] = {}
        self._first_experts: dict[int, ExpertDigests] = {}
        #: Where other engines hold a part: the experts of this round and of the settled weights, as
        #: they entered the digest; and all experts of these weights that were seen here since.
        self._experts: _Experts = {}
        self._settled_experts: _Experts = {}
        self._seen_experts: _Experts = {}
        #: Some weights of some rank are not in its digest.
        self._packed = False
        #: Digests of all ranks together: of this round, and of the last one that was settled. The
        #: empty one stands for the start.
        self._united = self._settled_united = ""
        #: The names of weights by digest, and the digests of versions.
        self._names: dict[str, str] = {}
        self._versions: dict[str, str] = {}
        #: Versions that were given before the weights differed.
        self._waiting: set[str] = set()
        #: The report of each pipeline stage, as the namespace was built from them.
        self._stages: list[WorkerReport] = []
        self._announcing = False
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
            self._announcing = False
        self._reports.update(reports)
        for report in reports.values():
            if report.disabled_reason:
                self.disable(report.disabled_reason, already_logged=report.already_logged)
        current = {rank: found for rank, found in weights.items() if found.round == self.round}
        self._weights.update(current)
        self._first.update({rank: found.first for rank, found in weights.items()})
        self._first_experts.update({rank: found.first_experts for rank, found in weights.items()})
        self._packed = self._packed or any(found.packed for found in weights.values())
        again = any(found.again for found in current.values())
        if again and not self.watched:
            self.disable(
                "the engine's weights were changed in place, and not all ranks can digest the new"
                " ones: restart the engine"
            )
        return again

    @property
    def watched(self) -> bool:
        """Whether all ranks can detect changes of their weights."""
        return len(self._first) == self.ranks

    @property
    def weights_changed(self) -> bool:
        """Whether the weights differ from those of the round before, or did for a while."""
        return self._united != self._settled_united or self._change_noticed

    @property
    def _change_noticed(self) -> bool:
        return any(found.noticed for found in self._weights.values())

    def begin_round(self) -> None:
        """Let all ranks digest their weights."""
        self.round += 1
        self.checking = True
        self._weights.clear()

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
            self._announcing = True
            if stages != self._stages:
                self.disable(
                    "the KV caches were registered again with other layers, shapes, layout or"
                    " scales: restart the engine"
                )
                return None
            if not self.checking:
                return None
        try:
            fmt = ObjectFormat(build_namespace(self._vllm_config, self._config, stages, weights))
        except KVShelfError as error:
            self.disable(str(error))
            return None
        self._stages = stages
        return fmt

    def _name_of_weights(self) -> str | None:
        """Return what the namespace calls the weights; None while that is not known."""
        at_start = self._name_at_start()
        if not self.checking:
            return at_start
        found = [self._weights.get(rank) for rank in range(self.ranks)]
        reports = [report for report in found if report is not None]
        digests = [report.digest for report in reports if report.digest is not None]
        if len(digests) < self.ranks:
            return None
        self._experts = self._as_settled(_by_number(report.experts for report in reports))
        first, united = self._united_first, self._unite_digests(digests, self._experts)
        self._united = "" if united == first else united
        if self._holds_a_part and self.weights_changed:
            name = self._version_of(united, reports)
            if name is None:
                self.disable(
                    "the weights changed in place, and with expert parallelism over several engines"
                    " each engine sees a part of them: give the new weights a version by"
                    " weights_changed(version=...), or restart the engine"
                )
                return None
            self._names[united] = name
            return name
        if united == first or united in self._names:
            self._note_waiting_version(reports)
            return self._names.get(united, at_start)
        late = any(report.late for report in reports)
        version = None if late else self._version_of(united, reports)
        if version is not None:
            self._names[united] = version
        else:
            if any(report.packed for report in reports):
                # The digests stand for packed weights only in this engine and its like.
                if at_start is None:
                    return None
                name = hashlib.sha256(f"{united}\n{at_start}\n".encode()).hexdigest()
            else:
                name = united
            self._names[united] = f"params:{name}"
        return self._names[united]

    def _name_at_start(self) -> str | None:
        """Return the name of the weights of the start; None while there is none."""
        name = self._reports[0].weights
        if name != BY_PARAMETERS:
            return name
        if not self.watched:
            problem = "not all ranks can read their parameters"
        elif self._packed:
            problem = "vLLM has packed parameters into memory that cannot be read"
        elif self._holds_a_part:
            problem = "other engines hold a part of them (expert parallelism)"
        else:
            return f"params:{self._united_first}"
        self.disable(
            "the log of rank 0 says why no file identifies the weights, and the loaded parameters"
            f" cannot: {problem}. Set `weights` to a string that identifies them"
        )
        return None

    @property
    def _united_first(self) -> str:
        digests = [self._first[rank] for rank in range(self.ranks)]
        return self._unite_digests(digests, _by_number(self._first_experts.values()))

    def _as_settled(self, experts: _Experts) -> _Experts:
        """Return the experts of the settled weights if those that are here now are among them.

        Where other engines hold a part, vLLM moves experts here that were not seen before. Without
        a notice of a change they count as settled, and are compared from then on.
        """
        if not self._holds_a_part or self._change_noticed:
            return experts
        if not self._seen_experts:
            self._settled_experts = _by_number(self._first_experts.values())
            self._seen_experts = dict(self._settled_experts)
        if any(self._seen_experts.get(name, found) != found for name, found in experts.items()):
            return experts
        self._seen_experts |= experts
        return self._settled_experts

    def _version_of(self, united: str, reports: Sequence[WeightsReport]) -> str | None:
        """Return the name that the trainer gave; None without one, or if it had other weights."""
        versions = {report.version for report in reports}
        version = versions.pop()
        if versions or not version:
            return None
        if self._versions.setdefault(version, united) != united:
            logger.warning(
                "version %r was the name of other weights before, so it is not used; give each set"
                " of weights a version of its own",
                version,
            )
            return None
        return f"version:{version}"

    def _note_waiting_version(self, reports: Sequence[WeightsReport]) -> None:
        """Log once for each version that the weights which it will name are not there yet."""
        for version in sorted({report.version for report in reports} - {"", *self._waiting}):
            self._waiting.add(version)
            logger.warning(
                "version %r names no weights yet: the engine's weights are the same as before, and"
                " have a name. It will name the next weights that differ",
                version,
            )

    def _unite_digests(self, digests: Sequence[str], experts: _Experts) -> str:
        """Return the digest of all ranks together, and of the experts that vLLM moves between them.

        An expert may be there several times; all of them count.
        """
        parallel = self._vllm_config.parallel_config
        degrees = [
            getattr(parallel, name, 1)
            for name in (
                "tensor_parallel_size",
                "pipeline_parallel_size",
                "prefill_context_parallel_size",
            )
        ]
        quantization = self._vllm_config.model_config.quantization
        lines = [" ".join(map(str, degrees)), str(quantization), *digests]
        for (layer, number), found in sorted(experts.items()):
            lines.append(f"{layer} {number} {' '.join(sorted(one.hex() for one in found))}")
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
        if self._united != self._settled_united:
            self._settled_experts, self._seen_experts = self._experts, dict(self._experts)
        self._settled_united = self._united
        self.checking = False
        self._announcing = True

    @property
    def announcement(self) -> tuple[bytes, str] | None:
        """Record and slug of the namespace, while workers may not have it."""
        if self.namespace is None or self.checking or not self._announcing:
            return None
        return self.namespace.encoded, self.namespace.slug

    def disable(self, reason: str, *, already_logged: bool = False) -> None:
        """Load and store nothing from now on."""
        if not self.disabled and not already_logged:
            self._say_disabled(reason)
        self.disabled = True
