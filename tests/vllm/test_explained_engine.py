"""``kvshelf explain`` and ``kvshelf doctor`` on shelves of real engines, with their histories.

Each cause is in tests/tools/test_explain.py; here are those that histories of engines tell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvshelf.cli.app import app
from kvshelf.history import LARGEST, read_histories
from tests.support.engines import Engine
from tests.support.fleet import Engines, MakePrompt
from tests.support.waiting import until
from tests.vllm.shelf_files import DAMAGE, ShelfFiles

pytestmark = pytest.mark.slow


class Machine:
    """The histories of a machine, a shelf, and the commands."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shelf = str(root / "shelf")
        self.histories = root / "histories"

    def engine(self, engines: Engines, name: str, **extra: Any) -> Engine:
        return engines.on_shelf(
            f"explained {name}",
            self.shelf,
            {"history_path": str(self.histories), **extra},
        )

    def run(self, *arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(
            app,
            [str(argument) for argument in arguments],
            env={"KVSHELF_HISTORY_PATH": str(self.histories)},
        )
        return result.exit_code, result.stdout

    def explain(self, tokens: list[int], *options: object) -> tuple[dict[str, Any], list[str]]:
        """Return the explanation of a prompt, and the codes of its causes."""
        path = self.root / "prompt.jsonl"
        path.write_text(json.dumps({"tokens": tokens}))
        code, output = self.run("explain", path, self.shelf, "--json", *options)
        found = json.loads(output)
        assert code == (0 if found["hits"] else 1)
        return found, [cause["code"] for cause in found["causes"]]

    def wait_noted(self, tokens: list[int], event: str, reason: str, *options: object) -> None:
        def noted() -> bool:
            events = self.explain(tokens, *options)[0]["events"]
            return any((one["event"], one["reason"]) == (event, reason) for one in events)

        until(noted, f"{event} ({reason}) in a history")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("explained"))


@pytest.fixture(scope="module")
def files(machine: Machine) -> ShelfFiles:
    return ShelfFiles(Path(machine.shelf))


@pytest.fixture(scope="module")
def writer(engines: Engines, machine: Machine) -> Iterator[Engine]:
    with machine.engine(engines, "writer") as engine:
        yield engine


@pytest.fixture(scope="module")
def reader(engines: Engines, machine: Machine, writer: Engine) -> Iterator[Engine]:
    with machine.engine(engines, "reader", read_only=True) as engine:
        yield engine


@pytest.fixture
def stored(writer: Engine, files: ShelfFiles, prompt: MakePrompt) -> list[int]:
    """A prompt of three chunks that is stored."""
    tokens = prompt(900)
    writer.reset_prefix_cache()
    writer.generate(tokens)
    files.wait_stored(tokens)
    return tokens


def test_what_hits_now_missed_before(machine: Machine, stored: list[int]) -> None:
    machine.wait_noted(stored, "missed", "absent")
    found, codes = machine.explain(stored)
    assert found["hits"]
    assert found["hit_chunks"] == found["usable_chunks"] == 3
    assert "of scheduler" in found["chosen"]
    assert codes == ["stored_since"]


def test_a_request_that_does_not_read(machine: Machine, writer: Engine, stored: list[int]) -> None:
    writer.generate(stored, prompt_logprobs=0)
    machine.wait_noted(stored, "not_loaded", "not_asked")
    assert machine.explain(stored)[1] == ["not_loaded"]


def test_the_histories_are_small_and_private(machine: Machine, writer: Engine) -> None:
    paths = list(machine.histories.iterdir())
    roles = {past.header["role"]: past for past in read_histories(machine.histories)}
    assert {"scheduler", "rank 0"} <= roles.keys()
    assert all(past.running for past in roles.values())
    assert sum(path.stat().st_size for path in paths) <= LARGEST
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}


@pytest.mark.slow
def test_a_read_only_fleet_names_bad_objects(
    machine: Machine, reader: Engine, stored: list[int], files: ShelfFiles, prompt: MakePrompt
) -> None:
    path = files.of(stored)[1][0]
    good = path.read_bytes()
    DAMAGE["flipped byte of the payload"](path)
    reader.generate(stored)
    machine.wait_noted(stored, "failed_load", "bad")
    found, codes = machine.explain(stored)
    assert not found["hits"]
    assert codes[0] == "bad_object"
    name = str(path.relative_to(files.root))
    assert name in found["causes"][0]["text"]
    until(lambda: reader.counters().get("unrepaired_objects") == 1, "the bad object counted")
    code, output = machine.run("doctor", machine.shelf)
    assert code == 1
    assert name in output
    # What a read-only engine computes is not stored.
    tokens = prompt(600)
    reader.generate(tokens)
    machine.wait_noted(tokens, "missed", "absent")
    until(lambda: "stores_nothing" in machine.explain(tokens)[1], "why nothing is stored")
    path.write_bytes(good)
    assert machine.run("doctor", machine.shelf)[0] == 0


@pytest.mark.slow
def test_an_engine_with_another_namespace(
    engines: Engines, machine: Machine, stored: list[int]
) -> None:
    """The last test with this shelf: the engine of the last history chooses the namespace."""
    with machine.engine(engines, "other", version="2", read_only=True) as other:
        other.generate(stored)
        until(
            lambda: machine.explain(stored)[1][0] == "other_namespace", "a history of that engine"
        )
        found, codes = machine.explain(stored)
        assert codes[:2] == ["other_namespace", "stores_nothing"]
        assert found["near"][0]["differs"] == ["version"]
        assert found["causes"][0]["advice"].startswith("version is absent there and '2' here")


@pytest.mark.slow
def test_chunks_that_were_dropped(engines: Engines, tmp_path: Path, prompt: MakePrompt) -> None:
    machine = Machine(tmp_path)
    with machine.engine(engines, "dropping", staging_bytes=700_000) as engine:
        tokens = prompt(4000)
        engine.generate(tokens, max_tokens=1)
        until(lambda: not machine.explain(tokens)[0]["hits"], "an answer")
        machine.wait_noted(tokens, "dropped_store", "staging_full")
        found, codes = machine.explain(tokens)
        assert codes[0] == "dropped"
        assert "staging was full" in found["causes"][0]["text"]


@pytest.mark.slow
def test_chunks_that_were_evicted(engines: Engines, tmp_path: Path, prompt: MakePrompt) -> None:
    machine = Machine(tmp_path)
    files = ShelfFiles(tmp_path / "shelf")
    bounds = {"max_bytes": 8 << 20, "min_free": 0}
    with machine.engine(engines, "bounded", capacity=bounds) as engine:
        first = prompt(900)
        engine.generate(first)
        files.wait_stored(first)

        def evicted() -> bool:
            # Stores wake the thread that sweeps.
            engine.generate(prompt(900))
            events = machine.explain(first)[0]["events"]
            return any(event["event"] == "evicted" for event in events)

        until(evicted, "a sweep in a history", 120)
        found, codes = machine.explain(first)
        assert not found["hits"]
        assert codes[0] == "evicted"
        assert "max_bytes" in found["causes"][0]["text"]
