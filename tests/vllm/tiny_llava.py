"""A LLaVA with random weights, made on the spot: images that engines of tests see.

Its language model is the one of ``examples/models/make_model.py``. Each image becomes as many
tokens as a chunk holds by default.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from examples.models import make_model as language

#: Environment variable, set where torchvision must be there: what would be skipped fails.
REQUIRED: Final = "REQUIRE_TORCHVISION"
#: Where ``.ci/environment.py`` puts it: vLLM needs it for images, and nothing else may see it.
_TORCHVISION: Final = Path(sys.prefix) / "torchvision"

#: The token of a prompt that stands for an image.
IMAGE_TOKEN = 4095

_PIXELS, _PATCH, _HIDDEN, _INTERMEDIATE, _LAYERS = 224, 14, 64, 128, 2
_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "crop_size": {"height": _PIXELS, "width": _PIXELS},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": _PIXELS},
}


def engine_arguments() -> dict[str, Any]:
    """Return what an engine with this model is started with; without torchvision skip the test."""
    if not (_TORCHVISION / "torchvision").is_dir():
        reason = f"no torchvision in {_TORCHVISION}"
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, but there is {reason}")
        pytest.skip(reason)
    _register_no_operators()
    given = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([*given, str(_TORCHVISION), str(Path(__file__).parents[2])])
    return {
        # Not forked: transformers looks for torchvision once, when it is imported.
        "env": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"image": 4},
    }


def _register_no_operators() -> None:
    """Take from torchvision what needs its library, which cannot be loaded beside this torch."""
    operators = _TORCHVISION / "torchvision" / "_meta_registrations.py"
    lines = operators.read_text().splitlines(keepends=True)
    registering = '@torch.library.register_fake("torchvision::'
    operators.write_text("".join(line for line in lines if not line.startswith(registering)))


def picture(seed: int) -> Any:
    """Return an image of coloured squares, another one for each seed."""
    import numpy as np
    from PIL import Image

    squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize((64, 64), Image.Resampling.NEAREST)


def prompt_with_images(seed: int) -> list[int]:
    """Return a prompt with two images, which becomes six chunks: in the second and fourth."""
    generator = random.Random(seed)

    def text(length: int) -> list[int]:
        return [generator.randrange(3, IMAGE_TOKEN) for _ in range(length)]

    return [*text(300), IMAGE_TOKEN, *text(300), IMAGE_TOKEN, *text(600)]


def make_llava(folder: Path) -> Path:
    """Make the model in a folder, unless it is there."""
    recipe = language.RECIPES["tiny"]
    text = language._config(recipe)
    config: dict[str, object] = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": "bfloat16",
        "image_token_index": IMAGE_TOKEN,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "text_config": text,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": _HIDDEN,
            "intermediate_size": _INTERMEDIATE,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": 2,
            "image_size": _PIXELS,
            "patch_size": _PATCH,
            "projection_dim": _HIDDEN,
            "hidden_act": "gelu",
        },
    }
    if not folder.exists():
        weights = {
            f"language_model.{name}": one for name, one in language._weights(recipe, 0).items()
        }
        weights |= _vision(recipe.hidden)
        language.write_checkpoint(folder, weights, config, {"model": "llava"}, _add_files)
    return folder


def _vision(hidden: int) -> dict[str, torch.Tensor]:
    """Draw the weights of the vision tower and of what brings its output to the text."""
    generator = torch.Generator().manual_seed(1)
    tower = "vision_tower.vision_model."

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).to(torch.bfloat16)

    def linear(name: str, inputs: int, outputs: int, std: float = 1.0) -> dict[str, torch.Tensor]:
        return {
            f"{name}.weight": normal(outputs, inputs, std=std / math.sqrt(inputs)),
            f"{name}.bias": torch.zeros(outputs, dtype=torch.bfloat16),
        }

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {
            f"{name}.weight": torch.ones(_HIDDEN, dtype=torch.bfloat16),
            f"{name}.bias": torch.zeros(_HIDDEN, dtype=torch.bfloat16),
        }

    patches = (_PIXELS // _PATCH) ** 2
    tensors = {
        tower + "embeddings.class_embedding": normal(_HIDDEN, std=1.0),
        tower + "embeddings.patch_embedding.weight": normal(
            _HIDDEN, 3, _PATCH, _PATCH, std=1 / math.sqrt(3 * _PATCH * _PATCH)
        ),
        tower + "embeddings.position_embedding.weight": normal(patches + 1, _HIDDEN, std=0.3),
    }
    tensors |= norm(tower + "pre_layrnorm") | norm(tower + "post_layernorm")
    for layer in range(_LAYERS):
        name = f"{tower}encoder.layers.{layer}."
        tensors |= norm(name + "layer_norm1") | norm(name + "layer_norm2")
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            tensors |= linear(f"{name}self_attn.{part}", _HIDDEN, _HIDDEN)
        tensors |= linear(name + "mlp.fc1", _HIDDEN, _INTERMEDIATE)
        tensors |= linear(name + "mlp.fc2", _INTERMEDIATE, _HIDDEN)
    tensors |= linear("multi_modal_projector.linear_1", _HIDDEN, hidden)
    tensors |= linear("multi_modal_projector.linear_2", hidden, hidden, std=2.0)
    return tensors


def _add_files(folder: Path) -> None:
    """Write the image processor's settings and a tokenizer of single words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    (folder / "processor_config.json").write_text(
        json.dumps(
            {
                "processor_class": "LlavaProcessor",
                "image_token": "<image>",
                "num_additional_image_tokens": 1,
                "patch_size": _PATCH,
                "vision_feature_select_strategy": "default",
            }
        )
    )
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "<image>": IMAGE_TOKEN}
    words |= {f"w{number}": number for number in range(3, IMAGE_TOKEN)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>", "<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
            }
        )
    )
