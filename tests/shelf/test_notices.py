"""Notices: whoever waits for an object in a local directory is woken, and nothing stays watched."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from watchdog.observers.api import BaseObserver

from kvshelf.shelf import notices, waits
from kvshelf.shelf.waits import Wait
from tests.shelf.test_waits import AwaitedPiece, Rig, full, name, shards_of, size
from tests.sim.storage import posix
from tests.support.waiting import until

pytestmark = pytest.mark.real


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A rig whose waits probe once, and then only when they are woken."""
    monkeypatch.setattr(waits, "_NOTICED", 3600.0)
    rig = Rig(posix(tmp_path / "shelf"))
    yield rig
    rig.close()
    until(lambda: not notices._watches and not any(one.emitters for one in notices._observers))


def path(rig: Rig, piece: AwaitedPiece, shard: int) -> Path:
    return Path(rig.other.url, name(piece, shard))


def submit(rig: Rig, pieces: list[AwaitedPiece]) -> Wait:
    """Wait for pieces, whose folders are there, until only a notice can end the wait."""
    for piece in pieces:
        path(rig, piece, 0).parent.mkdir(parents=True, exist_ok=True)
    wait = rig.submit(pieces)
    until(lambda: rig.service._notices.get(wait) is not None)
    return wait


def rename(rig: Rig, piece: AwaitedPiece) -> None:
    for shard in shards_of(piece):
        temporary = path(rig, piece, shard).with_name(".temporary")
        temporary.write_bytes(bytes(size(piece, shard)))
        temporary.rename(path(rig, piece, shard))


@pytest.mark.parametrize("publish", [Rig.put, rename], ids=["by a link", "by a rename"])
def test_wait_whose_last_object_appears_is_woken(
    rig: Rig, publish: Callable[[Rig, AwaitedPiece], None]
) -> None:
    pieces = full(3)
    waiting = [submit(rig, pieces), submit(rig, pieces)]
    other = submit(rig, full(1, seed=1))
    for piece in pieces:
        publish(rig, piece)
    until(lambda: all(wait.complete for wait in waiting))
    assert not other.complete
    # A folder is watched once for all of its files, and as long as somebody waits for one.
    until(lambda: sum(notices._watches.values()) == 1)
    other.cancel()


@pytest.mark.parametrize("refused", ["start", "schedule"])
def test_wait_without_a_notice_probes_and_says_so_once(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: str,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(notices, "_observers", [])
    monkeypatch.setattr(BaseObserver, refused, refuse)
    for seed in range(3):
        (piece,) = full(1, seed)
        path(rig, piece, 0).parent.mkdir(parents=True, exist_ok=True)
        wait = rig.submit([piece])
        until(lambda wait=wait: wait in rig.service._notices)
        rig.put(piece)
        until(lambda wait=wait: wait.complete)
    assert caplog.text.count("raise fs.inotify.max_user_watches") == 1
