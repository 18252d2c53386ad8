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
from tests.support.storages import Fault, FaultyBackend

NOW = 1_800_000_000.0
FOUND = Finding(at=NOW - 5, nbytes=1234, seconds=0.5, free=99, max_age=3600.0)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[FaultyBackend]:
    opened = FaultyBackend(open_backend(str(tmp_path / "shelf")))
    yield opened
    opened.close()


def test_one_has_the_lease_and_others_learn_what_it_found(backend: FaultyBackend) -> None:
    one, other = Lease(backend), Lease(backend)
    assert one.read(NOW) == Record()
    taken = one.take(one.read(NOW), NOW)
    assert taken is not None
    assert other.take(other.read(NOW), NOW + 1) is None
    one.release(replace(taken, finding=FOUND))
    read = other.read(NOW)
    assert read.finding == FOUND
    again = other.take(read, NOW + 2)
    assert again is not None
    assert again.finding == FOUND


def test_a_lease_of_a_killed_process_ends(backend: FaultyBackend) -> None:
    one, other = Lease(backend), Lease(backend)
    taken = one.take(Record(), NOW)
    assert taken is not None
    one.renew(taken, NOW + 30)
    late = NOW + LEASE_SECONDS + 1
    assert other.take(other.read(late), late) is None
    later = NOW + 30 + LEASE_SECONDS
    assert other.take(other.read(later), later) is not None
    assert one.take(one.read(later), later) is None


def test_of_two_that_take_it_at_once_the_last_one_has_it(
    backend: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Lease(backend), Lease(backend.inner)
    write = backend.write

    def overtaken(*args: Any) -> WriteResult:
        result = write(*args)
        assert other.take(Record(), NOW) is not None
        return result

    monkeypatch.setattr(backend, "write", overtaken)
    assert one.take(Record(), NOW) is None


def test_a_full_storage_is_swept_without_a_lease(backend: FaultyBackend) -> None:
    backend.add(Fault("write", error=NoSpaceStorageError(28, "ENOSPC")))
    one, other = Lease(backend), Lease(backend)
    assert one.take(one.read(NOW), NOW) is not None
    assert other.take(other.read(NOW), NOW) is not None


def test_trouble_of_the_storage_is_the_callers(backend: FaultyBackend) -> None:
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
    ],
)
def test_what_makes_no_sense_says_nothing(backend: FaultyBackend, content: bytes) -> None:
    backend.write(SWEEP, [content], "replace")
    found = Lease(backend).read(NOW)
    assert (found.owner, found.until, found.finding, found.max_bytes) == ("", 0.0, None, None)


def test_a_claim_to_the_far_future_blocks_nobody(backend: FaultyBackend) -> None:
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
