"""What a namespace record says of its objects: the layers, tensors and header texts of each kind.

Owns the dtypes, layouts and shapes that a record may give a layer, the reading of its fields about
layers, kinds, shards and stages (:func:`object_plans`), and the rule for the data offset.

Contracts
---------
* Everything is a pure function of the record.
* No payload, no storage, no torch, no vLLM. Safe to call from any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, cast

from kvshelf.errors import ConfigError
from kvshelf.format.keys import check_chunk_size
from kvshelf.format.kinds import FULL, KINDS, SHARDS_FIELDS, STATE, Kind, layers_by_kind
from kvshelf.format.namespace import FORMAT, FieldValue

#: Key of the metadata in a header.
METADATA: Final = "__metadata__"

#: The payload starts at a multiple of this many bytes.
PAYLOAD_ALIGNMENT: Final = 4096

#: Characters of a tensor's hash in a header.
HASH_CHARS: Final = 32

#: Largest payload of an object. Real ones are far smaller; a forged namespace may name any size.
_MAX_PAYLOAD: Final = 1 << 36

#: Most shards of a kind. Real namespaces have at most a few hundred; programs keep a few bytes for
#: each, and ask the storage for all shards of a chunk.
MAX_SHARDS: Final = 1 << 16

#: Bytes of one element of each dtype that a tensor of an object may have.
DTYPE_BYTES: Final[Mapping[str, int]] = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U8": 1,
}
_DTYPES: Final = ", ".join(DTYPE_BYTES)

_NATIVE: Final = re.compile(r"cpu-[A-Za-z0-9_]+-[A-Za-z0-9_]+-b([1-9][0-9]{0,8})", re.ASCII)
_WHOLE: Final = re.compile(r"(?:opaque|replicated)-[0-9a-f]{16}", re.ASCII)
_NUMBER: Final = r"([1-9][0-9]{0,14})"
_HEADS_SHAPE: Final = re.compile(rf"2,\*,{_NUMBER},{_NUMBER}", re.ASCII)
_CONTENT_SHAPE: Final = re.compile(rf"\*,{_NUMBER}", re.ASCII)
_BLOCKS_SHAPE: Final = re.compile(rf"{_NUMBER},{_NUMBER}", re.ASCII)

_STATE: Final = re.compile(r"state(?:-tp([1-9][0-9]{0,8}))?", re.ASCII)
_EXTENT: Final = r"[1-9][0-9]{0,14}/?"
_STATE_PART: Final = re.compile(rf"([a-z][a-z0-9_]*):({_EXTENT}(?:,{_EXTENT}){{0,7}})", re.ASCII)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an object.

    Attributes
    ----------
    name : str
        The layer's name; of a part of a state ``<layer>.<part>``.
    dtype : str
        safetensors dtype.
    shape : tuple[int, ...]
        Stored shape.
    nbytes : int
        Bytes of the tensor.
    offset : int
        First byte, counted from the start of the payload.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class StatePart:
    """One part of the state of a layer: a tensor that the layer keeps whatever the prompt's length.

    Attributes
    ----------
    name : str
        Name inside the layer, of ``[a-z0-9_]``, first a letter.
    dtype : str
        safetensors dtype.
    shape : tuple[int, ...]
        Shape in the whole model; of an undivided state in one rank.
    divided : int or None
        The dimension that is divided among the shards of a stage; None where none is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    divided: int | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer as the namespace record describes it."""

    name: str
    dtype: str
    form: str  # "heads", "content", "blocks", "state"
    heads: int = 0  # per shard
    width: int = 0  # head size, content, or bytes of a block
    blocks: int = 0  # of a native or opaque chunk, else 0
    block_size: int = 0  # of a native layout, else 0
    parts: tuple[StatePart, ...] = ()  # of a state, each with its shape in one shard


def required_field(record: Mapping[str, FieldValue], name: str) -> Any:
    """Return a field that is needed to lay out objects.

    Raises
    ------
    ConfigError
        If the record lacks it.
    """
    if name in record:
        return record[name]
    missing = f"field {name!r} is missing; objects cannot be laid out without it"
    raise ConfigError(f"namespace record: {missing}")


def native_block_size(layout: str) -> int | None:
    """Return the tokens in a block of a native layout id; None for ids of other kinds."""
    native = _NATIVE.fullmatch(layout)
    return None if native is None else int(native[1])


def shape_heads(shape: str) -> int | None:
    """Return the KV heads of a layer shape; None for shapes without heads."""
    match = _HEADS_SHAPE.fullmatch(shape)
    return None if match is None else int(match[1])


def state_fields(parts: Sequence[StatePart]) -> tuple[str, str]:
    """Return the entries of ``layer_shapes`` and ``layer_dtypes`` for a state layer.

    Examples
    --------
    >>> state_fields([StatePart("conv", "BF16", (3, 64), 1), StatePart("ssm", "F32", (4, 16), 0)])
    ('conv:3,64/;ssm:4/,16', 'BF16;F32')
    """
    shapes = (
        f"{part.name}:"
        + ",".join(
            f"{extent}/" if number == part.divided else str(extent)
            for number, extent in enumerate(part.shape)
        )
        for part in parts
    )
    return ";".join(shapes), ";".join(part.dtype for part in parts)


def parse_state(shape: str, dtype: str) -> tuple[StatePart, ...]:
    """Return the parts of a state layer: the inverse of :func:`state_fields`.

    Raises
    ------
    ConfigError
        If the entries of ``layer_shapes`` and ``layer_dtypes`` do not describe a state.
    """
    texts, dtypes = shape.split(";"), dtype.split(";")
    _check(
        len(texts) == len(dtypes), f"{len(texts)} parts in shape {shape!r}, {len(dtypes)} dtypes"
    )
    parts = []
    for text, dtype_text in zip(texts, dtypes, strict=True):
        match = _STATE_PART.fullmatch(text)
        if match is None or match[2].count("/") > 1:
            expected = "expected '<name>:<extents>', where at most one extent is followed by '/'"
            raise ConfigError(f"part {text!r} of a state, {expected}")
        _check_dtype(f"part {match[1]!r}:", dtype_text)
        extents = match[2].split(",")
        divided = next((n for n, extent in enumerate(extents) if extent[-1] == "/"), None)
        parts.append(
            StatePart(match[1], dtype_text, tuple(int(e.rstrip("/")) for e in extents), divided)
        )
    names = {part.name for part in parts}
    _check(len(names) == len(parts), f"shape {shape!r} names a part of a state twice")
    return tuple(parts)


def is_state(layout: str) -> bool:
    """Return whether `layout` is the id of a state's layout."""
    return _STATE.fullmatch(layout) is not None


def parse_layer(
    name: str, layout: str, shape: str, dtype: str, split: int, chunk_size: int
) -> Layer:
    """Check and decode one layer's fields of the namespace record."""
    try:
        if is_state(layout):
            return Layer(name, dtype, "state", parts=_divided_parts(layout, shape, dtype, split))
        _check_dtype("its", dtype)
        return _parse_layer(name, layout, shape, dtype, split, chunk_size)
    except ConfigError as error:
        raise ConfigError(f"layer {name!r}: {error}") from None


def _divided_parts(layout: str, shape: str, dtype: str, split: int) -> tuple[StatePart, ...]:
    """Return the parts of a state layer, each with its shape in one shard."""
    match = _STATE.fullmatch(layout)
    assert match is not None
    parts, ranks = list(parse_state(shape, dtype)), match[1]
    needed = f"layout {layout} needs {ranks} shards in each stage, found {split}"
    _check(ranks is None or int(ranks) == split, needed)
    for number, part in enumerate(parts):
        at, label = part.divided, f"part {part.name!r} with layout {layout}"
        extents = "one divided extent" if ranks is None else "no divided extent"
        _check((at is None) == (ranks is not None), f"{label}: expected {extents} ('/')")
        if at is not None:
            extent = part.shape[at]
            _check(extent % split == 0, f"{label}: {extent} cannot be split over {split} shards")
            divided = (*part.shape[:at], extent // split, *part.shape[at + 1 :])
            parts[number] = replace(part, shape=divided)
    return tuple(parts)


def _parse_layer(
    name: str, layout: str, shape: str, dtype: str, split: int, chunk_size: int
) -> Layer:
    if _WHOLE.fullmatch(layout):
        blocks = _BLOCKS_SHAPE.fullmatch(shape)
        if blocks is None or dtype != "U8":
            given = f"found {dtype} and {shape!r}"
            raise ConfigError(f"{layout} needs dtype U8 and shape '<blocks>,<bytes>', {given}")
        if layout.startswith("replicated-"):
            _check_not_split(split)
        return Layer(name, dtype, "blocks", 1, int(blocks[2]), int(blocks[1]))
    block_size = native_block_size(layout)
    _check(
        layout == "canonical" or block_size is not None,
        f"layout {layout!r}, expected 'canonical', 'cpu-<packing>-<dtype>-b<block size>',"
        " 'opaque-<16 hex>', 'replicated-<16 hex>', 'state' or 'state-tp<ranks>'",
    )
    shape_of_heads = _HEADS_SHAPE.fullmatch(shape)
    if shape_of_heads is not None:
        heads, head_size = int(shape_of_heads[1]), int(shape_of_heads[2])
        advice = f"set `shards` so that each stage has a divisor of {heads}"
        _check(heads % split == 0, f"{heads} KV heads in {split} shards of a stage; {advice}")
        if block_size is None:
            return Layer(name, dtype, "heads", heads // split, head_size)
        _check(
            chunk_size % block_size == 0,
            f"chunk size {chunk_size} is not a multiple of the block size {block_size} of layout"
            f" {layout}; use layout 'canonical' or another chunk size",
        )
        blocks_of_chunk = chunk_size // block_size
        return Layer(name, dtype, "heads", heads // split, head_size, blocks_of_chunk, block_size)
    content = _CONTENT_SHAPE.fullmatch(shape)
    if content is None or block_size is not None:
        expected = "'2,*,<heads>,<head size>'" + ("" if block_size else " or '*,<content>'")
        raise ConfigError(f"shape {shape!r} does not fit layout {layout}; expected {expected}")
    _check_not_split(split)
    return Layer(name, dtype, "content", 1, int(content[1]))


def _check_dtype(where: str, dtype: str) -> None:
    _check(dtype in DTYPE_BYTES, f"{where} dtype {dtype!r}, expected one of {_DTYPES}")


def _check_not_split(split: int) -> None:
    advice = "set `shards` to the number of stages"
    _check(split == 1, f"a layer without heads in {split} shards of a stage; {advice}")


def _check(is_right: bool, problem: str) -> None:
    if not is_right:
        raise ConfigError(problem)


class ObjectPlan:
    """The layers of one kind in each stage that has some, and the headers of their objects."""

    def __init__(
        self,
        kind: Kind,
        shards: int,
        stages: Sequence[Sequence[Layer]],
        numbers: Sequence[Sequence[int]],
        chunk_size: int,
    ) -> None:
        self.kind = kind
        self.shards = shards
        self.split = shards // len(stages)
        #: Only the stages that have layers of this kind.
        self.stages = stages
        #: Numbers in the record of the layers of each of these stages.
        self.numbers = [tuple(stage) for stage in numbers]
        self.chunk_size = chunk_size
        self.tails = all(layer.form != "blocks" for stage in self.stages for layer in stage)
        #: Bytes of the payload of a whole chunk, by stage.
        self.payload_bytes = [
            sum(spec.nbytes for spec in self.specs(stage * self.split, chunk_size, True))
            for stage in range(len(stages))
        ]
        largest = max(self.payload_bytes)
        advice = "make the chunk size smaller or take more shards"
        excess = f"an object would hold {largest} bytes, more than {_MAX_PAYLOAD}"
        _check_record(largest <= _MAX_PAYLOAD, f"{excess}; {advice}")

    def specs(self, shard: int, tokens: int, native: bool) -> tuple[TensorSpec, ...]:
        """Lay out one object; `native` selects the stored form where a layer has two."""
        specs = []
        offset = 0
        for layer in self.stages[shard // self.split]:
            for name, dtype, shape in _stored(layer, tokens, native):
                nbytes = prod(shape) * DTYPE_BYTES[dtype]
                specs.append(TensorSpec(name, dtype, shape, nbytes, offset))
                offset += nbytes
        return tuple(specs)

    def parts(
        self, digest: str, shard: int, tokens: int, specs: Sequence[TensorSpec]
    ) -> tuple[bytes, bytes, bytes]:
        """Return the header's text before the key, from tokens to hashes, and after the hashes."""
        tensors = ",".join(
            f'{json.dumps(spec.name, ensure_ascii=False)}:{{"dtype":"{spec.dtype}",'
            f'"shape":[{",".join(map(str, spec.shape))}],'
            f'"data_offsets":[{spec.offset},{spec.offset + spec.nbytes}]}}'
            for spec in specs
        )
        kind = "" if self.kind == FULL else f',"kind":"{self.kind}"'
        return (
            f'{{"{METADATA}":{{"format":"{FORMAT}","namespace":"{digest}","key":"'.encode(),
            f'","tokens":"{tokens}","shard":"{shard}","shards":"{self.shards}"{kind},"xxh3":"'.encode(),
            f'"}},{tensors}}}'.encode(),
        )

    def longest_header(self, tails: bool) -> int:
        """Return the length of the longest header, in bytes; `tails`: whether tails can be."""
        longest = 0
        # Within a stage, headers differ only in the digits of the shard.
        for shard in range(self.split - 1, self.shards, self.split):
            for native in (True, False) if tails else (True,):
                specs = self.specs(shard, self.chunk_size, native)
                parts = self.parts("0" * 64, shard, self.chunk_size, specs)
                of_chunk = between_key_and_tokens(b"\0" * 32, b"\0" * 32, 2**32 - 1)
                hash_chars = len(specs) * (HASH_CHARS + 1) - 1
                longest = max(longest, sum(map(len, (*parts, of_chunk))) + hash_chars)
        return longest


def _stored(layer: Layer, tokens: int, native: bool) -> Iterable[tuple[str, str, tuple[int, ...]]]:
    """Yield name, dtype and shape of each tensor of a layer."""
    if layer.form == "state":
        for part in layer.parts:
            yield f"{layer.name}.{part.name}", part.dtype, part.shape
    elif layer.form == "blocks":
        yield layer.name, layer.dtype, (layer.blocks, layer.width)
    elif layer.form == "content":
        yield layer.name, layer.dtype, (tokens, layer.width)
    elif layer.block_size and native:
        size = 2 * layer.block_size * layer.width * DTYPE_BYTES[layer.dtype]
        yield layer.name, "U8", (layer.blocks, layer.heads, size)
    else:
        yield layer.name, layer.dtype, (2, tokens, layer.heads, layer.width)


def object_plans(record: Mapping[str, FieldValue]) -> dict[Kind, ObjectPlan]:
    """Return the plans of the kinds that a record has, in the order of KINDS.

    Raises
    ------
    ConfigError
        If a field is missing, or fields contradict each other.
    """
    chunk_size = check_chunk_size(required_field(record, "chunk_size"))
    stages: list[int] = list(required_field(record, "stages"))
    names: list[str] = list(required_field(record, "layer_names"))
    lists = {
        field: list(required_field(record, field))
        for field in ("layouts", "layer_shapes", "layer_dtypes")
    }
    kinds: list[str] = list(cast("Sequence[str]", record.get("kinds", [FULL] * len(names))))
    _check_record(
        bool(stages) and min(stages) >= 1 and sum(stages) == len(names),
        f"stages {stages} do not cover {len(names)} layer_names",
    )
    for field, values in {**lists, "kinds": kinds}.items():
        counts = f"{len(values)} entries for {len(names)} layers"
        _check_record(len(values) == len(names), f"{field} has {counts}")
    are_names = len({*names} - {METADATA, ""}) == len(names)
    _check_record(are_names, "layer_names must be unique and not empty")
    layers = record.get("layers", len(names))
    _check_record(layers == len(names), f"layers is {layers}, but there are {len(names)} names")
    _check_kinds(kinds, lists["layouts"], "kinds" in record)
    layouts, shapes, dtypes = lists.values()
    fields = list(zip(names, layouts, shapes, dtypes, strict=True))
    members = layers_by_kind(stages, kinds)
    shards = _shards(record, list(members))
    plans = {}
    for kind, layers_of_kind in members.items():
        numbers = list(layers_of_kind.values())
        _check_record(
            1 <= shards[kind] <= MAX_SHARDS and shards[kind] % len(numbers) == 0,
            f"{SHARDS_FIELDS[kind]} is {shards[kind]}, expected a positive multiple of the"
            f" {len(numbers)} stages with layers of kind {kind}, and at most {MAX_SHARDS}",
        )
        split = shards[kind] // len(numbers)
        parsed = [[parse_layer(*fields[n], split, chunk_size) for n in stage] for stage in numbers]
        plans[kind] = ObjectPlan(kind, shards[kind], parsed, numbers, chunk_size)
    return plans


def _check_record(is_right: bool, problem: str) -> None:
    _check(is_right, f"namespace record: {problem}")


def _check_kinds(kinds: Sequence[str], layouts: Sequence[str], stated: bool) -> None:
    for kind, layout in zip(kinds, layouts, strict=True):
        _check_record(kind in KINDS, f"kind {kind!r}, expected one of {', '.join(KINDS)}")
        _check_record(
            (kind == STATE) == is_state(layout),
            f"a layer of kind {kind} has layout {layout!r}; layers of kind state, and only those,"
            " have layout 'state' or 'state-tp<ranks>'",
        )
    if stated and set(kinds) == {FULL}:
        raise ConfigError(
            "namespace record: all layers are of kind full: leave out the field kinds"
        )


def _shards(record: Mapping[str, FieldValue], kinds: Sequence[Kind]) -> dict[Kind, int]:
    """Return the shards of each of the record's kinds."""
    for kind, field in SHARDS_FIELDS.items():
        problem = "is missing" if kind in kinds else f"is given, but no layer is of kind {kind}"
        is_right = kind == FULL or (kind in kinds) == (field in record)
        _check_record(is_right, f"{field} {problem}")
    shards: dict[Kind, int] = {kind: required_field(record, SHARDS_FIELDS[kind]) for kind in kinds}
    stated, first = required_field(record, "shards"), shards[kinds[0]]
    _check_record(stated == first, f"shards is {stated}, expected {first}, as of kind {kinds[0]}")
    return shards


def data_offset_of(plans: Mapping[Kind, ObjectPlan]) -> int:
    """Return the smallest aligned offset after the longest header of a namespace."""
    tails = all(plan.tails for plan in plans.values())
    longest = max(plan.longest_header(tails) for plan in plans.values())
    return -(-(8 + longest) // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT


def between_key_and_tokens(key: bytes, parent: bytes, index: int) -> bytes:
    """Return the header's text from the key to the chunk index."""
    return f'{key.hex()}","parent":"{parent.hex()}","chunk":"{index}'.encode()
