"""Loads of a device that write beside the forward pass of the step that plans them.

vLLM enqueues what belongs to new blocks before it binds a step, and no request of a step has the
blocks of its loads. So a load may write as soon as the step is bound.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from kvshelf.backends.guard import GuardedBackend
from kvshelf.shelf.shelf import Shelf
from kvshelf.tiers import tiered
from kvshelf.vllm import connector
from kvshelf.vllm.groups import CacheGroups
from tests.native.emulation import emulation
from tests.native.simulated_device import SimulatedEvent
from tests.sim.storage import posix
from tests.support.prompts import prompt
from tests.support.variants import variants
from tests.support.waiting import PATIENCE, until
from tests.vllm.replay import MiniVllm, Request, make_config, make_groups

pytestmark = pytest.mark.real

RUNNERS = ["V1 on a device", "V2 on a device"]
LENGTH = 41
HIT = 40


@pytest.fixture(autouse=True, params=["native", "torch"])
def copier(request: pytest.FixtureRequest) -> Iterator[str]:
    """Who copies: the compiled library on the emulated device, or torch."""
    with emulation().in_use() if request.param == "native" else nullcontext():
        yield request.param


Start = Callable[..., MiniVllm]


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Start]:
    """Make engines on one shelf; a test closes them."""
    folder = tmp_path / "shelf"
    monkeypatch.setattr(tiered, "open_shelf", lambda url, **_: Shelf(GuardedBackend(posix(folder))))
    connector._logs.clear()

    def start(runner: str, *, beside: bool = True, **options: object) -> MiniVllm:
        config = make_config(
            str(folder),
            lookup_wait_s=PATIENCE,
            identity_wait_s=PATIENCE,
            load_beside_step=beside,
        )
        return MiniVllm(config, runner=runner, prefix_caching=False, **options)

    yield start
    assert "the engine goes on" not in caplog.text


def store(start: Start, *prompts: list[int]) -> None:
    with closing(start(RUNNERS[0])) as engine:
        for number, tokens in enumerate(prompts):
            engine.add(Request(f"stored {number}", tokens))
        engine.run()
        assert engine.worker._worker is not None
        assert engine.worker._worker.drain(PATIENCE) == 0


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "behind"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_load_waits_for_no_forward_pass_that_it_need_not(
    start: Start, runner: str, beside: bool
) -> None:
    store(start, prompt(LENGTH))
    with closing(start(runner, beside=beside)) as engine:
        device, side = engine.device, engine.worker._worker
        assert device is not None
        assert side is not None
        # The first requests of an engine wait for its namespace.
        engine.add(Request("first", prompt(3, 7)))
        engine.run()
        long_pass = SimulatedEvent(device)
        long_pass.recorded = 1
        forward = engine._forward
        long_passes: list[SimpleNamespace] = []

        def compute(output: SimpleNamespace) -> None:
            planned = "load" in engine.states and engine.states["load"].loads
            if planned and not long_passes:
                long_passes.append(output)
                device.engine.wait_event(long_pass)
            forward(output)

        engine._forward = compute  # type: ignore[method-assign]
        engine.add(Request("prefill", prompt(30, 5), max_tokens=150))
        while "prefill" not in engine.running:
            engine.step()
        engine.add(Request("load", prompt(LENGTH)))
        state, transfer = engine.states["load"], side.model.transfers
        assert transfer is not None
        while not state.loads:
            engine.step()
        others = [stream for stream in device.streams if stream is not device.engine]

        def is_stuck() -> bool:
            with device.changed:
                return any(s.entries and s.entries[0][0] == "wait" for s in others)

        try:
            if beside:
                # Quick loads have ended within the step that planned them.
                until(lambda: bool(transfer._finished) or not transfer.loading)
            else:
                until(is_stuck)
                assert not transfer._finished
        finally:
            with device.changed:
                long_pass.reached = 1
                device.changed.notify_all()
        engine.run()
        assert state.loaded == HIT


def lives(
    start: Start, runner: str, seed: int, *, binds_first: bool = False
) -> tuple[list[str], int]:
    """Run random requests on a stored prefix.

    Returns what the device found wrong, and the tokens that were loaded.
    """
    chance = random.Random(seed)
    engine = start(runner, seed=seed, blocks=chance.choice([26, 40]), budget=chance.choice([9, 40]))
    engine.binds_first = binds_first
    states = []
    with closing(engine):
        assert engine.device is not None
        for number in range(chance.randrange(4, 12)):
            tokens = prompt(LENGTH, chance.randrange(2), 16)[: chance.randrange(17, LENGTH + 1)]
            engine.add(Request(f"r{number}", tokens, max_tokens=chance.randrange(1, 12)))
            states.append(engine.states[f"r{number}"])
            for _ in range(chance.randrange(4)):
                engine.step()
            if engine.states and chance.random() < 0.3:
                what = engine.abort if chance.random() < 0.5 else engine.preempt
                what(chance.choice(sorted(engine.states)))
        engine.run()
        assert engine.worker._worker is not None
        assert engine.worker._worker.drain(PATIENCE) == 0
        engine.device.finish()
        problems = [str(problem) for problem in engine.device.problems]
        engine.device.problems.clear()
    return problems, sum(state.loaded for state in states)


@pytest.mark.parametrize("seeds", variants([5, 1000], {5}))
@pytest.mark.parametrize("runner", RUNNERS)
def test_no_block_is_wrong(start: Start, runner: str, seeds: int) -> None:
    store(start, *(prompt(LENGTH, seed, 16) for seed in range(2)))
    found = [lives(start, runner, seed) for seed in range(seeds)]
    assert {seed: wrong for seed, (wrong, _) in enumerate(found) if wrong} == {}
    assert sum(loaded for _, loaded in found) > 10 * seeds


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_load_that_starts_before_its_blocks_are_zeroed_would_be_found(
    start: Start, runner: str
) -> None:
    store(start, *(prompt(LENGTH, seed, 16) for seed in range(2)))
    assert any(lives(start, runner, seed, binds_first=True)[0] for seed in range(4))


def test_where_vllm_frees_blocks_of_a_running_request_loads_stay_behind() -> None:
    sizes = {"block_size": 4, "num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
    full = FullAttentionSpec(**sizes)
    window = SlidingWindowSpec(**sizes, sliding_window=8)
    state = MambaSpec(
        block_size=4, shapes=((2, 2),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )
    config = make_config("/tmp/never")

    def keeps(*specs: object) -> bool:
        groups = make_groups(config, len(specs))
        groups.kv_cache_groups = [
            SimpleNamespace(layer_names=[f"layer {i}"], kv_cache_spec=spec)
            for i, spec in enumerate(specs)
        ]
        return CacheGroups(config, groups).keeps_blocks

    assert keeps(full)
    assert not keeps(window)
    assert not keeps(full, window)
    assert not keeps(state)
