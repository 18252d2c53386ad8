"""The storage's clock and this machine's agree in tests of capacity, unless one says otherwise."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from kvshelf.capacity import keepers
from kvshelf.logs import RateLimitedLog
from tests.sim.storage import LaterBackend


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set this machine's clock, where ages are judged, forward with that of the storage."""
    monkeypatch.setattr(LaterBackend, "own_ahead", 0.0)
    later = SimpleNamespace(time=lambda: time.time() + LaterBackend.own_ahead)
    monkeypatch.setattr(keepers, "time", later)
    monkeypatch.setattr(keepers, "_apart_log", RateLimitedLog(keepers.logger))
