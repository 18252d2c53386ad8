"""Gather and scatter as operators of torch, for programs that want nothing else of kvshelf.

The KV of a sequence lies in blocks all over a paged cache. ``torch.ops.kvshelf.gather_kv`` copies
it into one buffer, which goes through a file here; ``torch.ops.kvshelf.scatter_kv`` copies it into
other blocks of a cache that has another layout. Arguments that do not fit are refused before any
memory is touched. At last ``torch.library.opcheck`` examines both operators.

    python examples/custom_op.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import kvshelf.ops  # noqa: F401  registers torch.ops.kvshelf
from kvshelf import PagedLayout

LAYERS, BLOCKS, HEADS, BLOCK_SIZE, HEAD_SIZE = 4, 50, 2, 16, 64


def slots_of(blocks: list[int]) -> torch.Tensor:
    """Return the slots of all tokens in some blocks."""
    return (torch.tensor(blocks)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()


def main() -> None:
    """Move a sequence from one paged cache into another, and examine the operators."""
    gather, scatter = torch.ops.kvshelf.gather_kv, torch.ops.kvshelf.scatter_kv

    # [blocks, heads, slots of a block, K and V of a head] for each layer
    ours = [torch.randn(BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE).bfloat16() for _ in range(LAYERS)]
    layout = PagedLayout.from_bhnc(ours[0], HEAD_SIZE)
    slots = slots_of([7, 31, 2])
    buffer = torch.empty(LAYERS * layout.chunk_bytes(len(slots)), dtype=torch.uint8)
    gather(ours, slots, buffer, layout.as_ints(), 0, HEADS)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sequence.safetensors"
        save_file({"kv": buffer}, file)
        print(f"gathered {len(slots)} tokens into {buffer.numel()} bytes, and wrote them to a file")
        buffer = load_file(file)["kv"]

    # [K and V, blocks, slots of a block, heads, head size] for each layer
    shape = (2, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE)
    theirs = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
    other = PagedLayout.from_2bnhd(theirs[0])
    places = slots_of([40, 3, 11])
    scatter(theirs, places, buffer, other.as_ints(), 0, HEADS)

    written = torch.cat(list(theirs[0][:, places // BLOCK_SIZE, places % BLOCK_SIZE]), dim=-1)
    equal = torch.equal(written, ours[0][slots // BLOCK_SIZE, :, slots % BLOCK_SIZE])
    print(f"scattered them into a cache of another layout; layer 0 equal: {equal}")

    try:
        gather(ours, slots + 10_000, buffer, layout.as_ints(), 0, HEADS)
    except ValueError as error:
        print(f"refused: {error}")

    for operator, arguments in (
        (gather.default, (ours, slots, buffer, layout.as_ints(), 0, HEADS)),
        (scatter.default, (theirs, places, buffer, other.as_ints(), 0, HEADS)),
    ):
        results = torch.library.opcheck(operator, arguments)
        print(f"{operator}: {len(results)} checks, {set(results.values())}")


if __name__ == "__main__":
    main()
