"""The layers that a namespace record describes, and the tensors of their objects.

Owns the dtypes, layouts and shapes that a record may give a layer, and their parser.
No torch, no storage, no vLLM. Safe to call from any thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an object.

    Attributes
    ----------
    name : str
        The layer's name.
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
class Layer:
    """One layer as the namespace record describes it."""

    name: str
    dtype: str
    kind: str  # "heads", "content", "blocks"
    heads: int  # per shard
    width: int  # head size, content, or bytes of a block
    blocks: int  # of a native or opaque chunk, else 0
    block_size: int  # of a native layout, else 0


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


def parse_layer(
    name: str, layout: str, shape: str, dtype: str, split: int, chunk_size: int
) -> Layer:
    """Check and decode one layer's fields of the namespace record."""
    where = f"layer {name!r}"
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        raise ConfigError(f"{where}: dtype {dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
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
            "size>', 'opaque-<16 hex>' or 'replicated-<16 hex>'"
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
