"""Disaggregated prefill: one process computes a prompt's KV, another one generates from it.

The producer (``kv_role`` ``kv_producer``) reads the prompt, stores its KV and ends. The consumer
(``kv_consumer``) starts afterwards, loads the KV, and generates; it stores nothing. The two share
only a directory, so they could also run on two machines that mount it.

    python examples/prefill_then_decode.py --shelf /tmp/my-shelf
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from pathlib import Path

from make_model import make_model

ROLES = {"producer": "kv_producer", "consumer": "kv_consumer"}


def make_prompt() -> list[int]:
    """Return a prompt of 1560 random tokens: six chunks of 256, and 24 tokens."""
    generator = random.Random(11)
    return [generator.randrange(2, 4096) for _ in range(1560)]


def run(role: str, model: str, shelf: str) -> None:
    """Be the producer or the consumer."""
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
            kv_connector="SharedStorageConnector",
            kv_role=ROLES[role],
            kv_connector_extra_config={"shared_storage_path": shelf},
        ),
    )
    # The producer has to generate one token, because vLLM knows no request without output.
    params = SamplingParams(
        temperature=0, max_tokens=1 if role == "producer" else 16, detokenize=False
    )
    [output] = llm.generate({"prompt_token_ids": make_prompt()}, params, use_tqdm=False)
    print(
        f"{role}: {len(output.prompt_token_ids)} prompt tokens,"
        f" {output.num_cached_tokens} of them from the shelf,"
        f" generated {list(output.outputs[0].token_ids)}",
        flush=True,
    )


def main() -> None:
    """Command line: without ``--role``, run both, one after the other."""
    parser = argparse.ArgumentParser(description="Prefill in one process, decode in another.")
    parser.add_argument("--shelf", required=True, help="directory that both share")
    parser.add_argument("--model", help="a model; by default a tiny one is made on the spot")
    parser.add_argument("--role", choices=sorted(ROLES), help="be only one of the two")
    options = parser.parse_args()
    shelf = str(Path(options.shelf).absolute())
    model = options.model or make_model(Path("build/models/tiny"), "tiny", replace=True)
    if options.role:
        run(options.role, str(model), shelf)
        return
    for role in ("producer", "consumer"):
        command = [sys.executable, __file__, "--shelf", shelf, "--model", str(model)]
        subprocess.run([*command, "--role", role], check=True)


if __name__ == "__main__":
    main()
