"""What an engine pins in its worker's memory tier for loads within the step.

Owns the hits that the scheduler side has pinned for the step that it plans, and how it finds the
memory of a worker that runs in its own process: vLLM's engine of one rank on a GPU
(``UniProcExecutor``). Ranks in processes of their own have no such memory.

Contracts
---------
* A hit is pinned as a whole or not at all. It stays as it is until it is taken or dropped.
* Memory is found by the engine and the shelf that both sides are made for. While two workers of
  one process have the same names, neither is found.
* All methods run on the engine's step thread, which is the worker's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

from kvshelf.config import Config
from kvshelf.format.keys import Chunk
from kvshelf.tiers.memory_tier import PinnedObject

#: The objects of chunks, by key and shard.
Objects: TypeAlias = Mapping[bytes, Mapping[int, PinnedObject]]
_Name: TypeAlias = tuple[str, str]

_offered: Final[dict[_Name, list[PinnedHits]]] = {}


class PinnedHits:
    """The hits that are pinned in the memory tier of one worker.

    Parameters
    ----------
    pin : Callable
        Pins all objects of chunks, or returns None if one of them is not in memory.
    """

    def __init__(self, pin: Callable[[Sequence[Chunk]], Objects | None]) -> None:
        self._pin = pin
        #: By request.
        self._hits: dict[str, Objects] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._hits

    def pin(self, request_id: str, chunks: Sequence[Chunk]) -> bool:
        """Pin the objects of a request's hit; False if one of them is not in memory."""
        self.drop([request_id])
        objects = self._pin(chunks)
        if objects is None:
            return False
        self._hits[request_id] = objects
        return True

    def take(self, request_id: str) -> Objects | None:
        """Hand out what is pinned for a request; the caller releases it (:func:`release`)."""
        return self._hits.pop(request_id, None)

    def drop(self, request_ids: Collection[str]) -> None:
        """Unpin what is pinned for requests."""
        for request_id in request_ids:
            release(self.take(request_id))

    def drop_others(self, request_ids: Collection[str]) -> None:
        """Unpin what is pinned for all but these requests."""
        self.drop([known for known in self._hits if known not in request_ids])

    # ------------------------------------------------------------- where it is found

    def offer(self, vllm_config: Any, config: Config) -> None:
        """Let the scheduler side of this process find it, until :meth:`withdraw`."""
        _offered.setdefault(_name(vllm_config, config), []).append(self)

    def withdraw(self, vllm_config: Any, config: Config) -> None:
        """Unpin all, and be found no more. Idempotent."""
        self.drop_others(())
        name = _name(vllm_config, config)
        others = [one for one in _offered.pop(name, []) if one is not self]
        if others:
            _offered[name] = others


def find(vllm_config: Any, config: Config) -> PinnedHits | None:
    """Return what the worker of an engine offers, if it runs in this process."""
    offered = _offered.get(_name(vllm_config, config), [])
    return offered[0] if len(offered) == 1 else None


def release(objects: Objects | None) -> None:
    """Unpin objects."""
    for shards in () if objects is None else objects.values():
        for pinned in shards.values():
            pinned.release()


def _name(vllm_config: Any, config: Config) -> _Name:
    engine_id = str(getattr(vllm_config.kv_transfer_config, "engine_id", ""))
    return engine_id, config.shared_storage_path or ""
