"""In which units the elements of permuted caches are copied.

Pure functions of the layout. Safe to call from any thread.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvshelf.kv.layout import PermutedLayout


@dataclass(frozen=True, eq=False, slots=True)
class Units:
    """The units of a permuted layout, of each KV plane.

    A unit is the longest run of elements that is contiguous both in a row and in the cache.

    Attributes
    ----------
    sizes : list of int
        Bytes of a unit.
    offsets : list of Tensor
        int32 [block_size, row_bytes / unit]: the offset of each unit of a token's row inside its
        (block, head), in bytes.
    tables : Tensor
        int32, one-dimensional: all offsets.
    step : int
        All sizes and offsets joined by OR: what power of two divides it divides each of them.
    """

    sizes: list[int]
    offsets: list[Tensor]
    tables: Tensor
    step: int


@functools.lru_cache(maxsize=64)
def units_of(layout: PermutedLayout) -> Units:
    """Return the units of a layout."""
    sizes, offsets = [], []
    with torch.inference_mode(False):
        for rows in layout.positions():
            elements = next(
                count
                for count in range(layout.head_size, 0, -1)
                if layout.head_size % count == 0 and _in_runs(rows, count)
            )
            sizes.append(elements * layout.item_bytes)
            offsets.append((rows[:, ::elements] * layout.item_bytes).contiguous())
        tables = torch.cat([table.view(-1) for table in offsets])
    step = int(np.bitwise_or.reduce([*sizes, *tables.numpy()]))
    return Units(sizes, offsets, tables, step)


def _in_runs(rows: Tensor, count: int) -> bool:
    runs = rows.view(rows.shape[0], -1, count)
    return torch.equal(runs, runs[:, :, :1] + torch.arange(count, dtype=runs.dtype))
