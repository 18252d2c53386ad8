"""KV cache groups of hybrid models, as vLLM 0.32 makes them, with small blocks and few layers.

Which groups a model gets, which of their blocks are larger, and what their layers hold, is that of
the models; sizes are smaller, so that a test can keep all bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

with warnings.catch_warnings():
    # Importing vLLM warns of what torch and others deprecate.
    warnings.simplefilter("ignore")
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CircularBufferSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

HALF = torch.bfloat16


def full(block_size: int) -> FullAttentionSpec:
    """Full attention with two KV heads."""
    return FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=8, dtype=HALF)


def window(block_size: int, reach: int, extra: int = 0) -> SlidingWindowSpec:
    """A sliding window of `reach` tokens."""
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=2,
        head_size=8,
        dtype=HALF,
        sliding_window=reach,
        extra_retained_tokens=extra,
    )


def local(block_size: int, chunk: int) -> ChunkedLocalAttentionSpec:
    """Attention within pieces of `chunk` tokens."""
    return ChunkedLocalAttentionSpec(
        block_size=block_size,
        num_kv_heads=2,
        head_size=8,
        dtype=HALF,
        attention_chunk_size=chunk,
    )


def state(
    block_size: int,
    kind: str,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...] | None = None,
    mode: str = "align",
) -> MambaSpec:
    """A recurrent layer: `kind` is the name of an attention backend of vLLM."""
    return MambaSpec(
        block_size=block_size,
        shapes=shapes,
        dtypes=(HALF,) * len(shapes) if dtypes is None else dtypes,
        page_size_padded=4096,
        mamba_type=MambaAttentionBackendEnum[kind],
        mamba_cache_mode=mode,
    )


def latent(block_size: int, compression: int) -> MLAAttentionSpec:
    """Latent KV of DeepSeek V4, one for `compression` tokens."""
    return MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=16,
        dtype=torch.uint8,
        tokens_per_state=compression,
        model_version="deepseek_v4",
        max_tp_shards=1,
    )


def latent_window(block_size: int, reach: int) -> SlidingWindowMLASpec:
    """The sliding window of DeepSeek V4."""
    return SlidingWindowMLASpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=16,
        dtype=torch.uint8,
        sliding_window=reach,
        model_version="deepseek_v4",
        max_tp_shards=1,
    )


#: So many tokens are compressed into one by the layers with rings.
COMPRESSED = 4


def ring(block_size: int) -> CircularBufferSpec:
    """The tokens that a layer which compresses them has not all of yet."""
    return CircularBufferSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=HALF)


def _of_different_layers(block_size: int, **layers: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(block_size=block_size, kv_cache_specs=layers)


def models() -> dict[str, list[KVCacheSpec]]:
    """For each model, the specification of each of its groups."""
    mamba2 = ((3, 24), (4, 4, 4))
    return {
        # A model of Mamba2 layers only has one group.
        "Mamba2": [state(16, "MAMBA2", mamba2)],
        # Seven Mamba1 layers for each layer of attention.
        "Jamba": [full(16), *[state(16, "MAMBA1", ((16, 3), (16, 4)))] * 3],
        "Nemotron-H": [state(16, "MAMBA2", mamba2), state(16, "MAMBA2", mamba2), full(16)],
        # Latent KV, of which some is compressed, beside sliding windows with smaller blocks.
        "DeepSeek V4": [
            _of_different_layers(32, **{"0.1": latent(32, 4), "0.2": latent(32, 32)}),
            latent_window(8, 16),
            latent_window(16, 24),
        ],
        "Gemma 3": [window(8, 24), window(8, 24), full(8)],
        "Qwen3-Next": [
            *[state(16, "GDN_ATTN", ((3, 32), (4, 4, 4)), (HALF, torch.float32))] * 3,
            full(16),
        ],
        # A short convolution, whose state is small.
        "LFM2": [state(8, "SHORT_CONV", ((2, 16),)), state(8, "SHORT_CONV", ((2, 16),)), full(8)],
        # Windows of two sizes, and none that is full.
        "two windows": [window(8, 12), window(4, 20)],
        "Llama 4": [local(8, 32), full(8)],
        # Rings beside one group, beside states and beside windows.
        "GLM-5-next": [latent(16, COMPRESSED), ring(8)],
        "Qwen4-exp": [
            ring(8),
            state(16, "GDN_ATTN", ((3, 32), (4, 4, 4)), (HALF, torch.float32)),
            full(16),
        ],
        "ring and windows": [window(8, 24), ring(8), full(8), ring(8)],
    }


def cache_config(specs: list[KVCacheSpec], blocks: int = 100) -> KVCacheConfig:
    """The configuration of an engine with these groups of one or more layers."""
    groups = []
    for index, spec in enumerate(specs):
        inner: Mapping[str, Any] | None = getattr(spec, "kv_cache_specs", None)
        names = [f"layers.{index}.attn"] if inner is None else list(inner)
        groups.append(KVCacheGroupSpec(names, spec))
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
