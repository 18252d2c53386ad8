"""A bucket by s3fs, for users who need an option of botocore: a filesystem like any other.

Owns what s3fs is given beside the options: every setting that kvshelf knows, so that neither s3fs
nor botocore takes one of them from elsewhere; fsspec's own configuration of s3 has no part in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from kvshelf.backends.generic import GenericBackend
from kvshelf.backends.options import check_names, mapping_of
from kvshelf.backends.s3_settings import (
    CONNECT_SECONDS,
    ELSEWHERE,
    OPTIONS,
    READ_SECONDS,
    resolve,
)
from kvshelf.errors import ConfigError

#: What s3fs takes and kvshelf decides.
_OWN: Final = frozenset(("session", "username", "password", "asynchronous", "loop"))
#: The endpoint is what these make of it.
_NO_VARIANT: Final = {"use_dualstack_endpoint": False, "use_fips_endpoint": False}


def open_with_s3fs(url: str, options: Mapping[str, Any]) -> GenericBackend:
    """Open ``s3://bucket/prefix``.

    Parameters
    ----------
    url : str
    options : Mapping
        Of s3fs. botocore checks the names of ``config_kwargs`` now, and those of ``client_kwargs``
        when it makes the first request.

    Raises
    ------
    ConfigError
        If an option is unknown, or there are no credentials.
    """
    from aiobotocore.config import AioConfig
    from s3fs import S3FileSystem

    parameters = inspect.signature(S3FileSystem.__init__).parameters.values()
    usual = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not parameter.empty
    }
    check_names(options, {*usual, *OPTIONS, "client_kwargs", "config_kwargs"} - _OWN, ELSEWHERE)
    settings = resolve(options)
    given = mapping_of(options, "config_kwargs")
    config = {
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
        # Loads verify objects by their own hashes. Checking the store's checksum as well would
        # turn a damaged object into a storage error, and such an object is never repaired.
        "response_checksum_validation": "when_required",
        **given,
        **_NO_VARIANT,
    }
    config["s3"] = {"use_accelerate_endpoint": False, **mapping_of(given, "s3")}
    config["s3"] |= {"use_dualstack_endpoint": False, "addressing_style": settings.style}
    if settings.keys is None:
        config.pop("signature_version", None)
    try:
        AioConfig(**config)
    except TypeError as exc:
        raise ConfigError(f"storage_options: config_kwargs: {exc}") from exc
    client = {**mapping_of(options, "client_kwargs"), "region_name": settings.region}
    client.pop("endpoint_url", None)
    if settings.verify is not None:
        client["verify"] = settings.verify
    own_options: dict[str, Any] = {
        "endpoint_url": settings.endpoint,
        "anon": settings.keys is None,
        "profile": options.get("profile"),
        "client_kwargs": client,
        "config_kwargs": config,
    }
    if settings.keys is None or options.get("key"):
        # No profile of the environment, which may not exist.
        own_options["session_vars"] = {"profile": (None, None, None, None)}
    return GenericBackend(url, {**usual, **options, **own_options})
