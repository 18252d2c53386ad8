"""Stores that lack something of S3: each quirk is learned from one refusal, and remembered."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvshelf.backends import Backend, WriteResult, open_backend, s3_errors
from kvshelf.cli.app import app
from kvshelf.errors import ConfigError, PermanentStorageError, StorageError
from kvshelf.testing.backends import read_into
from tests.sim.s3 import BUCKET, Answer, Request, ScriptedS3, page, refusal

pytestmark = pytest.mark.real


def known(store: ScriptedS3, bucket: str = BUCKET) -> set[str]:
    return set(s3_errors.quirks_of(store.endpoint, bucket))


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


def no_delete_objects(request: Request) -> Answer | None:
    return refusal(501, "NotImplemented") if request.method == "POST" else None


def no_checksums(request: Request) -> Answer | None:
    checked = any(name.lower().startswith("x-amz-checksum") for name in request.headers)
    return refusal(400, "InvalidArgument", "unsupported header") if checked else None


def no_conditions(request: Request) -> Answer | None:
    return refusal(501, "NotImplemented") if "If-None-Match" in request.headers else None


@pytest.mark.parametrize(
    ("refuses", "quirks"),
    [
        (no_delete_objects, {"no-delete-objects"}),
        (no_checksums, {"no-checksums", "no-delete-objects"}),
        (no_conditions, {"no-conditions"}),
    ],
)
def test_quirk_with_refusal_is_learned_for_an_hour(
    store: ScriptedS3,
    refuses: Callable[[Request], Answer | None],
    quirks: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[Request] = []

    def note(request: Request) -> Answer | None:
        answer = refuses(request)
        refused.extend([request] if answer else [])
        return answer

    store.script = note
    with closing(store.open()) as backend, closing(store.open()) as other:
        round_trip(backend, "a/1", "a/2")
        assert known(store) == quirks
        # obstore tries a 501 again.
        assert len(refused) <= 7 * len(quirks)
        # Its requests were made up before that.
        round_trip(other, "a/3", "a/4")
        seen = len(refused)
    with closing(store.open()) as backend:
        round_trip(backend, "a/5", "a/6")
        assert len(refused) == seen
        later = time.monotonic() + s3_errors.LEARNED_SECONDS
        monkeypatch.setattr(s3_errors, "time", SimpleNamespace(monotonic=lambda: later))
        assert known(store) == set()
        round_trip(backend, "a/7", "a/8")
        assert len(refused) > seen
        assert known(store) == quirks


def test_quirk_that_is_set_is_not_met(store: ScriptedS3) -> None:
    store.script = no_checksums
    with closing(store.open(quirks=["no-checksums", "no-delete-objects"])) as backend:
        round_trip(backend, "a/1")
    with pytest.raises(ConfigError, match="'no-checksum'; did you mean no-checksums"):
        store.open(quirks=["no-checksum"])


def test_refusal_of_a_damaged_upload_is_no_quirk() -> None:
    said = "status code: 400 Bad Request: <Error><Code>BadDigest</Code><Message>The SHA256 you"
    said += " specified did not match the calculated checksum</Message></Error>"
    assert not s3_errors.shows(Exception(said), "no-checksums")


def test_probes_without_a_length_are_made_otherwise(store: ScriptedS3, bucket: Any) -> None:
    """As behind a proxy that compresses answers, of objects that are there."""
    bucket.write("a/empty", [b""])
    bucket.write("a/more", [b"12"])

    def say_no_length(request: Request) -> Answer | None:
        is_there = request.kind == "probe" and request.path in store.objects
        return Answer(says_length=False) if is_there else None

    store.script = say_no_length
    assert bucket.stat(["a/more", "a/empty", "a/none"]) == [2, 0, None]
    found = bucket.info("a/more")
    assert found is not None and found.size == 2 and found.mtime > 1e9
    assert known(store) == {"no-head-length"}


def test_endpoint_that_names_the_bucket_is_found_out_for_good(
    store: ScriptedS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose paths have no bucket, which is called like the first part of its address."""
    store.buckets = {"127"}

    def paths_without_bucket(request: Request) -> Answer | None:
        if request.path.startswith("127"):
            return refusal(404, "NoSuchKey")
        request.path = f"127/{request.path}"
        request.kind = "list" if "list-type" in request.query else request.kind
        return None

    store.script = paths_without_bucket
    with closing(open_backend("s3://127/in", storage_options=store.options())) as backend:
        round_trip(backend, "a/1")
    assert store.requests[-1].url.startswith("/in/")
    later = time.monotonic() + 10 * s3_errors.LEARNED_SECONDS
    with monkeypatch.context() as patch:
        patch.setattr(s3_errors, "time", SimpleNamespace(monotonic=lambda: later))
        assert known(store, "127") == {"endpoint-has-bucket"}
    store.script = lambda _: refusal(404, "NoSuchBucket")
    with pytest.raises(PermanentStorageError, match="no bucket '127'"):
        open_backend("s3://127/in", storage_options=store.options())


def test_host_that_is_only_called_like_the_bucket_is_no_quirk(store: ScriptedS3) -> None:
    store.script = lambda request: refusal(*(404, "NoSuchKey") if request.path else (403, "No"))
    with pytest.raises(StorageError, match="NoSuchKey"):
        open_backend("s3://127/in", storage_options=store.options())
    assert known(store, "127") == set()


def test_missing_bucket_called_like_the_host_is_no_quirk(store: ScriptedS3) -> None:
    """A listing without a bucket is answered too: by all buckets."""
    store.script = lambda request: None if request.path else page("")
    with pytest.raises(PermanentStorageError, match=r"there is no bucket '127\.0'"):
        open_backend("s3://127.0/in", storage_options=store.options())
    assert known(store, "127.0") == set()


def test_doctor_shows_what_a_store_lacks(store: ScriptedS3) -> None:
    store.script = no_checksums
    env = {"KVSHELF_STORAGE_OPTIONS": json.dumps(store.options())}
    result = CliRunner().invoke(app, ["doctor", f"s3://{BUCKET}/kv"], env=env)
    assert "no-checksums: objects are written without a checksum" in result.stdout


def test_listing_begins_behind_no_folder_that_is_listed(store: ScriptedS3, bucket: Any) -> None:
    """SeaweedFS leaves out what is in a folder of which a listing begins behind the name."""
    folders = ("00", "0e", "0f", "10", "a0")
    for folder in folders:
        bucket.write(f"n/{folder}/1", [b"12"])
    for first, last, found in (
        ("00", "0e", ["00", "0e"]),
        ("0f", "0f", ["0f"]),
        ("10", "ff", ["10", "a0"]),
        ("a0", "a0", ["a0"]),
    ):
        rows = list(bucket.list("n", start=first, end=last))
        assert [row.name.split("/")[1] for row in rows] == found
        begin = store.requests[-1].query["start-after"].rpartition("/")[2]
        assert begin < first and begin not in folders
