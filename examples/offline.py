"""Offline inference with a shelf: run it twice, and the second run computes only the question.

    python examples/offline.py --shelf ~/my-shelf
    python examples/offline.py --shelf ~/my-shelf

Without ``--model`` a tiny model with random weights is made on the spot, always in the same folder;
``--seed`` gives it other weights there. Without ``--shelf`` everything is computed.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from models.make_model import make_model
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Offline inference with a shelf.")
    parser.add_argument("--shelf", help="directory that engines share; default: no shelf")
    parser.add_argument("--model", help="a model; prompts are random tokens in any case")
    parser.add_argument("--seed", type=int, default=0, help="of the tiny model's random weights")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="number of ranks")
    parser.add_argument("--questions", type=int, default=3, help="number of prompts")
    options = parser.parse_args()
    model = options.model or make_model(Path("build/models/tiny"), "tiny", seed=options.seed)
    shelf = options.shelf and KVTransferConfig(
        kv_connector="KVShelfConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": options.shelf},
    )

    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=4096,
        kv_cache_memory_bytes=256 << 20,
        gpu_memory_utilization=0.1,
        tensor_parallel_size=options.tensor_parallel_size,
        kv_transfer_config=shelf,
    )

    generator = random.Random(0)
    document = [generator.randrange(2, 4096) for _ in range(2000)]
    params = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    for number in range(options.questions):
        question = [generator.randrange(2, 4096) for _ in range(20 + 10 * number)]
        # vLLM's own prefix cache would find the document from the second question on.
        llm.reset_prefix_cache()
        prompt = document + question
        [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        print(
            f"{len(prompt)} prompt tokens, {output.num_cached_tokens} of them from the shelf,"
            f" answer {list(output.outputs[0].token_ids)}"
        )


if __name__ == "__main__":
    main()
