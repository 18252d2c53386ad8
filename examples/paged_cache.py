"""An engine of your own with a paged KV cache: store and load its blocks, without vLLM.

Two engines have paged caches, in which each prompt lies in blocks that are in no order. The first
one has computed a prompt, and stores it from its blocks. The second one loads it into blocks of its
own, and then computes only the tokens behind the last whole chunk. The KV is random numbers here.

    python examples/paged_cache.py
"""

from __future__ import annotations

import tempfile

import torch

from kvshelf import ChunkCache, Config, ModelFacts, PagedLayout

LAYERS, HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS = 4, 2, 64, 16, 100
#: Everything but the tokens that decides what the KV is. Engines that state the same share it.
FACTS = ModelFacts(
    layers=LAYERS,
    kv_heads=HEADS,
    head_size=HEAD_SIZE,
    dtype="bfloat16",
    weights="random-v1",
    name="paged",
)


class Engine:
    """The KV memory of an engine, and its access to the shelf."""

    def __init__(self, shelf: str) -> None:
        # For each layer [blocks, heads, slots of a block, K and V of a head].
        shape = (BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
        self.caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
        self.shelf = ChunkCache.open(Config(shared_storage_path=shelf), FACTS)
        self.shelf.bind(self.caches, PagedLayout.from_bhnc(self.caches[0], HEAD_SIZE))

    def slots_for(self, tokens: int) -> torch.Tensor:
        """Choose free blocks for a prompt, and return the slot of each of its tokens."""
        blocks = torch.randperm(BLOCKS)[: -(-tokens // BLOCK_SIZE)]
        slots = blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
        return slots.flatten()[:tokens]

    def kv_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the KV in some slots, [layers, tokens, heads, K and V]."""
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        return torch.stack([cache[block, :, offset] for cache in self.caches])


def main() -> None:
    """Store in one engine, load in the other."""
    prompt = list(range(1000))
    with tempfile.TemporaryDirectory() as shelf:
        first, second = Engine(shelf), Engine(shelf)

        mine = first.slots_for(len(prompt))
        for cache in first.caches:  # "computes" the prompt
            cache[mine // BLOCK_SIZE, :, mine % BLOCK_SIZE] = torch.randn(1000, 2, 128).bfloat16()
        report = first.shelf.store(prompt, slot_mapping=mine)
        print(f"the first engine stored {report.chunks} chunks, complete: {report.complete}")

        print(f"the second engine finds {second.shelf.lookup(prompt)} of {len(prompt)} tokens")
        theirs = second.slots_for(len(prompt))
        loaded = int(second.shelf.retrieve(prompt, slot_mapping=theirs).sum())
        equal = torch.equal(second.kv_of(theirs[:loaded]), first.kv_of(mine[:loaded]))
        print(f"it loaded {loaded}, equal: {equal}, and computes {len(prompt) - loaded}")
        first.shelf.close()
        second.shelf.close()


if __name__ == "__main__":
    main()
