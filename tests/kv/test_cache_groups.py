"""Layers of one kind that belong to several cache groups: each group has slots of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.format.kinds import FULL, WINDOW
from kvshelf.kv.caches import HostKVCache, KVCache, LayerCall, LayerRun, layer_calls
from kvshelf.kv.layout import PagedLayout, slots_of
from tests.sim.device import on_a_device
from tests.support.formats import make_format

CHUNK, HEADS, SIZE = 16, 4, 8
#: The group of each window layer, and the tokens in a block of each group.
GROUPS = (0, 1, 1, 0)
BLOCK_SIZES = (4, 8)
BLOCKS = ([5, 0, 3, 6], [2, 7])


FMT = make_format(
    1 + len(GROUPS),
    f"2,*,{HEADS},{SIZE}",
    native=False,
    chunk_size=CHUNK,
    window_shards=2,
    kinds=[FULL] + [WINDOW] * len(GROUPS),
)


def make_caches() -> list[torch.Tensor]:
    return [
        torch.randint(-(2**15), 2**15, (10, HEADS, BLOCK_SIZES[group], 2 * SIZE)).to(torch.int16)
        for group in GROUPS
    ]


def runs_of(caches: list[torch.Tensor]) -> list[LayerRun]:
    """The second group's slots are in front; its two layers are neighbours."""
    layouts = [PagedLayout.from_bhnc(cache, SIZE) for cache in caches]
    return [
        LayerRun(0, [caches[0]], layouts[0], CHUNK),
        LayerRun(1, [caches[1], caches[2]], layouts[1], 0),
        LayerRun(3, [caches[3]], layouts[3], CHUNK),
    ]


def slots() -> torch.Tensor:
    own = [slots_of(BLOCKS[group], BLOCK_SIZES[group], 0, CHUNK) for group in (1, 0)]
    return torch.cat(own)


def rows(caches: list[torch.Tensor], shard: int) -> torch.Tensor:
    """The bytes of a shard's object, by indexing."""
    parts = []
    for cache, group in zip(caches, GROUPS, strict=True):
        blocks = cache[BLOCKS[group]][:, 2 * shard : 2 * shard + 2]
        # [blocks, heads, tokens, K and V] -> [K and V, tokens, heads, elements]
        whole = blocks.unflatten(3, (2, SIZE)).permute(3, 0, 2, 1, 4).reshape(2, CHUNK, 2, SIZE)
        parts.append(whole.contiguous().view(torch.uint8).reshape(-1))
    return torch.cat(parts)


def make_memory(kind: str, calls: dict[int, list[LayerCall]]) -> KVCache:
    if kind == "host":
        return HostKVCache(calls)
    return on_a_device(calls, buffer_bytes=1 << 20 if kind == "device" else 0)


@pytest.fixture(params=["host", "device", "tensors"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[list[torch.Tensor], KVCache]]:
    """The caches of the window layers, and the memory over them."""
    caches = make_caches()
    calls = layer_calls(FMT.of(WINDOW), runs_of(caches))
    memory = make_memory(request.param, calls)
    yield caches, memory
    memory.close()


def test_chunk_of_several_groups_goes_there_and_back(
    pair: tuple[list[torch.Tensor], KVCache],
) -> None:
    caches, memory = pair
    size = FMT.of(WINDOW).payload_size(0)
    payloads = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    copied = memory.gather(slots(), payloads)
    assert copied is not None
    copied.wait()
    for shard, payload in enumerate(payloads):
        assert torch.equal(payload, rows(caches, shard))
    before = [cache.clone() for cache in caches]
    for cache in caches:
        cache[BLOCKS[0] + BLOCKS[1]] = 0
    skipped = slots()
    skipped[:3] = -1
    for shard, payload in enumerate(payloads):
        memory.scatter(shard, skipped, payload, memory.fence())
    for cache, old, group in zip(caches, before, GROUPS, strict=True):
        expected = old.clone()
        expected[BLOCKS[0] + BLOCKS[1]] = 0
        expected[BLOCKS[group]] = old[BLOCKS[group]]
        if group == 1:
            expected[BLOCKS[1][0], :, :3] = 0
        assert torch.equal(cache, expected)


def test_chunk_needs_the_slots_of_all_groups(
    pair: tuple[list[torch.Tensor], KVCache],
) -> None:
    _, memory = pair
    size = FMT.of(WINDOW).payload_size(0)
    payload = torch.zeros(size, dtype=torch.uint8)
    for few in (slots()[:CHUNK], slots()[:-1]):
        with pytest.raises(ValueError, match="slot_mapping"):
            memory.gather(few, [payload, payload.clone()])
        with pytest.raises(ValueError, match="slot_mapping"):
            memory.scatter(0, few, payload)
    with pytest.raises(UnsupportedError, match=r"ha(ve|s) no tails"):
        memory.of_tail(4)


def test_heads_that_the_shards_cannot_divide_are_refused() -> None:
    three = [cache[:, :3] for cache in make_caches()]
    with pytest.raises(ConfigError, match="3 KV heads cannot be split over 2 shards"):
        layer_calls(FMT.of(WINDOW), [LayerRun(0, three, PagedLayout.from_bhnc(three[0], SIZE))])
