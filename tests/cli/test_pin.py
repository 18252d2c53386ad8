"""``kvshelf pin``: what they write, print and exit with."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvshelf.capacity.files import time_of
from kvshelf.capacity.lease import Lease, Record
from kvshelf.capacity.pins import Pin, Pins
from kvshelf.cli import pin as pin_module
from kvshelf.format.keys import KeyChain, salt_group_of
from kvshelf.format.namespace import Namespace
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
    rows = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
    return pins.covers(of.folder, group, rows).tolist()


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
    assert f"pinned system: 5 chunks of {namespace().folder}, 3 of them stored" in result.stdout
    pins = pins_of(place)
    keys = keys_of(namespace(), wanted)
    assert covered(pins, namespace(), keys) == [True] * 5
    assert covered(pins, namespace(), keys_of(namespace(), prompt(4, chunks=1))) == [False]
    assert covered(pins, other, keys_of(other, wanted)) == [False] * 5


def test_prompts_of_several_namespaces_make_one_pin(place: Place, tmp_path: Path) -> None:
    other = hybrid()
    place.fill(other, prompt(1, chunks=2))
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


def test_a_namespace_and_a_group_are_pinned(place: Place, tmp_path: Path) -> None:
    salt = tmp_path / "salt"
    salt.write_text("tenant\n")
    folder = namespace().folder
    assert place.run("pin", "model", "-n", folder).stdout == f"pinned model: all of {folder}\n"
    assert place.run("pin", "tenant", "--salt-file", salt).exit_code == 0
    assert place.run("pin", "narrow", "-n", folder, "--group", "_").exit_code == 0
    rows = {row["pin"]: row for row in place.rows("pin")}
    assert (rows["model"]["namespace"], rows["model"]["group"]) == (folder, None)
    assert (rows["tenant"]["namespace"], rows["tenant"]["group"]) == (None, salt_group_of("tenant"))
    assert (rows["narrow"]["namespace"], rows["narrow"]["group"]) == (folder, "_")
    assert all(row["chunks"] is None for row in rows.values())


@pytest.mark.real
def test_a_pin_expires(place: Place) -> None:
    (row,) = place.rows("pin", "soon", "--group", "_", "--until", "2h")
    assert 7000 < row["until"] - time.time() <= 7200
    assert row["expired"] is False
    with place.open() as shelf:
        Pins.add(shelf.backend, "past", Pin(group="_", until=1.6e9))
    assert "expired" in place.run("pin").stdout.splitlines()[1]
    assert [row["expired"] for row in place.rows("pin")] == [True, False]
    place.run("pin", "--remove", "soon")
    assert not pins_of(place)


@pytest.mark.real
@pytest.mark.parametrize("until", ["2020-01-01", "0s"])
def test_a_pin_that_would_have_expired_is_refused(place: Place, until: str) -> None:
    result = place.run("pin", "past", "--group", "_", "--until", until)
    assert result.exit_code == 2
    assert "has passed" in result.stderr
    with place.open() as shelf:
        assert not Pins.read(shelf.backend).all


def test_a_name_is_taken_once(place: Place) -> None:
    assert place.run("pin", "a", "--group", "_").exit_code == 0
    result = place.run("pin", "a", "-n", namespace().folder)
    assert result.exit_code == 1
    assert "--replace" in result.stderr
    assert pins_of(place).all["a"].group == "_"
    assert place.run("pin", "a", "-n", namespace().folder, "--replace").exit_code == 0
    assert pins_of(place).all["a"].namespace == namespace().folder


def test_pins_are_listed_and_removed_and_no_object_is_touched(place: Place) -> None:
    before = place.names()
    assert "has no pins" in place.run("pin").stdout
    assert place.rows("pin") == []
    place.run("pin", "a", "--group", "_")
    place.run("pin", "b", "--group", "_")
    rows = place.rows("pin", "--remove", "a", "--remove", "c", code=1)
    assert [(row["pin"], row["removed"]) for row in rows] == [("a", True), ("c", False)]
    assert [row["pin"] for row in place.rows("pin")] == ["b"]
    result = place.run("pin", "--remove", "c")
    assert result.exit_code == 1
    assert "no pin c" in result.stderr
    assert place.run("pin", "--remove", "b").stdout == "unpinned b\n"
    assert place.names() == before


def test_an_unreadable_pin_is_listed_as_one(place: Place) -> None:
    place.run("pin", "good", "--group", "_")
    with place.open() as shelf:
        shelf.backend.write(".kvshelf/pins/torn.json", [b'{"version":1,"gro'])
    rows = place.rows("pin", code=1)
    assert [row["pin"] for row in rows] == ["good", "torn"]
    assert "not JSON" in rows[1]["problem"]
    result = place.run("pin")
    assert result.exit_code == 1
    assert "the pin torn pins nothing" in result.stderr
    assert place.run("pin", "--remove", "torn").exit_code == 0
    assert len(place.rows("pin")) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("pin", "a"), "nothing to pin"),
        (("pin", "--group", "_"), "the pin has no name"),
        (("pin", "--dry-run"), "the pin has no name"),
        (("pin", "a", "--remove", "b"), "give one of them"),
        (("pin", "../a", "--group", "_"), "not a name of a pin"),
        (("pin", "--remove", "a/b"), "not a name of a pin"),
        (("pin", "a", "--group", "tenant"), "--group"),
        (("pin", "a", "--group", "_", "--salt-file", "x"), "both name"),
        (("pin", "a", "--salt-file", "/nowhere"), "cannot be read"),
        (("pin", "a", "-n", "unknown"), "no namespace unknown"),
        (("pin", "a", "--group", "_", "--until", "soon"), "--until"),
        (("pin", "a", "--group", "_", "--until", "9999999w"), "--until"),
        (("pin", "a", "/nowhere"), "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], problem: str
) -> None:
    place = Place(str(tmp_path / "shelf"), {})
    place.fill(namespace(), prompt(1, chunks=1))
    result = place.run(*arguments)
    assert result.exit_code == 2, result.output
    assert problem in result.stderr
    assert not pins_of(place).all


def test_text_needs_a_model_and_short_prompts_have_no_chunk(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "shelf"), {})
    place.fill(namespace(), prompt(1, chunks=1))
    result = place.run("pin", "a", write_prompts(tmp_path, [1, 2], "a text"))
    assert result.exit_code == 2
    assert "line 2 is text" in result.stderr
    result = place.run("pin", "a", write_prompts(tmp_path, [1, 2, 3]))
    assert result.exit_code == 2
    assert f"no prompt fills a chunk of {CHUNK} tokens" in result.stderr


def test_the_salt_of_a_file_is_that_of_requests(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "shelf"), {})
    place.fill(namespace(), prompt(1, chunks=1))
    salt = tmp_path / "salt"
    for number, (content, expected) in enumerate(
        [(b"s", "s"), (b"s\n", "s"), (b"s\r\n", "s"), (b" s \n\n", " s \n"), ("ü\n".encode(), "ü")]
    ):
        salt.write_bytes(content)
        (row,) = place.rows("pin", f"p{number}", "--salt-file", salt)
        assert row["group"] == hashlib.sha256(expected.encode()).hexdigest()[:16]
    salt.write_bytes(b"\n")
    assert place.run("pin", "none", "--salt-file", salt).exit_code == 2


@pytest.fixture
def others_sweep(place: Place) -> Iterator[Callable[[], None]]:
    """Another process sweeps the shelf, until it is told to end."""
    with place.open() as shelf:
        lease = Lease(shelf.backend)
        now = time_of(shelf.backend)
        taken = lease.take(Record(), now)
        assert taken is not None

        def end() -> None:
            lease.release(taken, now)

        yield end


def test_a_pin_during_a_sweep_is_told_of_it(place: Place, others_sweep: Callable[[], None]) -> None:
    result = place.run("pin", "a", "--group", "_")
    assert result.exit_code == 0
    assert "sweeps" in result.stderr
    assert "--wait" in result.stderr
    others_sweep()
    assert place.run("pin", "b", "--group", "_", "--wait").stderr == ""


def test_waiting_ends_with_the_sweep_or_when_it_must_have_read_the_pin(
    place: Place, others_sweep: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            others_sweep()

    monkeypatch.setattr(pin_module.time, "sleep", sleep)
    assert place.run("pin", "a", "--group", "_", "--wait").exit_code == 0
    assert len(slept) == 3
    assert "a" in pins_of(place).all


def test_waiting_has_an_end(
    place: Place, others_sweep: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin_module, "_READ_SECONDS", 0.0)
    result = place.run("pin", "a", "--group", "_", "--wait")
    assert result.exit_code == 0
    assert "waiting for that" in result.stderr


def test_a_pin_of_a_later_version_is_listed_and_keeps_all_from_gc(place: Place) -> None:
    before = place.names()
    with place.open() as shelf:
        shelf.backend.write(".kvshelf/pins/new.json", [b'{"version": 2}'])
    result = place.run("pin")
    assert result.exit_code == 1, result.output
    assert "the pin new is not known" in result.stderr
    (row,) = place.rows("gc", "--max-bytes", "1KiB", "--yes", code=1)
    assert "the pin new is not known" in row["problem"]
    assert place.names() == before
