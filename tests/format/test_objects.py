"""Chunk files: other readers read them, and no damage goes unnoticed."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    TransientStorageError,
)
from kvshelf.format import objects
from kvshelf.format.invalid import Defect, describe_header
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, KINDS, STATE, WINDOW
from kvshelf.format.names import object_name
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from tests.format.golden_format import GOLDEN, VECTORS, reference
from tests.support import formats
from tests.support.formats import hybrid_format


class BytesReader:
    """An opened object in memory, which notes what was read of it."""

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self.data = data
        self.size = len(data) if size is None else size
        self.reads: list[tuple[int, int]] = []

    def read_into(self, buffer: memoryview, offset: int) -> int:
        part = self.data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        self.reads.append((offset, len(buffer)))
        return len(part)


make_format = functools.partial(formats.make_format, shape="2,*,4,8", native=False)


def make_chunks(fmt: ObjectFormat, tokens: int = 21) -> list[Chunk]:
    """Chunks of a prompt of `tokens` tokens, its tail last."""
    chain = KeyChain(fmt.namespace.digest, fmt.chunk_size)
    chain.extend(range(tokens))
    tail = chain.tail()
    return [*chain.chunks, *([tail] if tail else [])]


def make_object(fmt: ObjectFormat, chunk: Chunk, shard: int = 0) -> bytearray:
    image = bytearray(os.urandom(fmt.object_size(shard, chunk.tokens)))
    fmt.seal(memoryview(image), chunk, shard)
    return image


def read(fmt: ObjectFormat, data: bytes, chunk: Chunk, shard: int = 0) -> bytearray:
    image = bytearray(fmt.object_size(shard, chunk.tokens))
    fmt.read(BytesReader(data), chunk, shard, memoryview(image))
    return image


FORMATS = {
    "bf16": make_format,
    "f16": lambda: make_format(dtype="F16"),
    "f32": lambda: make_format(dtype="F32"),
    "fp8 e4m3": lambda: make_format(dtype="F8_E4M3"),
    "fp8 e5m2": lambda: make_format(dtype="F8_E5M2"),
    "two stages": lambda: make_format(stages=[2, 1], shards=8),
    "mla": lambda: make_format(shape="*,40", shards=1),
    "mla, two stages": lambda: make_format(shape="*,40", shards=2, stages=[1, 2]),
    "native": lambda: make_format(layout="cpu-vec16-bf16-b4"),
    "opaque": lambda: make_format(layout="opaque-0123456789abcdef", shape="2,48", dtype="U8"),
    "replicated": lambda: make_format(
        layout="replicated-0123456789abcdef", shape="2,48", dtype="U8", shards=2, stages=[1, 2]
    ),
    "mixed": lambda: make_format(
        layouts=["canonical", "cpu-amx-bf16-b8", "canonical"],
        layer_shapes=["2,*,4,8", "2,*,2,16", "2,*,8,4"],
        layer_dtypes=["BF16", "F32", "F8_E4M3"],
    ),
    "hybrid, full": hybrid_format,
    "hybrid, window": lambda: hybrid_format().of(WINDOW),
    "hybrid, state": lambda: hybrid_format().of(STATE),
}


def objects_of(fmt: ObjectFormat) -> list[tuple[Chunk, int]]:
    chunks = [chunk for chunk in make_chunks(fmt) if fmt.tails or not chunk.tail]
    return [(chunk, shard) for chunk in chunks for shard in range(fmt.shards)]


# --------------------------------------------------------------------------- it is safetensors


def check_by_safetensors(fmt: ObjectFormat, file: Path, chunk: Chunk, shard: int) -> None:
    """The library reads each tensor of an object as it was written."""
    payload = file.read_bytes()[fmt.data_offset :]
    with safe_open(file, framework="pt") as found:
        specs = fmt.tensors(shard, chunk.tokens)
        assert set(found.keys()) == {spec.name for spec in specs}
        for spec in specs:
            content = found.get_tensor(spec.name).reshape(-1).view(torch.uint8).numpy().tobytes()
            assert content == payload[spec.offset : spec.offset + spec.nbytes]


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    fmt = FORMATS[name]()
    for chunk, shard in objects_of(fmt):
        image = make_object(fmt, chunk, shard)
        file = tmp_path / "object"
        file.write_bytes(image)
        check_by_safetensors(fmt, file, chunk, shard)
        assert read(fmt, image, chunk, shard) == image
        assert fmt.data_offset % 4096 == 0
        payload_bytes = sum(spec.nbytes for spec in fmt.tensors(shard, chunk.tokens))
        assert fmt.payload_size(shard, chunk.tokens) == payload_bytes


# --------------------------------------------------------------------------- golden


@pytest.mark.parametrize("file", VECTORS["objects"])
def test_golden_objects(file: str) -> None:
    vector = VECTORS["objects"][file]
    golden = (GOLDEN / file).read_bytes()
    assert hashlib.sha256(golden).hexdigest() == vector["sha256"]
    assert len(golden) == vector["size"]
    namespace = Namespace(VECTORS["namespaces"][vector["namespace"]]["record"])
    kind = vector.get("kind", FULL)
    fmt = ObjectFormat(namespace).of(kind)
    chain = KeyChain(namespace.digest, fmt.chunk_size)
    chain.extend(vector["prompt"])
    chunk = chain.tail() if vector["tail"] else chain.chunks[vector["chunk"]]
    assert chunk is not None
    assert (chunk.key.hex(), chunk.parent.hex()) == (vector["key"], vector["parent"])
    shard = vector["shard"]
    assert object_name(chunk, shard, fmt.shards, kind) == vector["name"]
    assert read(fmt, golden, chunk, shard) == golden
    check_by_safetensors(fmt, GOLDEN / file, chunk, shard)
    image = bytearray(golden)
    image[: fmt.data_offset] = bytes(fmt.data_offset)
    fmt.seal(memoryview(image), chunk, shard)
    assert image == golden


def test_second_implementation_still_makes_the_vectors() -> None:
    vectors, files = reference.make()
    assert vectors == VECTORS
    for name, content in files.items():
        assert (GOLDEN / name).read_bytes() == content


def test_hashes_are_canonical_xxh3_128() -> None:
    assert VECTORS["xxh3_128"][""] == "99aa06d3014798d86001c324468d497f"
    for text, digest in VECTORS["xxh3_128"].items():
        assert xxhash.xxh3_128_hexdigest(text.encode()) == digest


LAYERS = st.sampled_from(
    [
        (FULL, "canonical", "2,*,8,4", "BF16"),
        (FULL, "canonical", "2,*,16,2", "F8_E5M2"),
        (FULL, "cpu-vec-bf16-b4", "2,*,8,4", "BF16"),
        (WINDOW, "cpu-amx-f8-b2", "2,*,8,4", "F8_E4M3"),
        (WINDOW, "canonical", "2,*,8,4", "F16"),
        (STATE, "state", "conv:3,16/;ssm:8/,2,2", "BF16;F32"),
        (STATE, "state", "conv:24/,3", "F16"),
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    stages=st.lists(st.lists(LAYERS, min_size=1, max_size=40), min_size=1, max_size=3),
    hybrid=st.booleans(),
    splits=st.lists(st.sampled_from([1, 2, 8]), min_size=3, max_size=3),
    index=st.integers(0, 2**32 - 1),
    tail=st.none() | st.integers(1, 7),
    data=st.data(),
)
def test_objects_as_the_second_implementation_writes_them(
    stages: list[list[tuple[str, str, str, str]]],
    hybrid: bool,
    splits: list[int],
    index: int,
    tail: int | None,
    data: st.DataObject,
) -> None:
    if not hybrid:
        full = (FULL, "canonical", "2,*,8,4", "BF16")
        stages = [[layer if layer[0] == FULL else full for layer in stage] for stage in stages]
    layers = [layer for stage in stages for layer in stage]
    found = [kind for kind in KINDS if kind in {layer[0] for layer in layers}]
    shards = {
        kind: splits[number] * sum(any(layer[0] == kind for layer in stage) for stage in stages)
        for number, kind in enumerate(found)
    }
    record: dict[str, Any] = {
        "format": "kvshelf/1",
        "chunk_size": 8,
        "shards": shards[found[0]],
        "stages": [len(stage) for stage in stages],
        "layouts": [layer[1] for layer in layers],
        "layer_names": [f"{'ö' * (n % 5)}.{n}" for n in range(len(layers))],
        "layer_shapes": [layer[2] for layer in layers],
        "layer_dtypes": [layer[3] for layer in layers],
    }
    if found != [FULL]:
        record["kinds"] = [layer[0] for layer in layers]
    record |= {f"{kind}_shards": shards[kind] for kind in found if kind != FULL}
    record = reference.with_data_offset(record)
    assert ObjectFormat.required_data_offset(record) == record["data_offset"]
    fmt = ObjectFormat(Namespace(record))
    assert fmt.kinds == tuple(found)
    fmt = fmt.of(data.draw(st.sampled_from(found)))
    shard = data.draw(st.integers(0, fmt.shards - 1))
    tokens = tail or 8
    chunk = Chunk(os.urandom(32), os.urandom(32), index, tokens, tail is not None)
    payload = [os.urandom(spec.nbytes) for spec in fmt.tensors(shard, tokens)]
    expected = reference.encode(
        record, chunk.key, chunk.parent, index, tokens, shard, payload, fmt.kind
    )
    assert formats.encode(fmt, chunk, shard, b"".join(payload)) == expected
    assert read(fmt, expected, chunk, shard) == expected


# --------------------------------------------------------------------------- damage


FMT = make_format()
CHUNK = make_chunks(FMT)[1]
IMAGE = bytes(make_object(FMT, CHUNK))


def error_of(fmt: ObjectFormat, data: bytes, chunk: Chunk, shard: int = 0) -> BadObjectError:
    """The error of reading `data`."""
    with pytest.raises(BadObjectError) as raised:
        read(fmt, data, chunk, shard)
    return raised.value


@settings(max_examples=300)
@given(data=st.data(), mask=st.integers(1, 255))
@pytest.mark.parametrize("name", ["mla", "native", "opaque", "two stages"])
def test_any_flipped_byte_is_noticed(name: str, data: st.DataObject, mask: int) -> None:
    fmt = FORMATS[name]()
    chunk, shard = data.draw(st.sampled_from(objects_of(fmt)))
    damaged = make_object(fmt, chunk, shard)
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= mask
    error_of(fmt, damaged, chunk, shard)


@given(st.data())
def test_any_truncation_is_noticed(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, len(IMAGE) - 1))
    assert error_of(FMT, IMAGE[:length], CHUNK).defect is Defect.TRUNCATED_OBJECT


@given(extra=st.binary(min_size=1, max_size=9000))
def test_trailing_bytes_are_noticed(extra: bytes) -> None:
    assert error_of(FMT, IMAGE + extra, CHUNK).defect is Defect.WRONG_SIZE


def rewrite(image: bytes, change: Callable[[str], str | bytes]) -> bytes:
    """Change the header's JSON, spaces and payload as they were."""
    length = int.from_bytes(image[:8], "little")
    text = change(image[8 : 8 + length].decode().rstrip(" "))
    encoded = text.encode() if isinstance(text, str) else text
    assert len(encoded) <= length
    return image[:8] + encoded.ljust(length) + image[8 + length :]


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    """Change the header as a dictionary."""

    def apply(text: str) -> str:
        header = json.loads(text)
        change(header)
        return json.dumps(header, separators=(",", ":"))

    return apply


def substitute(pattern: str, replacement: str) -> Callable[[str], str]:
    def apply(text: str) -> str:
        changed, count = re.subn(pattern, replacement, text, count=1)
        assert count == 1
        return changed

    return apply


def reorder(text: str) -> str:
    header = json.loads(text)
    names = list(header)
    order = [names[0], names[2], names[1], *names[3:]]
    return json.dumps({name: header[name] for name in order}, separators=(",", ":"))


def metadata(**fields: Any) -> Callable[[str], str]:
    return edit(lambda header: header["__metadata__"].update(fields))


def tensor(number: int, **fields: Any) -> Callable[[str], str]:
    return edit(lambda header: list(header.values())[number + 1].update(fields))


LAYER = "layers.0.attn"
HEADERS: dict[str, tuple[Callable[[str], str | bytes], Defect]] = {
    "not UTF-8": (
        lambda text: text.encode().replace(b"BF16", b"\xff\xff\xff\xff"),
        Defect.HEADER_NOT_JSON,
    ),
    "cut off": (lambda text: text[:-1], Defect.HEADER_NOT_JSON),
    "two values": (lambda text: text + "{}", Defect.HEADER_NOT_JSON),
    "a list": (lambda text: "[]", Defect.HEADER_NOT_JSON),
    "nothing": (lambda text: "", Defect.HEADER_NOT_JSON),
    "too deep": (lambda text: "[" * 4000, Defect.HEADER_NOT_JSON),
    "zeros behind it": (lambda text: text + "\0", Defect.HEADER_NOT_JSON),
    "a tensor twice": (substitute(r"layers\.1", "layers.0"), Defect.DUPLICATE_KEY),
    "a metadata field twice": (substitute('"parent"', '"key"'), Defect.DUPLICATE_KEY),
    "metadata twice": (substitute(LAYER.replace(".", r"\."), "__metadata__"), Defect.DUPLICATE_KEY),
    "spaces": (substitute(":", ": "), Defect.HEADER_NOT_CANONICAL),
    "another line break": (lambda text: text + "\n", Defect.HEADER_NOT_CANONICAL),
    "escapes": (substitute("layers", r"\\u006cayers"), Defect.HEADER_NOT_CANONICAL),
    "metadata last": (
        edit(lambda h: h.update(__metadata__=h.pop("__metadata__"))),
        Defect.HEADER_NOT_CANONICAL,
    ),
    "fields in another order": (
        edit(lambda h: h["__metadata__"].update(key=h["__metadata__"].pop("key"))),
        Defect.HEADER_NOT_CANONICAL,
    ),
    "no metadata": (edit(lambda header: header.pop("__metadata__")), Defect.WRONG_METADATA),
    "metadata of another kind": (edit(lambda h: h.update(__metadata__=[])), Defect.WRONG_METADATA),
    "another format": (metadata(format="kvshelf/2"), Defect.WRONG_METADATA),
    "another namespace": (metadata(namespace="0" * 64), Defect.WRONG_NAMESPACE),
    "another key": (metadata(key="0" * 64), Defect.WRONG_KEY),
    "the key in capitals": (
        substitute('"key":"[0-9a-f]*"', f'"key":"{"A" * 64}"'),
        Defect.WRONG_KEY,
    ),
    "another parent": (metadata(parent="0" * 64), Defect.WRONG_METADATA),
    "another chunk": (metadata(chunk="01"), Defect.WRONG_METADATA),
    "a number": (metadata(chunk=1), Defect.WRONG_METADATA),
    "other tokens": (metadata(tokens="7"), Defect.WRONG_METADATA),
    "another shard": (metadata(shard="1"), Defect.WRONG_METADATA),
    "other shards": (metadata(shards="4"), Defect.WRONG_METADATA),
    "a field too much": (metadata(model="x"), Defect.WRONG_METADATA),
    "no hashes": (edit(lambda h: h["__metadata__"].pop("xxh3")), Defect.WRONG_METADATA),
    "too few hashes": (metadata(xxh3="0" * 32), Defect.WRONG_METADATA),
    "hashes in capitals": (metadata(xxh3=",".join(["A" * 32] * 3)), Defect.WRONG_METADATA),
    "hashes cut elsewhere": (
        metadata(xxh3=f"{'0' * 31},{'0' * 33},{'0' * 32}"),
        Defect.WRONG_METADATA,
    ),
    "no dtype": (edit(lambda header: header[LAYER].pop("dtype")), Defect.MALFORMED_TENSOR),
    "a field too much in a tensor": (tensor(0, more=1), Defect.MALFORMED_TENSOR),
    "negative offsets": (tensor(0, data_offsets=[-1, 512]), Defect.MALFORMED_TENSOR),
    "one offset": (tensor(0, data_offsets=[0]), Defect.MALFORMED_TENSOR),
    "offsets as text": (tensor(0, data_offsets=["0", "512"]), Defect.MALFORMED_TENSOR),
    "offsets that are true": (tensor(0, data_offsets=[False, 512]), Defect.MALFORMED_TENSOR),
    "a shape that is no list": (tensor(0, shape=8), Defect.MALFORMED_TENSOR),
    "a tensor that is no object": (edit(lambda h: h.update({LAYER: 1})), Defect.MALFORMED_TENSOR),
    "a tensor too few": (edit(lambda header: header.pop(LAYER)), Defect.WRONG_TENSOR_NAME),
    "a tensor too much": (
        edit(lambda h: h.update(x={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})),
        Defect.WRONG_TENSOR_NAME,
    ),
    "another name": (substitute(r"layers\.1", "layers.9"), Defect.WRONG_TENSOR_NAME),
    "another order": (reorder, Defect.WRONG_TENSOR_ORDER),
    "another dtype": (tensor(1, dtype="F16"), Defect.WRONG_DTYPE),
    "another shape": (tensor(1, shape=[2, 2, 8, 8]), Defect.WRONG_SHAPE),
    "overlapping offsets": (tensor(1, data_offsets=[511, 1023]), Defect.TENSOR_OVERLAP),
    "all offsets alike": (tensor(1, data_offsets=[0, 512]), Defect.TENSOR_OVERLAP),
    "a gap": (tensor(1, data_offsets=[513, 1025]), Defect.TENSOR_GAP),
    "a gap in front": (tensor(0, data_offsets=[1, 513]), Defect.TENSOR_GAP),
    "offsets too far apart": (tensor(2, data_offsets=[1024, 2**60]), Defect.WRONG_TENSOR_SIZE),
    "offsets backwards": (tensor(2, data_offsets=[1024, 0]), Defect.WRONG_TENSOR_SIZE),
    "another hash": (metadata(xxh3=",".join(["0" * 32] * 3)), Defect.PAYLOAD_DAMAGED),
}


#: With which fields some of these errors begin.
NAMED = {
    "another namespace": "namespace: ",
    "another key": "key: ",
    "another chunk": "chunk: ",
    "other tokens": "tokens: ",
    "another shard": "shard: ",
}


@pytest.mark.parametrize("name", HEADERS)
def test_each_bad_header_has_its_error(name: str) -> None:
    change, expected = HEADERS[name]
    assert [spec.nbytes for spec in FMT.tensors(0)] == [512, 512, 512]
    damaged = rewrite(IMAGE, change)
    error = error_of(FMT, damaged, CHUNK)
    assert error.defect is expected and error.kind == expected.value
    assert isinstance(error, ValueError)
    assert str(error).startswith(NAMED.get(name, ""))
    again = copy.copy(error)
    assert (again.defect, str(again)) == (expected, str(error))


# --------------------------------------------------------------------------- reading


#: (layers, head size): objects of one small read, many tensors a read, one a read, streamed.
READS = [(3, 8), (30, 256), (9, 2048), (3, 16384), (2, 32768), (1, 131072)]


@pytest.mark.parametrize(("layers", "head_size"), READS)
def test_every_byte_is_read_once_in_order_and_verified(layers: int, head_size: int) -> None:
    fmt = make_format(layers, shape=f"2,*,2,{head_size}", dtype="F32", chunk_size=16)
    chunk = make_chunks(fmt, 16)[0]
    image = make_object(fmt, chunk)
    reader = BytesReader(image)
    target = bytearray(len(image))
    tracemalloc.start()
    try:
        fmt.read(reader, chunk, 0, memoryview(target))
        # BytesReader itself holds one piece.
        assert tracemalloc.get_traced_memory()[1] < (2 << 20)
    finally:
        tracemalloc.stop()
    assert target == image
    place = 0
    for offset, length in reader.reads:
        assert offset == place
        assert length <= fmt.data_offset + (1 << 20)
        place += length
    assert place == len(image)
    for spec in fmt.tensors(0):
        for where in (spec.offset, spec.offset + spec.nbytes - 1):
            image[fmt.data_offset + where] ^= 1
            error = error_of(fmt, image, chunk)
            assert error.defect is Defect.PAYLOAD_DAMAGED
            assert repr(spec.name) in str(error)
            image[fmt.data_offset + where] ^= 1


@given(st.data())
def test_short_reads_are_the_storages_fault(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(IMAGE) - 1))
    reader = BytesReader(IMAGE[:length], size=len(IMAGE))
    with pytest.raises(TransientStorageError, match="short read"):
        FMT.read(reader, CHUNK, 0, memoryview(bytearray(len(IMAGE))))


def test_templates_of_many_tails_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_TENSORS_KEPT", 12)
    fmt = make_format(chunk_size=64)
    for chunk in [make_chunks(fmt, n)[-1] for n in range(1, 65)]:
        image = make_object(fmt, chunk)
        assert read(fmt, image, chunk) == image
    assert len(fmt._templates) <= 4
    # A forged record may have many layers.
    assert make_format(layers=13).tensors(0)


# --------------------------------------------------------------------------- misuse


def test_object_buffers_must_fit() -> None:
    for wrong in (
        memoryview(bytearray(len(IMAGE) + 1)),
        memoryview(bytearray(len(IMAGE) - 1)),
        memoryview(IMAGE),
        memoryview(bytearray(2 * len(IMAGE)))[::2],
    ):
        with pytest.raises(ValueError, match="object buffer"):
            FMT.seal(wrong, CHUNK, 0)
        with pytest.raises(ValueError, match="object buffer"):
            FMT.read(BytesReader(IMAGE), CHUNK, 0, wrong)
    # Any element type will do.
    words = memoryview(bytearray(IMAGE)).cast("I")
    FMT.seal(words, CHUNK, 0)
    FMT.read(BytesReader(IMAGE), CHUNK, 0, words)
    assert words.tobytes() == IMAGE


def test_chunks_and_shards_must_fit() -> None:
    view = memoryview(bytearray(IMAGE))
    for wrong in (
        replace(CHUNK, tokens=7),
        replace(CHUNK, tail=True),
        replace(CHUNK, tokens=9, tail=True),
        replace(CHUNK, tokens=0, tail=True),
        replace(CHUNK, key=b"short"),
        replace(CHUNK, parent=b""),
        replace(CHUNK, index=2**32),
        replace(CHUNK, index=-1),
    ):
        with pytest.raises(ValueError, match=r"chunk|tokens|IMAGE"):
            FMT.seal(view, wrong, 0)
    for shard in (-1, 2):
        with pytest.raises(ValueError, match="shard"):
            FMT.seal(view, CHUNK, shard)
        with pytest.raises(ValueError, match="shard"):
            FMT.object_size(shard)
    with pytest.raises(ValueError, match="tail needs"):
        FMT.tensors(0, tail=True)
    with pytest.raises(ValueError, match="tokens"):
        FMT.tensors(0, 8, tail=True)
    assert FMT.tensors(0, 8) == FMT.tensors(0)


# --------------------------------------------------------------------------- namespaces


@pytest.mark.parametrize("missing", ["chunk_size", "shards", "stages", "layouts", "data_offset"])
def test_missing_fields_are_named(missing: str) -> None:
    record = make_format().namespace.record
    del record[missing]
    with pytest.raises(ConfigError, match=missing):
        ObjectFormat(Namespace(record))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shards": 3}, "divisor of 4"),
        ({"shards": 0}, "shards"),
        ({"stages": [2, 1], "shards": 3}, "multiple of the 2 stages"),
        ({"stages": [2]}, "stages"),
        ({"stages": [3, 0]}, "stages"),
        ({"stages": []}, "stages"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"layouts": ["canonical"]}, "layouts"),
        ({"layer_names": ["a", "a", "b"]}, "layer_names"),
        ({"layer_names": ["a", "__metadata__", "b"]}, "layer_names"),
        ({"dtype": "I8"}, "dtype"),
        ({"layout": "strided"}, "layout"),
        ({"layout": "cpu-vec-bf16"}, "layout"),
        ({"layout": "cpu-vec-bf16-b3"}, "multiple of the block size"),
        ({"layout": "cpu-vec-bf16-b4", "shape": "*,40", "shards": 1}, "shape"),
        ({"layout": "opaque-0123456789abcdef"}, "opaque"),
        ({"layout": "opaque-0123456789abcdef", "shape": "2,48"}, "opaque"),
        ({"layout": "replicated-0123456789abcdef"}, "replicated"),
        (
            {"layout": "replicated-0123456789abcdef", "shape": "2,48", "dtype": "U8"},
            "set `shards` to the number of stages",
        ),
        ({"layout": "replicated-0123", "shape": "2,48", "dtype": "U8"}, "layout"),
        ({"shape": "2,8,4,8"}, "shape"),
        ({"shape": "2,*,04,8"}, "shape"),
        ({"shape": "*,40"}, "set `shards`"),
        ({"shape": "2,48", "dtype": "U8"}, "shape"),
        ({"data_offset": 8192}, "data_offset"),
        ({"data_offset": 4095}, "data_offset"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_format(**fields)


def test_number_of_layers_must_agree() -> None:
    record = make_format().namespace.record
    assert ObjectFormat(Namespace({**record, "layers": 3})).data_offset == 4096
    with pytest.raises(ConfigError, match="layers is 4"):
        ObjectFormat(Namespace({**record, "layers": 4}))


# --------------------------------------------------------------------------- describing


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", Defect.EMPTY_OBJECT),
        (b"1234567", Defect.TRUNCATED_OBJECT),
        (b"\xff" * 8, Defect.HEADER_TOO_LARGE),
        (((16 << 20) + 1).to_bytes(8, "little"), Defect.HEADER_TOO_LARGE),
        (b"\x08" + bytes(7) + b"{}", Defect.TRUNCATED_OBJECT),
        (b"\x02" + bytes(7) + b"[]", Defect.HEADER_NOT_JSON),
        (b"\x02" + bytes(7) + b"\xff{", Defect.HEADER_NOT_JSON),
        (b"\x0d" + bytes(7) + b'{"a":1,"a":1}', Defect.DUPLICATE_KEY),
        (b"\x07" + bytes(7) + b'{"a":1}', Defect.MALFORMED_TENSOR),
        (b"\x13" + bytes(7) + b'{"__metadata__":[]}', Defect.WRONG_METADATA),
        (b"\x1a" + bytes(7) + b'{"__metadata__":{"key":1}}', Defect.WRONG_METADATA),
    ],
)
def test_bad_headers_are_described_by_errors(raw: bytes, expected: Defect) -> None:
    with pytest.raises(BadObjectError) as raised:
        describe_header(raw)
    assert raised.value.defect is expected


@given(st.binary(max_size=200))
def test_describing_anything_is_safe(raw: bytes) -> None:
    length = len(raw).to_bytes(8, "little")
    try:
        describe_header(length + raw)
    except BadObjectError:
        pass
