"""Paged caches of random bytes, and what gathers and scatters have to make of them.

This is the one reference for all that copies strided caches: on CPUs, on the emulated device and on
GPUs. It finds bytes by the names of their dimensions, never by the strides of a layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvshelf.kv.layout import PagedLayout

FORMS = ("bhnc-hnd", "bhnc-nhd", "2bnhd", "b2nhd", "mla", "native")
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@dataclass
class Paged:
    """Paged caches of several layers.

    Attributes
    ----------
    form : str
        One of :data:`FORMS`.
    memory : list of Tensor
        uint8, all that was allocated for the caches, gaps included.
    caches : list of Tensor
    layout : PagedLayout
    """

    form: str
    memory: list[Tensor]
    caches: list[Tensor]
    layout: PagedLayout

    def named(self, cache: Tensor) -> list[Tensor]:
        """K and V, or the single content, as views [blocks, slots of a block, heads, elements]."""
        if self.form == "native":
            return [cache.view(*cache.shape[:2], -1).unsqueeze(1)]
        if self.form == "mla":
            return [cache.unsqueeze(2)]
        if self.form == "2bnhd":
            return list(cache.unbind(0))
        if self.form == "b2nhd":
            return list(cache.unbind(1))
        return list(cache.unflatten(3, (2, -1)).transpose(1, 2).unbind(3))

    def gathered(self, slots: Tensor, first: int, heads: int, shards: int = 1) -> Tensor:
        """uint8 [chunks, shards, bytes] that a gather of [chunks, tokens] slots gives."""
        slots = slots.to(self.caches[0].device)
        some = slice(first, first + shards * heads)
        parts = []
        for plane in self._planes():
            size = plane.shape[1]
            taken = plane[slots.clamp(min=0) // size, slots % size, some]
            taken[slots < 0] = 0
            # [chunks, tokens, shards, heads, bytes] -> [chunks, shards, tokens, heads, bytes]
            parts.append(taken.unflatten(2, (shards, heads)).transpose(1, 2).flatten(2))
        return torch.cat(parts, dim=2)

    def scattered(self, slots: Tensor, buffers: Tensor, first: int, heads: int) -> Paged:
        """Return a copy of the caches as a scatter of [chunks, shards, bytes] leaves them."""
        after = self.clone()
        planes = after._planes()
        slots = slots.to(self.caches[0].device)
        (chunks, shards, _), tokens = buffers.shape, slots.shape[1]
        shape = (chunks, shards, len(planes), tokens, heads, self.layout.row_bytes)
        # [planes, chunks, tokens, shards × heads, bytes]
        contents = buffers.reshape(shape).permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        kept = slots >= 0
        places, some = slots[kept], slice(first, first + shards * heads)
        for plane, content in zip(planes, contents, strict=True):
            size = plane.shape[1]
            plane[places // size, places % size, some] = content[kept]
        return after

    def clone(self) -> Paged:
        """Return the same caches in other memory."""
        copies = {part.untyped_storage().data_ptr(): part.clone() for part in self.memory}
        caches = []
        for cache in self.caches:
            typed = copies[cache.untyped_storage().data_ptr()].view(cache.dtype)
            caches.append(typed.as_strided(cache.shape, cache.stride(), cache.storage_offset()))
        return Paged(self.form, list(copies.values()), caches, self.layout)

    def _planes(self) -> list[Tensor]:
        """The bytes of what :meth:`named` finds, of all layers, in the order of an object."""
        return [view.view(torch.uint8) for cache in self.caches for view in self.named(cache)]


def make_paged(
    form: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    layers: int = 2,
    blocks: int = 3,
    block_size: int = 4,
    heads: int = 2,
    head_size: int = 4,
    gaps: tuple[int, ...] = (0, 0, 0, 0, 0),
    lead: int = 0,
    seed: int = 0,
) -> Paged:
    """Caches full of random bytes, none of them 0.

    ``gaps[i]`` elements lie unused after dimension i's used ones, ``lead`` elements before the
    cache: so strides are any multiple of the element size and storage offsets are not zero.
    """
    content = 2 * head_size
    used = {
        "bhnc-hnd": (blocks, heads, block_size, content),
        "bhnc-nhd": (blocks, block_size, heads, content),
        "2bnhd": (2, blocks, block_size, heads, head_size),
        "b2nhd": (blocks, 2, block_size, heads, head_size),
        "mla": (blocks, block_size, content),
        "native": (blocks, heads, block_size, content),
    }[form]
    if form == "native":
        gaps = (*gaps[:2], 0, 0)
    whole = tuple(n + gap for n, gap in zip(used, gaps, strict=False))
    count = (lead + math.prod(whole)) * dtype.itemsize
    generator = torch.Generator(device).manual_seed(seed)
    memory, caches = [], []
    for _ in range(layers):
        flat = torch.randint(
            1, 256, (count,), dtype=torch.uint8, device=device, generator=generator
        )
        cache = flat.view(dtype)[lead:].view(whole)[tuple(slice(0, n) for n in used)]
        memory.append(flat)
        caches.append(cache.transpose(1, 2) if form == "bhnc-nhd" else cache)
    make: dict[str, Callable[[Tensor], PagedLayout]] = {
        "bhnc-hnd": lambda cache: PagedLayout.from_bhnc(cache, head_size),
        "bhnc-nhd": lambda cache: PagedLayout.from_bhnc(cache, head_size),
        "2bnhd": PagedLayout.from_2bnhd,
        "b2nhd": PagedLayout.from_b2nhd,
        "mla": PagedLayout.from_mla,
        "native": PagedLayout.native_blocks,
    }
    return Paged(form, memory, caches, make[form](caches[0]))
