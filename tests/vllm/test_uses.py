"""Hits of engines are recorded as uses of all that they need, wherever the engine has it from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from kvshelf.backends import Touched
from kvshelf.backends.posix import PosixBackend
from kvshelf.capacity.marks import MARKS, Marks
from kvshelf.capacity.uses import Uses
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, KINDS, STATE, WINDOW, Kind
from kvshelf.format.names import parse_path
from kvshelf.metrics import Counters
from kvshelf.shelf.view import ShelfView
from tests.support.prompts import prompt
from tests.support.waiting import PATIENCE, until
from tests.vllm.hybrid_specs import models
from tests.vllm.replay import Request
from tests.vllm.rig import Side
from tests.vllm.scheduled import Start, World
from tests.vllm.test_drafts import Drafting

MODELS = models()


class Noted(Uses):
    """Notes what is recorded."""

    def __init__(self) -> None:
        super().__init__(Counters())
        self.hits: list[tuple[Kind, list[int]]] = []

    def note(self, view: ShelfView, chunks: Sequence[Chunk]) -> None:
        """Note the kind and the indices."""
        self.hits.append((view.fmt.kind, [chunk.index for chunk in chunks]))


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    side = Side(tmp_path / "shelf", uses=Noted())
    yield side
    side.close()


def hits(side: Side) -> list[tuple[Kind, list[int]]]:
    assert isinstance(side.uses, Noted)
    return side.uses.hits


@pytest.mark.parametrize("at_hand", [0, 8, 24, 28])
def test_a_hit_is_a_use_of_its_whole_prefix(side: Side, at_hand: int) -> None:
    side.put(prompt(33), 3)
    request = Request("r", prompt(33))
    side.side.new_request(request)
    side.ask(request, at_hand)
    until(lambda: hits(side) == [(FULL, [0, 1, 2])])


def test_a_miss_uses_nothing(side: Side) -> None:
    side.ask(Request("r", prompt(33)))
    assert hits(side) == []


def test_a_hit_that_vllm_would_not_use_is_none(side: Side) -> None:
    side.put(prompt(33), 3)
    request = Request("r", prompt(33), skip_reading_prefix_cache=True)
    side.side.new_request(request)
    side.looked_up("r")
    assert hits(side) == []


# ------------------------------------------------------------------------- with files


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names whose access times are set; the system may set them too, when a file is read."""
    names: list[str] = []
    touch = PosixBackend.touch

    def noted(self: PosixBackend, name: str) -> Touched:
        names.append(name)
        return touch(self, name)

    monkeypatch.setattr(PosixBackend, "touch", noted)
    return names


def recorded(uses: Uses, condition: Callable[[], object]) -> None:
    """Wait until uses are recorded: a lookup's thread tells of them after its answer."""
    until(lambda: uses.flush(PATIENCE) and bool(condition()))


def used(touched: list[str]) -> dict[Kind, set[int]]:
    kinds: dict[Kind, set[int]] = defaultdict(set)
    for name in touched:
        parsed = parse_path(name)
        assert parsed is not None
        kinds[parsed.kind].add(parsed.index)
    return dict(kinds)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_a_hit_of_a_hybrid_engine_uses_all_kinds_that_it_needs(
    start: Start, touched: list[str], model: str, warm: bool
) -> None:
    start(model, state_interval=1, budget=32).run(prompt(203))
    engine = start(model)

    def recorded_to(last: int) -> None:
        expected = {FULL: set(range(last + 1)), WINDOW: {last}, STATE: {last}}
        expected = {kind: expected[kind] for kind in engine.groups.kinds}
        recorded(engine.connector._assembly.uses, lambda: used(touched) == expected)

    if warm:
        # Most of it is in vLLM's prefix cache by then.
        engine.run(prompt(190))
        recorded_to(4)
        engine.connector._assembly.uses._due.clear()
        touched.clear()
    engine.run(prompt(203))
    recorded_to(5)
    counts = engine.connector._counters.snapshot()
    assert counts["touched_objects"] and "marked_chunks" not in counts


def test_an_engine_that_may_not_set_access_times_writes_marks(
    start: Start, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PosixBackend, "touch", lambda *_: Touched.REFUSED)
    start("Gemma 3").run(prompt(203))
    engine = start("Gemma 3")
    engine.run(prompt(203))
    until(lambda: engine.connector._assembly.uses._marked == 6 + 1, "a mark of each use")
    engine.connector.shutdown()
    assert len(list((world.root / MARKS).iterdir())) == 1
    found = Marks.read(world.backend)
    chunks = engine.chunks_of(prompt(203))
    keys = np.frombuffer(b"".join(chunk.key for chunk in chunks), np.uint8).reshape(-1, 32)
    of_kind = {kind: found.used(engine.fmt.namespace.folder, keys, kind) for kind in KINDS}
    assert [bool(at) for at in of_kind[FULL]] == [True] * 6
    assert [bool(at) for at in of_kind[WINDOW]] == [False] * 5 + [True]
    assert not of_kind[STATE].any()


@pytest.mark.parametrize("options", [{"capacity": {"uses": "off"}}, {"read_only": True}])
def test_uses_that_are_not_wanted_are_not_recorded(
    start: Start, world: World, touched: list[str], options: dict[str, Any]
) -> None:
    start("Gemma 3").run(prompt(203))
    engine = start("Gemma 3", **options)
    assert engine.run(prompt(203)) == [192]
    assert engine.connector._assembly.uses.flush(PATIENCE)
    assert not touched and not (world.root / MARKS).exists()


def test_a_drafters_chunks_are_used_with_the_models(tmp_path: Path, touched: list[str]) -> None:
    root, tokens = tmp_path / "shelf", prompt(70)
    with ExitStack() as stack:
        stack.enter_context(closing(Drafting(root))).serve(tokens)
        uses = stack.enter_context(closing(Uses(Counters())))
        second = stack.enter_context(closing(Drafting(root, uses=uses)))
        assert second.serve(tokens) == 64
        objects = {str(path.relative_to(root)) for path in root.rglob("*.safetensors")}
        recorded(uses, lambda: set(touched) == objects)
        assert len({name.partition("/")[0] for name in objects}) == 2
