"""Learns the layout of a paged cache by writing patterns.

Owns :func:`learn_layout`, which finds the layout of a registered cache using only a callable
that writes K and V of given slots the way the engine does, and :func:`confirm_layout`, which
checks another cache against a learned layout.

How
---
Every (K/V, token, head, element) of one block gets a number. For each bit of these numbers the
whole block is written once: one for elements whose number has the bit, zero for the others. The
block is read back through the registered tensor; the bits found at a place, zero or non-zero,
form the number of the element stored there. 20 writes identify a million elements. Then random
values are written to three blocks, in order, shuffled and alone, and must appear at the predicted
places with nothing else changed.

Contracts
---------
* Independent of any engine. Only `write_pattern` writes, only to the slots it is given, and
  the previous content of these blocks is restored at the end, also after an error.
* Block 0 is never written: engines use it for padding.
* A layout is returned only if everything that was read agrees with it. In all other cases
  (a writer without effect, scales between the data, blocks with different layouts) the layout
  is *unknown*, with a reason.
* Runs on the caller's thread and current stream. The caches must not be in use.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from kvshelf.kv.layout import PagedLayout, PermutedLayout, permutation_bytes

WritePattern: TypeAlias = "Callable[[Tensor, Tensor, Tensor | None], None]"
"""``write_pattern(slots, key, value)``: write through the engine's own cache update.

slots: int64 [tokens], CPU; key, value: float32 [tokens, heads, head size], CPU; value is
None if a token has a single content. The write is complete when it returns.
"""

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCKS_NEEDED: Final = 3


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The known properties of a layer's cache before its layout is learned.

    Attributes
    ----------
    num_blocks, block_size : int
        Blocks of the cache manager, and token slots in each.
    heads, head_size : int
        KV heads in this cache; elements of K, and of V, for each head. For a single content:
        1, and the elements of the content.
    kv_planes : int
        2 if K and V are stored, 1 for a single content.
    dtype : torch.dtype
        The real encoding of the elements; the tensor's dtype may differ.
    scales : tuple of float
        Divisors of K and V when they are written; 1.0 if there is no scaling.
    """

    num_blocks: int
    block_size: int
    heads: int
    head_size: int
    kv_planes: int
    dtype: torch.dtype
    scales: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class LearnedLayout:
    """The result of :func:`learn_layout`.

    Attributes
    ----------
    layout : PagedLayout or PermutedLayout or None
        None when the layout is unknown.
    reason : str
        Why it is unknown; empty otherwise.
    writes : int
        Number of writes.
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
    """No layout describes the cache's behaviour; the message says why."""


def learn_layout(cache: Tensor, shape: CacheShape, write_pattern: WritePattern) -> LearnedLayout:
    """Find the layout of one layer's paged cache.

    Parameters
    ----------
    cache : Tensor
        The registered cache. Its first dimension, or its second if the first is 2 (K and V),
        counts blocks: manager blocks, or equal parts of them.
    shape : CacheShape
    write_pattern : Callable
        See :data:`WritePattern`. Its exceptions are passed on.

    Returns
    -------
    LearnedLayout
    """

    def learn(learner: _LayoutLearner) -> PagedLayout | PermutedLayout:
        places = learner.find_places()
        layout = _find_layout(learner, places)
        learner.verify(places)
        return layout

    return _learned(cache, shape, write_pattern, learn)


def confirm_layout(
    cache: Tensor,
    shape: CacheShape,
    write_pattern: WritePattern,
    layout: PagedLayout | PermutedLayout,
) -> LearnedLayout:
    """Check with a single write that a cache has the layout of another cache of its kind.

    Parameters
    ----------
    cache, shape, write_pattern
        As for :func:`learn_layout`.
    layout : PagedLayout or PermutedLayout
        Learned from a cache of the same shape, strides and dtype.

    Returns
    -------
    LearnedLayout
        `layout` if the check passed, else unknown.
    """

    def confirm(learner: _LayoutLearner) -> PagedLayout | PermutedLayout:
        learner.verify_edges(layout)
        return layout

    return _learned(cache, shape, write_pattern, confirm)


def _learned(
    cache: Tensor,
    shape: CacheShape,
    write_pattern: WritePattern,
    learn: Callable[[_LayoutLearner], PagedLayout | PermutedLayout],
) -> LearnedLayout:
    """Learn a layout with borrowed blocks; unknown if `learn` raises :class:`_UnknownError`."""
    learner = None
    try:
        learner = _LayoutLearner(cache, shape, write_pattern)
        with torch.inference_mode(), learner.borrowed_blocks():
            layout = learn(learner)
    except _UnknownError as unknown:
        return LearnedLayout(None, str(unknown), 0 if learner is None else learner.writes)
    return LearnedLayout(layout, writes=learner.writes)


class _LayoutLearner:
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
                f"the cache's elements have {cache.element_size()} bytes, but its dtype is "
                f"{shape.dtype}: it is packed"
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
        self.count = shape.kv_planes * shape.block_size * shape.heads * shape.head_size
        #: The first usable block, the next one, and the last one.
        self.blocks = sorted({1, 2, shape.num_blocks - 1})
        self._random = torch.Generator().manual_seed(0x6B76)

    def _block(self, block: int) -> Tensor:
        return self.cache.narrow(self.block_dim, block * self.ratio, self.ratio)

    @contextmanager
    def borrowed_blocks(self) -> Iterator[None]:
        """Zero the blocks that will be written; restore their content afterwards."""
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
        """Return the elements of a block that the tensor covers, as integers: CPU, [elements]."""
        return self._block(block).cpu().reshape(-1)

    def _write(self, slots: Tensor, values: Tensor) -> None:
        """Write `values`, float32 [kv_planes, tokens, heads, head size], before scaling."""
        key_scale, value_scale = self.shape.scales
        value = values[1] * value_scale if self.shape.kv_planes == 2 else None
        self._write_pattern(slots, values[0] * key_scale, value)
        self.writes += 1

    def _slots(self, block: int) -> Tensor:
        size = self.shape.block_size
        return torch.arange(block * size, (block + 1) * size)

    # ------------------------------------------------------------- learning

    def find_places(self) -> Tensor:
        """Find each element's place: int64 [kv_planes, block size, heads, head size]."""
        shape = self.shape
        block = self.blocks[0]
        numbers = torch.arange(1, self.count + 1, dtype=torch.int32).view(
            shape.kv_planes, shape.block_size, shape.heads, shape.head_size
        )
        tokens_of_places = torch.zeros(self._places.numel(), dtype=torch.int32)
        slots = self._slots(block)
        for bit in range(self.count.bit_length()):
            self._write(slots, ((numbers >> bit) & 1).float())
            tokens_of_places |= (self._read(block) != 0).to(torch.int32) << bit
        written = tokens_of_places.nonzero().view(-1)
        if written.numel() == 0:
            raise _UnknownError("nothing that was written could be read back")
        if written.numel() != self.count:
            raise _UnknownError(
                f"{self.count} elements were written, but {written.numel()} places of the block "
                "changed: it holds other data as well, such as scales, or fewer elements"
            )
        order = tokens_of_places[written].long() - 1
        if int(order.max()) >= self.count or torch.bincount(order).max() != 1:
            raise _UnknownError("two elements depend on each other, so they share storage")
        places = torch.empty(self.count, dtype=torch.int64)
        places[order] = self._places[written]
        return places.view(numbers.shape)

    # ------------------------------------------------------------- verifying

    def verify(self, places: Tensor) -> None:
        """Write random values in several orders; raise unless `places` predicts the result."""
        size = self.shape.block_size
        every = torch.cat([self._slots(block) for block in self.blocks])
        shuffled = every[torch.randperm(every.numel(), generator=self._random)]
        alone = torch.tensor([(self.blocks[-1] + 1) * size - 1])
        self._clear()
        positions = _positions(self._places, places)
        self._verify_writes([every, shuffled[: -(-every.numel() // 2)], alone], positions)

    def verify_edges(self, layout: PagedLayout | PermutedLayout) -> None:
        """Write the first and last slots of all kernel blocks in one call, and verify them."""
        inside = self.shape.block_size // self.ratio
        firsts = torch.cat([self._slots(block)[::inside] for block in self.blocks])
        lasts = firsts + inside - 1 if inside > 1 else firsts[:0]
        block = self._block(0)
        positions = _positions_of(layout, self.shape, block.shape, block.stride())
        self._verify_writes([torch.cat((firsts, lasts))], positions)

    def _verify_writes(self, writes: Sequence[Tensor], positions: Tensor) -> None:
        """Write to each of the slot mappings in turn; compare all blocks after each write.

        `positions` are the indexes of a block's elements in the result of :meth:`_read`, int64
        [kv_planes, block size, heads, head size]. The blocks must be zero at first.
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
                        f"random values in block {block} are not where the pattern in block "
                        f"{self.blocks[0]} predicts, or have changed"
                    )

    def _random_values(self, tokens: int) -> Tensor:
        # ±1, 1.25, 1.5 or 1.75 times a power of two: exact in every dtype of a KV cache.
        shape = self.shape

        def draw(low: int, high: int) -> Tensor:
            size = (shape.kv_planes, tokens, shape.heads, shape.head_size)
            return torch.randint(low, high, size, generator=self._random).float()

        return (draw(0, 2) * 2 - 1) * (1 + draw(0, 4) / 4) * torch.exp2(draw(-6, 7))

    def _alike(self, found: Tensor, expected: Tensor) -> bool:
        if all(math.frexp(scale)[0] == 0.5 for scale in self.shape.scales):
            return torch.equal(found, expected)
        # A value that is multiplied by its scale, rounded to the model's dtype and divided again
        # may differ by one rounding step, which depends on the engine.
        step = torch.finfo(self.shape.dtype).eps
        return bool(((found - expected).abs() <= expected.abs() * step).all())


def _block_dimension(cache: Tensor, num_blocks: int) -> int:
    for dimension, count in enumerate(cache.shape[:2]):
        if count and count % num_blocks == 0 and (dimension == 0 or cache.shape[0] == 2):
            return dimension
    raise _UnknownError(
        f"the cache has shape {list(cache.shape)}; expected {num_blocks} blocks, or a multiple, in "
        "its first dimension, or in the second after K and V"
    )


@functools.lru_cache(maxsize=4)
def _places_of_view(shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """Return the distance of each element of a view from its first: int64 [elements]."""
    places = torch.zeros((), dtype=torch.int64)
    for count, stride in zip(shape, strides, strict=True):
        places = places.unsqueeze(-1) + torch.arange(count) * stride
    return places.reshape(-1)


def _positions(known: Tensor, places: Tensor) -> Tensor:
    """Return the index in `known` of each of `places`."""
    ordered, order = torch.sort(known)
    at = torch.searchsorted(ordered, places.reshape(-1)).clamp(max=known.numel() - 1)
    if not torch.equal(ordered[at], places.reshape(-1)):
        raise _UnknownError("the layout uses places that the cache's tensor does not cover")
    return order[at].view(places.shape)


# --------------------------------------------------------------------------- inference


def _find_layout(learner: _LayoutLearner, places: Tensor) -> PagedLayout | PermutedLayout:
    """Return the layout that describes `places`, a strided one if possible."""
    for candidate in (_strided, _permuted):
        for parts in _parts(learner):
            with suppress(ValueError):  # there is no such layout
                layout = candidate(learner, places, parts)
                if torch.equal(_places_of(layout, learner.shape), places):
                    return layout
    raise _UnknownError(
        "elements of a token lie neither at constant distances nor in one order inside each"
        " (block, head)"
    )


def _strided(learner: _LayoutLearner, places: Tensor, parts: int) -> PagedLayout:
    """Return the layout with the strides of the first elements."""
    kv_planes, tokens, heads, size = places.shape
    item = learner.shape.dtype.itemsize
    inside = tokens // parts
    return PagedLayout(
        block_size=inside,
        block_stride=learner.block_stride // parts * item,
        token_stride=int(places[0, 1, 0, 0]) * item if inside > 1 else 0,
        kv_stride=int(places[1, 0, 0, 0]) * item if kv_planes > 1 else 0,
        head_stride=int(places[0, 0, 1, 0]) * item if heads > 1 else 0,
        kv_planes=kv_planes,
        heads=heads,
        row_bytes=size * item,
        num_blocks=learner.shape.num_blocks * parts,
    )


def _permuted(learner: _LayoutLearner, places: Tensor, parts: int) -> PermutedLayout:
    """Return the layout with the permutation of the first (block, head)."""
    kv_planes, tokens, heads, size = places.shape
    item = learner.shape.dtype.itemsize
    inside = tokens // parts
    return PermutedLayout(
        block_size=inside,
        block_stride=learner.block_stride // parts * item,
        head_stride=int(places[:, :inside, 1].min()) * item if heads > 1 else 0,
        kv_planes=kv_planes,
        heads=heads,
        head_size=size,
        item_bytes=item,
        num_blocks=learner.shape.num_blocks * parts,
        permutation=permutation_bytes(places[:, :inside, 0]),
    )


def _parts(learner: _LayoutLearner) -> Iterator[int]:
    """Yield the possible numbers of kernel blocks in a manager block, the likeliest first.

    The tensor's own blocks come first; a layer may be bound to a view with smaller blocks.
    """
    tokens = learner.shape.block_size
    for parts in range(learner.ratio, tokens + 1):
        if not (tokens % parts or parts % learner.ratio or learner.block_stride % parts):
            yield parts


@functools.lru_cache(maxsize=4)
def _positions_of(
    layout: PagedLayout | PermutedLayout,
    shape: CacheShape,
    view_shape: torch.Size,
    view_strides: tuple[int, ...],
) -> Tensor:
    """Return the index of each element in a view of a block, according to a layout."""
    return _positions(_places_of_view(view_shape, view_strides), _places_of(layout, shape))


def _places_of(layout: PagedLayout | PermutedLayout, shape: CacheShape) -> Tensor:
    """Return the places of the elements of a manager block, according to a layout."""
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
        + torch.arange(shape.kv_planes).view(-1, 1, 1, 1) * (layout.kv_stride // item)
        + torch.arange(shape.head_size)
    )
