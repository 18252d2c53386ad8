"""Notices that a running engine may change its weights, or frees the memory of its KV cache.

vLLM does not notify a connector when weights change. Only from 0.33 on it notifies it when the
memory of the KV cache is freed (sleep of any level, ``/release_kv_cache_memory``) and allocated
again. So this module wraps the functions by which these things come, each once:

* ``EngineCore.collective_rpc``, by which everything but LoRA adapters and sleep reaches the
  workers from outside: weight updates, reloads, functions and methods of users. Whatever is called
  may change weights.
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


class EngineListener(Protocol):
    """What notices changes in the engine's process."""

    def weights_may_change(self) -> None:
        """All workers are about to run something that may change their weights."""


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
    _wrap(_find(_ENGINE), "collective_rpc", listener, lambda one: one.weights_may_change())


def watch_loading(listener: WorkerListener, model: Any) -> None:
    """Notify `listener` before weights are loaded into `model`, or by vLLM's loader."""
    for owner in (model, _find(_LOADER)):
        _wrap(owner, "load_weights", listener, lambda one: one.weights_changed("load_weights()"))


def watch_worker(listener: WorkerListener) -> None:
    """Notify `listener` when this process' worker frees or allocates the KV cache's memory.

    And before the drafter's weights change.
    """
    worker, drafts = _find(_WORKER), "start_draft_weight_update"
    _wrap(worker, drafts, listener, lambda one: one.weights_changed(f"{drafts}()"))
    _wrap(worker, "sleep", listener, lambda one: one.fall_asleep())
    _wrap(worker, "discard", listener, lambda one: one.fall_asleep(), only=_with_cache)
    _wrap(worker, "wake_up", listener, lambda one: one.wake_up(), only=_with_cache, after=True)


def _find(place: tuple[str, str]) -> Any:
    """Return a class of vLLM; None where this process has not loaded it."""
    module, name = place
    return getattr(sys.modules.get(module), name, None)


def _always(*_: Any, **__: Any) -> bool:
    return True


def _with_cache(_: Any, tags: Collection[str] | None = None) -> bool:
    """Whether a worker's method with these tags concerns the KV cache's memory."""
    return tags is None or "kv_cache" in tags


def _wrap(
    owner: Any,
    name: str,
    listener: Any,
    tell: Callable[[Any], None],
    *,
    only: Callable[..., bool] = _always,
    after: bool = False,
) -> None:
    """Notify one more listener of the calls of a function of a class or an object."""
    function = getattr(owner, name, None)
    if not callable(function):
        return
    listeners: weakref.WeakSet[Any] | None = getattr(function, _LISTENERS, None)
    if listeners is None:
        listeners = weakref.WeakSet()

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                told = [*listeners] if only(*args, **kwargs) else []
            except Exception as error:
                # vLLM's own function is called all the same.
                logger.error("a call of %s was not understood", name, exc_info=error)
                told = [*listeners]
            if after:
                result = function(*args, **kwargs)
                _tell(told, tell)
                return result
            _tell(told, tell)
            return function(*args, **kwargs)

        setattr(call, _LISTENERS, listeners)
        setattr(owner, name, call)
    listeners.add(listener)


def _tell(listeners: list[Any], tell: Callable[[Any], None]) -> None:
    for listener in listeners:
        try:
            tell(listener)
        except Exception as error:
            logger.error("a listener for changes of weights or memory failed", exc_info=error)
