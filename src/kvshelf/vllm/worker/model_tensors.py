"""Where a loaded model keeps its weights: tensors that can be read, and memory that cannot.

Most weights are parameters and buffers. vLLM keeps others elsewhere:

* Quantization methods with kernels of ``triton_kernels`` (gpt-oss' experts in MXFP4) replace the
  parameters of a layer by objects that wrap a tensor, and keep the scales themselves
  (``vllm/model_executor/layers/quantization/mxfp4.py``).
* Layers whose weights are prefetched share a few buffers on the GPU; their weights are in host
  memory (``vllm/model_executor/offloader/prefetch.py``).
* DeepSeek V4's layers of experts keep pairs of a weight and its scale in place of parameters
  (``vllm/models/deepseek_v4/nvidia/model.py``).
* On CPUs the weights of most linear layers are packed into memory that nothing shows.

:func:`readable` yields the first three as tensors, :func:`packed` what holds the last ones, and
:func:`unreadable` the names of any others. Nothing here keeps state; the worker's step thread makes
all calls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_OFFLOADER: Final = "vllm.model_executor.offloader.base"
_WRAPPERS: Final = "triton_kernels"
#: What the attributes are called in which layers and quantization methods keep weights. Other
#: tensors are scratch memory, whose content means nothing.
_NAMES: Final = ("weight", "scale", "bias", "zero", "precision_config")
#: The attributes of a LoRA layer are adapters.
_OF_ADAPTERS: Final = "_stacked"
#: A configuration of triton_kernels holds a scale two levels below itself.
_DEPTH: Final = 4


def readable(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors that hold weights of a model, by unique names."""
    offloaded = _offloaded()
    for group in (model.named_parameters(), model.named_buffers()):
        for name, tensor in group:
            storage = offloaded.get(id(tensor), tensor)
            if storage is not None:
                yield from _plain(name, storage)
    for name, value in _attributes(model):
        yield from _inside(name, value, _DEPTH)


def packed(model: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """Yield what holds the weights that vLLM has packed for the processor, by name.

    vLLM can replace them only as a whole, with the object that holds them.
    """
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        cpu_linear = getattr(module, "cpu_linear", None)
        if cpu_linear is not None and weight is not None and not weight.numel():
            yield name, cpu_linear


def unreadable(model: torch.nn.Module) -> Iterator[str]:
    """Yield the names of weights that may change, and that :func:`readable` leaves out."""
    for name, value in _attributes(model):
        if not any(_inside(name, value, _DEPTH)):
            yield name
    offloaded = _offloaded()
    for name, tensor in model.named_parameters():
        if id(tensor) in offloaded and offloaded[id(tensor)] is None:
            yield name


def _plain(name: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors with the bytes of a parameter; some kinds keep them in inner tensors."""
    if isinstance(partitions := getattr(tensor, "partitions", None), dict):
        for key, part in partitions.items():
            yield from _plain(f"{name}.{key}", part)
    elif is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{attribute}", getattr(tensor, attribute))
    elif not tensor.is_meta:
        yield name, tensor


def _attributes(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what quantized layers and their methods keep beside parameters and buffers.

    And layers of experts without such a method, which keep pairs of a weight and its scale.
    """
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        has_experts = method is None and hasattr(module, "get_expert_weights")
        if (method is None and not has_experts) or hasattr(module, "kv_cache"):
            # The tensors of an attention layer are its cache.
            continue
        for owner, prefix in ((module, name), (method, f"{name}.quant_method")):
            for attribute, value in getattr(owner, "__dict__", {}).items():
                is_listed = any(part in attribute for part in _NAMES)
                parts = value if has_experts and isinstance(value, tuple) else (value,)
                if (
                    is_listed
                    and not attribute.endswith(_OF_ADAPTERS)
                    and any(map(_may_hold, parts))
                ):
                    yield f"{prefix}.{attribute}", value


def _may_hold(value: Any) -> bool:
    """Whether a value is a tensor, or an object of the kernels' that may hold one."""
    if isinstance(value, torch.Tensor):
        return not isinstance(value, torch.nn.Parameter) and value.numel() > 0
    return _wrapped(value) is not None or _is_of_kernels(value)


def _is_of_kernels(value: Any) -> bool:
    return _WRAPPERS in type(value).__module__.split(".")


def _wrapped(value: Any) -> torch.Tensor | None:
    """Return the tensor that an object of ``triton_kernels`` wraps."""
    data = getattr(getattr(value, "storage", None), "data", None)
    return data if isinstance(data, torch.Tensor) else None


def _inside(name: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a value, at most `depth` levels below it."""
    if isinstance(value, torch.Tensor):
        yield from _plain(name, value)
    elif (data := _wrapped(value)) is not None:
        yield from _plain(name, data)
    elif depth and isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _inside(f"{name}.{number}", part, depth - 1)
    elif depth and _is_of_kernels(value):
        for attribute, part in sorted(getattr(value, "__dict__", {}).items()):
            yield from _inside(f"{name}.{attribute}", part, depth - 1)


def _offloaded() -> dict[int, torch.Tensor | None]:
    """Return where the weights of prefetched parameters are, by the id of the parameter.

    None stands for a place that this version of vLLM does not show.
    """
    get = getattr(sys.modules.get(_OFFLOADER), "get_offloader", None)
    tensors: dict[int, torch.Tensor | None] = {}
    for module in getattr(get() if callable(get) else None, "module_offloaders", ()):
        for offloader in getattr(module, "_param_offloaders", {}).values():
            storage = getattr(offloader, "_cpu_storage", None)
            tensors[id(offloader._param)] = storage if isinstance(storage, torch.Tensor) else None
    return tensors
