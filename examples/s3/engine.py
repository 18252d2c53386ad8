"""An engine on a bucket: it loads what other engines have stored there instead of computing it.

    python examples/s3/engine.py s3://bucket/kv prompts.jsonl --model MODEL

Run it twice, on one machine or on two. A line of the file is a JSON string, or a list of token ids.
Credentials, region and endpoint come from the sources of the AWS CLI (AWS_PROFILE,
AWS_ENDPOINT_URL, the role of the machine, …), so none of them is in a command line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="An engine on a bucket.")
    parser.add_argument("shelf", help="s3://bucket/prefix")
    parser.add_argument("prompts", type=Path, help="JSON lines: strings or lists of token ids")
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    prompts = [json.loads(line) for line in options.prompts.read_text().splitlines()]

    llm = LLM(
        model=options.model,
        enforce_eager=True,
        max_model_len=4096,
        kv_cache_memory_bytes=256 << 20,
        gpu_memory_utilization=0.1,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVShelfConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": options.shelf},
        ),
    )
    params = SamplingParams(temperature=0, max_tokens=8)
    for prompt in prompts:
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        [output] = llm.generate(given, params, use_tqdm=False)
        print(
            f"{len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} of them"
            f" from the shelf, answer {list(output.outputs[0].token_ids)}"
        )


if __name__ == "__main__":
    main()
