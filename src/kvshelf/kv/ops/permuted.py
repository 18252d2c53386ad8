"""The form of a permuted layout that the operators take: integers and tables.

Pure functions of the layout. Safe to call from any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvshelf.kv.layout import PermutedLayout


@functools.lru_cache(maxsize=64)
def permuted_tables(layout: PermutedLayout) -> tuple[tuple[int, ...], Tensor]:
    """Return a permuted layout in the form that the operators take.

    Returns
    -------
    sizes : tuple of int
        block_size, block_stride, head_stride, kv_planes, heads, row_bytes, num_blocks,
        region_bytes, unit_k, unit_v; strides and units in bytes, unit_v 0 if there is no V.
    tables : Tensor
        int32, one-dimensional. For each KV plane [block_size, row_bytes / unit]: the byte
        offset of each unit of a token's row inside its (block, head). A unit is the longest
        run of elements that is contiguous both in a row and in the cache.
    """
    units = [0, 0]
    tables = []
    with torch.inference_mode(False):
        for kv, rows in enumerate(layout.positions()):
            elements = next(
                count
                for count in range(layout.head_size, 0, -1)
                if layout.head_size % count == 0 and _in_runs(rows, count)
            )
            units[kv] = elements * layout.item_bytes
            tables.append((rows[:, ::elements] * layout.item_bytes).reshape(-1))
        joined = torch.cat(tables)
    return (
        layout.block_size,
        layout.block_stride,
        layout.head_stride,
        layout.kv_planes,
        layout.heads,
        layout.row_bytes,
        layout.num_blocks,
        layout.region_bytes,
        units[0],
        units[1],
    ), joined


def _in_runs(rows: Tensor, count: int) -> bool:
    runs = rows.view(rows.shape[0], -1, count)
    return torch.equal(runs, runs[:, :, :1] + torch.arange(count, dtype=runs.dtype))


@dataclass(frozen=True, slots=True)
class PermutedSizes:
    """The `sizes` of :func:`permuted_tables`, checked."""

    block_size: int
    block_stride: int
    head_stride: int
    kv_planes: int
    heads: int
    row_bytes: int
    num_blocks: int
    region_bytes: int
    unit_k: int
    unit_v: int

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> PermutedSizes:
        """Check and name the integers of a call.

        Raises
        ------
        ValueError
            If they do not describe a permuted cache.
        """
        if len(values) != len(PERMUTED_SIZES):
            raise ValueError(
                f"sizes are {len(PERMUTED_SIZES)} integers ({', '.join(PERMUTED_SIZES)}), found "
                f"{len(values)}: pass those of permuted_tables()"
            )
        sizes = cls(*values)
        units = (sizes.unit_k, sizes.unit_v)[: sizes.kv_planes]
        if (
            min(sizes.block_size, sizes.heads, sizes.row_bytes, sizes.region_bytes, *units) < 1
            or sizes.kv_planes not in (1, 2)
            or min(sizes.num_blocks, sizes.block_stride, sizes.head_stride) < 0
            or any(sizes.row_bytes % unit for unit in units)
        ):
            raise ValueError(
                f"{sizes} do not describe a permuted cache: pass those of permuted_tables()"
            )
        return sizes

    @property
    def units(self) -> tuple[int, ...]:
        """Bytes of a unit, for each KV plane."""
        return (self.unit_k, self.unit_v)[: self.kv_planes]

    @property
    def table_entries(self) -> int:
        """Number of entries of the tables."""
        return sum(self.block_size * (self.row_bytes // unit) for unit in self.units)

    @property
    def num_slots(self) -> int:
        """Slots of a cache."""
        return self.num_blocks * self.block_size

    @property
    def extent(self) -> int:
        """Bytes from the first byte of the cache to the end of its last (block, head)."""
        if self.num_blocks == 0:
            return 0
        last = (self.num_blocks - 1) * self.block_stride + (self.heads - 1) * self.head_stride
        return last + self.region_bytes

    def chunk_bytes(self, tokens: int, num_heads: int) -> int:
        """Return the bytes of a chunk of one layer."""
        return self.kv_planes * tokens * num_heads * self.row_bytes


PERMUTED_SIZES: Final = tuple(PermutedSizes.__dataclass_fields__)
