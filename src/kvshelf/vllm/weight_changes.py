"""Notices that a running engine may change its weights, or frees the memory of its KV cache.

vLLM does not notify a connector when weights change. Only from 0.33 on it notifies it when the
memory of the KV cache is freed (sleep of any level, ``/release_kv_cache_memory``) and allocated
again. So this module wraps the functions by which these things come, each once:

* ``EngineCore.collective_rpc``, by which everything but LoRA adapters and sleep reaches the
  workers from outside: weight updates, reloads, functions and methods of users. Whatever is called
  may change weights, except a few methods of vLLM's own worker.
* ``load_weights`` of the loaded model, of its drafter and of vLLM's ``AutoWeightsLoader``, by which
  code inside a worker's process loads weights.
* the methods of vLLM's worker that free and allocate the KV cache's memory, and the one by which an
  update of the drafter begins, which is no part of the model.

Sleep, release and pause reset the connector's cache, so they need no wrapper for the weights. What
changes weights from inside a process in another way is noticed at the next reset, or has to call
:meth:`kvshelf.vllm.connector.KVShelfConnector.weights_changed`.

Listeners are called on the step thread of the engine or the worker: before weights change or memory
is freed, and after memory was allocated again. They are held weakly.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Collection
from typing import Any, Final, Protocol

logger = logging.getLogger(__name__)

_ENGINE: Final = ("vllm.v1.engine.core", "EngineCore")
_WORKER: Final = ("vllm.v1.worker.gpu_worker", "Worker")
_LOADER: Final = ("vllm.model_executor.models.utils", "AutoWeightsLoader")
_LISTENERS: Final = "_kvshelf_listeners"
#: Methods of vLLM's worker that monitors call, and that write to no weights. vLLM allows no worker
#: extension a method of the same name.
READING: Final = ("check_health", "compute_weight_checksums", "list_loras")


class EngineListener(Protocol):
    """What notices changes in the engine's process."""

    def weights_may_change(self, how: str) -> None:
        """All workers are about to run what may change their weights; `how` names the call."""


class WorkerListener(Protocol):
    """What notices changes in a worker's process."""

    def weights_changed(self, how: str) -> None:
        """Weights are about to change; `how` names the method."""

    def fall_asleep(self) -> None:
        """Stop using the KV cache: its memory is about to be freed."""

    def wake_up(self) -> None:
        """Use the KV cache again: its memory is allocated."""


def watch_engine(listener: EngineListener) -> None:
    """Notify `listener` before any engine of this process calls its workers for a user."""

    def tell(one: EngineListener, how: str) -> None:
        one.weights_may_change(how)

    _wrap(_find(_ENGINE), "collective_rpc", listener, tell, named=_by_method)


def watch_loading(listener: WorkerListener, model: Any) -> None:
    """Notify `listener` before weights are loaded into `model`, or by vLLM's loader."""
    for owner in (model, _find(_LOADER)):
        _wrap(owner, "load_weights", listener, lambda one, how: one.weights_changed(how))


def watch_worker(listener: WorkerListener) -> None:
    """Notify `listener` when this process' worker frees or allocates the KV cache's memory.

    And before the drafter's weights change.
    """
    worker, drafts = _find(_WORKER), "start_draft_weight_update"
    _wrap(worker, drafts, listener, lambda one, how: one.weights_changed(how))
    _wrap(worker, "sleep", listener, lambda one, _: one.fall_asleep())
    _wrap(worker, "discard", listener, lambda one, _: one.fall_asleep(), named=_by_tags)
    _wrap(worker, "wake_up", listener, lambda one, _: one.wake_up(), named=_by_tags, after=True)


def _find(place: tuple[str, str]) -> Any:
    """Return a class of vLLM; None where this process has not loaded it."""
    module, name = place
    return getattr(sys.modules.get(module), name, None)


def _by_method(_: Any, method: Any, *__: Any, **___: Any) -> str:
    """Name a call of ``collective_rpc``; empty where it writes to no weights."""
    if isinstance(method, str):
        return "" if method in READING else f"collective_rpc({method!r})"
    return f"collective_rpc({getattr(method, '__qualname__', 'a function')})"


def _by_tags(_: Any, tags: Collection[str] | None = None) -> str:
    """Name the KV cache's memory; empty where a worker's method with these tags leaves it."""
    return "kv_cache" if tags is None or "kv_cache" in tags else ""


def _wrap(
    owner: Any,
    name: str,
    listener: Any,
    tell: Callable[[Any, str], None],
    *,
    named: Callable[..., str] | None = None,
    after: bool = False,
) -> None:
    """Notify one more listener of the calls of a function of a class or an object.

    Parameters
    ----------
    owner, name : object, str
    listener : object
    tell : Callable
        Notifies a listener of a call, which has this name.
    named : Callable, optional
        Takes what the function takes. Nobody is told of a call that it gives an empty name.
    after : bool
        Notify when the function has returned.
    """
    function = getattr(owner, name, None)
    if not callable(function):
        return
    listeners: weakref.WeakSet[Any] | None = getattr(function, _LISTENERS, None)
    if listeners is None:
        listeners = weakref.WeakSet()

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            how = f"{name}()"
            try:
                how = how if named is None else named(*args, **kwargs)
            except Exception as error:
                # Listeners are told, and vLLM's own function is called, all the same.
                logger.error("a call of %s was not understood", name, exc_info=error)
            told_listeners = [*listeners] if how else []
            if not after:
                _tell(told_listeners, tell, how)
            result = function(*args, **kwargs)
            if after:
                _tell(told_listeners, tell, how)
            return result

        setattr(call, _LISTENERS, listeners)
        setattr(owner, name, call)
    listeners.add(listener)


def _tell(listeners: list[Any], tell: Callable[[Any, str], None], how: str) -> None:
    for listener in listeners:
        try:
            tell(listener, how)
        except Exception as error:
            logger.error("a listener for changes of weights or memory failed", exc_info=error)
