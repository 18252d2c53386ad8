"""What this engine may promise of a prompt that it prefills for another engine.

Owns the record of one request that wants a hand-over: which kinds of which chunks are on the shelf
or planned to be stored, and the tail. From it follows the answer of the request: the most leading
tokens of the prompt of which a load would find everything.

Contracts
---------
* Only what was seen on the shelf, was handed to the workers, or waits for their room is promised.
  If a store fails later, the workers inform the consumer by a marker.
* Everything promised is in one namespace.
* Runs on the engine's step thread.
"""

from __future__ import annotations

import secrets

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import KINDS, Kind
from kvshelf.format.namespace import Namespace
from kvshelf.vllm.groups import CacheGroups
from kvshelf.vllm.handover import Handover


class Promise:
    """What is promised of one prompt so far.

    Attributes
    ----------
    attempt : str
        Random id of this attempt at a hand-over, 32 hex digits.
    tail : Chunk or None
        The tail, once its store is planned.
    """

    def __init__(self) -> None:
        self.attempt = secrets.token_hex(16)
        self.tail: Chunk | None = None
        self._namespace: Namespace | None = None
        self._chunks: dict[int, Chunk] = {}
        self._kinds: dict[Kind, set[int]] = {kind: set() for kind in KINDS}

    def add(self, namespace: Namespace, kind: Kind, chunk: Chunk) -> None:
        """Note that a kind of a chunk was seen on the shelf, or is planned to be stored.

        The weights may have changed since the last one: what is in another namespace is forgotten.
        """
        if namespace != self._namespace:
            self._namespace = namespace
            self.tail = None
            self._chunks.clear()
            for indices in self._kinds.values():
                indices.clear()
        if chunk.tail:
            self.tail = chunk
        else:
            self._chunks[chunk.index] = chunk
            self._kinds[kind].add(chunk.index)

    def handover(self, groups: CacheGroups, prompt: int, chunk_size: int) -> Handover | None:
        """Return what may be promised; None if nothing may.

        Parameters
        ----------
        groups : CacheGroups
            The engine's.
        prompt : int
            Tokens of the prompt.
        chunk_size : int
            Tokens.
        """
        # Behind a state at the prompt's end, vLLM could not compute the last token once more.
        last = (prompt - 1 if groups.hybrid else prompt) // chunk_size
        end = groups.hit_rule(chunk_size).longest(range(1, last + 1), self._kinds)
        tail = self.tail if end == prompt // chunk_size else None
        if self._namespace is None or not (end or tail):
            return None
        return Handover(
            self._namespace.digest,
            end * chunk_size + (tail.tokens if tail else 0),
            (tail or self._chunks[end - 1]).key,
            tail.tokens if tail else 0,
            self.attempt,
        )
