"""What a worker knows of its weights, and whether loads and stores may use a namespace.

Owns the :class:`~kvshelf.vllm.worker.loaded_weights.LoadedWeights` of the worker, and the hooks by
which changes are noticed (:mod:`kvshelf.vllm.worker.weight_changes`).

Contracts
---------
* From the moment when weights may have changed in place, nothing is loaded or stored until the
  scheduler has named the namespace of the weights that are there now. A load or store that was
  planned in an earlier round is dropped. What was gathered before is published.
* Where vLLM does not show the model, a change ends caching.
* All methods run on the worker's step thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from kvshelf.vllm.metadata import LoadOp, StoreOp, WeightsReport
from kvshelf.vllm.worker import weight_changes
from kvshelf.vllm.worker.loaded_weights import LoadedWeights, enclosing_model
from kvshelf.vllm.worker.registration import Registration

logger = logging.getLogger(__name__)

_WEIGHTS_CHANGED = (
    "the engine's weights were changed in place ({}) and their new content is unknown, because this"
    " vLLM version does not show its model; restart the engine, with a `version` of its own or from"
    " files of the new weights"
)


class WorkerWeights:
    """The weights of one worker.

    Parameters
    ----------
    registration : Registration
        The model's; it is disabled where a change cannot be understood.
    """

    def __init__(self, registration: Registration) -> None:
        self._registration = registration
        #: Those of no model until :meth:`watch`.
        self._loaded = LoadedWeights(None)
        self._watching = False

    def watch(self, listener: weight_changes.Listener) -> None:
        """Read the weights for the first time, and notice changes. Idempotent.

        Called below vLLM's model runner, which registers its caches then and has the model.
        """
        weight_changes.watch(listener)
        weight_changes.watch_user_code()
        if self._watching:
            return
        self._watching = True
        self._loaded = loaded = LoadedWeights(enclosing_model())
        if loaded.watched:
            weight_changes.watch_loading(listener, loaded.model)
        else:
            logger.warning(
                "changes of weights in a running engine are noticed only where vLLM's own methods"
                " make them, and end caching: %s",
                loaded.problem or "this vLLM version does not show its model",
            )

    @property
    def modules(self) -> Iterable[torch.nn.Module]:
        """The modules of the loaded model; none if vLLM does not show it."""
        model = self._loaded.model
        return () if model is None else model.modules()

    @property
    def settled(self) -> bool:
        """Whether loads and stores may use the namespace that is open."""
        return self._loaded.settled

    def is_current(self, op: LoadOp | StoreOp) -> bool:
        """Whether an operation was planned in the namespace that is open, and may run."""
        return self.settled and op.round == self._loaded.round

    def changed(self, how: str, version: str = "") -> None:
        """Note that `how` changes the weights, to those that `version` names if given."""
        loaded = self._loaded
        if not loaded.watched:
            self._registration.disable(_WEIGHTS_CHANGED.format(how))
            return
        if loaded.settled:
            logger.info(
                "the weights change (%s): nothing is loaded or stored until they are compared", how
            )
        loaded.changed(version)

    def suspected(self) -> bool:
        """Note that code may be about to change the weights; False if that is not watched."""
        if not self._loaded.watched:
            return False
        self._loaded.suspected()
        return True

    def begin(self, number: int) -> bool:
        """Compare the weights in round `number`, as the scheduler requested; False if it began."""
        if number <= self._loaded.round:
            return False
        self._loaded.begin(number)
        return True

    def agree(self, number: int) -> bool:
        """Whether a namespace that the scheduler named in round `number` may be used."""
        return self._loaded.agree(number)

    def settle(self, name: str) -> None:
        """Note that loads and stores continue, with weights that the namespace calls `name`."""
        self._loaded.settle(name)

    def advance(self, *, idle: bool) -> None:
        """Continue to read the weights of a round, for a few milliseconds at most."""
        loaded = self._loaded
        if not loaded.settled:
            loaded.advance(idle=idle)
            if loaded.problem:
                self._registration.disable(loaded.problem)

    def report(self, *, asked: bool) -> WeightsReport | None:
        """Return what the scheduler has to know: always if `asked`, else while not settled."""
        return self._loaded.report() if asked or not self._loaded.settled else None
