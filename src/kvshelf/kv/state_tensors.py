"""A state as the tensors of the whole model: the form in which a program holds it.

Owns the translation between these tensors and the shards of state objects
(:mod:`kvshelf.format.tensors`), and the checks that they fit a namespace.

A state is a mapping from names as in state objects, ``<layer>.<part>``, to tensors with the shapes
that the namespace record states, of the whole model. A part that is not divided (layout
``state-tp<ranks>``) has one more dimension in front: one entry for each rank.

Contracts
---------
* Tensors that do not fit the namespace are refused with a ValueError before anything is read or
  written.
* The memory belongs to a gather or scatter while it runs. Any thread may call all functions.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvshelf.errors import UnsupportedError
from kvshelf.format.kinds import STATE
from kvshelf.format.objects import ObjectFormat
from kvshelf.format.tensors import TensorSpec, parse_state, required_field
from kvshelf.kv.caches import DONE, KVCache, PendingCopy
from kvshelf.kv.sources import TORCH_DTYPES, BoundKV


class StateTensors(KVCache):
    """One state in host memory. Chunks have no slots here: each is copied from and to all of it.

    Parameters
    ----------
    fmt : ObjectFormat
        Of kind state.
    state : Mapping of str to Tensor
        The tensor of each part of each layer; see the module.

    Raises
    ------
    ValueError
        If the tensors are not those of the namespace.
    """

    def __init__(self, fmt: ObjectFormat, state: Mapping[str, Tensor]) -> None:
        self._specs = [fmt.tensors(shard) for shard in range(fmt.shards)]
        template = empty_state(fmt, device="meta")
        if wrong := sorted(template.keys() ^ state.keys()):
            raise ValueError(
                f"the state {'lacks' if wrong[0] in template else 'has'} {wrong[0]!r}; expected the"
                f" {len(template)} tensors that objects of this namespace hold"
            )
        for name, expected in template.items():
            tensor = state[name]
            if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
                raise ValueError(
                    f"{name!r} is {tensor.dtype} {list(tensor.shape)}; expected {expected.dtype}"
                    f" {list(expected.shape)}"
                )
            if tensor.device.type != "cpu":
                raise UnsupportedError(
                    f"{name!r} lies on {tensor.device}; pass the tensors of a state on the CPU"
                )
        #: The shard's tensors, views of the caller's, in the order of the object.
        self._parts: list[list[Tensor]] = [[] for _ in self._specs]
        divided = _divided(fmt)
        counts: defaultdict[str, int] = defaultdict(int)
        for specs, parts in zip(self._specs, self._parts, strict=True):
            for spec in specs:
                number, at = counts[spec.name], divided[spec.name]
                counts[spec.name] += 1
                if at is None:
                    parts.append(state[spec.name][number])
                else:
                    extent = spec.shape[at]
                    parts.append(state[spec.name].narrow(at, number * extent, extent))

    def bound(self) -> BoundKV:
        """Return the state as a source of any prompt's KV: every chunk has its only slot."""
        return BoundKV(self, sys.maxsize, lambda start, end: torch.zeros(1, dtype=torch.int64))

    def gather(self, slots: Tensor, payloads: Sequence[Tensor]) -> PendingCopy:
        """See :meth:`KVMemory.gather`: it has ended when this method returns."""
        for specs, parts, payload in zip(self._specs, self._parts, payloads, strict=True):
            for spec, part in zip(specs, parts, strict=True):
                _bytes_of(payload, spec).copy_(part.contiguous().view(-1).view(torch.uint8))
        return DONE

    def scatter(self, shard: int, slots: Tensor, payload: Tensor, fence: object = None) -> None:
        """See :meth:`KVMemory.scatter`."""
        for spec, part in zip(self._specs[shard], self._parts[shard], strict=True):
            # The payload's bytes need not be aligned to the elements.
            content = _bytes_of(payload, spec).clone().view(TORCH_DTYPES[spec.dtype])
            part.copy_(content.view(spec.shape))


def empty_state(fmt: ObjectFormat, *, device: str = "cpu") -> dict[str, Tensor]:
    """Return zeroed tensors for a state of a namespace, to load into.

    Raises
    ------
    ConfigError
        If the namespace has no layers of kind state.
    """
    fmt = fmt.of(STATE)
    divided = _divided(fmt)
    shards: defaultdict[str, list[TensorSpec]] = defaultdict(list)
    for shard in range(fmt.shards):
        for spec in fmt.tensors(shard):
            shards[spec.name].append(spec)
    state = {}
    for name, specs in shards.items():
        shape, at = list(specs[0].shape), divided[name]
        if at is None:
            shape.insert(0, len(specs))
        else:
            shape[at] *= len(specs)
        state[name] = torch.zeros(shape, dtype=TORCH_DTYPES[specs[0].dtype], device=device)
    return state


def _divided(fmt: ObjectFormat) -> dict[str, int | None]:
    """Return, for each tensor of state objects, the dimension that shards divide."""
    record = fmt.namespace.record
    fields = [
        required_field(record, name) for name in ("layer_names", "layer_shapes", "layer_dtypes")
    ]
    numbers = {number for shard in range(fmt.shards) for number in fmt.layer_numbers(shard)}
    return {
        f"{layer}.{part.name}": part.divided
        for number, (layer, shape, dtype) in enumerate(zip(*fields, strict=True))
        if number in numbers
        for part in parse_state(shape, dtype)
    }


def _bytes_of(payload: Tensor, spec: TensorSpec) -> Tensor:
    return payload[spec.offset : spec.offset + spec.nbytes]
