"""Shelf URLs: the directory that a URL names, and its form without secrets.

Owns how log lines and errors show URLs. Neither function touches storage.
"""

from __future__ import annotations

import os
import re
from typing import Final
from urllib.parse import unquote, urlsplit

from kvshelf.errors import ConfigError

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HALF_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def shown_url(url: str | os.PathLike[str]) -> str:
    """Return a URL without its secrets: user, password, query and fragment.

    If the end of the password is ambiguous, only the protocol is left. Paths are returned
    unchanged.
    """
    text = os.fspath(url)
    protocol, mark, rest = text.partition("://")
    if not mark:
        half = _HALF_URL.match(text)
        return f"{half[0]}…" if half and "@" in text else text
    protocol = protocol.lower()
    if protocol in ("file", "local"):
        return text
    place = re.split("[/?#]", rest, maxsplit=1)[0]
    tail = rest[len(place) :]
    if ":" in place and "@" in tail:
        # The password may contain a slash.
        return f"{protocol}://…"
    return f"{protocol}://{place.rpartition('@')[2]}{re.split('[?#]', tail, maxsplit=1)[0]}"


def directory_of(url: str | os.PathLike[str]) -> str | None:
    """Return the path of the directory that `url` names; None for other kinds of storage.

    Raises
    ------
    ConfigError
        If it is neither a path nor a URL that kvshelf can use.
    """
    text = os.fspath(url)
    scheme = _SCHEME.match(text)
    if scheme is None:
        if "://" in text or _HALF_URL.match(text):
            raise ConfigError(
                f"{shown_url(text)!r} is neither a path nor a URL that kvshelf can use: expected "
                "/absolute/path or protocol://…; chained URLs (a::b) are not supported, and a "
                "folder with such a name can be given as ./name"
            )
        return text
    protocol = scheme[1].lower()
    if protocol not in ("file", "local"):
        return None
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(
            f"{text!r} names the host {parts.netloc!r}: expected three slashes, as in "
            f"{protocol}:///{parts.netloc}{parts.path}"
        )
    # urlsplit would cut the path at ? and #, which are ordinary characters in a path.
    path = unquote(text[scheme.end() + len(parts.netloc) :])
    if not path.startswith("/"):
        raise ConfigError(f"{text!r} has no path: expected {protocol}:///absolute/path")
    return path
