"""One object: a shard of one kind of a chunk as a safetensors file, encoded, decoded, verified.

Owns
----
* the bytes of each object of a namespace (:class:`ObjectFormat`);
* sealing: hashing the payload and writing the header before it;
* verified reads into the caller's buffer.

Contracts
---------
* The header is a pure function of namespace, chunk, kind, shard and payload hashes. A reader
  rebuilds it and compares bytes; the defect of an error only explains a difference.
* No byte that was read is executed, and no payload is copied: bytes go from the reader into
  the caller's buffer.
* When :meth:`ObjectFormat.read` returns, every byte of the object buffer has been checked.
  When it raises, the buffer's content is undefined.
* No storage (a reader is anything with `size` and `read_into`), no torch, no vLLM.

Threads
-------
Any number of threads may use an :class:`ObjectFormat` at once. Methods that touch a payload block
while they read or hash it. Both release the GIL; the Python code between them takes a few
microseconds per tensor.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import xxhash

from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    ObjectNameError,
    TransientStorageError,
    UnsupportedError,
)
from kvshelf.format.invalid import (
    MAX_HEADER,
    Defect,
    compare_metadata,
    compare_tensors,
    parse_header,
)
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, STATE, Kind
from kvshelf.format.names import ParsedName
from kvshelf.format.namespace import FORMAT, FieldValue, Namespace
from kvshelf.format.tensors import (
    HASH_CHARS,
    METADATA,
    ObjectPlan,
    TensorSpec,
    between_key_and_tokens,
    data_offset_of,
    object_plans,
    required_field,
)

#: Bytes of one read.
_READ: Final = 1 << 20
#: XXH3-128 hashes inputs of so many bytes or fewer in other ways.
_SHORT: Final = 240

_HEX: Final = b"0123456789abcdef"
_KEY_CHARS: Final = 64
_BEFORE_PARENT: Final = b'","parent":"'
#: Tensors in all templates that a format keeps; at least one template is kept.
_TENSORS_KEPT: Final = 1 << 18


class ReaderLike(Protocol):
    """What :meth:`ObjectFormat.read` needs of an opened object."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`; return the bytes read, fewer only at the end."""


@dataclass(frozen=True, slots=True)
class _Template:
    """The parts of an object that do not depend on key, parent, index and hashes."""

    specs: tuple[TensorSpec, ...]
    size: int
    slices: tuple[slice, ...]
    before_key: bytes
    before_hashes: bytes
    hash_chars: int
    after_hashes: bytes
    #: Where the payload begins and each tensor ends; None if a tensor is short.
    borders: array[int] | None


def _no_kind(kind: str, kinds: Sequence[Kind]) -> ConfigError:
    return ConfigError(
        f"the namespace has no layers of kind {kind!r}; its kinds are {', '.join(kinds)}"
    )


class ObjectFormat:
    """Encodes, decodes and verifies the objects of one kind of one namespace.

    An *object buffer* is a writable buffer of exactly :meth:`object_size` bytes that holds one
    object as it is stored: the header region, `data_offset` bytes, then the payload.

    Parameters
    ----------
    namespace : Namespace
        Its record must contain chunk_size, shards, stages, layer_names, layouts, layer_shapes,
        layer_dtypes and data_offset.
    kind : Kind, optional
        Kind of the objects; the first of `kinds` when absent. :meth:`of` gives the others.

    Attributes
    ----------
    namespace : Namespace
    kind : Kind
    kinds : tuple[Kind, ...]
        All kinds that the namespace has, in the order of :data:`kvshelf.format.kinds.KINDS`.
    data_offset : int
        Where the payload starts, in bytes; a multiple of 4096; the same for all kinds.
    chunk_size : int
        Tokens per chunk.
    shards : int
        Number of shards of this kind, over all stages that have layers of it.
    tails : bool
        Whether tails can be stored: not if any layer of the namespace has an unknown layout.

    Raises
    ------
    ConfigError
        If a field is missing, fields contradict each other, or the namespace has no layer of
        `kind`.
    """

    def __init__(self, namespace: Namespace, kind: Kind | None = None) -> None:
        record = namespace.record
        plans = object_plans(record)
        needed = data_offset_of(plans)
        data_offset = required_field(record, "data_offset")
        if data_offset != needed:
            raise ConfigError(
                f"namespace record: data_offset is {data_offset}, but its layers need {needed}"
            )
        own_kind: Kind = next(iter(plans)) if kind is None else kind
        if own_kind not in plans:
            raise _no_kind(own_kind, tuple(plans))
        formats = {own_kind: self}
        for kind_of_plan in plans:
            fmt = formats.setdefault(kind_of_plan, object.__new__(ObjectFormat))
            fmt._fill(namespace, kind_of_plan, plans, needed, formats)

    def _fill(
        self,
        namespace: Namespace,
        kind: Kind,
        plans: Mapping[Kind, ObjectPlan],
        data_offset: int,
        formats: Mapping[Kind, ObjectFormat],
    ) -> None:
        self.namespace = namespace
        self.kind = kind
        self.kinds = tuple(plans)
        self.data_offset = data_offset
        self.chunk_size = plans[kind].chunk_size
        self.shards = plans[kind].shards
        self.tails = all(plan.tails for plan in plans.values())
        self._plan = plans[kind]
        self._formats = formats
        self._templates: dict[tuple[int, int], _Template] = {}

    def of(self, kind: Kind) -> ObjectFormat:
        """Return the format of another kind of this namespace; the same object each time.

        Raises
        ------
        ConfigError
            If the namespace has no layer of this kind.
        """
        fmt = self._formats.get(kind)
        if fmt is None:
            raise _no_kind(kind, self.kinds)
        return fmt

    def of_name(self, parsed: ParsedName) -> ObjectFormat:
        """Return the format of the objects of the kind that an object's name states.

        Raises
        ------
        ObjectNameError
            If the namespace has no layer of this kind.
        """
        if parsed.kind not in self.kinds:
            raise ObjectNameError(
                f"its namespace has no object of this name: no layer is of kind {parsed.kind}"
            )
        return self.of(parsed.kind)

    def layer_numbers(self, shard: int) -> tuple[int, ...]:
        """Return the numbers, in the record, of the layers in the objects of a shard.

        Raises
        ------
        ValueError
            If there is no such shard.
        """
        return self._plan.numbers[self._checked(shard) // self._plan.split]

    @staticmethod
    def required_data_offset(record: Mapping[str, FieldValue]) -> int:
        """Return the data offset, in bytes, that a record (still without it) must have."""
        # Making a namespace checks the record and normalises its strings.
        return data_offset_of(object_plans(Namespace({"format": FORMAT, **record}).record))

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
            Whether `tokens` must be a tail's.

        Raises
        ------
        ValueError
            If there is no such shard, or `tokens` is out of range.
        UnsupportedError
            If a tail is requested but a layer has an unknown layout.
        """
        return self._template(shard, self._tokens(tokens, tail)).specs

    def payload_size(self, shard: int, tokens: int | None = None) -> int:
        """Return the size of one object's payload in bytes."""
        return self.object_size(shard, tokens) - self.data_offset

    def object_size(self, shard: int, tokens: int | None = None) -> int:
        """Return the size of one object in bytes, header included."""
        tokens = self._tokens(tokens, False)
        # Sizes differ between stages only. A namespace may have thousands of shards, and engines
        # ask in their steps, where a template would take milliseconds.
        payload = self._plan.payload_bytes[self._checked(shard) // self._plan.split]
        if tokens != self.chunk_size and self.kind != STATE:
            # In every form the bytes of a layer are in proportion to the tokens.
            payload = payload // self.chunk_size * tokens
        return self.data_offset + payload

    def seal(self, buffer: memoryview, chunk: Chunk, shard: int) -> None:
        """Hash the payload in an object buffer and write the header before it.

        Raises
        ------
        ValueError
            If `buffer` is not a writable buffer of this object's size, or `chunk` does not
            belong to this namespace.
        """
        template = self._template_of(chunk, shard)
        view = self._object_view(buffer, template)
        digest = xxhash.xxh3_128_hexdigest
        hashes = [digest(view[tensor]) for tensor in template.slices]
        view[: self.data_offset] = self._header(template, chunk, hashes)

    def verify(self, buffer: memoryview, chunk: Chunk, shard: int, *, payload: bool = True) -> None:
        """Verify an object in memory: its size, its header, and the hashes of its tensors.

        Parameters
        ----------
        buffer : memoryview
            The object's bytes.
        chunk, shard
            The object expected.
        payload : bool
            False: the tensors are verified already, and are not hashed.

        Raises
        ------
        BadObjectError
            Its defect says what is wrong.
        """
        template = self._template_of(chunk, shard)
        _check_size(buffer.nbytes, template.size)
        hashes = self._check_header(buffer, template, chunk, shard)
        if payload:
            for number, tensor in enumerate(template.slices):
                digest = xxhash.xxh3_128_hexdigest(buffer[tensor])
                _check_hash(template, number, digest, hashes)

    def read(self, reader: ReaderLike, chunk: Chunk, shard: int, buffer: memoryview) -> None:
        """Read one object into `buffer`, and verify all of it.

        Parameters
        ----------
        reader : ReaderLike
            The opened object.
        chunk, shard
            The object expected.
        buffer : memoryview
            Writable, contiguous, of :meth:`object_size` bytes.

        Raises
        ------
        BadObjectError
            Its defect says what is wrong.
        TransientStorageError
            If fewer bytes were read than the object has.
        StorageError
            If the storage failed.
        ValueError
            If `buffer` or `chunk` does not fit this namespace.
        """
        view = self._object_view(buffer, self._template_of(chunk, shard))
        _check_size(reader.size, view.nbytes)
        _fill(reader, view, 0)
        self.verify(view, chunk, shard)

    def read_named(
        self, reader: ReaderLike, parsed: ParsedName, buffer: memoryview | None = None
    ) -> Chunk:
        """Read and verify an object of which only the name is known.

        The parent is taken from the object itself. Everything else is verified as by
        :meth:`read`; engines use :meth:`read`, with the parent that they expect.

        Parameters
        ----------
        reader : ReaderLike
            The opened object.
        parsed : ParsedName
            The object's name.
        buffer : memoryview, optional
            As for :meth:`read`. None: nothing is kept, and little more memory is needed than for
            the header, however large the object is.

        Returns
        -------
        Chunk
            The chunk, its parent included.

        Raises
        ------
        ObjectNameError
            If no object of this kind of the namespace has such a name.
        BadObjectError, StorageError, ValueError
            As for :meth:`read`.
        """
        chunk = self.named_chunk(parsed)
        template = self._template_of(chunk, parsed.shard)
        view = memoryview(bytearray(self.data_offset))
        if buffer is not None:
            view = self._object_view(buffer, template)
        _check_size(reader.size, template.size)
        _fill(reader, view, 0)
        first = len(template.before_key) + _KEY_CHARS + len(_BEFORE_PARENT)
        parent = view[first : first + _KEY_CHARS].tobytes()
        # If this is not a key, the comparison of headers fails and explains why.
        if not parent.translate(None, _HEX):
            chunk = replace(chunk, parent=bytes.fromhex(parent.decode("ascii")))
        if buffer is not None:
            self.verify(view, chunk, parsed.shard)
            return chunk
        hashes = self._check_header(view, template, chunk, parsed.shard)
        piece = memoryview(bytearray(_READ))
        for number, tensor in enumerate(template.slices):
            digest = xxhash.xxh3_128()
            for start in range(tensor.start, tensor.stop, _READ):
                part = piece[: min(_READ, tensor.stop - start)]
                _fill(reader, part, start)
                digest.update(part)
            _check_hash(template, number, digest.hexdigest(), hashes)
        return chunk

    def expected(self, chunk: Chunk, shard: int) -> tuple[bytes, bytes, bytes, array[int]] | None:
        """Return what others than :meth:`verify` can verify an object by, with the same verdict.

        It is the same for all chunks of as many tokens: the bytes before :meth:`text_of` the chunk,
        those between it and the hashes, those after the hashes up to the spaces before the payload;
        and, as int64, where the payload begins and each tensor ends.

        Returns
        -------
        tuple or None
            None: only :meth:`verify` can, since a tensor has 240 bytes or fewer.

        Raises
        ------
        ValueError
            If `chunk` does not fit this namespace.
        """
        template = self._template_of(chunk, shard)
        if template.borders is None:
            return None
        first, second, after = template.before_key, template.before_hashes, template.after_hashes
        return first, second, after, template.borders

    @staticmethod
    def text_of(chunk: Chunk) -> bytes:
        """Return the part of a header that the objects of a chunk share and others do not."""
        return between_key_and_tokens(chunk.key, chunk.parent, chunk.index)

    def named_chunk(self, parsed: ParsedName, parent: bytes = bytes(32)) -> Chunk:
        """Return the chunk that an object's name identifies.

        A name holds everything but the parent. Without the parent a chunk can be found, but not
        verified.

        Raises
        ------
        ObjectNameError
            If no object of this kind of the namespace has such a name.
        """
        tail = parsed.tail_tokens is not None
        tokens = self.chunk_size if parsed.tail_tokens is None else parsed.tail_tokens
        if parsed.kind != self.kind:
            raise ObjectNameError(
                f"the name is that of an object of kind {parsed.kind}, expected {self.kind}"
            )
        if parsed.shards != self.shards:
            raise ObjectNameError(
                f"the name has {parsed.shards} shards, but its namespace has {self.shards} of kind "
                f"{self.kind}"
            )
        try:
            self._tokens(tokens, tail)
        except (ValueError, UnsupportedError) as error:
            raise ObjectNameError(f"its namespace has no object of this name: {error}") from None
        return Chunk(parsed.key, parent, parsed.index, tokens, tail, parsed.salt_group)

    # ----------------------------------------------------------------- inside

    def _checked(self, shard: int) -> int:
        if not 0 <= shard < self.shards:
            raise ValueError(f"shard {shard}: expected 0 to {self.shards - 1}")
        return shard

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
                f"chunk {chunk.index} of {chunk.tokens} tokens (tail: {chunk.tail}) does not "
                f"belong to a namespace with {self.chunk_size} tokens per chunk"
            )
        return self._templates.get((shard, chunk.tokens)) or self._template(
            shard, self._tokens(chunk.tokens, chunk.tail)
        )

    def _template(self, shard: int, tokens: int) -> _Template:
        made_before = self._templates.get((shard, tokens))
        if made_before is not None:
            return made_before
        specs = self._plan.specs(self._checked(shard), tokens, native=tokens == self.chunk_size)
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
            len(specs) * (HASH_CHARS + 1) - 1,
            after_hashes,
            None
            if any(spec.nbytes <= _SHORT for spec in specs)
            else array("q", (base, *(tensor.stop for tensor in slices))),
        )
        # Tails have many lengths, so this is bounded; whole chunks are added again when needed.
        if (len(self._templates) + 1) * len(specs) > _TENSORS_KEPT:
            self._templates.clear()
        self._templates[shard, tokens] = template
        return template

    def _object_view(self, buffer: memoryview, template: _Template) -> memoryview:
        view = memoryview(buffer)
        expected = template.size
        if view.readonly or not view.c_contiguous or view.nbytes != expected:
            raise ValueError(
                f"object buffer of {view.nbytes} bytes (writable: {not view.readonly}, contiguous: "
                f"{view.c_contiguous}): expected {expected} writable contiguous bytes"
            )
        return view if view.format == "B" and view.ndim == 1 else view.cast("B")

    def _before_hashes(self, template: _Template, chunk: Chunk) -> bytes:
        return template.before_key + self.text_of(chunk) + template.before_hashes

    def _header(self, template: _Template, chunk: Chunk, hashes: Sequence[str]) -> bytes:
        """Return the header region, `data_offset` bytes."""
        if len(chunk.key) != 32 or len(chunk.parent) != 32 or not 0 <= chunk.index < 2**32:
            raise ValueError(f"{chunk} is not a chunk: key and parent are 32 bytes, index a u32")
        text = ",".join(hashes).encode()
        header = self._before_hashes(template, chunk) + text + template.after_hashes
        return header.ljust(self.data_offset)

    def _check_header(
        self, view: memoryview, template: _Template, chunk: Chunk, shard: int
    ) -> list[str]:
        """Compare the header region with the only valid one; return its hashes."""
        region = view[: self.data_offset].tobytes()
        text_before = self._before_hashes(template, chunk)
        first = len(text_before)
        last = first + template.hash_chars
        # The spaces after the JSON are part of the comparison.
        after = template.after_hashes.ljust(self.data_offset - last)
        if region.startswith(text_before) and region[last:] == after:
            text = region[first:last]
            commas = b"," * (len(template.specs) - 1)
            if text.translate(None, _HEX) == commas == text[HASH_CHARS :: HASH_CHARS + 1]:
                return text.decode("ascii").split(",")
        raise self._explain(region, template, chunk, shard)

    def _explain(
        self, region: bytes, template: _Template, chunk: Chunk, shard: int
    ) -> BadObjectError:
        """Return the error for a header region that is not the expected one."""
        try:
            length = int.from_bytes(region[:8], "little")
            if length > max(MAX_HEADER, template.size - 8):
                text = "not a safetensors file: it does not begin as one"
                raise BadObjectError(Defect.HEADER_TOO_LARGE, text)
            if length != self.data_offset - 8:
                text = f"header of {length} bytes: expected {self.data_offset - 8}"
                raise BadObjectError(Defect.WRONG_HEADER_LENGTH, text)
            header = parse_header(region[8:])
            expected = {
                "format": FORMAT,
                "namespace": self.namespace.digest.hex(),
                "key": chunk.key.hex(),
                "parent": chunk.parent.hex(),
                "chunk": str(chunk.index),
                "tokens": str(chunk.tokens),
                "shard": str(shard),
                "shards": str(self.shards),
                **({} if self.kind == FULL else {"kind": self.kind}),
            }
            compare_metadata(header.pop(METADATA, None), expected, len(template.specs))
            compare_tensors(header, template.specs)
        except BadObjectError as error:
            return error
        text = "the header is equivalent but not canonical (spacing, order or escapes)"
        return BadObjectError(Defect.HEADER_NOT_CANONICAL, text)


def _check_size(found: int, expected: int) -> None:
    if found != expected:
        defect = Defect.WRONG_SIZE if found > expected else Defect.TRUNCATED_OBJECT
        defect = defect if found else Defect.EMPTY_OBJECT
        raise BadObjectError(defect, f"found {found} bytes, expected {expected}")


def _check_hash(template: _Template, number: int, found: str, hashes: Sequence[str]) -> None:
    if found != hashes[number]:
        name = template.specs[number].name
        text = f"payload damaged: tensor {name!r} has hash {found}, expected {hashes[number]}"
        raise BadObjectError(Defect.PAYLOAD_DAMAGED, text)


def _fill(reader: ReaderLike, view: memoryview, start: int) -> None:
    """Read what fills `view`, in pieces."""
    for at in range(0, len(view), _READ):
        part = view[at : at + _READ]
        count = reader.read_into(part, start + at)
        if count != len(part):
            raise TransientStorageError(
                f"short read: found {count} bytes at {start + at}, expected {len(part)}; "
                "the object was replaced or its storage is failing"
            )
