"""URLs of shelves as they are shown, and the directories that they name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvshelf.backends import Backend, open_backend
from kvshelf.backends.s3_settings import settings_of
from kvshelf.cli.app import app
from kvshelf.config import Config
from kvshelf.errors import ConfigError, KVShelfError
from kvshelf.urls import directory_of, shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("/mnt/kv@home/a?b#c", "/mnt/kv@home/a?b#c"),
        ("./kv", "./kv"),
        ("file:///mnt/kv@home/a?b#c", "file:///mnt/kv@home/a?b#c"),
        ("memory://name", "memory://name"),
        ("s3://bucket/kv@v2", "s3://bucket/kv@v2"),
        ("http://host:8080/kv", "http://host:8080/kv"),
        ("sftp://user:hunter2@host/kv", "sftp://host/kv"),
        ("SFTP://user:hun@ter2@host:22/kv", "sftp://host:22/kv"),
        ("abfs://kv@account/x?token=hunter2", "abfs://account/x"),
        ("gs://bucket/kv#hunter2", "gs://bucket/kv"),
        ("sftp://user:hun/ter2@host/kv", "sftp://…"),
        ("sftp://user:hun#ter2@host/kv", "sftp://…"),
        ("sftp://user:1/hunter2@host/kv", "sftp://…"),
        ("simplecache::sftp://user:hunter2@host/kv", "simplecache::sftp://host/kv"),
        ("sftp:/user:hunter2@host/kv", "…@host/kv"),
        ("s3:AKIA:hunter2@bucket/kv", "…@bucket/kv"),
        ("AKIA:hunter2@bucket", "…@bucket"),
        ("user:hun/t@er2@host:/kv", "…@host:/kv"),
        ("//user:hunter2@host/kv", "…@host/kv"),
        ("s3://AK/IA:hunter2@bucket/kv", "s3://…"),
        ("file://user:hunter2@host/kv@2", "file://host/kv@2"),
        ("team@kv", "team@kv"),
        ("~/a:b@c", "~/a:b@c"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert shown_url(url) == shown


SECRET = "hunter2"
PLACES = (
    "simplecache::sftp://user:hunter2@host/kv",
    "sftp:/user:hunter2@host/kv",
    "sftp://user:hunter2@127.0.0.1:9/kv",
    "nosuch://user:hunter2@host/kv",
    "nosuch://user:a@hunter2@host/kv",
    "redis://:hunter2@host:6379",
    "s3://user:hunter2@bucket/kv?token=hunter2",
    "s3://user:a/hunter2@bucket/kv",
    "s3://us/er:hunter2@bucket/kv",
    "s3:user:hunter2@bucket/kv",
    "user:hunter2@bucket",
    "user:hunter2@host:/kv",
    "http://user:hunter2@minio:9000/bucket/kv",
    "file://user:hunter2@host/kv",
    "C:\\user:hunter2@host",
)
ENDPOINTS = (
    "http://user:hunter2@127.0.0.1:9",
    "user:hunter2@127.0.0.1:9",
    "http://127.0.0.1:9/?token=hunter2",
)


@pytest.mark.real
@pytest.mark.parametrize("text", [*PLACES, *ENDPOINTS])
def test_messages_and_reprs_with_password_anywhere_do_not_show_it(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Nobody is asked for a role of this machine.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    caplog.set_level(logging.DEBUG, "kvshelf")
    shelf = str(tmp_path)
    options = {"key": "key", "secret": "secret", "endpoint_url": text}
    as_json = json.dumps(options)

    def s3(**more: str) -> Backend:
        return open_backend("s3://bucket/kv", storage_options=options | more)

    def from_environment() -> Backend:
        monkeypatch.setenv("AWS_ENDPOINT_URL", text)
        return open_backend("s3://bucket/kv", storage_options={"key": "k", "secret": "s"})

    def command(*arguments: str) -> Callable[[], str]:
        return lambda: CliRunner().invoke(app, arguments).output

    calls: list[Callable[[], object]] = [
        lambda: Config.load({"shared_storage_path": text}, {}),
        lambda: Config.load({}, {"KVSHELF_SHARED_STORAGE_PATH": text}),
        lambda: Config.load({"server": text}, {}),
        lambda: Config.load({"disk_tier": {"path": text, "max_bytes": 1}}, {}),
        lambda: settings_of("s3://bucket/kv", options),
        s3,
        lambda: s3(client="s3fs"),
        from_environment,
        command("ls", shelf, "-n", text),
        command("doctor", "s3://bucket/kv", "--storage-options", as_json),
    ]
    if text in PLACES:
        calls += [
            lambda: open_backend(text),
            command("ls", text),
            command("ls", shelf, "--config", text),
            command("doctor", text, "--json"),
            command("copy", shelf, text),
        ]
    for number, call in enumerate(calls):
        try:
            said = repr(call())
        except (KVShelfError, OSError) as error:
            said = f"{error} {error!r}"
        assert SECRET not in said, number
    for record in caplog.records:
        if record.name.startswith("kvshelf"):
            assert SECRET not in record.getMessage()


def test_directories_of_urls() -> None:
    assert directory_of("kv") == "kv"
    assert directory_of("file:///mnt/a%20b?c#d") == "/mnt/a b?c#d"
    assert directory_of("local://localhost/kv") == "/kv"
    assert directory_of("s3://bucket/kv") is None
    for url in ("file://host/kv", "file://", "a::b://c"):
        with pytest.raises(ConfigError):
            directory_of(url)
