"""A bucket by s3fs, for who needs an option of botocore: an fsspec filesystem like any other.

Owns what s3fs is given beside the options: every setting that kvshelf knows, so that neither s3fs
nor botocore takes one of them from elsewhere; fsspec's own configuration of s3 has no part in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from kvshelf.backends.generic import GenericBackend
from kvshelf.backends.options import check_names, mapping_of, named, parameters_of
from kvshelf.backends.s3_settings import (
    CONNECT_SECONDS,
    ELSEWHERE,
    NESTED,
    OPTIONS,
    READ_SECONDS,
    resolve,
)

#: What s3fs takes and kvshelf decides.
_OWN: Final = frozenset(("session", "username", "password", "asynchronous", "loop"))


def open_with_s3fs(url: str, options: Mapping[str, Any]) -> GenericBackend:
    """Open ``s3://bucket/prefix``.

    Parameters
    ----------
    url : str
    options : Mapping
        Of s3fs.

    Raises
    ------
    ConfigError
        If s3fs or botocore does not know one of them, or there are no credentials.
    """
    from aiobotocore.config import AioConfig
    from botocore.config import Config
    from s3fs import S3FileSystem

    usual = {
        name: one.default
        for name, one in inspect.signature(S3FileSystem.__init__).parameters.items()
        if one.default is not one.empty
    }
    of_config = {*Config.OPTION_DEFAULTS, *parameters_of(AioConfig.__init__)[0]} - {"self"}
    known = [
        *OPTIONS,
        *(name for name in usual if name not in (*_OWN, *NESTED, *OPTIONS)),
        *("client_kwargs.use_ssl", "client_kwargs.api_version"),
        *(f"config_kwargs.{name}" for name in sorted(of_config)),
    ]
    check_names(named(options, "client_kwargs", "config_kwargs"), known, ELSEWHERE)
    settings = resolve(options)
    client = {**mapping_of(options, "client_kwargs"), "region_name": settings.region}
    client.pop("endpoint_url", None)
    if settings.verify is not None:
        client["verify"] = settings.verify
    config = mapping_of(options, "config_kwargs")
    more: dict[str, Any] = {
        "endpoint_url": settings.endpoint,
        "anon": settings.keys is None,
        "profile": options.get("profile"),
        "client_kwargs": client,
        "config_kwargs": {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            # Loads verify objects by their own hashes. Checking the store's checksum as well would
            # turn a damaged object into a storage error, and such an object is never repaired.
            "response_checksum_validation": "when_required",
            **config,
            # The endpoint is what these make of it.
            "use_dualstack_endpoint": False,
            "use_fips_endpoint": False,
            "s3": {
                "use_accelerate_endpoint": False,
                **mapping_of(config, "s3"),
                "use_dualstack_endpoint": False,
                "addressing_style": settings.style,
            },
        },
    }
    if settings.keys is None:
        more["config_kwargs"].pop("signature_version", None)
    if settings.keys is None or options.get("key"):
        # No profile of the environment, which may not exist.
        more["session_vars"] = {"profile": (None, None, None, None)}
    return GenericBackend(url, {**usual, **options, **more})
