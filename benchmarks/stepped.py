"""An engine that runs inside this process, and whose policy or connector can be changed.

Owns the engine of the rows ``admission/*`` and ``saturated/*``. It computes a prompt, loads all
that the shelf has of it, or lets :mod:`kvshelf.vllm.scheduler.admission` decide, as each command
says; or it works for an inert connector. So what is compared has the same memory, processors and
learned times. Runs on the calling thread.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Any, Final

_DRAIN_SECONDS: Final = 120.0

COMPUTED: Final = "computed"
ALWAYS: Final = "always"
AUTO: Final = "auto"
POLICIES: Final = (COMPUTED, ALWAYS, AUTO)


class SteppedEngine:
    """One vLLM engine without a process of its own.

    Parameters
    ----------
    arguments : dict
        Of ``EngineArgs``, with ``kv_transfer_config`` as a dict.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        connector = KVTransferConfig(**arguments.pop("kv_transfer_config"))
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(**arguments, kv_transfer_config=connector)
        )
        core: Any = self._engine.engine_core
        self._core = core.engine_core
        self._connector = self._core.scheduler.connector
        self._scheduler = self._connector._as_scheduler()
        self._number = 0

    async def serve(
        self,
        prompts: list[list[int]],
        policy: str,
        behind: list[int] | None = None,
        seconds: float = 0.0,
    ) -> dict[str, Any]:
        """Submit prompts at once, each for one token; vLLM's own cache is empty before.

        Parameters
        ----------
        prompts : list of list of int
        policy : str
            One of `POLICIES`. `COMPUTED`: by a salt of the request, under which nothing is stored.
        behind : list of int, optional
            A prompt that is answered before, and for so many `seconds` after the others came.
        seconds : float

        Returns
        -------
        dict
            ``first``: seconds to the first token of each; ``loaded``: tokens of each that were
            not computed.
        """
        from vllm import SamplingParams

        engine = self._engine
        if not engine.reset_prefix_cache():
            raise RuntimeError("vLLM could not empty its prefix cache")
        self._scheduler.admission.always = policy == ALWAYS
        parameters = SamplingParams(temperature=0.0, detokenize=False, max_tokens=1)
        first: dict[str, float] = {}
        loaded: dict[str, int] = {}
        names = []
        if behind is not None:
            longest = self._core.vllm_config.model_config.max_model_len - len(behind)
            answer = SamplingParams(ignore_eos=True, detokenize=False, max_tokens=longest)
            engine.add_request("behind", {"prompt_token_ids": behind}, answer)
            while not engine.step():
                pass
        begin = time.perf_counter()
        for prompt in prompts:
            self._number += 1
            names.append(f"request-{self._number}")
            asked: dict[str, Any] = {"prompt_token_ids": prompt}
            if policy == COMPUTED:
                asked["cache_salt"] = names[-1]
            engine.add_request(names[-1], asked, parameters)
        while engine.has_unfinished_requests():
            if behind is not None and time.perf_counter() - begin >= seconds:
                engine.abort_request(["behind"])
                behind = None
            for output in engine.step():
                name = output.request_id
                if name not in first and output.outputs and output.outputs[0].token_ids:
                    first[name] = time.perf_counter() - begin
                loaded[name] = output.num_cached_tokens or 0
        return {
            "first": [first[name] for name in names],
            "loaded": [loaded[name] for name in names],
        }

    async def fill(
        self, prompts: list[list[int]], tokens: int, *, inert: bool, filesystem: int | None
    ) -> dict[str, Any]:
        """Run prompts at once, each for several tokens; vLLM's own cache is empty before.

        Parameters
        ----------
        prompts : list of list of int
        tokens : int
            Of each answer.
        inert : bool
            With a connector that does nothing in place of kvshelf's.
        filesystem : int, optional
            The process that serves the shelf's filesystem.

        Returns
        -------
        dict
            ``seconds``: until the last answer has ended; ``storing``: until all stores had ended
            after that; ``steps``; and the processor time until the last answer of this process and
            of that of the filesystem.
        """
        from vllm import SamplingParams
        from vllm.distributed.kv_transfer import kv_transfer_state as state

        psutil: Any = import_module("psutil")
        engine = self._engine
        if not engine.reset_prefix_cache():
            raise RuntimeError("vLLM could not empty its prefix cache")
        scheduler, worker = self._core.scheduler, state._KV_CONNECTOR_AGENT
        parameters = SamplingParams(
            temperature=0.0, detokenize=False, max_tokens=tokens, ignore_eos=True
        )
        processes = [psutil.Process(pid) for pid in (os.getpid(), filesystem) if pid is not None]

        def processor() -> list[float]:
            return [sum(process.cpu_times()[:2]) for process in processes]

        if inert:
            scheduler.connector = state._KV_CONNECTOR_AGENT = self._inert()
        steps = 0
        try:
            used, begin = processor(), time.perf_counter()
            for prompt in prompts:
                self._number += 1
                engine.add_request(
                    f"request-{self._number}", {"prompt_token_ids": prompt}, parameters
                )
            while engine.has_unfinished_requests():
                engine.step()
                steps += 1
            ended = time.perf_counter()
            used = [after - before for after, before in zip(processor(), used, strict=True)]
        finally:
            scheduler.connector, state._KV_CONNECTOR_AGENT = self._connector, worker
        if worker.drain(_DRAIN_SECONDS):
            raise RuntimeError("the stores did not end")
        return {
            "seconds": ended - begin,
            "storing": time.perf_counter() - ended,
            "steps": steps,
            "processor_seconds": used,
        }

    def _inert(self) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

        from benchmarks.inert import InertConnector

        config, caches = self._connector._vllm_config, self._connector._kv_cache_config
        return InertConnector(config, KVConnectorRole.SCHEDULER, caches)

    def stop(self) -> dict[str, Any]:
        """Shut the engine down."""
        self._engine.engine_core.shutdown()
        return {}
