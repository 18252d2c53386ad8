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

:func:`readable` yields the first three as tensors, :func:`unreadable` what no tensor shows. With
expert parallel load balancing vLLM moves experts between ranks while it serves, and holds some of
them several times; :func:`balanced` returns which expert is where. Nothing here keeps state; the
worker's step thread makes all calls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Unreadable:
    """Weights that no tensor shows.

    Attributes
    ----------
    name : str
    held : object
        What holds them: another object holds other weights.
    fixed : bool
        Whether an object never changes the weights that it holds.
    """

    name: str
    held: object
    fixed: bool


@dataclass(frozen=True)
class Experts:
    """The experts of one layer on this rank, where vLLM moves them between ranks while it serves.

    Attributes
    ----------
    layer : str
    held : tuple of int
        For each place of this rank, the number of its expert in the model; -1 for none.
    weights : dict
        By name, the weights of all places, along the first dimension.
    """

    layer: str
    held: tuple[int, ...]
    weights: dict[str, torch.Tensor]


def balanced(model: torch.nn.Module) -> list[Experts]:
    """Return the experts that expert parallel load balancing moves. Waits for devices."""
    names: dict[int, str] | None = None
    found: list[Experts] = []
    for layer, module in model.named_modules():
        state: Any = getattr(module, "eplb_state", None)
        places = getattr(state, "logical_to_physical_map", None)
        weights_of = getattr(module, "get_expert_weights", None)
        if places is None or weights_of is None:
            continue
        if names is None:
            names = {one.data_ptr(): name for name, one in readable(model) if one.numel()}
        # Views of parameters, or of what kernels made of them.
        weights = {
            names.pop(one.data_ptr(), f"{layer}.{number}"): one
            for number, one in enumerate(weights_of())
            if one.numel()
        }
        if not weights:
            continue
        count = len(next(iter(weights.values())))
        first = _expert_rank() * count
        copies = int(state.logical_replica_count.max())
        expert_at = {
            place: expert
            for expert, of_expert in enumerate(places[:, :copies].tolist())
            for place in of_expert
        }
        held = tuple(expert_at.get(first + place, -1) for place in range(count))
        found.append(Experts(layer, held, weights))
    return found


def _expert_rank() -> int:
    """Return this worker's rank among those that share the experts."""
    group = sys.modules["vllm.distributed.parallel_state"].get_ep_group()
    return int(group.rank_in_group)


def readable(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors that hold weights of a model, by unique names."""
    offloaded = _offloaded()
    for group in (model.named_parameters(), model.named_buffers()):
        for name, tensor in group:
            held = offloaded.get(id(tensor), tensor)
            if held is not None:
                yield from _plain(name, held)
    for name, value in _attributes(model):
        yield from _inside(name, value, _DEPTH)


def unreadable(model: torch.nn.Module) -> Iterator[Unreadable]:
    """Yield the weights of a model that :func:`readable` leaves out."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        packed = getattr(module, "cpu_linear", None)
        if packed is not None and weight is not None and not weight.numel():
            # vLLM can replace packed weights only as a whole.
            yield Unreadable(name, packed, fixed=True)
    for name, value in _attributes(model):
        if not any(_inside(name, value, _DEPTH)):
            yield Unreadable(name, value, fixed=False)
    offloaded = _offloaded()
    for name, tensor in model.named_parameters():
        if id(tensor) in offloaded and offloaded[id(tensor)] is None:
            yield Unreadable(name, tensor, fixed=False)


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
                known = any(part in attribute for part in _NAMES)
                parts = value if has_experts and isinstance(value, tuple) else (value,)
                if known and not attribute.endswith(_OF_ADAPTERS) and any(map(_may_hold, parts)):
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
    found: dict[int, torch.Tensor | None] = {}
    for module in getattr(get() if callable(get) else None, "module_offloaders", ()):
        for one in getattr(module, "_param_offloaders", {}).values():
            held = getattr(one, "_cpu_storage", None)
            found[id(one._param)] = held if isinstance(held, torch.Tensor) else None
    return found
