"""Notices: what appears in watched folders is told, whatever becomes of the folders."""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvshelf.backends import notices as module
from kvshelf.backends import open_backend
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.notices import FolderNotices
from kvshelf.backends.posix import PosixBackend
from tests.sim.storage import FaultyStorage

pytestmark = pytest.mark.real

NONE: tuple[set[str], set[str]] = (set(), set())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a/b").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def notices(root: Path) -> Iterator[FolderNotices]:
    notices = FolderNotices(str(root))
    yield notices
    notices.close()
    notices.close()


def is_readable(notices: FolderNotices) -> bool:
    return bool(select.select([notices.fileno()], [], [], 0)[0])


def test_links_renames_and_new_folders_are_told_and_temporaries_are_not(
    root: Path, notices: FolderNotices
) -> None:
    assert notices.watch(["a/b"]) == ({"a/b"}, set())
    assert not is_readable(notices)
    assert notices.appeared() == set()
    backend = PosixBackend(root)
    backend.write("a/b/linked", [b"1"])
    backend.write("a/b/linked", [b"12"], "replace")
    os.rename(root / "a/b/linked", root / "a/b/renamed")
    (root / "elsewhere").write_bytes(b"")
    os.rename(root / "elsewhere", root / "a/b/moved in")
    (root / "a/b/inner").mkdir()
    (root / "a/b/inner/not watched").write_bytes(b"")
    assert is_readable(notices)
    told = notices.appeared()
    assert told == {"a/b/linked", "a/b/renamed", "a/b/moved in", "a/b/inner/"}


def test_only_the_folders_that_were_named_last_are_watched(
    root: Path, notices: FolderNotices
) -> None:
    assert notices.watch(["a", "a/b"]) == ({"a", "a/b"}, set())
    assert notices.watch(["a/b"]) == NONE
    (root / "a/x").write_bytes(b"")
    (root / "a/b/y").write_bytes(b"")
    assert notices.appeared() == {"a/b/y"}
    assert notices.watch([]) == NONE
    (root / "a/b/z").write_bytes(b"")
    assert notices.appeared() == set()
    assert notices.watch(["", "a/b"]) == ({"", "a/b"}, set())
    (root / "x").write_bytes(b"")
    assert notices.appeared() == {"x"}


def test_of_a_folder_that_does_not_exist_the_nearest_parent_tells(
    root: Path, notices: FolderNotices
) -> None:
    folder = "a/c/d"
    assert notices.watch([folder]) == ({folder}, set())
    assert notices.watch([folder]) == NONE
    assert notices.watch([folder, "a/b"]) == ({"a/b"}, set())
    (root / "a/c").mkdir()
    assert notices.appeared() == {"a/c/"}
    assert notices.watch([folder]) == ({folder}, set())
    (root / "a/c/d").mkdir()
    assert notices.appeared() == {"a/c/d/"}
    assert notices.watch([folder]) == ({folder}, set())
    (root / "a/c/d/x").write_bytes(b"")
    assert notices.appeared() == {"a/c/d/x"}


def test_a_folder_that_was_missing_is_found_after_its_parent_was_not_watched_for_a_while(
    root: Path, notices: FolderNotices
) -> None:
    notices.watch(["a/c", "a"])
    notices.watch([])
    (root / "a/c").mkdir()
    assert notices.watch(["a/c", "a"]) == ({"a/c", "a"}, set())
    (root / "a/c").rmdir()
    assert notices.appeared() == {"a/c/"}
    (root / "a/c").mkdir()
    assert notices.watch(["a/c"]) == ({"a/c"}, set())
    (root / "a/c/x").write_bytes(b"")
    assert notices.appeared() == {"a/c/x"}


def test_a_folder_that_is_made_while_its_parent_is_being_watched_is_found(
    root: Path, notices: FolderNotices, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = notices._add

    def late(folder: str) -> str:
        if folder == "a":
            (root / "a/c").mkdir()
        return add(folder)

    monkeypatch.setattr(notices, "_add", late)
    assert notices.watch(["a/c"]) == ({"a/c"}, set())
    assert notices._numbers.keys() == {"a/c"}


def test_a_folder_that_is_gone_is_told_and_its_successor_can_be_watched(
    root: Path, notices: FolderNotices
) -> None:
    notices.watch(["a/b"])
    (root / "a/b").rmdir()
    (root / "a/b").mkdir()
    assert notices.appeared() == {"a/b/"}
    assert notices.watch(["a/b"]) == ({"a/b"}, set())
    (root / "a/b/x").write_bytes(b"")
    assert notices.appeared() == {"a/b/x"}


def test_a_folder_that_was_renamed_is_watched_under_its_new_name(
    root: Path, notices: FolderNotices
) -> None:
    notices.watch(["", "a/b"])
    (root / "a/b").rename(root / "a/new")
    assert notices.watch(["", "a/new"]) == ({"a/new"}, set())
    (root / "a/new/x").write_bytes(b"")
    assert notices.appeared() == {"a/new/x"}
    (root / "y").write_bytes(b"")
    assert notices.appeared() == {"y"}


@pytest.mark.long
def test_notices_that_were_lost_are_told(root: Path, notices: FolderNotices) -> None:
    notices.watch(["a/b"])
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 50_000:
        pytest.skip(f"the system keeps {limit} notices")
    for number in range(limit + 10):
        os.link(root / "a/b/x", root / f"a/b/{number}") if number else (root / "a/b/x").touch()
    while (told := notices.appeared()) is not None:
        assert told, "the loss was not told"


def test_a_file_in_the_place_of_a_folder_and_a_limit_are_told(
    root: Path, notices: FolderNotices, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "file").write_bytes(b"")
    (root / "link").symlink_to("a/b")
    places = ["a/b", "file", "file/x", "link"]
    assert notices.watch(places) == ({"a/b"}, {"file", "file/x", "link"})

    def full(*_: object) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(module._libc, "inotify_add_watch", full)
    assert notices.watch(["a/b", "a"]) == (set(), {"a"})
    monkeypatch.setattr(module._libc, "inotify_init1", full)
    with pytest.raises(OSError, match="No space"):
        FolderNotices(str(root))
    assert PosixBackend(root).notices() is None


def test_a_directory_gives_notices_if_they_can_be_trusted(root: Path) -> None:
    backend = PosixBackend(root)
    found = GuardedBackend(FaultyStorage(backend)).notices()
    assert (found is not None) is backend.properties.notifications
    if found is not None:
        found.close()
    backend._properties = replace(backend._properties, notifications=False)
    assert backend.notices() is None
    assert open_backend("memory://x").notices() is None
