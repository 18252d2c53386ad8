"""The weights that a worker computes with: where they are, and what they are now.

Owns the digest of the loaded model's parameters and buffers at the start and in each *round* (a
comparison of the weights of all ranks, which the scheduler begins), and whether a change was
noticed since. :mod:`kvshelf.vllm.handshake` decides what the digests mean.

A round
-------
1. Something may have changed: a hook noticed it (:mod:`~kvshelf.vllm.worker.weight_changes`), or
   vLLM reset its caches. Nothing is loaded or stored from that moment on.
2. The scheduler begins a round with a step's metadata. The worker then reads all parameters in
   slices, one at the end of each step.
3. The worker reports its digest. If a change was noticed meanwhile, it requests another round.
4. When all ranks have reported, the scheduler names a namespace, and loads and stores continue in
   it.

Threads
-------
Everything runs on the worker's step thread, on which vLLM also changes weights, runs the methods
of worker extensions and puts the engine to sleep. So no slice reads a tensor that is being
written. A change between two slices that no hook notices would leave a digest of a mixture: such a
change is not noticed by any means but a later reset, see ``docs/changing-weights.md``.

Where vLLM moves experts between ranks while it serves (expert parallel load balancing), they are
digested one by one and named by their numbers in the model, whatever place they have and however
often they are there.

Weights that no tensor shows (:mod:`kvshelf.vllm.worker.model_tensors`) count as they were at the
start while the same object holds them, and later as one of a kind. Where an object may change what
it holds, they are also one of a kind after each noticed change: never as unchanged by mistake.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
import time
import uuid
from types import FrameType

import torch

from kvshelf.vllm.metadata import ExpertDigests, WeightsReport
from kvshelf.vllm.worker.model_tensors import Experts, Unreadable, balanced, readable, unreadable
from kvshelf.weights.parameters import ParameterDigest

#: How long a slice may take: in a step that computes something, and in an empty one.
_STEP_SECONDS = 5e-3
_IDLE_SECONDS = 20e-3
_AT_START = "as at the start"

logger = logging.getLogger(__name__)


def enclosing_model() -> torch.nn.Module | None:
    """Return the model of the runner that is registering its caches; None if there is none.

    vLLM hands a connector its caches, not its model, but its model runner makes the call
    (vllm/v1/worker/gpu_model_runner.py and vllm/v1/worker/gpu/model_runner.py).
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        get_model = getattr(frame.f_locals.get("self"), "get_model", None)
        if callable(get_model):
            model = get_model()
            if isinstance(model, torch.nn.Module):
                return model
        frame = frame.f_back
    return None


def _at(name: str, place: int) -> str:
    """Return a name for the weights of one place among those of a layer's experts."""
    return f"{name} at place {place}"


def _places(balanced: list[Experts]) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.layer, one.held) for one in balanced]


def _digest_experts(digest: ParameterDigest, experts: Experts) -> tuple[tuple[int, ...], bytes]:
    """Return the experts of a layer that this rank holds, and 16 bytes for each."""
    held = [(expert, place) for place, expert in enumerate(experts.held) if expert >= 0]
    digests = [
        digest.of({_at(name, place): name for name in experts.weights})[:16] for _, place in held
    ]
    return tuple(expert for expert, _ in held), b"".join(digests)


class LoadedWeights:
    """The weights of one worker.

    Parameters
    ----------
    model : Module, optional
        The loaded model; without one no round can be answered.

    Attributes
    ----------
    model : Module or None
    round : int
        The last round that the scheduler began; 0 before the first.
    problem : str
        Why the weights cannot be read; empty while they can.
    settled : bool
        Whether loads and stores may use the namespace that is open.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self.model = model
        self.round = 0
        self.problem = ""
        self.settled = True
        self._noticed = False
        #: A change was noticed since the round began.
        self._again = False
        self._version = ""
        #: The version was given while earlier weights may have had no name yet.
        self._late = False
        #: What the namespace calls the weights.
        self._name = ""
        self._digest: ParameterDigest | None = None
        #: The tensors of the digest that are not of balanced experts.
        self._plain: dict[str, str] = {}
        #: Objects that held unreadable weights at the start, by name, and the names of later ones.
        self._unreadable = {one.name: one.held for one in self._hidden()}
        self._later: dict[str, tuple[object, str]] = {}
        self._result: str | None = None
        #: Where vLLM balances experts: which this rank held when the digest began, and theirs.
        self._balanced: list[Experts] = []
        self._experts: dict[str, tuple[tuple[int, ...], bytes]] = {}
        if model is not None:
            self._begin_digest()
            self._read_all()
        self._first: str | None = self._result
        self._first_experts: ExpertDigests = self._experts

    @property
    def watched(self) -> bool:
        """Whether digests can show changes."""
        return self._first is not None and not self.problem

    def changed(self, version: str = "") -> None:
        """Note that the weights are about to change, to those that `version` names if given.

        Bytes that the next round finds are not called so if others may have been written before.
        """
        if version and version != self._version:
            self._late = self._noticed or bool(self._version)
        self.settled = False
        self._noticed = self._again = True
        self._version = version or self._version
        self._digest = self._result = None

    def suspected(self) -> None:
        """Note that code may be about to run that changes the weights."""
        self.settled = False
        self._again = True
        self._digest = self._result = None

    def begin(self, number: int) -> None:
        """Begin a round."""
        self.round = number
        self.settled = self._again = False
        self._result = None
        if self.model is not None:
            self._begin_digest()

    def advance(self, *, idle: bool) -> None:
        """Continue to read, for a few milliseconds at most."""
        if self._digest is None:
            return
        try:
            end = time.monotonic() + (_IDLE_SECONDS if idle else _STEP_SECONDS)
            self._digest.advance(end - time.monotonic())
            if self._digest.known:
                self._finish(self._digest, end)
        except Exception as error:  # noqa: BLE001 - reported to the scheduler
            self._give_up(error)

    def agree(self, number: int) -> bool:
        """Whether a namespace that the scheduler named in round `number` may be used."""
        return self.settled or (
            number == self.round and not self._again and self._result is not None
        )

    def settle(self, name: str) -> None:
        """Note that loads and stores continue, with weights that the namespace calls `name`.

        A version that is not their name is kept: it names weights that are not there yet.
        """
        self.settled = True
        self._noticed = self._again = False
        if name == f"version:{self._version}":
            self._version = ""
        elif self._late and name != self._name:
            logger.warning(
                "version %r was given before earlier weights had a name: it is not used, since it"
                " is not known which of them the engine has. Let the engine make a step between"
                " two changes, and say the version before the first parameter changes",
                self._version,
            )
            self._version = ""
        self._late = False
        self._name = name

    def report(self) -> WeightsReport | None:
        """Return what the scheduler has to know; None where the weights are not watched."""
        if self._first is None:
            return None
        return WeightsReport(
            round=self.round,
            first=self._first,
            digest=self._result,
            packed=bool(self._unreadable),
            noticed=self._noticed,
            again=self._again,
            version=self._version,
            late=self._late,
            first_experts=self._first_experts,
            experts=self._experts if self._result is not None else {},
        )

    def _begin_digest(self) -> None:
        assert self.model is not None
        try:
            self._balanced = balanced(self.model)
            self._experts = {}
            moved = {name: tensor for one in self._balanced for name, tensor in one.weights.items()}
            starts = {tensor.data_ptr() for tensor in moved.values()}
            tensors = [one for one in readable(self.model) if one[1].data_ptr() not in starts]
            self._plain = {name: name for name, _ in tensors}
            for name, tensor in moved.items():
                tensors += [(_at(name, place), part) for place, part in enumerate(tensor)]
            self._digest = ParameterDigest(tensors)
        except Exception as error:  # noqa: BLE001 - reported to the scheduler
            self._give_up(error)

    def _finish(self, digest: ParameterDigest, end: float) -> None:
        """Take what was read until `end`; begin again if vLLM has moved experts meanwhile."""
        for one in self._balanced[len(self._experts) :]:
            self._experts[one.layer] = _digest_experts(digest, one)
            if time.monotonic() >= end:
                return
        assert self.model is not None
        if self._balanced and _places(balanced(self.model)) != _places(self._balanced):
            self._begin_digest()
        else:
            self._result, self._digest = self._named(digest.of(self._plain).hex()), None

    def _read_all(self) -> None:
        if self._digest is not None:
            try:
                self._digest.wait()
                self._finish(self._digest, math.inf)
            except Exception as error:  # noqa: BLE001 - logged by the owner
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._digest = None
        self.problem = f"the model's weights cannot be read ({type(error).__name__}: {error})"

    def _hidden(self) -> list[Unreadable]:
        return [] if self.model is None else list(unreadable(self.model))

    def _named(self, digest: str) -> str:
        """Add the weights that cannot be read to a digest of the others."""
        lines = []
        for one in self._hidden():
            first = self._unreadable.get(one.name)
            held, state = self._later.get(one.name, (first, _AT_START))
            if one.fixed and one.held is first:
                state = _AT_START
            elif one.held is not held or (self._noticed and not one.fixed):
                state = uuid.uuid4().hex
                self._later[one.name] = one.held, state
            lines.append(f"{one.name} {state}\n")
        if not lines:
            return digest
        return hashlib.sha256("".join([digest, "\n", *lines]).encode()).hexdigest()
