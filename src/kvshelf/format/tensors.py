"""The layers that a namespace record describes, and the tensors of their objects.

Owns the dtypes, layouts and shapes that a record may give a layer, and their parser.
No torch, no storage, no vLLM. Safe to call from any thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvshelf.errors import ConfigError
from kvshelf.format.namespace import FieldValue

#: Bytes of one element of each dtype that a tensor of an object may have.
DTYPE_BYTES: Final[Mapping[str, int]] = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U8": 1,
}

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
    heads: int  # per shard
    width: int  # head size, content, or bytes of a block
    blocks: int  # of a native or opaque chunk, else 0
    block_size: int  # of a native layout, else 0
    parts: tuple[StatePart, ...] = ()  # of a state, each with its shape in one shard


def required_field(record: Mapping[str, FieldValue], name: str) -> Any:
    """Return a field that is needed to lay out objects.

    Raises
    ------
    ConfigError
        If the record lacks it.
    """
    try:
        return record[name]
    except KeyError:
        raise ConfigError(
            f"namespace record: field {name!r} is missing; objects cannot be laid out without it"
        ) from None


def native_block_size(layout: str) -> int | None:
    """Return the tokens in a block of a native layout id; None for ids of other kinds."""
    native = _NATIVE.fullmatch(layout)
    return None if native is None else int(native[1])


def shape_heads(shape: str) -> int | None:
    """Return the KV heads of a layer shape; None for shapes without heads."""
    found = _HEADS_SHAPE.fullmatch(shape)
    return None if found is None else int(found[1])


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
    if len(texts) != len(dtypes):
        raise ConfigError(f"{len(texts)} parts in shape {shape!r}, but {len(dtypes)} dtypes")
    parts = []
    for text, each in zip(texts, dtypes, strict=True):
        found = _STATE_PART.fullmatch(text)
        if found is None or found[2].count("/") > 1:
            raise ConfigError(
                f"part {text!r} of a state, expected '<name>:<extents>', where at most one extent "
                "is followed by '/'"
            )
        _check_dtype(f"part {found[1]!r}", each)
        extents = found[2].split(",")
        divided = next((n for n, extent in enumerate(extents) if extent[-1] == "/"), None)
        parts.append(StatePart(found[1], each, tuple(int(e.rstrip("/")) for e in extents), divided))
    if len({part.name for part in parts}) != len(parts):
        raise ConfigError(f"shape {shape!r} names a part of a state twice")
    return tuple(parts)


def is_state(layout: str) -> bool:
    """Return whether `layout` is the id of a state's layout."""
    return _STATE.fullmatch(layout) is not None


def _parse_state_layer(name: str, layout: str, shape: str, dtype: str, split: int) -> Layer:
    where = f"layer {name!r}"
    found = _STATE.fullmatch(layout)
    assert found is not None
    ranks = None if found[1] is None else int(found[1])
    try:
        parts = parse_state(shape, dtype)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if ranks not in (None, split):
        raise ConfigError(
            f"{where}: layout {layout} needs {ranks} shards in each stage, found {split}"
        )
    pieces = []
    for part in parts:
        if (part.divided is None) == (ranks is None):
            raise ConfigError(
                f"{where}: part {part.name!r} with layout {layout}: expected "
                + ("one divided extent ('/')" if ranks is None else "no divided extent ('/')")
            )
        if part.divided is not None:
            extent = part.shape[part.divided]
            if extent % split:
                raise ConfigError(
                    f"{where}: {extent} of part {part.name!r} cannot be split over {split} shards "
                    "of a stage"
                )
            at = part.divided
            part = replace(part, shape=(*part.shape[:at], extent // split, *part.shape[at + 1 :]))
        pieces.append(part)
    return Layer(name, dtype, "state", 0, 0, 0, 0, tuple(pieces))


def _check_dtype(where: str, dtype: str) -> None:
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"{where}: dtype {dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")


def parse_layer(
    name: str, layout: str, shape: str, dtype: str, split: int, chunk_size: int
) -> Layer:
    """Check and decode one layer's fields of the namespace record."""
    if is_state(layout):
        return _parse_state_layer(name, layout, shape, dtype, split)
    where = f"layer {name!r}"
    _check_dtype(where, dtype)
    block_size = native_block_size(layout)
    if _WHOLE.fullmatch(layout):
        found = _BLOCKS_SHAPE.fullmatch(shape)
        if found is None or dtype != "U8":
            raise ConfigError(
                f"{where}: layout {layout} needs dtype U8 and shape '<blocks>,<bytes>', "
                f"found {dtype} and {shape!r}"
            )
        if layout.startswith("replicated-"):
            _check_not_split(where, split)
        return Layer(name, dtype, "blocks", 1, int(found[2]), int(found[1]), 0)
    if layout != "canonical" and block_size is None:
        raise ConfigError(
            f"{where}: layout {layout!r}, expected 'canonical', 'cpu-<packing>-<dtype>-b<block "
            "size>', 'opaque-<16 hex>', 'replicated-<16 hex>', 'state' or 'state-tp<ranks>'"
        )
    heads_shape = _HEADS_SHAPE.fullmatch(shape)
    if heads_shape is not None:
        heads, head_size = int(heads_shape[1]), int(heads_shape[2])
        if heads % split:
            raise ConfigError(
                f"{where}: {heads} KV heads cannot be split over {split} shards of a stage; set "
                f"`shards` so that each stage has a divisor of {heads}"
            )
        if block_size is None:
            return Layer(name, dtype, "heads", heads // split, head_size, 0, 0)
        if chunk_size % block_size:
            raise ConfigError(
                f"{where}: chunk size {chunk_size} is not a multiple of the block size "
                f"{block_size} of layout {layout}; use layout 'canonical' or another chunk size"
            )
        blocks = chunk_size // block_size
        return Layer(name, dtype, "heads", heads // split, head_size, blocks, block_size)
    content_shape = _CONTENT_SHAPE.fullmatch(shape)
    if content_shape is None or block_size is not None:
        raise ConfigError(
            f"{where}: shape {shape!r} does not fit layout {layout}; expected "
            "'2,*,<heads>,<head size>'" + ("" if block_size else " or '*,<content>'")
        )
    _check_not_split(where, split)
    return Layer(name, dtype, "content", 1, int(content_shape[1]), 0, 0)


def _check_not_split(where: str, split: int) -> None:
    if split != 1:
        raise ConfigError(
            f"{where}: a layer without heads cannot be split over {split} shards of a stage; set "
            "`shards` to the number of stages"
        )
