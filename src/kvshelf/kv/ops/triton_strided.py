"""Gather and scatter of strided caches by one Triton kernel.

Serves devices for which kvshelf has no kernels of its own. Importing this module imports Triton.

Everything that a call needs, addresses included, reaches the kernel in one int64 tensor. So the
values of a call never make Triton compile: there are as many kernels as directions and widths of
words, and :func:`compile_kernels` compiles all of them.

Safe to call from any thread. A call is enqueued on torch's current stream and waits for nothing. It
allocates a small tensor, so it cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
from array import array
from contextlib import AbstractContextManager
from typing import Any, Final, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.ops.checks import Call, check_slot_values, checked
from kvshelf.kv.ops.torch_copy import WORDS, sent, widest_word

#: Tokens and lanes of a program; a lane is one word of a token: (kv, head, word of the row).
_TOKENS: Final = 16
_LANES: Final = 128
#: Integers of a plan in front of the caches' addresses; the last is the buffers' address.
_FIELDS: Final = tl.constexpr(11)


@triton.jit
def _copy(
    plan: tl.tensor,
    gather: tl.constexpr,
    word: tl.constexpr,
    tokens_at_once: tl.constexpr,
    lanes_at_once: tl.constexpr,
) -> None:
    layers = tl.load(plan)
    tokens = tl.load(plan + 1)
    kv_planes = tl.load(plan + 2)
    shard_heads = tl.load(plan + 3)
    heads = tl.load(plan + 4) * shard_heads
    row = tl.load(plan + 5)
    buffer_token_stride = shard_heads * row
    buffer_layer_stride = kv_planes * tokens * buffer_token_stride

    # Lanes innermost: programs that run at the same time touch neighbouring memory.
    lanes = kv_planes * heads * row
    lane_tiles = tl.cdiv(lanes, lanes_at_once)
    token_tiles = tl.cdiv(tokens, tokens_at_once)
    rest = tl.program_id(0) // lane_tiles
    lane_tile = tl.program_id(0) - rest * lane_tiles
    layer = rest // token_tiles
    token_tile = rest - layer * token_tiles

    lane = (lane_tile * lanes_at_once + tl.arange(0, lanes_at_once)).to(tl.int32)
    of_row = lane // row.to(tl.int32)
    in_row = lane - of_row * row.to(tl.int32)
    kv = of_row // heads.to(tl.int32)
    head = of_row - kv * heads.to(tl.int32)
    shard = head // shard_heads.to(tl.int32)
    paged_lane = kv * tl.load(plan + 6) + head * tl.load(plan + 7) + in_row
    buffer_lane = shard * tl.load(plan + 8) + (head - shard * shard_heads) * row + in_row
    buffer_lane += kv * tokens * buffer_token_stride

    token = token_tile * tokens_at_once + tl.arange(0, tokens_at_once)
    places = plan + _FIELDS + layers
    place = tl.load(places + token, mask=token < tokens, other=-1)

    inside = (token < tokens)[:, None] & (lane < lanes)[None, :]
    used = (place >= 0)[:, None] & inside
    cache = tl.load(plan + _FIELDS + layer).to(tl.pointer_type(word)) + tl.load(plan + 9)
    paged = cache + (place[:, None] + paged_lane[None, :])
    buffer = tl.load(plan + _FIELDS - 1).to(tl.pointer_type(word)) + layer * buffer_layer_stride
    packed = buffer + ((token * buffer_token_stride)[:, None] + buffer_lane[None, :])
    if gather:
        tl.store(packed, tl.load(paged, mask=used, other=0), mask=inside)
    else:
        tl.store(paged, tl.load(packed, mask=used), mask=used)


_TYPES: Final = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}


def run_triton(call: Call[PagedLayout], *, gather: bool) -> None:
    """Execute a checked call of one chunk on its caches' device.

    Raises
    ------
    ValueError
        If a slot is not in the cache.
    """
    slots = call.slots.clone()  # so that the slots that are checked are those that are used
    check_slot_values(slots, call.layout)
    if slots.numel() == 0:
        return
    device = call.known.device
    with torch.inference_mode(), _current(device):
        buffers = call.shard_buffers
        width = widest_word(call, buffers).itemsize
        lanes = call.layout.chunk_bytes(1, call.num_heads) * call.shards // width
        tiles = -(-call.tokens // _TOKENS) * -(-lanes // _LANES)
        cast(Any, _copy)[(len(call.caches) * tiles,)](
            sent(_plan(call, slots, buffers, width), device),
            gather=gather,
            word=_TYPES[width],
            tokens_at_once=_TOKENS,
            lanes_at_once=_LANES,
        )


def _plan(call: Call[PagedLayout], slots: Tensor, buffers: Tensor, width: int) -> Tensor:
    """Return the kernel's integers: addresses, counts, and steps in words.

    At their end is the place of each token in the caches, −1 for those that are skipped.
    """
    layout = call.layout
    # Unsigned, as data_ptr() is: on some devices addresses have the highest bit.
    addresses = array("Q", (buffers.data_ptr(), *call.known.addresses))
    fields = (
        len(call.caches),
        call.tokens,
        layout.kv_planes,
        call.num_heads,
        call.shards,
        layout.row_bytes // width,
        layout.kv_stride // width,
        layout.head_stride // width,
        buffers.stride(0) // width,
        call.first_head * layout.head_stride // width,
    )
    blocks = slots.view(-1) // layout.block_size
    places = blocks * (layout.block_stride // width)
    places += (slots.view(-1) - blocks * layout.block_size) * (layout.token_stride // width)
    places.masked_fill_(blocks < 0, -1)
    return torch.cat((torch.tensor(fields), torch.frombuffer(addresses, dtype=torch.int64), places))


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the calling thread's: Triton launches on the one that is."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return cast(AbstractContextManager[Any], torch.get_device_module(device).device(device))


def compile_kernels(device: torch.device) -> None:
    """Compile the kernels of all widths for a device, and try each on it.

    Waits for the device.

    Raises
    ------
    Exception
        Of any type, if Triton cannot compile for the device.
    RuntimeError
        If a kernel does not copy what it should.
    """
    slots = torch.tensor([5, 0, 3])
    for width, _ in WORDS:
        layout = PagedLayout(
            block_size=2,
            block_stride=4 * width,
            token_stride=2 * width,
            kv_stride=width,
            head_stride=0,
            kv_planes=2,
            heads=1,
            row_bytes=width,
            num_blocks=3,
        )
        rows = torch.arange(12 * width, dtype=torch.uint8).view(6, 2, width)
        source, target = rows.to(device), torch.zeros_like(rows, device=device)
        packed = torch.empty(2 * 3 * width, dtype=torch.uint8, device=device)
        for cache, gather in ((source, True), (target, False)):
            run_triton(
                checked(
                    [cache],
                    slots,
                    packed,
                    layout.as_ints(),
                    first_head=0,
                    num_heads=1,
                    gather=gather,
                ),
                gather=gather,
            )
        expected = torch.zeros_like(rows)
        expected[slots] = rows[slots]
        gathered = packed.cpu().view(2, 3, width).transpose(0, 1)
        if not torch.equal(gathered, rows[slots]) or not torch.equal(target.cpu(), expected):
            raise RuntimeError(f"its kernels copy words of {width} bytes wrongly")
