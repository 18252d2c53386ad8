"""One vLLM engine in a child process, driven by JSON lines over a socket.

Run as ``python -m benchmarks.engine_process <fd of a socket>``. The first line has the engine's
arguments, each later one a question; each gets a reply of one line. The process ends when the
socket closes. :class:`benchmarks.engines.Child` is the other side. Runs on one thread.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

from benchmarks.engines import ALWAYS, COMPUTED


class _Engine:
    """One vLLM engine and its timed requests.

    Parameters
    ----------
    arguments : dict
        Of ``EngineArgs``, with ``kv_transfer_config`` as a dict. `switched`: the engine has no
        process of its own, so that each question can have another policy. `slow_start`: seconds
        that the first step of such an engine takes longer.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._switched = arguments.pop("switched")
        slow_start = arguments.pop("slow_start")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if self._switched else "1"
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        connector = KVTransferConfig(**arguments.pop("kv_transfer_config"))
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(**arguments, kv_transfer_config=connector)
        )
        self._number = 0
        if slow_start:
            self._slow_down(slow_start)

    def _slow_down(self, seconds: float) -> None:
        """Make the first step that computes anything take so much longer."""
        core: Any = self._engine.engine_core
        executor = core.engine_core.model_executor
        execute_model = executor.execute_model

        def execute_slowly(output: Any, *arguments: Any, **options: Any) -> Any:
            if output.total_num_scheduled_tokens:
                executor.execute_model = execute_model
                time.sleep(seconds)
            return execute_model(output, *arguments, **options)

        executor.execute_model = execute_slowly

    def ask(
        self, prompts: list[list[int]], tokens: int = 1, policy: str | None = None
    ) -> dict[str, Any]:
        """Submit prompts at once, each for some tokens.

        Parameters
        ----------
        prompts : list of list of int
        tokens : int
        policy : str, optional
            One of :data:`benchmarks.engines.POLICIES`, with which vLLM's own cache is emptied
            before. `COMPUTED`: by a salt of the request, under which nothing is stored.

        Returns
        -------
        dict
            ``first``: seconds to the first token of each; ``last``: to the last one of each;
            ``cached``: tokens of each that were not computed; ``shelf``: tokens, of all together,
            that the connector delivered; ``answers``: the tokens of each.
        """
        from vllm import SamplingParams

        engine: Any = self._engine
        if policy is not None:
            if not engine.reset_prefix_cache():
                raise RuntimeError("vLLM could not empty its prefix cache")
            scheduler = engine.engine_core.engine_core.scheduler.connector._scheduler
            scheduler.admission.always = policy == ALWAYS
        parameters = SamplingParams(
            temperature=0.0, detokenize=False, max_tokens=tokens, ignore_eos=True
        )
        before, begin = _external_tokens(), time.perf_counter()
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        outputs: dict[str, Any] = {}
        names = []
        for prompt in prompts:
            self._number += 1
            names.append(f"request-{self._number}")
            asked: dict[str, Any] = {"prompt_token_ids": prompt}
            if policy == COMPUTED:
                asked["cache_salt"] = names[-1]
            engine.add_request(names[-1], asked, parameters)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.outputs and output.outputs[0].token_ids:
                    last[output.request_id] = time.perf_counter() - begin
                    first.setdefault(output.request_id, last[output.request_id])
                outputs[output.request_id] = output
        return {
            "first": [first[name] for name in names],
            "last": [last[name] for name in names],
            "cached": [outputs[name].num_cached_tokens or 0 for name in names],
            "shelf": _external_tokens() - before,
            "answers": [[*outputs[name].outputs[0].token_ids] for name in names],
        }

    def stop(self) -> None:
        """Shut the engine down."""
        self._engine.engine_core.shutdown()


def _external_tokens() -> int:
    """Return the prompt tokens that the connector has loaded so far."""
    from prometheus_client import REGISTRY

    return int(
        sum(
            sample.value
            for family in REGISTRY.collect()
            if family.name == "vllm:external_prefix_cache_hits"
            for sample in family.samples
            if sample.name.endswith("_total")
        )
    )


def main() -> None:
    """Answer questions until the socket closes."""
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        lines = connection.makefile("rb")

        def reply(message: dict[str, Any]) -> None:
            connection.sendall(json.dumps(message).encode() + b"\n")

        try:
            engine = _Engine(json.loads(lines.readline()))
            reply({})
            for line in lines:
                reply(engine.ask(**json.loads(line)))
        except Exception as error:
            reply({"error": f"{type(error).__name__}: {error}"})
            raise
        engine.stop()


if __name__ == "__main__":
    main()
