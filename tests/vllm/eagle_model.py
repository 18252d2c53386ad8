"""A checkpoint of an EAGLE drafter for a model of ``examples/make_model.py``."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def make_eagle(folder: Path, model: Path) -> Path:
    """Make a drafter of one layer from the first layer of a model.

    Parameters
    ----------
    folder : Path
        Where the checkpoint goes.
    model : Path
        The checkpoint of the model.
    """
    folder.mkdir(parents=True)
    config = json.loads((model / "config.json").read_text())
    first = "model.layers.0."
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(model / "model.safetensors").items()
        # EAGLE's first layer has no such norm.
        if name.startswith(first) and "input_layernorm" not in name
    }
    # Reads the embedding of the next token, and a little of the model's hidden state.
    unit = torch.eye(config["hidden_size"])
    tensors["fc.weight"] = torch.cat((unit, 0.1 * unit), 1).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config["num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder
