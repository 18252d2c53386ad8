"""The layout of KV in a paged cache.

Owns :class:`PagedLayout`, the byte strides of one layer's paged KV cache, and its constructors
from real tensors; :class:`PermutedLayout`, for caches whose elements are permuted inside each
(block, head), and the names of such permutations; and the arithmetic from block ids to slot
mappings. :mod:`kvshelf.kv.layout_learning` finds the layout of a cache.

Contracts
---------
* A layout consists of integers: no tensor, no device, no dtype. One layout serves all
  layers whose caches have the same shape, strides and dtype.
* All strides are in bytes and not negative; strides of dimensions of size one are
  normalised to zero, so that layouts of equal caches are equal.
* Rows never overlap: a layout with such strides is refused when it is made.
* No storage, no vLLM. Everything is immutable or pure, and may be called on any thread.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

__all__ = ["PagedLayout", "PermutedLayout"]


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Byte strides of one layer's paged KV cache.

    The row of (slot, kv, head) starts ``slot // block_size * block_stride +
    slot % block_size * token_stride + kv * kv_stride + head * head_stride`` bytes
    after the first byte of the cache tensor, and is ``row_bytes`` long.

    Attributes
    ----------
    block_size : int
        Token slots in a block. For a cache in kernel blocks (dimension 0 is the
        number of manager blocks × ratio) this is the kernel block size; slots
        count tokens, so slot mappings are the same either way.
    block_stride : int
        Bytes from one block to the next.
    token_stride : int
        Bytes from one token of a block to the next.
    kv_stride : int
        Bytes from K to V.
    head_stride : int
        Bytes from one head to the next.
    kv_planes : int
        2 if K and V are stored, 1 if a row is the whole content (MLA, native).
    heads : int
        KV heads in the cache.
    row_bytes : int
        Bytes of one (token, kv, head) row.
    num_blocks : int
        Blocks in the cache.

    Raises
    ------
    ValueError
        If a count is too small, a stride is negative, or rows would overlap.
    """

    block_size: int
    block_stride: int
    token_stride: int
    kv_stride: int
    head_stride: int
    kv_planes: int
    heads: int
    row_bytes: int
    num_blocks: int

    def __post_init__(self) -> None:
        for field in _FIELDS:
            least = 0 if field.endswith("_stride") or field == "num_blocks" else 1
            value = getattr(self, field)
            if value < least:
                raise ValueError(
                    f"the layout's {field} is {value}; it must be at least {least}: "
                    "make layouts with one of PagedLayout's constructors"
                )
        end = self.row_bytes
        for stride, count, field in sorted(self._dimensions()):
            if stride < end:
                raise ValueError(
                    f"rows of the paged cache overlap: its {field} is {stride} bytes, but what it "
                    f"steps over takes {end} bytes; pass the cache itself, not an expanded or "
                    "otherwise self-overlapping view of it"
                )
            end += (count - 1) * stride

    def _dimensions(self) -> list[tuple[int, int, str]]:
        return [
            (stride, count, field)
            for stride, count, field in (
                (self.block_stride, self.num_blocks, "block_stride"),
                (self.token_stride, self.block_size, "token_stride"),
                (self.kv_stride, self.kv_planes, "kv_stride"),
                (self.head_stride, self.heads, "head_stride"),
            )
            if count > 1
        ]

    @property
    def num_slots(self) -> int:
        """Token slots in the cache; valid slots are ``0 <= slot < num_slots``."""
        return self.num_blocks * self.block_size

    @property
    def extent(self) -> int:
        """Bytes from the first byte of the cache to the end of its last row."""
        if self.num_blocks == 0:
            return 0
        return self.row_bytes + sum((count - 1) * stride for stride, count, _ in self._dimensions())

    def chunk_bytes(self, tokens: int, num_heads: int | None = None) -> int:
        """Bytes that ``tokens`` tokens of one layer take in a chunk buffer.

        Parameters
        ----------
        tokens : int
            Length of the slot mapping.
        num_heads : int, optional
            KV heads of the shard; all heads when absent.
        """
        heads = self.heads if num_heads is None else num_heads
        return self.kv_planes * tokens * heads * self.row_bytes

    def as_ints(self) -> list[int]:
        """All fields in the order of their declaration: the form that the ops take."""
        return [
            self.block_size,
            self.block_stride,
            self.token_stride,
            self.kv_stride,
            self.head_stride,
            self.kv_planes,
            self.heads,
            self.row_bytes,
            self.num_blocks,
        ]

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> PagedLayout:
        """Inverse of :meth:`as_ints`.

        Raises
        ------
        ValueError
            If the number of integers is wrong, or they are not a layout.
        """
        if len(values) != len(_FIELDS):
            raise ValueError(
                f"a layout is {len(_FIELDS)} integers ({', '.join(_FIELDS)}), found {len(values)}: "
                "pass PagedLayout.as_ints()"
            )
        return cls(*values)

    @classmethod
    def from_bhnc(cls, cache: Tensor, head_size: int) -> PagedLayout:
        """Layout of a cache indexed [B, H, N, C], K and V side by side in C.

        Parameters
        ----------
        cache : Tensor
            [blocks, KV heads, block_size, 2 × head_size], any dtype, any strides with
            C contiguous: "NHD" (tokens outside heads) and "HND" alike.
        head_size : int
            Elements of K, and of V, for each token and head.

        Raises
        ------
        ValueError
            If the cache is not of this form.
        """
        _check_form(cache, "BHNC")
        blocks, heads, tokens, content = cache.shape
        if content != 2 * head_size:
            raise ValueError(
                f"the cache's last dimension is {content}; expected 2 × head_size = "
                f"{2 * head_size} elements (K, then V): pass the layer's true head size"
            )
        return cls._of(
            cache,
            block=(blocks, cache.stride(0)),
            token=(tokens, cache.stride(2)),
            kv=(2, head_size),
            head=(heads, cache.stride(1)),
            row=head_size,
        )

    @classmethod
    def from_2bnhd(cls, cache: Tensor) -> PagedLayout:
        """Layout of a cache indexed [2, B, N, H, D]: all K, then all V.

        Parameters
        ----------
        cache : Tensor
            [2, blocks, block_size, KV heads, head_size], any dtype, D contiguous.

        Raises
        ------
        ValueError
            If the cache is not of this form.
        """
        return cls.of_form(cache, "2BNHD")

    @classmethod
    def from_b2nhd(cls, cache: Tensor) -> PagedLayout:
        """Layout of a cache indexed [B, 2, N, H, D]: K, then V, in each block.

        Parameters
        ----------
        cache : Tensor
            [blocks, 2, block_size, KV heads, head_size], any dtype, D contiguous.

        Raises
        ------
        ValueError
            If the cache is not of this form.
        """
        return cls.of_form(cache, "B2NHD")

    @classmethod
    def from_bnhd(cls, cache: Tensor) -> PagedLayout:
        """Layout of a cache indexed [B, N, H, D] that holds only K, or only V.

        Parameters
        ----------
        cache : Tensor
            [blocks, block_size, KV heads, head_size], any dtype, D contiguous.

        Raises
        ------
        ValueError
            If the cache is not of this form.
        """
        return cls.of_form(cache, "BNHD")

    @classmethod
    def from_mla(cls, cache: Tensor) -> PagedLayout:
        """Layout of a cache indexed [B, N, C]: one content for each token, no heads.

        Parameters
        ----------
        cache : Tensor
            [blocks, block_size, content], any dtype, C contiguous.

        Raises
        ------
        ValueError
            If the cache is not of this form.
        """
        return cls.of_form(cache, "BNC")

    @classmethod
    def native_blocks(cls, cache: Tensor) -> PagedLayout:
        """Layout in which a whole (block, head) is one row of opaque bytes.

        A "slot" is then a block id (see :func:`native_slots_of`), and a chunk is
        [blocks, heads, bytes]. For caches whose elements are permuted inside each
        (block, head), as on CPU.

        Parameters
        ----------
        cache : Tensor
            [blocks, KV heads, block_size, content], any dtype, each (block, head)
            contiguous.

        Raises
        ------
        ValueError
            If the cache is not of this form.
        """
        _check_form(cache, "BHNC")
        blocks, heads, tokens, content = cache.shape
        if tokens > 1 and cache.stride(2) != content:
            raise ValueError(
                f"each (block, head) must be contiguous to be copied as bytes, but its tokens are "
                f"{cache.stride(2)} elements apart and {content} elements long; describe this "
                "cache with PagedLayout.from_bhnc"
            )
        return cls._of(
            cache,
            block=(blocks, cache.stride(0)),
            token=(1, 0),
            kv=(1, 0),
            head=(heads, cache.stride(1)),
            row=tokens * content,
        )

    @classmethod
    def whole_blocks(cls, cache: Tensor, block_dim: int = 0) -> PagedLayout:
        """Layout in which a whole block is opaque bytes, whatever its dimensions mean.

        A "slot" is then a block id, and a chunk is [blocks, bytes]: the bytes of each block
        that the tensor covers, in memory order. If a block consists of several equal
        pieces (for instance because heads are outside blocks), each piece counts as a head.

        Parameters
        ----------
        cache : Tensor
            Any shape, strides and dtype without overlaps.
        block_dim : int
            The dimension of blocks.

        Raises
        ------
        ValueError
            If a block is not one piece, or equal pieces at equal distances.
        """
        blocks = cache.shape[block_dim]
        inside = sorted(
            (stride, count)
            for dimension, (count, stride) in enumerate(
                zip(cache.shape, cache.stride(), strict=True)
            )
            if dimension != block_dim and count > 1
        )
        row = 1
        while inside and inside[0][0] == row:
            row *= inside.pop(0)[1]
        if len(inside) > 1:
            raise ValueError(
                f"a block of the cache (shape {list(cache.shape)}, strides "
                f"{list(cache.stride())}) is scattered over memory; only blocks in one piece or "
                "in equal pieces at one distance can be copied whole"
            )
        pieces, distance = (inside[0][1], inside[0][0]) if inside else (1, 0)
        return cls._of(
            cache,
            block=(blocks, cache.stride(block_dim)),
            token=(1, 0),
            kv=(1, 0),
            head=(pieces, distance),
            row=row,
        )

    @classmethod
    def of_form(cls, cache: Tensor, form: str) -> PagedLayout:
        """Layout of a cache by the letters of its dimensions: ``B``, ``2``, ``N``, ``H``, a row.

        Parameters
        ----------
        cache : Tensor
            Any dtype, rows contiguous.
        form : str
            Such as ``2BNHD``. Of blocks, KV planes and heads that it does not name there is one.

        Raises
        ------
        ValueError
            If the cache is not of this form.
        """
        _check_form(cache, form)
        dimensions = dict(zip(form, zip(cache.shape, cache.stride(), strict=True), strict=True))
        block, planes, heads = (dimensions.get(letter, (1, 0)) for letter in "B2H")
        if "2" in dimensions and planes[0] != 2:
            raise ValueError(
                f"dimension {form.index('2')} of the cache is {planes[0]}; expected 2 (K and V): "
                "use from_2bnhd for [2, B, N, H, D] and from_b2nhd for [B, 2, N, H, D]"
            )
        row = cache.shape[-1]
        return cls._of(cache, block=block, token=dimensions["N"], kv=planes, head=heads, row=row)

    @classmethod
    def _of(
        cls,
        cache: Tensor,
        *,
        block: tuple[int, int],
        token: tuple[int, int],
        kv: tuple[int, int],
        head: tuple[int, int],
        row: int,
    ) -> PagedLayout:
        item = cache.element_size()

        def in_bytes(dimension: tuple[int, int]) -> int:
            count, stride = dimension
            return stride * item if count > 1 else 0

        return cls(
            block_size=token[0],
            block_stride=in_bytes(block),
            token_stride=in_bytes(token),
            kv_stride=in_bytes(kv),
            head_stride=in_bytes(head),
            kv_planes=kv[0],
            heads=head[0],
            row_bytes=row * item,
            num_blocks=block[0],
        )


_FIELDS: Final = tuple(PagedLayout.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class PermutedLayout:
    """One layer's paged KV cache whose elements are permuted inside each (block, head).

    The element (slot, kv, head, e) starts ``slot // block_size * block_stride + head *
    head_stride + permutation[kv, slot % block_size, e] * item_bytes`` bytes after the
    first byte of the cache tensor.

    Attributes
    ----------
    block_size : int
        Token slots in a block of the cache tensor.
    block_stride : int
        Bytes from one block to the next.
    head_stride : int
        Bytes from one head to the next.
    kv_planes : int
        2 if K and V are stored, 1 for a single content.
    heads : int
        KV heads in the cache.
    head_size : int
        Elements of one (token, kv, head) row.
    item_bytes : int
        Bytes of one element.
    num_blocks : int
        Blocks in the cache.
    permutation : bytes
        Little-endian int32 [kv_planes, block_size, head_size]: each element's position inside
        its (block, head), counted in elements. A permutation of all these positions, so a
        (block, head) is contiguous.

    Raises
    ------
    ValueError
        If a count is too small, (block, head)s would overlap, or `permutation` is not a
        permutation.
    """

    block_size: int
    block_stride: int
    head_stride: int
    kv_planes: int
    heads: int
    head_size: int
    item_bytes: int
    num_blocks: int
    permutation: bytes

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.kv_planes not in (1, 2) or self.head_size < 1:
            raise ValueError(
                f"{self.block_size} slots × {self.kv_planes} KV planes × {self.head_size} elements "
                "is no (block, head): expected at least 1 × 1 × 1 and at most 2 KV planes"
            )
        count = self.kv_planes * self.block_size * self.head_size
        if len(self.permutation) != 4 * count:
            raise ValueError(
                f"the permutation has {len(self.permutation)} bytes; expected {4 * count} = 4 × "
                f"{self.kv_planes} KV planes × {self.block_size} slots × {self.head_size} elements"
            )
        # The strides must also be valid for (block, head)s as rows of bytes.
        self.as_blocks()
        ordered = torch.sort(self.positions().view(-1)).values
        if not torch.equal(ordered, torch.arange(count, dtype=torch.int32)):
            raise ValueError(
                f"the positions of {count} elements are no permutation of 0 … {count - 1}: two "
                "elements share a place, or one lies outside its (block, head)"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one (token, kv, head) row in a chunk buffer."""
        return self.head_size * self.item_bytes

    @property
    def region_bytes(self) -> int:
        """Bytes of one (block, head)."""
        return self.kv_planes * self.block_size * self.row_bytes

    @property
    def num_slots(self) -> int:
        """Token slots in the cache; valid slots are ``0 <= slot < num_slots``."""
        return self.num_blocks * self.block_size

    @property
    def extent(self) -> int:
        """Bytes from the first byte of the cache to the end of its last (block, head)."""
        return self.as_blocks().extent

    def chunk_bytes(self, tokens: int, num_heads: int | None = None) -> int:
        """Bytes that ``tokens`` tokens of one layer take in a chunk buffer."""
        heads = self.heads if num_heads is None else num_heads
        return self.kv_planes * tokens * heads * self.row_bytes

    def positions(self) -> Tensor:
        """Return `permutation` as int32 [kv_planes, block_size, head_size]."""
        flat = np.frombuffer(self.permutation, dtype="<i4").astype(np.int32)
        return torch.from_numpy(flat).view(self.kv_planes, self.block_size, self.head_size)

    def as_blocks(self) -> PagedLayout:
        """Return the layout in which each (block, head) is one row of opaque bytes."""
        return PagedLayout(
            block_size=1,
            block_stride=self.block_stride,
            token_stride=0,
            kv_stride=0,
            head_stride=self.head_stride,
            kv_planes=1,
            heads=self.heads,
            row_bytes=self.region_bytes,
            num_blocks=self.num_blocks,
        )

    @property
    def packing(self) -> str:
        """The permutation's name: that of a known packing, else ``p`` and 8 hex of its digest."""
        return _packing_name(
            self.kv_planes, self.block_size, self.head_size, self.item_bytes, self.permutation
        )


def packed_positions(
    packing: str, block_size: int, head_size: int, item_bytes: int
) -> Tensor | None:
    """Return the positions of the elements of a (block, head) in a known packing.

    Parameters
    ----------
    packing : str
        ``vec``: K transposed, so that consecutive tokens are adjacent, then V as it is.
        ``amx``: tiles for matrix instructions: K in groups of 16 tokens, in which pairs of
        elements of one token are adjacent; V in groups of 16 elements, in which pairs of
        tokens are adjacent. Elements of four bytes are not paired.
    block_size, head_size, item_bytes : int
        Slots of a block, elements of a row, bytes of an element.

    Returns
    -------
    Tensor or None
        int32 [2, block_size, head_size]; None if the packing does not support these sizes.
    """
    token = torch.arange(block_size, dtype=torch.int32).unsqueeze(1)
    element = torch.arange(head_size, dtype=torch.int32).unsqueeze(0)
    if packing == "vec":
        key = element * block_size + token
        value = token * head_size + element
    elif packing == "amx":
        pair = 2 if item_bytes <= 2 else 1
        if block_size % 16 or head_size % 16:
            return None
        group = (token // 16) * (head_size // pair) + element // pair
        key = (group * 16 + token % 16) * pair + element % pair
        group = (element // 16) * (block_size // pair) + token // pair
        value = (group * 16 + element % 16) * pair + token % pair
    else:
        raise ValueError(f"packing {packing!r}; expected one of {', '.join(_PACKINGS)}")
    return torch.stack((key, value + block_size * head_size))


def permutation_bytes(positions: Tensor) -> bytes:
    """Encode positions of elements as :attr:`PermutedLayout.permutation`."""
    return positions.cpu().contiguous().numpy().astype("<i4").tobytes()


# In order of precedence: two packings can be the same permutation.
_PACKINGS: Final = ("vec", "amx")


@functools.lru_cache(maxsize=64)
def _packing_name(
    kv_planes: int, block_size: int, head_size: int, item_bytes: int, permutation: bytes
) -> str:
    if kv_planes == 2:
        for name in _PACKINGS:
            positions = packed_positions(name, block_size, head_size, item_bytes)
            if positions is not None and permutation_bytes(positions) == permutation:
                return name
    return "p" + hashlib.sha256(permutation).hexdigest()[:8]


def slots_of(block_ids: Sequence[int], block_size: int, start: int, count: int) -> Tensor:
    """Slot mapping of consecutive tokens of one request.

    Parameters
    ----------
    block_ids : Sequence[int]
        The request's block ids, in the order of its tokens.
    block_size : int
        Tokens in each of these (manager) blocks.
    start : int
        Position of the first token in the request.
    count : int
        Number of tokens.

    Returns
    -------
    Tensor
        int64 [count], CPU, contiguous.

    Raises
    ------
    ValueError
        If a position is negative or beyond the blocks, or a block id is negative.
    """
    if block_size < 1:
        raise ValueError(f"the block size is {block_size}; it must be at least 1")
    if start < 0 or count < 0:
        raise ValueError(f"tokens {start} … {start + count} requested; positions start at 0")
    if start + count > len(block_ids) * block_size:
        raise ValueError(
            f"tokens {start} … {start + count} requested, but {len(block_ids)} blocks of "
            f"{block_size} hold only {len(block_ids) * block_size}; pass all blocks of the request"
        )
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    first = start // block_size
    ids = list(block_ids[first : (start + count - 1) // block_size + 1])
    if min(ids) < 0:
        raise ValueError(f"block id {min(ids)} found; block ids are not negative")
    blocks = torch.tensor(ids, dtype=torch.int64)
    if block_size == 1:
        return blocks
    slots = (blocks * block_size).unsqueeze(1) + torch.arange(block_size)
    skip = start - first * block_size
    return slots.view(-1)[skip : skip + count]


def native_slots_of(
    block_ids: Sequence[int], block_size: int, kernel_block_size: int, start: int, count: int
) -> Tensor:
    """Slot mapping for a layout of :meth:`PagedLayout.native_blocks`: ids of whole blocks.

    Parameters
    ----------
    block_ids : Sequence[int]
        The request's (manager) block ids, in the order of its tokens.
    block_size : int
        Tokens in a manager block.
    kernel_block_size : int
        Tokens in a block of the cache tensor; a divisor of ``block_size``.
    start, count : int
        First token and number of tokens, multiples of ``kernel_block_size``.

    Returns
    -------
    Tensor
        int64 [count / kernel_block_size], CPU, contiguous.

    Raises
    ------
    ValueError
        If the tokens are not whole blocks, or as :func:`slots_of`.
    """
    if kernel_block_size < 1 or block_size % kernel_block_size:
        raise ValueError(
            f"kernel blocks of {kernel_block_size} tokens do not divide blocks of {block_size}; "
            "pass the block sizes of the cache manager and of the cache tensor"
        )
    if start % kernel_block_size or count % kernel_block_size:
        raise ValueError(
            f"{count} tokens from {start} are not whole blocks of {kernel_block_size} tokens; "
            "native layouts copy whole blocks only"
        )
    return slots_of(
        block_ids,
        block_size // kernel_block_size,
        start // kernel_block_size,
        count // kernel_block_size,
    )


def _check_form(cache: Tensor, letters: str) -> None:
    form = f"[{', '.join(letters)}]"
    if cache.dim() != len(letters):
        raise ValueError(
            f"the cache has shape {list(cache.shape)}; expected {len(letters)} dimensions, {form}"
        )
    for dimension, size in enumerate(cache.shape):
        if size == 0 and letters[dimension] != "B":
            raise ValueError(
                f"the cache has shape {list(cache.shape)}, empty in dimension {dimension}; "
                f"expected {form}"
            )
    if cache.shape[-1] > 1 and cache.stride(-1) != 1:
        raise ValueError(
            f"elements of the cache's last dimension are {cache.stride(-1)} elements apart; "
            f"they must be contiguous: pass the cache indexed {form}"
        )
