"""What the adapters for other connectors learn from vLLM: a model's facts, and layouts of caches.

Owns :func:`model_facts` and :func:`learn_layouts`, which :mod:`kvshelf.vllm.multiprocess` calls
where a caller has vLLM's configuration and neither namespace nor layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from kvshelf.config import Config
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.format.model import ModelFacts
from kvshelf.kv.layout import PagedLayout, PermutedLayout
from kvshelf.vllm.layout_discovery import discover_layouts
from kvshelf.vllm.media import media_options
from kvshelf.vllm.namespace import (
    check_environment,
    config_overrides,
    local_model_dir,
    process_start_time,
)
from kvshelf.vllm.published import read_published

#: Parts of the names of models that read weights elsewhere than at the top of their folder.
_WEIGHTS_ELSEWHERE: Final = ("Cosmos3", "Kimia", "MiMoV2Omni", "Ultravox")


def model_facts(vllm_config: Any) -> ModelFacts:
    """Return the facts about an engine's model, for a namespace with the canonical layout.

    Engines with kvshelf's connector and ``layout: canonical`` share its chunks. Weight files are
    hashed only when the namespace is made.

    Parameters
    ----------
    vllm_config : VllmConfig

    Raises
    ------
    UnsupportedError
        If a layer keeps anything other than K and V of each token, or vLLM simulates the choice of
        experts.
    ConfigError
        If the weights are not in files of this machine, the KV cache has a dtype of its own,
        there are several pipeline stages, or only the loaded model knows what it computes (remote
        code, Llama 4, quantized models).
    """
    check_environment()
    model, cache_dtype = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    if cache_dtype != "auto":
        raise ConfigError(
            f"the KV cache has the dtype {cache_dtype}, and its scales are known only to the loaded"
            " model: pass namespace"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError(
            "the layers of each pipeline stage are not known here: pass namespace, made of facts"
            " that state them"
        )
    facts = ModelFacts.from_transformers(
        model.hf_config,
        weights=local_model_dir(vllm_config),
        dtype=str(model.dtype).removeprefix("torch."),
        name=str(model.served_model_name or model.model),
        max_model_len=int(model.max_model_len),
    )
    published = read_published(vllm_config, (), process_start_time())
    if published.code or (model.trust_remote_code and model.using_transformers_backend()):
        raise ConfigError(
            "the model's classes may be remote code, which is known only to the loaded model: pass"
            " namespace"
        )
    architectures = getattr(model.hf_config, "architectures", None) or ()
    if any(part in name for part in _WEIGHTS_ELSEWHERE for name in architectures):
        raise ConfigError(
            "which weights the model reads beside those at the top of its folder is known only to"
            " the loaded model: pass namespace"
        )
    if any("Llama4" in name for name in architectures):
        raise ConfigError(
            "whether Llama 4 scales queries by their position is known only to the loaded model:"
            " pass namespace"
        )
    if model.quantization:
        raise ConfigError(
            "in which precision a quantized model computes is known only to the loaded model: pass"
            " namespace"
        )
    return replace(
        facts,
        config=published.config,
        config_overrides=config_overrides(model, Config(), media_options(vllm_config)),
    )


def learn_layouts(
    vllm_config: Any, kv_caches: Mapping[str, Tensor], kv_cache_config: Any = None
) -> dict[str, PagedLayout | PermutedLayout]:
    """Learn how blocks lie in an engine's caches, by writing patterns through its layers.

    The blocks that are written to are restored.

    Parameters
    ----------
    vllm_config : VllmConfig
        Of the worker's process, whose layers are bound to the caches.
    kv_caches : Mapping[str, Tensor]
        As vLLM registers them.
    kv_cache_config : KVCacheConfig, optional
        Says how many blocks the caches have. A worker in a process of its own learns it
        from nothing else.

    Raises
    ------
    UnsupportedError
        If the layout of a layer could not be learned.
    ConfigError
        If the number of blocks is not known.
    """
    cache = vllm_config.cache_config
    num_blocks = getattr(kv_cache_config, "num_blocks", None) or cache.num_gpu_blocks
    if not num_blocks:
        raise ConfigError("the number of blocks is not known yet: pass kv_cache_config")
    layers = discover_layouts(
        vllm_config.compilation_config.static_forward_context,
        kv_caches,
        list(kv_caches),
        num_blocks=int(num_blocks),
        block_size=int(cache.block_size),
        cache_dtype=str(cache.cache_dtype),
        compute_dtype=vllm_config.model_config.dtype,
    )
    layouts: dict[str, PagedLayout | PermutedLayout] = {}
    for layer in layers:
        if layer.learned.layout is None:
            raise UnsupportedError(
                f"the layout of the KV cache of {layer.name} is not known"
                f" ({layer.learned.reason}): use kvshelf's connector with the option server"
            )
        layouts[layer.name] = layer.learned.layout
    return layouts
