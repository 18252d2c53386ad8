"""The child processes of ``python -m benchmarks``: engines, and the step thread alone.

Run as ``python -m benchmarks.engine_process <fd of a socket>``. JSON lines: the first is the
mode with its arguments, each later one a command; each gets a reply of one line. The process ends
when the socket closes. :mod:`benchmarks.child` is the other side.

Modes
-----
``engine``
    An ``AsyncLLM``; commands ``generate``, ``ask``, ``decode``, ``hold``, ``let_go``,
    ``occupy``, ``others``, ``relieve`` and ``stop``.
``stepped``
    A :class:`~benchmarks.stepped.SteppedEngine`; commands ``serve``, ``fill`` and ``stop``.
``scheduler``
    :class:`~kvshelf.vllm.scheduler.SchedulerSide` with synthetic requests, to time its calls;
    commands ``look_up`` and ``stop``.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.samples import (
    BLOCK_TOKENS,
    LARGE,
    make_chunks,
    make_format,
    make_hollow_objects,
    make_prompt,
)
from benchmarks.stepped import SteppedEngine
from kvshelf.backends import open_backend
from kvshelf.config import Config
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import Shelf

_STEP_SECONDS = 20e-3


class _Engine:
    """One vLLM engine and its timed requests."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        connector = arguments.pop("kv_transfer_config")
        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments, kv_transfer_config=KVTransferConfig(**connector))
        )
        self._number = 0
        self._held: list[asyncio.Task[None]] = []
        self._others: list[asyncio.Task[None]] = []
        self._other_tokens = 0

    async def generate(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Run prompts one after another, each for one token.

        Returns
        -------
        dict
            ``first``: seconds to the first token of each; ``seconds``: for all together;
            ``cached``: tokens of each that were not computed; ``shelf``: tokens, of all
            together, that the connector delivered.
        """
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0.0, detokenize=False, max_tokens=1)
        before = _external_tokens()
        first, cached = [], []
        begin = time.perf_counter()
        for prompt in prompts:
            self._number += 1
            started = time.perf_counter()
            last: Any = None
            async for output in self._engine.generate(
                {"prompt_token_ids": prompt}, parameters, f"request-{self._number}"
            ):
                last = output
            first.append(time.perf_counter() - started)
            cached.append(last.num_cached_tokens or 0)
        seconds = time.perf_counter() - begin
        return {
            "first": first,
            "seconds": seconds,
            "cached": cached,
            "shelf": _external_tokens() - before,
        }

    async def ask(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Run prompts at once, each for several tokens.

        Returns
        -------
        dict
            ``first``: seconds to the first token of each; ``cached``: tokens of each that were not
            computed; ``answers``: the tokens of each.
        """
        replies = await asyncio.gather(*(self._ask(prompt, tokens) for prompt in prompts))
        first, cached, answers = zip(*replies, strict=True)
        return {"first": first, "cached": cached, "answers": answers}

    async def _ask(self, prompt: list[int], tokens: int) -> tuple[float, int, list[int]]:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, detokenize=False, max_tokens=tokens, ignore_eos=True
        )
        self._number += 1
        first, last = 0.0, None
        begin = time.perf_counter()
        async for output in self._engine.generate(
            {"prompt_token_ids": prompt}, parameters, f"request-{self._number}"
        ):
            first, last = first or time.perf_counter() - begin, output
        assert last is not None
        return first, last.num_cached_tokens or 0, [*last.outputs[0].token_ids]

    async def decode(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """Run one prompt for several tokens.

        Returns
        -------
        dict
            ``gap``: seconds from the first token to the last, divided by the tokens between.
        """
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, detokenize=False, max_tokens=tokens, ignore_eos=True
        )
        self._number += 1
        first = last = 0.0
        async for _ in self._engine.generate(
            {"prompt_token_ids": prompt}, parameters, f"request-{self._number}"
        ):
            last = time.perf_counter()
            first = first or last
        return {"gap": (last - first) / (tokens - 1)}

    async def hold(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Submit requests with their ``params`` and leave them waiting.

        Returns
        -------
        dict
            ``waiting``: how many have not ended a second later.
        """
        for request in requests:
            self._number += 1
            self._held.append(
                asyncio.create_task(
                    self._wait(request["prompt"], request["params"], f"request-{self._number}")
                )
            )
        await asyncio.sleep(1.0)
        return {"waiting": sum(not task.done() for task in self._held)}

    async def _wait(self, prompt: list[int], params: dict[str, Any], name: str) -> None:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0,
            detokenize=False,
            max_tokens=1,
            extra_args={"kv_transfer_params": params},
        )
        async for _ in self._engine.generate({"prompt_token_ids": prompt}, parameters, name):
            pass

    async def let_go(self) -> dict[str, Any]:
        """Abort what :meth:`hold` submitted.

        Returns
        -------
        dict
            ``waited``: how many had not ended.
        """
        waited = sum(task.cancel() for task in self._held)
        await asyncio.gather(*self._held, return_exceptions=True)
        self._held = []
        return {"waited": waited}

    async def occupy(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Run prompts at once, again and again, each for several tokens and under a new salt."""
        for prompt in prompts:
            self._others.append(asyncio.create_task(self._repeat(prompt, tokens)))
        return {}

    async def _repeat(self, prompt: list[int], tokens: int) -> None:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, detokenize=False, max_tokens=tokens, ignore_eos=True
        )
        while True:
            self._number += 1
            name = f"request-{self._number}"
            asked: Any = {"prompt_token_ids": prompt, "cache_salt": name}
            seen = 0
            async for answer in self._engine.generate(asked, parameters, name):
                length = len(answer.outputs[0].token_ids)
                self._other_tokens += length - seen
                seen = length

    async def others(self) -> dict[str, Any]:
        """Return how many tokens the requests of :meth:`occupy` have got, and the time."""
        return {"tokens": self._other_tokens, "seconds": time.perf_counter()}

    async def relieve(self) -> dict[str, Any]:
        """Abort what :meth:`occupy` runs."""
        for task in self._others:
            task.cancel()
        await asyncio.gather(*self._others, return_exceptions=True)
        self._others = []
        return {}

    def stop(self) -> dict[str, Any]:
        """Shut the engine down."""
        self._engine.shutdown(timeout=0)
        return {}


def _external_tokens() -> int:
    """Return the prompt tokens that the connector has loaded in this process so far."""
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


class _Scheduler:
    """The scheduler side of the connector without an engine."""

    async def look_up(
        self,
        root: str,
        chunks: int,
        requests: int,
        url: str | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Time the step thread's calls for requests whose lookup finds everything.

        Returns
        -------
        dict
            ``calls``: for each request, the seconds of each call until the lookup was done.
        """
        # On a separate thread the steps run as in an engine: without an event loop.
        return await asyncio.to_thread(
            _time_step_thread, Path(root), chunks, requests, url or root, storage_options or {}
        )

    def stop(self) -> dict[str, Any]:
        """Nothing to stop."""
        return {}


def _time_step_thread(
    root: Path, chunks: int, requests: int, url: str, storage_options: dict[str, Any]
) -> dict[str, Any]:
    from kvshelf.vllm.groups import CacheGroups
    from kvshelf.vllm.metadata import WorkerMetadata, WorkerReport
    from kvshelf.vllm.namespace import build_namespace
    from kvshelf.vllm.scheduler import Engine, SchedulerSide

    record: Any = make_format(LARGE, 8).namespace.record
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: LARGE.kv_heads,
            dtype="torch.bfloat16",
            quantization=None,
            hf_text_config=SimpleNamespace(),
            served_model_name="bench",
            model="bench",
            max_model_len=1 << 20,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=BLOCK_TOKENS),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, async_scheduling=False),
        speculative_config=None,
    )
    part = WorkerReport(
        layer_names=tuple(record["layer_names"]),
        layer_shapes=tuple(record["layer_shapes"]),
        layer_dtypes=tuple(record["layer_dtypes"]),
        layouts=tuple(record["layouts"]),
        attention=tuple(record["attention"]),
        head_sizes=tuple(record["head_sizes"]),
        sliding_windows=(-1,) * LARGE.layers,
        weights=record["weights"],
    )
    config = Config(shared_storage_path=str(root))
    fmt = ObjectFormat(build_namespace(vllm_config, config, [part], record["weights"]))
    make_hollow_objects(root, fmt, make_chunks(fmt, chunks))
    prompt = make_prompt(chunks * fmt.chunk_size)
    busy_step = SimpleNamespace(
        total_num_scheduled_tokens=1,
        preempted_req_ids=None,
        num_scheduled_tokens={"busy": 1},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
    )
    times = []
    with Shelf(open_backend(url, storage_options=storage_options)) as shelf:
        groups = CacheGroups(vllm_config, None)
        side = SchedulerSide(Engine(vllm_config, config, lambda: shelf, groups))
        try:
            side.worker_output(WorkerMetadata(reports={0: part}))
            # It runs all the time: the engine is never idle.
            side.new_request(_request("busy", prompt[:1]))
            side.step_metadata(busy_step)
            for number in range(-3, requests):
                # Forget the previous request.
                side.reset()
                calls = _time_request(side, f"request-{number}", prompt, busy_step)
                if number >= 0:
                    times.append(calls)
        finally:
            side.close()
    return {"calls": times}


def _time_request(side: Any, request_id: str, prompt: list[int], busy_step: Any) -> list[float]:
    request = _request(request_id, prompt)
    begin = time.perf_counter()
    side.new_request(request)
    calls = [time.perf_counter() - begin]
    found: int | None = None
    while found is None:
        begin = time.perf_counter()
        found = side.matched_tokens(request, 0)
        calls.append(time.perf_counter() - begin)
        side.step_metadata(busy_step)
        # While the model computes, the interpreter is idle.
        time.sleep(_STEP_SECONDS)
    if found != len(prompt) - BLOCK_TOKENS:
        raise RuntimeError(f"the lookup found {found} of {len(prompt)} stored tokens")
    side.finished(request_id)
    return calls


def _request(request_id: str, prompt: list[int]) -> Any:
    return SimpleNamespace(
        request_id=request_id,
        _all_token_ids=list(prompt),
        num_tokens=len(prompt),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        prompt_token_ids=prompt,
        prompt_embeds=None,
        prompt_is_token_ids=None,
        resumable=False,
        skip_reading_prefix_cache=False,
        kv_transfer_params=None,
        cache_salt=None,
        lora_request=None,
        mm_features=[],
        num_preemptions=0,
    )


def _make(mode: str, arguments: dict[str, Any]) -> Any:
    if mode == "engine":
        return _Engine(arguments)
    return SteppedEngine(arguments) if mode == "stepped" else _Scheduler()


async def main() -> None:
    """Serve commands until told to stop or the socket closes."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 26)

    async def reply(message: dict[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()

    arguments = json.loads(await reader.readline())
    server: Any
    try:
        server = _make(arguments.pop("mode"), arguments)
        await reply({})
        while line := await reader.readline():
            command = json.loads(line)
            op = command.pop("op")
            if op == "stop":
                await reply(server.stop())
                break
            await reply(await getattr(server, op)(**command))
    except Exception as error:
        await reply({"error": f"{type(error).__name__}: {error}"})
        raise
    finally:
        writer.close()


if __name__ == "__main__":
    asyncio.run(main())
