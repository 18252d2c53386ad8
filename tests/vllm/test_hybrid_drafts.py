"""Hybrid models with drafters on real engines: drafts are accepted behind a hit as without kvshelf.

Drafters guess most of what their models say: see ``leader`` in ``examples/make_hybrid_model.py``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from eagle_model import make_eagle3
from fleet import Engines
from harness import INERT_CONNECTOR, NEAR_TIE, SHELF_CONNECTOR, Answer, Engine, assert_same
from hybrid_files import HybridFiles
from make_hybrid_model import RECIPES, make_hybrid_model
from shelf_files import wait_until

pytestmark = pytest.mark.slow
MakePrompt = Callable[[int], list[int]]

#: Drafts of each step.
DRAFTS = 3


class ModelFiles(HybridFiles):
    """The files of a shelf, without those of drafters."""

    def namespaces(self) -> list[Path]:
        """Return the namespace folders of models."""
        return [folder for folder in super().namespaces() if folder not in self.of_drafters()]

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
        self, engines: Engines, name: str, checkpoint: Path, dtype: str, **speculative: Any
    ) -> None:
        self._engines = engines
        self._name = name
        self._arguments = {"model": checkpoint, "dtype": dtype}
        self._speculative = {"num_speculative_tokens": DRAFTS, **speculative}
        self.shelf = ModelFiles(engines.places.root / f"{name} shelf of drafters")
        self._stack = ExitStack()
        self.inert = self.start("inert", inert=True)
        self.first = self.start("first")

    def start(self, role: str, *, inert: bool = False, drafts: bool = True) -> Engine:
        """Start an engine; it stores and loads unless it is inert."""
        connector: dict[str, Any] = {"connector": INERT_CONNECTOR}
        if not inert:
            extra = {"shared_storage_path": str(self.shelf.root)}
            connector = {"connector": SHELF_CONNECTOR, "extra_config": extra}
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

    wait_until(stored, f"{chunks} chunks of the drafter on the shelf")


@pytest.fixture(scope="module")
def windows(engines: Engines) -> Iterator[Drafting]:
    """A gpt-oss model with an EAGLE3 drafter, whose layer shares a group with the model's."""
    root = engines.places.root
    model = make_hybrid_model(root / "models" / "gpt-oss", "gpt-oss")
    leader = RECIPES["gpt-oss"].leader
    assert leader is not None
    drafter = make_eagle3(root / "models" / "eagle3", model, leader)
    made = Drafting(engines, "gpt-oss", model, "float32", method="eagle3", model=str(drafter))
    yield made
    made.close()


def test_drafts_behind_windows_are_accepted_as_without_a_shelf(
    windows: Drafting, prompt: MakePrompt
) -> None:
    tokens = prompt(1100)
    expected, usual = ask(windows.inert, tokens)
    assert usual > 0.5
    cold, accepted = ask(windows.first, tokens)
    assert cold.shelf_tokens == 0
    assert cold.tokens == expected.tokens
    assert accepted == usual
    windows.shelf.wait_hit(tokens, 1024)
    assert windows.shelf.kinds == {"full", "window"}
    wait_drafts(windows.first, 4)
    windows.first.stop()
    second = windows.start("second")
    loaded, accepted = ask(second, tokens)
    assert loaded.shelf_tokens == 1024
    assert_same(loaded, expected, NEAR_TIE)
    assert accepted >= 0.95 * usual
    assert second.counters()["draft_loaded_chunks"] == 4
    # The other way round, and without the drafter's KV.
    with windows.start("plain", drafts=False) as plain:
        plain.reset_prefix_cache()
        same = plain.generate(tokens, max_tokens=256)
        assert same.shelf_tokens == 1024
        assert_same(same, expected, NEAR_TIE)
    for folder in windows.shelf.of_drafters():
        shutil.rmtree(folder)
    without, accepted = ask(second, tokens)
    assert without.shelf_tokens == 1024
    assert_same(without, expected, NEAR_TIE)
    assert accepted < 0.95 * usual
