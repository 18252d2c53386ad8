"""The object format a second time: an implementation made from its description alone.

It shares no line with ``kvshelf.format``, is written to be read
rather than to be fast, and makes the golden vectors. Run it to write them again::

    python tests/golden/format/reference.py

Only ``hashlib``, ``struct``, ``json`` (for the vectors file) and xxh3-128 are used.
"""

from __future__ import annotations

import hashlib
import json
import struct
import unicodedata
from pathlib import Path
from typing import Any

import xxhash

HERE = Path(__file__).parent
ITEM_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1}
WHOLE_BLOCKS = ("opaque-", "replicated-")


# ------------------------------------------------------------------- canonical JSON


def json_string(text: str) -> str:
    """Quote a string: only the quote, the backslash and control characters are escaped."""
    short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n"}
    short |= {"\f": "\\f", "\r": "\\r"}
    quoted = ""
    for character in text:
        if character in short:
            quoted += short[character]
        elif ord(character) < 0x20:
            quoted += f"\\u{ord(character):04x}"
        else:
            quoted += character
    return f'"{quoted}"'


def json_value(value: Any) -> str:
    """Write an integer, a string or a list of either."""
    if isinstance(value, list):
        return "[" + ",".join(json_value(item) for item in value) + "]"
    if isinstance(value, str):
        return json_string(unicodedata.normalize("NFC", value))
    return f"{value:d}"


def canonical(record: dict[str, Any]) -> bytes:
    """Encode a namespace record."""
    fields = [f"{json_string(key)}:{json_value(record[key])}" for key in sorted(record)]
    return ("{" + ",".join(fields) + "}").encode("utf-8")


def digest(record: dict[str, Any]) -> bytes:
    """Digest of a namespace record."""
    return hashlib.sha256(canonical(record)).digest()


# ------------------------------------------------------------------------ chunk keys


def u32(number: int) -> bytes:
    """Little-endian u32."""
    return struct.pack("<I", number)


def root(namespace_digest: bytes, salt: str = "", lora: bytes = b"") -> bytes:
    """Parent of chunk 0."""
    data = b"kvshelf/1" + namespace_digest
    data += u32(len(salt.encode("utf-8"))) + salt.encode("utf-8")
    data += u32(len(lora)) + lora
    return hashlib.sha256(data).digest()


def chunk_key(
    parent: bytes, tokens: list[int], position: int, items: list[tuple[str, int, int]]
) -> bytes:
    """Key of the chunk of `tokens` that starts at `position`; items are (hash, start, length)."""
    data = parent + u32(len(tokens)) + b"".join(u32(token) for token in tokens)
    end = position + len(tokens)
    inside = [
        (start, length, name.encode("utf-8"))
        for name, start, length in items
        if any(position <= place < end for place in (start, start + length - 1))
        or (start < position and start + length > end)
    ]
    data += u32(len(inside))
    for start, length, name in sorted(inside):
        data += u32(len(name)) + name + struct.pack("<q", start - position) + u32(length)
    return hashlib.sha256(data).digest()


def chain(
    namespace_digest: bytes,
    chunk_size: int,
    tokens: list[int],
    salt: str = "",
    lora: bytes = b"",
    items: list[tuple[str, int, int]] | None = None,
) -> tuple[bytes, list[bytes], bytes | None]:
    """Return root, the keys of the whole chunks, and the tail's key."""
    start_of_chain = root(namespace_digest, salt, lora)
    parent = start_of_chain
    keys = []
    for position in range(0, len(tokens), chunk_size):
        piece = tokens[position : position + chunk_size]
        key = chunk_key(parent, piece, position, items or [])
        if len(piece) < chunk_size:
            return start_of_chain, keys, key
        keys.append(key)
        parent = key
    return start_of_chain, keys, None


def object_name(
    group: str,
    key: bytes,
    index: int,
    tail: int | None,
    shard: int,
    shards: int,
    kind: str = "full",
) -> str:
    """Name of an object inside its namespace folder."""
    name = key.hex()
    middle = str(index) if tail is None else f"{index}t{tail}"
    if kind != "full":
        middle += f"-{kind}"
    return f"{group}/{name[0:2]}/{name}-{middle}-{shard}of{shards}.safetensors"


# ------------------------------------------------------------------------- the file


def kinds(record: dict[str, Any]) -> list[str]:
    """Kind of each layer."""
    found: list[str] = record.get("kinds", ["full"] * len(record["layer_names"]))
    return found


def shards(record: dict[str, Any], kind: str) -> int:
    """Shards of a kind, over all stages that have layers of it."""
    count: int = record["shards" if kind == "full" else f"{kind}_shards"]
    return count


def stages(record: dict[str, Any], kind: str) -> list[list[int]]:
    """Layers of a kind in each stage that has some, by number."""
    found = []
    first = 0
    for count in record["stages"]:
        found.append([n for n in range(first, first + count) if kinds(record)[n] == kind])
        first += count
    return [layers for layers in found if layers]


def state_tensors(
    record: dict[str, Any], layer: int, per_stage: int
) -> list[tuple[str, str, list[int]]]:
    """Return (name, dtype, shape) of the parts of a state layer."""
    found = []
    parts = record["layer_shapes"][layer].split(";")
    for part, dtype in zip(parts, record["layer_dtypes"][layer].split(";"), strict=True):
        name, extents = part.split(":")
        shape = [
            int(extent[:-1]) // per_stage if extent.endswith("/") else int(extent)
            for extent in extents.split(",")
        ]
        found.append((record["layer_names"][layer] + "." + name, dtype, shape))
    return found


def tensors(
    record: dict[str, Any], shard: int, tokens: int, tail: bool, kind: str = "full"
) -> list[tuple[str, str, list[int]]]:
    """Return (name, dtype, shape) of each tensor of one object."""
    members = stages(record, kind)
    per_stage = shards(record, kind) // len(members)
    found = []
    for layer in members[shard // per_stage]:
        if kind == "state":
            found += state_tensors(record, layer, per_stage)
            continue
        dtype = record["layer_dtypes"][layer]
        layout = record["layouts"][layer]
        parts = record["layer_shapes"][layer].split(",")
        if layout.startswith(WHOLE_BLOCKS):
            shape = [int(parts[0]), int(parts[1])]
        elif len(parts) == 2:
            shape = [tokens, int(parts[1])]
        else:
            heads = int(parts[2]) // per_stage
            head_size = int(parts[3])
            shape = [2, tokens, heads, head_size]
            if layout.startswith("cpu-") and not tail:
                block_size = int(layout.rsplit("-b", 1)[1])
                block_bytes = 2 * block_size * head_size * ITEM_SIZES[dtype]
                shape = [tokens // block_size, heads, block_bytes]
                dtype = "U8"
        found.append((record["layer_names"][layer], dtype, shape))
    return found


def nbytes(dtype: str, shape: list[int]) -> int:
    """Bytes of a tensor."""
    count = ITEM_SIZES[dtype]
    for extent in shape:
        count *= extent
    return count


def header(
    record: dict[str, Any],
    key: str,
    parent: str,
    index: int,
    tokens: int,
    shard: int,
    hashes: list[str],
    layout: list[tuple[str, str, list[int]]],
    namespace: str,
    kind: str,
) -> bytes:
    """Return the JSON of a header, without the spaces behind it."""
    metadata = {
        "format": "kvshelf/1",
        "namespace": namespace,
        "key": key,
        "parent": parent,
        "chunk": str(index),
        "tokens": str(tokens),
        "shard": str(shard),
        "shards": str(shards(record, kind)),
    }
    if kind != "full":
        metadata["kind"] = kind
    metadata["xxh3"] = ",".join(hashes)
    text = '{"__metadata__":{'
    text += ",".join(f"{json_string(k)}:{json_string(v)}" for k, v in metadata.items()) + "}"
    offset = 0
    for name, dtype, shape in layout:
        end = offset + nbytes(dtype, shape)
        text += f",{json_string(name)}:"
        text += f'{{"dtype":"{dtype}","shape":{json_value(shape)},'
        text += f'"data_offsets":[{offset},{end}]}}'
        offset = end
    return (text + "}").encode("utf-8")


def data_offset(record: dict[str, Any]) -> int:
    """Return where the payload starts in every object of a namespace."""
    opaque = any(layout.startswith(WHOLE_BLOCKS) for layout in record["layouts"])
    longest = 0
    for kind in sorted(set(kinds(record))):
        for shard in range(shards(record, kind)):
            for tail in (False,) if opaque else (False, True):
                layout = tensors(record, shard, record["chunk_size"], tail, kind)
                text = header(
                    record,
                    "0" * 64,
                    "0" * 64,
                    4294967295,
                    record["chunk_size"],
                    shard,
                    ["0" * 32] * len(layout),
                    layout,
                    "0" * 64,
                    kind,
                )
                longest = max(longest, len(text))
    offset = 8 + longest
    while offset % 4096:
        offset += 1
    return offset


def encode(
    record: dict[str, Any],
    key: bytes,
    parent: bytes,
    index: int,
    tokens: int,
    shard: int,
    payload: list[bytes],
    kind: str = "full",
) -> bytes:
    """Return a whole object; `payload` is the bytes of each tensor."""
    layout = tensors(record, shard, tokens, tokens < record["chunk_size"], kind)
    assert [len(data) for data in payload] == [nbytes(d, s) for _, d, s in layout]
    hashes = [xxhash.xxh3_128(data).digest().hex() for data in payload]
    text = header(
        record,
        key.hex(),
        parent.hex(),
        index,
        tokens,
        shard,
        hashes,
        layout,
        digest(record).hex(),
        kind,
    )
    length = record["data_offset"] - 8
    assert len(text) <= length
    return struct.pack("<Q", length) + text + b" " * (length - len(text)) + b"".join(payload)


# ---------------------------------------------------------------- fingerprint of weights


def fingerprint(digests: dict[str, str]) -> str:
    """Fingerprint of files given as name -> '<algorithm>:<digest>'."""
    lines = sorted(f"{name} {value}\n".encode() for name, value in digests.items())
    return "sha256:" + hashlib.sha256(b"".join(lines)).hexdigest()


# ------------------------------------------------------------------------ golden vectors


def stream(name: str, count: int) -> bytes:
    """Return `count` bytes that depend only on `name`: SHA-256 of name and a counter."""
    data = b""
    number = 0
    while len(data) < count:
        data += hashlib.sha256(name.encode() + u32(number)).digest()
        number += 1
    return data[:count]


def with_data_offset(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with its data_offset."""
    return {**record, "data_offset": data_offset(record)}


def namespaces() -> dict[str, dict[str, Any]]:
    """Return the records of the vectors."""
    plain = {
        "format": "kvshelf/1",
        "weights": "sha256:" + hashlib.sha256(b"weights").hexdigest(),
        "layers": 3,
        "kv_heads": 4,
        "head_sizes": [8, 8, 8],
        "rope": '{"rope_theta":"500000.0","rope_type":"default"}',
        "sliding_windows": [-1, 4096, -1],
        "attention": ["full", "sliding", "full"],
        "compute_dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "chunk_size": 4,
        "shards": 4,
        "stages": [2, 1],
        "layouts": ["canonical"] * 3,
        "layer_names": [f"model.layers.{i}.self_attn.attn" for i in range(3)],
        "layer_shapes": ["2,*,4,8"] * 3,
        "layer_dtypes": ["BF16"] * 3,
    }
    mla = {
        "format": "kvshelf/1",
        "weights": "user:mla test",
        "layers": 2,
        "mla_rank": 12,
        "attention": ["mla", "mla"],
        "chunk_size": 4,
        "shards": 1,
        "stages": [2],
        "layouts": ["canonical"] * 2,
        "layer_names": ["a", "b"],
        "layer_shapes": ["*,20"] * 2,
        "layer_dtypes": ["F16", "F32"],
    }
    native = {
        "format": "kvshelf/1",
        "weights": "sampled:" + hashlib.sha256(b"sampled").hexdigest(),
        "layers": 1,
        "kv_heads": 2,
        "head_sizes": [8],
        "kv_dtype": "fp8_e4m3",
        "kv_scales": hashlib.sha256(b"scales").hexdigest(),
        "quantization": "fp8",
        "chunk_size": 8,
        "shards": 2,
        "stages": [1],
        "layouts": ["cpu-vec16-bf16-b4"],
        "layer_names": ["model.layers.0.self_attn.attn"],
        "layer_shapes": ["2,*,2,8"],
        "layer_dtypes": ["F8_E4M3"],
        "signing_key": "team-1",
    }
    opaque = {
        "format": "kvshelf/1",
        "weights": "user:x",
        "chunk_size": 4,
        "shards": 2,
        "stages": [1],
        "layouts": ["opaque-0123456789abcdef"],
        "layer_names": ["layer"],
        "layer_shapes": ["2,48"],
        "layer_dtypes": ["U8"],
    }
    replicated = {
        "format": "kvshelf/1",
        "weights": "user:sparse",
        "layers": 3,
        "kv_heads": 1,
        "mla_rank": 8,
        "attention": ["mla"] * 3,
        "chunk_size": 4,
        "shards": 2,
        "stages": [2, 1],
        "layouts": [f"replicated-{n}123456789abcdef" for n in "010"],
        "layer_names": ["layers.0.attn", "layers.0.indexer", "layers.1.attn"],
        "layer_shapes": ["2,40", "2,12", "2,40"],
        "layer_dtypes": ["U8"] * 3,
    }
    hybrid = {
        "format": "kvshelf/1",
        "weights": "user:hybrid",
        "layers": 5,
        "kv_heads": 4,
        "head_sizes": [0, 8, 8, 8, 0],
        "sliding_windows": [-1, -1, 6, -1, -1],
        "attention": ["gdn_attn", "full", "sliding", "full", "short_conv"],
        "kv_dtype": "bfloat16",
        "chunk_size": 4,
        "shards": 4,
        "window_shards": 4,
        "state_shards": 4,
        "stages": [3, 2],
        "kinds": ["state", "full", "window", "full", "state"],
        "layouts": ["state", "canonical", "canonical", "canonical", "state-tp2"],
        "layer_names": [f"model.layers.{i}" for i in range(5)],
        "layer_shapes": [
            "conv_q:3,8/;conv_k:3,8/;conv_v:3,16/;ssm:4/,4,4",
            "2,*,2,8",
            "2,*,4,8",
            "2,*,2,8",
            "conv:2,8",
        ],
        "layer_dtypes": ["BF16;BF16;BF16;F32", "BF16", "BF16", "BF16", "F16"],
    }
    no_full = {
        "format": "kvshelf/1",
        "weights": "user:no full",
        "chunk_size": 4,
        "shards": 2,
        "window_shards": 2,
        "state_shards": 1,
        "stages": [2],
        "kinds": ["state", "window"],
        "layouts": ["state", "cpu-vec-bf16-b2"],
        "layer_names": ["a", "b"],
        "layer_shapes": ["conv:2,16/", "2,*,2,8"],
        "layer_dtypes": ["BF16", "BF16"],
    }
    names = {
        **mla,
        "version": 'e\u0301 "quoted" back\\slash / \u2028 \u007f \U0001f600 \n\t\x01',
        "layer_names": ["couche \u00e9", 'b"'],
    }
    wide = {
        **plain,
        "layers": 80,
        "head_sizes": [8] * 80,
        "sliding_windows": [-1] * 80,
        "attention": ["full"] * 80,
        "stages": [40, 40],
        "layouts": ["canonical"] * 80,
        "layer_names": [f"model.layers.{i}.self_attn.attn" for i in range(80)],
        "layer_shapes": ["2,*,4,8"] * 80,
        "layer_dtypes": ["BF16"] * 80,
    }
    records = {
        "plain": plain,
        "mla": mla,
        "native": native,
        "opaque": opaque,
        "unicode": names,
        "wide": wide,
        "replicated": replicated,
        "hybrid": hybrid,
        "no full": no_full,
    }
    return {name: with_data_offset(record) for name, record in records.items()}


def key_cases() -> list[dict[str, Any]]:
    """Return the inputs of the chunk-key vectors."""
    lora = hashlib.sha256(b"adapter").hexdigest()
    prompt = [(7919 * i + 13) % 128256 for i in range(600)]
    return [
        {"chunk_size": 256, "tokens": prompt},
        {"chunk_size": 4, "tokens": []},
        {"chunk_size": 4, "tokens": [0, 1, 4294967295]},
        {"chunk_size": 4, "tokens": [0, 1, 2, 3], "salt": "tenant \u00e9"},
        {"chunk_size": 4, "tokens": [0, 1, 2, 3, 4, 5, 6, 7, 8], "lora": lora},
        {
            "chunk_size": 4,
            "tokens": list(range(18)),
            "salt": "s",
            "lora": lora,
            "items": [["image-2", 9, 3], ["image-1", 2, 7], ["audio", 16, 400], ["dot", 3, 1]],
        },
    ]


def object_cases() -> dict[str, dict[str, Any]]:
    """Return the golden objects: file name -> what is in it."""
    return {
        "canonical-stage-1-shard-3.safetensors": {"namespace": "plain", "shard": 3, "chunk": 1},
        "mla-tail-of-3.safetensors": {"namespace": "mla", "shard": 0, "chunk": 2},
        "native-shard-1.safetensors": {"namespace": "native", "shard": 1, "chunk": 0},
        "native-tail-of-5.safetensors": {"namespace": "native", "shard": 0, "chunk": 2},
        "opaque.safetensors": {"namespace": "opaque", "shard": 1, "chunk": 1},
        "replicated-stage-0.safetensors": {"namespace": "replicated", "shard": 0, "chunk": 1},
        "hybrid-full-shard-3.safetensors": {"namespace": "hybrid", "shard": 3, "chunk": 1},
        "hybrid-window-shard-2.safetensors": {
            "namespace": "hybrid",
            "kind": "window",
            "shard": 2,
            "chunk": 1,
        },
        "hybrid-state-shard-1.safetensors": {
            "namespace": "hybrid",
            "kind": "state",
            "shard": 1,
            "chunk": 1,
        },
        "hybrid-state-tail-of-3.safetensors": {
            "namespace": "hybrid",
            "kind": "state",
            "shard": 3,
            "chunk": 1,
        },
    }


def make() -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the vectors and the golden objects."""
    records = namespaces()
    found_keys = []
    for case in key_cases():
        items = [(name, start, length) for name, start, length in case.get("items", [])]
        first, keys, tail = chain(
            digest(records["plain"]),
            case["chunk_size"],
            case["tokens"],
            case.get("salt", ""),
            bytes.fromhex(case.get("lora", "")),
            items,
        )
        found_keys.append(
            {
                "namespace_digest": digest(records["plain"]).hex(),
                **case,
                "root": first.hex(),
                "keys": [key.hex() for key in keys],
                "tail": tail.hex() if tail else None,
            }
        )
    key = hashlib.sha256(b"key").digest()
    group = hashlib.sha256(b"tenant").hexdigest()[:16]
    names = [
        {"group": "_", "index": 0, "tail": None, "shard": 0, "shards": 1},
        {"group": "_", "index": 4294967295, "tail": None, "shard": 127, "shards": 128},
        {"group": group, "index": 12, "tail": 255, "shard": 7, "shards": 8},
        {"group": "_", "index": 3, "tail": None, "shard": 1, "shards": 2, "kind": "window"},
        {"group": group, "index": 3, "tail": 7, "shard": 0, "shards": 1, "kind": "state"},
    ]
    names = [{"key": key.hex(), **n, "name": object_name(key=key, **n)} for n in names]
    objects: dict[str, dict[str, Any]] = {}
    files: dict[str, bytes] = {}
    for file, case in object_cases().items():
        record = records[case["namespace"]]
        kind = case.get("kind", "full")
        size = record["chunk_size"]
        index = case["chunk"]
        prompt = [11 * i % 1000 for i in range(index * size + size)]
        if "tail-of-" in file:
            count = int(file.removesuffix(".safetensors").rsplit("-", 1)[1])
            prompt = prompt[: index * size + count]
        start, keys, tail = chain(digest(record), size, prompt)
        own = tail or keys[index]
        parent = keys[index - 1] if index else start
        tokens = len(prompt) - index * size
        layout = tensors(record, case["shard"], tokens, tail is not None, kind)
        payload = [stream(f"{file}/{name}", nbytes(d, s)) for name, d, s in layout]
        data = encode(record, own, parent, index, tokens, case["shard"], payload, kind)
        files[file] = data
        objects[file] = {
            **case,
            "prompt": prompt,
            "tokens": tokens,
            "tail": tail is not None,
            "key": own.hex(),
            "parent": parent.hex(),
            "name": object_name(
                "_",
                own,
                index,
                tokens if tail else None,
                case["shard"],
                shards(record, kind),
                kind,
            ),
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    lines = {
        "model-00001-of-00002.safetensors": "sha256:" + hashlib.sha256(b"blob").hexdigest(),
        "model-00002-of-00002.safetensors": "xxh3-128:" + xxhash.xxh3_128(b"file").hexdigest(),
    }
    vectors = {
        "namespaces": {
            name: {
                "record": record,
                "encoded": canonical(record).decode(),
                "digest": digest(record).hex(),
            }
            for name, record in records.items()
        },
        "keys": found_keys,
        "names": names,
        "objects": objects,
        "weights": {"files": lines, "fingerprint": fingerprint(lines)},
        "xxh3_128": {text: xxhash.xxh3_128(text.encode()).hexdigest() for text in ("", "kvshelf")},
    }
    return vectors, files


if __name__ == "__main__":
    made, golden = make()
    (HERE / "vectors.json").write_text(json.dumps(made, indent=1, ensure_ascii=True) + "\n")
    for file_name, content in golden.items():
        (HERE / file_name).write_bytes(content)
