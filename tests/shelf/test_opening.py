"""Opening a shelf whose storage may not answer."""

from __future__ import annotations

import threading
from pathlib import Path

from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.shelf.opening import Opening
from kvshelf.shelf.shelf import Shelf
from tests.sim.storage import posix
from tests.support.waiting import PATIENCE


def test_shelf_that_opens_after_the_end_is_closed(tmp_path: Path) -> None:
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
