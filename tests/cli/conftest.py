"""An empty shelf for commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.places import Place


@pytest.fixture
def empty(tmp_path: Path) -> Place:
    """A shelf with nothing on it."""
    (tmp_path / "shelf").mkdir()
    return Place(str(tmp_path / "shelf"))
