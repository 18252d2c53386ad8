"""The settings of an S3 store: endpoint, region, addressing, keys, and where each comes from.

Owns their order, for both clients: storage options, the profile that these name, the environment,
the profile of the environment, AWS's own. What comes from the storage options is neither replaced
nor completed: keys without a token have none, and an endpoint has no addressing of another one.

obstore and s3fs read the environment themselves, each in its own way and before or behind what they
are given. So both are given every setting, also those that nobody has set.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from kvshelf.backends.options import check_names, mapping_of, named
from kvshelf.backends.s3_errors import QUIRKS
from kvshelf.errors import ConfigError
from kvshelf.urls import shown_url

#: Options of both clients.
OPTIONS: Final = (
    *("anon", "key", "secret", "token", "profile", "endpoint_url", "use_ssl", "requester_pays"),
    *(f"client_kwargs.{name}" for name in ("endpoint_url", "region_name", "verify")),
    *(f"config_kwargs.{name}" for name in ("region_name", "signature_version")),
    *(f"config_kwargs.{name}" for name in ("connect_timeout", "read_timeout")),
    *(f"config_kwargs.use_{name}_endpoint" for name in ("dualstack", "fips")),
    "config_kwargs.s3.addressing_style",
)
NESTED: Final = ("client_kwargs", "config_kwargs", "config_kwargs.s3")
#: What other programs call them.
ELSEWHERE: Final = {
    "access_key": "key",
    "access_key_id": "key",
    "aws_access_key_id": "key",
    "secret_key": "secret",
    "secret_access_key": "secret",
    "aws_secret_access_key": "secret",
    "session_token": "token",
    "aws_session_token": "token",
    "host": "endpoint_url",
    "region": "client_kwargs.region_name",
    "aws_region": "client_kwargs.region_name",
    "skip_signature": "anon",
    **dict.fromkeys(
        (
            *("s3_additional_kwargs", "cache_regions", "default_block_size", "max_concurrency"),
            *("max_pool_connections", "proxies", "retries", "tcp_keepalive", "client_cert"),
        ),
        "client: s3fs, which has it",
    ),
}
CONNECT_SECONDS: Final = 3.0
READ_SECONDS: Final = 10.0
_REFRESH: Final = timedelta(minutes=5)
#: Keys that are refused are read again after so many seconds at the earliest.
_AGAIN_SECONDS: Final = 5.0
_GIVEN: Final = "storage_options"
NO_CREDENTIALS: Final = (
    "no AWS credentials were found: set key and secret in storage_options, or AWS_ACCESS_KEY_ID"
    " and AWS_SECRET_ACCESS_KEY, a profile or a role; for a public bucket set anon: true"
)


class Setting(NamedTuple):
    """One setting as it is shown: what it is called, its value, and where that comes from."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class Settings:
    """What is used to reach a bucket.

    Attributes
    ----------
    endpoint : str
        URL of the server, without the bucket.
    is_aws : bool
        Nobody has set it: it is AWS's for the region.
    region, style : str
        `style` is ``path`` or ``virtual``.
    keys : Keys or None
        None: requests are not signed.
    verify : object
        Which certificates are trusted: a path, False for any, None for the usual ones.
    rows : tuple of Setting
        The same for people, without secrets.
    """

    endpoint: str
    is_aws: bool
    region: str
    style: str
    keys: Keys | None
    verify: Any
    rows: tuple[Setting, ...]

    def endpoint_of(self, bucket: str) -> str:
        """Return the URL to which names of objects are appended, for a client that wants it so."""
        scheme, _, host = self.endpoint.partition("://")
        if self.style != "virtual" or host.startswith(f"{bucket}."):
            return self.endpoint
        return f"{scheme}://{bucket}.{host}"


def resolve(options: Mapping[str, Any]) -> Settings:
    """Find all settings for storage options, from wherever they come.

    Raises
    ------
    ConfigError
        If they cannot be used, or there are no keys.
    """
    from botocore.exceptions import BotoCoreError

    try:
        return _Search(options).settings()
    except BotoCoreError as exc:
        raise ConfigError(f"AWS configuration: {exc}") from exc


class _Search:
    def __init__(self, options: Mapping[str, Any]) -> None:
        from botocore.exceptions import ProfileNotFound
        from botocore.session import Session

        self._options = options
        self._client = mapping_of(options, "client_kwargs")
        self._config = mapping_of(options, "config_kwargs")
        self._style = mapping_of(self._config, "s3").get("addressing_style", "auto")
        if self._style not in ("auto", "path", "virtual"):
            raise ConfigError(
                f"storage_options: addressing_style is {self._style!r}; expected auto, path or"
                " virtual"
            )
        if bool(options.get("key")) != bool(options.get("secret")):
            raise ConfigError("storage_options: key and secret belong together; found one of them")
        self._unsigned = options.get("anon") or self._config.get("signature_version") == "unsigned"
        self._session = Session(profile=options.get("profile"))
        try:
            self._profile: Mapping[str, Any] = self._session.get_scoped_config()
        except ProfileNotFound:
            if options.get("profile") or not (self._unsigned or options.get("key")):
                raise
            self._profile = {}
        name = options.get("profile") or self._session.profile or "default"
        self._profile_name = f"profile {name}"
        self._rows: list[Setting] = []

    def settings(self) -> Settings:
        region = self._first(
            "region",
            [
                ("client_kwargs.region_name", self._client.get("region_name")),
                ("config_kwargs.region_name", self._config.get("region_name")),
            ],
            ("AWS_REGION", "AWS_DEFAULT_REGION"),
            self._profile.get("region"),
            "us-east-1",
        )
        endpoint, is_aws = self._endpoint(region)
        given = (("config_kwargs.s3.addressing_style", self._style),) * (self._style != "auto")
        # A profile's addressing belongs to its endpoint.
        of_profile = None if self._rows[-1].source.startswith(_GIVEN) else self._profile.get("s3")
        found = of_profile.get("addressing_style") if isinstance(of_profile, Mapping) else None
        usual = "virtual" if is_aws and self._flag("fips") else "path"
        style = self._first("addressing", given, (), found if found != "auto" else None, usual)
        verify = self._first(
            "certificates",
            [("client_kwargs.verify", self._client.get("verify"))],
            ("AWS_CA_BUNDLE",),
            self._profile.get("ca_bundle"),
            None,
        )
        keys = self._keys()
        # The only settings that obstore takes from the environment: no option has them.
        for variable in ("AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_KMS_KEY_ID"):
            if variable in os.environ:
                self._rows.append(Setting("encryption", os.environ[variable], variable))
        return Settings(endpoint, is_aws, region, style, keys, verify, tuple(self._rows))

    def _first(self, name: str, given: Any, variables: Any, profile: Any, usual: Any) -> Any:
        """Return the first value that is set, and note it for people."""
        places = [(f"{_GIVEN}: {option}", value) for option, value in given]
        environment = [(variable, os.environ.get(variable) or None) for variable in variables]
        of_profile = [(self._profile_name, profile)]
        if self._options.get("profile"):
            places += of_profile + environment
        else:
            places += environment + of_profile
        found = ((source, value) for source, value in places if value is not None)
        source, value = next(found, ("default", usual))
        shown = "the system's" if value is None else shown_url(str(value))
        self._rows.append(Setting(name, shown, source))
        return value

    def _flag(self, kind: str) -> bool:
        """Return whether a variant of AWS's endpoints is wanted: ``dualstack`` or ``fips``."""
        name = f"use_{kind}_endpoint"
        values = (self._config.get(name), os.environ.get(f"AWS_{name.upper()}"))
        found = next((v for v in (*values, self._profile.get(name)) if v is not None), False)
        return str(found).lower() == "true"

    def _endpoint(self, region: str) -> tuple[str, bool]:
        services = self._session.full_config.get("services", {}) if self._profile else {}
        service = services.get(self._profile.get("services"), {}).get("s3", {})
        ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
        found = self._first(
            "endpoint",
            [
                ("endpoint_url", self._options.get("endpoint_url")),
                ("client_kwargs.endpoint_url", self._client.get("endpoint_url")),
            ],
            () if ignored else ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
            None if ignored else service.get("endpoint_url") or self._profile.get("endpoint_url"),
            None,
        )
        if found is not None:
            _, value, source = self._rows[-1]
            parts = urlsplit(str(found))
            is_plain = not (parts.username or parts.query or parts.fragment)
            if parts.scheme not in ("http", "https") or not is_plain:
                raise ConfigError(
                    f"{source} is {value!r}; expected http(s)://host, without user or query: keys"
                    " are options of their own"
                )
            return str(found).rstrip("/"), False
        endpoint = self._endpoint_of_aws(region)
        self._rows[-1] = Setting("endpoint", endpoint, f"AWS, region {region}")
        return endpoint, True

    def _endpoint_of_aws(self, region: str) -> str:
        """Return the endpoint of a region, in whichever partition of AWS it is."""
        from botocore.regions import EndpointResolver

        found = EndpointResolver(self._session.get_data("endpoints")).construct_endpoint(
            "s3",
            region,
            use_dualstack_endpoint=self._flag("dualstack"),
            use_fips_endpoint=self._flag("fips"),
        )
        scheme = "http" if self._options.get("use_ssl") is False else "https"
        return f"{scheme}://{found['hostname'] if found else f's3.{region}.amazonaws.com'}"

    def _keys(self) -> Keys | None:
        from botocore.credentials import Credentials
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session

        if self._unsigned:
            self._rows.append(Setting("keys", "none: requests are not signed", _GIVEN))
            return None
        key, secret, profile = (self._options.get(name) for name in ("key", "secret", "profile"))
        if key:
            token = self._options.get("token") or None
            also = " with a session token" if token else ""
            self._rows.append(Setting("keys", f"an access key{also}", f"{_GIVEN}: key, secret"))
            return Keys(lambda: Credentials(key, secret, token))
        try:
            keys = Keys(lambda: Session(profile=profile).get_credentials())
        except BotoCoreError as exc:
            # The last provider of the chain asks the instance metadata service, over the network.
            raise ConfigError(f"{NO_CREDENTIALS} ({type(exc).__name__})") from exc
        if keys.credentials is None:
            raise ConfigError(NO_CREDENTIALS)
        method = str(keys.credentials.method)
        # As botocore calls it: shared-credentials-file, sso, iam-role and others.
        source = "AWS_ACCESS_KEY_ID" if method == "env" else f"{self._profile_name}, {method}"
        self._rows.append(Setting("keys", "an access key", source))
        return keys


class Keys:
    """The keys of requests.

    Parameters
    ----------
    find : Callable
        Reads them from where they are, for botocore. botocore itself does so once.

    Attributes
    ----------
    credentials : botocore.credentials.Credentials or None
    """

    def __init__(self, find: Callable[[], Any]) -> None:
        self.credentials = find()
        self._find = find
        self._read_at = -math.inf
        self._lock = threading.Lock()

    def provide(self) -> dict[str, Any]:
        """Return the present keys as obstore wants them."""
        now = self.credentials.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + _REFRESH,
        }

    def reread(self) -> bool:
        """Read the keys again, unless that was done just now; return whether they are others."""
        with self._lock:
            is_early = time.monotonic() < self._read_at + _AGAIN_SECONDS
            # botocore renews those that expire by itself.
            if is_early or hasattr(self.credentials, "refresh_needed"):
                return False
            self._read_at = time.monotonic()
        try:
            credentials = self._find()
        except Exception:  # noqa: BLE001 - a file may be half written
            return False
        if credentials is None or vars(credentials) == vars(self.credentials):
            return False
        self.credentials = credentials
        return True


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse what obstore does not know. Raises ConfigError."""
    check_names(named(options, *NESTED), (*OPTIONS, "checksum", "client", "quirks"), ELSEWHERE)
    check_names(options.get("quirks") or (), QUIRKS)
