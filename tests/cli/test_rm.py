"""``kvshelf rm``: what it deletes, what stays, and what it says before."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends.base import probe
from kvshelf.format.keys import KeyChain, salt_group_of
from kvshelf.format.names import parse_path
from kvshelf.format.namespace import Namespace
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


def test_namespace_goes_with_its_markers(place: Place) -> None:
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


def test_salt_group_goes_in_all_namespaces_or_in_one(place: Place) -> None:
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


def test_pin_ends_by_the_clock_that_is_behind(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place.run("pin", "mine", "-n", ONE.folder, "--until", "10m").exit_code == 0
    monkeypatch.setattr("kvshelf.cli.deletion.storage_time", lambda _: time.time() + 1800)
    found = rm(place, "-n", ONE.folder, "--yes")
    assert (found["pinned"]["files"], chosen(found)) == (14, 0)


def test_what_a_pin_of_a_later_version_may_cover_stays(place: Place) -> None:
    with place.open() as shelf:
        pin = {"version": 2, "namespace": ONE.folder}
        shelf.backend.write(".kvshelf/pins/later.json", [json.dumps(pin).encode()])
        shelf.backend.write(".kvshelf/pins/torn.json", [b"{"])
    result = place.run("rm", "-n", ONE.folder, "--yes")
    assert result.exit_code == 1
    assert "the pin later is not known" in result.stderr
    assert "the pin torn pins nothing" in result.stderr
    assert rm(place, "-n", ONE.folder, "--yes", code=1)["pinned"]["files"] == 14
    assert removed(rm(place, "-n", OTHER.folder, "--yes", code=1)) == 14
    assert removed(rm(place, "-n", ONE.folder, "--pinned", "--yes", code=1)) == 14


def test_unused_for_chooses_by_the_last_use_while_the_clocks_agree(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time() + 3 * 86400
    monkeypatch.setattr("kvshelf.cli.deletion.storage_time", lambda _: now)
    assert removed(rm(place, "--unused-for", "2d", "--yes")) == 0
    monkeypatch.setattr("time.time", lambda: now)
    (first, *_) = KeyChain(OTHER.digest, CHUNK).extend(prompt(1, chunks=2))
    for path in Path(place.url).rglob(f"{first.key.hex()}*"):
        os.utime(path, (now - 3600, path.stat().st_mtime))
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(prompt(1, chunks=2)))
    assert chosen(rm(place, "--unused-for", "4d")) == 0
    assert chosen(rm(place, "--unused-for", "2d", "-n", OTHER.folder)) == 7
    assert chosen(rm(place, "--unused-for", "2d", "--prompts", file)) == 7
    assert chosen(rm(place, "--unused-for", "30m", "-n", OTHER.folder)) == 14
    assert removed(rm(place, "--unused-for", "2d", "--group", "_", "--yes")) == 10 + 7
    assert len(place.names()) == 4 + 7
