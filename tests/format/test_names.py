"""Object names: what the golden vectors and a second implementation say, and their inverse."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.errors import ObjectNameError
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import KINDS
from kvshelf.format.names import (
    ParsedName,
    object_name,
    parse_object_name,
    parse_path,
)
from tests.format.golden_format import VECTORS, reference

KEYS = st.binary(min_size=32, max_size=32)
GROUPS = st.one_of(st.just("_"), st.binary(min_size=8, max_size=8).map(bytes.hex))


@pytest.mark.parametrize("vector", VECTORS["names"])
def test_golden_names(vector: dict[str, Any]) -> None:
    tail = vector["tail"]
    chunk = Chunk(
        bytes.fromhex(vector["key"]),
        bytes(32),
        vector["index"],
        tail or 256,
        tail is not None,
        vector["group"],
    )
    kind = vector.get("kind", "full")
    assert object_name(chunk, vector["shard"], vector["shards"], kind) == vector["name"]


@given(KEYS, st.integers(0, 2**32 - 1), st.none() | st.integers(1, 2**32 - 1), GROUPS, st.data())
def test_names_and_their_inverse(
    key: bytes, index: int, tail: int | None, group: str, data: st.DataObject
) -> None:
    shards = data.draw(st.integers(1, 2**32 - 1))
    shard = data.draw(st.integers(0, shards - 1))
    chunk = Chunk(key, bytes(32), index, tail or 256, tail is not None, group)
    kind = data.draw(st.sampled_from(KINDS))
    name = object_name(chunk, shard, shards, kind)
    assert name == reference.object_name(group, key, index, tail, shard, shards, kind)
    assert parse_object_name(name) == ParsedName(key, index, shard, shards, tail, group, kind=kind)
    folder = f"llama-3.1-8b-{key.hex()[:16]}"
    assert parse_path(f"{folder}/{name}") == ParsedName(
        key, index, shard, shards, tail, group, folder, kind
    )
    assert parse_path(name) is None
    assert parse_object_name(f"{folder}/{name}") is None


KEY = "ab" * 32
GOOD = f"_/ab/{KEY}-12t7-0of8.safetensors"


@pytest.mark.parametrize(
    "name",
    [
        "",
        GOOD + "\n",
        " " + GOOD,
        "/" + GOOD,
        GOOD.replace("ab", "AB"),
        GOOD.replace("/ab/", "/ac/"),
        GOOD.replace("_/", ""),
        GOOD.replace("_/", "__/"),
        GOOD.replace("_/", "0123456789ABCDEF/"),
        GOOD.replace("-12", "-012"),
        GOOD.replace("-12", "-"),
        GOOD.replace("-12", "-+12"),
        GOOD.replace("-12", "-1_2"),
        GOOD.replace("-12", "-١٢"),
        GOOD.replace("-12", "-4294967296"),
        GOOD.replace("t7", "t0"),
        GOOD.replace("t7", "t07"),
        GOOD.replace("t7", "t"),
        GOOD.replace("t7", "t4294967296"),
        GOOD.replace("t7", "T7"),
        GOOD.replace("0of8", "8of8"),
        GOOD.replace("0of8", "0of0"),
        GOOD.replace("0of8", "00of8"),
        GOOD.replace("0of8", "0of08"),
        GOOD.replace("t7", "t7-full"),
        GOOD.replace("t7", "t7-Window"),
        GOOD.replace("t7", "t7-state-window"),
        GOOD.replace("t7", "-windowt7"),
        GOOD.replace("0of8", "0of8-state"),
        GOOD.replace(".safetensors", ".safetensor"),
        GOOD + ".tmp",
        f"_/ab/.{KEY}-12-0of8.safetensors.0123456789abcdef.tmp",
        "namespace.json",
        ".kvshelf/pins/x",
    ],
)
def test_foreign_names_are_not_objects(name: str) -> None:
    assert parse_object_name(GOOD) is not None
    assert parse_object_name(name) is None


@given(
    st.text(max_size=40)
    | st.from_regex(r"_/ab/(ab){32}-[0-9t]{1,4}(-window|-state)?-[0-9]of[0-9]\.safetensors")
)
def test_name_that_parses_is_spelled_as_we_spell_it(name: str) -> None:
    parsed = parse_object_name(name)
    if parsed is not None:
        tail = parsed.tail_tokens
        chunk = Chunk(parsed.key, bytes(32), parsed.index, tail or 1, bool(tail), parsed.salt_group)
        assert object_name(chunk, parsed.shard, parsed.shards, parsed.kind) == name


@pytest.mark.parametrize(
    ("chunk", "shard", "shards"),
    [
        (Chunk(bytes(32), bytes(32), 0, 4), 1, 1),
        (Chunk(bytes(32), bytes(32), 0, 4), -1, 1),
        (Chunk(bytes(32), bytes(32), 0, 4), 0, 2**32),
        (Chunk(bytes(31), bytes(32), 0, 4), 0, 1),
        (Chunk(bytes(32), bytes(32), 2**32, 4), 0, 1),
        (Chunk(bytes(32), bytes(32), 0, 0, True), 0, 1),
        (Chunk(bytes(32), bytes(32), 0, 4, False, "../../etc"), 0, 1),
    ],
)
def test_names_that_cannot_be_are_refused(chunk: Chunk, shard: int, shards: int) -> None:
    with pytest.raises(ObjectNameError):
        object_name(chunk, shard, shards)
