"""Make a small hybrid model with random weights: Gemma 3, gpt-oss or Qwen3-Next in shape.

Layers of several kinds need several kinds of KV: sliding windows in Gemma 3 and gpt-oss, the states
of gated delta nets in Qwen3-Next. As with the examples' ``make_model.py``, nothing is downloaded or
trained, the files are a pure function of the recipe and the seed, and prompts are token ids
(``skip_tokenizer_init=True``).

Output embeddings are the input embeddings in some of these families, so that plain random weights
say the last token again and again. Here one half of the residual stream tells tokens apart and
is hidden from the head; the other half, to which the embedding of a token adds little, is read
by it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from examples.models.make_model import RECIPE_FILE, write_checkpoint

Family = Literal["gemma3", "gpt-oss", "qwen3-next"]
#: Standard deviation of attention scores before the softmax: few tokens share a head's attention.
_SCORE_STD = 4.0
#: What a branch of a layer adds to the residual stream, relative to the stream.
_GAIN = 0.7
#: The same where one layer leads: of layers before it, of it, and of layers behind it.
_LED_GAINS = 0.02, 2.0, 0.03
_LOGIT_STD = 4.0
#: Standard deviation of what tokens that are said add to the half that the head reads.
_SPOKEN = 0.25
_SPEAKERS = 256
#: Tokens that the convolution of a gated delta net reads.
_CONVOLUTION = 4


@dataclass(frozen=True, slots=True)
class HybridRecipe:
    """The shape of one model.

    Attributes
    ----------
    family : {"gemma3", "gpt-oss", "qwen3-next"}
    layers : tuple of str
        The kind of each layer, as in ``layer_types`` of its configuration.
    dtype : str
        Of weights, activations and, unless an engine is told otherwise, KV and states. vLLM's gated
        delta nets need bfloat16 on CPUs.
    hidden, intermediate, heads, kv_heads, head_size, vocab, max_position : int
        The usual dimensions; sizes in elements, ``max_position`` in tokens.
    window : int
        Tokens that a sliding-window layer reads.
    key_heads, value_heads : int
        Heads of a gated delta net, of ``head_size`` elements. Its state has ``value_heads`` ×
        ``head_size``² elements.
    leader : int, optional
        The layer whose attention decides most of what is said, so that a drafter of one layer can
        guess it; None where all layers do.
    """

    family: Family
    layers: tuple[str, ...]
    dtype: Literal["bfloat16", "float32"] = "float32"
    hidden: int = 256
    intermediate: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    vocab: int = 4096
    max_position: int = 8192
    window: int = 0
    key_heads: int = 0
    value_heads: int = 0
    leader: int | None = None


RECIPES: dict[str, HybridRecipe] = {
    recipe.family: recipe
    for recipe in (
        HybridRecipe(
            "gemma3", ("sliding_attention", "sliding_attention", "full_attention") * 2, window=320
        ),
        HybridRecipe("gpt-oss", ("sliding_attention", "full_attention") * 2, window=320, leader=1),
        HybridRecipe(
            "qwen3-next",
            ("linear_attention",) * 3 + ("full_attention",),
            "bfloat16",
            key_heads=2,
            value_heads=2,
        ),
    )
}


class _Weights:
    """Draws the weights of one model, by their Hugging Face names."""

    def __init__(self, recipe: HybridRecipe, seed: int) -> None:
        self.recipe = recipe
        self.tensors: dict[str, torch.Tensor] = {}
        self.dtype = torch.bfloat16 if recipe.dtype == "bfloat16" else torch.float32
        self._generator = torch.Generator().manual_seed(seed)
        # Gemma's and Qwen3-Next's norms multiply by one more than their weight.
        self._norm_base = 1.0 if recipe.family in ("gemma3", "qwen3-next") else 0.0

    def normal(self, name: str, *shape: int, std: float) -> None:
        drawn = torch.randn(*shape, generator=self._generator) * std
        self.tensors[name] = drawn.to(self.dtype)

    def norm(self, name: str, size: int, factor: float = 1.0) -> None:
        self.tensors[name] = torch.full((size,), factor - self._norm_base, dtype=self.dtype)

    def reading(self, name: str, rows: int) -> None:
        """Draw what reads the normalised stream and keeps its size."""
        self.normal(name, rows, self.recipe.hidden, std=self.recipe.hidden**-0.5)

    def adding(self, name: str, columns: int, gain: float) -> None:
        """Draw what adds to the stream."""
        self.normal(name, self.recipe.hidden, columns, std=gain / math.sqrt(columns))

    def mlp(self, prefix: str, names: tuple[str, str, str], size: int, gain: float) -> None:
        gate, up, down = names
        self.reading(f"{prefix}.{gate}.weight", size)
        self.reading(f"{prefix}.{up}.weight", size)
        self.adding(f"{prefix}.{down}.weight", size, gain)

    def attention(self, prefix: str, gain: float, *, gated: bool = False) -> None:
        recipe = self.recipe
        lfm2 = recipe.family == "lfm2"
        q_rows, kv_rows = recipe.heads * recipe.head_size, recipe.kv_heads * recipe.head_size
        self.reading(f"{prefix}.q_proj.weight", 2 * q_rows if gated else q_rows)
        self.reading(f"{prefix}.k_proj.weight", kv_rows)
        self.reading(f"{prefix}.v_proj.weight", kv_rows)
        self.adding(f"{prefix}.{'out' if lfm2 else 'o'}_proj.weight", q_rows, gain)
        norm = "layernorm" if lfm2 else "norm"
        self.norm(f"{prefix}.q_{norm}.weight", recipe.head_size, _SCORE_STD)
        self.norm(f"{prefix}.k_{norm}.weight", recipe.head_size)

    def gated_delta_net(self, prefix: str, gain: float) -> None:
        recipe = self.recipe
        keys, values = (
            count * recipe.head_size for count in (recipe.key_heads, recipe.value_heads)
        )
        self.reading(f"{prefix}.in_proj_qkvz.weight", 2 * keys + 2 * values)
        self.reading(f"{prefix}.in_proj_ba.weight", 2 * recipe.value_heads)
        taps = _CONVOLUTION
        self.normal(f"{prefix}.conv1d.weight", 2 * keys + values, 1, taps, std=taps**-0.5)
        self.tensors[f"{prefix}.A_log"] = torch.zeros(recipe.value_heads)
        # Heads forget within some ten to some thousand tokens.
        self.tensors[f"{prefix}.dt_bias"] = torch.linspace(-8, -4, recipe.value_heads).to(
            self.dtype
        )
        self.tensors[f"{prefix}.norm.weight"] = torch.ones(recipe.head_size, dtype=self.dtype)
        self.adding(f"{prefix}.out_proj.weight", values, gain)

    def embeddings(self, name: str, last_norm: str) -> None:
        """Draw embeddings that are the head as well, and the norm before it."""
        recipe, half = self.recipe, self.recipe.hidden // 2
        embedding = torch.randn(recipe.vocab, recipe.hidden, generator=self._generator)
        spoken = torch.full((recipe.vocab, 1), _SPOKEN / 4)
        spoken[2 :: recipe.vocab // _SPEAKERS] = _SPOKEN
        embedding[:, half:] *= spoken
        factor = _LOGIT_STD / (_SPOKEN * math.sqrt(half))
        if recipe.family == "gemma3":
            # Gemma multiplies what it reads by this, and not what the head reads.
            embedding /= math.sqrt(recipe.hidden)
            factor *= math.sqrt(recipe.hidden)
        self.tensors[name] = embedding.to(self.dtype)
        self.norm(last_norm, recipe.hidden, factor)
        self.tensors[last_norm][:half] = -self._norm_base


def _gemma3_layer(weights: _Weights, layer: int, gain: float) -> None:
    prefix, recipe = f"model.layers.{layer}", weights.recipe
    weights.norm(f"{prefix}.input_layernorm.weight", recipe.hidden)
    weights.attention(f"{prefix}.self_attn", 1.0)
    weights.norm(f"{prefix}.post_attention_layernorm.weight", recipe.hidden, gain)
    weights.norm(f"{prefix}.pre_feedforward_layernorm.weight", recipe.hidden)
    weights.mlp(f"{prefix}.mlp", ("gate_proj", "up_proj", "down_proj"), recipe.intermediate, 1.0)
    weights.norm(f"{prefix}.post_feedforward_layernorm.weight", recipe.hidden, gain)


def _gpt_oss_layer(weights: _Weights, layer: int, gain: float) -> None:
    prefix, recipe = f"model.layers.{layer}", weights.recipe
    weights.norm(f"{prefix}.input_layernorm.weight", recipe.hidden)
    attention = f"{prefix}.self_attn"
    q_rows, kv_rows = recipe.heads * recipe.head_size, recipe.kv_heads * recipe.head_size
    # There is no norm of heads.
    weights.normal(
        f"{attention}.q_proj.weight", q_rows, recipe.hidden, std=_SCORE_STD * recipe.hidden**-0.5
    )
    weights.reading(f"{attention}.k_proj.weight", kv_rows)
    weights.reading(f"{attention}.v_proj.weight", kv_rows)
    weights.adding(f"{attention}.o_proj.weight", q_rows, gain)
    for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows), ("o", recipe.hidden)):
        weights.normal(f"{attention}.{name}_proj.bias", rows, std=0.0)
    weights.normal(f"{attention}.sinks", recipe.heads, std=1.0)
    weights.norm(f"{prefix}.post_attention_layernorm.weight", recipe.hidden)
    # Each token goes to both experts.
    experts, size = f"{prefix}.mlp.experts", 64
    weights.reading(f"{prefix}.mlp.router.weight", 2)
    weights.normal(f"{prefix}.mlp.router.bias", 2, std=0.0)
    weights.normal(f"{experts}.gate_up_proj", 2, recipe.hidden, 2 * size, std=recipe.hidden**-0.5)
    weights.normal(f"{experts}.gate_up_proj_bias", 2, 2 * size, std=0.0)
    if layer == recipe.leader:
        # A drafter has its attention only.
        gain *= _LED_GAINS[0]
    weights.normal(f"{experts}.down_proj", 2, size, recipe.hidden, std=gain / math.sqrt(size))
    weights.normal(f"{experts}.down_proj_bias", 2, recipe.hidden, std=0.0)


def _qwen3_next_layer(weights: _Weights, layer: int, gain: float) -> None:
    prefix, recipe = f"model.layers.{layer}", weights.recipe
    weights.norm(f"{prefix}.input_layernorm.weight", recipe.hidden)
    if recipe.layers[layer] == "full_attention":
        weights.attention(f"{prefix}.self_attn", gain, gated=True)
    else:
        weights.gated_delta_net(f"{prefix}.linear_attn", gain)
    weights.norm(f"{prefix}.post_attention_layernorm.weight", recipe.hidden)
    mlp, names = f"{prefix}.mlp", ("gate_proj", "up_proj", "down_proj")
    if layer < len(recipe.layers) - 1:
        weights.mlp(mlp, names, recipe.intermediate, gain)
        return
    # vLLM needs one layer with experts. Each token goes to both: rounding cannot decide which.
    for expert in range(2):
        weights.mlp(f"{mlp}.experts.{expert}", names, 64, gain)
    weights.mlp(f"{mlp}.shared_expert", names, 64, gain)
    weights.reading(f"{mlp}.gate.weight", 2)
    weights.reading(f"{mlp}.shared_expert_gate.weight", 1)


_LAYERS: dict[Family, Callable[[_Weights, int, float], None]] = {
    "gemma3": _gemma3_layer,
    "gpt-oss": _gpt_oss_layer,
    "qwen3-next": _qwen3_next_layer,
}


def _weights(recipe: HybridRecipe, seed: int) -> dict[str, torch.Tensor]:
    weights = _Weights(recipe, seed)
    weights.embeddings("model.embed_tokens.weight", "model.norm.weight")
    stream = 1.0
    for layer in range(len(recipe.layers)):
        gain = _GAIN * stream
        if recipe.leader is not None:
            gain = _LED_GAINS[(layer > recipe.leader) + (layer >= recipe.leader)] * stream
        _LAYERS[recipe.family](weights, layer, gain)
        stream = math.hypot(stream, gain)
    if recipe.family in ("gpt-oss", "qwen3-next"):
        # vLLM reads the head on its own for these families.
        weights.tensors["lm_head.weight"] = weights.tensors["model.embed_tokens.weight"].clone()
    if recipe.leader is not None:
        # A drafter's head cannot see the last token's embedding.
        weights.tensors["model.embed_tokens.weight"][:, recipe.hidden // 2 :] = 0
    return weights.tensors


def _config(recipe: HybridRecipe) -> dict[str, object]:
    """Return the Hugging Face configuration of the model."""
    config: dict[str, object] = {
        "dtype": recipe.dtype,
        "vocab_size": recipe.vocab,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": len(recipe.layers),
        "layer_types": list(recipe.layers),
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_size,
        "max_position_embeddings": recipe.max_position,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if recipe.family == "gemma3":
        return config | {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": recipe.head_size,
            "sliding_window": recipe.window,
            "rope_parameters": {"sliding_attention": rope, "full_attention": rope},
            "tie_word_embeddings": True,
        }
    if recipe.family == "gpt-oss":
        return config | {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "intermediate_size": 64,
            "sliding_window": recipe.window,
            "rope_parameters": {
                **rope,
                "rope_type": "yarn",
                "factor": 2.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": recipe.max_position // 2,
            },
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
        }
    return config | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "rope_parameters": rope | {"partial_rotary_factor": 0.25},
        "linear_conv_kernel_dim": _CONVOLUTION,
        "linear_key_head_dim": recipe.head_size,
        "linear_value_head_dim": recipe.head_size,
        "linear_num_key_heads": recipe.key_heads,
        "linear_num_value_heads": recipe.value_heads,
        "mlp_only_layers": list(range(len(recipe.layers) - 1)),
        "decoder_sparse_step": 1,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "tie_word_embeddings": False,
    }


def make_hybrid_model(folder: str | os.PathLike[str], recipe: str, *, seed: int = 0) -> Path:
    """Make the model in ``folder``, unless it is already there.

    Parameters
    ----------
    folder : path
        Where the checkpoint goes; it appears whole or not at all.
    recipe : str
        A name in :data:`RECIPES`.
    seed : int
        Seed of the random weights.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ValueError
        If the recipe is unknown.
    FileExistsError
        If the folder holds something else.
    """
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}: choose one of {', '.join(sorted(RECIPES))}")
    shape, folder = RECIPES[recipe], Path(folder)
    made_by = {"recipe": asdict(shape) | {"layers": list(shape.layers)}, "seed": seed}
    note = folder / RECIPE_FILE
    if folder.exists():
        if note.exists() and json.loads(note.read_text()) == made_by:
            return folder
        raise FileExistsError(
            f"{folder} holds something other than recipe {recipe!r} with seed {seed}: "
            "give another folder, or delete it"
        )
    write_checkpoint(folder, _weights(shape, seed), _config(shape), made_by)
    return folder
