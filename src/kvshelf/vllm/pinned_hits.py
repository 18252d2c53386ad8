"""What an engine pins in its worker's memory tier for loads within the step.

Owns the hits that the scheduler side has pinned for the step that it plans, and how it finds the
memory of a worker that runs in its own process: vLLM's engine of one rank on a GPU
(``UniProcExecutor``). Ranks in processes of their own have no such memory.

Contracts
---------
* A hit is pinned as a whole or not at all. It stays as it is until it is taken or dropped. vLLM
  executes a step before it plans the next one, so what a step takes is taken before more is pinned.
* Memory is found by the engine and the shelf that both sides are made for. While two have the same
  names, as two connectors inside MultiConnector may, neither is found.
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
        #: Under which name it is offered.
        self._name: _Name | None = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._hits

    def pin(self, request_id: str, chunks: Sequence[Chunk]) -> bool:
        """Pin the objects of a request's hit; False if one of them is not in memory."""
        release(self.take(request_id))
        objects = self._pin(chunks)
        if objects is None:
            return False
        self._hits[request_id] = objects
        return True

    def take(self, request_id: str) -> Objects | None:
        """Hand over what is pinned for a request; the caller unpins it (:func:`release`)."""
        return self._hits.pop(request_id, None)

    def keep_only(self, request_ids: Collection[str]) -> None:
        """Unpin what is pinned for all but these requests."""
        for request_id in self._hits.keys() - set(request_ids):
            release(self.take(request_id))

    # ------------------------------------------------------------- where it is found

    def offer(self, vllm_config: Any, config: Config) -> None:
        """Let the scheduler side of this process find it, until :meth:`withdraw`."""
        self._name = _name_of(vllm_config, config)
        _offered.setdefault(self._name, []).append(self)

    def withdraw(self) -> None:
        """Unpin all, and be found no more. Idempotent."""
        self.keep_only(())
        name, self._name = self._name, None
        if name is not None:
            _offered[name].remove(self)
            if not _offered[name]:
                del _offered[name]


def find(vllm_config: Any, config: Config) -> PinnedHits | None:
    """Return what the worker of an engine offers, if it runs in this process."""
    offered = _offered.get(_name_of(vllm_config, config), [])
    return offered[0] if len(offered) == 1 else None


def release(objects: Objects | None) -> None:
    """Unpin objects."""
    for shards in () if objects is None else objects.values():
        for pinned in shards.values():
            pinned.release()


def _name_of(vllm_config: Any, config: Config) -> _Name:
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    return str(getattr(transfer, "engine_id", "")), config.shared_storage_path or ""
