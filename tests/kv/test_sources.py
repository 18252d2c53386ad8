"""What a program may pass as the KV of a prompt, and what is refused before anything is copied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvshelf.errors import KVShelfError
from kvshelf.format.kinds import STATE
from kvshelf.kv.caches import KVCache, LayerRun
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.sources import PagedKV, TupleKV, open_paged
from kvshelf.kv.state_tensors import StateTensors, empty_state
from kvshelf.kv.topology import ShardPlan
from tests.support.formats import BLOCK, HEAD_SIZE, HEADS, LAYERS, make_format

BLOCKS, CHUNK = 8, 8
BF16 = torch.bfloat16


def gathered(memory: KVCache, slots: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    payloads = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    copy = memory.gather(slots, payloads)
    assert copy is not None
    copy.wait()
    return payloads


def random_caches(*shape: int) -> list[torch.Tensor]:
    return [torch.randint(1, 9999, shape, dtype=torch.int16).view(BF16) for _ in range(LAYERS)]


# ------------------------------------------------------------------------- slots


@pytest.mark.parametrize(
    ("slots", "problem"),
    [
        ([12, 13, 14, 15, -1, -1, -1, -1], None),
        # Four slots that cross a block, that are in disorder, and that are of two blocks.
        ([12, 13, 14, 15, 2, 3, 4, 5], "tokens 4 … 7 are not one whole block of 4"),
        ([12, 14, 13, 15, 0, 1, 2, 3], "tokens 0 … 3 are not one whole block"),
        ([12, 13, 2, 3, 0, 1, 2, 3], "tokens 0 … 3 are not one whole block"),
        ([12, 13, 14, 15, 0, -1, 2, 3], "tokens 4 … 7 are not one whole block"),
        ([BLOCKS * BLOCK, 1, 2, 3, 4, 5, 6, 7], "holds 32; expected −1 .skip. or 0 … 31"),
        ([-2, 1, 2, 3, 4, 5, 6, 7], "holds -2; expected"),
    ],
)
def test_native_slots_are_the_slots_of_whole_blocks(slots: list[int], problem: str | None) -> None:
    fmt = make_format()
    caches = random_caches(BLOCKS, HEADS, BLOCK, 2 * HEAD_SIZE)
    source = PagedKV(caches, PagedLayout.native_blocks(caches[0]), torch.tensor(slots))

    def blocks() -> list[int]:
        found: list[int] = source.open(fmt).slots(0, CHUNK).tolist()
        return found

    if problem is None:
        assert blocks() == [3, -1]
        return
    with pytest.raises(ValueError, match=problem):
        blocks()


# ------------------------------------------------------------------------- what does not fit


def pairs(blocks: int = BLOCKS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    shape = (BLOCKS, BLOCK, HEADS, HEAD_SIZE)
    return [(key, key.clone()[:blocks]) for key in random_caches(*shape)]


def open_pairs(caches: list[tuple[torch.Tensor, torch.Tensor]]) -> object:
    return PagedKV(caches, None, torch.arange(CHUNK)).open(make_format(native=False))


def open_caches(head_size: int, plan: ShardPlan) -> object:
    """Open caches of the heads of some of the two shards."""
    caches = random_caches(BLOCKS, len(plan.shards) * HEADS // 2, BLOCK, 2 * head_size)
    layout = PagedLayout.from_bhnc(caches[0], head_size)
    return open_paged(make_format(native=False), [LayerRun(0, caches, layout)], plan)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: open_pairs(pairs()), None),
        (lambda: open_pairs(pairs(BLOCKS - 1)), r"caches\[0\] has shape \[7, 4, 2, 8\]"),
        (lambda: open_pairs(pairs()[:-1]), "KV of 2 layers was given; this namespace has 3"),
        (lambda: open_caches(HEAD_SIZE, ShardPlan((0, 1))), None),
        (lambda: open_caches(2 * HEAD_SIZE, ShardPlan((0, 1))), "takes 256 bytes a shard"),
        (lambda: open_caches(2 * HEAD_SIZE, ShardPlan((1,))), "takes 256 bytes a shard"),
        (
            lambda: TupleKV([(torch.zeros(HEADS, 3, HEAD_SIZE),) * 2] * LAYERS).open(
                make_format(native=False)
            ),
            "is torch.float32; expected torch.bfloat16",
        ),
        (
            lambda: TupleKV(
                [(torch.zeros(HEADS, 3, HEAD_SIZE, dtype=torch.float16),) * 2] * LAYERS
            ).open(make_format(native=False)),
            "is torch.float16; expected torch.bfloat16",
        ),
    ],
)
def test_kv_of_other_sizes_or_dtypes_than_the_namespace_is_refused(
    make: Callable[[], object], problem: str | None
) -> None:
    if problem is None:
        make()
        return
    with pytest.raises(KVShelfError if "bytes" in problem else ValueError, match=problem):
        make()


# ------------------------------------------------------------------------- heads and states


def test_each_shard_has_its_own_heads_of_tensors_that_hold_all() -> None:
    fmt = make_format(native=False)
    layers = [(key, key.clone() + 1) for key in random_caches(HEADS, CHUNK, HEAD_SIZE)]
    bound = TupleKV(layers).open(fmt)
    sizes = [fmt.payload_size(shard) for shard in range(fmt.shards)]
    payloads = gathered(bound.memory, bound.slots(0, CHUNK), sizes)
    for shard, payload in enumerate(payloads):
        expected = [tensor[shard] for pair in layers for tensor in pair]
        assert torch.equal(payload.view(BF16), torch.stack(expected).view(-1))


def test_each_shard_has_its_own_share_of_a_state() -> None:
    fmt = make_format(
        2,
        "conv_q:3,8/;ssm:4/,6,5",
        "BF16;F32",
        "state",
        kinds=[STATE, STATE],
        state_shards=2,
        stages=[2],
    ).of(STATE)
    state = {name: torch.randn_like(part) for name, part in empty_state(fmt).items()}
    sizes = [fmt.payload_size(shard) for shard in range(fmt.shards)]
    payloads = gathered(StateTensors(fmt, state), torch.zeros(1, dtype=torch.int64), sizes)
    for shard, payload in enumerate(payloads):
        expected = [
            part.chunk(fmt.shards, dim=1 if name.endswith("conv_q") else 0)[shard]
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            for name, part in state.items()
        ]
        assert torch.equal(payload, torch.cat(expected))
    again = empty_state(fmt)
    for shard, payload in enumerate(payloads):
        StateTensors(fmt, again).scatter(shard, torch.zeros(1, dtype=torch.int64), payload)
    assert all(torch.equal(again[name], part) for name, part in state.items())
