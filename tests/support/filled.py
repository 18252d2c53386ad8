"""Shelves with objects on them, for tests that copy."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvshelf.format.keys import KeyChain, salt_group_of
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import Shelf, open_shelf
from kvshelf.shelf.view import ObjectRef
from tests.support import prompts
from tests.support.formats import encode, make_record

CHUNK = 32


def namespace(model: str = "Org/Tiny-Llama", *, layers: int = 2, **changes: Any) -> Namespace:
    """A namespace of two shards; a chunk is 32 tokens."""
    record = make_record(
        layers,
        "2,*,4,16",
        **{
            "chunk_size": CHUNK,
            "layer_names": ["model.layers.0.attn", "model.layers.1.attn"],
            "kv_heads": 4,
            "head_sizes": [16, 16],
            "kv_dtype": "bfloat16",
            **changes,
        },
    )
    return Namespace({**record, "layers": layers}, model)


def hybrid(model: str = "Org/Tiny-Hybrid", **changes: Any) -> Namespace:
    """A namespace with a layer of each kind; two shards, and three of states."""
    return namespace(
        model,
        **{
            "layers": 3,
            "head_sizes": [16, 16, 0],
            "state_shards": 3,
            "window_shards": 2,
            "stages": [3],
            "kinds": ["full", "window", "state"],
            "layouts": ["canonical", "canonical", "state"],
            "layer_names": [f"model.layers.{number}" for number in range(3)],
            "layer_shapes": ["2,*,4,16", "2,*,4,16", "conv:3,96/;ssm:6/,16,16"],
            "layer_dtypes": ["BF16", "BF16", "BF16;F32"],
            **changes,
        },
    )


def prompt(seed: int, chunks: int) -> list[int]:
    return prompts.prompt(chunks, seed, unit=CHUNK)


def store(shelf: Shelf, of: Namespace, tokens: Sequence[int], salt: str = "") -> int:
    """Store the chunks of a prompt, with bytes that depend on their keys; return the objects.

    Of a hybrid model, all kinds of each chunk.
    """
    family = ObjectFormat(of)
    group = salt_group_of(salt) if salt else "_"
    count = 0
    for chunk in KeyChain(of.digest, family.chunk_size, salt=salt, salt_group=group).extend(tokens):
        for fmt in map(family.of, family.kinds):
            for shard in range(fmt.shards):
                tensors = (
                    hashlib.shake_128(chunk.key + bytes([shard, number])).digest(tensor.nbytes)
                    for number, tensor in enumerate(fmt.tensors(shard))
                )
                image = encode(fmt, chunk, shard, b"".join(tensors))
                shelf.view(fmt).publish(ObjectRef(chunk, shard), image)
                count += 1
    return count


def fill(root: Path, of: Namespace, *prompts: Sequence[int]) -> None:
    with open_shelf(root) as shelf:
        for tokens in prompts:
            store(shelf, of, tokens)


def contents(root: Path, under: str = "") -> dict[str, bytes]:
    """Every file of a tree, by name; nothing may be a temporary."""
    found = {}
    for path in (root / under).rglob("*"):
        if path.is_file():
            name = str(path.relative_to(root))
            assert not path.name.endswith(".tmp"), name
            found[name] = path.read_bytes()
    return found


def times(root: Path) -> dict[str, int]:
    return {
        str(path.relative_to(root)): os.stat(path).st_mtime_ns
        for path in root.rglob("*")
        if path.is_file()
    }
