"""What a worker's weights are now, and whether loads and stores may use a namespace.

Owns the digest of the loaded model's parameters and buffers at the start and in each *round*, a
comparison of the weights of all ranks. :mod:`kvshelf.vllm.handshake` decides what the digests mean.

A round
-------
1. Weights may have changed (:mod:`kvshelf.vllm.weight_changes`), or vLLM reset its caches. What
   this worker notices it reports; nothing is loaded or stored from that moment on. What was
   gathered before is published.
2. The scheduler begins a round with a step's metadata. The worker then reads all parameters in
   slices, one at the end of each step. It drops what was planned in an earlier round.
3. The worker reports its digest, or why there can be none. If a change was noticed meanwhile, it
   requests another round.
4. When all ranks have reported, the scheduler names a namespace, and loads and stores continue in
   it.

The digest of the start is read in the same way, in the engine's first steps. It is given up if the
weights may have changed before it is complete.

Weights that vLLM has packed into memory that no tensor shows count as they were at the start while
the same object holds them: they can only be replaced as a whole. Any others that cannot be read
leave a round without a digest.

Threads
-------
Everything runs on the worker's step thread, on which vLLM also changes weights, runs the methods
of worker extensions and puts the engine to sleep. So no slice reads a tensor that is being
written. A change between two slices that no hook notices would leave a digest of a mixture: such a
change is not noticed by any means but a later reset, see ``docs/how-it-works.md``.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any, Final

import torch

from kvshelf.vllm import weight_changes
from kvshelf.vllm.metadata import LoadOp, StoreOp, WeightsReport
from kvshelf.vllm.worker.model_tensors import packed, readable, unreadable
from kvshelf.weights.parameters import ParameterDigest

#: How long a slice may take: in a step that computes something, and in an empty one.
_STEP_SECONDS: Final = 5e-3
_IDLE_SECONDS: Final = 20e-3
#: How often a digest is begun that fails, as where a device has no memory left for a moment.
_TRIES: Final = 5

logger = logging.getLogger(__name__)


def enclosing_models() -> list[torch.nn.Module]:
    """Return the model of the runner that is registering its caches, and behind it its drafter's.

    vLLM hands a connector its caches, not its model, but its model runner makes the call
    (vllm/v1/worker/gpu_model_runner.py and vllm/v1/worker/gpu/model_runner.py).
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        runner = frame.f_locals.get("self")
        get_model = getattr(runner, "get_model", None)
        if callable(get_model):
            model = get_model()
            if isinstance(model, torch.nn.Module):
                draft = getattr(runner, "get_draft_model", lambda: None)()
                return [model] if draft is None else [model, draft]
        frame = frame.f_back
    return []


class WorkerWeights:
    """The weights of one worker.

    Parameters
    ----------
    vllm_config : VllmConfig

    Attributes
    ----------
    settled : bool
        Whether loads and stores may use the namespace that is open.
    """

    def __init__(self, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        self._moves_experts = bool(getattr(parallel, "enable_eplb", False))
        self._model: torch.nn.Module | None = None
        self._packed: dict[str, object] = {}
        #: The last round that the scheduler began; 0 before the first.
        self._round = 0
        self.settled = True
        #: A change was noticed since the round began.
        self._changed = False
        self._version = ""
        #: No step was made since the version was given, so further changes belong to it.
        self._gives_version = False
        self._problem = ""
        self._digest: ParameterDigest | None = None
        #: How often the digest has failed since the start or since the round began.
        self._failures = 0
        self._result: str | None = None
        self._first: str | None = None

    def watch(self, listener: weight_changes.WorkerListener) -> None:
        """Begin to read the weights, and to notice changes.

        Called below vLLM's model runner, which registers its caches then and has the model.
        """
        weight_changes.watch_worker(listener)
        for model in (models := enclosing_models()):
            weight_changes.watch_loading(listener, model)
        if models:
            self._model = models[0]
            self._packed = dict(packed(self._model))
        self._begin_digest()
        if self._problem:
            logger.warning(
                "once the weights may have changed, as at each reset of the connector's cache, they"
                " need a version (weights_changed(version=...)), or nothing is loaded or stored"
                " until the engine is restarted: %s",
                self._problem,
            )

    @property
    def modules(self) -> Iterable[torch.nn.Module]:
        """The modules of the loaded model; none if vLLM does not show it."""
        return () if self._model is None else self._model.modules()

    def is_current(self, op: LoadOp | StoreOp) -> bool:
        """Whether an operation was planned in the namespace that is open, and may run."""
        return self.settled and op.round == self._round

    def changed(self, how: str, version: str = "") -> None:
        """Note that `how` changes the weights, to those that `version` names if given.

        A version names the weights with which the next step computes.
        """
        if self.settled:
            logger.info(
                "the weights change (%s): nothing is loaded or stored until they are compared", how
            )
        self.settled = False
        self._changed = True
        self._digest = self._result = None
        if version or not self._gives_version:
            self._version = version
        self._gives_version |= bool(version)

    def begin(self, number: int) -> bool:
        """Begin a step, in which the scheduler is in round `number`; return whether it is new."""
        given, self._gives_version = self._gives_version, False
        if number <= self._round:
            return False
        if not (given or self._changed):
            # What was noticed elsewhere came after the weights of this version.
            self._version = ""
        self._round = number
        self.settled = self._changed = False
        self._failures = 0
        self._begin_digest()
        return True

    def advance(self, *, idle: bool) -> None:
        """Continue to read, for a few milliseconds at most."""
        if self._digest is None:
            return
        try:
            self._digest.advance(_IDLE_SECONDS if idle else _STEP_SECONDS)
            result = self._digest.result()
        except Exception as error:  # noqa: BLE001 - reported to the scheduler
            self._failures += 1
            if self._failures < _TRIES:
                self._begin_digest()
            else:
                self._give_up(error)
            return
        if result is not None:
            self._digest, self._result = None, self._with_packed(result)
            if not self._round:
                self._first = self._result

    def agree(self, number: int) -> bool:
        """Whether a namespace that the scheduler named in round `number` may be used."""
        answered = self._result is not None or bool(self._problem)
        return self.settled or (number == self._round and not self._changed and answered)

    def settle(self) -> None:
        """Note that loads and stores continue."""
        self.settled = True
        self._version = ""

    def report(self, *, asked: bool) -> WeightsReport | None:
        """Return what the scheduler has to know: always if `asked`, else while not settled."""
        if self.settled and not asked:
            return None
        return WeightsReport(
            self._round,
            self._first,
            self._result,
            bool(self._packed),
            self._changed,
            self._version,
            self._problem,
        )

    def _begin_digest(self) -> None:
        self._digest = self._result = None
        try:
            self._problem = self._find_problem()
            if self._model is not None and not self._problem:
                self._digest = ParameterDigest(readable(self._model))
        except Exception as error:  # noqa: BLE001 - reported to the scheduler
            self._give_up(error)

    def _find_problem(self) -> str:
        """Return why the weights cannot be read now; empty if they can."""
        if self._model is None:
            return "this vLLM version does not show its model"
        if self._moves_experts:
            return "vLLM moves experts between ranks while it serves (--enable-eplb)"
        if (name := next(unreadable(self._model), None)) is not None:
            return f"no tensor shows the weights of {name}"
        now, first = dict(packed(self._model)), self._packed
        if now.keys() != first.keys() or any(now[name] is not first[name] for name in first):
            return "vLLM has packed other weights into memory that cannot be read"
        return ""

    def _give_up(self, error: Exception) -> None:
        self._digest = None
        self._problem = f"the model's weights cannot be read ({type(error).__name__}: {error})"

    def _with_packed(self, digest: str) -> str:
        """Add the weights that are packed as at the start to a digest of the others."""
        lines = [f"{name} as at the start\n" for name in self._packed]
        if not lines:
            return digest
        return hashlib.sha256("".join([digest, "\n", *lines]).encode()).hexdigest()
