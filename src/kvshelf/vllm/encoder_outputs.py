"""Encoder outputs that were computed with weights that the engine no longer has.

vLLM caches the encoder's output for an image, audio or video by the item's id. After a change of
weights it drops these only on demand (``reset_encoder_cache``; ``reload_weights`` and a pause with
``clear_cache`` call it). KV that is computed of such an output is neither of the old weights nor of
the new ones. So requests with these items are treated as requests with old blocks are
(:mod:`kvshelf.vllm.scheduler.block_weights`): what they compute is not stored.

Owns the wrappers of vLLM's ``EncoderCacheManager``, which lives in the scheduler's process, and the
ids that were in it when weights changed. All runs on the scheduler's step thread.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)

#: All managers of this process, and which of their items are of earlier weights.
_managers: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


@functools.cache
def watch() -> None:
    """Register each manager that vLLM makes from now on, and its resets. Idempotent.

    Raises
    ------
    ImportError, AttributeError
        If this vLLM has none.
    """
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    start: Any = EncoderCacheManager.__init__
    reset: Any = EncoderCacheManager.reset

    @functools.wraps(start)
    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        _managers[self] = set()

    @functools.wraps(reset)
    def was_reset(self: Any) -> None:
        reset(self)
        if self in _managers:
            _managers[self] = set()

    EncoderCacheManager.__init__ = started
    EncoderCacheManager.reset = was_reset


class EncoderOutputs:
    """Judges the items of requests while weights change.

    Until the first change it does nothing.
    """

    def __init__(self) -> None:
        try:
            watch()
        except (ImportError, AttributeError) as error:
            logger.warning("vLLM's cache of encoder outputs cannot be watched: %r", error)
        self._round: dict[Any, set[str]] | None = None
        self._used = False
        #: No manager was known at a change: what it holds is not known either.
        self._all_old = False
        self._warned = False

    def begin(self) -> None:
        """Note that the weights may differ from now on."""
        before = self._round or {}
        self._round = {
            manager: before.get(manager, set()).union(manager.cached) for manager in _managers
        }

    def settle(self, *, changed: bool) -> bool:
        """Note whether the weights differ from those at the begin of the last round.

        Returns
        -------
        bool
            Whether requests that were admitted since then may have used earlier outputs.
        """
        found, self._round = self._round, None
        used, self._used = self._used, False
        if not changed:
            return False
        for manager, old in _managers.items():
            old |= (found or {}).get(manager, set()).union(manager.cached)
        self._all_old |= not _managers
        return used

    def are_old(self, features: Iterable[Any] | None) -> bool:
        """Whether an item of a request that is admitted now may have an output of old weights."""
        ids = {feature.identifier for feature in features or ()}
        if not ids:
            return False
        self._used |= self._round is not None
        old = self._all_old or any(not ids.isdisjoint(items) for items in _managers.values())
        if old and not self._warned:
            self._warned = True
            logger.warning(
                "the weights changed, and vLLM still has what the encoder made of images, audio or"
                " video before: KV of requests with these items is not stored until vLLM's encoder"
                " cache is reset (reset_encoder_cache, or a pause with clear_cache)"
            )
        return old
