"""Runs vLLM's second model runner on CPUs, with Triton's interpreter; prints what it saw as JSON.

The CPU build of vLLM has this runner, but its kernels are Triton's, for which there is no compiler
here: the interpreter runs them. vLLM looks for a backend of Triton named ``cpu`` before that.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any


class _Driver:
    """What vLLM asks of a backend's driver."""

    @staticmethod
    def is_active() -> bool:
        return True


def main(model: str, shelf: str, prompts: str) -> None:
    """Serve each prompt, wait for its stores, and print one line of JSON."""
    import triton.backends

    triton.backends.backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvshelf.vllm.worker.stores import WorkerStores

    early: list[int] = []
    late: list[int] = []
    finish_forward, save = WorkerStores.finish_forward, WorkerStores.save

    def counted(into: list[int], method: Any) -> Any:
        def call(self: WorkerStores) -> None:
            into.append(len(self._meta.stores) if self._meta is not None else 0)
            method(self)

        return call

    WorkerStores.finish_forward = counted(early, finish_forward)  # type: ignore[method-assign]
    WorkerStores.save = counted(late, save)  # type: ignore[method-assign]
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=2,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="SharedStorageConnector",
            kv_connector_module_path="tests.support.connector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "shared_storage_path": shelf,
            },
        ),
    )
    assert llm.llm_engine.vllm_config.use_v2_model_runner
    options = SamplingParams(max_tokens=4, temperature=0, detokenize=False)
    answers = []
    for tokens in json.loads(prompts):
        (answer,) = llm.generate([{"prompt_token_ids": tokens}], options, use_tqdm=False)
        answers.append([list(answer.outputs[0].token_ids), answer.num_cached_tokens])
        get_kv_transfer_group().drain(60)
    said = {"answers": answers, "early": sum(early), "late": sum(late)}
    sys.stdout.write(f"\nRESULT {json.dumps(said)}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
