"""Whether vLLM's encoder may have outputs that were computed with weights of before.

vLLM caches the encoder's output for an image, audio or video by the item's id. After a change of
weights it drops these only on demand (``reset_encoder_cache`` of the engine, which a pause with
``clear_cache`` calls; ``reload_weights`` clears the outputs of the workers, not the scheduler's
record of them). KV that is computed of such an output is neither of the old weights nor of the new
ones, so until then requests with items are treated as requests with old blocks are
(:mod:`kvshelf.vllm.scheduler.periods`): what they compute is not stored.

Owns the wrappers of vLLM's ``EncoderCacheManager``, which lives in the scheduler's process. All
runs on the scheduler's step thread.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)

#: How often each manager of this process was reset.
_resets: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@functools.cache
def watch() -> None:
    """Register each manager that vLLM makes from now on, and count its resets. Idempotent.

    Raises
    ------
    ImportError, AttributeError
        If this vLLM has none.
    """
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    def counting(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            method(self, *args, **kwargs)
            _resets[self] = _resets.get(self, 0) + 1

        return call

    EncoderCacheManager.__init__ = counting(EncoderCacheManager.__init__)
    EncoderCacheManager.reset = counting(EncoderCacheManager.reset)


class EncoderOutputs:
    """Judges the items of requests while weights change. Until the first change all are new."""

    def __init__(self) -> None:
        try:
            watch()
        except (ImportError, AttributeError) as error:
            logger.warning("vLLM's cache of encoder outputs cannot be watched: %r", error)
        #: The managers with outputs of before this round, or of before a change, and how often each
        #: had been reset.
        self._round: dict[Any, int] = {}
        self._old: dict[Any, int] = {}
        #: No manager was known at a change: what it holds is not known either.
        self._all_old = False
        self._warned = False

    def begin(self) -> None:
        """Note that the weights may differ from now on."""
        self._round |= {cache: count for cache, count in _resets.items() if cache.cached}

    def settle(self, *, changed: bool) -> None:
        """Note whether the weights differ from those at the begin of the last round."""
        if changed:
            self._old |= self._round
            self._all_old |= not _resets
        self._round = {}

    def are_old(self, features: Iterable[Any] | None) -> bool:
        """Whether an item of a request that is admitted now may have an output of old weights."""
        if not features:
            return False
        resets_of = self._old | self._round
        old = self._all_old or any(
            _resets.get(cache) == count for cache, count in resets_of.items()
        )
        if old and not self._warned:
            self._warned = True
            logger.warning(
                "the weights may have changed, and vLLM still has what the encoder made of images,"
                " audio or video before: KV of requests with such items is not stored until vLLM's"
                " encoder cache is reset (reset_encoder_cache, or a pause with clear_cache)"
            )
        return old
