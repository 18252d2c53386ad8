"""What an engine pins in memory for loads within the step.

Owns the hits that the scheduler side has pinned in the memory tier for the step that it plans, and
how it finds the tier of a worker that runs in its own process: vLLM's engine of one rank on a GPU
(``UniProcExecutor``). Ranks in processes of their own have no memory that the scheduler could see,
but all of a machine map that of a node server: there the scheduler side pins for all of them, and
says where (:func:`objects_at`).

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
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from kvshelf.config import Config
from kvshelf.format.keys import Chunk
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.view import Pinned

#: The objects of chunks, by key and shard.
Objects: TypeAlias = Mapping[bytes, Mapping[int, Pinned]]
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


@dataclass(frozen=True, slots=True)
class _Placed:
    """An object in memory that the scheduler side has pinned, and releases."""

    view: memoryview

    def valid(self) -> bool:
        return True

    def release(self) -> None:
        """Do nothing."""


def objects_at(
    memory: memoryview,
    offsets: Sequence[int],
    chunks: Sequence[Chunk],
    fmt: ObjectFormat,
    shards: Collection[int],
) -> Objects:
    """Return the objects of chunks that lie in memory.

    Parameters
    ----------
    memory : memoryview
    offsets : Sequence of int
        Where the objects begin: all shards of the first chunk before those of the next.
    chunks : Sequence of Chunk
    fmt : ObjectFormat
    shards : Collection of int
        The shards to return.
    """
    found: dict[bytes, dict[int, _Placed]] = {}
    for number, chunk in enumerate(chunks):
        found[chunk.key] = of_chunk = {}
        for shard in shards:
            start = offsets[number * fmt.shards + shard]
            nbytes = fmt.object_size(shard, chunk.tokens)
            of_chunk[shard] = _Placed(memory[start : start + nbytes])
    return found


def check(objects: Objects, chunks: Sequence[Chunk], fmt: ObjectFormat) -> None:
    """Check, after objects were read, that they still lie where they were.

    The end of the process that has pinned them is also the end of its pins.

    Raises
    ------
    BadObjectError
        If something else lies there.
    """
    for chunk in chunks:
        for shard, pinned in objects[chunk.key].items():
            fmt.verify_header(pinned.view, chunk, shard)


def _name_of(vllm_config: Any, config: Config) -> _Name:
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    return str(getattr(transfer, "engine_id", "")), config.shared_storage_path or ""
