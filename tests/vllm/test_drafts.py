"""Drafters with attention layers, in simulated engines."""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.assembly import Assembly
from kvshelf.config import Config
from kvshelf.errors import UnsupportedError
from kvshelf.metrics import Counters
from kvshelf.shelf.view import ShelfView
from kvshelf.transfer import loads, transfers
from kvshelf.vllm.groups import CacheGroups
from kvshelf.vllm.metadata import Facts
from kvshelf.vllm.scheduler import Engine
from kvshelf.vllm.scheduler import drafts as scheduler_drafts
from kvshelf.vllm.scheduler.drafts import DraftedChain, DraftScheduler
from kvshelf.vllm.scheduler.requests import RequestState
from kvshelf.vllm.speculation import draft_layers
from kvshelf.vllm.worker import loads as worker_loads
from kvshelf.vllm.worker import stores as worker_stores
from kvshelf.vllm.worker.drafter import Drafter
from kvshelf.vllm.worker.engine import WorkerEngine
from kvshelf.vllm.worker.parts import Part
from kvshelf.vllm.worker.side import WorkerSide
from tests.sim import engine_caches as configs
from tests.sim import engine_sides as sides
from tests.sim.engine_caches import speculation
from tests.support.clocks import Clock
from tests.support.prompts import prompt
from tests.support.waiting import PATIENCE, until
from tests.vllm.simulated import DRAFT_LAYER, SimulatedEngine, block_hashes, model_config

SIZE = 32
BLOCK = 16


def drafter(**fields: Any) -> SimpleNamespace:
    """An MTP drafter: its layers are in the model's checkpoint."""
    return speculation("mtp", **{"draft_model_config": model_config()} | fields)


class Drafting:
    """A simulated engine with vLLM's prefix cache, whose drafter reads KV of all tokens before."""

    def __init__(self, shelf: Path, *, blocks: int = 400, **options: Any) -> None:
        options = {"speculative_config": drafter(), "chunk_size": SIZE} | options
        self.engine = SimulatedEngine(shelf, "NHD", BLOCK, blocks=blocks, **options)
        self.cached: dict[bytes, int] = {}
        # The drafter's namespace follows from the model's.
        for _ in range(3):
            self.engine.step([])

    def serve(
        self,
        tokens: list[int],
        pieces: tuple[int, ...] = (),
        others: int = 0,
        drafts_last: bool = False,
    ) -> int:
        """Serve one prompt; return how many tokens came from the shelf.

        Parameters
        ----------
        tokens : list of int
        pieces : tuple of int
            Where steps end.
        others : int
            Tokens that another connector has loaded, without KV of the drafter.
        drafts_last : bool
            The drafter writes behind the forward pass, as in vLLM's second model runner.
        """
        engine = self.engine
        request = engine.request(tokens)
        block_ids = []
        for block in request.block_hashes[: (len(tokens) - 1) // BLOCK]:
            if block not in self.cached:
                break
            block_ids.append(self.cached[block])
        at_hand = len(block_ids) * BLOCK
        found = engine.matched(request, at_hand)
        block_ids += engine.blocks_for(len(tokens) - at_hand)
        start = at_hand
        if found and not others:
            engine.scheduler.allocated(request, (block_ids,), found)
            deadline = time.monotonic() + PATIENCE
            while request.request_id not in engine.step([]):
                assert time.monotonic() < deadline
            start += found
        if others:
            engine.put(tokens, block_ids, start, others)
            self.spoil(block_ids, start, others)
            start, found = others, 0
        for end in sorted({*(end for end in pieces if start < end < len(tokens)), len(tokens)}):
            good = all(engine.has_drafts(tokens, block_ids)[:start])
            engine.put(tokens, block_ids, start, end)
            draft = None
            if drafts_last:
                # What is there before the drafter has run is no KV.
                self.spoil(block_ids, start, end)
                draft = functools.partial(engine.put, tokens, block_ids, start, end)
            if not good:
                self.spoil(block_ids, start, end)
            engine.step([(request.request_id, start, end - start)], block_ids, draft)
            start = end
        for rank in engine.ranks:
            assert rank.worker.drain(PATIENCE) == 0
        engine.scheduler.finished(request.request_id)
        self.cached |= dict(zip(request.block_hashes, block_ids, strict=False))
        self.block_ids = block_ids
        return found

    def spoil(self, block_ids: list[int], start: int, end: int) -> None:
        """Write KV of the drafter that belongs to no prefix."""
        for rank in self.engine.ranks:
            held, slots = rank.held(block_ids, start, end)
            for impl, cache, _ in rank.draft_layers():
                impl.put(cache, slots, torch.randn(2, len(held), impl.heads, 16))

    def drafts_of(self, tokens: list[int]) -> list[bool]:
        """Whether the drafter's KV of each token of the last prompt is right."""
        return self.engine.has_drafts(tokens, self.block_ids)

    def close(self) -> None:
        self.engine.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Drafting]]:
    """Make engines on one shelf."""
    with ExitStack() as stack:

        def engine(**options: Any) -> Drafting:
            return stack.enter_context(closing(Drafting(tmp_path / "shelf", **options)))

        yield engine


def namespaces(shelf: Path) -> dict[str, dict[str, bytes]]:
    """All objects of a shelf: namespace folder, name, content."""
    return {
        folder.name: {
            str(file.relative_to(folder)): file.read_bytes()
            for file in folder.rglob("*.safetensors")
        }
        for folder in shelf.iterdir()
        if not folder.name.startswith(".")
    }


def of_drafter(engine: Drafting, shelf: Path) -> dict[str, bytes]:
    """The objects in the namespace of an engine's drafter."""
    namespace = sides.namespace_of_drafts(engine.engine.scheduler)
    assert namespace is not None
    return namespaces(shelf).get(namespace.folder, {})


# ------------------------------------------------------------------------- the drafter's KV


@pytest.mark.parametrize("others_fill", [False, True])
def test_a_drafter_that_runs_when_the_step_may_be_over_decides_only_on_its_own_kv(
    make: Callable[..., Drafting], tmp_path: Path, others_fill: bool
) -> None:
    """In the order of vLLM's second model runner."""
    tokens = prompt(70)
    first = make(others_fill=others_fill)
    first.serve(tokens, (20, 50), drafts_last=True)
    # Beside a connector that may fill the blocks meanwhile the drafter's KV is not stored.
    assert len(of_drafter(first, tmp_path / "shelf")) == (0 if others_fill else 2 * 2)
    second = make()
    assert second.serve(tokens) == 64
    assert all(second.drafts_of(tokens)[:64]) is not others_fill


@pytest.mark.parametrize("ends", ["cut", "failed"])
def test_a_load_of_a_drafters_kv_ends_with_the_models(
    make: Callable[..., Drafting], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    tokens = prompt(100)
    make().serve(tokens)
    engine, clock = make().engine, Clock(1e6)
    model, drafts = engine.scheduler.namespace, sides.namespace_of_drafts(engine.scheduler)
    assert model is not None
    gate, fetch = threading.Event(), ShelfView.fetch

    def hanging(view: ShelfView, *args: Any) -> Any:
        if view.fmt.namespace == drafts:
            gate.wait()
        return fetch(view, *args)

    monkeypatch.setattr(ShelfView, "fetch", hanging)
    for module in (loads, transfers):
        times = SimpleNamespace(monotonic=clock, perf_counter=time.perf_counter)
        monkeypatch.setattr(module, "time", times)
    monkeypatch.setattr(worker_loads, "IDLE_WAIT_SECONDS", 0.0)
    patience = (1.0,) if ends == "cut" else ()
    monkeypatch.setattr(engine.scheduler.admission, "begin", lambda *_, **__: (patience, 0))
    request = engine.request(tokens)
    found = engine.matched(request, 0)
    if ends == "failed":
        for file in (tmp_path / "shelf" / model.folder).rglob("*-1-*.safetensors"):
            file.write_bytes(bytes(file.stat().st_size))
    engine.scheduler.allocated(request, (engine.blocks_for(100),), found)
    ended = engine.step([])
    if ends == "cut":
        until(lambda: engine.worker.counters.snapshot().get("loaded_chunks") == 3)
        assert not ended | engine.step([])
        clock.now += 1.5
    until(lambda: bool(ended) or bool(engine.step([])))
    gate.set()


def test_kv_behind_what_another_connector_loaded_is_not_stored(
    make: Callable[..., Drafting], tmp_path: Path
) -> None:
    drafting = make()
    drafting.serve(prompt(100), others=40)
    assert of_drafter(drafting, tmp_path / "shelf") == {}
    drafting.serve([*prompt(100), *prompt(70, 1)])
    assert of_drafter(drafting, tmp_path / "shelf") == {}


def test_kv_of_steps_without_drafts_is_not_stored(
    make: Callable[..., Drafting], tmp_path: Path
) -> None:
    config = drafter(draft_model_config=model_config(max_model_len=70))
    drafting = make(speculative_config=config)
    # Three drafts and one more token fit behind 66 tokens.
    drafting.serve(prompt(80), (64,))
    assert len(of_drafter(drafting, tmp_path / "shelf")) == 2 * 2
    drafting.serve(prompt(80, 1), (40,))
    assert len(of_drafter(drafting, tmp_path / "shelf")) == 3 * 2


def test_after_other_weights_the_drafter_is_left_out(
    make: Callable[..., Drafting], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = make().engine.scheduler
    drafts = sides.drafts_of(scheduler)
    assert scheduler.namespace is not None
    before = scheduler.namespace.digest
    assert isinstance(drafts.chain(before, SIZE), DraftedChain)
    changed: Any = SimpleNamespace(digest=bytes(32))
    drafts.receive({}, changed, all_spoke=True)
    assert "weights were changed in place" in caplog.text
    for digest in (changed.digest, before):
        assert not isinstance(drafts.chain(digest, SIZE), DraftedChain)
    assert drafts.announcement is None


def _fail(*_: object, **__: object) -> None:
    raise RuntimeError("an error")


@pytest.mark.parametrize("where", ["asked", "to_load", "receive"])
def test_after_an_error_the_scheduler_leaves_the_drafter_out(
    make: Callable[..., Drafting], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    tokens = prompt(100)
    make().serve(tokens)
    drafting = make()
    drafts = sides.drafts_of(drafting.engine.scheduler)
    if where == "asked":
        monkeypatch.setattr(drafts, "_forget", _fail)
    elif where == "receive":
        monkeypatch.setattr(drafts._handshake, "receive", _fail)
    else:
        monkeypatch.setattr(scheduler_drafts, "_Progress", lambda *_: object())
    assert drafting.serve(tokens) == 96
    assert drafts.left_out


def test_a_worker_without_its_drafter_tells_so_when_its_first_report_is_lost(
    make: Callable[..., Drafting], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make().engine
    worker = engine.worker
    assert worker.drafter is not None
    worker.drafter.registration.disable("an error")
    with monkeypatch.context() as patch:
        metadata = worker.worker_metadata
        patch.setattr(worker, "worker_metadata", lambda: metadata() and None)
        engine.step([])
    engine.step([])
    assert sides.drafts_of(engine.scheduler).left_out


@pytest.mark.parametrize("where", ["slots_to_load", "slots_to_store"])
def test_an_error_of_the_drafter_in_a_worker_leaves_the_models_kv_alone(
    make: Callable[..., Drafting],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    first, second = make(), make()
    worker = (second if where == "slots_to_load" else first).engine.worker
    assert worker.drafter is not None
    module = worker_loads if where == "slots_to_load" else worker_stores
    compute, memory = getattr(module, where), worker.drafter.memory
    assert memory is not None

    def failing(slots: Any, *args: Any, **options: Any) -> Any:
        return _fail() if slots is memory.slots else compute(slots, *args, **options)

    monkeypatch.setattr(module, where, failing)
    first.serve(prompt(100))
    assert len(of_drafter(first, tmp_path / "shelf")) == (6 if where == "slots_to_load" else 0)
    assert second.serve(prompt(100)) == 96
    assert second.engine.worker.counters.snapshot()["loaded_tokens"] == 96
    assert not any(second.drafts_of(prompt(100))[:96])


@pytest.mark.parametrize(
    "fields",
    [
        {"draft_parallel_config": SimpleNamespace(tensor_parallel_size=2)},
        {"num_speculative_tokens_per_batch_size": [(1, 3)]},
        {"draft_model_config": None},
    ],
)
def test_drafters_that_are_left_out_change_nothing_else(
    make: Callable[..., Drafting],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, Any],
) -> None:
    tokens = prompt(70)
    make(speculative_config=drafter(**fields)).serve(tokens)
    assert make(speculative_config=drafter(**fields)).serve(tokens) == 64
    assert len(namespaces(tmp_path / "shelf")) == 1
    assert "fewer drafts are accepted" in caplog.text


def test_a_drafter_whose_layout_is_refused_is_left_out(
    make: Callable[..., Drafting], caplog: pytest.LogCaptureFixture
) -> None:
    config = drafter(draft_model_config=model_config(get_total_num_kv_heads=lambda: 3))
    engine = make(speculative_config=config, tensor_parallel=2)
    tokens = prompt(70)
    engine.serve(tokens)
    assert "fewer drafts are accepted" in caplog.text
    assert make(speculative_config=None).serve(tokens) == 64


def test_a_drafter_whose_weights_no_file_identifies_is_left_out(
    make: Callable[..., Drafting], caplog: pytest.LogCaptureFixture
) -> None:
    # The option `weights` names those of the model, which is another checkpoint.
    config = drafter(draft_model_config=model_config("another"))
    engine = make(speculative_config=config)
    said = "no file of this machine identifies its weights"
    until(lambda: engine.engine.step([]) or said in caplog.text)
    tokens = prompt(70)
    engine.serve(tokens)
    assert make(speculative_config=None).serve(tokens) == 64


def test_only_the_last_stage_has_a_drafter(tmp_path: Path) -> None:
    for rank, has in ((0, False), (1, True)):
        parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=2)
        config = SimpleNamespace(
            parallel_config=parallel,
            cache_config=SimpleNamespace(block_size=16, cache_dtype="auto", num_gpu_blocks=4),
            model_config=model_config(),
            load_config=None,
            scheduler_config=None,
            compilation_config=None,
            speculative_config=drafter(),
        )
        engine = WorkerEngine(config, Config(), rank=rank)
        assembly = Assembly(Config(), Counters(), lambda: None)
        side = Drafter.of(engine, Part(engine, assembly, assembly.counters), assembly.counters)
        assert (side is not None) is has


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_what_is_stored_of_a_drafter_belongs_to_its_prefix(data: st.DataObject) -> None:
    """Whatever engines do, a fresh engine gets right KV of the drafter, or none."""
    branches = [prompt(48, seed) for seed in range(3)]
    with ExitStack() as stack:
        shelf = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def make(**options: Any) -> Drafting:
            return stack.enter_context(closing(Drafting(shelf, **options)))

        engines = [make(), make(), make(speculative_config=None)]
        served = []
        for _ in range(data.draw(st.integers(1, 8), label="requests")):
            chosen = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
            tokens = [token for branch in chosen for token in branches[branch]] + [7]
            engine = engines[data.draw(st.integers(0, 2), label="engine")]
            pieces = data.draw(st.lists(st.integers(1, len(tokens)), max_size=2))
            if data.draw(st.booleans(), label="reset"):
                engine.cached.clear()
            engine.serve(tokens, tuple(pieces))
            served.append(tokens)
        for tokens in served:
            fresh = make()
            found = fresh.serve(tokens)
            drafts = fresh.engine.worker.counters.snapshot().get("draft_loaded_chunks", 0)
            assert all(fresh.drafts_of(tokens)[: int(min(drafts * SIZE, found))])


# ------------------------------------------------------------------------- whose layer is it


class Runner:
    """A model runner, which registers its caches."""

    def __init__(self, **drafter: Any) -> None:
        self.__dict__.update(drafter)

    def register(self, config: Any) -> frozenset[str]:
        return draft_layers(config)


@pytest.fixture
def config() -> SimpleNamespace:
    names = ["model.layers.0.attn", DRAFT_LAYER]
    layers = {name: SimpleNamespace() for name in names}
    return SimpleNamespace(
        speculative_config=speculation("eagle"),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


@pytest.mark.parametrize(
    ("runner", "expected"),
    [
        (Runner(drafter=SimpleNamespace(_draft_attn_layer_names={DRAFT_LAYER})), {DRAFT_LAYER}),
        # Gemma 4's drafter reads the model's own KV.
        (Runner(drafter=SimpleNamespace(_draft_attn_layer_names=set())), set()),
        (Runner(speculator=SimpleNamespace(draft_attn_layer_names={DRAFT_LAYER})), {DRAFT_LAYER}),
        # A stage without a drafter.
        (Runner(speculator=None), set()),
    ],
)
def test_the_model_runner_knows_the_drafters_layers(
    config: SimpleNamespace, runner: Runner, expected: set[str]
) -> None:
    assert runner.register(config) == expected


def test_the_model_runner_is_found_above_a_worker_with_a_drafter(config: SimpleNamespace) -> None:
    class Worker:
        drafter = None

        def register(self, config: Any) -> frozenset[str]:
            return draft_layers(config)

    class Calling(Runner):
        def register(self, config: Any) -> frozenset[str]:
            return Worker().register(config)

    Worker.__module__ = WorkerSide.__module__
    runner = Calling(drafter=SimpleNamespace(_draft_attn_layer_names={DRAFT_LAYER}))
    assert runner.register(config) == {DRAFT_LAYER}


@pytest.mark.parametrize("runner", [Runner(), Runner(drafter=SimpleNamespace())])
def test_an_engine_that_does_not_tell_its_drafters_layers_is_refused(
    config: SimpleNamespace, runner: Runner
) -> None:
    with pytest.raises(UnsupportedError, match=r"does not tell which layers .* method 'eagle'"):
        runner.register(config)


# ------------------------------------------------------------------------- vLLM's prefix cache


class Rows:
    """The scheduler side of a drafter, and requests for the same 64 tokens."""

    def __init__(self) -> None:
        engine = configs.vllm_config(
            {},
            block_size=BLOCK,
            blocks=9,
            model_config=model_config(),
            speculative_config=drafter(),
        )
        groups = CacheGroups(engine, None)
        self.side = DraftScheduler(Engine(engine, Config(), lambda: None, groups), {})
        self.chain = DraftedChain(bytes(32), bytes(32), SIZE)
        self.chain.extend(prompt(64))

    def request(self, name: str, at_hand: int = 0, **fields: Any) -> Any:
        hashes = block_hashes(prompt(64), BLOCK)
        made = SimpleNamespace(request_id=name, block_hashes=hashes, num_preemptions=0, **fields)
        self.side.asked(made, at_hand)
        return made

    def load_without_drafts(self, name: str) -> Any:
        request = self.request(name)
        self.side.to_load(name, self.chain, 0, 48)
        self.side.take_facts(0, Facts(without_drafts=[(name, 0)]))
        self.side.begin_step([(request, 48, 64)])
        return request

    def compute(self, request: Any, start: int = 0) -> None:
        self.side.begin_step([(request, start, 48)])
        self.side.begin_step([(request, 48, 64)])

    def stored(self, request: Any) -> bool:
        return self.side.to_store(request.request_id, self.chain, 0) is not None


def test_computing_blocks_anew_after_they_left_the_cache_makes_them_good() -> None:
    rows = Rows()
    assert not rows.stored(rows.load_without_drafts("loaded"))
    again = rows.request("again")
    rows.compute(again)
    assert rows.stored(again)
    later = rows.request("later", at_hand=48)
    rows.side.begin_step([(later, 48, 64)])
    assert rows.stored(later)


def test_a_spoiled_block_is_remembered_once_it_has_a_hash() -> None:
    rows = Rows()
    request = rows.request("growing")
    hashes, request.block_hashes = request.block_hashes, []
    rows.side.begin_step([(request, 0, 5000)])
    request.block_hashes = hashes
    rows.side.finished(RequestState(request, addressable=True, reads=True))
    later = rows.request("later", at_hand=48)
    rows.side.begin_step([(later, 48, 64)])
    assert not rows.stored(later)
