"""What tests of transfers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.storages import FaultyBackend, posix


@pytest.fixture
def backend(tmp_path: Path) -> FaultyBackend:
    return FaultyBackend(posix(tmp_path / "shelf"))
