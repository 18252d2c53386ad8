"""The arguments of a cache's calls: tokens and their masks, identities, forms of KV, tiers.

Owns the checks, before anything is read or written: what is of another type raises a TypeError, and
what does not fit a ValueError, each with what was found and what was expected.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from kvshelf.format.keys import Chunk, KeyChain, MultimodalItem
from kvshelf.kv.sources import BlobKV, BoundKV, KVSource, TupleKV
from kvshelf.transfer.context import ChunkSlots

#: KV of a prompt: a form of :mod:`kvshelf.kv.sources`, K and V of each layer as transformers
#: has them, or a blob ``[2, layers, tokens, hidden]``.
KVLike: TypeAlias = "KVSource | Tensor | Sequence[tuple[Tensor, Tensor]]"
Tokens: TypeAlias = "Sequence[int] | Tensor"
Mask: TypeAlias = "Tensor | Sequence[bool] | None"


def require(name: str, value: object, expected: type) -> None:
    """Refuse an argument of another type.

    Raises
    ------
    TypeError
        If it is.
    """
    if not isinstance(value, expected):
        given = f"a {type(value).__name__}, {value!r:.80}"
        raise TypeError(f"{name} is {given}; expected a {expected.__name__}")


#: Where chunks may be, the nearest first.
TIERS: Final = ("memory", "disk", "shelf")


@dataclass(frozen=True, slots=True)
class PromptIdentity:
    """The parts of a request, besides model and tokens, that determine its KV.

    Attributes
    ----------
    salt : str
        Separates the chunks of a user or tenant from all others.
    lora_digest : bytes
        Digest of the LoRA adapter, see :func:`kvshelf.weights.fingerprints.lora_digest`; empty
        without one.
    items : Sequence of MultimodalItem
        Images, sounds and other items among the tokens.
    """

    salt: str = ""
    lora_digest: bytes = b""
    items: Sequence[MultimodalItem] = ()

    def __post_init__(self) -> None:
        """Check the types."""
        require("salt", self.salt, str)
        require("lora_digest", self.lora_digest, bytes)
        for item in self.items:
            require("an item of items", item, MultimodalItem)


PLAIN: Final = PromptIdentity()


def identity_of(value: object) -> PromptIdentity:
    """Return the identity that a call was given; None stands for a prompt of tokens alone."""
    if value is None:
        return PLAIN
    require("identity", value, PromptIdentity)
    assert isinstance(value, PromptIdentity)
    return value


class ChunkKey(NamedTuple):
    """A chunk of a prompt: tokens [start, end) and the chunk's key."""

    start: int
    end: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """The checked tokens of a call.

    Attributes
    ----------
    tokens : array of int
    first_chunk : int
        The first chunk that the call's mask selects.
    chunk_size : int
    make_chain : Callable
        Returns the keys of the prompt, still without tokens.
    """

    tokens: array[int]
    first_chunk: int
    chunk_size: int
    make_chain: Callable[[], KeyChain]

    @property
    def start(self) -> int:
        """The first token of the first chunk."""
        return self.first_chunk * self.chunk_size

    def chunks(self) -> list[Chunk]:
        """Return the whole chunks that the mask selects."""
        chain = self.make_chain()
        chain.extend(self.tokens)
        return chain.chunks[self.first_chunk :]

    def slots(self, opened: BoundKV) -> list[Tensor]:
        """Return the slots of each of these chunks in KV of the prompt.

        Raises
        ------
        ValueError
            If the KV is of fewer tokens.
        """
        size = self.chunk_size
        end = len(self.tokens) // size * size
        if opened.tokens < end:
            raise ValueError(
                f"KV of {opened.tokens} tokens was given for {len(self.tokens)} tokens; expected"
                f" at least {end}"
            )
        return [opened.slots(start, start + size) for start in range(self.start, end, size)]

    def stored_from(self, opened: BoundKV) -> list[ChunkSlots]:
        """Return the chunks with their slots, to be stored.

        Raises
        ------
        ValueError
            As :meth:`slots`, or if a token is not in the caller's caches.
        """
        items = [
            ChunkSlots(chunk, slots, opened.memory)
            for chunk, slots in zip(self.chunks(), self.slots(opened), strict=True)
        ]
        for item in items:
            if bool((item.slots < 0).any()):
                raise ValueError(
                    f"slot_mapping is −1 for tokens of chunk {item.chunk.index}, which are not in"
                    " the cache and cannot be stored: pass fewer tokens, or a mask"
                )
        return items

    def last(self, method: str) -> Prompt:
        """Return the prompt with its last chunk alone, as `method` stores the state behind it.

        Raises
        ------
        ValueError
            If the tokens are not whole chunks.
        """
        chunks, tail_tokens = divmod(len(self.tokens), self.chunk_size)
        if tail_tokens or not chunks:
            raise ValueError(
                f"{method}() got {len(self.tokens)} tokens; expected a multiple of the chunk size"
                f" {self.chunk_size}: states are stored at the ends of chunks"
            )
        return replace(self, first_chunk=chunks - 1)


def tiers_of(given: Collection[str] | None) -> tuple[str, ...]:
    """Return the tiers that a caller names, the nearest first."""
    tiers = TIERS if given is None else tuple(tier for tier in TIERS if tier in given)
    unknown = sorted(set(given or ()) - set(TIERS))
    if unknown or not tiers:
        raise ValueError(
            f"tiers is {unknown or list(given or ())}; expected some of {', '.join(TIERS)}"
        )
    return tiers


def token_ids(tokens: Tokens) -> array[int]:
    """Return a copy of token ids; raise unless it is one sequence of integers that fit u32."""
    shape = getattr(tokens, "shape", None)
    if shape is not None and len(shape) != 1:
        raise ValueError(
            f"tokens has shape {list(shape)}; expected one dimension: one prompt at a time"
        )
    ids = tokens.tolist() if shape is not None else tokens  # type: ignore[union-attr]
    try:
        return array("I", ids)
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError(
            f"tokens contains a value that is not a token id ({error}); expected integers from 0 to"
            f" {2**32 - 1}"
        ) from error


def false_run(mask: Tensor | Sequence[bool], tokens: int, chunk_size: int) -> int:
    """Return the number of leading False of a mask; raise unless it fits the chunk size."""
    try:
        values = mask if isinstance(mask, Tensor) else torch.tensor(list(mask))
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"mask is a {type(mask).__name__}; expected one bool for each token (KV goes into kv)"
        ) from None
    if values.dtype != torch.bool and values.numel():
        raise ValueError(f"mask is {values.dtype}; expected bool (KV goes into kv)")
    if tuple(values.shape) != (tokens,):
        raise ValueError(
            f"mask has shape {list(values.shape)}; expected one value for each of {tokens} tokens"
        )
    false = tokens - int(values.sum())
    if bool(values[:false].any()):
        raise ValueError("mask has True before False; expected a run of False, then True")
    if false % chunk_size:
        raise ValueError(
            f"mask begins with {false} False; expected a multiple of the chunk size {chunk_size}:"
            " a chunk is stored and retrieved whole"
        )
    return false


def form_of(kv: Any) -> KVSource:
    """Return KV in one of the forms of :mod:`kvshelf.kv.sources`."""
    if isinstance(kv, Tensor):
        return BlobKV(kv)
    if isinstance(kv, Sequence) and not isinstance(kv, str | bytes):
        return TupleKV(kv)
    if hasattr(kv, "open") and not isinstance(kv, os.PathLike):
        return cast(KVSource, kv)
    raise ValueError(
        f"kv is a {type(kv).__name__}; expected PagedKV, (K, V) of each layer, or a tensor"
        " [2, layers, tokens, hidden]"
    )
