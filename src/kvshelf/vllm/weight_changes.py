"""Learns of weights that change inside a running worker.

vLLM tells a connector nothing when it loads new weights into a running engine, or throws them
away (sleep level 2). The methods of its worker that do so have names, though, and every engine
command reaches them as attributes of the worker's class; there :func:`watch` puts itself in
front of them. It owns these wrappers, one for each method and process.

Whoever changes weights in another way, such as a worker extension that writes into parameters,
has to say so: :meth:`kvshelf.vllm.connector.SharedStorageConnector.weights_changed`.

Listeners are called on the worker's step thread, before the weights change.
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


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def _always(*_: Any, **__: Any) -> bool:
    return True


def _discards(level: int = 1, *_: Any, **__: Any) -> bool:
    """Whether a sleep of this level throws the weights away."""
    return level >= _DISCARDING_SLEEP


#: Methods of vLLM's worker that change weights, with the question whether a call does.
_METHODS: dict[str, Callable[..., bool]] = {
    "start_weight_update": _always,
    "update_weights": _always,
    "reload_weights": _always,
    "sleep": _discards,
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
        try:
            if question(*args, **kwargs):
                for listener in list(_listeners):
                    listener.weights_changed(f"{name}()")
        except Exception as error:
            logger.error("a change of weights was not noted", exc_info=error)
        return method(self, *args, **kwargs)

    call._kvshelf_watches = True  # type: ignore[attr-defined]
    return call
