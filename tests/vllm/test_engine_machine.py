"""Whatever users, storages and trainers do: no block is wrong, and every request ends.

Two engines share a shelf. Each compares all KV before it uses it, so that a sequence of calls that
ends has neither loaded nor stored anything wrong.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from kvshelf.errors import TransientStorageError
from kvshelf.shelf.shelf import Shelf
from kvshelf.tiers import runtime
from kvshelf.vllm.scheduler import handovers
from kvshelf.vllm.worker import memory
from tests.native.emulation import emulated
from tests.sim import engine_sides as sides
from tests.sim.engine import DRAFT_LAYER, DRAFTING, RUNNERS, EngineModel
from tests.sim.engine_caches import MODELS, PLAIN, PUBLISHED_MODELS, Layers, drafter, guesser
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.prompts import prompt

ASKED = {"do_remote_decode": True}
BARE = {"do_remote_prefill": True}
#: Blocks with which a few requests of three chunks fit, by models with larger blocks and chunks.
FEW_BLOCKS = {
    "Mamba2": 8,
    "Jamba": 40,
    "Qwen3-Next": 40,
    "DeepSeek V4": 45,
    "Gemma 3": 70,
    "LFM2": 60,
    "GLM-5-next": 45,
    "Qwen4-exp": 40,
    "ring and windows": 70,
}
#: Those that any size of blocks has, and last what caches of several groups have here.
FORMS = "NHD", "HND", "2BNHD", "vec"
OPERATIONS = "stat", "open", "read", "write", "folders", "info"
TROUBLES = [*(f"{name} fails" for name in OPERATIONS), "read hangs", "write hangs"]
CHANGES = ["loaded", *(f"written, reset {when}" for when in ("before", "behind", "before all"))]
either = st.integers(0, 1)
seeds = st.integers(0, 5)


class EnginesOfOneShelf(RuleBasedStateMachine):
    """Two engines with the same model, whose storage and weights change under them."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        self.backend = FaultyStorage(posix(Path(folder) / "shelf"))
        self.patch.setattr(runtime, "open_shelf", lambda url, **_: Shelf(self.backend))
        self.is_open = threading.Event()
        self.engines: list[EngineModel] = []
        self.starts: list[Callable[[], EngineModel]] = []
        self.added, self.scale = 0, 1

    @initialize(
        runner=st.sampled_from([*RUNNERS, "V2 on a device"]),
        native=st.booleans(),
        model=st.sampled_from(["plain", "plain", "gemma", "two windows", "llama 4", *FEW_BLOCKS]),
        drafts=st.sampled_from([0, 0, 1, 3]),
        most_waiting=st.sampled_from([1, 3, 100]),
        chunk_size=st.sampled_from([8, 6, 10, 3]),
        layout=st.sampled_from(["auto", "canonical"]),
        is_small=st.booleans(),
        keeps=st.booleans(),
        save_decode=st.booleans(),
        data=st.data(),
    )
    def start(
        self,
        runner: str,
        native: bool,
        model: str,
        drafts: int,
        most_waiting: int,
        chunk_size: int,
        layout: str,
        is_small: bool,
        keeps: bool,
        save_decode: bool,
        data: Any,
    ) -> None:
        """Start both; stores have less of the small memory than a step needs."""
        # Chunks of a device move by the kernel, or by torch.
        by_kernel = native and runner.endswith("on a device")
        self.stack.enter_context(emulated() if by_kernel else nullcontext())
        plain = model == "plain"
        self.patch.setattr(handovers, "MAX_WAITING", most_waiting)
        # As many threads load on each machine: each has a spare slot in memory.
        self.patch.setattr(memory, "_MOST_IDLE_CORES", 1)
        if model in FEW_BLOCKS:
            self.start_published(model, drafts, data)
            return
        for number in range(2):
            groups = list(PLAIN if plain else MODELS[model])
            if plain:
                # Chunks straddle blocks.
                size = data.draw(st.sampled_from([4, 5]), "block size")
                groups = [replace(PLAIN[0], block_size=size)]
            small = 6 * 16384 if plain else 8 * 32768
            options = {
                "groups": groups,
                "runner": runner,
                "chunk_size": chunk_size if plain else 16,
                "layout": layout,
                "memory" if keeps else "memory_bytes": small if is_small else 1 << 20,
                "save_decode": save_decode,
                "interval": 2,
                "handover_wait_s": 2,
                "tensor_parallel": 1 if keeps else data.draw(st.integers(1, 2), "ranks"),
                "blocks": data.draw(st.integers(20, 40), "blocks") * (1 if plain else 2),
                "budget": data.draw(st.integers(8, 40), "budget"),
                "prefix_caching": data.draw(st.booleans(), "prefix caching") or not plain,
                "room": data.draw(st.sampled_from([0, 1000]), "room"),
                "form": data.draw(st.sampled_from(FORMS if plain else FORMS[-1:]), "form"),
                "seed": number,
            }
            self.add_engine(options)

    def start_published(self, model: str, drafts: int, data: Any) -> None:
        """Start engines with drafts, or with states or rings; of both kinds vLLM has one runner."""
        self.scale = 3
        groups = PUBLISHED_MODELS[model]
        runners = ["V1", "V2", "V1 on a device"]
        if drafts:
            runners = ["V1 speculative", "V2 speculative", DRAFTING]
        # States of drafts take blocks; with few blocks and larger steps no request would fit.
        few = FEW_BLOCKS[model] + (25 + 5 * drafts if drafts else 0)
        sizes = [(32, few, False), (48, few, False), (200, 300, False), (64, 300, True)]
        budget, blocks, asynchronous = data.draw(st.sampled_from(sizes), "steps")
        options = {
            "groups": groups,
            "runner": data.draw(st.sampled_from(runners), "runner"),
            "drafts": drafts,
            "chunk_size": data.draw(st.sampled_from([32, 64]), "chunk size"),
            "memory": data.draw(st.sampled_from([None, 1 << 20, 400 << 10]), "memory"),
            "save_decode": data.draw(st.booleans(), "save_decode"),
            "interval": data.draw(st.sampled_from([1, 2, 8]), "interval"),
            "retention": data.draw(st.sampled_from([0, None]), "retention"),
            "requests": data.draw(st.sampled_from([1, 4]), "requests"),
            "budget": budget,
            "blocks": blocks,
            "asynchronous": asynchronous,
            "handover_wait_s": 2,
            "form": "NHD",
        }
        if drafts and any(group.kind == "full" for group in groups):
            options["drafter"] = drafter(drafts, draft_model_config=None)
            if data.draw(st.booleans(), "the drafter has KV"):
                block_size = next(group.block_size for group in groups if group.kind == "full")
                own = Layers("full", (), block_size, (1,), drafts=(DRAFT_LAYER,))
                options |= {"groups": [*groups, own], "drafter": drafter(drafts)}
        elif drafts:
            options["drafter"] = guesser(drafts)
        for number in range(2):
            self.add_engine(options | {"seed": number})

    def add_engine(self, options: dict[str, Any]) -> None:
        """Start an engine, and another one with the same options whenever it ends."""

        def start() -> EngineModel:
            engine = EngineModel(self.backend.url, **options)
            ask = engine.side.matched_tokens

            def matched_tokens(request: Any, computed: int) -> int | None:
                tokens = ask(request, computed)
                awaited = sides.awaited_of(engine.side, request.request_id)
                if tokens is None and awaited is not None:
                    assert engine.side.handovers.clock() < awaited.deadline + 0.001
                return tokens

            self.patch.setattr(engine.side, "matched_tokens", matched_tokens)
            return engine

        self.starts.append(start)
        self.engines.append(start())

    # ------------------------------------------------------------------------- users

    @rule(
        number=either,
        seed=seeds,
        length=st.integers(1, 40),
        answer=st.integers(1, 16),
        transfer=st.sampled_from([None, None, ASKED, BARE]),
    )
    def add(self, number: int, seed: int, length: int, answer: int, transfer: Any) -> None:
        """Add a request, which may ask for a hand-over of its prompt, or wait for one."""
        self.added += 1
        self.engines[number].add(
            f"r{self.added}",
            self.prompt(seed)[: length * self.scale],
            answer if transfer is None else 1,
            cache_salt="s" if seed == 5 else None,
            transfer=transfer,
        )

    def prompt(self, seed: int) -> list[int]:
        return prompt(40 * self.scale, seed, 16 * self.scale)

    @rule(number=either, other=either, which=seeds)
    def take_over(self, number: int, other: int, which: int) -> None:
        """Add a request with what an engine has promised, which may come late or never."""
        promised = sorted(name for name, params in self.engines[other].params.items() if params)
        if promised:
            name = promised[which % len(promised)]
            text = self.engines[other].texts[name]
            self.added += 1
            self.engines[number].add(
                f"r{self.added}",
                text.tokens[: text.prompt],
                2,
                transfer=self.engines[other].params[name],
            )

    @rule(number=either, other=either, which=seeds)
    def give_up(self, number: int, other: int, which: int) -> None:
        """Leave the marker of a producer that stores nothing of what it has promised."""
        promised = sorted(name for name, params in self.engines[other].params.items() if params)
        if promised and self.engines[number].connector.namespace is not None:
            params = self.engines[other].params[promised[which % len(promised)]]
            engine = self.engines[number]
            folder = engine.folder / engine.format.namespace.folder / ".kvshelf/gave-up"
            engine.put({folder / params.get("kvshelf_attempt", "none"): b""})

    @rule(seconds=st.sampled_from([0.1, 1, 5]))
    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    @rule(number=either, count=st.integers(1, 12))
    def step(self, number: int, count: int) -> None:
        for _ in range(count):
            self.engines[number].step()

    @rule(number=either, seed=st.integers(0, 2))
    def serve(self, number: int, seed: int) -> None:
        """Serve all requests of an engine and one more, for which the other engine is asked too."""
        self.heal()
        self.add(number, seed, 40, 2, transfer=None)
        self.engines[number].finish()
        self.engines[number].drain()
        self.add(1 - number, seed, 40, 8, transfer=None)
        self.step(1 - number, 3)

    @rule(number=either, action=st.sampled_from(["abort", "preempt"]), which=seeds)
    def interrupt(self, number: int, action: str, which: int) -> None:
        engine = self.engines[number]
        if engine.names:
            getattr(engine, action)(sorted(engine.names)[which % len(engine.names)])

    @rule(number=either, connector=st.booleans())
    def reset(self, number: int, connector: bool) -> None:
        self.engines[number].reset(running=True, connector=connector)

    @rule(number=either)
    def restart(self, number: int) -> None:
        """End an engine, and start another one in its place."""
        self.engines[number].close()
        self.engines[number] = self.starts[number]()

    # ------------------------------------------------------------------------- the storage

    @rule(trouble=st.sampled_from(TROUBLES))
    def trouble(self, trouble: str) -> None:
        """Have a few calls fail, or hang until the storage is healed."""
        operation, _, what = trouble.partition(" ")
        if what == "hangs":
            self.is_open.clear()
            self.backend.add(Fault(operation, "*.safetensors", wait=self.is_open, times=5))
        else:
            error = TransientStorageError(5, "EIO")
            self.backend.add(Fault(operation, error=error, times=5))

    def heal(self) -> None:
        self.backend.heal()
        self.is_open.set()

    @rule(which=st.integers(0, 99), how=st.sampled_from(["vanishes", "is cut", "is damaged"]))
    def lose(self, which: int, how: str) -> None:
        """Take an object away, or a part of it, or change a byte."""
        paths = sorted(Path(self.backend.url).rglob("*.safetensors"))
        if not paths:
            return
        path = paths[which % len(paths)]
        data = bytearray(path.read_bytes())
        if how == "vanishes" or not data:
            path.unlink()
        elif how == "is cut":
            path.write_bytes(data[: which * 7 % len(data)])
        else:
            data[which * 7 % len(data)] ^= 1
            path.write_bytes(data)

    # ------------------------------------------------------------------------- the weights

    @rule(number=either, weights=st.integers(0, 2), how=st.sampled_from(CHANGES))
    def change_weights(self, number: int, weights: int, how: str) -> None:
        """Of weights that are written no hook tells, but a reset before the next step."""
        engine = self.engines[number]
        if how == "loaded":
            engine.load_weights(weights)
            return
        if "before" in how:
            engine.reset(running="all" in how)
        engine.write_weights(weights)
        if "behind" in how:
            engine.reset(running="all" in how)

    def teardown(self) -> None:
        """All requests end, every block is given back, and all that is stored is right."""
        with self.stack:
            self.heal()
            try:
                for engine in self.engines:
                    engine.finish()
                    engine.end()
                    engine.drain()
                    assert not sides.remembers(engine.side)
                    assert not sides.waits_for_objects(engine.side)
                # It compares all that it loads.
                self.engines.append(self.starts[0]())
                self.engines[-1].run(*map(self.prompt, range(3)))
                self.engines[-1].end()
            finally:
                for engine in self.engines:
                    engine.shut_down()


@pytest.mark.long
def test_engines_of_one_shelf_whatever_happens_use_no_wrong_block() -> None:
    run_state_machine_as_test(
        EnginesOfOneShelf, settings=settings(max_examples=12, stateful_step_count=40)
    )
