"""Prompts, and their chunks."""

from __future__ import annotations

import random

import pytest

from kvshelf import PromptIdentity
from kvshelf.format.keys import Chunk, KeyChain, MultimodalItem
from kvshelf.format.objects import ObjectFormat

#: Calls a test with each kind of identity by which equal tokens have other KV.
any_identity = pytest.mark.parametrize(
    "identity",
    [
        PromptIdentity("tenant"),
        PromptIdentity(lora_digest=bytes(32)),
        PromptIdentity(items=[MultimodalItem("image", 0, 4)]),
    ],
    ids=["salt", "adapter", "image"],
)


def prompt(
    length: int, seed: int = 0, shared: int = 0, *, unit: int = 1, rest: int = 0
) -> list[int]:
    """Make random tokens, of which the first `shared` are the same for every seed.

    There are `length` times `unit` of them, and `rest` more: chunks of `unit` tokens, say.
    """
    common = random.Random("shared").choices(range(900), k=shared)
    own = length * unit + rest - shared
    return common + random.Random(seed).choices(range(900), k=own)


def make_chunks(fmt: ObjectFormat, count: int, seed: int = 0) -> list[Chunk]:
    """Make the chunks of a random prompt."""
    tokens = prompt(count, seed, unit=fmt.chunk_size)
    return KeyChain(fmt.namespace.digest, fmt.chunk_size).extend(tokens)


def make_tail(fmt: ObjectFormat, tokens: int = 3) -> Chunk:
    """Make the tail of a prompt of one chunk and a few tokens more."""
    chain = KeyChain(fmt.namespace.digest, fmt.chunk_size)
    chain.extend(prompt(1, unit=fmt.chunk_size, rest=tokens))
    tail = chain.tail()
    assert tail is not None
    return tail
