"""Uses of objects in a bucket: the store copies them onto themselves."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends import Touched, open_backend
from kvshelf.backends.guard import GuardedBackend
from kvshelf.errors import StorageError
from tests.support.servers import (
    BUCKET,
    RCLONE_CACHE_SECONDS,
    S3Server,
    command,
    moto_s3,
    rclone_s3,
)

pytest.importorskip("obstore", reason="obstore is missing: pip install '.[s3]'")

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
    monkeypatch.setattr(s3_quirks, "_known_until", {})
    with closing(Bucket(moto, tmp_path.name)) as bucket:
        yield bucket


def test_touch_of_old_object_has_the_store_copy_it(bucket: Bucket) -> None:
    """Bytes that come wrong to this machine do not go back to the store."""
    bucket.proxy.add("wrong bytes", "read")
    assert bucket.touch() == (Touched.TOUCHED, ["probe", "write"])
    info = bucket.backend.info("a/x")
    assert info is not None and info.size == 5
    assert bucket.touch(info.mtime) == (Touched.TOUCHED, ["probe"])
    assert bucket.touch(info.mtime + 1) == (Touched.TOUCHED, ["probe", "write"])
    assert bucket.backend.properties.renews
    assert bucket.names() == ["a/x"]
    assert bucket.client.get_object(Bucket=BUCKET, Key=bucket.key)["Body"].read() == b"12345"


@pytest.mark.parametrize("change", ["delete", "replace"])
def test_touch_of_object_that_changes_meanwhile_does_not_bring_it_back(
    bucket: Bucket, change: str
) -> None:
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


@pytest.mark.parametrize(
    ("status", "code", "is_quirk"),
    [
        (501, "NotImplemented", True),
        (400, "InvalidArgument", True),
        (400, "InvalidRequest", True),
        (400, "ExpiredToken", False),
        (400, "RequestTimeout", False),
        (409, "OperationAborted", None),
    ],
)
def test_touch_with_refused_copy_learns_only_from_what_says_so(
    bucket: Bucket, status: int, code: str, is_quirk: bool | None
) -> None:
    bucket.proxy.refuses = lambda request: (
        (status, code) if "x-amz-copy-source" in request.headers else None
    )
    if is_quirk is False:
        with pytest.raises(StorageError, match=code):
            bucket.touch()
    else:
        assert bucket.touch()[0] is (Touched.REFUSED if is_quirk else Touched.TOUCHED)
    if is_quirk:
        assert bucket.touch() == (Touched.REFUSED, [])
        assert bucket.names() == ["a/x"]
    assert bucket.backend.properties.renews is not bool(is_quirk)
    learned = s3_quirks.quirks_of(bucket.proxy.endpoint, BUCKET)
    assert set(learned) == ({"no-self-copy"} if is_quirk else set())


@pytest.mark.skipif(command("rclone") is None, reason="rclone is not installed")
def test_touch_with_store_that_only_says_that_it_copies_is_refused(tmp_path: Path) -> None:
    with rclone_s3(tmp_path) as server, closing(Bucket(server, "kv")) as bucket:
        for name in ("x", "y"):
            (tmp_path / BUCKET / "kv/a" / name).write_bytes(b"12345")
            os.utime(tmp_path / BUCKET / "kv/a" / name, (1e9, 1e9))
        time.sleep(2 * RCLONE_CACHE_SECONDS)
        assert bucket.touch() == (Touched.TOUCHED, ["probe", "write", "probe"])
        assert bucket.touch() == (Touched.TOUCHED, ["probe", "write"])
        bucket.proxy.refuses = lambda request: (200, "") if request.command == "PUT" else None
        options = server.options(endpoint_url=bucket.proxy.endpoint)
        with closing(open_backend(f"s3://{BUCKET}/kv", storage_options=options)) as backend:
            assert backend.touch("a/y") is Touched.REFUSED
            assert not backend.properties.renews
        assert bucket.touch() == (Touched.REFUSED, [])


def test_who_may_not_write_records_nothing(bucket: Bucket) -> None:
    bucket.proxy.add("403", "write")
    guard = GuardedBackend(bucket.backend)
    assert guard.touch("a/x") is Touched.REFUSED
    assert guard.writes.is_closed
    assert bucket.touch() == (Touched.REFUSED, [])


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
