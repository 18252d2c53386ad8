"""The engine side of :mod:`.engines`: one vLLM ``AsyncLLM``, driven over a socket by JSON lines.

Run as a script: ``engine_process.py <fd of the socket>``. The first line holds the engine
arguments; every later line is a command with an id, answered by one or more lines with that id.
Commands run concurrently on the event loop of the main thread. When the socket closes, the engine
is shut down and the process ends, so a test run that dies leaves no engine behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

#: An environment variable: give up root's privilege to write where permissions forbid it.
HEED_PERMISSIONS = "ENGINE_HEEDS_PERMISSIONS"

_CAP_DAC_OVERRIDE = 1
_CAPABILITY_VERSION_3 = 0x20080522
_PR_CAPBSET_DROP = 24


class EngineCounts:
    """Sums what vLLM's scheduler reports; vLLM calls ``record`` after every step with output.

    Attributes
    ----------
    loaded_tokens : int
        Prompt tokens that the connector was to deliver.
    connector : dict
        The connector's own counters by name.
    """

    def __init__(self) -> None:
        self.loaded_tokens = 0
        self.connector: dict[str, float] = {}

    def factory(self, vllm_config: Any, engine_index: int = 0) -> EngineCounts:
        return self

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is None:
            return
        if scheduler_stats.connector_prefix_cache_stats is not None:
            self.loaded_tokens += scheduler_stats.connector_prefix_cache_stats.hits
        for name, amount in (scheduler_stats.kv_connector_stats or {}).items():
            if isinstance(amount, (int, float)):
                self.connector[name] = self.connector.get(name, 0) + amount

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, *_: Any, **__: Any) -> None: ...


class EngineProcess:
    """Owns the engine and answers the commands of one connection."""

    def __init__(
        self,
        engine: Any,
        counts: EngineCounts,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.engine = engine
        self.counts = counts
        self.reader = reader
        self.writer = writer
        self.in_flight = 0
        self.started = 0

    async def reply(self, number: int, **message: Any) -> None:
        self.writer.write(json.dumps({"id": number, **message}).encode() + b"\n")
        await self.writer.drain()

    async def serve(self) -> None:
        """Answer commands until the peer closes the socket or sends ``stop``."""
        tasks: set[asyncio.Task[None]] = set()
        while line := await self.reader.readline():
            command = json.loads(line)
            if command["op"] == "stop":
                started = time.monotonic()
                self.engine.shutdown(timeout=command["timeout"])
                await self.reply(command["id"], seconds=time.monotonic() - started)
                return
            task = asyncio.create_task(self.answer(command))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        self.engine.shutdown(timeout=0)

    async def answer(self, command: dict[str, Any]) -> None:
        number, op = command.pop("id"), command.pop("op")
        try:
            await getattr(self, "do_" + op)(number, **command)
        except Exception as error:  # noqa: BLE001 -- the test is told
            await self.reply(
                number, error=f"{type(error).__name__}: {error}", trace=traceback.format_exc()
            )

    async def do_generate(
        self,
        number: int,
        prompt: list[int],
        sampling: dict[str, Any],
        cache_salt: str | None,
        lora: dict[str, Any] | None,
        images: list[int],
        uuids: list[str | None] | None,
    ) -> None:
        """Run one request: a line with ``first`` at its first token, then the whole answer."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        request: dict[str, Any] = {"prompt_token_ids": prompt}
        if cache_salt is not None:
            request["cache_salt"] = cache_salt
        if images:
            request["multi_modal_data"] = {"image": [picture(seed) for seed in images]}
        if uuids is not None:
            request["multi_modal_uuids"] = {"image": uuids}
        params = SamplingParams(**{"temperature": 0.0, "detokenize": False, **sampling})
        alone = not self.in_flight
        self.in_flight += 1
        self.started += 1
        mine = self.started
        shelf_before = self.counts.loaded_tokens
        started = time.perf_counter()
        first: float | None = None
        last: Any = None
        try:
            async for output in self.engine.generate(
                request,
                params,
                f"request-{number}",
                lora_request=LoRARequest(**lora) if lora else None,
            ):
                last = output
                if first is None and output.outputs and output.outputs[0].token_ids:
                    first = time.perf_counter() - started
                    await self.reply(number, first=first)
        finally:
            self.in_flight -= 1
        alone = alone and self.started == mine
        completion = last.outputs[0]
        await self.reply(
            number,
            done=True,
            tokens=list(completion.token_ids),
            tops=[
                top_two(entry, token)
                for entry, token in zip(
                    completion.logprobs or (), completion.token_ids, strict=False
                )
            ],
            prompt_logprobs=[
                None if entry is None else entry[token].logprob
                for entry, token in zip(last.prompt_logprobs or (), prompt, strict=False)
            ],
            cached_tokens=last.num_cached_tokens,
            shelf_tokens=self.counts.loaded_tokens - shelf_before if alone else None,
            finish_reason=completion.finish_reason,
            ttft=first,
            seconds=time.perf_counter() - started,
            kv_transfer_params=getattr(last, "kv_transfer_params", None),
        )

    async def do_abort(self, number: int, target: int) -> None:
        await self.engine.abort(f"request-{target}")
        await self.reply(number)

    async def do_reset_prefix_cache(self, number: int, connector: bool) -> None:
        done = await self.engine.reset_prefix_cache(reset_connector=connector)
        await self.reply(number, done=bool(done))

    async def do_reset_encoder_cache(self, number: int) -> None:
        await self.engine.reset_encoder_cache()
        await self.reply(number)

    async def do_pause(self, number: int) -> None:
        await self.engine.pause_generation()
        await self.reply(number)

    async def do_resume(self, number: int) -> None:
        await self.engine.resume_generation()
        await self.reply(number)

    async def do_sleep(self, number: int, level: int) -> None:
        await self.engine.sleep(level)
        await self.reply(number)

    async def do_wake_up(self, number: int) -> None:
        await self.engine.wake_up()
        await self.reply(number)

    async def do_add_lora(self, number: int, lora: dict[str, Any]) -> None:
        from vllm.lora.request import LoRARequest

        await self.engine.add_lora(LoRARequest(**lora))
        await self.reply(number)

    async def do_metrics(self, number: int) -> None:
        from prometheus_client import REGISTRY, generate_latest

        await self.reply(number, text=generate_latest(REGISTRY).decode())

    async def do_worker(self, number: int, method: str, **arguments: Any) -> None:
        await self.engine.collective_rpc(method, kwargs=arguments)
        await self.reply(number)

    async def do_log_stats(self, number: int) -> None:
        await self.engine.do_log_stats()
        await self.reply(number)

    async def do_counters(self, number: int) -> None:
        await self.reply(number, sums=self.counts.connector)


def picture(seed: int) -> Any:
    """An image of coloured squares, another one for each seed."""
    import numpy as np
    from PIL import Image

    squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize((64, 64), Image.Resampling.NEAREST)


def top_two(entry: Any, token: int) -> list[float]:
    """Log probability of the chosen token and of its best rival, in nats."""
    rivals = [value.logprob for key, value in entry.items() if key != token]
    return [entry[token].logprob, max(rivals, default=float("-inf"))]


async def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 26)
    arguments = json.loads(await reader.readline())
    started = time.monotonic()
    try:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        imported = time.monotonic() - started
        connector = arguments.pop("kv_transfer_config", None)
        if connector is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**connector)
        counts = EngineCounts()
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments), stat_loggers=[counts.factory]
        )
    except BaseException as error:
        message = {
            "id": 0,
            "error": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc(),
        }
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()
        raise
    process = EngineProcess(engine, counts, reader, writer)
    await process.reply(
        0,
        imported=imported,
        seconds=time.monotonic() - started,
        heeds_permissions=not ignores_permissions(),
    )
    try:
        await process.serve()
    finally:
        writer.close()


def ignores_permissions() -> bool:
    """Whether this process may write where permissions forbid it, as root usually may."""
    status = Path("/proc/self/status").read_text()
    effective = int(status.split("CapEff:")[1].split()[0], 16)
    return bool(effective >> _CAP_DAC_OVERRIDE & 1)


def heed_permissions() -> None:
    """Give that privilege up, for this thread and all that it starts; harmless if it fails."""
    system = ctypes.CDLL(None)
    system.prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # Effective, permitted and inheritable ones, the lower 32 of each first.
    sets = (ctypes.c_uint32 * 6)()
    if system.capget(header, sets) == 0:
        for number in range(3):
            sets[number] &= ~(1 << _CAP_DAC_OVERRIDE)
        system.capset(header, sets)


def run() -> None:
    """Be an engine until its socket closes; to be called before there are other threads."""
    if HEED_PERMISSIONS in os.environ and ignores_permissions():
        heed_permissions()
    asyncio.run(main())


if __name__ == "__main__":
    run()
