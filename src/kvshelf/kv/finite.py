"""Finds NaN and infinity in the payloads of objects.

Owns the knowledge of which bytes of a payload are numbers of which dtype. Broken input or a broken
kernel often produces NaN, which would be loaded again and again once it is stored.

All functions are pure and run only on the calling thread: a piece is so small that torch does not
spread it over an engine's cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvshelf.format.objects import ObjectFormat

_PIECE = 32768


#: For each safetensors dtype: the integer dtype of its size, a mask that removes the sign (and the
#: mantissa if the exponent alone decides), and the smallest masked value that is not finite.
_CHECKS: Mapping[str, tuple[torch.dtype, int, int]] = {
    "BF16": (torch.int16, 0x7F80, 0x7F80),
    "F16": (torch.int16, 0x7C00, 0x7C00),
    "F32": (torch.int32, 0x7F800000, 0x7F800000),
    # E4M3 (fn) has no infinity and two NaNs, E5M2 has both.
    "F8_E4M3": (torch.int8, 0x7F, 0x7F),
    "F8_E5M2": (torch.int8, 0x7F, 0x7C),
}


class FiniteCheck:
    """Checks whether the payloads of one kind in one namespace contain only finite numbers.

    Layers with an unknown layout are not checked, because the meaning of their bytes is unknown.

    Parameters
    ----------
    fmt : ObjectFormat
    """

    def __init__(self, fmt: ObjectFormat) -> None:
        record: Mapping[str, Any] = fmt.namespace.record
        self._fmt = fmt
        self._dtypes = dict(zip(record["layer_names"], record["layer_dtypes"], strict=True))

    def first_bad(self, shard: int, payload: torch.Tensor, tokens: int | None = None) -> str | None:
        """Return the name of the first tensor that contains NaN or infinity, None if none does.

        Parameters
        ----------
        shard : int
        payload : Tensor
            uint8 ``[payload bytes]`` on the CPU.
        tokens : int, optional
            Number of tokens of a tail; None, or the chunk size, for a whole chunk.
        """
        for spec in self._fmt.tensors(shard, tokens):
            # A part of a state is no layer, and has its own dtype.
            known = _CHECKS.get(self._dtypes.get(spec.name, spec.dtype))
            if known is None:
                continue
            dtype, mask, limit = known
            part = payload[spec.offset : spec.offset + spec.nbytes]
            # Parts with a wider dtype may follow parts with a narrower one.
            numbers = (part.clone() if spec.offset % dtype.itemsize else part).view(dtype)
            # On integers these operations run at memory bandwidth; on floats they do not.
            if any(int((piece & mask).amax()) >= limit for piece in torch.split(numbers, _PIECE)):
                return spec.name
        return None
