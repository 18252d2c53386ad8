"""What a namespace record says of its objects: the layers, tensors and header texts of each kind.

Owns the reading of the record's fields about layers, kinds, shards and stages
(:func:`object_plans`), and the rule for the data offset.

Contracts
---------
* Everything is a pure function of the record.
* No payload, no storage, no torch, no vLLM. Safe to call from any thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Final, cast

from kvshelf.errors import ConfigError
from kvshelf.format.invalid import METADATA
from kvshelf.format.keys import check_chunk_size
from kvshelf.format.kinds import FULL, KINDS, SHARDS_FIELDS, STATE, Kind, layers_by_kind
from kvshelf.format.namespace import FORMAT, FieldValue
from kvshelf.format.tensors import (
    DTYPE_BYTES,
    Layer,
    TensorSpec,
    is_state,
    parse_layer,
    required_field,
)

#: The payload starts at a multiple of this many bytes.
PAYLOAD_ALIGNMENT: Final = 4096

#: Characters of a tensor's hash in a header.
HASH_CHARS: Final = 32

#: Largest payload of an object. Real ones are far smaller; a forged namespace may name any size.
_MAX_PAYLOAD: Final = 1 << 36

#: Most shards of a kind. Real namespaces have at most a few hundred; programs keep a few bytes for
#: each, and ask the storage for all shards of a chunk.
MAX_SHARDS: Final = 1 << 16


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
        if largest > _MAX_PAYLOAD:
            raise ConfigError(
                f"namespace record: an object would hold {largest} bytes, more than "
                f"{_MAX_PAYLOAD}; make the chunk size smaller or take more shards"
            )

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
                length = (
                    sum(map(len, parts))
                    + len(between_key_and_tokens(b"\0" * 32, b"\0" * 32, 2**32 - 1))
                    + len(specs) * (HASH_CHARS + 1)
                    - 1
                )
                longest = max(longest, length)
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
    if not stages or min(stages) < 1 or sum(stages) != len(names):
        raise ConfigError(
            f"namespace record: stages {stages} do not cover {len(names)} layer_names"
        )
    for field, values in {**lists, "kinds": kinds}.items():
        if len(values) != len(names):
            raise ConfigError(
                f"namespace record: {field} has {len(values)} entries for {len(names)} layers"
            )
    if len(set(names)) != len(names) or METADATA in names or "" in names:
        raise ConfigError("namespace record: layer_names must be unique and not empty")
    if record.get("layers", len(names)) != len(names):
        raise ConfigError(
            f"namespace record: layers is {record['layers']}, but there are {len(names)} names"
        )
    layouts, shapes, dtypes = lists.values()
    _check_kinds(kinds, layouts, "kinds" in record)
    fields = list(zip(names, layouts, shapes, dtypes, strict=True))
    found = layers_by_kind(stages, kinds)
    shards = _shards(record, list(found))
    plans = {}
    for kind, members in found.items():
        own = list(members.values())
        if not 1 <= shards[kind] <= MAX_SHARDS or shards[kind] % len(own):
            raise ConfigError(
                f"namespace record: {SHARDS_FIELDS[kind]} is {shards[kind]}, expected a positive "
                f"multiple of the {len(own)} stages with layers of kind {kind}, and at most "
                f"{MAX_SHARDS}"
            )
        split = shards[kind] // len(own)
        layers = [[parse_layer(*fields[n], split, chunk_size) for n in numbers] for numbers in own]
        plans[kind] = ObjectPlan(kind, shards[kind], layers, own, chunk_size)
    return plans


def _check_kinds(kinds: Sequence[str], layouts: Sequence[str], stated: bool) -> None:
    for kind, layout in zip(kinds, layouts, strict=True):
        if kind not in KINDS:
            raise ConfigError(
                f"namespace record: kind {kind!r}, expected one of {', '.join(KINDS)}"
            )
        if (kind == STATE) != is_state(layout):
            raise ConfigError(
                f"namespace record: a layer of kind {kind} has layout {layout!r}; layers of kind "
                "state, and only those, have layout 'state' or 'state-tp<ranks>'"
            )
    if stated and set(kinds) == {FULL}:
        raise ConfigError(
            "namespace record: all layers are of kind full: leave out the field kinds"
        )


def _shards(record: Mapping[str, FieldValue], kinds: Sequence[Kind]) -> dict[Kind, int]:
    """Return the shards of each of the record's kinds."""
    for kind, field in SHARDS_FIELDS.items():
        if kind != FULL and (kind in kinds) != (field in record):
            raise ConfigError(
                f"namespace record: {field} "
                + ("is missing" if kind in kinds else f"is given, but no layer is of kind {kind}")
            )
    shards: dict[Kind, int] = {kind: required_field(record, SHARDS_FIELDS[kind]) for kind in kinds}
    first = shards[kinds[0]]
    if required_field(record, "shards") != first:
        raise ConfigError(
            f"namespace record: shards is {record['shards']}, expected {first}, the shards of the "
            f"layers of kind {kinds[0]}"
        )
    return shards


def data_offset_of(plans: Mapping[Kind, ObjectPlan]) -> int:
    """Return the smallest aligned offset after the longest header of a namespace."""
    tails = all(plan.tails for plan in plans.values())
    longest = max(plan.longest_header(tails) for plan in plans.values())
    return -(-(8 + longest) // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT


def between_key_and_tokens(key: bytes, parent: bytes, index: int) -> bytes:
    """Return the header's text from the key to the chunk index."""
    return f'{key.hex()}","parent":"{parent.hex()}","chunk":"{index}'.encode()
