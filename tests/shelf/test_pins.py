"""Pins: which chunks they cover, what is a pin, and what becomes of files that are none."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.backends import Backend, open_backend
from kvshelf.backends.base import probe
from kvshelf.errors import (
    ConfigError,
    PermanentStorageError,
    ReadOnlyStorageError,
    TransientStorageError,
)
from kvshelf.logs import RateLimitedLog
from kvshelf.shelf import pins as pins_module
from kvshelf.shelf.pins import MAX_BYTES, Pin, Pins, pin_file
from tests.sim.storage import Fault, FaultyStorage

ONE = "one-0123456789abcdef"
TWO = "two-fedcba9876543210"
GROUP = "00112233445566aa"


def key(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Backend]:
    opened = open_backend(str(tmp_path / "shelf"))
    yield opened
    opened.close()


def write(backend: Backend, name: str, content: bytes) -> None:
    backend.write(f".kvshelf/pins/{name}.json", [content], "replace")


# ------------------------------------------------------------------------------- what they cover


_few_keys = st.lists(
    st.sampled_from([bytes(32), b"\1" + bytes(31), bytes(31) + b"\1", b"\xff" * 32, key(1)]),
    max_size=6,
)
_pin = st.builds(
    Pin,
    namespace=st.sampled_from([None, ONE, TWO]),
    group=st.sampled_from([None, "_", GROUP]),
    keys=st.none() | _few_keys.map(tuple),
    until=st.sampled_from([None, 10.0, 15.0, 20.0]),
)


@given(st.lists(_pin, max_size=5), _few_keys)
def test_covers_agrees_with_the_definition(pins: list[Pin], keys: list[bytes]) -> None:
    now = 15.0
    read = Pins({str(number): pin for number, pin in enumerate(pins)}, now=now)
    in_force = [pin for pin in pins if pin.until is None or pin.until > now]
    assert len(read.all) == len(pins)
    assert bool(read) is bool(in_force)
    # A namespace is pinned whatever its slug.
    for folder in (ONE, TWO, f"renamed-{ONE[-16:]}"):
        for group in ("_", GROUP):
            expected = [
                any(
                    (pin.namespace is None or pin.namespace[-16:] == folder[-16:])
                    and pin.group in (None, group)
                    and (pin.keys is None or each in pin.keys)
                    for pin in in_force
                )
                for each in keys
            ]
            assert [read.covers(folder, group, each) for each in keys] == expected


# ------------------------------------------------------------------------------- files


@given(_pin)
def test_pin_is_read_as_it_was_written(pin: Pin) -> None:
    if pin.namespace is None and pin.group is None and pin.keys is None:
        with pytest.raises(ValueError, match="neither a namespace"):
            Pin.from_bytes(pin.to_bytes())
    else:
        assert Pin.from_bytes(pin.to_bytes()) == pin


def test_file_is_that_of_the_format(backend: Backend, tmp_path: Path) -> None:
    Pins.add(backend, "a", Pin(namespace=ONE, group=GROUP, keys=(key(1),), until=12.5))
    written = json.loads((tmp_path / "shelf/.kvshelf/pins/a.json").read_bytes())
    assert written == {
        "version": 1,
        "namespace": ONE,
        "group": GROUP,
        "keys": [key(1).hex()],
        "until": 12.5,
    }


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "0 bytes; expected"),
        (b"\xff\xfe{", "codec can't decode"),
        (b"[" * 100_000, "recursion depth"),
        (b"[]", "version is None"),
        (b"{}", "version"),
        (b'{"version":0,"namespace":null}', "version is 0"),
        (b'{"version":true}', "version is True"),
        (b'{"version":1}', "neither"),
        (b'{"version":1,"namespace":"../x"}', "namespace: Value error, found '../x'"),
        (b'{"version":1,"namespace":7}', "namespace: Input should be a valid string"),
        (b'{"version":1,"group":"G"}', "salt group 'G'"),
        (b'{"version":1,"group":7}', "group: Input should be a valid string"),
        (b'{"version":1,"keys":"all"}', "keys: Input should be a valid array"),
        (b'{"version":1,"keys":["00"]}', "keys.0: Data should have at least 32"),
        (b'{"version":1,"keys":[null,null]}', "keys.0: Input should be a valid bytes"),
        (b'{"version":1,"group":"_","until":NaN}', "until: Input"),
        (b'{"version":1,"group":"_","until":-1}', "until: Input"),
        (b'{"version":1,"group":"_","until":true}', "until: Input"),
        (b'{"version":1,"group":"_","until":"never"}', "until: Input"),
        (b'{"version":1,"group":"_","until":1' + b"0" * 400 + b"}", "until: Input"),
        (b" " * (MAX_BYTES + 1), f"{MAX_BYTES + 1} bytes; expected"),
    ],
)
def test_file_that_is_no_pin_pins_nothing_and_is_named_once(
    backend: Backend,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    problem: str,
) -> None:
    monkeypatch.setattr(pins_module, "_log", RateLimitedLog(pins_module.logger, lines=8))
    write(backend, "bad", content)
    Pins.add(backend, "good", Pin(namespace=ONE))
    with caplog.at_level(logging.WARNING, pins_module.__name__):
        for _ in range(3):
            pins = Pins.load(backend)
    assert problem in pins.unreadable["bad"]
    assert len(pins.unreadable["bad"]) < 150
    assert pins.all.keys() == {"good"}
    assert not pins.covers(TWO, "_", key(1))
    (line,) = caplog.messages
    assert "the pin bad on" in line
    assert "pins nothing" in line


@pytest.mark.parametrize(
    ("content", "problem", "covered"),
    [
        (b'{"version":2}', "version is 2", {ONE, TWO, "_", GROUP}),
        (b'{"version":2,"x":"\\ud800","group":"_"}', "version is 2", {ONE, TWO, "_"}),
        (b'{"version":2,"x":' + b"[" * 300 + b"]" * 300 + b"}", "is 2", {ONE, TWO, "_", GROUP}),
        (b'{"version":1,"group":"_","kinds":["full"]}', "unknown field 'kinds'", {ONE, TWO, "_"}),
        (f'{{"version":2,"namespace":"{ONE}","keys":[]}}'.encode(), "is 2", {ONE, "_", GROUP}),
        (
            f'{{"version":2,"namespace":["{ONE}"],"group":"{GROUP}"}}'.encode(),
            "version is 2",
            {ONE, TWO, GROUP},
        ),
    ],
)
def test_pin_of_a_later_version_pins_all_that_it_may(
    backend: Backend, content: bytes, problem: str, covered: set[str]
) -> None:
    write(backend, "new", content)
    Pins.add(backend, "good", Pin(namespace=ONE, keys=[key(1)]))
    pins = Pins.load(backend)
    assert pins
    assert problem in pins.unknown["new"][1]
    assert pins.all.keys() == {"good"}
    assert not pins.unreadable
    assert pins.problem is not None
    assert "the pin new is not known" in pins.problem
    for folder in (ONE, TWO):
        for group in ("_", GROUP):
            expected = {folder, group} <= covered
            assert pins.covers(folder, group, key(2)) is expected


@pytest.mark.parametrize("error", [PermanentStorageError, ReadOnlyStorageError])
def test_pin_that_may_not_be_read_pins_the_shelf(
    backend: Backend, error: type[PermanentStorageError]
) -> None:
    Pins.add(backend, "secret", Pin(namespace=ONE))
    faulty = FaultyStorage(backend, Fault("open", error=error(13, "EACCES")))
    pins = Pins.load(faulty)
    assert "EACCES" in pins.unknown["secret"][1]
    assert pins.covers(TWO, GROUP, key(1))
    assert Pins.load(backend).problem is None


def test_what_else_lies_beside_pins_is_skipped(backend: Backend, tmp_path: Path) -> None:
    folder = tmp_path / "shelf/.kvshelf/pins"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/inner.json").write_text('{"version":1,"group":"_"}')
    (folder / "README").write_text("hello")
    (folder / ".hidden.json").write_text('{"version":1,"group":"_"}')
    (folder / "-x.json").write_text('{"version":1,"group":"_"}')
    os.mkfifo(folder / "pipe.json")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text('{"version":1,"group":"_"}')
    (folder / "link.json").symlink_to(elsewhere)
    pins = Pins.load(backend)
    assert not pins
    assert not pins.all
    assert not pins.unreadable


@pytest.mark.parametrize(("limit", "value"), [("MAX_TOTAL_BYTES", 150), ("MAX_PINS", 1)])
def test_more_pins_than_are_read_pin_the_whole_shelf(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    Pins.add(backend, "a", Pin(namespace=ONE))
    Pins.add(backend, "b", Pin(namespace=TWO))
    monkeypatch.setattr(pins_module, limit, value)
    pins = Pins.load(backend)
    assert pins.all.keys() == {"a"} and pins.covers(TWO, GROUP, key(1))
    assert pins.problem is not None and "found more than" in pins.problem
    with pytest.raises(ConfigError, match="together"):
        Pins.add(backend, "c", Pin(namespace=TWO))
    monkeypatch.setattr(pins_module, limit, 2 * value)
    assert Pins.add(backend, "b", Pin(namespace=ONE), replace=True), "it takes its own place"


def test_files_that_can_be_no_pins_take_the_place_of_none(backend: Backend, tmp_path: Path) -> None:
    """64 sparse files are as large as all pins may be together."""
    Pins.add(backend, "z", Pin(namespace=ONE))
    for number in range(70):
        path = tmp_path / "shelf" / pin_file(f"{number:03}")
        path.touch()
        os.truncate(path, number % 2 * (MAX_BYTES + 1))
    faulty = FaultyStorage(backend)
    pins = Pins.load(faulty)
    assert pins.all.keys() == {"z"} and pins.problem is None
    assert faulty.counts["open"] == 1


def test_pin_whose_file_did_not_change_is_not_read_again(backend: Backend, tmp_path: Path) -> None:
    faulty, path = FaultyStorage(backend), tmp_path / "shelf" / pin_file("a")
    Pins.add(backend, "a", Pin(namespace=ONE))
    pins, now = None, path.stat().st_mtime
    # A file that has just changed may change again within the precision of its time.
    for seconds, reads in ((0, 1), (50, 2), (61, 3), (62, 3)):
        pins = Pins.load(faulty, now + seconds, pins)
        assert pins.covers(ONE, "_", key(1)) and not pins.covers(TWO, "_", key(1))
        assert faulty.counts["open"] == reads
    Pins.add(backend, "a", Pin(namespace=TWO), replace=True)
    os.utime(path, (now + 1, now + 1))
    pins = Pins.load(faulty, now + 100, pins)
    assert pins.covers(TWO, "_", key(1)) and not pins.covers(ONE, "_", key(1))
    # An expiry is seen all the same, and a pin that is gone.
    Pins.add(backend, "b", Pin(namespace=ONE, until=now + 500))
    for seconds, expected in ((200, True), (600, False)):
        pins = Pins.load(faulty, now + seconds, pins)
        assert pins.covers(ONE, "_", key(1)) is expected
    path.unlink()
    assert not Pins.load(faulty, now + 700, pins)


def test_storage_that_does_not_answer_is_no_shelf_without_pins(backend: Backend) -> None:
    Pins.add(backend, "a", Pin(namespace=ONE))
    faulty = FaultyStorage(backend, Fault("open", error=TransientStorageError("EIO")))
    with pytest.raises(TransientStorageError):
        Pins.load(faulty)


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a", "-a", "ä", "a" * 65, "a\n"])
def test_name_that_could_be_another_file_is_refused(backend: Backend, name: str) -> None:
    with pytest.raises(ConfigError, match="not a name of a pin"):
        Pins.add(backend, name, Pin(namespace=ONE))
    with pytest.raises(ConfigError, match="not a name of a pin"):
        Pins.remove(backend, name)


def test_pin_that_is_too_large_is_refused(backend: Backend) -> None:
    keys = [number.to_bytes(32, "big") for number in range(16_000)]
    with pytest.raises(ConfigError, match="in several parts"):
        Pins.add(backend, "large", Pin(keys=keys))
    assert Pins.add(backend, "less", Pin(keys=keys[:15_000]))
    assert probe(backend, pin_file("less"))


def test_dry_run_with_failing_probe_says_nothing_of_a_pin(backend: Backend) -> None:
    faulty = FaultyStorage(backend, Fault("stat", error=TransientStorageError("EIO")))
    for call in (
        lambda: Pins.add(faulty, "name", Pin(namespace=ONE), dry_run=True),
        lambda: Pins.remove(faulty, "name", dry_run=True),
    ):
        with pytest.raises(TransientStorageError):
            call()
