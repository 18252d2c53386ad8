"""Opening a shelf whose storage may not answer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.errors import TransientStorageError
from kvshelf.shelf import opening as opening_module
from kvshelf.shelf.opening import Opening
from kvshelf.shelf.shelf import Shelf
from tests.sim.storage import posix
from tests.support.waiting import PATIENCE, until


def test_a_storage_that_does_not_answer_does_not_hold_up_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    shelf: Any = object()

    def hang() -> Shelf:
        gate.wait()
        return shelf  # type: ignore[no-any-return]

    opening = Opening("sftp://host/kv", hang)
    assert opening.first(0.01, "the engine runs without it") is None
    assert opening.get() is None
    assert "sftp://host/kv has not answered" in caplog.text
    gate.set()
    until(lambda: opening.get() is not None)
    assert opening.get() is shelf


def test_a_shelf_that_opens_after_the_end_is_closed(tmp_path: Path) -> None:
    began, gate, closed = threading.Event(), threading.Event(), threading.Event()

    class Late(WrappedBackend):
        def close(self) -> None:
            super().close()
            closed.set()

    def hang() -> Shelf:
        began.set()
        gate.wait()
        return Shelf(Late(posix(tmp_path)))

    opening = Opening("nfs", hang)
    assert began.wait(PATIENCE)
    opening.close()
    gate.set()
    assert closed.wait(PATIENCE)
    assert opening.get() is None


def test_trouble_that_may_pass_is_tried_again_and_other_trouble_stops_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening_module, "_RETRY_SECONDS", 0.01)
    answers: list[Any] = [TransientStorageError(116, "ESTALE"), object()]

    def open_() -> Shelf:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    opening = Opening("nfs", open_)
    until(lambda: opening.get() is not None)
    assert opening.get() is not None

    def refuse() -> Shelf:
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        Opening("nfs", refuse).first(PATIENCE, "nothing is loaded")
