"""In which precision a loaded quantized model computes.

Engines with equal quantized weights need not compute the same: which kernel serves a layer, and
with it the dtype of the activations that it multiplies, follows from the hardware, options and
environment variables. FP8 weights meet 16-bit activations on Ampere and FP8 ones on Hopper. Owns
the field ``precision`` of a namespace record, which says so: read from the loaded layers, where
vLLM has decided, and without names of kernels, so that kernels of one precision share KV.

Contracts
---------
* The tables say what was read in vLLM's sources of the kernels that engines get by default. One
  that is not among them may compute in any precision: its class stands for it, with the dtype of
  activations that it states, and the log names it once.
* Models that are not quantized have an empty field, unless variables or options that are not at
  their defaults round what they compute.

vLLM: ``model_executor/kernels/linear``, ``model_executor/layers/quantization`` (``scheme.kernel``,
``quant_method.fp8_linear``, …), ``model_executor/layers/fused_moe`` (``FusedMoEQuantConfig``,
``experts``), ``envs.py``.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
import vllm.envs as vllm_envs

from kvshelf.errors import UnsupportedError

logger = logging.getLogger(__name__)

#: Activations that are not quantized, and those of the dtype that the kernel's configuration names.
_COMPUTE: Final = ""
_ASKED: Final = "asked"

#: Bits of weights (0 where the kernel's configuration has them), activations, and the kernels; and
#: a method that has none. Those of CPUs and of NVIDIA's GPUs that models with weights in FP8, INT8,
#: INT4, MXFP8, MXFP4 and NVFP4 get by default.
_ROWS: Final = (
    (
        8,
        _ASKED,
        """
        CPUFP8W8A8ScaledMMLinearKernel CPUFp8W8A8BlockScaledMMKernel CutlassFP8ScaledMMLinearKernel
        CutlassFp8BlockScaledMMKernel DeepGemmFp8BlockScaledMMKernel
        FlashInferFP8ScaledMMLinearKernel FlashInferFp8BlockScaledMMKernel
        FlashInferFp8DeepGEMMDynamicBlockScaledKernel TritonFP8ScaledMMLinearKernel
        TritonFp8BlockScaledMMKernel
        """,
    ),
    (
        8,
        _COMPUTE,
        """
        CPUFp8BlockScaledMMKernel CPUFp8ChannelWiseScaledMMLinearKernel
        CPUFp8PerTensorScaledMMLinearKernel MarlinFP8ScaledMMLinearKernel MarlinMxfp8LinearKernel
        """,
    ),
    (
        8,
        "int8",
        """
        CPUInt8ScaledMMLinearKernel CutlassInt8ScaledMMLinearKernel TritonInt8ScaledMMLinearKernel
        """,
    ),
    (8, "mxfp8", "FlashInferCutlassMxfp8LinearKernel FlashInferTrtllmMxfp8LinearKernel"),
    (
        4,
        "nvfp4",
        """
        CutlassNvFp4LinearKernel FlashInferCutlassNvFp4LinearKernel
        FlashInferTrtllmNvFp4LinearKernel
        """,
    ),
    (4, "mxfp4", "FlashInferMxFp4LinearKernel"),
    (4, _COMPUTE, "AutoAWQLinearMethod MarlinMxFp4LinearKernel MarlinNvFp4LinearKernel"),
    (0, _ASKED, "CutlassW4A8LinearKernel MarlinLinearKernel"),
    (0, _COMPUTE, "CPUWNA16LinearKernel ExllamaLinearKernel MacheteLinearKernel"),
)
_LINEAR: Final[Mapping[str, tuple[int, str]]] = {
    kernel: (bits, activations)
    for bits, activations, kernels in _ROWS
    for kernel in kernels.split()
}
#: Experts that compute as their FusedMoEQuantConfig says.
_AS_CONFIGURED: Final = """
    BatchedDeepGemmExperts BatchedMarlinExperts BatchedTritonExperts CPUExpertsFp8
    CPUExpertsFp8W8A8 CPUExpertsMxfp4 CutlassBatchedExpertsFp8 CutlassExpertsFp4 CutlassExpertsFp8
    CutlassExpertsW4A8Fp8 DeepGemmExperts FlashInferExperts MarlinExperts OAITritonExperts
    OAITritonMxfp4ExpertsMonolithic TritonExperts TritonOrCutlassExperts TritonOrDeepGemmExperts
    TritonWNA16Experts TrtLlmFp8ExpertsModular TrtLlmFp8ExpertsMonolithic TrtLlmMxfp4ExpertsModular
    TrtLlmMxfp4ExpertsMonolithic TrtLlmNvFp4ExpertsModular TrtLlmNvFp4ExpertsMonolithic
"""
_EXPERTS: Final = frozenset(_AS_CONFIGURED.split())
#: Experts that do not.
_OTHER_EXPERTS: Final[Mapping[str, tuple[int, str]]] = {
    "CPUExpertsInt4": (4, "int8"),
    "CPUExpertsInt8": (8, "int8"),
}
#: Where methods keep their kernel, and where they keep what has one.
_KERNELS: Final = ("kernel", "fp8_linear", "linear_kernel", "ocp_mx_linear")
_INNER: Final = ("scheme", "quant_method", "linear_method")
#: Attribute that the CPU's kernel of int4 weights sets on layers whose activations it makes int8.
_INT8_ACTIVATIONS: Final = "use_w4a8"

#: Variables that change the precision behind the classes, and their defaults as vLLM parses them.
_VARIABLES: Final[Mapping[str, object]] = {
    # FP8 weights are made 16 bits wide where their kernel depends on the batch.
    "VLLM_BATCH_INVARIANT": False,
    "VLLM_B12X_MOE_FP4_FORCE_A16": False,
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": False,
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": False,
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": None,
    "VLLM_MARLIN_INPUT_DTYPE": None,
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": None,
    "VLLM_ROCM_USE_AITER_MOE_SITUV2": "auto",
    "VLLM_USE_DEEP_GEMM_E8M0": True,
    "VLLM_XPU_INC_WNA16_BACKEND": "auto",
}
#: The same of one that rounds what models compute which are not quantized.
_OF_ALL_MODELS: Final[Mapping[str, object]] = {"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "NONE"}


def precision(vllm_config: Any, modules: Iterable[torch.nn.Module]) -> tuple[str, ...]:
    """Return the field `precision` of a namespace record for a rank's layers.

    Parameters
    ----------
    vllm_config : VllmConfig
    modules : Iterable of Module
        Of the loaded model.

    Raises
    ------
    UnsupportedError
        If the model is quantized and vLLM does not show it.
    """
    model, modules = vllm_config.model_config, list(modules)
    compute = str(model.dtype).removeprefix("torch.")
    modes = {*_changed(_OF_ALL_MODELS), *_of_attention(vllm_config, modules)}
    if model.quantization:
        if not modules:
            raise UnsupportedError(
                "the model is quantized, and this vLLM version does not show in which precision its"
                " layers compute"
            )
        modes |= {*_changed(_VARIABLES)}
        for module in modules:
            modes |= {*_of_module(module, compute)}
    return tuple(sorted(modes))


def _changed(variables: Mapping[str, object]) -> Iterator[str]:
    """Yield the variables that are not at their defaults."""
    for name, default in variables.items():
        value = getattr(vllm_envs, name, default)
        if value != default:
            text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
            yield f"{name}={text}"


def _of_attention(vllm_config: Any, modules: Iterable[Any]) -> Iterator[str]:
    """Yield what attention rounds: weights of MLA at start, and queries beside an FP8 cache."""
    implementations = set()
    for module in modules:
        implementations.add(type(getattr(module, "impl", None)).__name__)
        if getattr(module, "is_aiter_triton_fp4_bmm_enabled", False):
            yield "4 mxfp4"
        elif getattr(module, "is_aiter_triton_fp8_bmm_enabled", False):
            yield f"8 {_text(module.W_K.dtype)}"
    if not str(vllm_config.cache_config.cache_dtype).startswith("fp8"):
        return
    options = vllm_config.attention_config
    if options.disable_flashinfer_q_quantization and "FlashInferImpl" in implementations:
        yield "disable_flashinfer_q_quantization=true"
    if options.use_prefill_query_quantization and any(
        "MLA" in implementation for implementation in implementations
    ):
        yield "use_prefill_query_quantization=true"


def _of_module(module: torch.nn.Module, compute: str) -> Iterator[str]:
    """Yield in which precision a module of a quantized model computes."""
    method = getattr(module, "quant_method", None)
    if method is None:
        parameters = module.parameters(recurse=False)
        packed = any(
            parameter.element_size() == 1 and parameter.dtype != torch.bool
            for parameter in parameters
        )
        # `_of_attention` returns those of MLA.
        if packed and not hasattr(module, "W_K"):
            yield _by_name(module)
        return
    # The methods of embeddings, of attention and of layers that are not quantized.
    ancestors = [parameter.__name__ for parameter in type(method).__mro__]
    if "BaseKVCacheMethod" in ancestors or any(
        parameter.startswith("Unquant") for parameter in ancestors
    ):
        return
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    kernels_of = _of_linear(module) if experts is None else _of_experts(experts)
    if isinstance(kernels_of, str):
        yield kernels_of
    else:
        bits, activations = kernels_of
        yield f"{bits} {activations or compute}"


def _of_linear(module: Any) -> tuple[int, str] | str:
    """Return bits of weights and activations of a linear layer, or the class that does."""
    kernel = _kernel(module)
    name = type(kernel).__name__
    listed = _LINEAR.get(name)
    if listed is None:
        return _by_name(kernel)
    bits, activations = listed
    if getattr(module, _INT8_ACTIVATIONS, False):
        activations = "int8"
    elif activations == _ASKED:
        config = kernel.config
        if hasattr(config, "act_type"):
            activations = _text(config.act_type)
        else:
            activations = _text(config.activation_quant_key.dtype)
    return bits or int(kernel.config.weight_type.size_bits), activations


def _kernel(module: Any) -> Any:
    """Return the kernel of a linear layer; without one, the scheme or method that computes."""
    scheme = getattr(module, "scheme", None)
    holders = [module.quant_method, scheme]
    for holder in holders:
        kernels = (getattr(holder, name, None) for name in _KERNELS)
        if (
            kernel := next((candidate for candidate in kernels if candidate is not None), None)
        ) is not None:
            return kernel
        inner = (getattr(holder, name, None) for name in _INNER)
        holders += [
            candidate for candidate in inner if candidate is not None and candidate not in holders
        ]
    return module.quant_method if scheme is None else scheme


def _of_experts(experts: Any) -> tuple[int, str] | str:
    """Return the same of a layer of experts."""
    name, config = type(experts).__name__, experts.quant_config
    if name in _OTHER_EXPERTS:
        return _OTHER_EXPERTS[name]
    # A name such as mxfp4, where torch has no dtype.
    weights, activations = config.weight_quant_dtype, config.quant_dtype
    digits = re.search(r"\d+", "" if weights is None else _text(weights))
    if name not in _EXPERTS or digits is None:
        return _by_name(experts)
    return int(digits[0]), _COMPUTE if activations is None else _text(activations)


def _text(dtype: object) -> str:
    """Return the name of a dtype of torch or of vLLM."""
    return str(dtype).removeprefix("torch.")


def _by_name(unknown: object) -> str:
    name = type(unknown).__name__
    _note(name)
    return " ".join((name, *_stated(unknown)))


def _stated(unknown: object) -> Iterator[str]:
    """Yield the dtype of activations that a kernel or experts state."""
    config = getattr(unknown, "config", None)
    for holder, name in (
        (config, "act_type"),
        (getattr(config, "activation_quant_key", None), "dtype"),
        # Kernels of Humming.
        (getattr(unknown, "layer_config", None), "a_dtype"),
        (getattr(unknown, "quant_config", None), "quant_dtype"),
    ):
        if (dtype := getattr(holder, name, None)) is not None:
            yield _text(dtype)


@functools.cache
def _note(name: str) -> None:
    logger.warning(
        "it is not known in which precision %s computes: only engines that use it too share KV with"
        " this one",
        name,
    )
