"""A program that knows docs/format.md, and nothing of the library, opens a state.

The reader below uses the sentences of that page only: it imports neither kvshelf nor the second
implementation, reads files with the standard library, and gives the state of each layer as numpy
arrays of the whole model.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import STATE
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from tests.support.formats import encode, hybrid_format

Array = np.ndarray[Any, np.dtype[Any]]

#: Elements of each dtype as numpy has them; bfloat16 as its bytes.
DTYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}

# ------------------------------------------------------------------------------ the reader


def open_file(path: Path) -> tuple[dict[str, str], dict[str, Array]]:
    """Return metadata and tensors of one safetensors file of a shelf, checked."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    tensors = {}
    end = 0
    for (name, tensor), digest in zip(header.items(), metadata["xxh3"].split(","), strict=True):
        first, end = tensor["data_offsets"]
        content = data[8 + length :][first:end]
        assert xxhash.xxh3_128_hexdigest(content) == digest
        tensors[name] = np.frombuffer(content, DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    assert len(data) == 8 + length + end
    return metadata, tensors


def key_after(digest: bytes, tokens: list[int], chunk_size: int) -> bytes:
    """Return the key of the last chunk of `tokens`, for a request without salt and adapter."""
    key = hashlib.sha256(b"kvshelf/1" + digest + struct.pack("<II", 0, 0)).digest()
    for start in range(0, len(tokens), chunk_size):
        piece = tokens[start : start + chunk_size]
        packed = struct.pack(f"<{len(piece)}I", *piece)
        key = hashlib.sha256(
            key + struct.pack("<I", len(piece)) + packed + struct.pack("<I", 0)
        ).digest()
    return key


def read_state(shelf: Path, tokens: list[int]) -> dict[str, dict[str, Array]]:
    """Return the state of each layer after `tokens`: layer name -> part -> whole tensor."""
    (folder,) = (path for path in shelf.iterdir() if re.search(r"-[0-9a-f]{16}$", path.name))
    encoded = (folder / "namespace.json").read_bytes()
    digest = hashlib.sha256(encoded).digest()
    assert folder.name.endswith(digest.hex()[:16])
    record = json.loads(encoded)

    size = record["chunk_size"]
    key = key_after(digest, tokens, size).hex()
    count = -(-len(tokens) // size)
    tail = f"t{len(tokens) % size}" if len(tokens) % size else ""
    shards = record["state_shards"]
    metadata, stored = zip(
        *(
            open_file(
                folder / "_" / key[:2]
                / f"{key}-{count - 1}{tail}-state-{shard}of{shards}.safetensors"
            )
            for shard in range(shards)
        ),
        strict=True,
    )  # fmt: skip
    for shard, found in enumerate(metadata):
        assert found["namespace"] == digest.hex()
        assert (found["key"], found["kind"]) == (key, "state")
        assert (found["shard"], found["shards"]) == (str(shard), str(shards))

    states: dict[str, dict[str, Array]] = {}
    first = 0
    stages = []
    for layers in record["stages"]:
        numbers = range(first, first + layers)
        first += layers
        stages.append([n for n in numbers if record["kinds"][n] == "state"])
    stages = [numbers for numbers in stages if numbers]
    split = shards // len(stages)
    for stage, numbers in enumerate(stages):
        of_stage = stored[stage * split : (stage + 1) * split]
        for number in numbers:
            layer = record["layer_names"][number]
            parts = states[layer] = {}
            for text in record["layer_shapes"][number].split(";"):
                part, extents = text.split(":")
                pieces = [tensors[f"{layer}.{part}"] for tensors in of_stage]
                divided = [n for n, extent in enumerate(extents.split(",")) if "/" in extent]
                # Of an undivided state: one tensor for each rank.
                parts[part] = np.concatenate(pieces, divided[0]) if divided else np.stack(pieces)
    return states


# -------------------------------------------------------------------------------- the tests


def fill_shelf(shelf: Path, fmt: ObjectFormat, chunk: Chunk, rng: Any) -> list[dict[str, Array]]:
    """Write the objects of a state with random content; return the tensors of each shard."""
    folder = shelf / fmt.namespace.folder
    folder.mkdir(parents=True)
    (folder / "namespace.json").write_bytes(fmt.namespace.encoded)
    found = []
    for shard in range(fmt.shards):
        tensors = {
            spec.name: np.frombuffer(rng.bytes(spec.nbytes), DTYPES[spec.dtype]).reshape(spec.shape)
            for spec in fmt.tensors(shard, chunk.tokens)
        }
        path = folder / object_name(chunk, shard, fmt.shards, STATE)
        path.parent.mkdir(parents=True, exist_ok=True)
        payload = b"".join(array.tobytes() for array in tensors.values())
        path.write_bytes(encode(fmt, chunk, shard, payload))
        found.append(tensors)
    return found


@pytest.mark.parametrize("count", [16, 19])
def test_reader_of_the_page_opens_a_state(count: int, tmp_path: Path) -> None:
    fmt = hybrid_format().of(STATE)
    tokens = [7 * n % 1000 for n in range(count)]
    chain = KeyChain(fmt.namespace.digest, fmt.chunk_size)
    chain.extend(tokens)
    chunk = chain.tail() or chain.chunks[-1]
    zero, one = fill_shelf(tmp_path, fmt, chunk, np.random.default_rng(0))

    states = read_state(tmp_path, tokens)

    assert {layer: list(parts) for layer, parts in states.items()} == {
        "layers.0": ["conv_q", "conv_k", "conv_v", "ssm"],
        "layers.3": ["conv"],
    }
    assert states["layers.0"]["ssm"].shape == (4, 4, 4)
    assert states["layers.0"]["ssm"].dtype == np.float32
    np.testing.assert_array_equal(states["layers.0"]["ssm"][:2], zero["layers.0.ssm"])
    np.testing.assert_array_equal(states["layers.0"]["ssm"][2:], one["layers.0.ssm"])
    for part, channels in (("conv_q", 8), ("conv_k", 8), ("conv_v", 16)):
        whole = states["layers.0"][part]
        assert whole.shape == (3, channels)
        np.testing.assert_array_equal(whole[:, : channels // 2], zero[f"layers.0.{part}"])
        np.testing.assert_array_equal(whole[:, channels // 2 :], one[f"layers.0.{part}"])
    assert states["layers.3"]["conv"].shape == (2, 16)


@pytest.mark.real
def test_example_shows_the_parts_of_a_state(tmp_path: Path) -> None:
    fmt = hybrid_format().of(STATE)
    (chunk,) = KeyChain(fmt.namespace.digest, fmt.chunk_size).extend(range(8))
    fill_shelf(tmp_path, fmt, chunk, np.random.default_rng(0))
    example = Path(__file__).parents[2] / "examples" / "read_a_chunk.py"
    shown = subprocess.run(
        [sys.executable, str(example), str(tmp_path)], check=True, capture_output=True, text=True
    ).stdout
    assert "kind: state" in shown
    assert "layers.0.conv_q: BF16 [3, 4], norm " in shown
    assert "layers.0.ssm: F32 [2, 4, 4], norm " in shown
