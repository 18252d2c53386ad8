"""Prefill in one engine, decode in another: a prompt's KV is handed over by the shelf.

The producer is asked for a hand-over. It computes the prompt, and answers with one token and with
``kv_transfer_params``, which say what it stores. The consumer, a process of its own, gets the
prompt with these params, loads all of it, and computes only its last token once more, from which
the answer goes on. The two share a directory and nothing else, so they could as well be on two
machines.

    python examples/prefill_then_decode.py --shelf /tmp/my-shelf

Of servers a proxy asks both, such as ``kvshelf proxy``: see docs/disaggregation.md and
``examples/disaggregated``.
"""

from __future__ import annotations

import argparse
import json
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from models.make_model import make_model


def answer(role: str, model: str, shelf: str, params: dict[str, Any], tokens: int) -> Any:
    """Be an engine that answers one prompt; returns the ``kv_transfer_params`` of its answer."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=4096,
        kv_cache_memory_bytes=256 << 20,
        gpu_memory_utilization=0.1,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVShelfConnector",
            kv_role=role,
            kv_connector_extra_config={"shared_storage_path": shelf},
        ),
    )
    generator = random.Random(11)
    prompt = [generator.randrange(2, 4096) for _ in range(1560)]
    sampling = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        detokenize=False,
        extra_args={"kv_transfer_params": params},
    )
    [output] = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    print(
        f"{role}: {len(prompt)} prompt tokens, {output.num_cached_tokens} of them from the shelf,"
        f" generated {list(output.outputs[0].token_ids)}",
        flush=True,
    )
    # A process of multiprocessing waits for its children at its end, and vLLM's engine is one.
    llm.llm_engine.engine_core.shutdown()
    return output.kv_transfer_params


def in_a_new_process(*arguments: Any) -> Any:
    """Call :func:`answer` in a process that ends with it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(answer, *arguments).result()


def main() -> None:
    """Let a producer and then a consumer answer."""
    parser = argparse.ArgumentParser(description="Prefill in one process, decode in another.")
    parser.add_argument("--shelf", required=True, help="directory that both share")
    parser.add_argument("--model", help="a model; by default a tiny one is made on the spot")
    options = parser.parse_args()
    model = str(options.model or make_model(Path("build/models/tiny"), "tiny", replace=True))
    shelf = str(Path(options.shelf).absolute())
    # vLLM knows no request without output: the producer generates the first token.
    params = in_a_new_process("kv_producer", model, shelf, {"do_remote_decode": True}, 1)
    print(f"handed over: {json.dumps(params, indent=2)}", flush=True)
    in_a_new_process("kv_consumer", model, shelf, params, 16)


if __name__ == "__main__":
    main()
