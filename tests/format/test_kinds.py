"""Kinds: names, shards, tensors and headers of window and state objects."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvshelf.errors import ConfigError, ObjectNameError
from kvshelf.format.invalid import WrongMetadata
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, KINDS, STATE, WINDOW, Kind, kind_key
from kvshelf.format.names import object_name, parse_object_name
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.format.tensors import StatePart, parse_state, state_fields
from tests.support.formats import hybrid_format, hybrid_record, sealed

#: The names that code accepted before there were kinds.
OLD_NAMES = re.compile(
    r"(?P<group>_|[0-9a-f]{16})/(?P<fan>[0-9a-f]{2})/(?P<key>(?P=fan)[0-9a-f]{62})"
    r"-(?P<index>0|[1-9][0-9]{0,9})(?:t(?P<tail>[1-9][0-9]{0,9}))?"
    r"-(?P<shard>0|[1-9][0-9]{0,9})of(?P<shards>[1-9][0-9]{0,9})\.safetensors",
    re.ASCII,
)


def chunk_of(fmt: ObjectFormat) -> Chunk:
    return KeyChain(fmt.namespace.digest, fmt.chunk_size).extend(range(fmt.chunk_size))[0]


def test_kind_keys_differ_and_full_keeps_its_key() -> None:
    key = bytes(range(32))
    assert kind_key(key, FULL) == key
    assert (kind_key(key, WINDOW), kind_key(key, STATE)) == (key + b"/window", key + b"/state")


@pytest.mark.parametrize("tail", [False, True])
def test_code_from_before_kinds_skips_the_new_names(tail: bool) -> None:
    chunk = Chunk(b"\xab" * 32, bytes(32), 12, 7, tail)
    full, *others = (object_name(chunk, 1, 4, kind) for kind in KINDS)
    assert full == object_name(chunk, 1, 4)
    assert OLD_NAMES.fullmatch(full)
    assert others == [full.replace("-1of", f"-{kind}-1of") for kind in (WINDOW, STATE)]
    for name, kind in zip(others, (WINDOW, STATE), strict=True):
        assert OLD_NAMES.fullmatch(name) is None
        parsed = parse_object_name(name)
        assert parsed is not None
        assert parsed.kind == kind


def test_an_unknown_kind_has_no_name() -> None:
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


def test_without_full_layers_the_first_kind_leads() -> None:
    fmt = hybrid_format(
        stages=[2],
        shards=2,
        state_shards=1,
        window_shards=2,
        **{
            name: hybrid_record()[name][2:4]
            for name in ("kinds", "layouts", "layer_names", "layer_shapes", "layer_dtypes")
        },
    )
    assert (fmt.kind, fmt.kinds, fmt.shards) == (WINDOW, (WINDOW, STATE), 2)


def test_each_kind_has_shards_of_the_stages_with_such_layers() -> None:
    fmt = hybrid_format()
    assert {kind: fmt.of(kind).shards for kind in KINDS} == {FULL: 4, WINDOW: 8, STATE: 2}
    numbers = {
        kind: [fmt.of(kind).layer_numbers(shard) for shard in range(fmt.of(kind).shards)]
        for kind in KINDS
    }
    assert numbers == {
        FULL: [(1,)] * 2 + [(4,)] * 2,
        WINDOW: [(2,)] * 4 + [(5,)] * 4,
        STATE: [(0, 3)] * 2,
    }
    with pytest.raises(ValueError, match="shard 2"):
        fmt.of(STATE).layer_numbers(2)


def test_states_have_a_tensor_for_each_part() -> None:
    fmt = hybrid_format().of(STATE)
    assert [(spec.name, spec.dtype, spec.shape) for spec in fmt.tensors(1)] == [
        ("layers.0.conv_q", "BF16", (3, 4)),
        ("layers.0.conv_k", "BF16", (3, 4)),
        ("layers.0.conv_v", "BF16", (3, 8)),
        ("layers.0.ssm", "F32", (2, 4, 4)),
        ("layers.3.conv", "F16", (2, 8)),
    ]
    assert fmt.payload_size(0) == 24 + 24 + 48 + 128 + 32
    assert fmt.tails
    assert fmt.tensors(0, 3, tail=True) == fmt.tensors(0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_of_a_tail_is_that_of_its_tensors(kind: Kind) -> None:
    # The window layers are canonical and native, the full ones canonical.
    fmt = hybrid_format().of(kind)
    for shard in range(fmt.shards):
        for tokens in range(1, fmt.chunk_size + 1):
            specs = fmt.tensors(shard, tokens)
            found = fmt.object_size(shard, tokens)
            assert found == fmt.data_offset + sum(spec.nbytes for spec in specs)


def test_undivided_states_are_stored_by_rank() -> None:
    fields = hybrid_record()
    layouts = ["state-tp2", *fields["layouts"][1:3], "state", *fields["layouts"][4:]]
    shapes = ["conv:3,32;ssm:4,4,4", *fields["layer_shapes"][1:]]
    dtypes = ["BF16;F32", *fields["layer_dtypes"][1:]]
    fmt = hybrid_format(layouts=layouts, layer_shapes=shapes, layer_dtypes=dtypes).of(STATE)
    assert [spec.shape for spec in fmt.tensors(0)] == [(3, 32), (4, 4, 4), (2, 8)]


@pytest.mark.parametrize("kind", KINDS)
def test_headers_name_the_kind_after_the_shards(kind: Kind) -> None:
    fmt = hybrid_format().of(kind)
    image = sealed(fmt, chunk_of(fmt))
    text = bytes(image[8 : fmt.data_offset]).decode()
    fields = list(json.loads(text)["__metadata__"])
    extra = [] if kind == FULL else ["kind"]
    assert fields[-2 - len(extra) :] == ["shards", *extra, "xxh3"]
    assert (f'"kind":"{kind}"' in text) == (kind != FULL)


def test_an_object_of_another_kind_in_its_place_is_named() -> None:
    """Two kinds whose objects have equal sizes and tensors' bytes."""
    same = hybrid_format(
        stages=[2],
        shards=1,
        window_shards=1,
        state_shards=None,
        kinds=["window", "full"],
        layouts=["canonical"] * 2,
        layer_names=["a", "b"],
        layer_shapes=["*,4"] * 2,
        layer_dtypes=["F16"] * 2,
    )
    chunk = chunk_of(same)
    image = sealed(same.of(WINDOW), chunk)
    with pytest.raises(WrongMetadata, match="kind"):
        same.verify_buffer(memoryview(image), chunk, 0)
    with pytest.raises(WrongMetadata, match=r"kind: found None, expected 'window'"):
        same.of(WINDOW).verify_buffer(memoryview(sealed(same, chunk)), chunk, 0)


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


def test_the_fields_of_a_state_have_an_inverse() -> None:
    parts = (
        StatePart("conv_q", "BF16", (3, 128), 1),
        StatePart("ring", "F16", (7,)),
        StatePart("ssm", "F32", (4, 64, 64), 0),
    )
    fields = state_fields(parts)
    assert fields == ("conv_q:3,128/;ring:7;ssm:4/,64,64", "BF16;F16;F32")
    assert parse_state(*fields) == parts


def test_the_record_keeps_its_bytes_in_the_order_of_its_fields() -> None:
    encoded = Namespace(hybrid_record()).encoded.decode()
    assert re.search(r'"format":.*"kinds":.*"shards":.*"state_shards":.*"window_shards":', encoded)
