"""Chunk keys: what the golden vectors and a second implementation say, and what users notice."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.errors import ConfigError, ObjectNameError
from kvshelf.format.keys import Chunk, KeyChain, MultimodalItem, salt_group_of
from tests.format.golden_format import VECTORS, reference

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TOKENS = st.integers(0, 2**32 - 1)
ITEMS = st.lists(st.tuples(TEXT, st.integers(0, 60), st.integers(1, 50)), max_size=5)


@pytest.mark.parametrize("vector", VECTORS["keys"])
def test_golden_keys(vector: dict[str, Any]) -> None:
    chain = KeyChain(
        bytes.fromhex(vector["namespace_digest"]),
        vector["chunk_size"],
        salt=vector.get("salt", ""),
        lora_digest=bytes.fromhex(vector.get("lora", "")),
        items=[MultimodalItem(*item) for item in vector.get("items", [])],
    )
    chain.extend(vector["tokens"])
    tail = chain.tail()
    assert chain.root.hex() == vector["root"]
    assert [chunk.key.hex() for chunk in chain.chunks] == vector["keys"]
    assert (tail.key.hex() if tail else None) == vector["tail"]


@given(
    tokens=st.lists(TOKENS, max_size=60),
    chunk_size=st.integers(1, 9),
    salt=TEXT,
    lora=st.sampled_from([b"", bytes(32), bytes(range(32))]),
    items=ITEMS,
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_keys_as_the_second_implementation_makes_them(
    tokens: list[int],
    chunk_size: int,
    salt: str,
    lora: bytes,
    items: list[tuple[str, int, int]],
    cuts: list[int],
) -> None:
    digest = hashlib.sha256(b"namespace").digest()
    root, keys, tail_key = reference.chain(digest, chunk_size, tokens, salt, lora, items)
    chain = KeyChain(
        digest,
        chunk_size,
        salt=salt,
        lora_digest=lora,
        items=[MultimodalItem(*item) for item in items],
        salt_group="0123456789abcdef",
    )
    completed = []
    places = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, end in itertools.pairwise(places):
        completed += chain.extend(tokens[start:end])
        chain.tail()
        assert chain.tokens == end
    assert completed == chain.chunks
    assert [chunk.key for chunk in chain.chunks] == keys
    assert [chunk.parent for chunk in chain.chunks] == [root, *keys][: len(keys)]
    assert [chunk.index for chunk in chain.chunks] == list(range(len(keys)))
    assert all(c.tokens == chunk_size and not c.tail for c in chain.chunks)
    tail = chain.tail()
    if tail_key is None:
        assert tail is None
    else:
        parent = [root, *keys][len(keys)]
        count = len(tokens) % chunk_size
        assert tail == Chunk(tail_key, parent, len(keys), count, True, "0123456789abcdef")


@given(
    tokens=st.lists(TOKENS, min_size=1, max_size=60),
    chunk_size=st.integers(2, 9),
    items=ITEMS,
    data=st.data(),
)
def test_tail_of_a_part_of_a_prompt_is_that_of_a_prompt_that_ends_there(
    tokens: list[int], chunk_size: int, items: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    known = [MultimodalItem(*item) for item in items]
    whole = KeyChain(bytes(32), chunk_size, items=known)
    whole.extend(tokens)
    ends = [end for end in range(1, len(tokens) + 1) if end % chunk_size]
    end = data.draw(st.sampled_from(ends))
    part = KeyChain(bytes(32), chunk_size, items=known)
    part.extend(tokens[:end])
    index = end // chunk_size
    assert whole.tail_after(index, tokens[index * chunk_size : end]) == part.tail()
    assert whole.tokens == len(tokens)


def test_tail_is_shorter_than_a_chunk_and_follows_chunks_that_are_known() -> None:
    chain = KeyChain(bytes(32), 4)
    chain.extend(range(9))
    for index, tokens, problem in [
        (2, [], "a tail of 0 tokens: expected 1 to 3"),
        (2, [1, 2, 3, 4], "a tail of 4 tokens: expected 1 to 3"),
        (3, [1], "a tail after 3 chunks: the prompt has 2"),
        (-1, [1], "a tail after -1 chunks"),
        (2, [1, -1], "token 9 is -1"),
    ]:
        with pytest.raises(ValueError, match=problem):
            chain.tail_after(index, tokens)


@pytest.mark.parametrize(
    "other",
    [
        {"digest": bytes(31) + b"\1"},
        {"salt": "t"},
        {"lora_digest": bytes(32)},
        {"items": [MultimodalItem("h", 7, 1)]},
        {"items": [MultimodalItem("h", 0, 1)]},
        {"tokens": [0, 1, 2, 3, 4, 5, 6, 8]},
        {"tokens": [1, 1, 2, 3, 4, 5, 6, 7]},
    ],
)
def test_whatever_decides_kv_values_changes_the_key(other: dict[str, Any]) -> None:
    def last(tokens: list[int], digest: bytes = bytes(32), **options: Any) -> bytes:
        chain = KeyChain(digest, 4, **options)
        return chain.extend(tokens)[-1].key

    base: dict[str, Any] = {"tokens": [0, 1, 2, 3, 4, 5, 6, 7]}
    assert last(**base) != last(**{**base, **other})


@pytest.mark.parametrize("token", [-1, 2**32, 1.0, "1", None, 10**30])
def test_tokens_out_of_range_are_named_and_change_nothing(token: Any) -> None:
    chain = KeyChain(bytes(32), 4)
    chain.extend([1, 2, 3, 4, 5])
    before = [*chain.chunks]
    with pytest.raises(ValueError, match=r"token 11 is "):
        chain.extend([6, 7, 8, 9, 10, 11, token])
    assert chain.chunks == before
    assert chain.tokens == 5
    chain.extend([6, 7, 8])
    whole = KeyChain(bytes(32), 4)
    whole.extend([1, 2, 3, 4, 5, 6, 7, 8])
    assert chain.chunks == whole.chunks


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"namespace_digest": b"short"}, ValueError),
        ({"lora_digest": b"short"}, ValueError),
        ({"chunk_size": 0}, ConfigError),
        ({"chunk_size": 2**32}, ConfigError),
        ({"chunk_size": "256"}, ConfigError),
        ({"salt_group": "tenant"}, ObjectNameError),
        ({"items": [MultimodalItem("h", -1, 4)]}, ValueError),
        ({"items": [MultimodalItem("h", 0, -4)]}, ValueError),
    ],
)
def test_chains_that_cannot_be_are_refused(arguments: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        KeyChain(**{"namespace_digest": bytes(32), "chunk_size": 4, **arguments})


def test_salt_group_is_the_first_digits_of_the_salts_digest() -> None:
    assert salt_group_of("tenant") == hashlib.sha256(b"tenant").hexdigest()[:16]
    assert salt_group_of("") == "_"
