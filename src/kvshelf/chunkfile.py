"""One object: a shard of a chunk as a safetensors file, encoded, decoded, verified.

Owns
----
* what an object of a namespace looks like, byte for byte (:class:`ObjectFormat`);
* sealing: hashing the payload and writing the header in front of it;
* verified reading into a buffer of the caller;
* the typed errors that say in which way an object is bad.

Contracts
---------
* The header is a pure function of namespace, chunk, shard and payload hashes. A reader
  rebuilds it and compares bytes; the typed errors only explain a difference.
* Nothing read is executed, nothing of the payload's size is allocated: bytes go from the
  reader into the caller's buffer and from buffers of the caller to the writer.
* When :meth:`ObjectFormat.read` returns, every byte of the image has been checked. When it
  raises, the image's content is undefined.
* Knows no storage (a reader is anything with `size` and `read_into`), no torch, no vLLM.

Threads
-------
An :class:`ObjectFormat` may be used by any number of threads at once. Methods that touch a
payload block for the time of the read or hash; both release the GIL, and Python code between
them is a few microseconds a tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, Final, Protocol, TypeAlias

import xxhash

from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    ObjectNameError,
    TransientStorageError,
    UnsupportedError,
)
from kvshelf.identity import FORMAT, Chunk, FieldValue, Namespace, ParsedName, check_chunk_size

__all__ = [
    "ALIGNMENT",
    "DTYPE_BYTES",
    "DuplicateKey",
    "EmptyObject",
    "HeaderNotCanonical",
    "HeaderNotJson",
    "HeaderTooLarge",
    "MalformedTensor",
    "ObjectFormat",
    "PayloadDamaged",
    "ReaderLike",
    "TensorGap",
    "TensorOverlap",
    "TensorSpec",
    "TruncatedObject",
    "WrongDtype",
    "WrongHeaderLength",
    "WrongKey",
    "WrongMetadata",
    "WrongNamespace",
    "WrongShape",
    "WrongSize",
    "WrongTensorName",
    "WrongTensorOrder",
    "WrongTensorSize",
    "describe_header",
    "header_length",
]

Buffer: TypeAlias = "bytes | bytearray | memoryview"

#: The payload starts at a multiple of this many bytes.
ALIGNMENT: Final = 4096

#: Bytes of one element of each dtype that a tensor of an object may have.
DTYPE_BYTES: Final[Mapping[str, int]] = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U8": 1,
}

#: Largest header that the safetensors library reads.
_MAX_HEADER: Final = 100_000_000

#: Largest header that is parsed to be shown; one of 100 MB can take minutes and gigabytes.
_MAX_SHOWN_HEADER: Final = 16 << 20

#: Largest payload of an object. None is ever near it; a forged namespace may name any size.
_MAX_PAYLOAD: Final = 1 << 36

# How an object is cut into reads decides whether its bytes are still in cache when they are
# hashed. Measured (1 MiB of level-2 cache, 32 MiB of level-3): an object that fits the last
# level by far wants few reads; a larger one wants each piece hashed out of level 2, and a
# tensor that is larger than that streamed, although streaming costs more for each byte.
_SMALL_OBJECT: Final = 8 << 20
_SMALL_OBJECT_READ: Final = 1 << 20
_READ: Final = 512 << 10
_ONE_SHOT: Final = 1 << 20

_HEX: Final = b"0123456789abcdef"
_HASH_CHARS: Final = 32
_KEY_CHARS: Final = 64
_BEFORE_PARENT: Final = b'","parent":"'
_TEMPLATES_KEPT: Final = 1024
_METADATA: Final = "__metadata__"
_NATIVE: Final = re.compile(r"cpu-[A-Za-z0-9_]+-[A-Za-z0-9_]+-b([1-9][0-9]{0,8})", re.ASCII)
_OPAQUE: Final = re.compile(r"opaque-[0-9a-f]{16}", re.ASCII)
_NUMBER: Final = r"([1-9][0-9]{0,14})"
_HEADS_SHAPE: Final = re.compile(rf"2,\*,{_NUMBER},{_NUMBER}", re.ASCII)
_CONTENT_SHAPE: Final = re.compile(rf"\*,{_NUMBER}", re.ASCII)
_BLOCKS_SHAPE: Final = re.compile(rf"{_NUMBER},{_NUMBER}", re.ASCII)


# --------------------------------------------------------------------------- errors
# Named for what is wrong; that they are errors is said by their base class.
# ruff: noqa: N818


class EmptyObject(BadObjectError):
    """The object has no bytes."""


class TruncatedObject(BadObjectError):
    """The object is shorter than it must be."""


class WrongSize(BadObjectError):
    """The object is longer than it must be."""


class HeaderTooLarge(BadObjectError):
    """The length field names a header that is larger than the file or 100 MB."""


class WrongHeaderLength(BadObjectError):
    """The length field is not the namespace's data offset − 8."""


class HeaderNotJson(BadObjectError):
    """The header is not a JSON object in UTF-8."""


class DuplicateKey(BadObjectError):
    """A key appears twice in the header."""


class HeaderNotCanonical(BadObjectError):
    """The header says the right things in other bytes (spaces, order, escapes)."""


class WrongMetadata(BadObjectError):
    """A field of ``__metadata__`` is missing, unknown or has another value.

    Attributes
    ----------
    field : str
        Name of the field.
    """

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[type[WrongMetadata], tuple[str, str]]:
        return type(self), (str(self), self.field)


class WrongNamespace(WrongMetadata):
    """The object belongs to another namespace."""


class WrongKey(WrongMetadata):
    """The object is another chunk."""


class MalformedTensor(BadObjectError):
    """A tensor's entry is not ``dtype``, ``shape``, ``data_offsets``."""


class WrongTensorName(BadObjectError):
    """A tensor is missing, or one is there that does not belong."""


class WrongTensorOrder(BadObjectError):
    """The tensors are the right ones in another order."""


class WrongDtype(BadObjectError):
    """A tensor has another dtype."""


class WrongShape(BadObjectError):
    """A tensor has another shape."""


class TensorOverlap(BadObjectError):
    """A tensor starts before the one in front of it ends."""


class TensorGap(BadObjectError):
    """There are bytes between two tensors."""


class WrongTensorSize(BadObjectError):
    """A tensor's offsets do not span dtype × shape."""


class PayloadDamaged(BadObjectError):
    """A tensor's bytes do not have the hash in the header.

    Attributes
    ----------
    tensor : str
        Name of the first such tensor.
    """

    def __init__(self, message: str, tensor: str) -> None:
        super().__init__(message)
        self.tensor = tensor

    def __reduce__(self) -> tuple[type[PayloadDamaged], tuple[str, str]]:
        return type(self), (str(self), self.tensor)


# --------------------------------------------------------------------------- layout


class ReaderLike(Protocol):
    """What :meth:`ObjectFormat.read` asks of an opened object."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`; return the count, short only at the end."""


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
class _Layer:
    """One layer as the namespace describes it; shapes of one stage's whole heads."""

    name: str
    dtype: str
    kind: str  # "heads", "content", "blocks"
    heads: int  # per shard
    width: int  # head size, content, or bytes of a block
    blocks: int  # of a native or opaque chunk, else 0
    block_size: int  # of a native layout, else 0


#: One read: where in the image (a slice and its first byte) and how many bytes.
_Read: TypeAlias = "tuple[slice, int, int]"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring bytes of an image that are read, then hashed.

    Attributes
    ----------
    reads : tuple of _Read
        What to read, in order.
    tensors : tuple[slice, ...]
        The tensors that are complete afterwards, in the image.
    first : int
        Number of the first of them.
    streamed : bool
        The reads are exactly the one tensor, to be hashed read by read.
    """

    reads: tuple[_Read, ...]
    tensors: tuple[slice, ...]
    first: int
    streamed: bool


@dataclass(frozen=True, slots=True)
class _Template:
    """All of an object that does not depend on key, parent, index and hashes."""

    specs: tuple[TensorSpec, ...]
    size: int
    slices: tuple[slice, ...]
    before_key: bytes
    before_hashes: bytes
    hash_chars: int
    after_hashes: bytes
    pieces: tuple[_Piece, ...]


def _field(record: Mapping[str, FieldValue], name: str) -> Any:
    try:
        return record[name]
    except KeyError:
        raise ConfigError(
            f"namespace record: field {name!r} is missing; objects cannot be laid out without it"
        ) from None


def _layer(name: str, layout: str, shape: str, dtype: str, split: int, chunk_size: int) -> _Layer:
    """Check and decode one layer's fields of the namespace record."""
    where = f"layer {name!r}"
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        raise ConfigError(f"{where}: dtype {dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
    native = _NATIVE.fullmatch(layout)
    if _OPAQUE.fullmatch(layout):
        found = _BLOCKS_SHAPE.fullmatch(shape)
        if found is None or dtype != "U8":
            raise ConfigError(
                f"{where}: layout {layout} needs dtype U8 and shape '<blocks>,<bytes>', "
                f"found {dtype} and {shape!r}"
            )
        return _Layer(name, dtype, "blocks", 1, int(found[2]), int(found[1]), 0)
    if layout != "canonical" and native is None:
        raise ConfigError(
            f"{where}: layout {layout!r}, expected 'canonical', 'cpu-<packing>-<dtype>-b<block "
            "size>' or 'opaque-<16 hex>'"
        )
    heads_shape = _HEADS_SHAPE.fullmatch(shape)
    if heads_shape is not None:
        heads, head_size = int(heads_shape[1]), int(heads_shape[2])
        if heads % split:
            raise ConfigError(
                f"{where}: {heads} KV heads cannot be split over {split} shards of a stage; set "
                f"`shards` so that each stage has a divisor of {heads}"
            )
        if native is None:
            return _Layer(name, dtype, "heads", heads // split, head_size, 0, 0)
        block_size = int(native[1])
        if chunk_size % block_size:
            raise ConfigError(
                f"{where}: chunk size {chunk_size} is not a multiple of the block size "
                f"{block_size} of layout {layout}; use layout 'canonical' or another chunk size"
            )
        blocks = chunk_size // block_size
        return _Layer(name, dtype, "heads", heads // split, head_size, blocks, block_size)
    content_shape = _CONTENT_SHAPE.fullmatch(shape)
    if content_shape is None or native is not None:
        raise ConfigError(
            f"{where}: shape {shape!r} does not fit layout {layout}; expected "
            "'2,*,<heads>,<head size>'" + ("" if native else " or '*,<content>'")
        )
    if split != 1:
        raise ConfigError(
            f"{where}: a layer without heads cannot be split over {split} shards of a stage; set "
            "`shards` to the number of stages"
        )
    return _Layer(name, dtype, "content", 1, int(content_shape[1]), 0, 0)


class _Plan:
    """Layers of each stage, and headers without a namespace digest."""

    def __init__(self, record: Mapping[str, FieldValue]) -> None:
        self.chunk_size = check_chunk_size(_field(record, "chunk_size"))
        self.shards: int = _field(record, "shards")
        stages: list[int] = list(_field(record, "stages"))
        names: list[str] = list(_field(record, "layer_names"))
        lists = {
            field: list(_field(record, field))
            for field in ("layouts", "layer_shapes", "layer_dtypes")
        }
        if not stages or min(stages) < 1 or sum(stages) != len(names):
            raise ConfigError(
                f"namespace record: stages {stages} do not cover {len(names)} layer_names"
            )
        if self.shards < 1 or self.shards % len(stages) or self.shards > 2**32 - 1:
            raise ConfigError(
                f"namespace record: shards is {self.shards}, expected a positive multiple of the "
                f"{len(stages)} stages"
            )
        for field, values in lists.items():
            if len(values) != len(names):
                raise ConfigError(
                    f"namespace record: {field} has {len(values)} entries for {len(names)} layers"
                )
        if len(set(names)) != len(names) or _METADATA in names or "" in names:
            raise ConfigError("namespace record: layer_names must be different and not empty")
        if record.get("layers", len(names)) != len(names):
            raise ConfigError(
                f"namespace record: layers is {record['layers']}, but there are {len(names)} names"
            )
        self.split = self.shards // len(stages)
        layers = [
            _layer(name, layout, shape, dtype, self.split, self.chunk_size)
            for name, layout, shape, dtype in zip(
                names,
                lists["layouts"],
                lists["layer_shapes"],
                lists["layer_dtypes"],
                strict=True,
            )
        ]
        ends = list(accumulate(stages))
        self.stages = [layers[end - count : end] for count, end in zip(stages, ends, strict=True)]
        self.tails = all(layer.kind != "blocks" for layer in layers)
        largest = max(
            sum(spec.nbytes for spec in self.specs(stage * self.split, self.chunk_size, True))
            for stage in range(len(stages))
        )
        if largest > _MAX_PAYLOAD:
            raise ConfigError(
                f"namespace record: an object would hold {largest} bytes, more than "
                f"{_MAX_PAYLOAD}; make the chunk size smaller or take more shards"
            )

    def specs(self, shard: int, tokens: int, native: bool) -> tuple[TensorSpec, ...]:
        """Lay out one object; `native` chooses the stored form where there are two."""
        specs = []
        offset = 0
        for layer in self.stages[shard // self.split]:
            size = DTYPE_BYTES[layer.dtype]
            dtype = layer.dtype
            shape: tuple[int, ...]
            if layer.kind == "blocks":
                shape = (layer.blocks, layer.width)
            elif layer.kind == "content":
                shape = (tokens, layer.width)
            elif layer.block_size and native:
                dtype = "U8"
                shape = (layer.blocks, layer.heads, 2 * layer.block_size * layer.width * size)
            else:
                shape = (2, tokens, layer.heads, layer.width)
            nbytes = prod(shape) * DTYPE_BYTES[dtype]
            specs.append(TensorSpec(layer.name, dtype, shape, nbytes, offset))
            offset += nbytes
        return tuple(specs)

    def parts(
        self, digest: str, shard: int, tokens: int, specs: Sequence[TensorSpec]
    ) -> tuple[bytes, bytes, bytes]:
        """Return the header's text before the key, from tokens to hashes, and after them."""
        tensors = ",".join(
            f'{json.dumps(spec.name, ensure_ascii=False)}:{{"dtype":"{spec.dtype}",'
            f'"shape":[{",".join(map(str, spec.shape))}],'
            f'"data_offsets":[{spec.offset},{spec.offset + spec.nbytes}]}}'
            for spec in specs
        )
        return (
            f'{{"{_METADATA}":{{"format":"{FORMAT}","namespace":"{digest}","key":"'.encode(),
            f'","tokens":"{tokens}","shard":"{shard}","shards":"{self.shards}","xxh3":"'.encode(),
            f'"}},{tensors}}}'.encode(),
        )

    def data_offset(self) -> int:
        """Return the smallest aligned offset behind every header of the namespace."""
        longest = 0
        # Within a stage the headers differ in the digits of the shard's number only.
        for shard in range(self.split - 1, self.shards, self.split):
            for native in (True, False) if self.tails else (True,):
                specs = self.specs(shard, self.chunk_size, native)
                parts = self.parts("0" * 64, shard, self.chunk_size, specs)
                length = (
                    sum(map(len, parts))
                    + len(_between_key_and_tokens(b"\0" * 32, b"\0" * 32, 2**32 - 1))
                    + len(specs) * (_HASH_CHARS + 1)
                    - 1
                )
                longest = max(longest, length)
        return -(-(8 + longest) // ALIGNMENT) * ALIGNMENT


def _between_key_and_tokens(key: bytes, parent: bytes, index: int) -> bytes:
    return f'{key.hex()}","parent":"{parent.hex()}","chunk":"{index}'.encode()


def _cut(start: int, end: int, size: int) -> tuple[_Read, ...]:
    return tuple(
        (slice(at, min(at + size, end)), at, min(size, end - at)) for at in range(start, end, size)
    )


def _pieces(slices: Sequence[slice], data_offset: int) -> tuple[_Piece, ...]:
    """Cut an image into pieces: neighbouring small tensors share one, large ones stand alone.

    The first piece takes the header region along.
    """
    small = slices[-1].stop <= _SMALL_OBJECT
    size = _SMALL_OBJECT_READ if small else _READ
    # A lone tensor that is hashed in one shot is best read at once, header region and all.
    most = max(size, _ONE_SHOT) + data_offset
    pieces: list[_Piece] = []
    start = 0
    end = data_offset
    first = 0
    for number, tensor in enumerate(slices):
        streamed = not small and tensor.stop - tensor.start > _ONE_SHOT
        full = first < number and tensor.stop - max(start, data_offset) > size
        if full or (streamed and start < end):
            pieces.append(_Piece(_cut(start, end, most), tuple(slices[first:number]), first, False))
            start, first = end, number
        if streamed:
            pieces.append(_Piece(_cut(tensor.start, tensor.stop, _READ), (tensor,), number, True))
            start, first = tensor.stop, number + 1
        end = tensor.stop
    if start < end:
        pieces.append(_Piece(_cut(start, end, most), tuple(slices[first:]), first, False))
    return tuple(pieces)


class ObjectFormat:
    """Everything about the objects of one namespace.

    An *image* is a writable buffer of exactly :meth:`object_size` bytes that holds one object
    as it is on the shelf: the header region, `data_offset` bytes, then the payload.

    Parameters
    ----------
    namespace : Namespace
        Its record must hold chunk_size, shards, stages, layer_names, layouts, layer_shapes,
        layer_dtypes and data_offset.

    Attributes
    ----------
    namespace : Namespace
    data_offset : int
        Where the payload starts, in bytes; a multiple of 4096.
    chunk_size : int
        Tokens in a chunk.
    shards : int
        Number of shards, over all stages.
    tails : bool
        Whether tails can be stored (not where a layout is unknown).

    Raises
    ------
    ConfigError
        If a field is missing, or they contradict one another.
    """

    def __init__(self, namespace: Namespace) -> None:
        record = namespace.record
        self._plan = _Plan(record)
        self.namespace = namespace
        self.chunk_size = self._plan.chunk_size
        self.shards = self._plan.shards
        self.tails = self._plan.tails
        needed = self._plan.data_offset()
        self.data_offset: int = _field(record, "data_offset")
        if self.data_offset != needed:
            raise ConfigError(
                f"namespace record: data_offset is {self.data_offset}, but its layers need {needed}"
            )
        self._templates: dict[tuple[int, int], _Template] = {}

    @staticmethod
    def required_data_offset(record: Mapping[str, FieldValue]) -> int:
        """Return the data offset, in bytes, that a record (still without it) must name."""
        # As a namespace the record is checked and its strings are normalised.
        return _Plan(Namespace({"format": FORMAT, **record}).record).data_offset()

    def tensors(
        self, shard: int, tokens: int | None = None, tail: bool = False
    ) -> tuple[TensorSpec, ...]:
        """Return the tensors of one object in layer order.

        Parameters
        ----------
        shard : int
            Shard, counted from 0 over all stages.
        tokens : int or None
            Number of tokens of a tail; None, or the chunk size, for a whole chunk.
        tail : bool
            True demands a tail.

        Raises
        ------
        ValueError
            If there is no such shard, or `tokens` is not possible.
        UnsupportedError
            If a tail is asked for where a layout is unknown.
        """
        return self._template(shard, self._tokens(tokens, tail)).specs

    def payload_size(self, shard: int, tokens: int | None = None) -> int:
        """Return the bytes of the payload of one object."""
        return self.object_size(shard, tokens) - self.data_offset

    def object_size(self, shard: int, tokens: int | None = None) -> int:
        """Return the bytes of one whole object."""
        return self._template(shard, self._tokens(tokens, False)).size

    def seal(self, image: memoryview, chunk: Chunk, shard: int) -> None:
        """Hash the payload of `image` and write the header in front of it.

        Raises
        ------
        ValueError
            If `image` is not a writable buffer of this object's size, or `chunk` is none of
            this namespace.
        """
        template = self._template_of(chunk, shard)
        view = self._image(image, template)
        digest = xxhash.xxh3_128_hexdigest
        hashes = [digest(view[tensor]) for tensor in template.slices]
        view[: self.data_offset] = self._header(template, chunk, hashes)

    def encode(self, chunk: Chunk, shard: int, tensors: Sequence[Buffer]) -> list[Buffer]:
        """Return one object as buffers for ``writev``: a header and the given buffers.

        Parameters
        ----------
        chunk, shard
            Which object.
        tensors : Sequence of buffers
            The bytes of each tensor, C-contiguous, in layer order. Not copied.

        Raises
        ------
        ValueError
            If there are not as many buffers as tensors, or one has another size.
        """
        template = self._template_of(chunk, shard)
        if len(tensors) != len(template.specs):
            raise ValueError(f"found {len(tensors)} buffers for {len(template.specs)} tensors")
        buffers: list[Buffer] = [b""]
        hashes = []
        for spec, data in zip(template.specs, tensors, strict=True):
            view = memoryview(data)
            if view.nbytes != spec.nbytes or not view.c_contiguous:
                raise ValueError(
                    f"tensor {spec.name!r}: found {view.nbytes} bytes"
                    f"{'' if view.c_contiguous else ', not contiguous'}; expected {spec.nbytes} "
                    "contiguous bytes"
                )
            hashes.append(xxhash.xxh3_128_hexdigest(view))
            buffers.append(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
        buffers[0] = self._header(template, chunk, hashes)
        return buffers

    def read(self, reader: ReaderLike, chunk: Chunk, shard: int, image: memoryview) -> None:
        """Read one object into `image` and verify all of it.

        The header is checked before the payload is read; each tensor is hashed right after
        its bytes were read, while they are in cache.

        Parameters
        ----------
        reader : ReaderLike
            The opened object.
        chunk, shard
            Which object it must be.
        image : memoryview
            Writable, contiguous, of :meth:`object_size` bytes.

        Raises
        ------
        BadObjectError
            A subclass that says what is wrong.
        TransientStorageError
            If fewer bytes came than the object has.
        StorageError
            If the storage failed.
        ValueError
            If `image` or `chunk` do not fit this namespace.
        """
        template = self._template_of(chunk, shard)
        view = self._image(image, template)
        self._check_size(reader.size, view.nbytes)
        read_into = reader.read_into
        digest = xxhash.xxh3_128_hexdigest
        hashes: list[str] = []
        for piece in template.pieces:
            state = xxhash.xxh3_128() if piece.streamed else None
            for where, start, length in piece.reads:
                part = view[where]
                count = read_into(part, start)
                if count != length:
                    raise TransientStorageError(
                        f"short read: found {count} bytes at {start}, expected {length}; "
                        "the object was replaced or its storage is failing"
                    )
                if state is not None:
                    state.update(part)
                elif not hashes:
                    hashes = self._check_header(view, template, chunk, shard)
            first = piece.first
            expected = hashes[first : first + len(piece.tensors)]
            if state is not None:
                found = [state.hexdigest()]
            else:
                found = [digest(view[tensor]) for tensor in piece.tensors]
            if found != expected:
                raise self._damaged(template, first, found, expected)

    def named_chunk(self, parsed: ParsedName, parent: bytes = bytes(32)) -> Chunk:
        """Return the chunk that an object's name speaks of.

        A name says all but the parent. Without it the chunk can be found, not verified.

        Raises
        ------
        ObjectNameError
            If no object of this namespace has such a name.
        """
        tail = parsed.tail_tokens is not None
        tokens = self.chunk_size if parsed.tail_tokens is None else parsed.tail_tokens
        if parsed.shards != self.shards:
            raise ObjectNameError(
                f"the name says {parsed.shards} shards, its namespace has {self.shards}"
            )
        try:
            self._tokens(tokens, tail)
        except (ValueError, UnsupportedError) as error:
            raise ObjectNameError(f"its namespace has no object of this name: {error}") from None
        return Chunk(parsed.key, parent, parsed.index, tokens, tail, parsed.group)

    def read_named(self, reader: ReaderLike, parsed: ParsedName, image: memoryview) -> Chunk:
        """Read and verify an object of which only the name is known.

        The parent is what the object itself says it is: everything else is verified as by
        :meth:`read`, which a load by an engine does with the parent that it must have.

        Parameters
        ----------
        reader, image
            As for :meth:`read`.
        parsed : ParsedName
            The object's name.

        Returns
        -------
        Chunk
            The chunk, its parent included.

        Raises
        ------
        ObjectNameError
            If no object of this namespace has such a name.
        BadObjectError, StorageError, ValueError
            As for :meth:`read`.
        """
        chunk = self.named_chunk(parsed)
        template = self._template_of(chunk, parsed.shard)
        view = self._image(image, template)
        self._check_size(reader.size, view.nbytes)
        region = view[: self.data_offset]
        count = reader.read_into(region, 0)
        first = len(template.before_key) + _KEY_CHARS + len(_BEFORE_PARENT)
        parent = region[first : first + _KEY_CHARS].tobytes()
        # Whatever is there in its stead will not compare equal, and be explained.
        if not parent.translate(None, _HEX):
            chunk = replace(chunk, parent=bytes.fromhex(parent.decode("ascii")))
        self.read(_Continued(reader, count), chunk, parsed.shard, view)
        return chunk

    def verify_image(self, image: memoryview, chunk: Chunk, shard: int) -> None:
        """Verify an object that is in memory already.

        Raises
        ------
        BadObjectError
            A subclass that says what is wrong.
        """
        template = self._template_of(chunk, shard)
        view = memoryview(image).cast("B")
        self._check_size(view.nbytes, template.size)
        expected = self._check_header(view, template, chunk, shard)
        found = [xxhash.xxh3_128_hexdigest(view[tensor]) for tensor in template.slices]
        if found != expected:
            raise self._damaged(template, 0, found, expected)

    # ----------------------------------------------------------------- inside

    def _tokens(self, tokens: int | None, tail: bool) -> int:
        if tokens is None or (tokens == self.chunk_size and not tail):
            if tail:
                raise ValueError("a tail needs its number of tokens")
            return self.chunk_size
        if not 1 <= tokens < self.chunk_size:
            raise ValueError(
                f"{tokens} tokens: expected {self.chunk_size}, or fewer (at least 1) in a tail"
            )
        if not self.tails:
            raise UnsupportedError(
                "tails cannot be stored: the layout of this namespace's KV cache is unknown"
            )
        return tokens

    def _template_of(self, chunk: Chunk, shard: int) -> _Template:
        if chunk.tail != (chunk.tokens != self.chunk_size):
            raise ValueError(
                f"chunk {chunk.index} of {chunk.tokens} tokens (tail: {chunk.tail}) is none of a "
                f"namespace with {self.chunk_size} tokens in a chunk"
            )
        return self._templates.get((shard, chunk.tokens)) or self._template(
            shard, self._tokens(chunk.tokens, chunk.tail)
        )

    def _template(self, shard: int, tokens: int) -> _Template:
        known = self._templates.get((shard, tokens))
        if known is not None:
            return known
        if not 0 <= shard < self.shards:
            raise ValueError(f"shard {shard}: expected 0 to {self.shards - 1}")
        specs = self._plan.specs(shard, tokens, native=tokens == self.chunk_size)
        before_key, before_hashes, after_hashes = self._plan.parts(
            self.namespace.digest.hex(), shard, tokens, specs
        )
        base = self.data_offset
        slices = tuple(
            slice(base + spec.offset, base + spec.offset + spec.nbytes) for spec in specs
        )
        template = _Template(
            specs,
            slices[-1].stop,
            slices,
            (base - 8).to_bytes(8, "little") + before_key,
            before_hashes,
            len(specs) * (_HASH_CHARS + 1) - 1,
            after_hashes,
            _pieces(slices, base),
        )
        # Tails come in many lengths; whole chunks are put back at once when needed.
        if len(self._templates) >= _TEMPLATES_KEPT:
            self._templates.clear()
        self._templates[shard, tokens] = template
        return template

    def _image(self, image: memoryview, template: _Template) -> memoryview:
        view = memoryview(image)
        expected = template.size
        if view.readonly or not view.c_contiguous or view.nbytes != expected:
            raise ValueError(
                f"image of {view.nbytes} bytes (writable: {not view.readonly}, contiguous: "
                f"{view.c_contiguous}): expected {expected} writable contiguous bytes"
            )
        return view if view.format == "B" and view.ndim == 1 else view.cast("B")

    def _before_hashes(self, template: _Template, chunk: Chunk) -> bytes:
        return b"".join(
            (
                template.before_key,
                _between_key_and_tokens(chunk.key, chunk.parent, chunk.index),
                template.before_hashes,
            )
        )

    def _header(self, template: _Template, chunk: Chunk, hashes: Sequence[str]) -> bytes:
        """Return the header region, `data_offset` bytes."""
        if len(chunk.key) != 32 or len(chunk.parent) != 32 or not 0 <= chunk.index < 2**32:
            raise ValueError(f"{chunk} is not a chunk: key and parent are 32 bytes, index a u32")
        return b"".join(
            (
                self._before_hashes(template, chunk),
                ",".join(hashes).encode(),
                template.after_hashes,
            )
        ).ljust(self.data_offset)

    def _check_size(self, found: int, expected: int) -> None:
        if found == expected:
            return
        if found == 0:
            raise EmptyObject(f"empty object: expected {expected} bytes")
        if found < expected:
            raise TruncatedObject(f"truncated object: found {found} bytes, expected {expected}")
        raise WrongSize(f"object too long: found {found} bytes, expected {expected}")

    def _check_header(
        self, view: memoryview, template: _Template, chunk: Chunk, shard: int
    ) -> list[str]:
        """Compare the header region with the only one it may be; return its hashes."""
        region = view[: self.data_offset].tobytes()
        before = self._before_hashes(template, chunk)
        first = len(before)
        last = first + template.hash_chars
        # The spaces behind the JSON are part of the comparison.
        after = template.after_hashes.ljust(self.data_offset - last)
        if region.startswith(before) and region[last:] == after:
            text = region[first:last]
            commas = b"," * (len(template.specs) - 1)
            if text.translate(None, _HEX) == commas == text[_HASH_CHARS :: _HASH_CHARS + 1]:
                return text.decode("ascii").split(",")
        raise self._explain(region, template, chunk, shard)

    def _damaged(
        self, template: _Template, first: int, found: Sequence[str], expected: Sequence[str]
    ) -> PayloadDamaged:
        number = next(n for n, hash_ in enumerate(found) if hash_ != expected[n])
        name = template.specs[first + number].name
        return PayloadDamaged(
            f"payload damaged: tensor {name!r} has hash {found[number]}, expected "
            f"{expected[number]}",
            name,
        )

    def _explain(
        self, region: bytes, template: _Template, chunk: Chunk, shard: int
    ) -> BadObjectError:
        """Return the typed error for a header region that is not the expected one."""
        try:
            length = int.from_bytes(region[:8], "little")
            if length > max(_MAX_HEADER, template.size - 8):
                raise HeaderTooLarge(_too_large(length))
            if length != self.data_offset - 8:
                raise WrongHeaderLength(
                    f"header of {length} bytes: expected {self.data_offset - 8}"
                )
            header = _parse(region[8:])
            expected = {
                "format": FORMAT,
                "namespace": self.namespace.digest.hex(),
                "key": chunk.key.hex(),
                "parent": chunk.parent.hex(),
                "chunk": str(chunk.index),
                "tokens": str(chunk.tokens),
                "shard": str(shard),
                "shards": str(self.shards),
            }
            _compare_metadata(header.pop(_METADATA, None), expected, len(template.specs))
            _compare_tensors(header, template.specs)
        except BadObjectError as error:
            return error
        return HeaderNotCanonical(
            "the header says the right things in other bytes than kvshelf writes"
        )


class _Continued:
    """A reader whose first bytes are in the buffer already that it is asked to fill."""

    __slots__ = ("_done", "_reader", "size")

    def __init__(self, reader: ReaderLike, done: int) -> None:
        self._reader = reader
        self._done = done
        self.size = reader.size

    def read_into(self, buffer: memoryview, offset: int) -> int:
        done = max(0, self._done - offset)
        return done + self._reader.read_into(buffer[done:], offset + done)


# --------------------------------------------------------------------------- explanations


def _too_large(length: int) -> str:
    return f"header of {length} bytes: larger than the file or than {_MAX_HEADER} bytes"


def _parse(text: bytes) -> dict[str, Any]:
    """Parse a header's JSON.

    Raises
    ------
    HeaderNotJson, DuplicateKey
    """

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise DuplicateKey(f"key {key[:200]!r} appears twice in the header")
            found[key] = value
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=no_duplicates)
    except BadObjectError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeaderNotJson(f"the header is not JSON in UTF-8 ({error})") from None
    if not isinstance(header, dict):
        raise HeaderNotJson("the header is JSON, but not an object")
    return header


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _compare_metadata(metadata: object, expected: Mapping[str, str], tensors: int) -> None:
    """Raise the error that tells how `metadata` differs, if it does."""
    if not isinstance(metadata, dict):
        raise WrongMetadata(f"{_METADATA}: found {_shown(metadata)}, expected an object", _METADATA)
    kinds: dict[str, type[WrongMetadata]] = {"namespace": WrongNamespace, "key": WrongKey}
    for field, value in expected.items():
        found = metadata.get(field)
        if found != value:
            kind = kinds.get(field, WrongMetadata)
            raise kind(f"{field}: found {_shown(found)}, expected {value!r}", field)
    for field in metadata:
        if field not in expected and field != "xxh3":
            raise WrongMetadata(f"{_shown(field)} is not a field of {_METADATA}", str(field))
    hashes = metadata.get("xxh3")
    if not isinstance(hashes, str) or not re.fullmatch(
        rf"[0-9a-f]{{32}}(,[0-9a-f]{{32}}){{{tensors - 1}}}", hashes
    ):
        raise WrongMetadata(
            f"xxh3: found {_shown(hashes)}, expected {tensors} hashes of 32 hex digits", "xxh3"
        )


def _tensor_entry(name: str, entry: object) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Return dtype, shape and offsets of one entry of a header.

    Raises
    ------
    MalformedTensor
    """
    if isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if (
            isinstance(dtype, str)
            and isinstance(shape, list)
            and isinstance(offsets, list)
            and len(offsets) == 2
            and all(type(number) is int and number >= 0 for number in shape + offsets)
        ):
            return dtype, tuple(shape), (offsets[0], offsets[1])
    raise MalformedTensor(
        f"tensor {_shown(name)}: found {_shown(entry)}, expected dtype, shape and data_offsets"
    )


def _compare_tensors(header: Mapping[str, object], specs: Sequence[TensorSpec]) -> None:
    """Raise the error that tells how the tensors of `header` differ, if they do."""
    entries = {name: _tensor_entry(name, entry) for name, entry in header.items()}
    names = [spec.name for spec in specs]
    for name in names:
        if name not in entries:
            raise WrongTensorName(f"tensor {name!r} is missing")
    for name in entries:
        if name not in set(names):
            raise WrongTensorName(f"tensor {_shown(name)} does not belong to this object")
    if list(entries) != names:
        raise WrongTensorOrder(f"tensors are in the order {_shown(list(entries))}")
    cursor = 0
    for spec in specs:
        dtype, shape, (begin, end) = entries[spec.name]
        if dtype != spec.dtype:
            raise WrongDtype(f"tensor {spec.name!r}: found {_shown(dtype)}, expected {spec.dtype}")
        if shape != spec.shape:
            raise WrongShape(
                f"tensor {spec.name!r}: found {_shown(list(shape))}, expected {list(spec.shape)}"
            )
        if begin < cursor:
            raise TensorOverlap(
                f"tensor {spec.name!r} starts at {begin}, before byte {cursor} where it must"
            )
        if begin > cursor:
            raise TensorGap(
                f"tensor {spec.name!r} starts at {begin}, behind byte {cursor} where it must"
            )
        if end - begin != spec.nbytes:
            raise WrongTensorSize(
                f"tensor {spec.name!r} spans {end - begin} bytes, expected {spec.nbytes}"
            )
        cursor = end


def header_length(start: bytes) -> int:
    """Return how many bytes the header of a safetensors file has, from its first 8 bytes.

    Raises
    ------
    EmptyObject, TruncatedObject
        If there are not 8 bytes.
    HeaderTooLarge
        If it names more than 16 MiB: no object of kvshelf has so much.
    """
    if not start:
        raise EmptyObject("empty object: expected a safetensors file")
    if len(start) < 8:
        raise TruncatedObject(f"truncated object: found {len(start)} bytes, expected at least 8")
    length = int.from_bytes(start[:8], "little")
    if length > _MAX_SHOWN_HEADER:
        raise HeaderTooLarge(f"header of {length} bytes: expected at most {_MAX_SHOWN_HEADER}")
    return length


def describe_header(raw: bytes) -> dict[str, Any]:
    """Return what the header of any object says, for people. Nothing is verified.

    Parameters
    ----------
    raw : bytes
        The object's first bytes, at least 8 + :func:`header_length`.

    Returns
    -------
    dict
        ``data_offset`` (int), ``payload`` (int, bytes), ``metadata`` (dict of str), and
        ``tensors``: a list of dicts with name, dtype, shape, data_offsets.

    Raises
    ------
    EmptyObject, TruncatedObject, HeaderTooLarge, HeaderNotJson, DuplicateKey, WrongMetadata, \
MalformedTensor
    """
    length = header_length(raw)
    if len(raw) < 8 + length:
        raise TruncatedObject(
            f"truncated object: found {len(raw)} bytes, but its header ends at {8 + length}"
        )
    header = _parse(raw[8 : 8 + length])
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise WrongMetadata(f"{_METADATA}: found {_shown(metadata)}, expected strings", _METADATA)
    tensors = []
    payload = 0
    for name, entry in header.items():
        dtype, shape, offsets = _tensor_entry(name, entry)
        payload = max(payload, offsets[1])
        tensors.append(
            {"name": name, "dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}
        )
    return {
        "data_offset": 8 + length,
        "payload": payload,
        "metadata": metadata,
        "tensors": tensors,
    }
