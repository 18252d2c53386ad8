"""Readable failures inside the suite, and a bucket with a script."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvshelf.backends import Backend
from tests.sim.s3 import ScriptedS3

pytest.register_assert_rewrite("kvshelf.testing.backends")


@pytest.fixture
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody's own configuration has a part in the tests."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def store(no_account: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedS3]:
    """An S3 store of which nothing is known."""
    pytest.importorskip("obstore", reason="obstore is missing: pip install '.[s3]'")
    # Another store may have had its port.
    monkeypatch.setattr("kvshelf.backends.s3_errors._known_until", {})
    with ScriptedS3() as store:
        yield store


@pytest.fixture
def bucket(store: ScriptedS3) -> Iterator[Backend]:
    """A shelf in a bucket of the store."""
    with closing(store.open()) as backend:
        yield backend
