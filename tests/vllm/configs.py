"""What the connector reads of vLLM's configuration, for engines of tests that only model vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

#: KV heads of a model.
HEADS = 2
#: The folder with the configuration of models that have no files.
PUBLISHED = Path(__file__).with_name("published")


def model_config(**fields: Any) -> SimpleNamespace:
    """What the connector reads of a ``ModelConfig``."""
    known = {
        "is_encoder_decoder": False,
        "is_diffusion": False,
        "is_prefix_caching_supported": True,
        "use_mla": False,
        "dtype": torch.bfloat16,
        "quantization": None,
        "model": "mini",
        "hf_config_path": str(PUBLISHED),
        "served_model_name": None,
        "max_model_len": 4096,
        "hf_text_config": SimpleNamespace(rope_theta=10000.0),
        "get_total_num_kv_heads": lambda: HEADS,
    }
    return SimpleNamespace(**known | fields)


def parallel_config(**fields: Any) -> SimpleNamespace:
    """What the connector reads of a ``ParallelConfig``."""
    known = {
        "rank": 0,
        "world_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    return SimpleNamespace(**known | fields)


def vllm_config(
    layers: Mapping[str, Any], *, block_size: int, blocks: int, **fields: Any
) -> SimpleNamespace:
    """What the connector reads of a ``VllmConfig`` of an engine with these layers."""
    known = {
        "model_config": model_config(),
        "parallel_config": parallel_config(),
        "cache_config": SimpleNamespace(
            block_size=block_size,
            cache_dtype="auto",
            num_gpu_blocks=blocks,
            enable_prefix_caching=True,
        ),
        "scheduler_config": SimpleNamespace(
            enable_chunked_prefill=True, max_num_batched_tokens=2048
        ),
        "speculative_config": None,
        "num_speculative_tokens": 0,
        "num_lookahead_tokens": 0,
        "compilation_config": SimpleNamespace(static_forward_context=layers),
        "load_config": SimpleNamespace(load_format="auto", download_dir=None),
    }
    return SimpleNamespace(**known | fields)
