"""Fixtures for tests with real vLLM engines: models, engines, a shelf, reference answers.

Engines are started once for a session or a module and serve many tests. Each is bound to one core,
so that two can work side by side and all compute with the same number of threads.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvshelf.backends import Deadlines
from kvshelf.backends.guard import GuardedBackend
from kvshelf.shelf.shelf import Shelf
from tests.sim.storage import ELSEWHERE, FaultyStorage, posix
from tests.support import constants
from tests.support.engines import (
    NEAR_TIE,
    Answer,
    Ask,
    Engine,
    Engines,
    MakePrompt,
    Reference,
    ShelfFiles,
    assert_same,
)
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.sim.engine import EngineModel, Start
    from tests.sim.engine_sides import LoneScheduler, LoneWorker, Make, MakeWorker

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    # Importing vLLM warns of what torch and others deprecate.
    warnings.simplefilter("ignore")
    import kvshelf.vllm.connector  # noqa: F401

from examples.models.make_model import RECIPES, make_model


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a test that failed what its engines printed and counted."""
    report = yield
    if report.failed and "engines" in getattr(item, "fixturenames", ()):
        report.sections += [(engine.log_path.stem, engine.account()) for engine in Engine.running]
    return report


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """Requests wait as long as it takes, and constants are the product's again after the test."""
    constants.put(lookup_seconds=PATIENCE, identity_seconds=PATIENCE)
    yield
    constants.reset()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that most engines have."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "tiny")


@pytest.fixture(scope="session")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """All engines; they are stopped, at the latest, when the session ends."""
    engines = Engines(tmp_path_factory.mktemp("vllm"), tiny_model)
    yield engines
    engines.stop_all()


@pytest.fixture(scope="session")
def shelf(engines: Engines) -> ShelfFiles:
    """The shelf that most engines share."""
    return ShelfFiles(engines.shelf)


@pytest.fixture(scope="session")
def inert(engines: Engines) -> Engine:
    """An engine without a shelf."""
    return engines["inert"]


@pytest.fixture(scope="session")
def on_shelf(engines: Engines) -> Engine:
    """An engine on the shelf."""
    return engines["on_shelf"]


@pytest.fixture(scope="session")
def reference(inert: Engine) -> Reference:
    """What vLLM answers without a shelf and without its prefix cache; computed once a prompt."""
    known: dict[tuple[Any, ...], Answer] = {}

    def answer(prompt: list[int], **options: Any) -> Answer:
        key = (tuple(prompt), tuple(sorted(options.items())))
        if key not in known:
            inert.reset_prefix_cache()
            known[key] = inert.generate(prompt, **options)
        return known[key]

    return answer


@pytest.fixture
def ask(reference: Reference) -> Ask:
    """Let an engine answer a prompt as vLLM does without a shelf; return its answer.

    `hit` is how many of the prompt's tokens come from the shelf, where that is known.
    """

    def ask(
        engine: Engine,
        tokens: list[int],
        hit: int | None = None,
        *,
        tolerance: float = 0.0,
        **options: Any,
    ) -> Answer:
        answer = engine.generate(tokens, **options)
        assert hit is None or answer.shelf_tokens == hit
        sampling = {name: options[name] for name in ("max_tokens",) if name in options}
        assert_same(answer, reference(tokens, **sampling), tolerance)
        return answer

    return ask


@pytest.fixture
def engine(on_shelf: Engine) -> Engine:
    """The session's engine on the shelf, its own prefix cache empty."""
    on_shelf.reset_prefix_cache()
    return on_shelf


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> MakePrompt:
    """Make prompts that no other test uses: of a length, or so much longer than another prompt.

    Where a test compares with the reference, no token that the reference answers is a near-tie:
    rounding would decide between its rivals, and differs with the processor and with how much of
    a prompt is computed at once.
    """
    generator = random.Random(request.node.nodeid)
    vocab = RECIPES["tiny"].vocab
    compared = "reference" in request.fixturenames
    reference = request.getfixturevalue("reference") if compared else None

    def make(length: int, after: Sequence[int] = ()) -> list[int]:
        while True:
            tokens = [*after, *(generator.randrange(2, vocab) for _ in range(length))]
            if reference is None or min(reference(tokens).gaps) >= NEAR_TIE:
                return tokens

    return make


# ------------------------------------------------------------------------- no real engines


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyStorage:
    """The storage of all engines of a test, whatever URL they open, but for one."""
    from kvshelf.tiers import runtime
    from kvshelf.vllm import connector

    backend = FaultyStorage(posix(tmp_path / "shelf"))

    def open_shelf(url: str, *, deadlines: dict[str, float] | None = None, **options: Any) -> Shelf:
        storage = posix(Path(url)) if url.endswith(ELSEWHERE) else backend
        guarded = GuardedBackend(storage, replace(Deadlines(), **(deadlines or {})))
        return Shelf(guarded)

    monkeypatch.setattr(runtime, "open_shelf", open_shelf)
    connector._logs.clear()
    return backend


@pytest.fixture
def start_model(backend: FaultyStorage) -> Iterator[Start]:
    """Start engine models on one shelf, which end with the test."""
    from tests.sim.engine import EngineModel

    engines: list[EngineModel] = []

    def start(**options: Any) -> EngineModel:
        engines.append(EngineModel(backend.url, **options))
        return engines[-1]

    yield start
    backend.heal()
    for engine in engines:
        engine.close()


@pytest.fixture
def make_worker(backend: FaultyStorage) -> Iterator[MakeWorker]:
    """Make workers without a model, on the test's storage."""
    from tests.sim.engine_sides import LoneWorker

    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> LoneWorker:
            return stack.enter_context(contextlib.closing(LoneWorker(backend, **options)))

        yield make


@pytest.fixture
def rig(make_worker: MakeWorker) -> LoneWorker:
    """A worker without a model, with the usual options."""
    return make_worker()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make scheduler sides without an engine, on one shelf."""
    from tests.sim.engine_sides import LoneScheduler

    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> LoneScheduler:
            side = LoneScheduler(tmp_path / "shelf", **options)
            return stack.enter_context(contextlib.closing(side))

        yield make


@pytest.fixture
def start(
    start_model: Start, backend: FaultyStorage, caplog: pytest.LogCaptureFixture
) -> Iterator[Start]:
    """Start engines with a model by its name in PUBLISHED_MODELS; they end with the test.

    No engine may have contained an error.
    """
    from tests.sim.engine_caches import PUBLISHED_MODELS, drafter, guesser

    sizes = {"chunk_size": 32, "blocks": 400, "budget": 64, "requests": 8, "retention": 0}
    engines: list[EngineModel] = []

    def start(name: str = "plain", **options: Any) -> EngineModel:
        options = {"groups": PUBLISHED_MODELS[name], "form": "NHD", **sizes, **options}
        if drafts := options.get("drafts", 0):
            has_full = any(group.kind == "full" for group in options["groups"])
            # Nothing of the drafter's KV is stored.
            speculative = drafter(drafts, draft_model_config=None) if has_full else guesser(drafts)
            options = {"drafter": speculative, "runner": "V1 speculative", **options}
        engines.append(start_model(**options))
        engines[-1].settle()
        return engines[-1]

    yield start
    backend.let_go()
    for engine in engines:
        engine.end()
    # Of an error that was contained there would be such a line.
    assert not [line for line in caplog.messages if "the engine goes on" in line]
