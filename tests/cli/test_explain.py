"""Why a prompt misses: one shelf for each cause, made without engines."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from kvshelf.capacity.sweep import KEEPERS
from kvshelf.cli import explain as explain_module
from kvshelf.cli.explain import Explainer, Explanation
from kvshelf.format.keys import Chunk, KeyChain, salt_group_of
from kvshelf.format.kinds import FULL, STATE, WINDOW, Kind
from kvshelf.format.namespace import Namespace
from kvshelf.prompts import TokenPrompt
from kvshelf.shelf.shelf import open_shelf
from tests.support.commands import done
from tests.support.filled import CHUNK, fill, hybrid, namespace, prompt, store

TOKENS = prompt(1, 4)


class Rig:
    """A shelf."""

    def __init__(self, root: Path) -> None:
        self.root = root / "shelf"

    def explain(
        self,
        tokens: list[int] = TOKENS,
        *,
        salt: str = "",
        **options: Any,
    ) -> Explanation:
        with open_shelf(self.root, read_only=True) as shelf:
            explainer = Explainer(shelf, **options)
            return explainer.explain(TokenPrompt(1, tokens, salt))

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
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
def stored(rig: Rig) -> Rig:
    fill(rig.root, namespace(), TOKENS)
    return rig


def spoil_description(rig: Rig) -> None:
    (rig.root / namespace().folder / "namespace.json").write_text("{}")


def truncate_object(rig: Rig) -> None:
    os.truncate(rig.path(1), 100)


def replace_object_by_folder(rig: Rig) -> None:
    path = rig.path(1)
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("tokens", "change", "causes"),
    [
        (TOKENS[: CHUNK - 1], None, ["too_short"]),
        (prompt(5, 3), None, ["never_stored"]),
        (TOKENS, spoil_description, ["description", "no_namespace"]),
        (TOKENS, truncate_object, ["wrong_size"]),
        (TOKENS, replace_object_by_folder, ["not_regular"]),
    ],
)
def test_what_is_wrong_with_a_prompt_or_its_objects_is_the_cause(
    stored: Rig, tokens: list[int], change: Callable[[Rig], None] | None, causes: list[str]
) -> None:
    if change is not None:
        change(stored)
    explanation = stored.explain(tokens)
    assert codes(explanation) == causes
    assert not explanation.hits
    assert change is not spoil_description or namespace().folder in explanation.causes[0].text


@pytest.mark.parametrize(
    ("kind", "indices", "hit", "cause", "text"),
    [
        (STATE, [2], 2, "no_state", "not the state of chunk 2"),
        (WINDOW, [1, 2], 1, "no_window", "chunk 1, 2"),
    ],
)
def test_state_or_window_that_is_missing_ends_a_hit(
    rig: Rig, kind: Kind, indices: list[int], hit: int, cause: str, text: str
) -> None:
    of = hybrid(sliding_windows=[0, CHUNK + 2, 0])
    fill(rig.root, of, TOKENS)
    for index in indices:
        for path in rig.root.glob(f"*/*/*/{key(index, of).hex()}-{index}-{kind}-*of*"):
            path.unlink()
    explanation = rig.explain()
    assert (explanation.hit_chunks, codes(explanation)) == (hit, [cause])
    assert text in explanation.causes[0].text
    assert {piece.kind for piece in explanation.missing} == {kind}


@pytest.mark.parametrize(
    ("field", "value"),
    [("weights", "user:other"), ("version", "2"), ("kv_dtype", "float16"), ("compute_dtype", "x")],
)
def test_another_namespace_has_it(rig: Rig, field: str, value: str) -> None:
    other = namespace(**{field: value})
    fill(rig.root, other, TOKENS)
    fill(rig.root, namespace(), prompt(2, 1))
    found = rig.explain(folder=namespace().folder)
    assert "other_namespace" in codes(found)
    cause = next(cause for cause in found.causes if cause.code == "other_namespace")
    assert other.folder in cause.text
    assert cause.advice.startswith(f"{field} is ")
    assert found.near[0].namespace == other.folder
    assert found.near[0].hit_chunks == 4
    assert found.near[0].differs == [field]


def test_without_a_choice_the_namespace_with_the_longest_hit_is_taken(rig: Rig) -> None:
    # Of more and smaller chunks.
    shorter = namespace(chunk_size=CHUNK // 2)
    fill(rig.root, shorter, TOKENS[: 3 * CHUNK])
    fill(rig.root, namespace(), TOKENS)
    found = rig.explain()
    assert found.namespace == namespace().folder
    assert found.hits
    found = rig.explain(folder=shorter.folder)
    assert found.near[0].namespace == namespace().folder and "other_namespace" in codes(found)


def test_salt_that_is_stored_without(stored: Rig) -> None:
    found = stored.explain(salt="tenant")
    assert codes(found) == ["cache_salt", "never_stored"]
    assert "4 of 4 chunks" in found.causes[0].text


def test_prompt_is_found_in_the_salt_group_in_which_it_is(rig: Rig) -> None:
    with open_shelf(rig.root) as shelf:
        store(shelf, namespace(), TOKENS, salt="tenant")
    assert rig.explain(salt="tenant").hits
    # One of another tenant is missing where an engine with group_by_salt would store it.
    [piece, *_] = rig.explain(salt="other").missing
    assert all(f"/{salt_group_of('other')}/" in name for name in piece.objects)


def test_bounds_of_a_shelf_are_named_where_others_of_a_prompt_are_there(stored: Rig) -> None:
    with open_shelf(stored.root) as shelf:
        said = b'{"max_bytes": 1073741824, "max_age": 604800.0}'
        shelf.backend.write(f"{KEEPERS}/{'0' * 16}", [said])
    found = stored.explain([*TOKENS, *prompt(4, 1)])
    assert codes(found) == ["parts_here", "bounds"]
    assert "max_bytes 1073741824 and max_age 604800" in found.causes[1].text
    stored.path(2, 0).unlink()
    stored.path(2, 1).unlink()
    assert codes(stored.explain()) == ["deleted", "bounds"]
    assert codes(stored.explain(prompt(5, 3))) == ["never_stored"]


# --------------------------------------------------------------------------- the command


def test_command_tells_by_its_exit_code(stored: Rig, tmp_path: Path) -> None:
    def call(*prompts: list[int], code: int = 0) -> Result:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(tokens) + "\n" for tokens in prompts))
        return done("explain", stored.root, path, code=code)

    result = call(TOKENS)
    assert "a lookup finds 4 of the 4" in result.stdout
    stored.path(2, 1).unlink()
    result = call(TOKENS, TOKENS[: 2 * CHUNK], code=1)
    assert "shard 1 of 2 is missing [missing_shard]" in result.stdout
    assert "line 2: 64 tokens, 2 chunks of 32: a lookup finds 2 of the 2" in result.stdout
    shutil.rmtree(stored.root)
    call(TOKENS, code=3)


def test_every_cause_is_documented() -> None:
    source = Path(explain_module.__file__).read_text()
    found = set(re.findall(r'(?:Cause\(|: \()\s*"([a-z_]+)"', source)) | {"no_state", "no_window"}
    assert {"bounds", "deleted", "wrong_size"} < found
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    rows = page.split("| `code` |")[1].split("\n\n")[0].splitlines()[2:]
    listed = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert listed == found
