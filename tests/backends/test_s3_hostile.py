"""An S3 server that answers with listings without end, absurd times and forged texts."""

from __future__ import annotations

import json
import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from kvshelf.backends import Backend, open_backend
from kvshelf.backends.base import Whole
from kvshelf.cli.app import app
from kvshelf.errors import (
    ConfigError,
    PermanentStorageError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
)
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import Shelf

pytest.importorskip("obstore", reason="obstore is missing: pip install '.[s3]'")

from kvshelf.backends import generic as generic_module
from kvshelf.backends import s3 as s3_module
from kvshelf.backends import s3_client, s3_quirks
from kvshelf.backends.s3 import S3Backend
from tests.support.backend_suite import read_into
from tests.support.filled import namespace

pytestmark = pytest.mark.real

FORGED = "\x1b]0;title\x07\x1b[2J\nINFO forged line\u202e" + "x" * 100_000
NAME = f"{namespace().folder}/_/ab/{'ab' * 32}-0-0of1.safetensors"


def row(name: str, time_: str = "2026-01-31T12:00:00.000Z") -> str:
    return (
        f"<Contents><Key>{name}</Key><LastModified>{time_}</LastModified>"
        '<ETag>"e"</ETag><Size>1</Size><StorageClass>STANDARD</StorageClass></Contents>'
    )


def folder(name: str) -> str:
    return f"<CommonPrefixes><Prefix>{name}/</Prefix></CommonPrefixes>"


def page(rows: str, *, last: bool) -> str:
    end = "" if last else "<NextContinuationToken>more</NextContinuationToken>"
    return (
        '<?xml version="1.0"?><ListBucketResult><Name>b</Name><Prefix></Prefix>'
        f"<KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>{'false' if last else 'true'}</IsTruncated>{rows}{end}</ListBucketResult>"
    )


class Hostile:
    """A server; `answer` makes the body for a query, `status` goes with it."""

    def __init__(self) -> None:
        self.status = 200
        self.answer: Callable[[dict[str, list[str]]], str] = lambda _: page("", last=True)
        self.requests = 0
        #: Above 0: ranges of an object of 8 KiB are answered with so many bytes.
        self.body_bytes = 0
        #: How many of them clients have taken.
        self.sent = 0
        hostile = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                hostile.requests += 1
                if self.command == "POST":
                    self.rfile.read(int(self.headers["Content-Length"]))
                if hostile.body_bytes:
                    self._send_too_much()
                    return
                query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
                body = hostile.answer(query).encode("utf-8", "surrogatepass")
                self.send_response(hostile.status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _send_too_much(self) -> None:
                size, wanted = 8192, self.headers.get("Range", "bytes=0-8191")
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                head = self.command == "HEAD"
                self.send_response(200 if head else 206)
                self.send_header("Content-Length", str(size if head else hostile.body_bytes))
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
                self.send_header("ETag", '"e"')
                self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
                self.end_headers()
                for _ in range(0 if head else hostile.body_bytes >> 20):
                    self.wfile.write(bytes(1 << 20))
                    hostile.sent += 1 << 20

            do_PUT = do_HEAD = do_DELETE = do_POST = do_GET  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def options(self) -> dict[str, Any]:
        return {
            "key": "k",
            "secret": "not-a-real-secret",
            "endpoint_url": f"http://127.0.0.1:{self.server.server_address[1]}",
        }

    def env(self) -> dict[str, str]:
        return {
            "KVSHELF_SHARED_STORAGE_PATH": "s3://b",
            "KVSHELF_STORAGE_OPTIONS": json.dumps(self.options),
        }


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    # Another server may have had its port.
    monkeypatch.setattr(s3_quirks, "_known_until", {})
    server = Hostile()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture
def backend(hostile: Hostile) -> Iterator[Backend]:
    with_options = open_backend("s3://b", storage_options=hostile.options)
    yield with_options
    with_options.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_module, "_ROWS_SECONDS", 0.5)
    of_answer = s3_client.CONNECT_SECONDS + s3_client.READ_SECONDS
    monkeypatch.setattr(s3_module, "_MORE_SECONDS", 0.5 - of_answer)
    monkeypatch.setattr(generic_module, "_FOLDERS_SECONDS", 0.4)
    monkeypatch.setattr(generic_module, "_LISTING_SECONDS", 0.5)


def settled(hostile: Hostile) -> bool:
    """Whether the client has stopped asking."""
    for _ in range(100):
        before = hostile.requests
        time.sleep(0.05)
        if hostile.requests == before:
            return True
    return False


@pytest.mark.long
@pytest.mark.usefixtures("soon")
def test_a_listing_of_empty_pages_ends_with_an_error(hostile: Hostile, backend: Backend) -> None:
    hostile.answer = lambda _: page("", last=False)
    for call in (lambda: list(backend.list("a")), backend.folders):
        with pytest.raises(PermanentStorageError, match="did not end within"):
            call()
        assert settled(hostile), "the listing goes on behind the error"
    with pytest.raises(PermanentStorageError, match="opening the shelf failed"):
        open_backend("s3://b", storage_options=hostile.options)
    result = CliRunner().invoke(app, ["ls"], env=hostile.env())
    assert result.exit_code == 3
    assert "prefix of its own" in result.stderr


def test_listing_with_no_answer_at_all_may_pass(
    hostile: Hostile, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gives a request up by itself, if it is not given up before."""

    of_answer = s3_client.CONNECT_SECONDS + s3_client.READ_SECONDS

    def wait(_: object, __: object, seconds: float) -> None:
        raise TimeoutError if seconds <= of_answer else OSError("timed out")

    monkeypatch.setattr(s3_client.Client, "_wait", wait)
    for call in (backend.folders, lambda: open_backend("s3://b", storage_options=hostile.options)):
        with pytest.raises(TransientStorageError, match="up and reachable"):
            call()


def test_that_one_object_of_many_may_not_be_deleted_is_a_refusal(
    hostile: Hostile, backend: Backend
) -> None:
    hostile.answer = lambda query: (
        "<DeleteResult><Deleted><Key>a</Key></Deleted><Error><Key>b</Key>"
        "<Code>AccessDenied</Code><Message>not yours</Message></Error></DeleteResult>"
        if "delete" in query
        else page("", last=True)
    )
    assert isinstance(backend, S3Backend)
    with (
        pytest.raises(ReadOnlyStorageError, match="allow s3:"),
        backend._errors("deleting", "a", writing=True),
    ):
        backend.client.delete(["a", "b"])


@pytest.mark.usefixtures("soon")
def test_folders_without_end_end_with_an_error(hostile: Hostile, backend: Backend) -> None:
    numbers = count()
    hostile.answer = lambda _: page(
        "".join(folder(f"f{next(numbers)}") for _ in range(100)), last=False
    )
    with pytest.raises(PermanentStorageError, match="did not end within"):
        backend.folders()
    assert settled(hostile)


@pytest.mark.long
@pytest.mark.usefixtures("soon")
def test_the_other_client_ends_listings_too(hostile: Hostile) -> None:
    """As those of other object stores do."""
    pytest.importorskip("s3fs", reason="s3fs is missing: pip install s3fs")
    other = open_backend("s3://b", storage_options={**hostile.options, "client": "s3fs"})
    numbers = count()
    hostile.answer = lambda _: page(
        "".join(folder(f"f{next(numbers)}") for _ in range(10)), last=False
    )
    # Of fewer seconds nobody knows whether answers came.
    with pytest.raises(TransientStorageError):
        other.folders()
    with pytest.raises(PermanentStorageError, match="did not end within"):
        list(other.list("a"))
    assert settled(hostile)
    forged_answer(hostile)
    with pytest.raises(StorageError) as found:
        other.folders()
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 1000


@pytest.mark.usefixtures("soon")
def test_an_engine_goes_on_with_its_own_folder(hostile: Hostile) -> None:
    with Shelf(open_backend("s3://b", storage_options=hostile.options)) as shelf:
        hostile.answer = lambda _: page(folder("a"), last=False)
        view = shelf.view(ObjectFormat(namespace()))
        assert view.folder() == namespace().folder
        asked = hostile.requests
        assert view.folder() == namespace().folder
        assert settled(hostile)
        # It does not ask at once again.
        assert hostile.requests - asked < 1000


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("names", [1, 3, 1000, 1500])
def test_a_listing_that_repeats_itself_is_noticed(
    hostile: Hostile, backend: Backend, names: int, size: int
) -> None:
    rows = [row(f"a/{number}").replace(">1<", f">{size}<") for number in range(names)]
    chunks = ["".join(rows[i : i + 1000]) for i in range(0, names, 1000)]
    numbers = count()
    hostile.answer = lambda _: page(chunks[next(numbers) % len(chunks)], last=False)
    with pytest.raises(PermanentStorageError, match="again and again"):
        list(backend.list("a"))


def test_markers_of_folders_are_no_disorder(hostile: Hostile, backend: Backend) -> None:
    """Without its slash a key has another place."""
    marker = row("a/").replace("<Size>1<", "<Size>0<")
    empty = row("a").replace(">1<", ">0<")
    hostile.answer = lambda _: page(empty + row("a-b/1") + marker + row("a/1"), last=True)
    assert isinstance(backend, S3Backend)
    assert [info.name for info in backend.list()] == ["a", "a-b/1", "a", "a/1"]
    assert not set(backend.client.quirks)


def test_a_listing_in_any_order_is_read_to_its_end(hostile: Hostile, backend: Backend) -> None:
    names = [f"a/{number:02}/x" for number in range(20)]
    hostile.answer = lambda _: page("".join(map(row, names[10:] + names[:10])), last=True)
    for _ in range(2):
        found = backend.list("a", between=("05", "11"))
        assert sorted(info.name for info in found) == names[5:12]
        assert sorted(info.name for info in backend.list("a")) == names


def test_a_range_ends_where_it_ends(hostile: Hostile, backend: Backend) -> None:
    asked: list[dict[str, list[str]]] = []
    names = [f"a/{number:05}/x" for number in range(3000)]

    def answer(query: dict[str, list[str]]) -> str:
        asked.append(query)
        first = 1000 + 1000 * (len(asked) - 1)
        return page("".join(map(row, names[first : first + 1000])), last=False)

    hostile.answer = answer
    found = [info.name for info in backend.list("a", between=("01000", "01003"))]
    assert found == names[1000:1004]
    assert len(asked) <= 2, "what lies behind is not listed"
    assert asked[0]["start-after"][0].endswith("a/0100.~")


@pytest.mark.parametrize("total", [0, 1, 999, 1000, 1001, 4096])
def test_listings_of_any_length_are_whole(hostile: Hostile, backend: Backend, total: int) -> None:
    names = [f"a/{number:05}" for number in range(total)]
    starts = iter(range(0, total + 1000, 1000))

    def answer(_: object) -> str:
        start = next(starts)
        return page("".join(map(row, names[start : start + 1000])), last=start + 1000 >= total)

    hostile.answer = answer
    assert [info.name for info in backend.list("a")] == names


@pytest.mark.parametrize(
    "absurd", ["+275000-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "never"]
)
def test_absurd_times_end_no_command(hostile: Hostile, absurd: str) -> None:
    hostile.answer = lambda query: page(
        folder(namespace().folder) if "delimiter" in query else row(NAME, absurd), last=True
    )
    for arguments in (["ls"], ["ls", "s3://b", "-n", namespace().folder]):
        result = CliRunner().invoke(app, arguments, env=hostile.env())
        assert result.exit_code in (0, 3), result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)


def forged_answer(hostile: Hostile) -> None:
    hostile.status = 403
    hostile.answer = lambda _: (
        f"<Error><Code>AccessDenied</Code><Message>{FORGED}</Message></Error>"
    )


def test_forged_texts_reach_no_terminal_and_no_log(
    hostile: Hostile, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    forged_answer(hostile)
    with pytest.raises((StorageError, ConfigError)) as found:
        backend.folders()
    assert str(found.value).isprintable()
    assert "forged line" in str(found.value)
    assert len(str(found.value)) < 1000
    with Shelf(backend) as shelf:
        shelf.view(ObjectFormat(namespace())).probe([])
        with pytest.raises(StorageError):
            list(shelf.namespaces())
    for record in caplog.records:
        assert record.getMessage().replace("\n", "").isprintable()
        assert "\nINFO forged" not in record.getMessage()
    for arguments in (["ls"], ["doctor"], ["doctor", "--json"]):
        result = CliRunner().invoke(app, arguments, env=hostile.env())
        assert result.exit_code == 3
        assert all(c.isprintable() or c == "\n" for c in result.output)
        assert not any(line.startswith("INFO") for line in result.output.splitlines())
        assert len(result.output) < 20_000


@pytest.mark.parametrize("large", [False, True], ids=["range", "parts"])
def test_a_body_that_is_too_long_is_not_taken(
    hostile: Hostile, backend: Backend, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Ranges of 1 KiB are answered with 1 GiB each."""
    assert isinstance(backend, s3_module.S3Backend)
    monkeypatch.setattr(s3_module, "_PART_BYTES", 1024)
    monkeypatch.setattr(s3_module, "_PART_ALIGNMENT", 1024)
    backend.rate.note(1 << 20, 1.0)
    hostile.body_bytes = 1 << 30
    buffer = memoryview(bytearray(1024))
    if large:
        monkeypatch.setattr(s3_module, "_LARGE_BYTES", 1024)
        whole = Whole("a", b"", b"", b"", array("q", (1024, 8192)))
        checked = backend.read_whole("", b"", [whole], [memoryview(bytearray(8192))])
        assert checked is not None
        assert checked.done == [False]
    else:
        with pytest.raises(TransientStorageError, match="replaced meanwhile"):
            read_into(backend, "a", buffer, 1024)
    # Sockets hold some of it.
    assert hostile.sent < 256 << 20
