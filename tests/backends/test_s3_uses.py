"""Uses of objects in a bucket: they are written anew, on the condition that they are the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends import Touched, open_backend
from kvshelf.backends.guard import GuardedBackend
from kvshelf.errors import TransientStorageError
from tests.support.servers import BUCKET, S3Server, command, moto_s3, rclone_s3

pytest.importorskip("obstore", reason="obstore is missing: pip install 'kvshelf[s3]'")

from kvshelf.backends import s3_quirks
from tests.faults.s3proxy import S3Proxy

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(command("moto_server") is None, reason="moto is not installed"),
]


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    with moto_s3() as server:
        yield server


class Bucket:
    """An object on a server, and what is asked of it."""

    def __init__(self, server: S3Server, name: str) -> None:
        self.proxy = S3Proxy(server.endpoint)
        options = server.options(endpoint_url=self.proxy.endpoint)
        self.backend = open_backend(f"s3://{BUCKET}/{name}", storage_options=options)
        self.client = server.client()
        self.key = f"{name}/a/x"
        self.client.put_object(Bucket=BUCKET, Key=self.key, Body=b"12345")

    def touch(self, before: float = math.inf) -> tuple[Touched, list[str]]:
        """Record a use; return the answer, and what was asked of the object, and of others."""
        seen = len(self.proxy.requests)
        touched = self.backend.touch("a/x", before)
        asked = [request.partition(" ") for request in self.proxy.requests[seen:]]
        return touched, [what if self.key in name else f"own {what}" for what, _, name in asked]

    def names(self) -> list[str]:
        return [row.name for row in self.backend.list(hidden=True)]

    def close(self) -> None:
        self.backend.close()
        self.proxy.close()


@pytest.fixture
def bucket(moto: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr(s3_quirks, "_learned", {})
    with closing(Bucket(moto, tmp_path.name)) as bucket:
        yield bucket


def test_an_object_is_written_anew_if_it_was_not_lately(bucket: Bucket) -> None:
    learning = ["own delete", *["own write"] * 3, "own delete"]
    assert bucket.touch() == (Touched.TOUCHED, ["probe", "read", *learning, "write"])
    assert bucket.touch() == (Touched.TOUCHED, ["probe", "read", "write"])
    info = bucket.backend.info("a/x")
    assert info is not None and info.size == 5
    assert bucket.touch(info.mtime) == (Touched.TOUCHED, ["probe"])
    assert bucket.touch(info.mtime + 1) == (Touched.TOUCHED, ["probe", "read", "write"])
    assert bucket.backend.properties.renews
    assert bucket.names() == ["a/x"]


@pytest.mark.parametrize("change", ["delete", "replace"])
def test_what_is_gone_meanwhile_is_not_brought_back(bucket: Bucket, change: str) -> None:
    bucket.touch()

    def between(request: Any) -> None:
        if request.command == "PUT" and bucket.key in request.path:
            if change == "delete":
                bucket.client.delete_object(Bucket=BUCKET, Key=bucket.key)
            else:
                bucket.client.put_object(Bucket=BUCKET, Key=bucket.key, Body=b"other")

    bucket.proxy.refuses = between
    assert bucket.touch()[0] is Touched.TOUCHED
    bucket.proxy.refuses = lambda _: None
    if change == "delete":
        assert bucket.names() == []
        assert bucket.touch() == (Touched.TOUCHED, ["probe"])
    else:
        with bucket.backend.open("a/x") as reader:
            data = bytearray(5)
            reader.read_into(memoryview(data), 0)
        assert data == b"other"


def refusing(status: int, code: str) -> Callable[[Any], tuple[int, str] | None]:
    return lambda request: (status, code) if "If-Match" in request.headers else None


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "InvalidArgument")])
def test_a_store_that_refuses_the_condition_is_asked_once(
    bucket: Bucket, status: int, code: str
) -> None:
    bucket.proxy.refuses = refusing(status, code)
    assert bucket.touch()[0] is Touched.REFUSED
    assert bucket.touch() == (Touched.REFUSED, [])
    assert not bucket.backend.properties.renews
    assert s3_quirks.quirks_of(bucket.proxy.endpoint, BUCKET) == {"if-match"}
    assert bucket.names() == ["a/x"]


@pytest.mark.skipif(command("rclone") is None, reason="rclone is not installed")
def test_a_store_that_ignores_the_condition_is_found_out(tmp_path: Path) -> None:
    with rclone_s3(tmp_path) as server, closing(Bucket(server, "kv")) as bucket:
        touched, asked = bucket.touch()
        assert touched is Touched.REFUSED
        assert asked.count("write") == 0
        assert bucket.touch() == (Touched.REFUSED, [])
        assert bucket.names() == ["a/x"]


def test_where_nothing_may_be_deleted_the_object_itself_shows_it(bucket: Bucket) -> None:
    bucket.proxy.add("403", "delete")
    asked = ["probe", "read", "own delete", *["write"] * 3]
    assert bucket.touch() == (Touched.TOUCHED, asked)
    assert bucket.names() == ["a/x"]


def test_who_may_not_write_records_nothing(bucket: Bucket) -> None:
    bucket.proxy.add("403", "write")
    guard = GuardedBackend(bucket.backend)
    assert guard.touch("a/x") is Touched.REFUSED
    assert guard.writes.is_closed
    assert bucket.touch() == (Touched.REFUSED, [])


def test_a_body_that_ends_early_replaces_nothing(bucket: Bucket) -> None:
    bucket.touch()
    bucket.proxy.add("reset", "read")
    with pytest.raises(TransientStorageError):
        bucket.touch()
    bucket.proxy.clear()
    assert bucket.client.head_object(Bucket=BUCKET, Key=bucket.key)["ContentLength"] == 5


def test_a_bucket_with_versions_is_known_from_its_answers(bucket: Bucket) -> None:
    bucket.touch()
    assert not bucket.backend.properties.versions
    enabled = {"Status": "Enabled"}
    bucket.client.create_bucket(Bucket="versions")
    bucket.client.put_bucket_versioning(Bucket="versions", VersioningConfiguration=enabled)
    options = {"key": "k", "secret": "s", "endpoint_url": bucket.proxy.endpoint}
    with closing(open_backend("s3://versions/kv", storage_options=options)) as backend:
        backend.write("a", [b"1"], "replace")
        assert backend.properties.versions
