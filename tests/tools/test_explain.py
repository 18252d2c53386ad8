"""Why a prompt misses: one shelf for each cause, made without engines."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvshelf.cli.app import app
from kvshelf.errors import BadObjectError, ConfigError
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, STATE, WINDOW, Kind, kind_key
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.history import WITH_RECORD, Event, History, Reason, read_histories
from kvshelf.shelf.shelf import open_shelf
from kvshelf.shelf.view import ObjectRef
from kvshelf.tools import explain as explain_module
from kvshelf.tools.explain import Explainer, Explanation
from kvshelf.tools.noted import still_bad
from kvshelf.tools.prompts import Prompt
from tests.support.filled import CHUNK, fill, hybrid, namespace, prompt, store

TOKENS = prompt(1, 4)


class Rig:
    """A shelf, and the histories of a machine."""

    def __init__(self, root: Path) -> None:
        self.root = root / "shelf"
        self.histories = root / "histories"
        self.open: list[History] = []

    def history(self, of: Namespace | None = None, **header: Any) -> History:
        if of is not None:
            header |= {"namespace": of.folder, "record": of.record}
        history = History.open(
            self.histories,
            header_bytes=WITH_RECORD,
            **{"role": "scheduler", "shelf": str(self.root), **header},
        )
        assert history is not None
        self.open.append(history)
        return history

    def explain(
        self,
        tokens: list[int] = TOKENS,
        *,
        salt: str = "",
        like: list[int] | None = None,
        **options: Any,
    ) -> Explanation:
        for history in self.open:
            history.flush()
        earlier = [] if like is None else [Prompt(7, tokens=like)]
        with open_shelf(self.root, read_only=True) as shelf:
            explainer = Explainer(shelf, read_histories(self.histories), **options)
            return explainer.explain(Prompt(1, tokens=tokens, salt=salt), earlier)

    def path(self, index: int, shard: int = 0, kind: Kind = FULL) -> Path:
        middle = "" if kind == FULL else f"-{kind}"
        (found,) = self.root.glob(f"*/*/*/{key(index).hex()}-{index}{middle}-{shard}of*")
        return found


def key(index: int, of: Namespace | None = None) -> bytes:
    return chunks(of)[index].key


def chunks(of: Namespace | None = None) -> list[Chunk]:
    return KeyChain((of or namespace()).digest, CHUNK).extend(TOKENS)


def codes(found: Explanation) -> list[str]:
    return [cause.code for cause in found.causes]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    for history in made.open:
        history.close()


@pytest.fixture
def stored(rig: Rig) -> Rig:
    fill(rig.root, namespace(), TOKENS)
    return rig


def test_a_description_that_cannot_be_used_is_named(stored: Rig) -> None:
    (stored.root / namespace().folder / "namespace.json").write_text("{}")
    found = stored.explain()
    assert codes(found) == ["description", "no_namespace"]
    assert namespace().folder in found.causes[0].text


def test_a_prompt_shorter_than_a_chunk(stored: Rig) -> None:
    found = stored.explain(TOKENS[: CHUNK - 1])
    assert codes(found) == ["too_short"]
    assert not found.hits


def test_a_tail_that_is_stored(stored: Rig) -> None:
    fmt = ObjectFormat(namespace())
    chain = KeyChain(namespace().digest, CHUNK)
    chain.extend(TOKENS[:20])
    tail = chain.tail()
    assert tail is not None
    with open_shelf(stored.root) as shelf:
        for shard in range(fmt.shards):
            tensors = [bytes(tensor.nbytes) for tensor in fmt.tensors(shard, 20)]
            shelf.view(fmt).publish(
                ObjectRef(tail, shard), b"".join(fmt.encode(tail, shard, tensors))
            )
    (cause,) = stored.explain(TOKENS[:20]).causes
    assert "cache_tails" in cause.advice
    assert "is stored" in cause.advice


@pytest.mark.parametrize(
    ("field", "value"),
    [("weights", "user:other"), ("version", "2"), ("kv_dtype", "float16"), ("compute_dtype", "x")],
)
def test_another_namespace_has_it(rig: Rig, field: str, value: str) -> None:
    other = namespace(**{field: value})
    fill(rig.root, other, TOKENS)
    fill(rig.root, namespace(), prompt(2, 1))
    found = rig.explain(namespace=namespace().folder[-16:])
    assert "other_namespace" in codes(found)
    cause = next(cause for cause in found.causes if cause.code == "other_namespace")
    assert other.folder in cause.text
    assert cause.advice.startswith(f"{field} is ")
    assert found.near[0].namespace == other.folder
    assert found.near[0].hit_chunks == 4
    assert found.near[0].differs == [field]


def test_without_a_choice_the_namespace_with_the_longest_hit_is_taken(rig: Rig) -> None:
    fill(rig.root, namespace(), TOKENS[: 2 * CHUNK])
    fill(rig.root, namespace(version="2"), TOKENS)
    found = rig.explain()
    assert found.namespace == namespace(version="2").folder
    assert found.hits


def test_a_namespace_that_nobody_has(stored: Rig) -> None:
    with pytest.raises(ConfigError, match="no namespace 0123"):
        stored.explain(namespace="0123")


def test_an_object_of_the_wrong_size(stored: Rig) -> None:
    path = stored.path(1, 0)
    path.write_bytes(path.read_bytes()[:-1])
    assert codes(stored.explain()) == ["wrong_size"]


def test_what_is_no_file(stored: Rig) -> None:
    path = stored.path(1, 0)
    path.unlink()
    path.mkdir()
    assert codes(stored.explain()) == ["not_regular"]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_an_object_that_a_history_calls_bad_is_read(stored: Rig) -> None:
    stored.history().note(Event.FAILED_LOAD, key(1), chunk=1, detail=Reason.BAD)
    assert codes(stored.explain()) == ["failed_load"]
    damage(stored.path(1, 1))
    found = stored.explain()
    assert codes(found) == ["bad_object", "failed_load"]
    assert not found.hits


def test_an_object_in_quarantine(stored: Rig) -> None:
    for shard in range(2):
        damage(stored.path(1, shard))
        with open_shelf(stored.root) as shelf:
            fmt = ObjectFormat(namespace())
            buffer = memoryview(bytearray(fmt.object_size(shard)))
            with pytest.raises(BadObjectError):
                shelf.view(fmt).load(ObjectRef(chunks()[1], shard), buffer)
    found = stored.explain()
    assert codes(found)[:2] == ["quarantined", "quarantined"]
    assert ".kvshelf/bad/" in found.causes[0].text


def test_a_prompt_that_nobody_stored(stored: Rig) -> None:
    assert codes(stored.explain(prompt(5, 3))) == ["never_stored"]


def test_a_salt_that_is_stored_without(stored: Rig) -> None:
    found = stored.explain(salt="tenant")
    assert codes(found) == ["cache_salt", "never_stored"]
    assert "4 of 4 chunks" in found.causes[0].text


def test_another_prompt_had_another_salt(stored: Rig) -> None:
    assert codes(stored.explain(prompt(5, 3), salt="x", like=prompt(5, 3))) == [
        "cache_salt",
        "never_stored",
    ]


def test_the_other_salt_group(rig: Rig) -> None:
    with open_shelf(rig.root) as shelf:
        store(shelf, namespace(), TOKENS, salt="tenant")
    history = rig.history(namespace(), group_by_salt=False)
    found = rig.explain(salt="tenant")
    assert codes(found) == ["salt_group"]
    assert not found.hits
    history.describe(group_by_salt=True)
    assert rig.explain(salt="tenant").hits


@pytest.mark.parametrize(
    ("event", "reason", "code"),
    [
        (Event.NOT_LOADED, Reason.TIMED_OUT, "not_loaded"),
        (Event.NOT_LOADED, Reason.UNAVAILABLE, "not_loaded"),
        (Event.NOT_LOADED, Reason.STARTING, "not_loaded"),
        (Event.FAILED_LOAD, Reason.TIMED_OUT, "failed_load"),
        (Event.MISSED, Reason.ABSENT, "stored_since"),
        (Event.MISSED, Reason.FAILED_BEFORE, "stored_since"),
    ],
)
def test_why_a_prompt_missed_that_is_there_now(
    stored: Rig, event: Event, reason: Reason, code: str
) -> None:
    stored.history().note(event, key(3), chunk=3, detail=reason)
    found = stored.explain()
    assert codes(found) == [code]
    assert found.hits


def test_an_engine_that_stores_nothing(stored: Rig) -> None:
    stored.history(namespace(), refuses="read_only is true")
    found = stored.explain([*TOKENS, *prompt(4, 1)])
    assert codes(found) == ["stores_nothing", "parts_here"]
    assert "read_only is true" in found.causes[0].text


def test_an_engine_that_does_not_cache(stored: Rig) -> None:
    stored.history(namespace(), disabled="ranks have different weights")
    found = stored.explain()
    assert codes(found) == ["disabled"]
    assert not found.hits


def test_the_history_of_another_shelf_does_not_choose_the_namespace(stored: Rig) -> None:
    stored.history(namespace(version="2"), shelf="/elsewhere")
    assert stored.explain().hits


def test_an_engine_behind_a_node_server(stored: Rig) -> None:
    stored.history(namespace(version="2"), shelf="ipc:///run/node.sock")
    assert stored.explain().namespace == namespace().folder
    stored.history(role="node server", socket="ipc:///run/node.sock")
    found = stored.explain()
    assert found.namespace == namespace(version="2").folder
    assert codes(found)[0] == "other_namespace"


# --------------------------------------------------------------------------- hybrid models


HYBRID = hybrid(sliding_windows=[0, CHUNK + 2, 0])


@pytest.fixture
def of_hybrid(rig: Rig) -> Rig:
    fill(rig.root, HYBRID, TOKENS)
    return rig


def remove(rig: Rig, kind: Kind, *indices: int) -> None:
    for index in indices:
        name = f"{key(index, HYBRID).hex()}-{index}{'' if kind == FULL else f'-{kind}'}-*of*"
        found = list(rig.root.glob(f"*/*/*/{name}"))
        assert found
        for path in found:
            path.unlink()


def test_a_missing_state_ends_a_hit(of_hybrid: Rig) -> None:
    remove(of_hybrid, STATE, 2)
    found = of_hybrid.explain()
    assert found.hit_chunks == 2
    assert codes(found) == ["no_state"]
    assert "the state after chunk 2; the last one is that of chunk 3" in found.causes[0].text
    assert [(piece.kind, piece.chunk) for piece in found.missing] == [(STATE, 2)]


def test_a_state_that_was_not_worth_its_bytes(of_hybrid: Rig) -> None:
    remove(of_hybrid, STATE, 0, 1, 2, 3)
    history = of_hybrid.history()
    name = kind_key(key(2, HYBRID), STATE)
    history.note(Event.REFUSED_STORE, name, chunk=2, detail=Reason.NOT_WORTH)
    found = of_hybrid.explain()
    assert found.hit_chunks == 0
    assert codes(found) == ["refused", "no_state"]
    assert "state_interval" in found.causes[0].advice


def test_missing_windows_end_a_hit(of_hybrid: Rig) -> None:
    remove(of_hybrid, WINDOW, 1, 2)
    found = of_hybrid.explain()
    assert found.hit_chunks == 1
    assert codes(found) == ["no_window"]
    assert "chunk 1, 2" in found.causes[0].text


def test_what_gc_deleted(stored: Rig) -> None:
    result = CliRunner().invoke(
        app,
        ["gc", str(stored.root), "--max-bytes", "4KiB", "--yes"],
        env={"KVSHELF_HISTORY_PATH": str(stored.histories)},
    )
    assert result.exit_code == 0, result.output
    found = stored.explain()
    assert codes(found) == ["evicted"]
    assert found.causes[0].text.startswith("kvshelf gc (pid ")


# --------------------------------------------------------------------------- bad objects


def test_objects_that_engines_met_and_that_are_still_bad(stored: Rig) -> None:
    names = [str(stored.path(index, 1).relative_to(stored.root)) for index in range(4)]
    history, elsewhere = stored.history(), stored.history(shelf="/elsewhere")
    for name in [*names[:3], "no/object", "x-0123456789abcdef/" + names[0].partition("/")[2]]:
        history.note_bad(name)
    elsewhere.note_bad(names[3])
    for index in (1, 2, 3):
        damage(stored.path(index, 1))
    stored.path(2, 1).unlink()
    history.flush()
    elsewhere.flush()
    with open_shelf(stored.root, read_only=True) as shelf:
        assert list(still_bad(shelf, read_histories(stored.histories))) == [names[1]]
    result = CliRunner().invoke(
        app,
        ["doctor", str(stored.root)],
        env={"KVSHELF_HISTORY_PATH": str(stored.histories), "KVSHELF_READ_ONLY": "true"},
    )
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("bad objects")]
    assert names[1] in line
    assert names[0] not in line


# --------------------------------------------------------------------------- hostile contents


def test_histories_of_any_content_explain_nothing(stored: Rig) -> None:
    history = stored.history(namespace())
    history.describe(namespace=5, bad=["x"], record=[], refuses={}, disabled=3, role=None)
    history._fresh.append((1e300, 250, key(1), 5, 250))  # type: ignore[arg-type]
    stored.history(namespace(), record={"format": "kvshelf/1"}, namespace="x")
    stored.history(namespace(version="3")).describe(record={"format": 7})
    found = stored.explain()
    assert found.hit_chunks == 4
    assert found.events[0].event == "unknown"


# --------------------------------------------------------------------------- the command


@pytest.fixture
def call(rig: Rig, tmp_path: Path) -> Callable[..., Result]:
    def run(*lines: object, options: tuple[object, ...] = ()) -> Result:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        arguments = ["explain", path, rig.root, "--history", rig.histories, *options]
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


def test_the_command_tells_by_its_exit_code(stored: Rig, call: Callable[..., Result]) -> None:
    result = call(TOKENS)
    assert result.exit_code == 0
    assert "a lookup finds 4 of the 4" in result.stdout
    stored.path(2, 1).unlink()
    stored.history(namespace()).note(Event.MISSED, key(2), chunk=2, detail=Reason.ABSENT)
    stored.open[0].flush()
    result = call(TOKENS, TOKENS[: 2 * CHUNK])
    assert result.exit_code == 1
    assert "shard 1 of 2 is missing" in result.stdout
    assert time.strftime("%Y-") in result.stdout
    assert "line 2: 64 tokens, 2 chunks of 32: a lookup finds 2 of the 2" in result.stdout
    shutil.rmtree(stored.root)
    assert call(TOKENS).exit_code == 3


def test_the_command_compares_with_another_prompt(
    stored: Rig, call: Callable[..., Result], tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(TOKENS))
    result = call([1, *TOKENS], options=("--like", other))
    assert result.exit_code == 1
    assert "token 0 differs, in chunk 0" in result.stdout


def test_every_cause_is_documented() -> None:
    source = Path(explain_module.__file__).read_text()
    found = set(re.findall(r'Cause\(\s*"([a-z_]+)"', source))
    found |= {
        code
        for each in re.findall(r"codes = \{(.*?)\}", source)
        for code in re.findall(r': "([a-z_]+)"', each)
    }
    assert {"evicted", "failed_load", "no_state"} < found
    page = (Path(__file__).parents[2] / "docs" / "misses.md").read_text()
    rows = page.split("| `code` |")[1].split("\n\n")[0].splitlines()[2:]
    listed = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert listed == found
