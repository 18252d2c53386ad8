"""Hugging Face transformers with KV from a shelf: a prompt is computed only the first time.

No vLLM here: ``kvshelf.ChunkCache`` gives ``generate`` the KV of a prompt's beginning as
``past_key_values``, and stores the KV that was computed. The same prompt is answered twice, with a
cache of its own each time, and both answers are compared. The model is small and made on the spot.

    python examples/transformers_cache.py

Run it twice with ``--shelf DIR``, and the second process does not compute the prompt either.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from models.make_model import RECIPES, make_model
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from kvshelf import ChunkCache, Config, ModelFacts, empty_tuples


class Answer(NamedTuple):
    """The number of tokens of the prompt whose KV came from the shelf, and generated tokens."""

    hit: int
    tokens: list[int]


def generate(
    model: PreTrainedModel, cache: ChunkCache, prompt: list[int], new_tokens: int
) -> Answer:
    """Generate greedily with the prompt's beginning from the shelf; store missing chunks."""
    kv = empty_tuples(cache.fmt, len(prompt))
    retrieved = int(cache.retrieve(prompt, kv=kv).sum())
    # The model has to compute one token at least, to have something to continue from.
    hit = min(retrieved, len(prompt) - 1)
    past = DynamicCache()
    if hit:
        for layer, (keys, values) in enumerate(kv):
            past.update(keys[:, :, :hit], values[:, :, :hit], layer)
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=past,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    computed = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
    cache.store(prompt, kv=computed)
    return Answer(hit, output.sequences[0, len(prompt) :].tolist())


def load(folder: Path) -> tuple[PreTrainedModel, ModelFacts]:
    """Load a checkpoint, and state what its KV depends on."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model, ModelFacts.from_transformers(model.config, weights=folder)


def main() -> None:
    """Answer a prompt twice."""
    parser = argparse.ArgumentParser(description="transformers' generate with KV from a shelf")
    parser.add_argument("--shelf", type=Path, help="directory to keep KV in (default: temporary)")
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    options = parser.parse_args()
    model, facts = load(make_model(Path("build/models/tiny"), "tiny"))
    prompt = random.Random(0).choices(range(2, RECIPES["tiny"].vocab), k=options.prompt_tokens)
    answers = []
    with tempfile.TemporaryDirectory() as temporary:
        config = Config(shared_storage_path=options.shelf or temporary)
        for name in ("first", "second"):
            with ChunkCache.open(config, facts) as cache:
                answers.append(generate(model, cache, prompt, 20))
            hit, tokens = answers[-1]
            print(f"{name}: {hit} of {len(prompt)} prompt tokens from the shelf, answer {tokens}")
    print(f"the answers are equal: {answers[0].tokens == answers[1].tokens}")


if __name__ == "__main__":
    main()
