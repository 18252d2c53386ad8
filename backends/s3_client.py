"""From s3fs's options to a client of obstore.

Owns which options are understood, where credentials, region and endpoint come from, and the
timeouts and retries of a request. Everything runs on the caller's thread when a shelf is opened;
obstore calls the function that renews credentials on threads of its own.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, Final
from urllib.parse import urlsplit

from kvshelf.backends.s3_errors import NO_CREDENTIALS, shorten

from kvshelf.errors import ConfigError

#: Options of s3fs that this module understands; any other option needs s3fs itself.
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
_RETRY_SECONDS: Final = 3.0
_RETRIES: Final = 5
_REFRESH: Final = timedelta(minutes=5)


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


def make_store(
    bucket: str, prefix: str, options: Mapping[str, Any], endpoint: str | None, checksum: bool
) -> Any:
    """Create the obstore client of a bucket.

    Raises
    ------
    ConfigError
        If the options cannot be used, or there are no credentials.
    """
    try:
        from obstore.store import S3Store
    except ImportError as exc:
        raise ConfigError("s3:// needs obstore or s3fs: pip install 'kvshelf[s3]'") from exc

    client_kwargs = mapping_of(options, "client_kwargs")
    config_kwargs = mapping_of(options, "config_kwargs")
    config: dict[str, Any] = {}
    client: dict[str, Any] = {
        "connect_timeout": timedelta(
            seconds=float(config_kwargs.get("connect_timeout", CONNECT_SECONDS))
        ),
        "read_timeout": timedelta(seconds=float(config_kwargs.get("read_timeout", READ_SECONDS))),
        # Of a whole request. Bodies are read as they arrive; read_timeout bounds each wait.
        "timeout": timedelta(hours=1),
    }
    if endpoint is not None:
        config["endpoint"] = endpoint
        client["allow_http"] = endpoint.startswith("http://")
    style = mapping_of(config_kwargs, "s3").get("addressing_style", "auto")
    if style not in ("auto", "path", "virtual"):
        raise ConfigError(
            f"storage_options: addressing_style is {style!r}; expected auto, path or virtual"
        )
    if style == "virtual":
        config["virtual_hosted_style_request"] = True
        if endpoint is not None:
            scheme, _, host = endpoint.partition("://")
            config["endpoint"] = f"{scheme}://{bucket}.{host}"
    verify = verify_of(client_kwargs)
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(verify, (str, os.PathLike)):
        try:
            with open(verify, "rb") as file:
                client["root_certificate"] = file.read()
        except OSError as exc:
            raise ConfigError(
                f"the CA bundle {os.fspath(verify)} cannot be read ({exc.strerror}): correct"
                " client_kwargs.verify in storage_options, or AWS_CA_BUNDLE"
            ) from exc
    if checksum:
        config["checksum_algorithm"] = "SHA256"
    if options.get("requester_pays"):
        config["request_payer"] = True
    session = _botocore_session(options.get("profile"))
    config["region"] = (
        client_kwargs.get("region_name")
        or config_kwargs.get("region_name")
        or os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
        or (session.get_config_variable("region") if session is not None else None)
        or "us-east-1"
    )
    provider = None
    if options.get("anon") or config_kwargs.get("signature_version") == "unsigned":
        config["skip_signature"] = True
    elif options.get("key") or options.get("secret"):
        if not (options.get("key") and options.get("secret")):
            raise ConfigError("storage_options: key and secret belong together; found one of them")
        config["access_key_id"] = options["key"]
        config["secret_access_key"] = options["secret"]
        if options.get("token"):
            config["session_token"] = options["token"]
    elif session is not None:
        provider = _credentials(session)
    try:
        # S3Store wants typed dictionaries; these values come from users.
        make: Any = S3Store
        return make(
            bucket,
            prefix=prefix or None,
            config=config,
            client_options=client,
            credential_provider=provider,
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": timedelta(seconds=_RETRY_SECONDS),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=50),
                    "max_backoff": timedelta(seconds=1),
                    "base": 2,
                },
            },
        )
    except Exception as exc:
        raise ConfigError(f"s3://{bucket} cannot be opened: {shorten(str(exc))}") from exc


def _botocore_session(profile: Any) -> Any:
    """Return a botocore session, for configuration files, roles and single sign-on; or None."""
    if not is_installed("botocore"):
        if profile:
            raise ConfigError("storage_options: profile needs botocore: pip install botocore")
        return None
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    try:
        session = Session(profile=profile)
        # Raises if the profile does not exist.
        session.get_scoped_config()
    except BotoCoreError as exc:
        raise ConfigError(f"AWS configuration: {exc}") from exc
    return session


def _credentials(session: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that returns current credentials from botocore's chain."""
    from botocore.exceptions import BotoCoreError

    try:
        found = session.get_credentials()
    except BotoCoreError as exc:
        # The last provider of the chain asks the instance metadata service, over the network.
        raise ConfigError(f"{NO_CREDENTIALS} ({type(exc).__name__})") from exc
    if found is None:
        raise ConfigError(NO_CREDENTIALS)

    def provide() -> dict[str, Any]:
        now = found.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(timezone.utc) + _REFRESH,
        }

    return provide
