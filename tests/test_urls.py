"""URLs of shelves as they are shown, and the directories that they name."""

from __future__ import annotations

import pytest

from kvshelf.backends import open_backend
from kvshelf.config import Config
from kvshelf.errors import ConfigError
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
        ("sftp:/user:hunter2@host/kv", "sftp:/…"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "simplecache::sftp://user:hunter2@host/kv",
        "sftp:/user:hunter2@host/kv",
        "nosuch://user:hun/ter2@host/kv",
        "nosuch://user:a@hunter2@host/kv",
        "s3://user:hunter2@bucket/kv?token=hunter2",
        "s3://user:a/hunter2@bucket/kv",
    ],
)
def test_errors_show_no_password(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody is asked for a role of this machine.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigError) as error:
        open_backend(url)
    assert "ter2" not in str(error.value)


def test_a_tier_that_is_a_url_is_refused_without_its_password() -> None:
    tier = {"path": "sftp://user:hunter2@host/kv", "max_bytes": 1}
    with pytest.raises(ConfigError) as error:
        Config.load({"disk_tier": tier}, {})
    assert "hunter2" not in str(error.value)


def test_directories_of_urls() -> None:
    assert directory_of("kv") == "kv"
    assert directory_of("file:///mnt/a%20b?c#d") == "/mnt/a b?c#d"
    assert directory_of("local://localhost/kv") == "/kv"
    assert directory_of("s3://bucket/kv") is None
    for url in ("file://host/kv", "file://", "a::b://c"):
        with pytest.raises(ConfigError):
            directory_of(url)
