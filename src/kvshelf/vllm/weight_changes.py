"""Learns of weights that change, and memory that goes away, inside a running worker.

vLLM tells a connector nothing when it loads new weights into a running engine, or throws them
away (sleep level 2), and only from 0.33 on that the KV cache's memory goes (sleep of any level)
and comes back. The methods of its worker that do so have names, though, and every engine
command reaches them as attributes of the worker's class; there :func:`watch` puts itself in
front of them. It owns these wrappers, one for each method and process.

Whoever changes weights in another way, such as a worker extension that writes into parameters,
has to say so: :meth:`kvshelf.vllm.connector.SharedStorageConnector.weights_changed`.

Listeners are called on the worker's step thread, before the weights change or the memory goes,
and after it came back.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_MODULE = "vllm.v1.worker.gpu_worker"
_DISCARDING_SLEEP = 2


class Listener(Protocol):
    """What wants to know."""

    def weights_changed(self, how: str) -> None:
        """Weights are about to change, by what `how` says."""

    def fall_asleep(self) -> None:
        """Leave the KV cache alone: its memory is about to go away."""

    def wake_up(self) -> None:
        """Use the KV cache again: its memory is back."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def _always(*_: Any, **__: Any) -> bool:
    return True


def _never(*_: Any, **__: Any) -> bool:
    return False


def _discards(level: int = 1, *_: Any, **__: Any) -> bool:
    """Whether a sleep of this level throws the weights away."""
    return level >= _DISCARDING_SLEEP


def _with_cache(tags: list[str] | None = None) -> bool:
    """Whether waking up with these tags brings the KV cache's memory back."""
    return tags is None or "kv_cache" in tags


#: Methods of vLLM's worker that change weights, with the question whether a call does.
_METHODS: dict[str, Callable[..., bool]] = {
    "start_weight_update": _always,
    "update_weights": _always,
    "reload_weights": _always,
    "reset_weights": _always,
    "sleep": _discards,
    "wake_up": _never,
}


def watch(listener: Listener, worker_class: type | None = None) -> bool:
    """Call ``listener.weights_changed`` before the weights of this process change.

    Parameters
    ----------
    listener : Listener
        Held weakly.
    worker_class : type, optional
        The class to watch; vLLM's worker, of which all others are subclasses, when absent.

    Returns
    -------
    bool
        False when there is no such class in this process.
    """
    if worker_class is None:
        worker_class = getattr(sys.modules.get(_MODULE), "Worker", None)
    if worker_class is None:
        return False
    _listeners.add(listener)
    for name, question in _METHODS.items():
        method = worker_class.__dict__.get(name)
        if callable(method) and not hasattr(method, "_kvshelf_watches"):
            setattr(worker_class, name, _watched(name, method, question))
    return True


def _watched(
    name: str, method: Callable[..., Any], question: Callable[..., bool]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _asked(question, args, kwargs):
            _tell("weights_changed", f"{name}()")
        if name == "sleep":
            _tell("fall_asleep")
        answer = method(self, *args, **kwargs)
        if name == "wake_up" and _asked(_with_cache, args, kwargs):
            _tell("wake_up")
        return answer

    call._kvshelf_watches = True  # type: ignore[attr-defined]
    return call


def _asked(question: Callable[..., bool], args: Any, kwargs: Any) -> bool:
    try:
        return question(*args, **kwargs)
    except TypeError as error:
        logger.error("a call was not understood", exc_info=error)
        return False


def _tell(what: str, *about: str) -> None:
    for listener in list(_listeners):
        try:
            getattr(listener, what)(*about)
        except Exception as error:
            logger.error("a change of weights or memory was not noted", exc_info=error)
