"""What tests of transfers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.storage import FaultyStorage, posix


@pytest.fixture
def backend(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(posix(tmp_path / "shelf"))
