"""The storage options of S3: what both clients understand, and where else settings come from."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from kvshelf.errors import ConfigError

#: Options of s3fs that are translated for obstore; any other option needs s3fs itself.
OPTIONS: Final = frozenset(
    (
        "anon",
        "key",
        "secret",
        "token",
        "profile",
        "endpoint_url",
        "use_ssl",
        "requester_pays",
        "client_kwargs",
        "config_kwargs",
    )
)
_CLIENT_OPTIONS: Final = frozenset(("endpoint_url", "region_name", "verify"))
_CONFIG_OPTIONS: Final = frozenset(
    ("region_name", "connect_timeout", "read_timeout", "s3", "signature_version")
)
CONNECT_SECONDS: Final = 3.0
READ_SECONDS: Final = 10.0


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def unknown_options(options: Mapping[str, Any]) -> list[str]:
    """Return the names of the options that need s3fs."""
    found = set(options) - OPTIONS
    found |= {f"client_kwargs.{name}" for name in mapping_of(options, "client_kwargs")} - {
        f"client_kwargs.{name}" for name in _CLIENT_OPTIONS
    }
    config = mapping_of(options, "config_kwargs")
    found |= {f"config_kwargs.{name}" for name in set(config) - _CONFIG_OPTIONS}
    found |= {
        f"config_kwargs.s3.{name}" for name in set(mapping_of(config, "s3")) - {"addressing_style"}
    }
    return sorted(found)


def mapping_of(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an option that is a mapping; empty when it is not set."""
    value = options.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"storage_options: {name} is {type(value).__name__}; expected a mapping")
    return value


def endpoint_of(options: Mapping[str, Any]) -> str | None:
    """Return the endpoint from the options or the environment; None for AWS."""
    found = (
        options.get("endpoint_url")
        or mapping_of(options, "client_kwargs").get("endpoint_url")
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
    )
    if found is None:
        return None
    if urlsplit(str(found)).scheme not in ("http", "https"):
        raise ConfigError(f"storage_options: endpoint_url is {found!r}; expected http(s)://host")
    return str(found).rstrip("/")


def verify_of(client_kwargs: Mapping[str, Any]) -> Any:
    """Return which certificates are trusted: a path, False for any, or None for the usual ones."""
    return client_kwargs.get("verify", os.environ.get("AWS_CA_BUNDLE"))
