"""LoRA adapters with random weights, made on the spot: the same bytes on every processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from examples.models import make_model as language

RANK: Final = 8


def attention_shapes(prefix: str = "model.") -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of queries and values in each layer of the tiny model."""
    recipe = language.RECIPES["tiny"]
    outputs = {
        "q_proj": recipe.heads * recipe.head_size,
        "v_proj": recipe.kv_heads * recipe.head_size,
    }
    return {
        f"{prefix}layers.{layer}.self_attn.{module}": (recipe.hidden, rows)
        for layer in range(recipe.layers)
        for module, rows in outputs.items()
    }


def make_adapter(folder: Path, seed: int, shapes: Mapping[str, tuple[int, int]]) -> Path:
    """Write an adapter for modules with so many inputs and outputs."""
    generator = torch.Generator().manual_seed(seed)

    # torch rounds normal distributions as the processor's instructions do, even ones exactly.
    def even(*shape: int) -> torch.Tensor:
        return (0.375 * (torch.rand(shape, generator=generator) - 0.5)).to(torch.bfloat16)

    tensors = {}
    for name, (inputs, outputs) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = even(RANK, inputs)
        tensors[f"base_model.model.{name}.lora_B.weight"] = even(outputs, RANK)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 16,
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
