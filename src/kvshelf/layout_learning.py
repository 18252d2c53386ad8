"""Learning where each token's KV lies in a paged cache, by writing patterns.

Owns :func:`learn_layout`, which finds the layout of a registered cache with nothing but
a callable that writes K and V of given slots the way the engine does, and
:func:`confirm_layout`, which checks another cache against a layout that was learned.

How
---
Every (K/V, token, head, element) of one block has a number. For each bit of these
numbers the whole block is written once, with a one where the number has that bit and a
zero elsewhere; what is read back through the registered tensor, zero or not, spells at
each place the number of the element that lies there. 20 writes name a million elements.
Then random values are written, in order, shuffled and alone, into three blocks, and must
be where and what they are expected to be, with nothing else changed.

Contracts
---------
* Pure: knows no engine. Only `write_pattern` writes, only into the slots it is given,
  and what these blocks held is put back at the end, whatever happens.
* Block 0 is never written: engines keep it for padding.
* A layout is an answer only if everything that was read agrees with it. Anything else,
  a writer that does nothing, scales among the data, a block that is laid out unlike
  another, is *unknown*, with a reason.
* Runs on the thread and the current stream of the caller; the caches must not be in use.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from kvshelf.layout import PagedLayout, PermutedLayout, permutation_bytes

WritePattern: TypeAlias = "Callable[[Tensor, Tensor, Tensor | None], None]"
"""``write_pattern(slots, key, value)``: write through the engine's own cache update.

slots: int64 [tokens], CPU; key, value: float32 [tokens, heads, head size], CPU; value is
None where a token has a single content. Everything has arrived when it returns.
"""

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCKS_NEEDED: Final = 3


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What is known of a layer's cache before its layout is learned.

    Attributes
    ----------
    num_blocks, block_size : int
        Blocks of the cache manager, and token slots in each.
    heads, head_size : int
        KV heads in this cache; elements of K, and of V, for each of them. For a single
        content 1 and the elements of the content.
    kvs : int
        2 where K and V are stored, 1 for a single content.
    dtype : torch.dtype
        How elements are truly encoded, whatever dtype the tensor claims.
    scales : tuple of float
        What K and V are divided by when they are written: 1.0 where they are not.
    """

    num_blocks: int
    block_size: int
    heads: int
    head_size: int
    kvs: int
    dtype: torch.dtype
    scales: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class LearnedLayout:
    """What :func:`learn_layout` found.

    Attributes
    ----------
    layout : PagedLayout or PermutedLayout or None
        None when the layout is unknown.
    reason : str
        Why it is unknown; empty otherwise.
    writes : int
        How often something was written.
    """

    layout: PagedLayout | PermutedLayout | None
    reason: str = ""
    writes: int = 0

    @property
    def kind(self) -> Literal["strided", "permuted", "unknown"]:
        """The layout's kind."""
        if isinstance(self.layout, PagedLayout):
            return "strided"
        return "unknown" if self.layout is None else "permuted"


class _UnknownError(Exception):
    """The cache does not behave like one that could be described; says how."""


def learn_layout(cache: Tensor, shape: CacheShape, write_pattern: WritePattern) -> LearnedLayout:
    """Find the layout of one layer's paged cache.

    Parameters
    ----------
    cache : Tensor
        The registered cache. One of its dimensions, the first, or the second where the
        first is 2 (K and V), counts blocks: those of the manager or equal parts of them.
    shape : CacheShape
    write_pattern : Callable
        See :data:`WritePattern`. What it raises is passed on.

    Returns
    -------
    LearnedLayout
    """
    probe = None
    try:
        probe = _Probe(cache, shape, write_pattern)
        with torch.inference_mode(), probe.borrowed_blocks():
            places = probe.find_places()
            layout = _strided(probe, places) or _permuted(probe, places)
            if layout is None:
                raise _UnknownError(
                    "elements of a token lie neither at constant distances nor in one order "
                    "inside each (block, head)"
                )
            probe.verify(places)
    except _UnknownError as unknown:
        return LearnedLayout(None, str(unknown), 0 if probe is None else probe.writes)
    return LearnedLayout(layout, writes=probe.writes)


def confirm_layout(
    cache: Tensor,
    shape: CacheShape,
    write_pattern: WritePattern,
    layout: PagedLayout | PermutedLayout,
) -> LearnedLayout:
    """Check with a single write that a cache has a layout that another one of its kind has.

    Parameters
    ----------
    cache, shape, write_pattern
        As for :func:`learn_layout`.
    layout : PagedLayout or PermutedLayout
        What was learned from a cache of the same shape, strides and dtype.

    Returns
    -------
    LearnedLayout
        With `layout`, or unknown.
    """
    probe = None
    try:
        probe = _Probe(cache, shape, write_pattern)
        with torch.inference_mode(), probe.borrowed_blocks():
            probe.verify_edges(layout)
    except _UnknownError as unknown:
        return LearnedLayout(None, str(unknown), 0 if probe is None else probe.writes)
    return LearnedLayout(layout, writes=probe.writes)


class _Probe:
    """Writes to and reads from three blocks of one cache.

    A *place* is an element's distance, in elements, from the first element of its
    (manager) block.
    """

    def __init__(self, cache: Tensor, shape: CacheShape, write_pattern: WritePattern) -> None:
        self.shape = shape
        self.writes = 0
        self._write_pattern = write_pattern
        size = shape.dtype.itemsize
        if cache.element_size() != size:
            raise _UnknownError(
                f"the cache holds elements of {cache.element_size()} bytes, but its dtype is said "
                f"to be {shape.dtype}: it is packed"
            )
        if shape.num_blocks < _BLOCKS_NEEDED:
            raise _UnknownError(
                f"the cache has {shape.num_blocks} blocks; {_BLOCKS_NEEDED} are needed to learn "
                "its layout"
            )
        self.block_dim = _block_dimension(cache, shape.num_blocks)
        #: Blocks of the tensor in each block of the manager.
        self.ratio = cache.shape[self.block_dim] // shape.num_blocks
        if shape.block_size % self.ratio:
            raise _UnknownError(
                f"blocks of {shape.block_size} tokens cannot lie in {self.ratio} equal blocks of "
                "the cache"
            )
        self.cache = cache.view(_INTEGERS[size])
        #: Elements from one manager block to the next.
        self.block_stride = cache.stride(self.block_dim) * self.ratio
        block = self._block(0)
        self._places = _places_of_view(block.shape, block.stride())
        #: Elements of a manager block, in the order of :meth:`places_of_pattern`.
        self.count = shape.kvs * shape.block_size * shape.heads * shape.head_size
        #: The first block that can be used, the one behind it, and the last one.
        self.blocks = sorted({1, 2, shape.num_blocks - 1})
        self._random = torch.Generator().manual_seed(0x6B76)

    def _block(self, block: int) -> Tensor:
        return self.cache.narrow(self.block_dim, block * self.ratio, self.ratio)

    @contextmanager
    def borrowed_blocks(self) -> Iterator[None]:
        """Zero the blocks that are written, and put their content back afterwards."""
        saved = [self._block(block).clone() for block in self.blocks]
        self._clear()
        try:
            yield
        finally:
            for block, content in zip(self.blocks, saved, strict=True):
                self._block(block).copy_(content)

    def _clear(self) -> None:
        for block in self.blocks:
            self._block(block).zero_()

    def _read(self, block: int) -> Tensor:
        """Return a block's elements as integers, CPU, [elements that the tensor covers]."""
        return self._block(block).cpu().reshape(-1)

    def _write(self, slots: Tensor, values: Tensor) -> None:
        """Write `values`, float32 [kvs, tokens, heads, head size], before scaling."""
        key_scale, value_scale = self.shape.scales
        value = values[1] * value_scale if self.shape.kvs == 2 else None
        self._write_pattern(slots, values[0] * key_scale, value)
        self.writes += 1

    def _slots(self, block: int) -> Tensor:
        size = self.shape.block_size
        return torch.arange(block * size, (block + 1) * size)

    # ------------------------------------------------------------- learning

    def find_places(self) -> Tensor:
        """Find each element's place: int64 [kvs, block size, heads, head size]."""
        shape = self.shape
        block = self.blocks[0]
        numbers = torch.arange(1, self.count + 1, dtype=torch.int32).view(
            shape.kvs, shape.block_size, shape.heads, shape.head_size
        )
        found = torch.zeros(self._places.numel(), dtype=torch.int32)
        slots = self._slots(block)
        for bit in range(self.count.bit_length()):
            self._write(slots, ((numbers >> bit) & 1).float())
            found |= (self._read(block) != 0).to(torch.int32) << bit
        held = found.nonzero().view(-1)
        if held.numel() == 0:
            raise _UnknownError("nothing of what was written could be read back")
        if held.numel() != self.count:
            raise _UnknownError(
                f"{self.count} elements were written, but {held.numel()} places of the block "
                "changed: it holds something besides, such as scales, or less"
            )
        order = found[held].long() - 1
        if int(order.max()) >= self.count or torch.bincount(order).max() != 1:
            raise _UnknownError("two elements depend on each other, so they are not stored apart")
        places = torch.empty(self.count, dtype=torch.int64)
        places[order] = self._places[held]
        return places.view(numbers.shape)

    # ------------------------------------------------------------- verifying

    def verify(self, places: Tensor) -> None:
        """Write random values in several ways; raise unless `places` predicts the result."""
        size = self.shape.block_size
        every = torch.cat([self._slots(block) for block in self.blocks])
        shuffled = every[torch.randperm(every.numel(), generator=self._random)]
        alone = torch.tensor([(self.blocks[-1] + 1) * size - 1])
        self._clear()
        positions = _positions(self._places, places)
        self._verify_writes([every, shuffled[: -(-every.numel() // 2)], alone], positions)

    def verify_edges(self, layout: PagedLayout | PermutedLayout) -> None:
        """Write the first and last slots of all kernel blocks once, the same way."""
        inside = self.shape.block_size // self.ratio
        firsts = torch.cat([self._slots(block)[::inside] for block in self.blocks])
        lasts = firsts + inside - 1 if inside > 1 else firsts[:0]
        block = self._block(0)
        positions = _positions_of(layout, self.shape, block.shape, block.stride())
        self._verify_writes([torch.cat((firsts, lasts))], positions)

    def _verify_writes(self, writes: Sequence[Tensor], positions: Tensor) -> None:
        """Write to the slots of each of `writes` over what is there, from zero on.

        `positions` is where :meth:`_read` finds the elements of a block, int64 [kvs, block
        size, heads, head size].
        """
        shape = self.shape
        expected = {block: torch.zeros(self._places.numel()) for block in self.blocks}
        for slots in writes:
            values = self._random_values(slots.numel())
            self._write(slots, values)
            owner, offset = slots // shape.block_size, slots % shape.block_size
            for block in self.blocks:
                tokens = (owner == block).nonzero().view(-1)
                expected[block][positions[:, offset[tokens]]] = values[:, tokens]
                if not self._alike(self._read(block).view(shape.dtype).float(), expected[block]):
                    raise _UnknownError(
                        f"random values do not arrive in block {block} where and as what was "
                        f"written to block {self.blocks[0]} before predicts"
                    )

    def _random_values(self, tokens: int) -> Tensor:
        # ±1, 1.25, 1.5 or 1.75 times a power of two: exact in every dtype of a KV cache.
        shape = self.shape

        def draw(low: int, high: int) -> Tensor:
            size = (shape.kvs, tokens, shape.heads, shape.head_size)
            return torch.randint(low, high, size, generator=self._random).float()

        return (draw(0, 2) * 2 - 1) * (1 + draw(0, 4) / 4) * torch.exp2(draw(-6, 7))

    def _alike(self, found: Tensor, expected: Tensor) -> bool:
        if all(math.frexp(scale)[0] == 0.5 for scale in self.shape.scales):
            return torch.equal(found, expected)
        # A value that is multiplied by its scale, rounded to what the model computes in and
        # divided again may end one step beside itself: engines round as they like.
        step = torch.finfo(self.shape.dtype).eps
        return bool(((found - expected).abs() <= expected.abs() * step).all())


def _block_dimension(cache: Tensor, num_blocks: int) -> int:
    for dimension, count in enumerate(cache.shape[:2]):
        if count and count % num_blocks == 0 and (dimension == 0 or cache.shape[0] == 2):
            return dimension
    raise _UnknownError(
        f"the cache has shape {list(cache.shape)}; expected {num_blocks} blocks, or a multiple, in "
        "its first dimension, or in the second behind K and V"
    )


@functools.lru_cache(maxsize=4)
def _places_of_view(shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """Return the distance of each element of a view from its first: int64 [elements]."""
    places = torch.zeros((), dtype=torch.int64)
    for count, stride in zip(shape, strides, strict=True):
        places = places.unsqueeze(-1) + torch.arange(count) * stride
    return places.reshape(-1)


def _positions(known: Tensor, places: Tensor) -> Tensor:
    """Return at which index of `known` each of `places` is."""
    ordered, order = torch.sort(known)
    at = torch.searchsorted(ordered, places.reshape(-1)).clamp(max=known.numel() - 1)
    if not torch.equal(ordered[at], places.reshape(-1)):
        raise _UnknownError("the layout reaches places that the cache's tensor does not cover")
    return order[at].view(places.shape)


# --------------------------------------------------------------------------- inference


def _strided(probe: _Probe, places: Tensor) -> PagedLayout | None:
    """Return the strides that `places` follow, if they follow any."""
    kvs, tokens, heads, size = places.shape
    if int(places[0, 0, 0, 0]) != 0:
        return None
    item = probe.shape.dtype.itemsize
    for parts in _parts(probe):
        inside = tokens // parts
        token_stride = int(places[0, 1, 0, 0]) if inside > 1 else 0
        kv_stride = int(places[1, 0, 0, 0]) if kvs > 1 else 0
        head_stride = int(places[0, 0, 1, 0]) if heads > 1 else 0
        part_stride = probe.block_stride // parts
        token = torch.arange(tokens)
        expected = (
            torch.arange(kvs).view(-1, 1, 1, 1) * kv_stride
            + (token // inside * part_stride + token % inside * token_stride).view(1, -1, 1, 1)
            + torch.arange(heads).view(1, 1, -1, 1) * head_stride
            + torch.arange(size)
        )
        if probe.block_stride % parts or not torch.equal(expected, places):
            continue
        return PagedLayout(
            block_size=inside,
            block_stride=part_stride * item,
            token_stride=token_stride * item,
            kv_stride=kv_stride * item,
            head_stride=head_stride * item,
            kvs=kvs,
            heads=heads,
            row_bytes=size * item,
            num_blocks=probe.shape.num_blocks * parts,
        )
    return None


def _permuted(probe: _Probe, places: Tensor) -> PermutedLayout | None:
    """Return the order inside each (block, head), if it is the same in all of them."""
    kvs, tokens, heads, size = places.shape
    item = probe.shape.dtype.itemsize
    for parts in _parts(probe):
        inside = tokens // parts
        # [parts, heads, kvs, tokens of a part, size]
        apart = places.view(kvs, parts, inside, heads, size).permute(1, 3, 0, 2, 4)
        starts = apart.amin((2, 3, 4))
        inner = apart - starts.view(parts, heads, 1, 1, 1)
        head_stride = int(starts[0, 1]) if heads > 1 else 0
        part_stride = probe.block_stride // parts
        expected = (torch.arange(parts) * part_stride).view(-1, 1) + (
            torch.arange(heads) * head_stride
        )
        if (
            probe.block_stride % parts
            or not torch.equal(starts, expected)
            or not torch.equal(inner, inner[:1, :1].expand_as(inner))
            or int(inner.max()) >= kvs * inside * size
        ):
            continue
        return PermutedLayout(
            block_size=inside,
            block_stride=part_stride * item,
            head_stride=head_stride * item,
            kvs=kvs,
            heads=heads,
            head_size=size,
            item_bytes=item,
            num_blocks=probe.shape.num_blocks * parts,
            permutation=permutation_bytes(inner[0, 0]),
        )
    return None


def _parts(probe: _Probe) -> Iterator[int]:
    """Yield into how many kernel blocks a manager block may be cut, the likeliest first.

    The tensor's own blocks come first; a layer may be bound to a view with smaller ones.
    """
    tokens = probe.shape.block_size
    for parts in range(probe.ratio, tokens + 1):
        if tokens % parts == 0 and parts % probe.ratio == 0:
            yield parts


@functools.lru_cache(maxsize=4)
def _positions_of(
    layout: PagedLayout | PermutedLayout,
    shape: CacheShape,
    view_shape: torch.Size,
    view_strides: tuple[int, ...],
) -> Tensor:
    """Return at which index of a view of a block a layout has each element."""
    return _positions(_places_of_view(view_shape, view_strides), _places_of(layout, shape))


def _places_of(layout: PagedLayout | PermutedLayout, shape: CacheShape) -> Tensor:
    """Return the places that a layout gives to the elements of a manager block."""
    item = shape.dtype.itemsize
    token = torch.arange(shape.block_size)
    block = token // layout.block_size * (layout.block_stride // item)
    head = (torch.arange(shape.heads) * (layout.head_stride // item)).view(1, 1, -1, 1)
    if isinstance(layout, PermutedLayout):
        inner = layout.positions().long()[:, token % layout.block_size].unsqueeze(2)
        return block.view(1, -1, 1, 1) + head + inner
    return (
        (block + token % layout.block_size * (layout.token_stride // item)).view(1, -1, 1, 1)
        + head
        + torch.arange(shape.kvs).view(-1, 1, 1, 1) * (layout.kv_stride // item)
        + torch.arange(shape.head_size)
    )
