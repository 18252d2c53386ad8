"""Looks for NaN and infinity in the payloads of objects.

Owns which bytes of a payload are numbers of which kind. What a model makes of broken input, or
a broken kernel of good input, is often NaN; once stored it would be loaded again and again.

All functions are pure, run on the thread that calls them and on that one only: a piece is small
enough for torch not to spread it over an engine's cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvshelf.chunkfile import ObjectFormat

_PIECE = 32768


#: For each dtype of safetensors: integers of its size, the bits of a number without sign (and,
#: where the exponent alone decides, without mantissa), and the least that is not finite.
_CHECKS: Mapping[str, tuple[torch.dtype, int, int]] = {
    "BF16": (torch.int16, 0x7F80, 0x7F80),
    "F16": (torch.int16, 0x7C00, 0x7C00),
    "F32": (torch.int32, 0x7F800000, 0x7F800000),
    # E4M3 (fn) has no infinity and two NaNs, E5M2 has both.
    "F8_E4M3": (torch.int8, 0x7F, 0x7F),
    "F8_E5M2": (torch.int8, 0x7F, 0x7C),
}


class FiniteCheck:
    """Tells whether the payloads of one namespace hold finite numbers only.

    Layers whose layout is unknown are not looked at: nobody knows what their bytes are.

    Parameters
    ----------
    fmt : ObjectFormat
    """

    def __init__(self, fmt: ObjectFormat) -> None:
        record: Mapping[str, Any] = fmt.namespace.record
        self._fmt = fmt
        self._dtypes = dict(zip(record["layer_names"], record["layer_dtypes"], strict=True))

    def first_bad(self, shard: int, payload: torch.Tensor) -> str | None:
        """Return the name of the first layer that holds NaN or infinity, None if none does.

        Parameters
        ----------
        shard : int
        payload : Tensor
            uint8 ``[payload bytes]`` on the CPU, of a whole chunk.
        """
        for spec in self._fmt.tensors(shard):
            known = _CHECKS.get(self._dtypes[spec.name])
            if known is None:
                continue
            dtype, mask, limit = known
            numbers = payload[spec.offset : spec.offset + spec.nbytes].view(dtype)
            # On integers these two run at the speed of memory, as on no kind of floats.
            if any(int((piece & mask).amax()) >= limit for piece in torch.split(numbers, _PIECE)):
                return spec.name
        return None
