"""Uses of objects in a bucket: the store copies them onto themselves."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import pytest

from kvshelf.backends import Touched
from kvshelf.backends.guard import GuardedBackend
from kvshelf.errors import StorageError
from tests.backends.test_s3_quirks import known
from tests.sim.s3 import BUCKET, Answer, Request, ScriptedS3, refusal

pytestmark = pytest.mark.real

PATH = f"{BUCKET}/kv/a/x"
LONG_AGO = 1e9


@pytest.fixture(autouse=True)
def _object(store: ScriptedS3) -> None:
    store.objects[PATH] = b"12345", LONG_AGO


def touch(store: ScriptedS3, backend: Any, before: float = math.inf) -> tuple[Touched, list[str]]:
    """Record a use; return the answer, and the requests."""
    answers: list[Touched] = []
    asked = store.asked(lambda: answers.append(backend.touch("a/x", before)))
    return answers[0], asked


def test_touch_of_old_object_has_the_store_copy_it(store: ScriptedS3, bucket: Any) -> None:
    """No bytes pass through this machine, and the second use needs no look at what came of it."""
    assert touch(store, bucket) == (Touched.TOUCHED, ["probe", "write", "probe"])
    [copy] = [request for request in store.requests if request.method == "PUT"]
    assert copy.headers["x-amz-copy-source"].endswith(PATH) and not copy.body
    data, modified = store.objects[PATH]
    assert data == b"12345" and modified > LONG_AGO
    seconds = float(int(modified))
    assert touch(store, bucket, seconds) == (Touched.TOUCHED, ["probe"])
    assert touch(store, bucket, seconds + 1) == (Touched.TOUCHED, ["probe", "write"])
    assert bucket.properties.renews
    assert list(store.objects) == [PATH]


@pytest.mark.parametrize("change", ["delete", "replace"])
def test_touch_of_object_that_changes_meanwhile_does_not_bring_it_back(
    store: ScriptedS3, bucket: Any, change: str
) -> None:
    def change_before_copy(request: Request) -> None:
        if request.method == "PUT" and change == "delete":
            store.objects.clear()
        elif request.method == "PUT":
            store.objects[PATH] = b"other", LONG_AGO

    store.script = change_before_copy
    assert touch(store, bucket)[0] is Touched.TOUCHED
    assert [data for data, _ in store.objects.values()] == [b"other"] * (change == "replace")
    if change == "delete":
        assert touch(store, bucket) == (Touched.TOUCHED, ["probe"])


@pytest.mark.parametrize(
    ("status", "code", "is_quirk"),
    [
        (501, "NotImplemented", True),
        (400, "InvalidArgument", True),
        (400, "InvalidRequest", True),
        (400, "ExpiredToken", False),
        (400, "RequestTimeout", False),
    ],
)
def test_touch_with_refused_copy_learns_only_from_what_says_so(
    store: ScriptedS3, bucket: Any, status: int, code: str, is_quirk: bool
) -> None:
    store.script = lambda request: refusal(status, code) if request.method == "PUT" else None
    if not is_quirk:
        with pytest.raises(StorageError, match=code):
            touch(store, bucket)
    else:
        assert touch(store, bucket)[0] is Touched.REFUSED
        assert touch(store, bucket) == (Touched.REFUSED, [])
    assert bucket.properties.renews is not is_quirk
    assert known(store) == ({"no-self-copy"} if is_quirk else set())


@pytest.mark.parametrize("status", [409, 429])
def test_touch_during_a_write_of_another_client_teaches_nothing(
    store: ScriptedS3, bucket: Any, status: int
) -> None:
    """The other write records the use, or will: that the time is the old one shows nothing."""
    store.script = lambda request: (
        refusal(status, "OperationAborted") if request.method == "PUT" else None
    )
    assert touch(store, bucket)[0] is Touched.TOUCHED
    assert known(store) == set()
    store.script = lambda _: None
    assert touch(store, bucket) == (Touched.TOUCHED, ["probe", "write", "probe"])


def test_touch_with_store_that_only_says_that_it_copies_is_refused(
    store: ScriptedS3, bucket: Any
) -> None:
    store.copies = False
    assert touch(store, bucket) == (Touched.REFUSED, ["probe", "write", "probe"])
    assert not bucket.properties.renews
    assert touch(store, bucket) == (Touched.REFUSED, [])


def test_who_may_not_write_records_nothing(store: ScriptedS3, bucket: Any) -> None:
    store.script = lambda request: refusal(403, "AccessDenied") if request.method == "PUT" else None
    guard = GuardedBackend(bucket)
    assert guard.touch("a/x") is Touched.REFUSED
    assert guard.writes.is_closed
    assert touch(store, bucket) == (Touched.REFUSED, [])


def test_bucket_with_versions_is_known_from_its_answers(store: ScriptedS3, bucket: Any) -> None:
    bucket.write("a/y", [b"1"])
    assert not bucket.properties.versions
    # Versions of this bucket were wanted once, and are no more.
    answer = Answer(headers={"ETag": '"e"', "x-amz-version-id": "null"})
    store.script = lambda request: answer if request.kind == "write" else None
    bucket.write("a/y", [b"1"], "replace")
    assert not bucket.properties.versions
    store.script, store.versioned = lambda _: None, {BUCKET}
    with closing(store.open()) as backend:
        backend.write("a/z", [b"1"], "replace")
        assert backend.properties.versions
