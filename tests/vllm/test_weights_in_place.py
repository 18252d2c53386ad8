"""Weights that change while a real engine runs: each set has a cache of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines import (
    NEAR_TIE,
    Answer,
    Engine,
    Engines,
    MakePrompt,
    ShelfFiles,
    assert_same,
)
from tests.support.waiting import until

EXTENSION = "tests.vllm.trainer_extension.TrainerExtension"


class Trained:
    """An engine on a shelf, whose weights a trainer changes."""

    def __init__(self, engine: Engine, shelf: ShelfFiles) -> None:
        self.engine, self.shelf = engine, shelf

    def update(self, method: str, *, pauses: bool = True, **arguments: int) -> None:
        """A trainer's order of calls: pause, update, resume."""
        if pauses:
            self.engine.call("pause_generation")
        self.engine.call("collective_rpc", method=method, kwargs=arguments)
        if pauses:
            self.engine.call("resume_generation")
        # Its steps are enough to compare the weights.
        self.check([7] * 20, 0, max_tokens=24)

    def check(self, tokens: list[int], *shelf_tokens: int, max_tokens: int = 8) -> int:
        """Ask without vLLM's own prefix cache, and compare with what is computed anew.

        Return how many tokens came from the shelf, one of `shelf_tokens`.
        """
        self.engine.reset_prefix_cache()
        answer = self.engine.generate(tokens, max_tokens=max_tokens)
        assert_same(answer, self.anew(tokens, max_tokens), NEAR_TIE)
        assert answer.shelf_tokens in shelf_tokens
        return answer.shelf_tokens

    def anew(self, tokens: list[int], max_tokens: int = 8) -> Answer:
        """What the engine answers without any cache: these requests read none."""
        answer = self.engine.generate(tokens, max_tokens=max_tokens, prompt_logprobs=0)
        assert answer.cached_tokens == 0
        return answer

    def cold(self, tokens: list[int]) -> set[Path]:
        """Ask for a prompt of two chunks that the shelf does not have; return what was stored."""
        before = self.shelf.objects()
        self.check(tokens, 0)
        return self.wait_stored(before)

    def wait_stored(self, before: set[Path]) -> set[Path]:
        """Wait for two more chunks; return their objects."""
        until(lambda: are_two_chunks(self.shelf.objects() - before), "two chunks")
        return self.shelf.objects() - before

    def warm(self, tokens: list[int]) -> None:
        """Ask for the same prompt again, behind a step, which tells what was stored."""
        self.engine.generate([7] * 20, max_tokens=1)
        self.check(tokens, 512)

    def weights(self) -> set[str]:
        """What the namespaces on the shelf call their weights."""
        return {
            json.loads((folder / "namespace.json").read_text())["weights"]
            for folder in self.shelf.namespaces()
        }


def are_two_chunks(objects: set[Path]) -> bool:
    """Whether these are all objects of two chunks; each names the number of its chunk's shards."""
    return bool(objects) and len(objects) == 2 * int(min(objects).stem.rpartition("of")[2])


@pytest.fixture(scope="module")
def trained(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    shelf = ShelfFiles(tmp_path_factory.mktemp("trained") / "shelf")
    engine = engines.start("trained", shelf.root, core=1, worker_extension_cls=EXTENSION)
    yield Trained(engine, shelf)
    engine.stop(at_once=True)


def test_trainer_updates_twice_and_goes_back(trained: Trained, prompt: MakePrompt) -> None:
    tokens = prompt(600)
    stored = {0: trained.cold(tokens)}
    trained.warm(tokens)
    for step in (1, 2):
        trained.update("load_step", step=step)
        stored[step] = trained.cold(tokens)
        trained.warm(tokens)
    for step in (1, 0):
        trained.update("load_step", step=step)
        trained.warm(tokens)
    # Nothing was stored but these, each set of weights in a namespace of its own.
    assert trained.shelf.objects() == set().union(*stored.values())
    folders = [
        {path.relative_to(trained.shelf.root).parts[0] for path in s} for s in stored.values()
    ]
    assert [len(names) for names in folders] == [1, 1, 1]
    assert len(set().union(*folders)) == 3
    names = trained.weights()
    assert len(names) == 3
    assert len([name for name in names if name.startswith("params:")]) == 2
    trained.shelf.check_all()


def test_weights_that_an_extension_writes_without_a_pause_or_a_reset(
    trained: Trained, prompt: MakePrompt
) -> None:
    tokens = prompt(600)
    trained.cold(tokens)
    trained.warm(tokens)
    trained.update("write_step", step=5, pauses=False)
    trained.cold(tokens)
    trained.update("write_step", step=0, pauses=False)
    trained.warm(tokens)


@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_change_while_the_engine_sleeps(
    trained: Trained, prompt: MakePrompt, level: int
) -> None:
    tokens = prompt(600)
    trained.cold(tokens)
    trained.warm(tokens)
    for step in (level, 0):
        trained.engine.call("sleep", level=level)
        trained.engine.call("collective_rpc", method="write_step", kwargs={"step": step})
        trained.engine.call("wake_up")
        # Its steps are enough to compare the weights.
        trained.check([7] * 20, 0, max_tokens=24)
        if step:
            trained.cold(tokens)
        else:
            trained.warm(tokens)
