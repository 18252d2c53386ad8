"""The history file: what it holds, how it wraps, and that no content of a file is an error."""

from __future__ import annotations

import fcntl
import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from kvshelf import history as module
from kvshelf.format.kinds import KINDS, STATE, kind_key
from kvshelf.history import LARGEST, Event, History, Reason, read_histories

pytestmark = pytest.mark.real


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")[::-1]


def begin(folder: Path, **options: object) -> History:
    history = History.open(folder, **options)  # type: ignore[arg-type]
    assert history is not None
    history.flush()
    return history


def path_of(history: History) -> Path:
    assert history.path is not None
    return history.path


def test_a_reader_finds_what_was_noted_under_a_key(tmp_path: Path) -> None:
    history = begin(tmp_path, role="rank 0", shelf="/kv")
    history.note(Event.MISSED, key(1), chunk=3, detail=Reason.ABSENT)
    history.note(Event.DROPPED_STORE, kind_key(key(2), STATE), detail=Reason.STAGING_FULL)
    history.note_evicted(key(1), 3)
    history.describe(namespace="model-0123456789abcdef")
    history.flush()

    (past,) = read_histories(tmp_path)
    assert past.running
    assert past.header["role"] == "rank 0"
    assert past.header["pid"] == os.getpid()
    assert past.header["namespace"] == "model-0123456789abcdef"
    found = past.of(key(1))
    assert found["event"].tolist() == [Event.MISSED, Event.EVICTED]
    assert found["chunk"].tolist() == [3, 3]
    assert found["detail"].tolist() == [Reason.ABSENT, Reason.BOUNDS]
    assert KINDS[past.of(key(2))["kind"][0]] == STATE
    assert not len(past.of(key(3)))

    history.close()
    assert not read_histories(tmp_path)[0].running


def test_a_look_at_a_new_file_does_not_end_its_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that start at the same time look which of the others are alive."""
    make = tempfile.mkstemp

    def looked_at(*arguments: Any) -> tuple[int, str]:
        file, name = make(*arguments)
        other = os.open(name, os.O_RDONLY)
        fcntl.flock(other, fcntl.LOCK_SH)
        threading.Timer(0.1, os.close, (other,)).start()
        return file, name

    monkeypatch.setattr(tempfile, "mkstemp", looked_at)
    history = begin(tmp_path)
    history.note(Event.MISSED, key(1))
    history.flush()
    (past,) = read_histories(tmp_path)
    assert past.running
    assert len(past.of(key(1))) == 1
    history.close()


def test_the_file_is_private_and_bounded(tmp_path: Path) -> None:
    history = begin(tmp_path / "state", nbytes=16384)
    slots = (16384 - 8192) // 32
    for number in range(3 * slots + 5):
        history.note(Event.MISSED, key(number))
        if number % 50 == 0:
            history.flush()
    history.close()

    found = path_of(history).lstat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "state").lstat().st_mode) == 0o700
    assert found.st_size == 16384
    (past,) = read_histories(tmp_path / "state")
    kept = [int.from_bytes(bytes(row), "little") for row in past.events["key"]]
    # By their times; the system's clock may step back.
    assert sorted(kept) == list(range(2 * slots + 5, 3 * slots + 5))


def test_all_threads_may_note_at_once(tmp_path: Path) -> None:
    history = begin(tmp_path)
    threads = [
        threading.Thread(
            target=lambda first: [history.note(Event.MISSED, key(first + n)) for n in range(1000)],
            args=(1000 * number,),
        )
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        history.flush()
    for thread in threads:
        thread.join()
    history.close()
    (past,) = read_histories(tmp_path)
    kept = {int.from_bytes(bytes(row), "little") for row in past.events["key"]}
    assert kept == set(range(8000))


def test_old_files_of_processes_that_ended_are_removed(tmp_path: Path) -> None:
    alive = begin(tmp_path)
    os.utime(path_of(alive), (1, 1))
    for _ in range(module.KEPT + 5):
        begin(tmp_path).close()
    other = tmp_path / "notes.txt"
    other.touch()
    last = begin(tmp_path)
    module._remove_old(tmp_path)
    left = set(tmp_path.iterdir())
    assert {path_of(alive), path_of(last), other} < left
    # The thread of a history looks as well, and may take one that is being made for ended.
    assert 2 + module.KEPT <= len(left) <= 3 + module.KEPT
    alive.close()
    last.close()


def test_a_process_that_was_killed_counts_as_ended(tmp_path: Path) -> None:
    code = (
        "import sys, time; from kvshelf.history import *;"
        "h = History.open(sys.argv[1], role='killed'); h.note(Event.MISSED, bytes(32)); h.flush();"
        "print('noted', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert read_histories(tmp_path)[0].running
    child.kill()
    child.communicate()
    (past,) = read_histories(tmp_path)
    assert not past.running
    assert len(past.of(bytes(32))) == 1


def test_without_a_folder_there_is_no_history(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    history = begin(tmp_path / "file" / "folder")
    assert history.path is None
    history.note(Event.MISSED, key(1))
    history.flush()
    history.close()
    assert read_histories(tmp_path / "file" / "folder") == []


def test_a_folder_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = threading.Event(), threading.Event()
    make = tempfile.mkstemp

    def late(*arguments: Any) -> Any:
        asked.set()
        answer.wait(60)
        return make(*arguments)

    monkeypatch.setattr(tempfile, "mkstemp", late)
    monkeypatch.setattr(module, "_WRITE_SECONDS", 0.01)
    history = History.open(tmp_path)
    assert history is not None
    assert asked.wait(60)
    history.note(Event.MISSED, key(1))
    history.describe(role="waiting")
    history.close()
    answer.set()
    history.flush()
    history.close()
    (past,) = read_histories(tmp_path)
    assert past.header["role"] == "waiting"


def test_a_file_that_cannot_be_written_ends_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = begin(tmp_path)
    before = path_of(history).read_bytes()

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    history.note(Event.MISSED, key(1))
    history.flush()
    monkeypatch.undo()
    history.note(Event.MISSED, key(2))
    history.flush()
    history.close()
    assert path_of(history).read_bytes() == before


def test_text_of_any_length_leaves_the_header_readable(tmp_path: Path) -> None:
    history = begin(tmp_path, shelf="\U0001f4da" * 3000, refuses="\udcff" * 3000)
    for number in range(100):
        history.note_bad(f"{number:03}" + "f" * 300)
    history.close()
    (past,) = read_histories(tmp_path)
    assert len(past.header["shelf"]) > 100
    assert [name[:3] for name in past.header["bad"]] == [
        f"{number:03}" for number in range(84, 100)
    ]


def test_files_of_any_content_are_no_error(tmp_path: Path) -> None:
    history = begin(tmp_path)
    history.note(Event.MISSED, key(1))
    history.close()
    good = path_of(history).read_bytes()
    noise = random.Random(1)
    for number in range(200):
        content = bytearray(good[: noise.randrange(len(good) + 1)])
        for _ in range(noise.randrange(4)):
            if content:
                content[noise.randrange(len(content))] = noise.randrange(256)
        (tmp_path / f"{number}.history").write_bytes(content)
    (tmp_path / "deep.history").write_bytes(b"[" * 8192)
    (tmp_path / "list.history").write_bytes(b"[]".ljust(8192))
    (tmp_path / "other.history").write_bytes(b'{"version": 2}'.ljust(8192))
    with (tmp_path / "huge.history").open("wb") as file:
        file.write(good)
        file.truncate(1 << 40)
    os.mkfifo(tmp_path / "pipe.history")
    (tmp_path / "link.history").symlink_to("/etc/passwd")
    (tmp_path / "folder.history").mkdir()
    for past in read_histories(tmp_path):
        assert len(past.of(key(1))) <= LARGEST
