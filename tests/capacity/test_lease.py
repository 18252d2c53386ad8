"""The lease of a sweep: one at a time as a rule, and findings that others use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.backends import WriteResult, open_backend
from kvshelf.backends.base import Space
from kvshelf.capacity.lease import (
    BOUND_SECONDS,
    LEASE_SECONDS,
    SWEEP,
    Finding,
    Lease,
    Record,
    _decode,
)
from kvshelf.errors import NoSpaceStorageError, TransientStorageError
from tests.sim.storage import Fault, FaultyStorage

NOW = 1_800_000_000.0
FOUND = Finding(at=NOW - 5, nbytes=1234, seconds=0.5, free=99, max_age=3600.0, written=77)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[FaultyStorage]:
    opened = FaultyStorage(open_backend(str(tmp_path / "shelf")))
    yield opened
    opened.close()


def test_one_has_the_lease_and_others_learn_what_it_found(backend: FaultyStorage) -> None:
    one, other = Lease(backend), Lease(backend)
    assert one.read(NOW) == Record()
    taken = one.take(one.read(NOW), NOW)
    assert taken is not None
    assert other.take(other.read(NOW), NOW + 1) is None
    one.release(replace(taken, finding=FOUND), NOW + 1)
    read = other.read(NOW)
    assert read.finding == FOUND
    again = other.take(read, NOW + 2)
    assert again is not None
    assert again.finding == FOUND


def test_a_lease_of_a_killed_process_ends(backend: FaultyStorage) -> None:
    one, other = Lease(backend), Lease(backend)
    taken = one.take(Record(), NOW)
    assert taken is not None
    assert one.renew(NOW + 30) is not None
    late = NOW + LEASE_SECONDS + 1
    assert other.take(other.read(late), late) is None
    later = NOW + 30 + LEASE_SECONDS
    assert other.take(other.read(later), later) is not None
    assert one.take(one.read(later), later) is None


def test_who_holds_a_lease_for_an_hour_and_finds_nothing_is_not_believed(
    backend: FaultyStorage,
) -> None:
    """Somebody may write there again and again that he sweeps."""
    one, now, taken = Lease(backend), NOW, None
    while taken is None and now < NOW + 2 * BOUND_SECONDS:
        lie = {"version": 1, "owner": "x", "until": now + 50}
        backend.write(SWEEP, [json.dumps(lie).encode()], "replace")
        now += 10
        taken = one.take(one.read(now), now)
    assert taken is not None
    assert now >= NOW + BOUND_SECONDS
    lie = {"version": 1, "owner": "x", "until": now + 50}
    backend.write(SWEEP, [json.dumps(lie).encode()], "replace")
    assert one.renew(now + 5) is not None, "nor does that end the sweep"


def test_a_process_that_was_paused_leaves_the_lease_of_another(backend: FaultyStorage) -> None:
    one, other = Lease(backend), Lease(backend)
    taken = one.take(Record(), NOW)
    assert taken is not None
    later = NOW + LEASE_SECONDS + 40
    others = other.take(other.read(later), later)
    assert others is not None
    assert one.renew(later + 1, FOUND) is None
    assert one.release(replace(taken, finding=FOUND), later + 1) == others
    assert Lease(backend).read(later + 1) == others
    # Also when the other has given it back: what it found is newer.
    other.release(others, later + 2)
    assert one.renew(later + 3, FOUND) is None
    one.release(replace(taken, finding=FOUND), later + 3)
    assert Lease(backend).read(later + 3).finding is None


def test_clocks_that_differ_by_a_second_lose_no_lease_and_no_finding(
    backend: FaultyStorage,
) -> None:
    """The time of an S3 server is in whole seconds."""
    one, other = Lease(backend), Lease(backend)
    taken = one.take(Record(), NOW)
    assert taken is not None
    assert other.is_others(other.read(NOW - 0.9), NOW - 0.9)
    one.release(replace(taken, finding=replace(FOUND, at=NOW)), NOW)
    found = other.read(NOW - 0.9).finding
    assert found is not None
    assert found.at == NOW - 0.9


def test_who_renews_tells_what_is_known_by_now(backend: FaultyStorage) -> None:
    one = Lease(backend)
    assert one.take(Record(max_bytes=5, max_bytes_at=NOW), NOW) is not None
    assert one.renew(NOW + 20, FOUND) is not None
    assert one.renew(NOW + 40) is not None
    read = Lease(backend).read(NOW + 40)
    assert (read.finding, read.max_bytes, read.until) == (FOUND, 5, NOW + 40 + LEASE_SECONDS)
    assert FOUND.less(1000, 3) == replace(FOUND, nbytes=234, free=1099)
    told = replace(FOUND, by="x", deleted_files=1, deleted_bytes=20)
    assert told.less(1000, 3) == replace(
        told, nbytes=234, free=1099, deleted_files=4, deleted_bytes=1020
    )


def test_a_lease_that_could_not_be_written_is_lost_to_one_that_could(
    backend: FaultyStorage,
) -> None:
    full = backend.add(Fault("write", error=NoSpaceStorageError(28, "ENOSPC")))
    one, other = Lease(backend), Lease(backend)
    assert one.take(one.read(NOW), NOW) is not None
    assert one.renew(NOW + 20) is not None
    full.times = 0
    assert other.take(other.read(NOW), NOW + 30) is not None
    assert one.renew(NOW + 40) is None


def test_of_two_that_take_it_at_once_the_last_one_has_it(
    backend: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Lease(backend), Lease(backend.inner)
    write = backend.write

    def overtaken(*args: Any) -> WriteResult:
        result = write(*args)
        assert other.take(Record(), NOW) is not None
        return result

    monkeypatch.setattr(backend, "write", overtaken)
    assert one.take(Record(), NOW) is None


def test_a_full_storage_is_swept_without_a_lease(backend: FaultyStorage) -> None:
    backend.add(Fault("write", error=NoSpaceStorageError(28, "ENOSPC")))
    one, other = Lease(backend), Lease(backend)
    assert one.take(one.read(NOW), NOW) is not None
    assert other.take(other.read(NOW), NOW) is not None


def test_a_finding_of_more_than_the_storage_has_is_not_believed() -> None:
    for found in (replace(FOUND, nbytes=1 << 40), replace(FOUND, free=1 << 40)):
        record = Record("x", finding=found)
        assert record.believed(Space(10, 1 << 39)) == Record("x")
        assert record.believed(None) == record.believed(Space(10, 1 << 40)) == record


def test_trouble_of_the_storage_is_the_callers(backend: FaultyStorage) -> None:
    backend.add(Fault("open", error=TransientStorageError(5, "EIO")))
    with pytest.raises(TransientStorageError):
        Lease(backend).read(NOW)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 100,
        b"[" * 5000,
        b'{"version": 2, "owner": "x", "until": 1e12}',
        b'"version"',
        b'{"version": 1, "owner": 3, "until": NaN, "finding": [], "max_bytes": true}',
        b'{"version": 1, "until": -1, "max_bytes": -5, "max_bytes_at": 7}',
        json.dumps({"version": 1, "finding": {"at": NOW + 9, "nbytes": 1, "seconds": 1}}).encode(),
        b" " * 10000 + b"{}",
        b'{"version": 1, "until": %s, "max_bytes": %s, "max_bytes_at": 7}' % ((b"9" * 400,) * 2),
    ],
)
def test_what_makes_no_sense_says_nothing(backend: FaultyStorage, content: bytes) -> None:
    backend.write(SWEEP, [content], "replace")
    found = Lease(backend).read(NOW)
    assert (found.owner, found.until, found.finding, found.max_bytes) == ("", 0.0, None, None)


def test_a_claim_to_the_far_future_blocks_nobody(backend: FaultyStorage) -> None:
    record = {"version": 1, "owner": "x", "until": NOW + 1e6, "max_bytes": 1, "max_bytes_at": 1e17}
    backend.write(SWEEP, [json.dumps(record).encode()], "replace")
    lease = Lease(backend)
    assert lease.read(NOW).bound(100, NOW) == 100
    assert lease.take(lease.read(NOW), NOW) is not None


@settings(max_examples=50)
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.dictionaries(
            st.sampled_from(
                [
                    "version",
                    "owner",
                    "until",
                    "finding",
                    "at",
                    "nbytes",
                    "seconds",
                    "free",
                    "max_bytes",
                ]
            ),
            inner,
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_can_be_read(data: bytes) -> None:
    found = _decode(data, NOW)
    assert found.until <= NOW + LEASE_SECONDS
    assert found.bound(100, NOW) <= 100


def test_the_smallest_bound_acts_on_all_while_its_engine_lives() -> None:
    small = Record().bounded_by(100, NOW)
    assert small.bound(500, NOW) == 100
    assert small.bound(50, NOW) == 50
    # An engine with a larger bound, or none, does not speak for the one with the smaller.
    assert small.bounded_by(500, NOW + 9) == small.bounded_by(None, NOW + 9) == small
    assert small.bounded_by(100, NOW + 9).max_bytes_at == NOW + 9
    later = NOW + BOUND_SECONDS + 1
    assert small.bound(500, later) == 500
    assert small.bounded_by(500, later).bound(900, later) == 500
