"""An empty shelf for commands, in a directory and on S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.places import Place
from tests.support.servers import BUCKET, S3Server, command, moto_s3


@pytest.fixture(scope="module", params=["local", pytest.param("s3", marks=pytest.mark.real)])
def storage(request: pytest.FixtureRequest) -> Iterator[S3Server | None]:
    """An S3 server; None for a directory."""
    if request.param == "local":
        yield None
        return
    pytest.importorskip("obstore", reason="obstore is missing: pip install '.[s3]'")
    if command("moto_server") is None:
        pytest.skip("moto_server is missing: pip install 'moto[server]'")
    with moto_s3() as server:
        yield server


@pytest.fixture
def empty(storage: S3Server | None, tmp_path: Path) -> Place:
    """A shelf with nothing on it."""
    if storage is None:
        (tmp_path / "shelf").mkdir()
        return Place(str(tmp_path / "shelf"))
    return Place(f"s3://{BUCKET}/{tmp_path.name}", storage.options())
