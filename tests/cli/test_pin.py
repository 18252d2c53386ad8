"""``kvshelf pin``: what they write, print and exit with."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvshelf.format.keys import KeyChain, salt_group_of
from kvshelf.format.namespace import Namespace
from kvshelf.shelf.pins import Pins
from tests.support.filled import CHUNK, hybrid, namespace, prompt
from tests.support.places import Place


@pytest.fixture
def place(empty: Place) -> Place:
    empty.fill(namespace(), prompt(1, chunks=3))
    return empty


def keys_of(of: Namespace, tokens: list[int], salt: str = "") -> list[bytes]:
    return [chunk.key for chunk in KeyChain(of.digest, CHUNK, salt=salt).extend(tokens)]


def pins_of(place: Place) -> Pins:
    with place.open() as shelf:
        return Pins.load(shelf.backend)


def covered(pins: Pins, of: Namespace, keys: list[bytes], group: str = "_") -> list[bool]:
    return [pins.covers(of.folder, group, key) for key in keys]


def write_prompts(tmp_path: Path, *prompts: Any) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in prompts))
    return file


def test_prompts_are_pinned_in_all_namespaces_and_salt_groups_that_have_them(
    place: Place, tmp_path: Path
) -> None:
    other = hybrid()
    place.fill(other, prompt(1, chunks=2))
    spaces = ("-n", namespace().folder[-16:], "-n", other.folder[-16:])
    assert place.run("pin", "all", *spaces).exit_code == 2 and not pins_of(place).all
    # What may come behind the last chunk that is stored is pinned too.
    unsalted, salted = prompt(1, chunks=3) + prompt(3, chunks=2), prompt(2, chunks=2)
    file = write_prompts(tmp_path, unsalted, {"tokens": salted, "cache_salt": "tenant"})
    (row,) = place.rows("pin", "both", file)
    assert row["namespaces"] == sorted([namespace().folder, other.folder])
    assert (row["namespace"], row["chunks"], row["stored"]) == (None, 14, 5)
    assert row["bytes"] > 0
    pins = pins_of(place)
    for of in (namespace(), other):
        assert covered(pins, of, keys_of(of, unsalted)) == [True] * 5
        for group in ("_", salt_group_of("tenant")):
            assert covered(pins, of, keys_of(of, salted, "tenant"), group) == [True] * 2
        assert covered(pins, of, keys_of(of, salted)) == [False] * 2
    file = write_prompts(tmp_path, prompt(1, chunks=3))
    place.run("pin", "one", file, "-n", other.folder)
    assert pins_of(place).all["one"].namespace == other.folder


def test_prompts_that_nothing_has_need_a_namespace(place: Place, tmp_path: Path) -> None:
    file = write_prompts(tmp_path, prompt(9, chunks=2))
    result = place.run("pin", "later", file)
    assert result.exit_code == 2
    assert "name the namespaces" in result.stderr
    assert not pins_of(place)
    (row,) = place.rows("pin", "later", file, "-n", namespace().folder[-16:])
    assert (row["chunks"], row["stored"]) == (2, 0)
    assert (
        covered(pins_of(place), namespace(), keys_of(namespace(), prompt(9, chunks=2)))
        == [True] * 2
    )


def test_namespace_and_a_group_are_pinned_for_a_time(place: Place) -> None:
    folder, group = namespace().folder, salt_group_of("tenant")
    assert place.run("pin", "model", "-n", folder).stdout == f"pin model: all of {folder}\n"
    assert place.run("pin", "tenant", "--group", group).exit_code == 0
    (row,) = place.rows("pin", "narrow", "-n", folder, "--group", "_", "--until", "2h")
    assert 7000 < row["until"] - time.time() <= 7200
    pins = pins_of(place).all
    assert (pins["model"].namespace, pins["model"].group) == (folder, None)
    assert (pins["tenant"].namespace, pins["tenant"].group) == (None, group)
    assert (pins["narrow"].namespace, pins["narrow"].group) == (folder, "_")
    assert all(pin.keys is None for pin in pins.values())


def test_name_is_taken_once(place: Place) -> None:
    assert place.run("pin", "a", "--group", "_").exit_code == 0
    for more in ([], ["--dry-run"]):
        result = place.run("pin", "a", "-n", namespace().folder, *more)
        assert (result.exit_code, "--replace" in result.stderr) == (1, True)
    assert pins_of(place).all["a"].group == "_"
    assert place.run("pin", "a", "-n", namespace().folder, "--replace").exit_code == 0
    assert pins_of(place).all["a"].namespace == namespace().folder


def test_pins_are_removed_and_no_object_is_touched(place: Place) -> None:
    before = place.names()
    place.run("pin", "a", "--group", "_")
    with place.open() as shelf:
        shelf.backend.write(".kvshelf/pins/torn.json", [b'{"version":1,"gro'])
    for name, there in (("a", True), ("torn", True), ("c", False)):
        (row,) = place.rows("pin", name, "--remove", code=int(not there))
        assert (row["pin"], row["removed"]) == (name, there)
    result = place.run("pin", "c", "--remove")
    assert (result.exit_code, "no pin c" in result.stderr) == (1, True)
    assert not pins_of(place)
    assert place.names() == before
