"""Layers with vLLM's CPU attention: what this processor can do, and recordings of what others did.

vLLM's cache update packs K by an instruction set (``isa``) and refuses those that the processor or
the build of its kernels lacks. :func:`refusal` asks it. The packings of all instruction sets are
recorded in ``tests/golden/packings.npz``, and a layer made with ``recorded=True`` is written to by
the recording instead of the kernel, so every packing is tested on every machine.

``python tests/vllm/cpu_layers.py`` records what this machine can do, and keeps what it cannot.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

BLOCKS, HEADS = 4, 2
RECORDINGS = Path(__file__).parents[1] / "golden" / "packings.npz"
#: (isa, tokens in a block, head size) of every packing that is recorded.
PACKINGS = (
    ("vec", 128, 64),
    ("vec", 64, 128),
    ("vec", 32, 32),
    ("vec16", 128, 80),
    ("vec16", 48, 112),
    ("amx", 128, 64),
    ("amx", 32, 96),
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
#: Only this shape is recorded with 8-bit floating-point caches.
FP8_SHAPE = (128, 64)


def cpu_layer(
    isa: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kv_cache_dtype: str = "auto",
    block_size: int = 128,
    head_size: int = 64,
    scale: float = 1.0,
    recorded: bool = False,
    **changes: Any,
) -> Any:
    """Make a layer with vLLM's CPU attention, as far as its cache update sees it.

    Parameters
    ----------
    isa : str
        Instruction set as vLLM names it: ``vec``, ``vec16``, ``amx``.
    dtype : torch.dtype
        Of K and V, and of the cache unless `kv_cache_dtype` is an fp8 one.
    kv_cache_dtype : str
        vLLM's name: ``auto``, ``fp8_e4m3`` or ``fp8_e5m2``.
    block_size : int
        Tokens in a block.
    head_size : int
        Elements of K, and of V, of one head.
    scale : float
        Scale of K; that of V is half of it.
    recorded : bool
        Write by the recording of this packing instead of vLLM's kernel.
    **changes
        Further attributes of the layer.
    """
    kind = RecordedImpl if recorded else CPUAttentionBackendImpl
    impl = kind.__new__(kind)
    impl.attn_type = "decoder"
    impl.kv_cache_dtype = kv_cache_dtype
    impl.sliding_window = -1
    cache_dtype = torch.uint8 if kv_cache_dtype.startswith("fp8") else dtype
    cache = torch.zeros(BLOCKS, HEADS, block_size, 2 * head_size, dtype=cache_dtype)
    cache.view(torch.uint8).random_(0, 100)
    layer = SimpleNamespace(
        impl=impl,
        kv_cache=cache,
        isa=isa,
        _k_scale_float=scale,
        _v_scale_float=scale / 2,
        num_kv_heads=HEADS,
        head_size=head_size,
        head_size_v=head_size,
        kv_sharing_target_layer_name=None,
        kv_cache_dtype=kv_cache_dtype,
        attn_backend=CPUAttentionBackend,
    )
    for name, value in changes.items():
        setattr(layer, name, value)
    return layer


class RecordedImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, whose cache update does what was recorded of the real one."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write each element to the place at which the kernel was seen to put it."""
        _, heads, block_size, double = kv_cache.shape
        places = positions(layer.isa, kv_cache.element_size(), block_size, double // 2)
        flat = kv_cache.view(kv_cache.shape[0], heads, block_size * double)
        block, offset = slot_mapping // block_size, slot_mapping % block_size
        scales = layer._k_scale_float, layer._v_scale_float
        for plane, (rows, scale) in enumerate(zip((key, value), scales, strict=True)):
            if self.kv_cache_dtype in FP8:
                stored = FP8[self.kv_cache_dtype]
                rows = (rows.float() / scale).clamp(-_top(stored), _top(stored)).to(stored)
                rows = rows.view(torch.uint8)
            flat[
                block[:, None, None],
                torch.arange(heads)[None, :, None],
                places[plane][offset][:, None, :],
            ] = rows


def _top(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max)


@functools.cache
def refusal(
    isa: str,
    dtype: torch.dtype = torch.bfloat16,
    kv_cache_dtype: str = "auto",
    block_size: int = 128,
    head_size: int = 64,
) -> str | None:
    """Return why vLLM refuses to write this packing on this processor; None if it does not."""
    layer = cpu_layer(
        isa,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        head_size=head_size,
    )
    row = torch.zeros(1, HEADS, head_size, dtype=dtype)
    try:
        layer.impl.do_kv_cache_update(layer, row, row, layer.kv_cache, torch.zeros(1).long())
    except (RuntimeError, NotImplementedError) as error:
        return f"vLLM refuses it on this processor: {str(error).splitlines()[0]}"
    return None


@functools.cache
def positions(isa: str, item_bytes: int, block_size: int, head_size: int) -> Tensor:
    """Return the recorded place of each element.

    Returns
    -------
    Tensor
        int64 [2, tokens, elements]: where the element of K (0) or V (1) lies inside its
        (block, head), counted in elements.

    Raises
    ------
    KeyError
        If this packing was not recorded.
    """
    with np.load(RECORDINGS) as recordings:
        steps = torch.from_numpy(recordings[_name(isa, item_bytes, block_size, head_size)])
    return steps.cumsum(0).view(2, block_size, head_size)


def _name(isa: str, item_bytes: int, block_size: int, head_size: int) -> str:
    return f"{isa}-{item_bytes}-bytes-{block_size}-tokens-{head_size}-elements"


def record(
    isa: str, dtype: torch.dtype, kv_cache_dtype: str, block_size: int, head_size: int
) -> np.ndarray[Any, Any]:
    """Find out where vLLM's kernel puts each element, by setting single bits of their numbers."""
    layer = cpu_layer(
        isa, dtype=dtype, kv_cache_dtype=kv_cache_dtype, block_size=block_size, head_size=head_size
    )
    count = 2 * block_size * head_size
    numbers = torch.arange(count).view(2, block_size, 1, head_size).expand(-1, -1, HEADS, -1)
    found = torch.zeros(count, dtype=torch.int64)
    slots = torch.arange(block_size) + block_size
    for bit in range(count.bit_length()):
        planes = (numbers >> bit & 1).to(dtype)
        layer.impl.do_kv_cache_update(layer, planes[0], planes[1], layer.kv_cache, slots)
        found |= (layer.kv_cache[1, 0].reshape(-1) != 0).long() << bit
    inverse = torch.empty_like(found)
    inverse[found] = torch.arange(count)
    # Steps from one place to the next compress well.
    steps: np.ndarray[Any, Any] = (
        inverse.diff(prepend=torch.zeros(1).long()).to(torch.int32).numpy()
    )
    return steps


def main() -> None:
    """Record every packing that this processor has."""
    recordings = dict(np.load(RECORDINGS)) if RECORDINGS.exists() else {}
    kinds = [(*shape, dtype, "auto") for shape in PACKINGS for dtype in DTYPES]
    kinds += [(isa, *FP8_SHAPE, torch.bfloat16, name) for isa in ("vec", "amx") for name in FP8]
    for isa, block_size, head_size, dtype, kv_cache_dtype in kinds:
        shown = f"{isa}, {block_size} tokens of {head_size} elements, {dtype}, {kv_cache_dtype}"
        if why := refusal(isa, dtype, kv_cache_dtype, block_size, head_size):
            print(f"{shown}: {why}")
            continue
        item_bytes = 1 if kv_cache_dtype in FP8 else dtype.itemsize
        found = record(isa, dtype, kv_cache_dtype, block_size, head_size)
        known = recordings.setdefault(_name(isa, item_bytes, block_size, head_size), found)
        print(f"{shown}: {'recorded' if np.array_equal(known, found) else 'DIFFERS'}")
    np.savez_compressed(RECORDINGS, **recordings)


if __name__ == "__main__":
    main()
