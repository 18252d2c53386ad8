"""Notices that a running worker changes its weights, or frees the memory of its KV cache.

vLLM does not notify a connector when it loads new weights into a running engine or discards them
(sleep level 2). Only from 0.33 on it notifies it when the memory of the KV cache is freed (sleep of
any level, ``/release_kv_cache_memory``) and allocated again. But all engine commands call named
methods of the worker's class, so :func:`watch` wraps these methods. Worker extensions load weights
by the model's ``load_weights`` or by vLLM's ``AutoWeightsLoader``, which :func:`watch_loading`
wraps. This module owns the wrappers, one for each method.

Users' code reaches a worker through ``apply_model`` and through remote calls: of functions, and of
methods that are not vLLM's own, such as those of worker extensions. :func:`watch_user_code` reports
each such call before it begins; the weights are compared then. What changes weights from inside the
process in another way is noticed at the next reset of the connector's cache, or has to call
:meth:`kvshelf.vllm.connector.KVShelfConnector.weights_changed`.

Listeners are called on the worker's step thread: before weights change or memory is freed, and
after memory was allocated again.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeAlias

logger = logging.getLogger(__name__)

_MODULE = "vllm.v1.worker.gpu_worker"
_BASE_MODULE = "vllm.v1.worker.worker_base"
#: The modules whose `run_method` runs what an engine asks of a worker, and the one that unpickles
#: the functions itself.
_RUNNERS = ("vllm.v1.executor.uniproc_executor", "vllm.v1.executor.ray_utils")
_UNPICKLER = "vllm.v1.executor.multiproc_executor"
#: What vLLM and kvshelf run in workers themselves.
_OWN_MODULES = ("vllm.", "kvshelf.")
_LOADER_MODULE = "vllm.model_executor.models.utils"
_DISCARDING_SLEEP = 2

_Function: TypeAlias = Callable[..., Any]


class Listener(Protocol):
    """An object that is notified of these events."""

    def weights_changed(self, how: str) -> None:
        """Weights are about to change; `how` names the method."""

    def weights_suspected(self) -> None:
        """Code is about to run that may change weights."""

    def fall_asleep(self) -> None:
        """Stop using the KV cache: its memory is about to be freed."""

    def wake_up(self) -> None:
        """Use the KV cache again: its memory is allocated."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def _always(*_: Any, **__: Any) -> bool:
    return True


def _discards(level: int = 1, *_: Any, **__: Any) -> bool:
    """Whether a sleep of this level discards the weights."""
    return level >= _DISCARDING_SLEEP


def _frees_weights(tags: Collection[str]) -> bool:
    """Whether discarding these tags frees the weights' memory."""
    return "weights" in tags


def _with_cache(tags: Collection[str] | None = None) -> bool:
    """Whether a call with these tags concerns the KV cache's memory."""
    return tags is None or "kv_cache" in tags


#: Methods of vLLM's worker before which listeners are notified, and whether a call with some
#: arguments is one of these: methods that may change weights, and that free the KV cache's memory.
_CHANGING: dict[str, Callable[..., bool]] = {
    "start_weight_update": _always,
    "start_draft_weight_update": _always,
    "update_weights": _always,
    "finish_weight_update": _always,
    "reload_weights": _always,
    "reset_weights": _always,
    "sleep": _discards,
    "discard": _frees_weights,
}
_FREEING: dict[str, Callable[..., bool]] = {"sleep": _always, "discard": _with_cache}
#: The same of methods after which they are: the memory of the KV cache is allocated again.
_WAKING: dict[str, Callable[..., bool]] = {"wake_up": _with_cache}


def watch(listener: Listener, worker_class: type | None = None) -> bool:
    """Notify `listener` when the weights or the KV cache's memory of this process change.

    Parameters
    ----------
    listener : Listener
        Held weakly.
    worker_class : type, optional
        The class to wrap; vLLM's worker, the base class of all others, when absent.

    Returns
    -------
    bool
        False if this process has no such class.
    """
    if worker_class is None:
        worker_class = getattr(sys.modules.get(_MODULE), "Worker", None)
    if worker_class is None:
        return False
    _listeners.add(listener)
    for name in {*_CHANGING, *_FREEING, *_WAKING} & {*vars(worker_class)}:
        _replace(worker_class, name, functools.partial(_noticed, name))
    return True


def watch_user_code(worker_class: type | None = None) -> None:
    """Notify all listeners of :func:`watch` before users' code runs in a worker.

    Parameters
    ----------
    worker_class : type, optional
        vLLM's worker, when absent.
    """
    if worker_class is None:
        worker_class = getattr(sys.modules.get(_MODULE), "Worker", None)
    base = sys.modules.get(_BASE_MODULE)
    wrapper, root = getattr(base, "WorkerWrapperBase", None), getattr(base, "WorkerBase", None)
    _replace(root, "apply_model", _telling("weights_suspected"))
    if worker_class is not None:
        # Remote calls by name reach a worker's methods through this method of its wrapper.
        _replace(wrapper, "__getattr__", functools.partial(_finding, worker_class))
    for name in _RUNNERS:
        _replace(sys.modules.get(name), "run_method", _running)
    module = sys.modules.get(_UNPICKLER)
    pickler = getattr(module, "cloudpickle", None)
    if pickler is not None and not isinstance(pickler, _Unpickler):
        module.cloudpickle = _Unpickler(pickler)  # type: ignore[union-attr]


def _replace(owner: Any, name: str, wrap: Callable[[_Function], _Function]) -> None:
    """Put a wrapper in place of a function of a class, module or object, once."""
    function = getattr(owner, name, None)
    if callable(function) and not hasattr(function, "_kvshelf_wrapped"):
        wrapper = functools.wraps(function)(wrap(function))
        wrapper._kvshelf_wrapped = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapper)


def _is_users(function: Any) -> bool:
    """Whether a function is neither vLLM's nor kvshelf's."""
    return not str(getattr(function, "__module__", "")).startswith(_OWN_MODULES)


def _is_vllms(worker_class: type, name: str) -> bool:
    """Whether vLLM's worker itself has a method of this name, perhaps overridden for a platform."""
    owners = [one for one in worker_class.__mro__ if not _is_users(one)]
    return any(name in vars(one) for one in owners)


def _finding(worker_class: type, find: _Function) -> _Function:
    def found(self: Any, name: str) -> Any:
        value = find(self, name)
        users = callable(value) and _is_users(value) and not _is_vllms(worker_class, name)
        return _telling("weights_suspected")(value) if users else value

    return found


def _running(run: _Function) -> _Function:
    def call(obj: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(method, bytes) or (callable(method) and _is_users(method)):
            _tell("weights_suspected")
        return run(obj, method, *args, **kwargs)

    return call


class _Unpickler:
    """Stands for ``cloudpickle`` in a module that unpickles functions only to run them."""

    def __init__(self, pickler: Any) -> None:
        self._pickler = pickler

    def loads(self, data: bytes) -> Any:
        function = self._pickler.loads(data)
        if _is_users(function):
            _tell("weights_suspected")
        return function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pickler, name)


def watch_loading(listener: Listener, model: Any, loader_class: type | None = None) -> None:
    """Notify `listener` when weights are loaded into `model`, and all listeners of vLLM's loader.

    Parameters
    ----------
    listener : Listener
        Held weakly.
    model : Module
        The loaded model.
    loader_class : type, optional
        The class whose ``load_weights`` is wrapped too; vLLM's ``AutoWeightsLoader``
        (vllm/model_executor/models/utils.py) when absent.
    """
    if loader_class is None:
        loader_class = getattr(sys.modules.get(_LOADER_MODULE), "AutoWeightsLoader", None)
    mine: weakref.WeakSet[Any] = weakref.WeakSet([listener])
    owners: list[tuple[Any, weakref.WeakSet[Any]]] = [(model, mine), (loader_class, _listeners)]
    for owner, listeners in owners:
        _replace(
            owner,
            "load_weights",
            _telling("weights_changed", "load_weights()", listeners=listeners),
        )


def _telling(
    what: str, *about: str, listeners: weakref.WeakSet[Any] = _listeners
) -> Callable[[_Function], _Function]:
    """Return what wraps a method, bound or of a class: listeners are notified before each call."""

    def wrap(method: _Function) -> _Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            _tell(what, *about, listeners=listeners)
            return method(*args, **kwargs)

        return call

    return wrap


def _noticed(name: str, method: _Function) -> _Function:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _applies(_CHANGING, name, args, kwargs):
            _tell("weights_changed", f"{name}()")
        if _applies(_FREEING, name, args, kwargs):
            _tell("fall_asleep")
        answer = method(self, *args, **kwargs)
        if _applies(_WAKING, name, args, kwargs):
            _tell("wake_up")
        return answer

    return call


def _applies(methods: dict[str, Callable[..., bool]], name: str, args: Any, kwargs: Any) -> bool:
    try:
        return name in methods and methods[name](*args, **kwargs)
    except TypeError as error:
        logger.error("could not parse the arguments of a hooked vLLM call", exc_info=error)
        return False


def _tell(what: str, *about: str, listeners: weakref.WeakSet[Any] = _listeners) -> None:
    for listener in list(listeners):
        try:
            getattr(listener, what)(*about)
        except Exception as error:
            logger.error("a listener for changes of weights or memory failed", exc_info=error)
