"""Hybrid models on real engines: sliding windows, gated delta nets, short convolutions.

What a hit gives is compared to the bit with vLLM's own hit of the same length in memory, and with
the answers of an engine whose connector does nothing. Models are those of
``tests/support/make_hybrid_model.py``; what is not marked slow is shared by few engines.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import (
    INERT_CONNECTOR,
    NEAR_TIE,
    SHELF_CONNECTOR,
    Answer,
    Engine,
    assert_same,
    assert_same_up_to_ties,
)
from tests.support.fleet import PATIENT, Ask, Engines, MakePrompt, of_ranks
from tests.support.make_hybrid_model import make_hybrid_model
from tests.support.variants import variants
from tests.support.waiting import until
from tests.vllm.hybrid_files import HybridFiles, forge
from tests.vllm.shelf_files import DAMAGE, ShelfFiles


@dataclass(frozen=True)
class Family:
    """What is known beforehand about a model.

    Attributes
    ----------
    chunk : int
        Tokens of a chunk: vLLM's block where there are states.
    kinds : set of str
    part : str
        A part of a state to be forged; empty without states.
    steady : bool
        What is computed does not depend on the sizes of steps, up to rounding. That of LFM2 does
        on CPUs with vLLM 0.32: keys behind the norm of heads are others in other steps. So its
        answers are compared only with those of the same steps.
    arguments : tuple of (str, Any)
        Of its engines. vLLM would take bfloat16 for float32 weights. States are float32
        everywhere, as some processors have them in any case.
    """

    chunk: int
    kinds: frozenset[str]
    part: str = ""
    arguments: tuple[tuple[str, Any], ...] = ()
    steady: bool = True


_FLOAT = (("dtype", "float32"),)
_FLOAT_STATES = (("mamba_ssm_cache_dtype", "float32"),)
FAMILIES = {
    "gemma3": Family(256, frozenset({"full", "window"}), "", _FLOAT),
    "qwen3-next": Family(128, frozenset({"full", "state"}), "ssm", _FLOAT_STATES),
    "qwen3-next-wide": Family(640, frozenset({"full", "state"}), "ssm", _FLOAT_STATES),
    "lfm2": Family(128, frozenset({"full", "state"}), "conv", _FLOAT, steady=False),
}


#: Of the models with states, one is always run.
QUICK = {"qwen3-next"}
SPOILT = ["missing", "flipped byte of the payload", "truncated"]


def of_families(condition: Callable[[Family], bool]) -> Any:
    """Run a test with the models of some families only."""
    names = [name for name in FAMILIES if condition(FAMILIES[name])]
    return pytest.mark.parametrize("hybrid", variants(names, QUICK), indirect=True, scope="module")


with_states = of_families(lambda family: "state" in family.kinds)
with_windows = of_families(lambda family: "window" in family.kinds)


@dataclass
class Hybrid:
    """A model of one family, its shelf and its engines."""

    engines: Engines
    name: str
    family: Family
    model: Path
    shelf: HybridFiles

    def start(self, role: str, *, inert: bool = False, **arguments: Any) -> Engine:
        """Start an engine; it stores and loads unless it is inert."""
        extra = arguments.pop("extra_config", {})
        connector: dict[str, Any] = {"connector": INERT_CONNECTOR}
        if not inert:
            extra = {"shared_storage_path": str(self.shelf.root), **PATIENT, **extra}
            connector = {"connector": SHELF_CONNECTOR, "extra_config": extra}
        arguments = {**dict(self.family.arguments), "core": int(inert), **connector, **arguments}
        return self.engines.start(f"{self.name}, {role}", model=self.model, **arguments)


@pytest.fixture(scope="module")
def hybrids(engines: Engines) -> Callable[..., Hybrid]:
    """Make a model with a shelf of its own."""
    root = engines.places.root

    def make(name: str, purpose: str = "") -> Hybrid:
        model = make_hybrid_model(root / "models" / name, name)
        return Hybrid(
            engines, name, FAMILIES[name], model, HybridFiles(root / f"{name} shelf{purpose}")
        )

    return make


@pytest.fixture(scope="module", params=variants(FAMILIES, QUICK))
def hybrid(hybrids: Callable[..., Hybrid], request: pytest.FixtureRequest) -> Hybrid:
    return hybrids(request.param)


@pytest.fixture(scope="module")
def first(hybrid: Hybrid) -> Iterator[Engine]:
    """The engine that fills the shelf."""
    engine = hybrid.start("first").wait_ready()
    yield engine
    engine.stop(at_once=True)


@pytest.fixture(scope="module")
def inert(hybrid: Hybrid) -> Iterator[Engine]:
    engine = hybrid.start("inert", inert=True).wait_ready()
    yield engine
    engine.stop(at_once=True)


def bits(answer: Answer) -> tuple[list[int], list[float]]:
    """What must be equal to the last bit."""
    return answer.tokens, answer.logprobs


def forget(engine: Engine) -> None:
    """Empty vLLM's prefix cache and the connector's memory of what is stored and what failed."""
    engine.reset_connector()


def without_cache(inert: Engine, tokens: list[int], **options: Any) -> Answer:
    inert.reset_prefix_cache()
    return inert.generate(tokens, **options)


@pytest.fixture
def ask(hybrid: Hybrid) -> Ask:
    """Let an engine answer as without a cache, up to the rounding of steps of other sizes."""

    def ask(engine: Engine, tokens: list[int], hit: int | None = None) -> Answer:
        answer = engine.generate(tokens)
        assert hit is None or answer.shelf_tokens == hit
        if hybrid.family.steady:
            # With a salt that nobody else has, nothing comes from a cache.
            alone = engine.generate(tokens, cache_salt=secrets.token_hex())
            assert alone.cached_tokens == 0
            assert_same(answer, alone, NEAR_TIE)
        return answer

    return ask


# ---------------------------------------------------------------------------------- all families


def test_a_hit_is_as_one_in_memory(hybrid: Hybrid, first: Engine, prompt: MakePrompt) -> None:
    """Must be the first test with this engine."""
    chunk = hybrid.family.chunk
    hit = 3 * chunk
    tokens = prompt(hit + 40)
    cold = first.generate(tokens)
    assert (cold.cached_tokens, cold.shelf_tokens) == (0, 0)
    hybrid.shelf.wait_hit(tokens, hit)
    assert hybrid.shelf.chunk == chunk
    assert hybrid.shelf.kinds == hybrid.family.kinds
    own = first.generate(tokens)
    assert (own.cached_tokens, own.shelf_tokens) == (hit, 0)
    first.reset_prefix_cache()
    loaded = first.generate(tokens)
    assert (loaded.cached_tokens, loaded.shelf_tokens) == (hit, hit)
    assert bits(loaded) == bits(own)
    # What was loaded is in memory now, and is continued.
    again = first.generate(tokens)
    assert (again.cached_tokens, again.shelf_tokens) == (hit, 0)
    assert bits(again) == bits(own)
    assert hybrid.shelf.check_all()
    assert len(hybrid.shelf.namespaces()) == 1


@pytest.mark.slow
def test_another_engine_loads(
    hybrid: Hybrid, first: Engine, inert: Engine, prompt: MakePrompt
) -> None:
    """With the same steps, also where answers depend on them."""
    hit = 3 * hybrid.family.chunk
    tokens = prompt(hit + 40)
    first.reset_prefix_cache()
    assert bits(first.generate(tokens)) == bits(without_cache(inert, tokens))
    hybrid.shelf.wait_hit(tokens, hit)
    of_inert = inert.generate(tokens)
    assert of_inert.cached_tokens == hit
    # The first request of a fresh engine hits.
    with hybrid.start("second") as engine:
        loaded = engine.generate(tokens)
        assert (loaded.cached_tokens, loaded.shelf_tokens) == (hit, hit)
        assert bits(loaded) == bits(of_inert)


@of_families(lambda family: family.chunk <= 256)
def test_a_prompt_that_ends_with_a_chunk_computes_some_of_it(
    hybrid: Hybrid, first: Engine, ask: Ask, prompt: MakePrompt
) -> None:
    """A hit of all tokens would continue from a state that has seen the last token already.

    Not with blocks of 640: there vLLM 0.32 ends steps at multiples of 128 on CPUs, and so has no
    state at the last block boundary before such a prompt's end.
    """
    chunk = hybrid.family.chunk
    tokens = prompt(4 * chunk)
    first.generate(tokens)
    hybrid.shelf.wait_hit(tokens, 3 * chunk)
    first.reset_prefix_cache()
    ask(first, tokens, 3 * chunk)


def test_a_hit_goes_on_from_what_is_in_memory(
    hybrid: Hybrid, first: Engine, ask: Ask, prompt: MakePrompt
) -> None:
    chunk = hybrid.family.chunk
    tokens = prompt(4 * chunk + 20)
    first.generate(tokens)
    hybrid.shelf.wait_hit(tokens, 4 * chunk)
    first.reset_prefix_cache()
    first.generate(tokens[: 2 * chunk + 10])
    answer = ask(first, tokens, 2 * chunk)
    assert answer.cached_tokens == 4 * chunk
    own = first.generate(tokens)
    assert (own.cached_tokens, own.shelf_tokens) == (4 * chunk, 0)
    assert bits(answer) == bits(own)


@pytest.mark.slow
def test_small_steps_store_what_large_ones_load(
    hybrid: Hybrid, first: Engine, ask: Ask, prompt: MakePrompt
) -> None:
    """Steps of 300 tokens end where no block does, unless vLLM shortens them."""
    chunk = hybrid.family.chunk
    hit = 3 * chunk
    tokens = prompt(hit + 30)
    with hybrid.start("small steps", max_num_batched_tokens=300) as engine:
        ask(engine, tokens, 0)
        hybrid.shelf.wait_hit(tokens, hit)
        own = engine.generate(tokens)
        assert (own.cached_tokens, own.shelf_tokens) == (hit, 0)
        forget(engine)
        loaded = engine.generate(tokens)
        assert loaded.shelf_tokens == hit
        assert bits(loaded) == bits(own)
    forget(first)
    answer = first.generate(tokens)
    assert answer.shelf_tokens == hit
    assert bits(answer) == bits(own)


def test_a_conversation_goes_on(
    hybrid: Hybrid, first: Engine, ask: Ask, prompt: MakePrompt
) -> None:
    chunk = hybrid.family.chunk
    tokens = prompt(2 * chunk + 50)
    answer = first.generate(tokens, max_tokens=60)
    hybrid.shelf.wait_hit(tokens, 2 * chunk)
    following = tokens + answer.tokens + prompt(chunk)
    first.reset_prefix_cache()
    ask(first, following, 2 * chunk)
    hybrid.shelf.wait_hit(following, 3 * chunk)
    first.reset_prefix_cache()
    ask(first, following, 3 * chunk)


@pytest.mark.slow
def test_aborted_requests_leave_nothing_wrong(
    hybrid: Hybrid, first: Engine, ask: Ask, prompt: MakePrompt
) -> None:
    chunk = hybrid.family.chunk
    prompts = [prompt(3 * chunk + 10 * number) for number in range(6)]
    requests = [first.submit(tokens, max_tokens=40) for tokens in prompts]
    for request in requests[::2]:
        request.wait_first_token()
        request.abort()
    for request in requests:
        request.result()
    first.reset_prefix_cache()
    for tokens in prompts:
        ask(first, tokens)
    hybrid.shelf.wait_quiet()
    hybrid.shelf.check_all()


def blocks(engine: Engine) -> int:
    """Return the number of blocks of an engine's KV cache."""
    [count] = set(re.findall(r'num_gpu_blocks="(\d+)"', engine.metrics_text()))
    return int(count)


@pytest.mark.slow
def test_the_allocator_has_as_many_blocks_as_without_a_shelf(first: Engine, inert: Engine) -> None:
    assert blocks(first) == blocks(inert) > 0


# ---------------------------------------------------------------------------------------- states


def two_boundaries(
    hybrid: Hybrid, engine: Engine, prompt: MakePrompt
) -> tuple[list[int], int, int]:
    """Store a prompt with states at two boundaries; return it with both, the longer one last."""
    chunk = hybrid.family.chunk
    short = prompt(2 * chunk + 5)
    tokens = short + prompt(2 * chunk + 10)
    # What was asked before is where a state is worth its bytes.
    for stored, hit in ((short, 2 * chunk), (tokens, 4 * chunk)):
        engine.generate(stored)
        hybrid.shelf.wait_hit(stored, hit)
    hybrid.shelf.wait_quiet()
    forget(engine)
    return tokens, 2 * chunk, 4 * chunk


@with_states
@pytest.mark.parametrize("damage", variants(SPOILT, {"flipped byte of the payload"}))
def test_without_its_state_a_hit_is_shorter(
    hybrid: Hybrid, first: Engine, ask: Ask, prompt: MakePrompt, damage: str
) -> None:
    tokens, shorter, longer = two_boundaries(hybrid, first, prompt)
    ask(first, tokens, longer)
    path = hybrid.shelf.of_kind(tokens, "state")[longer // hybrid.family.chunk - 1][0]
    if damage == "missing":
        path.unlink()
    else:
        DAMAGE[damage](path)
    forget(first)
    # What a load does not bring whole is computed.
    assert ask(first, tokens).cached_tokens == (0 if damage.startswith("flipped") else shorter)
    # The state was computed again, and is stored again.
    hybrid.shelf.wait_hit(tokens, longer)
    hybrid.shelf.wait_quiet()

    def hits() -> bool:
        first.reset_prefix_cache()
        return ask(first, tokens).shelf_tokens == longer

    until(hits, "a hit on the repaired state")


@with_states
def test_behind_a_damaged_chunk_nothing_is_loaded(
    hybrid: Hybrid, first: Engine, ask: Ask, prompt: MakePrompt
) -> None:
    tokens, _, longer = two_boundaries(hybrid, first, prompt)
    path = hybrid.shelf.of_kind(tokens, "full")[longer // hybrid.family.chunk - 1][0]
    DAMAGE["flipped byte of the payload"](path)
    assert ask(first, tokens).cached_tokens == 0


@with_states
def test_the_answer_depends_on_one_byte_of_a_state(
    hybrid: Hybrid, first: Engine, prompt: MakePrompt
) -> None:
    """The control of this module: with a wrong state whose hash is right, the answer is wrong."""
    hit = 2 * hybrid.family.chunk
    tokens = prompt(hit + 1)
    first.generate(tokens)
    hybrid.shelf.wait_hit(tokens, hit)
    hybrid.shelf.wait_quiet()
    forget(first)
    right = first.generate(tokens)
    assert right.shelf_tokens == hit
    [path, *_] = hybrid.shelf.of_kind(tokens, "state")[1]
    forge(path, hybrid.family.part)
    hybrid.shelf.check_all()
    forget(first)
    wrong = first.generate(tokens)
    assert wrong.shelf_tokens == hit
    assert bits(wrong) != bits(right)


@with_states
def test_junctions_of_shared_prefixes_are_hits(
    hybrid: Hybrid, first: Engine, ask: Ask, prompt: MakePrompt
) -> None:
    """The second prompt of a stem makes the state that the third one loads elsewhere."""
    chunk = hybrid.family.chunk
    stem = prompt(2 * chunk + 10)
    for _ in range(2):
        first.generate(stem + prompt(chunk), max_tokens=1)
    hybrid.shelf.wait_hit(stem, 2 * chunk)
    forget(first)
    tokens = stem + prompt(100)
    ask(first, tokens, 2 * chunk)


# --------------------------------------------------------------------------------------- windows


@with_windows
@pytest.mark.parametrize("damage", variants(SPOILT, {"flipped byte of the payload"}))
@pytest.mark.parametrize("behind", variants([1, 2, 3], {2, 3}))
def test_a_hit_needs_the_chunks_that_the_window_reaches(
    hybrid: Hybrid, first: Engine, ask: Ask, prompt: MakePrompt, behind: int, damage: str
) -> None:
    chunk = hybrid.family.chunk
    tokens = prompt(5 * chunk + 30)
    for end in (3, 4, 5):
        # Where prompts end windows are stored.
        first.generate(tokens[: end * chunk + 30])
        hybrid.shelf.wait_hit(tokens, end * chunk)
    hybrid.shelf.wait_quiet()
    [path, *_] = hybrid.shelf.of_kind(tokens, "window")[5 - behind]
    if damage == "missing":
        path.unlink()
    else:
        DAMAGE[damage](path)
    forget(first)
    # The window of 320 tokens ends in the last chunk but one.
    hit = (5 if behind == 3 else 5 - behind) * chunk
    assert ask(first, tokens).cached_tokens == (
        0 if damage.startswith("flipped") and behind < 3 else hit
    )


# ------------------------------------------------------------------------------------------ slow


@pytest.mark.slow
@pytest.mark.parametrize(("name", "blocks"), [("gemma3", 40), ("qwen3-next", 48)])
def test_sixteen_requests_in_a_tiny_cache(
    hybrids: Callable[..., Hybrid], prompt: MakePrompt, name: str, blocks: int
) -> None:
    hybrid = hybrids(name, "of small engines")
    chunk = hybrid.family.chunk
    small = {
        "num_gpu_blocks_override": blocks,
        "max_num_batched_tokens": 384,
        "max_model_len": 2048,
    }
    stems = [prompt(length) for length in (300, 520, 700, 900)]
    prompts = [stems[index % 4] + prompt(10 + 7 * index) for index in range(16)]

    def answers(engine: Engine) -> list[Answer]:
        before = engine.metrics()["vllm:num_preemptions_total"]
        found = engine.generate_all(prompts, max_tokens=100, timeout=250)
        assert engine.metrics()["vllm:num_preemptions_total"] > before
        assert all(answer.finish_reason == "length" for answer in found)
        return found

    def recompute(index: int, answered: list[int]) -> Answer:
        return without_cache(inert, prompts[index] + answered, max_tokens=1)

    with (
        hybrid.start("small", **small) as engine,
        hybrid.start("small inert", inert=True, **small) as inert,
    ):
        for stem in stems[:2]:
            engine.generate(stem, max_tokens=1)
            hybrid.shelf.wait_hit(stem, len(stem) // chunk * chunk)
        engine.reset_prefix_cache()
        alone = [without_cache(inert, tokens, max_tokens=100) for tokens in prompts]
        inert.reset_prefix_cache()
        control = answers(inert)
        for _ in range(2):
            before = engine.metrics()["vllm:external_prefix_cache_hits_total"]
            assert_same_up_to_ties(answers(engine), alone, control, recompute)
            assert engine.metrics()["vllm:external_prefix_cache_hits_total"] > before
            # All blocks are free again.
            engine.reset_prefix_cache()
        hybrid.shelf.wait_quiet()
        hybrid.shelf.check_all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen3-next", "lfm2"])
def test_one_rank_and_two_share(
    hybrids: Callable[..., Hybrid], prompt: MakePrompt, name: str
) -> None:
    hybrid = hybrids(name, "of ranks")
    chunk = hybrid.family.chunk
    with hybrid.start("one rank") as one, hybrid.start("two ranks", **of_ranks(2)) as two:
        for writer, reader in ((one, two), (two, one), (two, two)):
            tokens = prompt(5 * chunk + 20)
            cold = writer.generate(tokens)
            assert cold.shelf_tokens == 0
            hybrid.shelf.wait_hit(tokens, 5 * chunk)
            reader.reset_prefix_cache()
            loaded = reader.generate(tokens)
            assert loaded.shelf_tokens == 5 * chunk
            cached = reader.generate(tokens)
            assert (cached.cached_tokens, cached.shelf_tokens) == (5 * chunk, 0)
            assert bits(loaded) == bits(cached)
            if hybrid.family.steady:
                # Sums of two ranks are rounded otherwise.
                assert_same(loaded, cold, NEAR_TIE)
        assert len(hybrid.shelf.namespaces()) == 1
        hybrid.shelf.check_all()


@pytest.mark.slow
def test_a_windowed_model_without_the_hybrid_allocator_keeps_its_bytes(
    hybrids: Callable[..., Hybrid], prompt: MakePrompt
) -> None:
    hybrid = hybrids("gemma3", "of one group")
    files = ShelfFiles(hybrid.shelf.root)
    one_group = {"disable_hybrid_kv_cache_manager": True}
    with (
        hybrid.start("one group", **one_group) as engine,
        hybrid.start("one group inert", inert=True, **one_group) as inert,
    ):
        tokens = prompt(1000)
        expected = without_cache(inert, tokens)
        assert_same(engine.generate(tokens), expected)
        files.wait_stored(tokens)
        assert "kinds" not in hybrid.shelf.record
        engine.reset_prefix_cache()
        answer = engine.generate(tokens)
        assert answer.shelf_tokens == 768
        assert_same(answer, expected, NEAR_TIE)
    with hybrid.start("several groups") as engine:
        answer = engine.generate(tokens)
        assert answer.shelf_tokens == 0
        assert_same(answer, expected, NEAR_TIE)
    assert len(files.namespaces()) == 2
