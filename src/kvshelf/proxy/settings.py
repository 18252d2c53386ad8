"""The settings of the proxy, from its command line.

Owns :class:`Settings` and the check of the engines' URLs. Immutable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvshelf.errors import ConfigError

_ENGINE_URL: Final = re.compile(r"https?://[^/?#@\s]+(/[^?#@\s]*)?")


@dataclass(frozen=True, slots=True)
class Settings:
    """Engines and limits of a proxy.

    Attributes
    ----------
    prefill, decode : tuple of str
        Base URLs of the engines, see :func:`engine_url`. Without prefill engines every request is
        sent to a decode engine as it is.
    prefill_timeout : float
        Seconds that a prefill engine may take for its answer.
    timeout : float
        Seconds without a byte from a decode engine, or without a client's taking one, after which
        a request ends.
    durable_wait : float
        Seconds that a finished answer may be withheld for ``durable``.
    max_body_bytes : int
        Largest body of a client's request.
    max_held_bytes : int
        Most bytes of the bodies of all requests that are not over.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    prefill_timeout: float = 60.0
    timeout: float = 600.0
    durable_wait: float = 30.0
    max_body_bytes: int = 8 << 20
    max_held_bytes: int = 512 << 20


def engine_url(text: str) -> str:
    """Return the base URL of an engine, without a slash at its end.

    Raises
    ------
    ConfigError
        If it is not ``http(s)://HOST[:PORT][/PATH]``. User names and passwords are refused:
        headers of clients are passed on to engines as they are.
    """
    if not _ENGINE_URL.fullmatch(text):
        raise ConfigError(
            f"an engine's URL {text.rpartition('@')[2]!r} cannot be used: expected"
            " http://HOST:PORT, without a user name"
        )
    return text.rstrip("/").removesuffix("/v1")
