"""Make a small Llama-shaped model with random weights, on the spot, for demos and tests.

No download and no training: the files are a pure function of the recipe and the seed, so making the
same model twice gives the same bytes. vLLM loads the folder like any other checkpoint, with
``skip_tokenizer_init=True`` (prompts are token ids), or with the byte-level tokenizer that
``--tokenizer`` adds.

Plain random weights would be a poor test of a KV cache: attention over thousands of random keys
is so flat that no single token of the prefix matters, and the likeliest next tokens are nearly
tied, so that rounding decides between them. The recipe therefore sharpens attention
(``score_std``), lets the first two layers outweigh the token itself (``first_gain``), and spreads
the logits of few tokens (``logit_std``, ``speakers``): answers differ from prompt to prompt, depend
on the whole prefix, and are seldom near-ties.

Run it: ``python examples/models/make_model.py build/models/demo --recipe demo``
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

RECIPE_FILE = "made_by.json"


@dataclass(frozen=True)
class Recipe:
    """The shape and the statistics of one model.

    Attributes
    ----------
    layers, hidden, intermediate, heads, kv_heads, head_size, vocab, max_position
        The usual dimensions of a Llama model; sizes are in elements, ``max_position`` in tokens.
    dtype : str
        In which the model computes; its weights are bf16 in any case.
    score_std : float
        Standard deviation of the attention scores before the softmax. The larger, the fewer tokens
        of the prefix share a head's attention.
    first_gain, later_gain : float
        Size of what a branch of the first two layers, and of the layers behind them, adds to the
        residual stream, relative to the stream itself. The first two spread every token over all
        later ones; many such layers would spread rounding errors as well.
    logit_std : float
        Standard deviation of the logits of the speakers, in nats.
    speakers : int
        Number of tokens that are ever said. Among fewer the best is further ahead of the next.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    head_size: int
    vocab: int
    dtype: str = "bfloat16"
    score_std: float = 3.0
    kv_heads: int = 2
    max_position: int = 8192
    first_gain: float = 2.0
    later_gain: float = 0.08
    logit_std: float = 4.0
    speakers: int = 256


RECIPES = {
    "tiny": Recipe(2, 256, 512, heads=4, head_size=64, vocab=4096, score_std=4.0),
    "demo": Recipe(12, 512, 2560, heads=4, head_size=128, vocab=32000),
    # On processors without arithmetic in bf16, as fast as "demo" is on others.
    "small": Recipe(8, 256, 1280, heads=2, head_size=64, vocab=32000, dtype="float32"),
}


def _weights(recipe: Recipe, seed: int) -> dict[str, torch.Tensor]:
    """Draw all weights: bf16 tensors by their Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, ones = recipe.hidden, torch.ones(recipe.hidden, dtype=torch.bfloat16)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * std).to(torch.bfloat16)

    # Element 0 of the residual stream is the same for all tokens: layers neither read it nor add
    # to it. Through it the head lowers every logit by what the largest is expected to be, because
    # bf16 is finest near zero.
    def reading(rows: int, std: float) -> torch.Tensor:
        weight = normal(rows, hidden, std)
        weight[:, 0] = 0.0
        return weight

    def adding(columns: int, std: float) -> torch.Tensor:
        weight = normal(hidden, columns, std)
        weight[0, :] = 0.0
        return weight

    q_rows, kv_rows = recipe.heads * recipe.head_size, recipe.kv_heads * recipe.head_size
    # What projections read is RMS-normalised, so weights of std 1/sqrt(inputs) keep size 1.
    unit = 1.0 / math.sqrt(hidden)
    qk_unit = unit * math.sqrt(recipe.score_std)
    stream = 1.0
    embedding = normal(recipe.vocab, hidden, 1.0)
    tensors = {"model.embed_tokens.weight": embedding}
    for layer in range(recipe.layers):
        gain = stream * (recipe.first_gain if layer < 2 else recipe.later_gain)
        name = f"model.layers.{layer}."
        tensors |= {
            name + "input_layernorm.weight": ones.clone(),
            name + "self_attn.q_proj.weight": reading(q_rows, qk_unit),
            name + "self_attn.k_proj.weight": reading(kv_rows, qk_unit),
            name + "self_attn.v_proj.weight": reading(kv_rows, unit),
            name + "self_attn.o_proj.weight": adding(q_rows, gain / math.sqrt(q_rows)),
            name + "post_attention_layernorm.weight": ones.clone(),
            name + "mlp.gate_proj.weight": reading(recipe.intermediate, unit),
            name + "mlp.up_proj.weight": reading(recipe.intermediate, unit),
            name + "mlp.down_proj.weight": adding(
                recipe.intermediate, gain / math.sqrt(recipe.intermediate)
            ),
        }
        # Averages over tokens and SwiGLU halve what two branches of that gain would add.
        stream = math.sqrt(stream * stream + 0.5 * gain * gain)
    embedding[:, 0] = stream
    tensors["model.norm.weight"] = ones.clone()
    head = torch.randn(recipe.vocab, hidden, generator=generator) * (recipe.logit_std * unit)
    silent = torch.ones(recipe.vocab, dtype=torch.bool)
    silent[2 :: recipe.vocab // recipe.speakers] = False
    head[silent] *= 0.25
    head[:, 0] = -recipe.logit_std * math.sqrt(2 * math.log(recipe.speakers))
    tensors["lm_head.weight"] = head.to(torch.bfloat16)
    return tensors


def make_model(
    folder: str | os.PathLike[str],
    recipe: str = "tiny",
    *,
    seed: int = 0,
    tokenizer: bool = False,
) -> Path:
    """Make the model in ``folder``, unless it is already there; replace another made model.

    Parameters
    ----------
    folder : path
        Where the checkpoint goes; parents are made.
    recipe : str
        A name in :data:`RECIPES`.
    seed : int
        Seed of the random weights.
    tokenizer : bool
        Also write a byte-level tokenizer, one token for each byte, so that a server can take text.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    FileExistsError
        If the folder holds something that this script did not make.
    """
    shape, folder = RECIPES[recipe], Path(folder)
    made_by = {"recipe": asdict(shape), "seed": seed, "tokenizer": tokenizer}
    if folder.exists():
        if not (made_before := _made_by(folder)):
            raise FileExistsError(f"{folder} holds something else: give another folder")
        if made_before == made_by:
            return folder
    add_files = _write_tokenizer if tokenizer else lambda _: None
    write_checkpoint(folder, _weights(shape, seed), _config(shape), made_by, add_files)
    return folder


def recipe_of(folder: Path) -> str:
    """Return the name of the recipe of a model that `make_model` made.

    Raises
    ------
    ValueError
        If the model was made otherwise.
    """
    for name, shape in RECIPES.items():
        if _made_by(folder).get("recipe") == asdict(shape):
            return name
    raise ValueError(f"{folder} was not made by a recipe of this script: {', '.join(RECIPES)}")


def _made_by(folder: Path) -> dict[str, object]:
    """Return what a checkpoint is made of, or nothing where that is not known."""
    note = folder / RECIPE_FILE
    return json.loads(note.read_text()) if note.exists() else {}


def write_checkpoint(
    folder: Path,
    weights: dict[str, torch.Tensor],
    config: dict[str, object],
    made_by: dict[str, object],
    add_files: Callable[[Path], None] = lambda temporary: None,
) -> None:
    """Write a checkpoint that appears whole or not at all; replace the files of one that is there.

    Parameters
    ----------
    folder : Path
    weights : dict
        Tensors by name.
    config : dict
        The Hugging Face configuration.
    made_by : dict
        What the checkpoint is made of.
    add_files : Callable
        Writes further files into the folder that it is given.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        temporary.chmod(0o755)
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config, indent=2))
        add_files(temporary)
        (temporary / RECIPE_FILE).write_text(json.dumps(made_by, indent=2))
        # Where the folder is there, perhaps of another process just now, its files are replaced.
        with suppress(OSError):
            temporary.rename(folder)
            return
        for file in temporary.iterdir():
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _config(recipe: Recipe) -> dict[str, object]:
    """Return the Hugging Face configuration of the model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": recipe.dtype,
        "vocab_size": recipe.vocab,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_size,
        "max_position_embeddings": recipe.max_position,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token for each byte, after BOS and EOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": Recipe.max_position,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make a small random Llama-shaped model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", action="store_true", help="add a byte-level tokenizer")
    print(make_model(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
