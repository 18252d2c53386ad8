"""``kvshelf status``: what it prints, writes and exits with."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvshelf.capacity.files import time_of
from kvshelf.capacity.lease import SWEEP, Finding, Lease, Record
from kvshelf.capacity.pins import Pin, Pins
from kvshelf.format.keys import KeyChain
from tests.support.filled import CHUNK, namespace, prompt
from tests.support.places import Place

MIB = 1 << 20
#: However full the disk of the machine is.
ROOMY = '{"min_free": 0}'


@pytest.fixture
def place(empty: Place) -> Place:
    """A shelf that was swept down to 6 MiB of 10, with a pin of two chunks."""
    empty.fill(namespace(), prompt(1, chunks=3))
    with empty.open() as shelf:
        storage = shelf.backend
        now = time_of(storage)
        lease = Lease(storage)
        taken = lease.take(Record(), now)
        assert taken is not None
        made = Finding(now, 6 * MIB, 0.1, by=lease.owner, deleted_files=3, deleted_bytes=2 * MIB)
        lease.release(
            replace(taken, finding=made, max_bytes=10 * MIB, max_bytes_at=now), time_of(storage)
        )
        keys = [each.key for each in KeyChain(namespace().digest, CHUNK).extend(prompt(1, 2))]
        Pins.add(storage, "system", Pin(namespace().folder, keys=keys, until=time.time() + 9e5))
    return empty


def test_a_report(place: Place) -> None:
    before = place.names()
    text = place.run("status", KVSHELF_CAPACITY=ROOMY).stdout
    assert f"{place.url}: about 6.0 MiB in 1 namespace; 60% of max_bytes" in text
    [line] = [line for line in text.splitlines() if line.startswith("max_bytes")]
    assert " ".join(line.split()) == "max_bytes 10.0 MiB 4.0 MiB first an engine's sweep"
    assert "deleted 3 files, 2.0 MiB, left 6.0 MiB" in text
    assert "sweeps now: no process" in text
    [line] = [line for line in text.splitlines() if " system " in line]
    assert line.split()[0] == "2"
    assert line.endswith(namespace().folder)
    assert "not known: " in text
    assert place.names() == before


def test_the_report_as_json(place: Place) -> None:
    [row] = place.rows("status", KVSHELF_CAPACITY=ROOMY)
    assert (row["shelf"], row["namespaces"], row["bytes"]) == (place.url, 1, 6 * MIB)
    assert row["bounds"]["max_bytes"] == {
        "value": 10 * MIB,
        "from": "an engine's sweep",
        "room": 4 * MIB,
    }
    assert row["acts"] == "max_bytes"
    assert (row["sweep"]["deleted_files"], row["sweep"]["bytes_after"]) == (3, 6 * MIB)
    assert row["sweep"]["by"]
    assert row["sweeping"] is None
    [pin] = row["pins"]
    assert (pin["pin"], pin["chunks"], pin["expired"]) == ("system", 2, False)
    assert pin["bytes_if_stored"] > 0
    assert row["unknown"]
    assert row["errors"] == []
    [row] = place.rows("status", KVSHELF_CAPACITY='{"max_bytes": "8MiB", "min_free": 0}')
    assert row["bounds"]["max_bytes"]["from"] == "KVSHELF_CAPACITY"


def test_who_sweeps_now_is_named(place: Place) -> None:
    with place.open() as shelf:
        lease, now = Lease(shelf.backend), time_of(shelf.backend)
        assert lease.take(lease.read(now), now) is not None
        text = place.run("status", KVSHELF_CAPACITY=ROOMY).stdout
        assert f"sweeps now: {lease.owner}" in text
        assert "not over yet" not in text
        # It tells what it has found so far.
        assert lease.renew(now, Finding(now, 5 * MIB, 0.1, by=lease.owner)) is not None
    assert "left 5.0 MiB, not over yet" in place.run("status", KVSHELF_CAPACITY=ROOMY).stdout
    [row] = place.rows("status", KVSHELF_CAPACITY=ROOMY)
    assert row["sweeping"]["by"] == lease.owner
    assert row["sweeping"]["until"] > row["sweep"]["at"]


def test_what_is_wrong_is_named_and_is_exit_code_1(place: Place) -> None:
    [row] = place.rows("status", code=1, KVSHELF_CAPACITY='{"max_bytes": "5MiB", "min_free": 0}')
    assert row["acts"] == "max_bytes"
    assert [error["problem"] for error in row["errors"]] == [
        "max_bytes is reached, and nothing is stored now"
    ]
    with place.open() as shelf:
        shelf.backend.write(".kvshelf/pins/later.json", [b'{"version": 2}'])
        shelf.backend.write(".kvshelf/pins/broken.json", [b"{"])
        shelf.backend.write(SWEEP, [b"\x1b[31m"], "replace")
    [row] = place.rows("status", code=1, KVSHELF_CAPACITY=ROOMY)
    assert [error["name"] for error in row["errors"]] == [SWEEP, "broken", "later"]
    result = place.run("status", KVSHELF_CAPACITY=ROOMY)
    assert result.exit_code == 1
    assert "last sweep: none is known" in result.stdout
    assert "the pin broken pins nothing" in result.stderr
    assert "\x1b[31m" not in result.output
