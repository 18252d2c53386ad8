"""A cache writer independent of kvshelf: a Triton kernel like those of engines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write(
    out,
    source,
    slots,
    block_stride,
    token_stride,
    head_stride,
    block_size,
    heads,
    size: tl.constexpr,
    width: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token)
    element = tl.arange(0, width)
    values = tl.load(source + (token * heads + head) * size + element, mask=element < size)
    row = out + slot // block_size * block_stride + slot % block_size * token_stride
    tl.store(row + head * head_stride + element, values, mask=element < size)


def write(rows: Tensor, slots: Tensor, content: Tensor) -> None:
    """Write rows of tokens into a paged cache.

    Parameters
    ----------
    rows : Tensor
        K or V of a cache, as a view [blocks, slots of a block, heads, elements] whose
        elements lie beside each other.
    slots : Tensor
        int64 [tokens], on the device.
    content : Tensor
        [tokens, heads, elements], of the cache's dtype, on the device.
    """
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[rows.element_size()]
    rows, content = rows.view(words), content.contiguous().view(words)
    tokens, heads, size = content.shape
    block, token, head, _ = rows.stride()
    _write[(tokens, heads)](
        *(rows, content, slots, block, token, head, rows.shape[1], heads),
        size=size,
        width=triton.next_power_of_2(size),
    )
