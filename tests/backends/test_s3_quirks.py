"""Stores that lack something of S3: each quirk is learned from one refusal, and remembered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from kvshelf.backends import Backend, WriteResult, open_backend
from kvshelf.cli.app import app
from kvshelf.errors import ConfigError, PermanentStorageError
from tests.support.servers import BUCKET, S3Server, command, moto_s3

pytest.importorskip("obstore", reason="obstore is missing: pip install '.[s3]'")

from kvshelf.backends import s3_quirks
from tests.faults.s3proxy import S3Proxy
from tests.support.backend_suite import read_into

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(command("moto_server") is None, reason="moto is not installed"),
]


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    with moto_s3() as server:
        yield server


@pytest.fixture
def store(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    # Another proxy may have had its port.
    monkeypatch.setattr(s3_quirks, "_known_until", {})
    with S3Proxy(moto.endpoint) as proxy:
        yield proxy


def opened(moto: S3Server, store: S3Proxy, **options: Any) -> Backend:
    url = f"s3://{BUCKET}/{store.endpoint.rpartition(':')[2]}"
    return open_backend(url, storage_options=moto.options(endpoint_url=store.endpoint, **options))


def known(store: S3Proxy) -> set[str]:
    return set(s3_quirks.quirks_of(store.endpoint, BUCKET))


def round_trip(backend: Backend, *names: str) -> None:
    for name in names:
        assert backend.write(name, [b"12"]) is WriteResult.CREATED
        assert backend.write(name, [b"12"]) is WriteResult.EXISTED
        buffer = bytearray(2)
        assert read_into(backend, name, memoryview(buffer)) == 2
        assert buffer == b"12"
    assert backend.stat([*names, "not/there"]) == [*(2 for _ in names), None]
    assert backend.delete(names) == [True for _ in names]
    assert backend.stat(names) == [None for _ in names]


def no_delete_objects(request: Any) -> tuple[int, str] | None:
    return (501, "NotImplemented") if request.command == "POST" else None


def no_checksums(request: Any) -> tuple[int, str] | None:
    checked = any(name.lower().startswith("x-amz-checksum") for name in request.headers)
    return (400, "InvalidArgument") if checked else None


def no_conditions(request: Any) -> tuple[int, str] | None:
    return (501, "NotImplemented") if "If-None-Match" in request.headers else None


def no_head_length(request: Any) -> tuple[int, str] | None:
    """As a proxy that compresses answers, of objects that are there."""
    there = request.command == "HEAD" and request._ask(b"")[0] == 200
    return (200, "") if there else None


@pytest.mark.parametrize(
    ("refuses", "quirks"),
    [
        (no_delete_objects, {"no-delete-objects"}),
        (no_checksums, {"no-checksums", "no-delete-objects"}),
        (no_conditions, {"no-conditions"}),
    ],
)
def test_quirk_with_refusal_is_learned_for_an_hour(
    moto: S3Server,
    store: S3Proxy,
    refuses: Any,
    quirks: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[str] = []

    def counting(request: Any) -> tuple[int, str] | None:
        answer: tuple[int, str] | None = refuses(request)
        refused.extend([request.command] if answer else [])
        return answer

    store.refuses = counting
    with closing(opened(moto, store)) as backend, closing(opened(moto, store)) as other:
        round_trip(backend, "a/1", "a/2")
        assert known(store) == quirks
        # obstore tries a 501 again.
        assert len(refused) <= 7 * len(quirks)
        # Its requests were made up before that.
        round_trip(other, "a/3", "a/4")
        seen = len(refused)
    with closing(opened(moto, store)) as backend:
        round_trip(backend, "a/5", "a/6")
        assert len(refused) == seen
        later = time.monotonic() + s3_quirks.LEARNED_SECONDS
        monkeypatch.setattr(s3_quirks, "time", SimpleNamespace(monotonic=lambda: later))
        assert known(store) == set()
        round_trip(backend, "a/7", "a/8")
        assert len(refused) > seen
        assert known(store) == quirks


def test_a_quirk_that_is_set_is_not_met(moto: S3Server, store: S3Proxy) -> None:
    store.refuses = no_checksums
    quirks = ["no-checksums", "no-delete-objects"]
    with closing(opened(moto, store, quirks=quirks)) as backend:
        round_trip(backend, "a/1")
    with pytest.raises(ConfigError, match="'no-checksum'; did you mean no-checksums"):
        opened(moto, store, quirks=["no-checksum"])


def test_a_damaged_upload_is_no_quirk() -> None:
    said = "status code: 400 Bad Request: <Error><Code>BadDigest</Code><Message>The SHA256 you"
    said += " specified did not match the calculated checksum</Message></Error>"
    assert not s3_quirks.shows(Exception(said), "no-checksums")


def test_probes_without_a_length_are_made_otherwise(moto: S3Server, store: S3Proxy) -> None:
    with closing(opened(moto, store)) as backend:
        backend.write("a/empty", [b""])
        backend.write("a/more", [b"12"])
        store.refuses = no_head_length
        assert backend.stat(["a/more", "a/empty", "a/none"]) == [2, 0, None]
        found = backend.info("a/more")
        assert found is not None and found.size == 2 and found.mtime > 1e9
        assert known(store) == {"no-head-length"}


def test_write_with_put_refused_as_too_many_looks_whether_the_object_exists(
    moto: S3Server, store: S3Proxy
) -> None:
    with closing(opened(moto, store)) as backend, closing(opened(moto, store)) as other:
        backend.write("a/0", [b"1"])
        other.write("a/1", [b"1"])
        store.refuses = lambda request: (429, "TooMany") if request.command == "PUT" else None
        assert backend.write("a/1", [b"1"]) is WriteResult.EXISTED
        statuses = {"PUT": 429, "HEAD": 403}
        store.refuses = lambda request: (statuses[request.command], "Refused")
        with pytest.raises(PermanentStorageError, match="probing failed"):
            backend.write("a/2", [b"1"])


@pytest.mark.parametrize("fault", [None, "403"])
def test_conditions_are_learned_on_a_name_of_ones_own(
    moto: S3Server, store: S3Proxy, fault: str | None
) -> None:
    """Engines that start together do not write one name twice; where nothing may be deleted, none
    is left behind."""
    with closing(opened(moto, store)) as backend:
        if fault is not None:
            store.add(fault, "delete")
        backend.write("a/1", [b"1"])
        written = [name.rpartition("/")[2] for name in store.requests if name.startswith("write")]
        assert len(written) == 3 - (fault is not None)
        assert written.count("1") == 1 + (fault is not None)
        assert [row.name for row in backend.list(hidden=True)] == ["a/1"]
        seen = len(store.requests)
        backend.write("a/2", [b"1"])
        assert len(store.requests) == seen + 1


def test_one_write_a_second_is_met_once(moto: S3Server, store: S3Proxy) -> None:
    """It does not show whether conditions are heeded, and is not tried for each object."""
    written: set[str] = set()

    def refuses(request: Any) -> tuple[int, str] | None:
        if request.command != "PUT" or request.path not in written:
            written.update([request.path] if request.command == "PUT" else [])
            return None
        return 429, "TooMany"

    store.refuses = refuses
    with closing(opened(moto, store)) as backend:
        for name in ("a/1", "a/2", "a/3"):
            assert backend.write(name, [b"1"]) is WriteResult.CREATED
    assert len(written) == 3 + 1


def test_an_endpoint_that_names_the_bucket(moto: S3Server, store: S3Proxy) -> None:
    """A server whose paths have no bucket, which is called like the first part of its address."""
    bucket, host = "127", store.endpoint.removeprefix("http://")
    moto.client().create_bucket(Bucket=bucket)
    seen: list[str] = []

    def refuses(request: Any) -> tuple[int, str] | None:
        seen.append(request.path)
        if request.path.startswith(f"/{bucket}"):
            return 404, "NoSuchKey"
        request.path = f"/{bucket}{request.path}"
        return None

    store.refuses = refuses
    options = moto.options(endpoint_url=f"http://{host}")
    with closing(open_backend(f"s3://{bucket}/in", storage_options=options)) as backend:
        round_trip(backend, "a/1")
    assert seen[-1].startswith("/in/")
    assert set(s3_quirks.quirks_of(f"http://{host}", bucket)) == {"bucket-in-endpoint"}
    store.refuses = lambda _: (404, "NoSuchBucket")
    with pytest.raises(PermanentStorageError, match="no bucket '127'"):
        open_backend(f"s3://{bucket}/in", storage_options=options)


def test_missing_bucket_called_like_the_host_is_no_quirk(moto: S3Server) -> None:
    """A listing without a bucket is answered too: by all buckets."""
    with pytest.raises(PermanentStorageError, match=r"there is no bucket '127\.0'"):
        open_backend("s3://127.0/in", storage_options=moto.options())
    assert not set(s3_quirks.quirks_of(moto.endpoint, "127.0"))


def test_doctor_shows_what_a_store_lacks(moto: S3Server, store: S3Proxy) -> None:
    store.refuses = no_checksums
    env = {"KVSHELF_STORAGE_OPTIONS": json.dumps(moto.options(endpoint_url=store.endpoint))}
    result = CliRunner().invoke(app, ["doctor", f"s3://{BUCKET}/kv"], env=env)
    assert "no-checksums: objects are written without a checksum" in result.stdout


def test_listings_begin_behind_no_folder_that_is_listed(moto: S3Server, store: S3Proxy) -> None:
    """SeaweedFS leaves out what is in a folder of which a listing begins behind the name."""
    begins: list[str] = []

    def watching(request: Any) -> None:
        begins.extend(parse_qs(urlsplit(request.path).query).get("start-after", []))

    with closing(opened(moto, store)) as backend:
        for folder in ("00", "0e", "0f", "10", "a0"):
            backend.write(f"n/{folder}/1", [b"12"])
        store.refuses = watching
        for first, last, found in (
            ("00", "0e", ["00", "0e"]),
            ("0f", "0f", ["0f"]),
            ("10", "ff", ["10", "a0"]),
            ("a0", "a0", ["a0"]),
        ):
            rows = list(backend.list("n", between=(first, last)))
            assert [row.name.split("/")[1] for row in rows] == found
            begin = begins.pop().rpartition("/")[2]
            assert not begins and begin < first and begin not in ("00", "0e", "0f", "10", "a0")
