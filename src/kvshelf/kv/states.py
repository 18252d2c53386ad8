"""The states of layers that keep no KV for each token: where their parts lie in a cache.

Owns the split of a layer's state into parts (:func:`split_state`) and the copy runs of the parts
(:func:`state_runs`). Pure functions; any thread may call them.

A block of an engine's cache holds the state of a layer after some token: the tensors of
``MambaSpec.shapes``, one after the other without gaps (``MambaBase.bind_kv_cache`` in
``vllm/model_executor/layers/mamba/abstract.py``). With speculative decoding a convolution has
further tokens behind those of its state, for drafts: at a block boundary the state is in the first
ones, as without drafts, and only these are stored. Each rank holds its share of the
heads or channels. The convolution of some layers consists of sections, such as q, k and v, and a
rank holds its share of each section: so a convolution is stored as one part for each section.

Contracts
---------
* A state is divided only where it is known which bytes of one rank are which bytes of the whole
  model. Others are stored as each rank has them, with the number of ranks in their layout
  (``state-tp<ranks>``).
* The shards of a rank differ only in their heads: for the runs of a part, the heads of the cache
  are the shards that the rank holds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Final

import torch
from torch import Tensor

from kvshelf.errors import UnsupportedError
from kvshelf.format.model import default_shards
from kvshelf.format.tensors import StatePart, state_fields
from kvshelf.kv.caches import LayerRun
from kvshelf.kv.layout import PagedLayout

_DTYPES: Final = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
#: Names of the tensors of a state that is not divided, where there are so many.
_NAMES: Final = {
    "gdn_attn": ("conv", "ssm"),
    "mamba1": ("conv", "ssm"),
    "mamba2": ("conv", "ssm"),
    "short_conv": ("conv",),
    "linear": ("ssm",),
}
#: Types whose first tensor is a convolution that vLLM widens by one token for each draft.
_WIDENED: Final = frozenset({"gdn_attn", "mamba2", "short_conv"})


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Where a part lies in a block of one rank, in bytes.

    Attributes
    ----------
    offset : int
        Its first byte in the block.
    rows : int
        Number of contiguous pieces.
    row_bytes : int
        Length of a piece. A shard has an equal share of each.
    row_stride : int
        From one piece to the next.
    """

    offset: int
    rows: int
    row_bytes: int
    row_stride: int


@dataclass(frozen=True, slots=True)
class StateParts:
    """The state of one layer, in parts.

    Attributes
    ----------
    parts : tuple of StatePart
        In the order in which they are stored.
    places : tuple of PartPlace
        Of each part.
    ranks : int
        Tensor-parallel ranks of the engine.
    nbytes : int
        Bytes of a block that the state uses.
    """

    parts: tuple[StatePart, ...]
    places: tuple[PartPlace, ...]
    ranks: int
    nbytes: int

    @property
    def heads(self) -> int:
        """What the divided dimensions have in common: each divisor of it divides the state.

        0 if the state is not divided.
        """
        return gcd(*(part.shape[at] for part in self.parts if (at := part.divided) is not None))

    @property
    def layout(self) -> str:
        """The layer's entry of ``layouts`` in the namespace record."""
        return "state" if self.heads else f"state-tp{self.ranks}"

    @property
    def fields(self) -> tuple[str, str]:
        """The layer's entries of ``layer_shapes`` and ``layer_dtypes``."""
        return state_fields(self.parts)


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A state layer of a worker.

    Attributes
    ----------
    cache : Tensor
        As vLLM registers it: int8 [blocks, 1, 1, bytes], a block contiguous.
    state : StateParts
    group : int
        Its cache group. The groups' slots follow each other in the order of these numbers.
    """

    cache: Tensor
    state: StateParts
    group: int


@dataclass(frozen=True, slots=True)
class StateSlots:
    """The slots of one cache group for a state.

    Attributes
    ----------
    units : tuple of int
        Slots of each block, for each way in which the group's caches are divided into slots.
    """

    units: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of slots."""
        return sum(self.units)

    def of(self, block: int) -> list[int]:
        """Return the slots of the block that holds the state."""
        return [block * unit + row for unit in self.units for row in range(unit)]


def split_state(
    mamba_type: str,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    ranks: int,
    conv_dim_first: bool,
    *,
    groups: int | None = None,
    divide: bool = True,
    drafts: int = 0,
) -> StateParts:
    """Split the state of one layer into parts that can be stored.

    Parameters
    ----------
    mamba_type : str
        Name of vLLM's ``MambaAttentionBackendEnum`` in lower case.
    shapes : Sequence of Sequence of int
        ``MambaSpec.shapes``, of one rank.
    dtypes : Sequence of torch.dtype
        ``MambaSpec.dtypes``.
    ranks : int
        Tensor-parallel ranks.
    conv_dim_first : bool
        Convolutions are [channels, tokens] (``is_conv_state_dim_first`` in
        ``vllm/model_executor/layers/mamba/mamba_utils.py``), else [tokens, channels].
    groups : int, optional
        Mamba2: the model's ``n_groups``. Without it the state is not divided where a rank has a
        single group, because ranks may then hold copies of one group.
    divide : bool
        False for layers of which every rank holds the whole state (``MambaSpec.tp_replicated``).
    drafts : int
        Drafts of each step of speculative decoding.

    Raises
    ------
    UnsupportedError
        If a dtype cannot be stored, or it is not known what drafts add to the state.
    """
    if drafts:
        _check_widened(mamba_type, shapes, conv_dim_first, drafts)
    tensors = [
        (tuple(shape), _dtype_name(dtype), dtype.itemsize)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    sections = _sections(mamba_type, shapes, ranks, conv_dim_first, groups) if divide else None
    parts: list[StatePart] = []
    places: list[PartPlace] = []
    offset = 0
    for number, (shape, dtype, size) in enumerate(tensors):
        nbytes = prod(shape) * size
        tokens = shape[0] - (drafts if number == 0 else 0)
        if sections is None:
            part_names = _NAMES.get(mamba_type, ())
            name = part_names[number] if number < len(part_names) else f"part{number}"
            parts.append(StatePart(name, dtype, (tokens, *shape[1:])))
            stored = tokens * prod(shape[1:]) * size
            places.append(PartPlace(offset, 1, stored, stored))
        elif number == 0 and sections:
            rows = 1 if conv_dim_first else tokens
            stride = nbytes // (1 if conv_dim_first else shape[0])
            begin = offset
            for name, channels in sections:
                all_channels = channels * ranks
                if conv_dim_first:
                    parts.append(StatePart(name, dtype, (all_channels, shape[1]), 0))
                else:
                    parts.append(StatePart(name, dtype, (tokens, all_channels), 1))
                row = channels * (size * shape[1] if conv_dim_first else size)
                places.append(PartPlace(begin, rows, row, stride))
                begin += row
        else:
            parts.append(StatePart("ssm", dtype, (shape[0] * ranks, *shape[1:]), 0))
            places.append(PartPlace(offset, 1, nbytes, nbytes))
        offset += nbytes
    return StateParts(tuple(parts), tuple(places), ranks, offset)


def _check_widened(
    mamba_type: str, shapes: Sequence[Sequence[int]], conv_dim_first: bool, drafts: int
) -> None:
    """Refuse states of which it is not known what drafts add to them."""
    is_known = mamba_type in _WIDENED and tuple(map(len, shapes)) in ((2,), (2, 3))
    if not is_known or conv_dim_first or shapes[0][0] <= drafts:
        raise UnsupportedError(
            f"with speculative decoding kvshelf does not know which part of a {mamba_type} state"
            f" belongs to drafts{' (VLLM_SSM_CONV_STATE_LAYOUT=DS)' if conv_dim_first else ''}:"
            " remove --speculative-config or --kv-transfer-config"
        )


def _dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise UnsupportedError(
            f"the model keeps a state of {dtype}, which cannot be stored: set mamba_cache_dtype and"
            " mamba_ssm_cache_dtype to float32, float16 or bfloat16"
        )
    return _DTYPES[dtype]


def _sections(
    mamba_type: str,
    shapes: Sequence[Sequence[int]],
    ranks: int,
    conv_dim_first: bool,
    groups: int | None,
) -> tuple[tuple[str, int], ...] | None:
    """Return name and channels, in a rank, of each section of a convolution.

    None if it is not known how ranks divide the state; empty if it has no convolution. See
    ``derive_mamba_conv_split`` in
    ``vllm/distributed/kv_transfer/kv_connector/v1/ssm_conv_transfer_utils.py``.
    """
    dimensions = tuple(map(len, shapes))
    if mamba_type == "linear":
        return () if dimensions == (3,) else None
    if dimensions not in ((2,), (2, 2), (2, 3)):
        return None
    channels = shapes[0][0 if conv_dim_first else 1]
    if mamba_type == "short_conv":
        return (("conv", channels),) if dimensions == (2,) else None
    if mamba_type == "mamba1":
        fits = dimensions == (2, 2) and shapes[1][0] == channels
        return (("conv", channels),) if fits else None
    if mamba_type not in ("gdn_attn", "mamba2") or dimensions != (2, 3):
        return None
    # Beside the heads' values there are two sections of one size: queries and keys of gated delta
    # nets and of KDA; B and C of Mamba2, which belong to groups of heads.
    heads, width, size = shapes[1]
    values = heads * width
    heads_of_group, remainder = divmod(channels - values, 2)
    if remainder or heads_of_group < size or heads_of_group % size:
        return None
    if mamba_type == "gdn_attn":
        return (("conv_q", heads_of_group), ("conv_k", heads_of_group), ("conv_v", values))
    if ranks > 1 and heads_of_group == size and groups != ranks:
        return None
    return (("conv_x", values), ("conv_b", heads_of_group), ("conv_c", heads_of_group))


def can_divide(states: Collection[StateParts]) -> bool:
    """Return whether the states of all layers of a model can be divided among shards.

    Otherwise all of them have to be split with ``divide=False``: some are not divided, or a rank
    would not hold whole shards.
    """
    shards = default_shards(gcd(*(state.heads for state in states)))
    return all(state.heads and shards % state.ranks == 0 for state in states)


def state_runs(
    layers: Sequence[StateLayer], shards: int
) -> tuple[tuple[LayerRun, ...], dict[int, StateSlots]]:
    """Return the copy runs of the states of a worker, and the slots that they need.

    Parameters
    ----------
    layers : Sequence of StateLayer
        The state layers of the worker's stage, in the order of the namespace.
    shards : int
        Number of shards that the worker holds (``len(plan.shards)``).

    Returns
    -------
    runs : tuple of LayerRun
        For :func:`kvshelf.kv.caches.layer_calls`.
    slots : dict of int to StateSlots
        Of each group, in the order in which their slots follow each other.

    Raises
    ------
    ValueError
        If a cache is not of the form of :class:`StateLayer`, or too small for its state.
    """
    units: dict[int, list[int]] = {}
    for layer in sorted(layers, key=lambda layer: layer.group):
        of_group = units.setdefault(layer.group, [])
        rows = {part.rows for part in layer.state.places}
        of_group.extend(sorted(rows - set(of_group)))
    slots = {group: StateSlots(tuple(of_group)) for group, of_group in units.items()}
    runs: list[LayerRun] = []
    number = 0
    for layer in layers:
        first_unit = sum(of.count for group, of in slots.items() if group < layer.group)
        own_units = slots[layer.group].units
        for part in layer.state.places:
            first_slot = first_unit + sum(own_units[: own_units.index(part.rows)])
            cache, layout = _part_of(layer, part, shards)
            last = runs[-1] if runs else None
            if last is not None and (last.layout, last.first_slot) == (layout, first_slot):
                last.caches.append(cache)
            else:
                runs.append(LayerRun(number, [cache], layout, first_slot))
            number += 1
    return tuple(runs), slots


def _part_of(layer: StateLayer, place: PartPlace, shards: int) -> tuple[Tensor, PagedLayout]:
    """Return the view of a cache that begins with a part, and how the part lies in it."""
    pages = layer.cache.flatten(1)
    blocks, nbytes = pages.shape
    # A cache whose blocks are not contiguous would have been copied.
    in_place = pages.data_ptr() == layer.cache.data_ptr() and pages.stride(1) == 1
    if not in_place or pages.element_size() != 1 or nbytes < layer.state.nbytes:
        raise ValueError(
            f"the cache of a state is {layer.cache.dtype} {list(layer.cache.shape)} with strides"
            f" {list(layer.cache.stride())}; expected blocks of at least {layer.state.nbytes}"
            " contiguous bytes"
        )
    row, remainder = divmod(place.row_bytes, shards)
    if remainder:
        raise ValueError(f"rows of {place.row_bytes} bytes cannot be split over {shards} shards")
    end = place.offset + (place.rows - 1) * place.row_stride + place.row_bytes
    layout = PagedLayout(
        block_size=place.rows,
        block_stride=pages.stride(0) if blocks > 1 else 0,
        token_stride=place.row_stride if place.rows > 1 else 0,
        kv_stride=0,
        head_stride=row if shards > 1 else 0,
        kv_planes=1,
        heads=shards,
        row_bytes=row,
        num_blocks=blocks,
    )
    return pages[:, place.offset : end], layout
