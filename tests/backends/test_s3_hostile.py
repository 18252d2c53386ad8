"""An S3 server that answers with listings without end, absurd times and forged texts."""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from typing import Any

import pytest
from typer.testing import CliRunner

from kvshelf.backends import generic as generic_module
from kvshelf.backends import s3 as s3_module
from kvshelf.backends import s3_requests
from kvshelf.backends.base import Whole
from kvshelf.cli.app import app
from kvshelf.errors import ConfigError, PermanentStorageError, StorageError, TransientStorageError
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import Shelf
from kvshelf.testing.backends import read_into
from tests.sim.s3 import BUCKET, Answer, Request, ScriptedS3, folder, page, refusal, row
from tests.support.filled import namespace

pytestmark = pytest.mark.real

FORGED = "\x1b]0;title\x07\x1b[2J\nINFO forged line\u202e" + "x" * 100_000
URL = f"s3://{BUCKET}"
NAME = f"{namespace().folder}/_/ab/{'ab' * 32}-0-0of1.safetensors"


def env(store: ScriptedS3) -> dict[str, str]:
    options = json.dumps(store.options())
    return {"KVSHELF_SHARED_STORAGE_PATH": URL, "KVSHELF_STORAGE_OPTIONS": options}


@pytest.fixture
def bucket(store: ScriptedS3) -> Iterator[Any]:
    """All of the bucket."""
    with closing(store.open("")) as backend:
        yield backend


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_module, "_ROWS_SECONDS", 0.5)
    of_answer = s3_requests.CONNECT_SECONDS + s3_requests.READ_SECONDS
    monkeypatch.setattr(s3_module, "_MORE_SECONDS", 0.5 - of_answer)
    monkeypatch.setattr(generic_module, "_FOLDERS_SECONDS", 0.4)
    monkeypatch.setattr(generic_module, "_LISTING_SECONDS", 0.5)


def settled(store: ScriptedS3) -> bool:
    """Whether the client has stopped asking."""
    for _ in range(100):
        before = len(store.requests)
        time.sleep(0.05)
        if len(store.requests) == before:
            return True
    return False


@pytest.mark.long
@pytest.mark.usefixtures("soon")
def test_listing_without_end_ends_with_an_error(store: ScriptedS3, bucket: Any) -> None:
    numbers = count()
    store.script = lambda _: page(folder(f"f{next(numbers)}"), token="more")
    with pytest.raises(PermanentStorageError, match="did not end within"):
        bucket.folders()
    store.script = lambda _: page("", token="more")
    for call in (lambda: list(bucket.list("a")), bucket.folders):
        with pytest.raises(PermanentStorageError, match="did not end within"):
            call()
        assert settled(store), "the listing goes on behind the error"
    with pytest.raises(PermanentStorageError, match="opening the shelf failed"):
        store.open("")
    result = CliRunner().invoke(app, ["ls"], env=env(store))
    assert result.exit_code == 3
    assert "prefix of its own" in result.stderr


def test_listing_with_no_answer_at_all_may_pass(
    store: ScriptedS3, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gives a request up by itself, if it is not given up before."""

    of_answer = s3_requests.CONNECT_SECONDS + s3_requests.READ_SECONDS

    def wait(_: object, __: object, seconds: float) -> None:
        raise TimeoutError if seconds <= of_answer else OSError("timed out")

    monkeypatch.setattr(s3_requests.RequestLoop, "request", wait)
    for call in (bucket.folders, lambda: store.open("")):
        with pytest.raises(TransientStorageError, match="up and reachable"):
            call()


@pytest.mark.long
@pytest.mark.usefixtures("soon")
def test_other_client_ends_listings_too(store: ScriptedS3) -> None:
    """As those of other object stores do."""
    pytest.importorskip("s3fs", reason="s3fs is missing: pip install s3fs")
    other = store.open("", client="s3fs")
    numbers = count()
    store.script = lambda _: page(
        "".join(folder(f"f{next(numbers)}") for _ in range(10)), token="more"
    )
    # Of fewer seconds nobody knows whether answers came.
    with pytest.raises(TransientStorageError):
        other.folders()
    with pytest.raises(PermanentStorageError, match="did not end within"):
        list(other.list("a"))
    assert settled(store)
    forge_answers(store)
    with pytest.raises(StorageError) as found:
        other.folders()
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 1000


@pytest.mark.usefixtures("soon")
def test_engine_goes_on_with_its_own_folder(store: ScriptedS3) -> None:
    with Shelf(store.open("")) as shelf:
        store.script = lambda _: page(folder("a"), token="more")
        view = shelf.view(ObjectFormat(namespace()))
        assert view.folder() == namespace().folder
        asked = len(store.requests)
        assert view.folder() == namespace().folder
        assert settled(store)
        # It does not ask at once again.
        assert len(store.requests) - asked < 1000


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("names", [1, 3, 1000, 1500])
def test_listing_that_repeats_itself_is_noticed(
    store: ScriptedS3, bucket: Any, names: int, size: int
) -> None:
    rows = [row(f"a/{number}", size) for number in range(names)]
    chunks = ["".join(rows[i : i + 1000]) for i in range(0, names, 1000)]
    numbers = count()
    store.script = lambda _: page(chunks[next(numbers) % len(chunks)], token="more")
    with pytest.raises(PermanentStorageError, match="again and again"):
        list(bucket.list("a"))


def test_listing_that_names_what_is_elsewhere_leaves_it_out(store: ScriptedS3, bucket: Any) -> None:
    store.script = lambda _: page(row("a/x") + row("ab/y") + row("b/z"))
    assert [info.name for info in bucket.list("a")] == ["a/x"]


def test_markers_of_folders_are_no_disorder(store: ScriptedS3, bucket: Any) -> None:
    """Without its slash a key has another place."""
    marker = row("a/", 0)
    empty = row("a", 0)
    store.script = lambda _: page(empty + row("a-b/1") + marker + row("a/1"))
    assert [info.name for info in bucket.list()] == ["a", "a-b/1", "a", "a/1"]
    assert not set(bucket.quirks)


def test_listing_in_any_order_is_read_to_its_end(store: ScriptedS3, bucket: Any) -> None:
    names = [f"a/{number:02}/x" for number in range(20)]
    store.script = lambda _: page("".join(map(row, names[10:] + names[:10])))
    for _ in range(2):
        found = bucket.list("a", start="05", end="11")
        assert sorted(info.name for info in found) == names[5:12]
        assert sorted(info.name for info in bucket.list("a")) == names


def test_range_ends_where_it_ends(store: ScriptedS3, bucket: Any) -> None:
    names = [f"a/{number:05}/x" for number in range(3000)]
    store.objects.update({f"{BUCKET}/{name}": (b"1", 1e9) for name in names})
    seen = len(store.requests)
    found = [info.name for info in bucket.list("a", start="01000", end="01003")]
    assert found == names[1000:1004]
    first, *others = store.requests[seen:]
    assert first.query["start-after"].endswith("a/0100.~")
    assert len(others) <= 1, "what lies behind is not listed"


@pytest.mark.parametrize("total", [0, 1, 999, 1000, 1001, 4096])
def test_listing_of_any_length_is_whole(store: ScriptedS3, bucket: Any, total: int) -> None:
    names = [f"a/{number:05}" for number in range(total)]
    store.objects.update({f"{BUCKET}/{name}": (b"1", 1e9) for name in names})
    assert [info.name for info in bucket.list("a")] == names


@pytest.mark.parametrize(
    "absurd", ["+275000-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "never"]
)
def test_absurd_times_end_no_command(store: ScriptedS3, absurd: str) -> None:
    store.script = lambda request: page(
        folder(namespace().folder) if "delimiter" in request.query else row(NAME, 1, absurd)
    )
    for arguments in (["ls"], ["ls", URL, "-n", namespace().folder]):
        result = CliRunner().invoke(app, arguments, env=env(store))
        assert result.exit_code in (0, 3), result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)


def forge_answers(store: ScriptedS3) -> None:
    store.script = lambda _: refusal(403, "AccessDenied", FORGED)


def test_forged_texts_reach_no_terminal_and_no_log(
    store: ScriptedS3, bucket: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    forge_answers(store)
    with pytest.raises((StorageError, ConfigError)) as found:
        bucket.folders()
    assert str(found.value).isprintable()
    assert "forged line" in str(found.value)
    assert len(str(found.value)) < 1000
    with Shelf(bucket) as shelf:
        shelf.view(ObjectFormat(namespace())).probe([])
        with pytest.raises(StorageError):
            list(shelf.namespaces())
    for record in caplog.records:
        assert record.getMessage().replace("\n", "").isprintable()
        assert "\nINFO forged" not in record.getMessage()
    for arguments in (["ls"], ["doctor"], ["doctor", "--json"]):
        result = CliRunner().invoke(app, arguments, env=env(store))
        assert result.exit_code == 3
        assert all(c.isprintable() or c == "\n" for c in result.output)
        assert not any(line.startswith("INFO") for line in result.output.splitlines())
        assert len(result.output) < 20_000


@pytest.mark.parametrize("large", [False, True], ids=["range", "parts"])
def test_body_that_is_too_long_is_not_taken(
    store: ScriptedS3, bucket: Any, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Ranges of 1 KiB are answered with 1 GiB each."""
    monkeypatch.setattr(s3_module, "_PART_BYTES", 1024)
    monkeypatch.setattr(s3_module, "_PART_ALIGNMENT", 1024)
    bucket.rate.note(1 << 20, 1.0)
    sent: list[int] = []

    def send_too_much(request: Request) -> Answer | None:
        wanted = request.headers.get("Range", "bytes=0-8191").removeprefix("bytes=")
        headers = {"Content-Length": str(1 << 30), "Content-Range": f"bytes {wanted}/8192"}
        if request.kind != "read":
            return None
        pieces = (sent.append(1 << 20) or bytes(1 << 20) for _ in range(1 << 10))  # type: ignore[func-returns-value]
        return Answer(206, pieces, headers | {"ETag": '"e"'})

    store.objects[f"{BUCKET}/a"] = bytes(8192), 1e9
    store.script = send_too_much
    if large:
        monkeypatch.setattr(s3_module, "_LARGE_BYTES", 1024)
        whole = Whole("a", b"", b"", b"", array("q", (1024, 8192)))
        checked = bucket.read_whole("", b"", [whole], [memoryview(bytearray(8192))])
        assert checked is not None
        assert checked.done == [False]
    else:
        with pytest.raises(TransientStorageError, match="replaced meanwhile"):
            read_into(bucket, "a", memoryview(bytearray(1024)), 1024)
    # Sockets hold some of it.
    assert sum(sent) < 256 << 20
