"""Kinds: names, shards, tensors and headers of window and state objects."""

from __future__ import annotations

from typing import Any

import pytest

from kvshelf.errors import ConfigError, ObjectNameError
from kvshelf.format.differences import differing_fields
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, KINDS, STATE, WINDOW, kind_key, kind_of_key
from kvshelf.format.names import object_name, parse_object_name
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from tests.support.formats import hybrid_format, hybrid_record


def chunk_of(fmt: ObjectFormat) -> Chunk:
    return KeyChain(fmt.namespace.digest, fmt.chunk_size).extend(range(fmt.chunk_size))[0]


def test_unknown_kind_has_no_name() -> None:
    other: Any = "draft"
    with pytest.raises(ObjectNameError, match="draft"):
        object_name(Chunk(bytes(32), bytes(32), 0, 4), 0, 1, other)


def test_formats_of_all_kinds_are_one_family() -> None:
    fmt = hybrid_format()
    assert (fmt.kind, fmt.kinds) == (FULL, KINDS)
    for kind in KINDS:
        other = fmt.of(kind)
        assert other.kind == kind
        assert other is fmt.of(kind) is fmt.of(WINDOW).of(kind)
        assert other.data_offset == fmt.data_offset
        assert other.namespace is fmt.namespace
    assert fmt.of(FULL) is fmt
    assert ObjectFormat(fmt.namespace, STATE).kind == STATE
    plain = hybrid_format(
        kinds=None,
        window_shards=None,
        state_shards=None,
        stages=[1, 1],
        shards=2,
        layouts=["canonical"] * 2,
        layer_names=["a", "b"],
        layer_shapes=["*,4"] * 2,
        layer_dtypes=["F16"] * 2,
    )
    assert (plain.kinds, plain.of(FULL)) == ((FULL,), plain)
    with pytest.raises(ConfigError, match="no layers of kind 'state'"):
        plain.of(STATE)
    with pytest.raises(ConfigError, match="no layers of kind 'window'"):
        ObjectFormat(plain.namespace, WINDOW)


def test_names_belong_to_their_kind() -> None:
    fmt = hybrid_format()
    chunk = chunk_of(fmt)
    parsed = parse_object_name(object_name(chunk, 0, fmt.of(STATE).shards, STATE))
    assert parsed is not None
    assert fmt.of(STATE).named_chunk(parsed, chunk.parent) == chunk
    with pytest.raises(ObjectNameError, match="kind state, expected full"):
        fmt.named_chunk(parsed)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kinds": ["full"] * 5}, "kinds has 5 entries"),
        ({"kinds": ["draft"] + ["full"] * 5}, "kind 'draft'"),
        ({"kinds": ["full"] * 6}, "kind full has layout 'state'"),
        ({"kinds": ["state"] * 6}, "kind state has layout 'canonical'"),
        ({"window_shards": None}, "window_shards is missing"),
        ({"state_shards": None}, "state_shards is missing"),
        ({"window_shards": 3}, "multiple of the 2 stages with layers of kind window"),
        ({"state_shards": 0}, "state_shards is 0"),
        ({"state_shards": 3}, "cannot be split over 3 shards"),
        ({"window_shards": 16}, "4 KV heads"),
        ({"shards": 8}, "2 KV heads"),
        ({"data_offset": 8192}, "data_offset"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hybrid_format(**fields)


def test_kinds_are_left_out_where_all_are_full() -> None:
    fields: dict[str, Any] = {
        "stages": [2], "shards": 1, "kinds": ["full", "full"], "layouts": ["canonical"] * 2,
        "layer_names": ["a", "b"], "layer_shapes": ["*,4"] * 2, "layer_dtypes": ["F16"] * 2,
        "window_shards": None, "state_shards": None,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="leave out the field kinds"):
        hybrid_format(**fields)
    with pytest.raises(ConfigError, match="no layer is of kind window"):
        hybrid_format(**{**fields, "kinds": None, "window_shards": 1})


@pytest.mark.parametrize(
    ("layout", "shape", "dtype", "message"),
    [
        ("state", "conv:3,32", "BF16", "expected one divided extent"),
        ("state", "conv:3/,32/", "BF16", "at most one extent"),
        ("state", "conv:3,32/", "BF16;F32", "1 parts in shape"),
        ("state", "conv:3,32/;conv:3,32/", "BF16;BF16", "twice"),
        ("state", "conv:3,32/", "I8", "dtype 'I8'"),
        ("state", "Conv:3,32/", "BF16", "part 'Conv:3,32/'"),
        ("state", "conv:03,32/", "BF16", "part"),
        ("state", "conv:", "BF16", "part"),
        ("state", "conv:32/ ", "BF16", "part"),
        ("state", "conv:1,1,1,1,1,1,1,1,2/", "BF16", "part"),
        ("state", "2,*,2,8", "BF16", "part"),
        ("state-tp2", "conv:3,32/", "BF16", "expected no divided extent"),
        ("state-tp4", "conv:3,32", "BF16", "needs 4 shards in each stage, found 2"),
        ("state-tp0", "conv:3,32", "BF16", "kind state has layout"),
        ("state", "conv:100000000000000,100000000000000/", "BF16", "an object would hold"),
    ],
)
def test_states_that_cannot_be_are_refused(
    layout: str, shape: str, dtype: str, message: str
) -> None:
    record = hybrid_record()
    with pytest.raises(ConfigError, match=message):
        hybrid_format(
            layouts=[layout, *record["layouts"][1:]],
            layer_shapes=[shape, *record["layer_shapes"][1:]],
            layer_dtypes=[dtype, *record["layer_dtypes"][1:]],
        )


def test_each_kind_of_a_chunk_has_a_key_of_its_own() -> None:
    keys = {kind: kind_key(bytes(32), kind) for kind in KINDS}
    assert len(set(keys.values())) == len(KINDS)
    assert [kind_of_key(key) for key in keys.values()] == list(keys)


@pytest.mark.parametrize("name", ["own", "other"])
def test_field_that_one_of_two_records_lacks_differs(name: str) -> None:
    short, long = Namespace(hybrid_record(), "a"), Namespace(hybrid_record(version="x"), "a")
    pair = (long, short) if name == "own" else (short, long)
    assert differing_fields(*pair) == ["version"]
