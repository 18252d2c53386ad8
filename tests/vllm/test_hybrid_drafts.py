"""Hybrid models with drafters on real engines: drafts are accepted behind a hit as without kvshelf.

Drafters guess most of what their models say: see ``leader`` in
``tests/support/make_hybrid_model.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import (
    INERT_CONNECTOR,
    NEAR_TIE,
    SHELF_CONNECTOR,
    Answer,
    Engine,
    assert_same,
)
from tests.support.fleet import Engines, MakePrompt
from tests.support.make_hybrid_model import RECIPES, make_hybrid_model
from tests.support.waiting import until
from tests.vllm.eagle_model import make_eagle3
from tests.vllm.hybrid_files import HybridFiles, read_state

#: Drafts of each step.
DRAFTS = 3


class ModelFiles(HybridFiles):
    """The files of a shelf, without those of drafters."""

    def namespaces(self) -> list[Path]:
        """Return the namespace folders of models."""
        return [folder for folder in super().namespaces() if folder not in self.of_drafters()]

    def remove_drafts(self) -> None:
        """Remove the objects of drafters."""
        for folder in self.of_drafters():
            for path in folder.rglob("*.safetensors"):
                path.unlink()

    def of_drafters(self) -> list[Path]:
        """Return the namespace folders of drafters."""
        return [
            folder
            for folder in super().namespaces()
            if b'"version":"drafter of ' in (folder / "namespace.json").read_bytes()
        ]


class Drafting:
    """Engines with one model and its drafter, on one shelf."""

    def __init__(
        self,
        engines: Engines,
        name: str,
        speculative: dict[str, Any],
        connectors: Sequence[tuple[str, str]] = (INERT_CONNECTOR, SHELF_CONNECTOR),
        **arguments: Any,
    ) -> None:
        self._engines = engines
        self._name = name
        self._arguments = arguments
        self._speculative = {"num_speculative_tokens": DRAFTS, **speculative}
        self._inert, self._shelved = connectors
        self.shelf = ModelFiles(engines.places.root / f"{name} shelf of drafters")
        self._stack = ExitStack()

    @cached_property
    def inert(self) -> Engine:
        return self.start("inert", inert=True)

    @cached_property
    def first(self) -> Engine:
        return self.start("first")

    def start(
        self, role: str, *, inert: bool = False, drafts: bool = True, **options: Any
    ) -> Engine:
        """Start an engine; it stores and loads unless it is inert. `options` are kvshelf's."""
        connector: dict[str, Any] = {"connector": self._inert}
        if not inert:
            extra = {"shared_storage_path": str(self.shelf.root), **options}
            connector = {"connector": self._shelved, "extra_config": extra}
        engine = self._engines.start(
            f"{self._name}, drafting, {role}",
            core=int(inert),
            speculative_config=self._speculative if drafts else None,
            **self._arguments,
            **connector,
        )
        self._stack.callback(engine.stop, at_once=True)
        return engine

    def close(self) -> None:
        """Stop all engines."""
        self._stack.close()


def ask(engine: Engine, tokens: list[int]) -> tuple[Answer, float]:
    """Return an answer without vLLM's own cache, and which part of the drafts was accepted."""
    engine.reset_prefix_cache()
    before = engine.metrics()
    answer = engine.generate(tokens, max_tokens=256)
    after = engine.metrics()
    drafted, accepted = (
        after[name] - before[name]
        for name in (
            "vllm:spec_decode_num_draft_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_total",
        )
    )
    return answer, accepted / drafted


def wait_drafts(engine: Engine, chunks: int) -> None:
    """Wait until chunks of the drafter are stored."""

    def stored() -> bool:
        # Counters come with the output of a step.
        engine.generate([2, 3, 4], max_tokens=1)
        return engine.counters().get("draft_stored_chunks", 0) >= chunks

    until(stored, f"{chunks} chunks of the drafter on the shelf")


@pytest.fixture(scope="module")
def windows(engines: Engines) -> Iterator[Drafting]:
    """A gpt-oss model with an EAGLE3 drafter, whose layer shares a group with the model's."""
    root = engines.places.root
    model = make_hybrid_model(root / "models" / "gpt-oss", "gpt-oss")
    leader = RECIPES["gpt-oss"].leader
    assert leader is not None
    drafter = make_eagle3(root / "models" / "eagle3", model, leader)
    speculative = {"method": "eagle3", "model": str(drafter)}
    made = Drafting(engines, "gpt-oss", speculative, model=model, dtype="float32")
    yield made
    made.close()


@pytest.fixture(scope="module")
def states(engines: Engines) -> Iterator[Drafting]:
    """A Qwen3-Next model with its head for multi-token prediction."""
    root = engines.places.root
    made = Drafting(
        engines,
        "qwen3-next-mtp",
        {"method": "mtp"},
        [
            (name, "tests.vllm.drafting_connector")
            for name in ("DraftingInertConnector", "DraftingConnector")
        ],
        model=make_hybrid_model(root / "models" / "qwen3-next-mtp", "qwen3-next-mtp"),
        mamba_ssm_cache_dtype="float32",
        # vLLM offers states of answers, too.
        prefix_cache_retention_interval=128,
    )
    yield made
    made.close()


def check(drafting: Drafting, tokens: list[int], hit: int) -> None:
    """Store a prompt, restart, and compare what a hit gives with what there is without one."""
    expected, usual = ask(drafting.inert, tokens)
    # How many are accepted differs by the processor.
    assert usual > 0.3
    cold, accepted = ask(drafting.first, tokens)
    assert cold.shelf_tokens == 0
    assert cold.tokens == expected.tokens
    assert accepted == usual
    drafting.shelf.wait_hit(tokens, hit)
    chunks = hit // drafting.shelf.chunk
    wait_drafts(drafting.first, chunks)
    drafting.first.stop()
    second = drafting.start("second")
    loaded, accepted = ask(second, tokens)
    assert loaded.shelf_tokens == hit
    assert_same(loaded, expected, NEAR_TIE)
    assert accepted >= 0.95 * usual
    assert second.counters()["draft_loaded_chunks"] == chunks
    # An engine without the drafter shares the model's KV.
    with drafting.start("plain", drafts=False) as plain:
        same = plain.generate(tokens, max_tokens=256)
        assert same.shelf_tokens == hit
        assert_same(same, expected, NEAR_TIE)
    drafting.shelf.remove_drafts()
    without, accepted = ask(second, tokens)
    # With states also what the plain engine has stored.
    assert without.shelf_tokens >= hit
    assert_same(without, expected, NEAR_TIE)
    assert accepted < 0.95 * usual


def test_drafts_behind_a_hit_are_accepted_as_without_one(
    windows: Drafting, prompt: MakePrompt
) -> None:
    engine, tokens = windows.first, prompt(600)
    cold, usual = ask(engine, tokens)
    assert usual > 0.5
    windows.shelf.wait_hit(tokens, 512)
    wait_drafts(engine, 2)
    loaded, accepted = ask(engine, tokens)
    assert (loaded.shelf_tokens, engine.counters()["draft_loaded_chunks"]) == (512, 2)
    assert_same(loaded, cold, NEAR_TIE)
    assert accepted >= 0.95 * usual
    # Without the drafter's KV there is the same hit, and fewer drafts are accepted.
    windows.shelf.remove_drafts()
    engine.reset_connector()
    without, accepted = ask(engine, tokens)
    assert without.shelf_tokens == 512
    assert_same(without, cold, NEAR_TIE)
    assert accepted < 0.95 * usual


@pytest.mark.slow
def test_drafts_behind_windows_are_accepted_as_without_a_shelf(
    windows: Drafting, prompt: MakePrompt
) -> None:
    check(windows, prompt(1100), 1024)
    assert windows.shelf.kinds == {"full", "window"}


@pytest.mark.slow
def test_drafts_behind_states_are_accepted_as_without_a_shelf(
    states: Drafting, prompt: MakePrompt
) -> None:
    # vLLM's last state of a prompt is a block before the last boundary.
    check(states, prompt(1100), 7 * 128)
    assert states.shelf.kinds == {"full", "state"}


def assert_near(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that two states differ by rounding only."""
    assert state.keys() == other.keys()
    for name, part in state.items():
        a, b = part.float(), other[name].float()
        assert a.shape == b.shape
        assert (a - b).norm() < 0.02 * b.norm(), name


@pytest.mark.slow
def test_states_of_answers_are_those_of_accepted_drafts(
    states: Drafting, prompt: MakePrompt
) -> None:
    tokens = prompt(700)
    with states.start("answering", save_decode=True, interval=1) as answering:
        answer, accepted = ask(answering, tokens)
        assert accepted > 0.3
        text = [*tokens, *answer.tokens]
        states.shelf.wait_hit(text, 7 * 128)
    expected, _ = ask(states.inert, [*text, 2])
    with states.start("following") as following:
        loaded, _ = ask(following, [*text, 2])
        assert loaded.shelf_tokens == 7 * 128
        assert_same(loaded, expected, NEAR_TIE)
    # Computed as a prompt, without drafts, the states are the same up to rounding.
    with states.start("plain again", drafts=False) as plain:
        end = 7 * 128
        plain.generate(text[: end + 1], max_tokens=1, cache_salt="plain")
        ours, theirs = (
            states.shelf.of_kind(text, "state", salt=salt)[end // 128 - 1] for salt in ("", "plain")
        )
        until(lambda: all(path.is_file() for path in theirs), "a state on the shelf")
        for one, other in zip(ours, theirs, strict=True):
            assert_near(read_state(one), read_state(other))
