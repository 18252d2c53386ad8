"""Read objects of a shelf without kvshelf and without vLLM: safetensors and the standard library.

Every object is a plain safetensors file, so every program that reads safetensors can read a shelf.
This program prints the metadata of an object, and for each layer, or each part of its state, the
shape and the Euclidean norm.

    python examples/read_a_chunk.py ~/my-shelf            the first object of every namespace,
                                                             of each kind
    python examples/read_a_chunk.py path/to/an/object.safetensors

Layouts (see docs/format.md): canonical tensors are ``[2, tokens, heads, head_size]``, K then V. A
``cpu-…`` layout keeps blocks as vLLM's CPU backend holds them, ``U8 [blocks, heads, bytes]``: first
half K, second half V. The state of a layer has a tensor for each of its parts, ``<layer>.<part>``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import deserialize


def values(data: bytes, dtype: str) -> Iterable[float]:
    """Return the numbers that `data` encodes."""
    if dtype == "F32":
        return struct.unpack(f"<{len(data) // 4}f", data)
    if dtype == "F16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    if dtype == "BF16":
        # The upper half of a float32.
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        return struct.unpack(f"<{len(data) // 2}f", wide)
    raise SystemExit(f"this program does not know the dtype {dtype}")


def show(path: Path) -> None:
    """Print what one object holds."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    metadata = json.loads(raw[8 : 8 + length])["__metadata__"]
    print(path)
    for name, value in metadata.items():
        print(f"  {name}: {value}")
    # A namespace folder describes itself; an object lies two folders below.
    namespace = json.loads((path.parents[2] / "namespace.json").read_text())
    layers = dict(zip(namespace["layer_names"], namespace["layer_dtypes"], strict=True))
    # A shard holds the layers of its kind in one pipeline stage.
    for name, tensor in deserialize(raw):
        # The layouts of engines are bytes of numbers of the layer's dtype.
        dtype = layers.get(name) if tensor["dtype"] == "U8" else tensor["dtype"]
        norm = math.sqrt(sum(value * value for value in values(bytes(tensor["data"]), dtype)))
        print(f"  {name}: {tensor['dtype']} {tensor['shape']}, norm {norm:.3f}")


def objects(path: Path) -> Iterator[Path]:
    """Yield `path` itself, or the first object of each kind of each namespace of a shelf."""
    if path.is_file():
        yield path
        return
    for namespace in sorted(path.glob("*/namespace.json")):
        found = sorted(namespace.parent.glob("*/??/*.safetensors"))
        for kind in ("", "-window", "-state"):
            # <key>-<index>[t<n>][-<kind>]-<shard>of<shards>.safetensors
            yield from [p for p in found if re.fullmatch(rf"\w+-\w+{kind}-\w+", p.stem)][:1]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Print what objects of a shelf hold.")
    parser.add_argument("path", type=Path, help="an object, or a shelf")
    found = list(objects(parser.parse_args().path))
    if not found:
        raise SystemExit("no objects there")
    for path in found:
        show(path)


if __name__ == "__main__":
    main()
