"""A memory tier: KV that was used lately comes from memory, and the shelf is not asked for it.

A cache has a shelf, here a folder, and 3 MiB of memory in front of it. The table says how many
tokens of two prompts are in each of the two:

- What is stored is kept in memory as well. The memory of another process is empty at first;
  what it loads comes into it.
- When memory is full, the prompt that was used longest ago leaves it, its end first.
- What is in memory is loaded although it is on the shelf no more.

No vLLM and no model: the KV is random numbers, 2 KiB for each token.

    python examples/memory_tier.py

An engine has the same option, ``"memory_tier": {"max_bytes": "20GiB"}`` in its
``kv_connector_extra_config``. There the shelf decides what is a hit, and memory makes hits faster.
"""

from __future__ import annotations

import tempfile

import torch

from kvshelf import ChunkCache, Config, ModelFacts

FACTS = ModelFacts(
    layers=4, kv_heads=2, head_size=64, dtype="bfloat16", weights="random-v1", name="memory-tier"
)
FIRST, SECOND = list(range(1024)), list(range(5000, 5768))


def show(event: str, cache: ChunkCache) -> None:
    """Print how many tokens of both prompts are in memory and on the shelf."""
    tiers = [[tier] for tier in ("memory", "shelf")]
    counts = [cache.lookup(prompt, tiers=tier) for prompt in (FIRST, SECOND) for tier in tiers]
    print(f"{event:35} {counts[0]:6} {counts[1]:7} {counts[2]:12} {counts[3]:7}")


def main() -> None:
    """Store in one cache, load in another one, and fill its memory."""
    # [K and V, layers, tokens, heads × head size]
    kv = [torch.randn(2, 4, len(prompt), 128).bfloat16() for prompt in (FIRST, SECOND)]
    found = [torch.zeros_like(one) for one in kv]
    print(f"{'':35}     first prompt        second prompt")
    print(f"{'':35} memory   shelf       memory   shelf")
    with tempfile.TemporaryDirectory() as shelf:
        config = Config(shared_storage_path=shelf, memory_tier={"max_bytes": "3MiB"})
        with ChunkCache.open(config, FACTS) as cache:
            cache.store(FIRST, kv=kv[0])
            show("the first prompt is stored", cache)
        with ChunkCache.open(config, FACTS) as cache:
            show("another process opens the shelf", cache)
            cache.retrieve(FIRST, kv=found[0])
            show("it loads the first prompt", cache)
            cache.store(SECOND, kv=kv[1])
            show("it stores the second prompt", cache)
            for chunk in cache.chunk_keys(SECOND):
                cache.remove(chunk, tiers=["shelf"])
            show("the shelf loses the second prompt", cache)
            loaded = int(cache.retrieve(SECOND, kv=found[1]).sum())
    equal = all(torch.equal(one, other) for one, other in zip(kv, found, strict=True))
    print(f"{loaded} tokens of the second prompt are loaded nevertheless; all equal: {equal}")


if __name__ == "__main__":
    main()
