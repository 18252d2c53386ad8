"""Namespaces, chunks and shelves for measurements.

Owns the shapes: a large model (that of Llama 3 8B: 32 layers, 8 KV heads of 128, bf16, of which
256 tokens are 32 MiB) and a small one (that of the demo model: 12 layers, 2 KV heads of 128).
Bytes are random: the time of hashing and copying does not depend on them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.names import object_name
from kvshelf.format.namespace import FORMAT, FieldValue, Namespace
from kvshelf.format.objects import ObjectFormat

CHUNK_TOKENS = 256
#: Tokens in a block of vLLM's CPU backend.
BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """KV of one model, bf16.

    Attributes
    ----------
    layers, kv_heads, head_size : int
    """

    layers: int
    kv_heads: int
    head_size: int = 128

    def chunk_bytes(self, tokens: int = CHUNK_TOKENS) -> int:
        """Bytes of K and V of `tokens` tokens in all layers and heads."""
        return 2 * self.layers * tokens * self.kv_heads * self.head_size * 2


LARGE = Shape(32, 8)
SMALL = Shape(12, 2)
TINY = Shape(2, 2, 64)


def make_format(shape: Shape, shards: int, chunk_tokens: int = CHUNK_TOKENS) -> ObjectFormat:
    """Return the format of the objects that an engine on CPU stores for a model."""
    record: dict[str, FieldValue] = {
        "format": FORMAT,
        "weights": "user:bench",
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_sizes": [shape.head_size] * shape.layers,
        "attention": ["full"] * shape.layers,
        "compute_dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "chunk_size": chunk_tokens,
        "shards": shards,
        "stages": [shape.layers],
        "layouts": [f"cpu-vec16-bf16-b{BLOCK_TOKENS}"] * shape.layers,
        "layer_names": [f"model.layers.{layer}.self_attn.attn" for layer in range(shape.layers)],
        "layer_shapes": [f"2,*,{shape.kv_heads},{shape.head_size}"] * shape.layers,
        "layer_dtypes": ["BF16"] * shape.layers,
    }
    record["data_offset"] = ObjectFormat.required_data_offset(record)
    return ObjectFormat(Namespace(record, "bench"))


def make_prompt(tokens: int, seed: int = 0, vocabulary: int = 32000) -> list[int]:
    """Return random token ids, the same for the same seed."""
    draw = random.Random(seed)  # noqa: S311  not for secrets
    return [draw.randrange(2, vocabulary) for _ in range(tokens)]


def make_chunks(fmt: ObjectFormat, count: int, seed: int = 0) -> list[Chunk]:
    """Return the chunks of a random prompt of `count` chunks."""
    chain = KeyChain(fmt.namespace.digest, fmt.chunk_size)
    return chain.extend(make_prompt(count * fmt.chunk_size, seed))


def fill(view: memoryview) -> None:
    """Fill a buffer with random bytes."""
    piece = 1 << 20
    for start in range(0, len(view), piece):
        part = view[start : start + piece]
        part[:] = os.urandom(len(part))


def make_hollow_objects(root: Path, fmt: ObjectFormat, chunks: Sequence[Chunk]) -> list[str]:
    """Put objects of the right size, without data, on a shelf.

    Parameters
    ----------
    root : Path
        The shelf's directory.
    fmt : ObjectFormat
    chunks : sequence of Chunk
        All their shards are made.

    Returns
    -------
    list of str
        The paths, in the order in which a lookup probes them.
    """
    paths = []
    for chunk in chunks:
        for shard in range(fmt.shards):
            name = object_name(chunk, shard, fmt.shards)
            path = root / fmt.namespace.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.truncate(fmt.object_size(shard))
            paths.append(str(path))
    return paths
