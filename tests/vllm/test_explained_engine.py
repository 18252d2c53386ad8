"""``kvshelf explain`` and ``kvshelf doctor`` on shelves of real engines, with their histories."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvshelf.cli.app import app
from kvshelf.history import LARGEST, read_histories
from tests.support.engines import Engine
from tests.support.fleet import Engines
from tests.support.servers import BUCKET, S3Server, command, rclone_s3
from tests.support.waiting import until
from tests.vllm.shelf_files import DAMAGE, ShelfFiles

MakePrompt = Callable[[int], list[int]]


class Machine:
    """The histories of a machine, a shelf, and the commands."""

    def __init__(self, root: Path, shelf: str, options: dict[str, Any] | None = None) -> None:
        self.root = root
        self.shelf = shelf
        self.histories = root / "histories"
        self.options = options or {}

    def engine(self, engines: Engines, name: str, **extra: Any) -> Engine:
        return engines.on_shelf(
            f"explained {name}",
            self.shelf,
            {"storage_options": self.options, "history_path": str(self.histories), **extra},
        )

    def run(self, *arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(
            app,
            [str(argument) for argument in arguments],
            env={
                "KVSHELF_STORAGE_OPTIONS": json.dumps(self.options),
                "KVSHELF_HISTORY_PATH": str(self.histories),
            },
        )
        return result.exit_code, result.stdout

    def explain(
        self, tokens: list[int], *options: object, salt: str | None = None
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the explanation of a prompt, and the codes of its causes."""
        path = self.root / "prompt.jsonl"
        path.write_text(json.dumps({"tokens": tokens, "cache_salt": salt}))
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
    root = tmp_path_factory.mktemp("explained")
    return Machine(root, str(root / "shelf"))


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


def test_a_short_prompt(machine: Machine, stored: list[int]) -> None:
    assert machine.explain(stored[:200])[1] == ["too_short"]


def test_a_prompt_that_nobody_sent(machine: Machine, stored: list[int], prompt: MakePrompt) -> None:
    assert machine.explain(prompt(600))[1] == ["never_stored"]


def test_prompts_that_part(
    machine: Machine, stored: list[int], prompt: MakePrompt, tmp_path: Path
) -> None:
    other = tmp_path / "stored.jsonl"
    other.write_text(json.dumps(stored))
    found, codes = machine.explain(stored[:300] + prompt(600), "--like", other)
    assert found["hit_chunks"] == 1
    assert codes == ["tokens_differ", "parts_here"]


def test_a_salt(machine: Machine, stored: list[int]) -> None:
    assert machine.explain(stored, salt="tenant")[1] == ["cache_salt", "never_stored"]


def test_a_missing_shard(machine: Machine, stored: list[int], files: ShelfFiles) -> None:
    chunk = files.of(stored)[1]
    assert len(chunk) > 1
    chunk[1].unlink()
    found, codes = machine.explain(stored)
    assert codes == ["missing_shard"]
    assert list(found["missing"][0]["objects"].values()) == ["present", "missing"]


def test_a_deleted_chunk(machine: Machine, stored: list[int], files: ShelfFiles) -> None:
    for path in files.of(stored)[1]:
        path.unlink()
    assert machine.explain(stored)[1] == ["deleted"]


def test_a_truncated_object(machine: Machine, stored: list[int], files: ShelfFiles) -> None:
    DAMAGE["truncated"](files.of(stored)[2][0])
    assert machine.explain(stored)[1] == ["wrong_size"]


def test_the_histories_are_small_and_private(machine: Machine, writer: Engine) -> None:
    paths = list(machine.histories.iterdir())
    roles = {past.header["role"]: past for past in read_histories(machine.histories)}
    assert {"scheduler", "rank 0"} <= roles.keys()
    assert all(past.running for past in roles.values())
    assert sum(path.stat().st_size for path in paths) <= LARGEST
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}


def test_a_read_only_fleet_names_bad_objects(
    machine: Machine,
    reader: Engine,
    stored: list[int],
    files: ShelfFiles,
    prompt: MakePrompt,
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
    machine = Machine(tmp_path, str(tmp_path / "shelf"))
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
    machine = Machine(tmp_path, str(tmp_path / "shelf"))
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


@pytest.mark.slow
@pytest.mark.skipif(command("rclone") is None, reason="rclone is not installed")
def test_a_bucket(engines: Engines, tmp_path: Path, prompt: MakePrompt) -> None:
    pytest.importorskip("obstore", reason="obstore is missing: pip install 'kvshelf[s3]'")
    with rclone_s3(tmp_path / "bucket") as server:
        _explain_a_bucket(engines, tmp_path, prompt, server)


def _explain_a_bucket(
    engines: Engines, tmp_path: Path, prompt: MakePrompt, server: S3Server
) -> None:
    machine = Machine(tmp_path, f"s3://{BUCKET}/kv", server.options())
    assert server.folder is not None
    files = ShelfFiles(server.folder / BUCKET / "kv")
    first, second = prompt(900), prompt(900)
    with machine.engine(engines, "in a bucket") as engine:
        for tokens in (first, second):
            engine.generate(tokens)
            files.wait_stored(tokens)
        machine.wait_noted(second, "missed", "absent")
        assert machine.explain(first)[0]["hits"]
        assert machine.explain(prompt(600))[1] == ["never_stored"]
        assert machine.explain(first, salt="tenant")[1] == ["cache_salt", "never_stored"]
        files.of(first)[1][1].unlink()
        assert machine.explain(first)[1] == ["missing_shard"]
        for path in (files.of(first)[1][0], *files.of(second)[2]):
            path.unlink()
        assert machine.explain(first)[1] == ["deleted"]
        assert machine.explain(second)[1] == ["parts_here"]
        DAMAGE["flipped byte of the payload"](files.of(second)[0][0])
        assert "bad_object" in machine.explain(second, "--verify")[1]
        assert machine.run("doctor", machine.shelf)[0] == 0
    with machine.engine(engines, "of another version", version="2", read_only=True) as other:
        other.generate(second)
        until(
            lambda: machine.explain(second)[1][0] == "other_namespace", "a history of that engine"
        )
