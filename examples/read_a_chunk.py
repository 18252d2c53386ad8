"""Read objects of a shelf without kvshelf and without vLLM: safetensors and the standard library.

Every object is a plain safetensors file, so every program that reads safetensors can read a shelf.
This program prints the metadata of an object, and for each layer the shape and norms of K and V,
or of the parts of its state.

    python examples/read_a_chunk.py /tmp/my-shelf            the first object of every namespace,
                                                             of each kind
    python examples/read_a_chunk.py path/to/an/object.safetensors

Layouts (see docs/format.md): canonical tensors are ``[2, tokens, heads, head_size]``, K then V. A
``cpu-…`` layout keeps blocks as vLLM's CPU backend holds them, ``U8 [blocks, heads, bytes]``: first
half K, second half V. K may be permuted in there, which changes no norm. A single-content layout
(MLA) and an opaque one are not split. The state of a layer has a tensor for each of its parts,
``<layer>.<part>``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

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


def norm(data: bytes, dtype: str) -> float:
    """Return the Euclidean norm."""
    return math.sqrt(sum(value * value for value in values(data, dtype)))


def halves(data: bytes, pieces: int) -> tuple[bytes, bytes]:
    """Return the first halves of `pieces` equal pieces, and their second halves."""
    size = len(data) // pieces
    half = size // 2
    starts = range(0, len(data), size)
    return (
        b"".join(data[start : start + half] for start in starts),
        b"".join(data[start + half : start + size] for start in starts),
    )


def describe(layout: str, dtype: str, tensor: dict[str, Any]) -> str:
    """Return the norms of one layer's tensor in words."""
    data = bytes(tensor["data"])
    if layout.startswith("cpu-"):
        keys, contents = halves(data, math.prod(tensor["shape"][:2]))
    elif layout == "canonical" and len(tensor["shape"]) == 4:
        keys, contents = halves(data, 1)
    elif layout == "canonical":
        return f"norm {norm(data, dtype):.3f}"
    else:
        return "opaque"
    return f"norm of K {norm(keys, dtype):.3f}, of V {norm(contents, dtype):.3f}"


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
    layers = dict(
        zip(
            namespace["layer_names"],
            zip(namespace["layer_dtypes"], namespace["layouts"], strict=True),
            strict=True,
        )
    )
    # A shard holds the layers of its kind in one pipeline stage.
    for name, tensor in deserialize(raw):
        if metadata.get("kind") == "state":
            text = f"norm {norm(bytes(tensor['data']), tensor['dtype']):.3f}"
            print(f"  {name}: {tensor['dtype']} {tensor['shape']}, {text}")
            continue
        dtype, layout = layers[name]
        print(
            f"  {name}: {tensor['dtype']} {tensor['shape']}, layout {layout},"
            f" {describe(layout, dtype, tensor)}"
        )


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
