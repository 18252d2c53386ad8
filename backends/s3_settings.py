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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from kvshelf.backends.options import check_names, flattened
from kvshelf.backends.s3_errors import QUIRKS, quirks_of
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
_STYLE: Final = "config_kwargs.s3.addressing_style"
_VERIFY: Final = "client_kwargs.verify"
NO_CREDENTIALS: Final = (
    "no AWS credentials were found: set key and secret in storage_options, or AWS_ACCESS_KEY_ID"
    " and AWS_SECRET_ACCESS_KEY, a profile or a role; for a public bucket set anon: true"
)


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
    rows : Mapping
        For people: the value of each setting, without secrets, and where it comes from.
    """

    endpoint: str
    is_aws: bool
    region: str
    style: str
    keys: Keys | None
    verify: Any
    rows: Mapping[str, tuple[str, str]]

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


def settings_of(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> list[tuple[str, str]]:
    """Return what reaches the storage at `url`, where there is a choice, and where it comes from.

    After it was used, also what this process has learned that the storage lacks.

    Returns
    -------
    list of (str, str)
        For each setting its name and, without secrets, its value with its source in parentheses.
        Empty where :func:`kvshelf.backends.open_backend` raises ConfigError, or for no bucket.
    """
    scheme, _, path = os.fspath(url).partition("://")
    if scheme.lower() not in ("s3", "s3a"):
        return []
    try:
        settings = resolve(storage_options or {})
    except (ConfigError, ImportError):
        return []
    rows = [
        (f"s3 {name}", f"{value} ({source})") for name, (value, source) in settings.rows.items()
    ]
    quirks = sorted(quirks_of(settings.endpoint, path.partition("/")[0]))
    return rows + [("s3 quirk", f"{quirk}: {QUIRKS[quirk]}") for quirk in quirks]


class _Search:
    """Finds settings in the storage options, the environment and a profile, in their order."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        from botocore.exceptions import ProfileNotFound
        from botocore.session import Session

        self._options = options = flattened(options, *NESTED)
        style = options.get(_STYLE, "auto")
        if style not in ("auto", "path", "virtual"):
            raise ConfigError(
                f"storage_options: addressing_style is {style!r}; expected auto, path or virtual"
            )
        if style == "auto":
            options.pop(_STYLE, None)
        if bool(options.get("key")) != bool(options.get("secret")):
            raise ConfigError("storage_options: key and secret belong together; found one of them")
        signature = options.get("config_kwargs.signature_version")
        self._is_unsigned = options.get("anon") or signature == "unsigned"
        named = options.get("profile")
        self._session = Session(profile=named)
        try:
            self._profile: Mapping[str, Any] = self._session.get_scoped_config()
        except ProfileNotFound:
            if named or not (self._is_unsigned or options.get("key")):
                raise
            self._profile = {}
        self._profile_name = f"profile {named or self._session.profile or 'default'}"
        self._rows: dict[str, tuple[str, str]] = {}

    def settings(self) -> Settings:
        profile = self._profile
        region = self._first(
            "region",
            ("client_kwargs.region_name", "config_kwargs.region_name"),
            ("AWS_REGION", "AWS_DEFAULT_REGION"),
            profile.get("region"),
            "us-east-1",
        )
        endpoint, is_aws = self._endpoint(region)
        nested = profile.get("s3")
        addressing = nested.get("addressing_style") if isinstance(nested, Mapping) else None
        # A profile's addressing belongs to its endpoint.
        if addressing == "auto" or self._rows["endpoint"][1].startswith(_GIVEN):
            addressing = None
        usual = "virtual" if is_aws and self._flag("fips") else "path"
        style = self._first("addressing", (_STYLE,), (), addressing, usual)
        bundle = profile.get("ca_bundle")
        verify = self._first("certificates", (_VERIFY,), ("AWS_CA_BUNDLE",), bundle, None)
        keys = self._keys()
        # The only settings that obstore takes from the environment: no option has them.
        for variable in ("AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_KMS_KEY_ID"):
            if variable in os.environ:
                self._rows["encryption"] = os.environ[variable], variable
        return Settings(endpoint, is_aws, region, style, keys, verify, self._rows)

    def _first(
        self, name: str, options: Sequence[str], variables: Sequence[str], profile: Any, usual: Any
    ) -> Any:
        """Return the first value that is set, and note it for people."""
        places = [(f"{_GIVEN}: {option}", self._options.get(option)) for option in options]
        environment = [(variable, os.environ.get(variable) or None) for variable in variables]
        of_profile = [(self._profile_name, profile)]
        if self._options.get("profile"):
            places += of_profile + environment
        else:
            places += environment + of_profile
        given = ((source, value) for source, value in places if value is not None)
        source, value = next(given, ("default", usual))
        self._rows[name] = "the system's" if value is None else shown_url(str(value)), source
        return value

    def _flag(self, kind: str) -> bool:
        """Return whether a variant of AWS's endpoints is wanted: ``dualstack`` or ``fips``."""
        name = f"use_{kind}_endpoint"
        option, variable = self._options.get(f"config_kwargs.{name}"), f"AWS_{name.upper()}"
        values = (option, os.environ.get(variable), self._profile.get(name))
        return str(next((v for v in values if v is not None), False)).lower() == "true"

    def _endpoint(self, region: str) -> tuple[str, bool]:
        """Return the endpoint, and whether it is AWS's."""
        services = self._session.full_config.get("services", {}) if self._profile else {}
        service = services.get(self._profile.get("services"), {}).get("s3", {})
        of_profile = service.get("endpoint_url") or self._profile.get("endpoint_url")
        variables: Sequence[str] = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
            of_profile, variables = None, ()
        options = ("endpoint_url", "client_kwargs.endpoint_url")
        given = self._first("endpoint", options, variables, of_profile, None)
        if given is None:
            endpoint = self._endpoint_of_aws(region)
            self._rows["endpoint"] = endpoint, f"AWS, region {region}"
            return endpoint, True
        parts = urlsplit(str(given))
        is_plain = not (parts.username or parts.query or parts.fragment)
        if parts.scheme not in ("http", "https") or not is_plain:
            value, source = self._rows["endpoint"]
            raise ConfigError(
                f"{source} is {value!r}; expected http(s)://host, without user or query: keys"
                " are options of their own"
            )
        return str(given).rstrip("/"), False

    def _endpoint_of_aws(self, region: str) -> str:
        """Return the endpoint of a region, in whichever partition of AWS it is."""
        from botocore.regions import EndpointResolver

        endpoint = EndpointResolver(self._session.get_data("endpoints")).construct_endpoint(
            "s3",
            region,
            use_dualstack_endpoint=self._flag("dualstack"),
            use_fips_endpoint=self._flag("fips"),
        )
        scheme = "http" if self._options.get("use_ssl") is False else "https"
        return f"{scheme}://{endpoint['hostname'] if endpoint else f's3.{region}.amazonaws.com'}"

    def _keys(self) -> Keys | None:
        from botocore.credentials import Credentials
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session

        if self._is_unsigned:
            self._rows["keys"] = "none: requests are not signed", _GIVEN
            return None
        key, secret, profile = (self._options.get(name) for name in ("key", "secret", "profile"))
        if key:
            token = self._options.get("token") or None
            also = " with a session token" if token else ""
            self._rows["keys"] = f"an access key{also}", f"{_GIVEN}: key, secret"
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
        self._rows["keys"] = "an access key", source
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
    check_names(flattened(options, *NESTED), (*OPTIONS, "checksum", "client", "quirks"), ELSEWHERE)
    check_names(options.get("quirks") or (), QUIRKS)
