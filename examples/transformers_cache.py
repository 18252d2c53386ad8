"""Hugging Face transformers with KV from a shelf: a prompt is computed only the first time.

No vLLM here: ``kvshelf.ChunkCache`` gives ``generate`` the KV of a prompt's beginning as
``past_key_values``, and stores the KV that was computed. The model is small and made on the spot.

Run it: ``python examples/transformers_cache.py``
Run it twice with ``--shelf DIR``, and the second process does not compute the prompt either.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from make_model import RECIPES, make_model
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging

from kvshelf import ChunkCache, Config, ModelFacts
from kvshelf.forms import empty_tuples


@dataclass(frozen=True)
class Answer:
    """The result of one call of :func:`generate`.

    Attributes
    ----------
    tokens : list of int
        The generated tokens.
    hit : int
        Tokens of the prompt whose KV came from the shelf.
    seconds : float
        Time until all tokens were generated, including loading.
    """

    tokens: list[int]
    hit: int
    seconds: float


def generate(
    model: PreTrainedModel, cache: ChunkCache, prompt: list[int], new_tokens: int
) -> Answer:
    """Generate greedily with the prompt's beginning from the shelf; store missing chunks."""
    begin = time.perf_counter()
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
    seconds = time.perf_counter() - begin
    computed = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
    cache.store(prompt, kv=computed)
    return Answer(output.sequences[0, len(prompt) :].tolist(), hit, seconds)


def load(folder: Path) -> tuple[PreTrainedModel, ModelFacts]:
    """Load a checkpoint, and state what its KV depends on."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model, ModelFacts.from_transformers(model.config, weights=folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="transformers' generate with KV from a shelf")
    parser.add_argument("--shelf", type=Path, help="directory to keep KV in (default: temporary)")
    parser.add_argument("--model", type=Path, help="folder for the model (default: temporary)")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="tiny")
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--new-tokens", type=int, default=20)
    options = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(options.model or Path(scratch) / "model", options.recipe)
        model, facts = load(folder)
        config = Config(shared_storage_path=options.shelf or Path(scratch) / "shelf")
        vocabulary = RECIPES[options.recipe].vocab
        prompt = random.Random(0).choices(range(2, vocabulary), k=options.prompt_tokens)
        # The first call of any program is slower than all others.
        model.generate(torch.tensor([prompt[:32]]), max_new_tokens=2, pad_token_id=0)
        answers = []
        for name in ("first", "second"):
            # A cache of its own each time, as two processes would have.
            with ChunkCache.open(config, facts) as cache:
                answer = generate(model, cache, prompt, options.new_tokens)
            answers.append(answer)
            print(
                f"{name:>6}: {answer.hit:5d} of {len(prompt)} prompt tokens from the shelf,"
                f" {answer.seconds * 1000:7.1f} ms, answer {answer.tokens[:8]} …"
            )
        same = answers[0].tokens == answers[1].tokens
        print("the answers are equal" if same else "the answers DIFFER")
        if not same:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
