"""Speculative decoding: which engines are served, and which layers belong to the drafter.

Owns what kvshelf knows of vLLM's speculative methods (``vllm/config/speculative.py``). Some of them
have a drafter with attention layers of its own. vLLM keeps the KV of these layers in the blocks of
the model's KV, so it registers both together.

Contracts
---------
* Layers of a drafter never enter the model's namespace or objects: an engine with a drafter and
  one without share chunks. The drafter's KV has a namespace of its own.
* :func:`draft_layers` runs inside ``register_kv_caches``, on the worker's step thread.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from kvshelf.config import Config
from kvshelf.errors import UnsupportedError
from kvshelf.format.namespace import Namespace
from kvshelf.urls import weights_name

#: Logged with a reason.
WITHOUT_DRAFTS = (
    "KV of the drafter is neither stored nor loaded, so fewer drafts are accepted behind a loaded"
    " prefix: %s"
)

#: Methods whose drafts have no KV of their own.
METHODS_WITHOUT_KV = frozenset(
    {"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class"}
)
#: Methods whose drafter has attention layers.
METHODS_WITH_KV = frozenset({"eagle", "eagle3", "mtp", "draft_model", "dflash", "dspark"})


def drafter_has_kv(vllm_config: Any) -> bool:
    """Whether the engine has a drafter with attention layers.

    Parameters
    ----------
    vllm_config : VllmConfig
    """
    speculative_config = getattr(vllm_config, "speculative_config", None)
    return speculative_config is not None and speculative_config.method in METHODS_WITH_KV


def drops_last_block(speculative_config: Any) -> bool:
    """Whether vLLM's prefix cache leaves out the last block of each hit, for the drafter's sake.

    Parameters
    ----------
    speculative_config : SpeculativeConfig or None
    """
    if speculative_config is None or not hasattr(speculative_config, "use_eagle_block_drop"):
        return False
    return bool(speculative_config.use_eagle_block_drop())


def check_speculation(vllm_config: Any) -> None:
    """Refuse speculative decoding with which an engine cannot be served.

    Parameters
    ----------
    vllm_config : VllmConfig

    Raises
    ------
    UnsupportedError
    """
    speculative_config = vllm_config.speculative_config
    if speculative_config is None:
        return
    served = METHODS_WITHOUT_KV | METHODS_WITH_KV
    if speculative_config.method not in served:
        raise UnsupportedError(
            f"the speculative method is {speculative_config.method!r}, and kvshelf does not know"
            f" what it keeps in the KV cache; use one of {', '.join(sorted(served))}"
        )
    stages = int(vllm_config.parallel_config.pipeline_parallel_size)
    if stages > 1 and not getattr(vllm_config, "use_v2_model_runner", False):
        raise UnsupportedError(
            "with speculative decoding and pipeline stages vLLM's first model runner ends a"
            " connector's step on the last stage only, so no chunk would ever be stored"
            " completely. Set VLLM_USE_V2_MODEL_RUNNER=1 if vLLM's second model runner can run"
            " the model, or use tensor parallelism, or no speculative decoding"
        )


def draft_layers(vllm_config: Any) -> frozenset[str]:
    """Return the names of the drafter's attention layers in this worker.

    vLLM 0.33 marks these layers (``is_draft_layer`` in
    ``vllm/model_executor/layers/attention_layer_base.py``), and so does the second model runner of
    0.32. The first one of 0.32 keeps their names in its drafter only.

    Parameters
    ----------
    vllm_config : VllmConfig

    Raises
    ------
    UnsupportedError
        If the engine has a drafter whose layers cannot be distinguished from the model's.
    """
    if not drafter_has_kv(vllm_config):
        return frozenset()
    layers = vllm_config.compilation_config.static_forward_context
    marked = [name for name, layer in layers.items() if getattr(layer, "is_draft_layer", False)]
    if marked:
        return frozenset(marked)
    named = _layers_of_running_drafter()
    if named is None:
        raise UnsupportedError(
            "this vLLM version does not tell which layers belong to the drafter of speculative"
            f" method {vllm_config.speculative_config.method!r}: use vLLM 0.32 or 0.33, or another"
            f" method, one of {', '.join(sorted(METHODS_WITHOUT_KV))}"
        )
    return named


def _layers_of_running_drafter() -> frozenset[str] | None:
    """Return what the drafter of the model runner that registers its caches names as its layers.

    None if no model runner is found, or one whose drafter names none. A connector is not given
    the model runner, so it can only be found among the callers.
    """
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        runner: Any = frame.f_locals.get("self")
        if type(runner).__module__.startswith("kvshelf."):
            # A worker of kvshelf has a drafter as well.
            continue
        if hasattr(runner, "speculator"):
            # This is the second model runner, which has a drafter in the last stage only.
            return frozenset(getattr(runner.speculator, "draft_attn_layer_names", ()))
        if hasattr(runner, "drafter"):
            names = getattr(runner.drafter, "_draft_attn_layer_names", None)
            return None if names is None else frozenset(names)
    return None


def draft_engine(vllm_config: Any) -> Any:
    """Return a drafter's configuration, in the form of an engine's that has no other model.

    Parameters
    ----------
    vllm_config : VllmConfig
        The engine's configuration.

    Returns
    -------
    object or None
        The parts of a ``VllmConfig`` that describe the KV of the drafter in the last pipeline
        stage. None where the KV of the drafter is left out: without a drafter; where ranks divide
        its heads or tokens in another way than the model's; and where the number of drafts depends
        on the load, since vLLM then computes no drafts in some steps.
    """
    if not drafter_has_kv(vllm_config):
        return None
    speculative_config = vllm_config.speculative_config
    parallel_config = vllm_config.parallel_config
    model = speculative_config.draft_model_config
    draft_parallel = speculative_config.draft_parallel_config
    ranks = int(parallel_config.tensor_parallel_size)
    if (
        model is None
        or speculative_config.num_speculative_tokens_per_batch_size
        or int(getattr(draft_parallel, "tensor_parallel_size", ranks)) != ranks
        or int(getattr(parallel_config, "decode_context_parallel_size", 1)) > 1
        or int(getattr(parallel_config, "prefill_context_parallel_size", 1)) > 1
    ):
        return None
    cache_config = vllm_config.cache_config
    return SimpleNamespace(
        model_config=model,
        load_config=speculative_config.draft_load_config or vllm_config.load_config,
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(
            block_size=cache_config.block_size,
            cache_dtype=speculative_config.kv_cache_dtype or cache_config.cache_dtype,
            num_gpu_blocks=cache_config.num_gpu_blocks,
        ),
        scheduler_config=vllm_config.scheduler_config,
        compilation_config=vllm_config.compilation_config,
        speculative_config=speculative_config,
    )


def draft_config(vllm_config: Any, config: Config, target: Namespace | None) -> Config:
    """Return the options for a drafter's KV.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
        The engine's options.
    target : Namespace or None
        The model's namespace, on which the drafter's depends: drafters read hidden states of the
        model. Sizes do not depend on it, so it may be left out where only these are needed.
    """
    same = vllm_config.speculative_config.draft_model_config.model == vllm_config.model_config.model
    # The name of the model's weights does not identify another checkpoint.
    named = weights_name(config.weights) is not None and not same
    return config.model_copy(
        update={
            "version": f"drafter of {'' if target is None else target.digest.hex()}",
            "weights": "content" if named else config.weights,
        }
    )
