"""Hand-overs: vLLM's own scheduler drives the scheduler side of the connector of each engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.output import KVConnectorBlockState

from kvshelf.format.differences import how_to_unite
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL
from kvshelf.format.namespace import Namespace
from kvshelf.shelf.waits import WaitService
from kvshelf.vllm.adapters import AdapterDigests
from kvshelf.vllm.handover import Handover, no_handover, read_handover
from kvshelf.vllm.scheduler import SchedulerSide, handovers, hits
from kvshelf.vllm.scheduler.requests import Awaited, Promise
from tests.sim import engine_sides as sides
from tests.sim.engine import DRAFT_LAYER, EngineModel, Start
from tests.sim.engine_caches import PUBLISHED_MODELS, Layers, drafter
from tests.sim.engine_sides import Request, make_connector
from tests.sim.storage import ELSEWHERE
from tests.support.clocks import Clock
from tests.support.prompts import prompt
from tests.support.waiting import until

HYBRID = [model for model in PUBLISHED_MODELS if model not in ("plain", "gpt-oss")]
WITH_WINDOWS = ["DeepSeek V4", "Gemma 3", "two windows", "Llama 4", "ring and windows"]
CHUNK = 32
Waiting: TypeAlias = Callable[..., tuple["EngineModel", "Promised", Clock]]
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


def counts(engine: EngineModel) -> dict[str, float]:
    """What was counted of hand-overs."""
    begin = "handovers_"
    return {name.removeprefix(begin): n for name, n in engine.counted.items() if begin in name}


class Promised:
    """A hand-over to a consumer whose producer is the test.

    Parameters
    ----------
    engine : EngineModel
        The consumer.
    tokens : list of int
        The prompt.
    number : int
        Different for each attempt.
    """

    def __init__(self, engine: EngineModel, tokens: list[int], number: int = 1) -> None:
        self.engine, self.tokens = engine, tokens
        chunks, tail = engine.chunks_of(tokens), engine.tail_of(tokens)
        #: The chunks and the tail.
        self.pieces: list[Chunk] = chunks if tail is None else [*chunks, tail]
        self.handover = Handover(
            engine.format.namespace.digest,
            len(tokens),
            self.pieces[-1].key,
            0 if tail is None else tail.tokens,
            f"{number:032x}",
        )

    def params(self, **changed: Any) -> dict[str, Any]:
        """What a client sends, as JSON has it."""
        params: dict[str, Any] = json.loads(json.dumps(self.handover.params() | changed))
        return params

    def publish(self, first: int, end: int | None = None) -> None:
        """Put pieces on the shelf, as a producer does that stores elsewhere."""
        folder = self.engine.folder.with_name(self.engine.folder.name + ELSEWHERE)
        with EngineModel(str(folder), self.engine.groups, form="NHD", chunk_size=CHUNK) as producer:
            producer.settle()
            prefill(producer, self.tokens)
            for chunk in self.pieces[first:end]:
                objects = zip(
                    self.engine.objects_of(chunk), producer.take(chunk).values(), strict=True
                )
                self.engine.put(dict(objects))

    def give_up(self) -> None:
        """Leave the producer's marker."""
        folder = self.engine.folder / self.engine.format.namespace.folder
        self.engine.put({folder / f".kvshelf/gave-up/{self.handover.attempt}": b""})


def with_drafter(model: str, drafts: int) -> dict[str, Any]:
    """Options of an engine whose drafter has a group of its own, with larger blocks."""
    group = Layers("full", (), 16, (1,), drafts=(DRAFT_LAYER,))
    groups = [*PUBLISHED_MODELS[model], group]
    return {"groups": groups, "drafts": drafts, "drafter": drafter(drafts)}


def side_of(engine: EngineModel) -> SchedulerSide:
    side = engine.connector._scheduler
    assert isinstance(side, SchedulerSide)
    return side


def waits(engine: EngineModel, name: str) -> bool:
    """Whether a request waits for its hand-over, and has nothing of the engine meanwhile."""
    awaited = sides.awaited_of(side_of(engine), name)
    if awaited is None or awaited.outcome is not None:
        return False
    assert not any(engine.scheduler.kv_cache_manager.get_block_ids(name))
    return True


def step_until(engine: EngineModel, condition: Callable[[], bool]) -> None:
    """Step until something is so that other threads work on."""

    def stepped() -> bool:
        engine.step()
        return condition()

    until(stepped)


def prefill(engine: EngineModel, tokens: list[int], name: str = "prefill") -> Handover:
    """Prefill a prompt for another engine; return what is promised."""
    engine.add(name, tokens, answer=1, transfer=ASKED)
    engine.finish()
    handover = read_handover(engine.params[name])
    assert handover is not None
    assert handover.params() == engine.params[name]
    engine.drain()
    return handover


@pytest.fixture
def engine(start: Start) -> EngineModel:
    return start()


# ------------------------------------------------------------------------------- the producer


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("length", "budget"), [(1, 64), (7, 64), (31, 30), (32, 64), (33, 32), (64, 64), (203, 64)]
)
def test_whole_prompt_is_promised_and_stored(
    start: Start, length: int, budget: int, asynchronous: bool
) -> None:
    engine = start(asynchronous=asynchronous, budget=budget)
    tokens = prompt(length)
    handover = prefill(engine, tokens)
    chunks, tail = engine.chunks_of(tokens), engine.tail_of(tokens)
    last = tail or chunks[-1]
    assert handover.namespace == engine.format.namespace.digest
    assert (handover.tokens, handover.tail) == (length, length % CHUNK)
    assert handover.key == last.key
    assert all(map(engine.has_stored, [*chunks, last]))
    stores = [op for meta in engine.metas for op in meta.stores]
    assert {op.attempt for op in stores} == {handover.attempt}
    assert counts(engine) == {"promised": 1}
    consumer = start()
    consumer.add("r", tokens, answer=1, transfer=handover.params())
    consumer.finish()
    assert consumer.loaded("r") == length


def test_promise_of_earlier_weights_is_forgotten(engine: EngineModel) -> None:
    record = engine.format.namespace.record
    old, new = (Namespace(record | {"weights": f"user:{name}"}) for name in ("old", "new"))
    promise = Promise()
    for namespace, first, end in ((old, 0, 3), (new, 2, 4)):
        for chunk in KeyChain(namespace.digest, CHUNK).extend(prompt(4 * CHUNK))[first:end]:
            promise.add(namespace, FULL, chunk)
    # The first chunks are in the earlier namespace alone.
    assert promise.handover(engine.side.engine.groups, 4 * CHUNK, CHUNK) is None


def test_while_a_rank_can_write_nothing_nothing_is_promised(engine: EngineModel) -> None:
    sides.tell(side_of(engine), writes_refused=True)
    engine.add("other", prompt(203, seed=1), answer=1, transfer=ASKED)
    engine.finish()
    assert engine.params["other"] == no_handover()
    sides.tell(side_of(engine), writes_refused=False)
    engine.add("third", prompt(203, seed=2), answer=1, transfer=ASKED)
    engine.finish()
    assert engine.params["third"]["kvshelf_tokens"] == 203


def test_prompt_that_is_aborted_is_not_promised(start: Start) -> None:
    engine = start(budget=32)
    engine.add("r", prompt(203), answer=1, transfer=ASKED)
    while not any(meta.stores for meta in engine.metas):
        engine.step()
    engine.abort("r")
    engine.finish()
    assert counts(engine) == {}


def test_after_an_error_nothing_is_promised(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(budget=64)
    engine.add("r", prompt(203), answer=1, transfer=ASKED)
    engine.wait_for_lookup("r")

    def fail(*_: object) -> None:
        raise RuntimeError("planning failed")

    with monkeypatch.context() as patch:
        # What vLLM says of the step cannot be read.
        patch.setattr(KVConnectorBlockState, "get_block_ids", fail)
        engine.step()
    engine.finish()
    assert "planning failed" in caplog.text
    assert engine.params["r"] == no_handover()


@pytest.mark.parametrize("model", HYBRID)
def test_of_a_prompt_without_a_boundary_before_its_end_nothing_is_promised(
    start: Start, model: str
) -> None:
    engine = start(model)
    for name, transfer in (("asked", ASKED), ("not asked", None)):
        engine.add(name, prompt(32), answer=1, transfer=transfer)
        engine.finish()
    assert engine.params == {"asked": no_handover(), "not asked": None}


# ------------------------------------------------------------------------------- the consumer


@pytest.fixture
def waiting(start: Start) -> Waiting:
    """Start a consumer with a clock of its own and one request of 203 tokens that waits."""

    def make(**options: Any) -> tuple[EngineModel, Promised, Clock]:
        params = options.pop("params", {})
        engine = start(**options)
        clock = sides.set_clock(side_of(engine))
        promised = Promised(engine, prompt(203))
        engine.add("r", promised.tokens, answer=1, transfer=promised.params(**params))
        step_until(engine, lambda: awaited_of(engine).wait is not None)
        assert waits(engine, "r")
        return engine, promised, clock

    return make


def awaited_of(engine: EngineModel, name: str = "r") -> Awaited:
    awaited = sides.awaited_of(side_of(engine), name)
    assert awaited is not None
    return awaited


@pytest.mark.parametrize(("wanted", "expected"), [(3, 3), (1000, 30), (None, 30)])
def test_params_may_shorten_the_wait_only(
    waiting: Waiting, wanted: float | None, expected: float
) -> None:
    engine, _, clock = waiting(params={"kvshelf_wait_s": wanted}, budget=400)
    clock.now += expected - 0.01
    engine.step()
    assert waits(engine, "r")
    clock.now += 0.01
    engine.step()
    assert engine.computed("r") == 203


FORGED: dict[str, dict[str, Any]] = {
    "another prompt": {"kvshelf_key": "0" * 64},
    "more tokens than the prompt": {"kvshelf_tokens": 235},
    "as many tokens as there are": {"kvshelf_tokens": 1 << 40},
    "no tail": {"kvshelf_tail": 0},
    "a tail of more than a chunk": {"kvshelf_tail": 203},
    "a prefix with the key of all": {"kvshelf_tokens": 192, "kvshelf_tail": 0},
    "one token": {"kvshelf_tokens": 1, "kvshelf_tail": 1},
    "lines in the log": {"kvshelf_attempt": "\n\x1b[31mERROR all is lost\n"},
    "a number that is none": {"kvshelf_tokens": float("nan")},
    "a later version": {"kvshelf_version": 2},
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("how", FORGED)
def test_forged_params_make_no_request_wait(
    start: Start, caplog: pytest.LogCaptureFixture, how: str, asynchronous: bool
) -> None:
    engine = start(asynchronous=asynchronous)
    promised = Promised(engine, prompt(203))
    promised.publish(0, 4)
    engine.add("r", promised.tokens, transfer=promised.handover.params() | FORGED[how])
    engine.finish()
    assert engine.loaded("r") == 128
    assert counts(engine) == {"invalid": 1}
    (line,) = [line for line in caplog.messages if "does not wait for its hand-over" in line]
    assert line.isprintable() and line.isascii()


@pytest.mark.parametrize("why", ["reads no cache", "another salt", "an adapter without a digest"])
def test_request_that_may_not_load_what_is_handed_over_does_not_wait(
    start: Start, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    engine = start(read_only=True)
    promised = Promised(engine, prompt(203))
    promised.publish(0)
    if why == "an adapter without a digest":
        monkeypatch.setattr(AdapterDigests, "trusts", lambda *_: False)
    options = {"skips": why == "reads no cache", "cache_salt": "a tenant" * (why == "another salt")}
    engine.add("r", promised.tokens, transfer=promised.params(), **options)
    engine.finish()
    assert engine.loaded("r") == 0
    assert counts(engine) == {"invalid": 1}


def test_another_namespace_is_noticed_before_a_wait(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    producer = start(chunk_size=64)
    handover = prefill(producer, prompt(203))
    engine = start()
    for number in range(3):
        engine.add(f"r{number}", prompt(203, seed=number), transfer=handover.params())
    engine.finish()
    assert counts(engine) == {"other_namespace": 3}
    until(lambda: any("chunk_size is 64 there and 32 here" in line for line in caplog.messages))
    (line,) = [line for line in caplog.messages if "KV of namespace" in line]
    assert "set chunk_size to the same number in both engines" in line


def test_while_the_namespace_is_not_known_a_request_waits_within_its_deadline(start: Start) -> None:
    engine = start(identity_seconds=0, handover_wait_s=30)
    clock = sides.set_clock(side_of(engine))
    promised = Promised(engine, prompt(203))
    promised.publish(0)
    lookups = sides.take_lookups(side_of(engine))
    engine.add("r", promised.tokens, answer=1, transfer=promised.params())
    other = Promised(engine, prompt(203, seed=1))
    engine.add("late", other.tokens, answer=1, transfer=other.params(kvshelf_wait_s=1))
    for _ in range(5):
        engine.step()
    assert waits(engine, "r") and waits(engine, "late")
    clock.now += 1
    engine.step()
    assert engine.computed("late") > 0
    assert waits(engine, "r")
    sides.give_lookups(side_of(engine), lookups)
    engine.finish()
    assert counts(engine) == {"late": 1, "complete": 1}


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("model", ["Gemma 3", "DeepSeek V4"])
def test_of_windows_all_but_a_token_is_handed_over(start: Start, model: str, drafts: int) -> None:
    drafting = with_drafter(model, drafts) if drafts else {}
    producer, consumer = (start(model, **drafting) for _ in range(2))
    tokens = prompt(353)
    # Of the prompt that this one continues the producer has KV in its own cache.
    prefill(producer, tokens[:203], "before")
    handover = prefill(producer, tokens)
    assert handover.tokens == 352
    consumer.add("r", tokens, answer=1, transfer=handover.params())
    consumer.finish()
    assert consumer.loaded("r") == handover.tokens
    assert consumer.computed("r") == 1 + consumer.drafts
    [load] = consumer.loads.values()
    assert [chunk.index for chunk in load.drafts] == [*range(11)] * bool(drafting)
    assert not consumer.misled


@pytest.mark.parametrize("model", WITH_WINDOWS)
@pytest.mark.parametrize(
    ("item", "expected"),
    [((180, 200), 160), ((160, 203), 160), ((100, 200), 96), ((0, 203), 0)],
)
def test_hybrid_models_use_no_end_within_an_image(
    start: Start, monkeypatch: pytest.MonkeyPatch, model: str, item: tuple[int, int], expected: int
) -> None:
    tokens = prompt(203)
    handover = prefill(start(model, interval=1), tokens)
    assert handover.tokens == 192
    # An image whose tokens attend to each other, though these keys do not have it.
    engine = start(model, model={"is_mm_prefix_lm": True})
    monkeypatch.setattr(hits, "items_of", lambda request: [item])
    engine.add("r", tokens, answer=1, transfer=handover.params())
    engine.finish()
    assert engine.loaded("r") == expected
    assert counts(engine) == {"complete": 1}
    # Engines that have such images store what hits before them need.
    other = prompt(203, seed=1)
    start(model, model={"is_mm_prefix_lm": True}, interval=100).run(other)
    assert engine.run(other) == [expected]


@pytest.mark.parametrize(
    ("has_tails", "items", "expected"), [(True, [(180, 203)], 176), (False, [], 192)]
)
def test_prompt_that_is_handed_over_whole_is_loaded_up_to_a_tail_or_an_image_at_its_end(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    has_tails: bool,
    items: list[tuple[int, int]],
    expected: int,
) -> None:
    """The last token would be computed once more, without the others of its image."""
    tokens = prompt(203)
    handover = prefill(start(), tokens)
    monkeypatch.setattr(hits, "items_of", lambda request: items)
    engine = start(model={"is_mm_prefix_lm": True})
    side_of(engine).engine.tails = has_tails
    engine.add("r", tokens, answer=1, transfer=handover.params())
    engine.finish()
    assert engine.loaded("r") == expected
    assert counts(engine) == {"complete": 1}


@pytest.mark.parametrize(("model", "end"), [("plain", "late"), ("Gemma 3", "complete")])
def test_load_that_fails_ends_no_wait_that_goes_on(
    start: Start, monkeypatch: pytest.MonkeyPatch, model: str, end: str
) -> None:
    monkeypatch.setattr(handovers, "MAX_WAITING", 1)
    tokens = prompt(203)
    producer = start(model)
    handover = prefill(producer, tokens)
    last = producer.chunks_of(tokens)[5]
    content = producer.take(last)
    if end == "late":
        tail = producer.tail_of(tokens)
        assert tail is not None
        producer.take(tail)
    engine = start(model, handover_wait_s=5)
    engine.add("r", tokens, answer=1, transfer=handover.params())
    step_until(engine, lambda: awaited_of(engine).wait is not None)
    sides.tell(side_of(engine), failures=[(last.key, False)])
    engine.step()
    assert waits(engine, "r")
    producer.put(content)
    engine.finish()
    # What the wait has seen counts more than what failed before.
    assert engine.loaded("r") == 192
    assert counts(engine) == {end: 1}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_prompt_is_stored_and_handed_over_beside_any_other_request(
    start: Start, ranks: int, asynchronous: bool
) -> None:
    hit, tokens = prompt(200), prompt(203, seed=1)
    start().run(hit)
    engine = start(tensor_parallel=ranks, asynchronous=asynchronous, budget=600)
    engine.add("hit", hit)
    engine.add("computed", prompt(70, seed=2))
    # It ends with the first step.
    engine.add("r", tokens, answer=1, transfer=ASKED)
    for name in ("hit", "computed", "r"):
        engine.wait_for_lookup(name)
    engine.finish()
    assert engine.loaded("hit") == 192
    assert engine.params["r"] is not None
    tail = engine.tail_of(tokens)
    assert tail is not None
    assert all(map(engine.has_stored, [*engine.chunks_of(tokens), tail]))


def test_other_weights_end_the_wait(waiting: Waiting) -> None:
    engine, promised, _ = waiting()
    engine.load_weights(1)
    engine.reset(running=True)
    engine.settle()
    promised.publish(0)
    engine.finish()
    assert engine.loaded("r") == 0
    assert counts(engine) == {"other_namespace": 1}
    assert not sides.waits_for_objects(side_of(engine))


@pytest.mark.parametrize("number", [0, 1])
def test_of_two_shelves_in_one_engine_the_first_hands_over(tmp_path: Path, number: int) -> None:
    made = make_connector(tmp_path / "first")

    class Parent:
        def __init__(self) -> None:
            self._connectors = [made, object()][1 - number :]
            self._kv_transfer_config = SimpleNamespace(
                kv_load_failure_policy="recompute", kv_role="kv_both"
            )
            self.child = make_connector(tmp_path / "second")

    # By its name the constructor that is running is found.
    Parent.__name__ = "MultiConnector"
    child = Parent().child
    request = Request("r", prompt(40), kv_transfer_params={"kvshelf_tokens": "malformed"})
    child.on_new_request(request)
    counted = child.get_kv_connector_stats()
    assert (counted is not None and "handovers_invalid" in str(counted.data)) == (number == 0)
    child.shutdown()
    made.shutdown()


# ----------------------------------------------------------------------------------- the steps


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long steps would have slept."""
    slept: list[float] = []

    def sleep(self: WaitService, seconds: float) -> bool:
        slept.append(seconds)
        return False

    monkeypatch.setattr(WaitService, "sleep", sleep)
    return slept


def test_step_sleeps_while_only_waiting_requests_are_left(
    rests: list[float], waiting: Waiting
) -> None:
    engine, promised, clock = waiting()
    rests.clear()
    engine.step()
    assert rests == [0.01]
    # Until the deadline, if that comes sooner.
    clock.now += 29.996
    engine.step()
    assert rests[1:] == [pytest.approx(0.004)]
    promised.publish(0)
    step_until(engine, lambda: not waits(engine, "r"))
    del rests[:]
    engine.finish()
    assert rests == []


def test_no_step_sleeps_where_others_wait_for_it(rests: list[float], waiting: Waiting) -> None:
    engine, _, _ = waiting(data_parallel=2)
    del rests[:]
    for _ in range(3):
        engine.step()
    assert rests == []
    assert waits(engine, "r")


# --------------------------------------------------------------------------- other namespaces


RECORD: dict[str, Any] = {
    "format": "kvshelf/1",
    "weights": "user:test",
    "chunk_size": 256,
    "kv_dtype": "BF16",
    "layouts": ["cpu-vec-bf16-b128"] * 4,
    "shards": 2,
}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {"layouts": ["cpu-vec-bf16-b64"] * 4},
            "layouts is 'cpu-vec-bf16-b64' there and 'cpu-vec-bf16-b128' here:"
            " set layout: canonical in both engines",
        ),
        (
            {"layouts": ["opaque-0123456789abcdef"] * 4, "shards": 4},
            "layouts is 'opaque-0123456789abcdef' there and 'cpu-vec-bf16-b128' here:"
            " the layout of the KV cache is unknown: run the same release of vLLM with the same"
            " --tensor-parallel-size, --block-size and attention backend in both engines",
        ),
        (
            {"version": "a\nb"},
            r"version is 'a\nb' there and absent here: set version to the same string in both"
            " engines",
        ),
        (
            {"weights": "x" * 100, "chunk_size": 128},
            f"weights is '{'x' * 59}… there and 'user:test' here: serve the same weights, or set"
            " weights to the same name:<text> in both engines",
        ),
        (
            {"precision": ["8 bfloat16"]},
            "precision is '8 bfloat16' there and absent here: choose kernels of one precision by"
            " --linear-backend and --moe-backend, with the same environment variables, in both"
            " engines",
        ),
        (
            {"head_sizes": [64]},
            "head_sizes is 64 there and absent here: serve the model with the same configuration"
            " in both engines",
        ),
    ],
)
def test_what_to_set_so_that_engines_share_a_namespace(changed: dict[str, Any], line: str) -> None:
    assert how_to_unite(Namespace(RECORD), Namespace(RECORD | changed)) == line
