"""Speculative decoding on real engines: rejected drafts are never stored, the drafter's KV is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.engines import NEAR_TIE, Answer, Engine, assert_same
from tests.support.fleet import ENGINES, Ask, Engines, MakePrompt, Places, Reference
from tests.vllm.eagle_model import make_eagle
from tests.vllm.shelf_files import ShelfFiles, assert_close

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def drafting(engines: Engines) -> Iterator[Engine]:
    """An engine that guesses tokens from n-grams, and stores what it decodes."""
    arguments = ENGINES["on_shelf"](engines.places)
    arguments["extra_config"] |= {
        "shared_storage_path": str(engines.places.root / "shelf of drafts"),
        "save_decode": True,
    }
    arguments["speculative_config"] = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    engine = engines.start("drafting", **arguments)
    yield engine.wait_ready()
    engine.stop(at_once=True)


@pytest.fixture
def shelf_of_all(places: Places) -> ShelfFiles:
    return ShelfFiles(places.shelf)


@pytest.fixture
def shelf(engines: Engines) -> ShelfFiles:
    return ShelfFiles(engines.places.root / "shelf of drafts")


def test_rejected_drafts_are_never_stored(
    drafting: Engine, shelf: ShelfFiles, ask: Ask, prompt: MakePrompt
) -> None:
    # Drafts come from repetitions, which a random model does not go on with: most are rejected.
    tokens = prompt(20) * 20
    answer = drafting.generate(tokens, max_tokens=700)
    metrics = drafting.metrics()
    drafted = metrics["vllm:spec_decode_num_draft_tokens_total"]
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_total"]
    assert drafted - accepted > 100
    # What is computed last is not stored: its last token has no KV yet.
    text = [*tokens, *answer.tokens][: 4 * 256]
    shelf.wait_stored(text)
    assert shelf.check_all() == 2 * 4
    # Prefilled, the same text has the same KV up to rounding; a draft's would be another.
    drafting.reset_prefix_cache()
    drafting.generate([*text, 2], max_tokens=1, cache_salt="prefilled")
    for one, other in zip(shelf.of(text), shelf.wait_stored(text, salt="prefilled"), strict=True):
        for decoded, prefilled in zip(one, other, strict=True):
            assert_close(load_file(decoded), load_file(prefilled))
    # The next turn of the chat loads prompt and answer; a draft's KV would change what follows.
    follow_up = [*text, *prompt(40)]
    drafting.reset_prefix_cache()
    ask(drafting, follow_up, 1024, tolerance=NEAR_TIE)


# ------------------------------------------------------------------------- drafters with KV


class ModelFiles(ShelfFiles):
    """The files of a shelf, without those of drafters."""

    def namespaces(self) -> list[Path]:
        """Return the namespace folders of models."""
        return [
            folder
            for folder in super().namespaces()
            if b'"version":"drafter of ' not in (folder / "namespace.json").read_bytes()
        ]


class Drafting:
    """An engine with a drafter, on a shelf that all engines of this module share."""

    def __init__(self, engines: Engines, **speculative: Any) -> None:
        arguments = ENGINES["on_shelf"](engines.places)
        self.root = engines.places.root / "shelf of drafters"
        arguments["extra_config"] |= {
            "shared_storage_path": str(self.root),
            "save_decode": True,
        }
        arguments["speculative_config"] = {"num_speculative_tokens": 3, **speculative}
        self.shelf = ModelFiles(self.root)
        self.engine = engines.start(f"drafting {speculative['method']}", **arguments)

    def generate(self, tokens: list[int], **options: Any) -> tuple[Answer, float]:
        """Return an answer, and which part of the drafts was accepted."""
        self.engine.reset_prefix_cache()
        before = self.engine.metrics()
        answer = self.engine.generate(tokens, **options)
        after = self.engine.metrics()
        drafted, accepted = (
            after[name] - before[name]
            for name in (
                "vllm:spec_decode_num_draft_tokens_total",
                "vllm:spec_decode_num_accepted_tokens_total",
            )
        )
        return answer, accepted / drafted

    def objects(self) -> dict[Path, bytes]:
        """All objects of the shelf, by path."""
        return {
            file.relative_to(self.root): file.read_bytes()
            for file in self.root.glob("*/_/*/*.safetensors")
        }

    def wait_stored(self, tokens: list[int], drafted: int) -> None:
        """Wait until a prompt is stored, with `drafted` chunks of the drafter in the engine."""
        self.shelf.wait_stored(tokens)
        deadline = time.monotonic() + 30.0
        while self.engine.counters().get("draft_stored_chunks", 0) < drafted:
            assert time.monotonic() < deadline
            # Counters come with the output of a step.
            self.engine.generate([2, 3, 4], max_tokens=1)


@pytest.fixture(scope="module")
def drafted(engines: Engines) -> Iterator[Drafting]:
    """The model is its own drafter, so that nearly all drafts are accepted."""
    made = Drafting(engines, method="draft_model", model=str(engines.places.model))
    made.engine.wait_ready()
    yield made
    made.engine.stop(at_once=True)


@pytest.fixture(scope="module")
def eagle(engines: Engines) -> Iterator[Drafting]:
    checkpoint = make_eagle(engines.places.root / "eagle", engines.places.model)
    made = Drafting(engines, method="eagle", model=str(checkpoint))
    made.engine.wait_ready()
    yield made
    made.engine.stop(at_once=True)


def test_drafts_are_accepted_behind_a_loaded_prefix_as_without_one(
    drafted: Drafting, reference: Reference, prompt: MakePrompt
) -> None:
    tokens = prompt(2100)
    cold, usual = drafted.generate(tokens, max_tokens=512)
    assert usual >= 0.9
    drafted.wait_stored(tokens, 8)
    loaded, accepted = drafted.generate(tokens, max_tokens=512)
    assert loaded.shelf_tokens == 2048
    assert accepted >= 0.95 * usual
    assert_same(loaded, reference(tokens, max_tokens=512), NEAR_TIE)
    assert_same(cold, reference(tokens, max_tokens=512), NEAR_TIE)


def test_a_drafter_changes_no_object_of_its_model(
    drafted: Drafting, eagle: Drafting, engine: Engine, shelf_of_all: ShelfFiles, prompt: MakePrompt
) -> None:
    tokens = prompt(800)
    engine.generate(tokens)
    shelf_of_all.wait_stored(tokens)
    drafted.engine.generate(tokens)
    drafted.shelf.wait_stored(tokens)
    ours, plain = drafted.shelf.of(tokens), shelf_of_all.of(tokens)
    for some, others in zip(ours, plain, strict=True):
        for one, other in zip(some, others, strict=True):
            assert one.parent.parent.parent.name == other.parent.parent.parent.name
            assert one.name == other.name
            assert one.read_bytes() == other.read_bytes()
    # Another drafter does not find drafts, and the whole prompt of the model.
    loaded, _ = eagle.generate(tokens, max_tokens=40)
    assert loaded.shelf_tokens == 768


def test_kv_of_an_eagle_drafter_is_stored_and_loaded(
    eagle: Drafting, reference: Reference, prompt: MakePrompt
) -> None:
    tokens = prompt(1100)
    known = set(eagle.objects())
    cold, _ = eagle.generate(tokens, max_tokens=300)
    text = [*tokens, *cold.tokens][: 5 * 256]
    eagle.wait_stored(text, 5)
    # The model's chunks and the drafter's.
    new = {path: data for path, data in eagle.objects().items() if path not in known}
    assert len({path.parts[0] for path in new}) == 2
    assert len(new) == 2 * 5 * 2
    before = eagle.engine.counters()
    follow_up = [*text, *prompt(40)]
    loaded, _ = eagle.generate(follow_up, max_tokens=300)
    assert loaded.shelf_tokens == 1280
    assert_same(loaded, reference(follow_up, max_tokens=300), NEAR_TIE)
    counters = eagle.engine.counters()
    assert counters["draft_loaded_chunks"] - before.get("draft_loaded_chunks", 0) == 5
