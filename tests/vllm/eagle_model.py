"""Checkpoints of drafters for models of ``examples``."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def make_eagle3(folder: Path, model: Path, leader: int) -> Path:
    """Make an EAGLE3 drafter of one layer from the attention of one layer of a gpt-oss model.

    Parameters
    ----------
    folder : Path
        Where the checkpoint goes.
    model : Path
        The checkpoint of the model, made by ``tests/support/make_hybrid_model.py``.
    leader : int
        The layer, which decides most of what the model says.
    """
    folder.mkdir(parents=True)
    config = json.loads((model / "config.json").read_text())
    source = load_file(model / "model.safetensors")
    hidden, size = config["hidden_size"], config["intermediate_size"]
    first = f"model.layers.{leader}."
    generator = torch.Generator().manual_seed(0)
    dtype = source["lm_head.weight"].dtype

    def reads(name: str) -> torch.Tensor:
        """Read the embedding of the next token, and a little of the model's hidden states."""
        own = source[f"{first}self_attn.{name}_proj.weight"]
        little = 0.02 * own.std() * torch.randn(own.shape, generator=generator)
        return torch.cat((own, little.to(dtype)), 1)

    ones = torch.ones(hidden, dtype=dtype)
    # What comes from before the last token must not be said again, so it stays in the half of the
    # stream that is hidden from the head.
    hidden_half = ones.clone()
    hidden_half[hidden // 2 :] = 0
    tensors = {f"midlayer.self_attn.{name}_proj.weight": reads(name) for name in "qkv"}
    tensors |= {
        "midlayer.self_attn.o_proj.weight": source[f"{first}self_attn.o_proj.weight"],
        "midlayer.input_layernorm.weight": ones,
        "midlayer.hidden_norm.weight": hidden_half,
        "midlayer.post_attention_layernorm.weight": ones.clone(),
        "midlayer.mlp.gate_proj.weight": torch.zeros(size, hidden, dtype=dtype),
        "midlayer.mlp.up_proj.weight": torch.zeros(size, hidden, dtype=dtype),
        "midlayer.mlp.down_proj.weight": torch.zeros(hidden, size, dtype=dtype),
        "fc.weight": torch.eye(hidden, 3 * hidden, dtype=dtype),
        "norm.weight": source["model.norm.weight"],
        "lm_head.weight": source["lm_head.weight"],
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    kept += ("head_dim", "vocab_size", "max_position_embeddings", "rope_parameters", "dtype")
    of_drafter = {name: config[name] for name in kept} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "norm_before_residual": True,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(of_drafter))
    return folder
