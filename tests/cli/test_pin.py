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


def test_prompts_are_pinned_in_the_namespace_that_has_them(place: Place, tmp_path: Path) -> None:
    other = hybrid()
    place.fill(other, prompt(2, chunks=1))
    # The third chunk of five is the last that is stored; what may come is pinned too.
    wanted = prompt(1, chunks=3) + prompt(3, chunks=2)
    file = write_prompts(tmp_path, wanted, {"tokens": prompt(1, chunks=1), "id": "again"})
    result = place.run("pin", "system", file)
    assert result.exit_code == 0, result.output
    assert f"pin system: 5 chunks of {namespace().folder}, 3 of them stored" in result.stdout
    pins = pins_of(place)
    keys = keys_of(namespace(), wanted)
    assert covered(pins, namespace(), keys) == [True] * 5
    assert covered(pins, namespace(), keys_of(namespace(), prompt(4, chunks=1))) == [False]
    assert covered(pins, other, keys_of(other, wanted)) == [False] * 5


def test_prompts_of_several_namespaces_make_one_pin(place: Place, tmp_path: Path) -> None:
    other = hybrid()
    place.fill(other, prompt(1, chunks=2))
    spaces = ("-n", namespace().folder[-16:], "-n", other.folder[-16:])
    assert place.run("pin", "all", *spaces).exit_code == 2 and not pins_of(place).all
    (row,) = place.rows("pin", "both", write_prompts(tmp_path, prompt(1, chunks=3)))
    assert row["namespaces"] == sorted([namespace().folder, other.folder])
    assert (row["namespace"], row["chunks"], row["stored"]) == (None, 6, 5)
    assert row["bytes"] > 0
    pins = pins_of(place)
    for of in (namespace(), other):
        assert covered(pins, of, keys_of(of, prompt(1, chunks=3))) == [True] * 3


def test_a_prompt_with_a_salt_is_pinned_wherever_engines_put_it(
    place: Place, tmp_path: Path
) -> None:
    place.fill(namespace(), prompt(1, chunks=2), salt="tenant")
    file = write_prompts(tmp_path, {"tokens": prompt(1, chunks=2), "cache_salt": "tenant"})
    (row,) = place.rows("pin", "tenant", file)
    assert (row["chunks"], row["stored"]) == (2, 2)
    keys = keys_of(namespace(), prompt(1, chunks=2), "tenant")
    for group in ("_", salt_group_of("tenant")):
        assert covered(pins_of(place), namespace(), keys, group) == [True] * 2
    assert (
        covered(pins_of(place), namespace(), keys_of(namespace(), prompt(1, chunks=2)))
        == [False] * 2
    )


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


def test_a_namespace_and_a_group_are_pinned(place: Place) -> None:
    folder, group = namespace().folder, salt_group_of("tenant")
    assert place.run("pin", "model", "-n", folder).stdout == f"pin model: all of {folder}\n"
    assert place.run("pin", "tenant", "--group", group).exit_code == 0
    assert place.run("pin", "narrow", "-n", folder, "--group", "_").exit_code == 0
    pins = pins_of(place).all
    assert (pins["model"].namespace, pins["model"].group) == (folder, None)
    assert (pins["tenant"].namespace, pins["tenant"].group) == (None, group)
    assert (pins["narrow"].namespace, pins["narrow"].group) == (folder, "_")
    assert all(pin.keys is None for pin in pins.values())


def test_a_pin_expires(place: Place) -> None:
    (row,) = place.rows("pin", "soon", "--group", "_", "--until", "2h")
    assert 7000 < row["until"] - time.time() <= 7200


def test_a_name_is_taken_once(place: Place) -> None:
    assert place.run("pin", "a", "--group", "_").exit_code == 0
    result = place.run("pin", "a", "-n", namespace().folder)
    assert result.exit_code == 1
    assert "--replace" in result.stderr
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


def test_a_pin_of_a_later_version_keeps_all_from_gc(place: Place) -> None:
    before = place.names()
    with place.open() as shelf:
        shelf.backend.write(".kvshelf/pins/new.json", [b'{"version": 2}'])
    (row,) = place.rows("gc", "--max-bytes", "1KiB", "--yes", code=1)
    assert "the pin new is not known" in row["problem"]
    assert place.names() == before
