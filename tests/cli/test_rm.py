"""``kvshelf rm``: what it deletes, what stays, and what it says before."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvshelf.backends import base
from kvshelf.backends.base import probe
from kvshelf.capacity.visit import Choice, Outcome, Rules, delete
from kvshelf.errors import PermanentStorageError
from kvshelf.format.keys import KeyChain, salt_group_of
from kvshelf.format.names import parse_path
from kvshelf.format.namespace import Namespace
from kvshelf.shelf.shelf import Shelf, open_shelf
from kvshelf.tools.plans import Plan, make, pick
from tests.sim.storage import Fault, FaultyStorage
from tests.support.filled import CHUNK, hybrid, namespace, prompt
from tests.support.places import Place

ONE, OTHER = namespace(), hybrid()


def rm(place: Place, *args: object, code: int = 0) -> dict[str, Any]:
    (row,) = place.rows("rm", *args, code=code)
    return row


def chosen(found: dict[str, Any]) -> int:
    """The objects that are to be deleted."""
    files: int = found["chosen"].get("chosen", {"files": 0})["files"]
    return files


def removed(found: dict[str, Any]) -> int:
    """The files that were deleted."""
    return sum(total["files"] for total in found["deleted"].values())


def keys(names: set[str]) -> set[bytes]:
    return {parsed.key for name in names if (parsed := parse_path(name)) is not None}


def keys_of(of: Namespace, tokens: list[int], salt: str = "") -> set[bytes]:
    return {chunk.key for chunk in KeyChain(of.digest, CHUNK, salt=salt).extend(tokens)}


@pytest.fixture
def place(empty: Place) -> Place:
    """Two prompts of three chunks that begin alike, one with a salt, and one of a hybrid model."""
    shared = prompt(0, chunks=1)
    empty.fill(ONE, shared + prompt(1, chunks=2))
    empty.fill(ONE, shared + prompt(2, chunks=2))
    empty.fill(ONE, prompt(1, chunks=2), salt="tenant")
    empty.fill(OTHER, prompt(1, chunks=2))
    return empty


def test_a_namespace_goes_with_its_markers(place: Place) -> None:
    kept = {name for name in place.names() if name.startswith(OTHER.folder)}
    with place.open() as shelf:
        shelf.backend.write(f"{ONE.folder}/.kvshelf/gave-up/{'0' * 32}", [])
        shelf.backend.write(f"{ONE.folder}/_/README", [b"mine"])
        shelf.backend.write(f"{OTHER.folder}/.kvshelf/gave-up/{'0' * 32}", [])
    text = place.run("rm", "-n", ONE.folder[-16:]).stdout
    assert "would delete 15 files" in text and "--yes deletes" in text
    assert all(f"{ONE.folder}/{group}" in text for group in ("_", salt_group_of("tenant")))
    found = rm(place, "-n", ONE.folder, "--yes")
    assert (chosen(found), found["chosen"]["marker"]["files"]) == (14, 1)
    assert removed(found) == 15
    assert found["deleted"] == found["chosen"]
    assert place.names() == kept
    with place.open() as shelf:
        left = {row.name for row in shelf.backend.list(ONE.folder, hidden=True)}
        assert left == {f"{ONE.folder}/namespace.json", f"{ONE.folder}/_/README"}
        assert probe(shelf.backend, f"{OTHER.folder}/.kvshelf/gave-up/{'0' * 32}") == 0


def test_a_salt_group_goes_in_all_namespaces_or_in_one(place: Place) -> None:
    place.fill(OTHER, prompt(1, chunks=1), salt="tenant")
    group = salt_group_of("tenant")
    assert chosen(rm(place, "--group", group, "-n", ONE.folder)) == 4
    found = rm(place, "--group", group, "--yes")
    assert {row["name"] for row in found["rows"]} == {f"{of.folder}/{group}" for of in (ONE, OTHER)}
    assert removed(found) == 4 + 7
    assert all("/_/" in name for name in place.names())
    assert len(place.names()) == 10 + 14


def test_prompts_go_with_all_kinds_shards_and_tails(place: Place, tmp_path: Path) -> None:
    tokens = prompt(1, chunks=2)
    with place.open() as shelf:
        # The tail of a prompt that ends inside its third chunk.
        chain = KeyChain(ONE.digest, CHUNK)
        chain.extend([*tokens, 7, 8])
        tail = chain.tail()
        assert tail is not None
        for shard in range(2):
            name = (
                f"{ONE.folder}/_/{tail.key.hex()[:2]}/{tail.key.hex()}-2t2-{shard}of2.safetensors"
            )
            assert parse_path(name) is not None
            shelf.backend.write(name, [b"tail"])
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        json.dumps([*tokens, 7, 8])
        + "\n"
        + json.dumps({"tokens": tokens, "cache_salt": "tenant"})
        + "\n"
    )
    found = rm(place, "--prompts", file, "--yes")
    # Without its beginning, the prompt is not stored in this namespace's group _.
    assert {row["name"]: row["objects"] for row in found["rows"]} == {
        f"{ONE.folder}/_": 2,
        f"{ONE.folder}/{salt_group_of('tenant')}": 4,
        f"{OTHER.folder}/_": 14,
    }
    left = keys(place.names())
    assert left == keys_of(ONE, prompt(0, chunks=1) + prompt(1, chunks=2)) | keys_of(
        ONE, prompt(0, chunks=1) + prompt(2, chunks=2)
    )


def test_what_is_pinned_stays_unless_it_is_chosen(place: Place, tmp_path: Path) -> None:
    pinned = prompt(0, chunks=1) + prompt(1, chunks=2)
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(pinned))
    assert place.run("pin", "mine", file).exit_code == 0
    found = rm(place, "-n", ONE.folder, "--yes")
    assert found["pinned"]["files"] == 6
    assert found["pinned"]["bytes"] > 0
    assert removed(found) == 8
    assert keys(place.names()) >= keys_of(ONE, pinned)
    assert "6 (" in (text := place.run("rm", "--prompts", file).stdout)
    assert "pinned, left" in text
    assert removed(rm(place, "--prompts", file, "--pinned", "--yes")) == 6
    assert not keys(place.names()) & keys_of(ONE, pinned)


def test_a_pin_ends_by_the_clock_that_is_behind(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place.run("pin", "mine", "-n", ONE.folder, "--until", "10m").exit_code == 0
    monkeypatch.setattr("kvshelf.cli.deletion.storage_time", lambda _: time.time() + 1800)
    found = rm(place, "-n", ONE.folder, "--yes")
    assert (found["pinned"]["files"], chosen(found)) == (14, 0)


def test_an_unreadable_pin_is_named(place: Place) -> None:
    with place.open() as shelf:
        shelf.backend.write(".kvshelf/pins/torn.json", [b"{"])
    result = place.run("rm", "-n", ONE.folder)
    assert "the pin torn pins nothing" in result.stderr
    assert "torn" in rm(place, "-n", ONE.folder)["errors"][0]["problem"]


def test_what_a_pin_of_a_later_version_may_cover_stays(place: Place) -> None:
    with place.open() as shelf:
        pin = {"version": 2, "namespace": ONE.folder}
        shelf.backend.write(".kvshelf/pins/later.json", [json.dumps(pin).encode()])
    result = place.run("rm", "-n", ONE.folder, "--yes")
    assert result.exit_code == 1
    assert "the pin later is not known" in result.stderr
    assert rm(place, "-n", ONE.folder, "--yes", code=1)["pinned"]["files"] == 14
    assert removed(rm(place, "-n", OTHER.folder, "--yes", code=1)) == 14
    assert removed(rm(place, "-n", ONE.folder, "--pinned", "--yes", code=1)) == 14


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> float:
    """It is three days after what was just written."""
    now = time.time() + 3 * 86400
    clock = SimpleNamespace(time=lambda: now)
    monkeypatch.setattr("kvshelf.cli.deletion.storage_time", lambda _: now)
    monkeypatch.setattr("kvshelf.cli.deletion.time", clock)
    monkeypatch.setattr(base, "time", clock)
    return now


def test_an_age_counts_only_while_the_clocks_agree(
    place: Place, later: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "time", time)
    assert removed(rm(place, "--unused-for", "2d", "--yes")) == 0


def test_only_what_was_not_used_for_so_long(place: Place, later: float) -> None:
    assert chosen(rm(place, "--unused-for", "4d")) == 0
    assert chosen(rm(place, "--unused-for", "2d", "-n", OTHER.folder)) == 14
    found = rm(place, "--unused-for", "2d", "--group", "_", "--yes")
    assert removed(found) == 10 + 14
    assert len(place.names()) == 4


def use(root: str, name: str, when: float) -> None:
    path = Path(root, name)
    os.utime(path, (when, path.stat().st_mtime))


def test_a_use_counts_by_its_time(tmp_path: Path, later: float) -> None:
    place = Place(str(tmp_path / "shelf"))
    place.fill(ONE, prompt(1, chunks=4))
    names = sorted(place.names())
    chunks = KeyChain(ONE.digest, CHUNK).extend(prompt(1, chunks=4))
    for name in names:
        if f"-{chunks[0].index}-" in name:
            use(place.url, name, later - 3600)
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(prompt(1, chunks=4)))
    assert chosen(rm(place, "--unused-for", "1d")) == 6
    assert chosen(rm(place, "--unused-for", "1d", "--prompts", file)) == 6
    assert chosen(rm(place, "--unused-for", "30m")) == 8
    assert chosen(rm(place, "--unused-for", "4d")) == 0
    assert removed(rm(place, "--unused-for", "1d", "--yes")) == 6
    assert keys(place.names()) == {chunks[0].key}


def made(shelf: Shelf, choice: Choice, now: float) -> Plan:
    plan = Plan(Rules(leftovers=None, choice=choice), folders=[ONE.folder])
    make(shelf, plan, now)
    return plan


def carried_out(shelf: Shelf, plan: Plan) -> Outcome:
    return delete(shelf.backend, pick(shelf, plan), now=plan.now)


def test_a_chunk_of_which_an_object_is_used_meanwhile_stays(tmp_path: Path, later: float) -> None:
    place = Place(str(tmp_path / "shelf"))
    place.fill(ONE, prompt(1, chunks=3))
    names = sorted(place.names())
    with open_shelf(place.url) as shelf:
        plan = made(shelf, Choice(unused_for=86400.0), later)
        assert plan.files == 6
        use(place.url, names[0], later)
        assert carried_out(shelf, plan).count == 4
    assert names[0] in place.names()


def test_the_rest_of_what_the_storage_refuses_goes(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "shelf"))
    place.fill(ONE, prompt(1, chunks=3))
    with open_shelf(place.url) as opened:
        refused = FaultyStorage(
            opened.backend.inner,
            Fault("delete", "*-1-0of2.safetensors", error=PermanentStorageError("not yours")),
        )
        with Shelf(refused) as shelf:
            outcome = carried_out(shelf, made(shelf, Choice(), time.time()))
    assert (outcome.count, outcome.failed, str(outcome.error)) == (5, 1, "not yours")
    (left,) = place.names()
    assert left.endswith("-1-0of2.safetensors")


def test_foreign_files_and_links_stay(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "shelf"))
    place.fill(ONE, prompt(1, chunks=2))
    names = sorted(place.names())
    root = Path(place.url)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"mine")
    (root / names[0]).unlink()
    (root / names[0]).symlink_to(elsewhere)
    (root / names[1]).unlink()
    (root / names[1]).mkdir()
    (root / "notes.txt").write_text("mine")
    folder = root / ONE.folder
    (folder / "_" / "notes.safetensors").write_text("mine")
    found = rm(place, "-n", ONE.folder, "--yes")
    assert removed(found) == 2
    assert elsewhere.read_bytes() == b"mine"
    assert (root / names[0]).is_symlink()
    assert (root / names[1]).is_dir()
    assert {path.name for path in (folder / "_").iterdir() if path.is_file()} == {
        "notes.safetensors"
    }
    assert (root / "notes.txt").exists()


def test_a_shelf_that_takes_no_changes_keeps_all(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "shelf"))
    place.fill(ONE, prompt(1, chunks=1))
    with open_shelf(place.url, read_only=True) as shelf:
        plan = made(shelf, Choice(), time.time())
        assert "read-only" in str(carried_out(shelf, plan).error)
    assert len(place.names()) == 2
