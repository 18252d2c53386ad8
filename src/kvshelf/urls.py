"""Shelf URLs, paths and names of weights: mistakes in them, and how they are shown.

Owns how log lines and errors show URLs, and where kvshelf keeps files for a user. No function
touches storage; :func:`names_a_path` looks whether a file exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from kvshelf.errors import ConfigError

_NAME: Final = "name:"
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HALF_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_VARIABLE: Final = re.compile(r"\$(?:\w+|\{\w+\})")
_DRIVE: Final = re.compile(r"[A-Za-z]:[\\/]")
_AWS: Final = re.compile(r"(?:([^/]+)\.)?s3[.-](?:[\w-]+\.)?amazonaws\.com(?:\.cn)?")
_WORD: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?!:|//)(.*)")


def refuse_mistakes(text: str) -> None:
    """Refuse what somebody wrote by mistake, and what would become a folder of that name.

    Raises
    ------
    ValueError
        If it is; says what was meant.
    """
    control = next((letter for letter in text if not letter.isprintable()), None)
    if control is not None:
        raise ValueError(
            f"holds {control!r}; a file or a Secret that it was read from may end in a line end"
        )
    if text != text.strip():
        raise ValueError("begins or ends with a blank; remove it")
    if text.startswith("//"):
        raise ValueError(f"begins with two slashes; expected a mounted path: /{text.lstrip('/')}")
    if text.startswith(("/", "~")) and (url := _SCHEME.search(text)):
        raise ValueError(f"has a URL inside a path; expected {shown_url(text[url.start() :])}")
    if text.lower() in ("none", "null"):
        raise ValueError("is a program's word for no value; leave the option out, or give ./None")
    if match := _VARIABLE.search(text):
        raise ValueError(f"holds {match[0]}, which nothing replaces here; write its value instead")
    if text.lower().startswith(("http://", "https://")):
        host = re.split("[?#]", text.partition("://")[2])[0]
        server, _, bucket = host.rpartition("@")[2].partition("/")
        if aws := _AWS.fullmatch(server):
            meant = f"{aws[1]}/{bucket}" if aws[1] else bucket
            raise ValueError(f"is the address of a bucket; expected s3://{meant}")
        raise ValueError(
            f"is the address of a server; expected s3://{bucket or 'bucket/prefix'} with"
            f' storage_options {{"endpoint_url": "{text.partition("://")[0].lower()}://{server}"}}'
        )
    if _DRIVE.match(text):
        raise ValueError("is a path of Windows; expected one of this system, such as /mnt/kv")
    if word := _WORD.match(text):
        if "@" in text:
            raise ValueError("has no // behind its protocol: expected one such as s3://bucket/kv")
        slash = "/" if word[1].lower() in ("file", "local") else ""
        meant = shown_url(f"{word[1]}://{slash}{word[2].lstrip('/')}")
        raise ValueError(f"has no // behind {word[1]}: expected {meant}, or ./{text} for a folder")


def check_shelf(url: str) -> None:
    """Refuse what somebody wrote for a shelf by mistake, see :func:`refuse_mistakes`.

    Raises
    ------
    ConfigError
        If it is.
    """
    try:
        refuse_mistakes(url)
    except ValueError as error:
        raise ConfigError(f"the shelf {shown_url(url)!r} {error}") from None


def weights_name(text: str) -> str | None:
    """Return the name in a text such as ``name:my-model-v1``; None if no ``name:`` begins it.

    Raises
    ------
    ValueError
        If nothing or a path follows ``name:``.
    """
    if not text.startswith(_NAME):
        return None
    name = text.removeprefix(_NAME)
    if not name or name != name.strip() or not name.isprintable():
        raise ValueError("expected a text without blanks around it, as name:my-model-v1")
    if names_a_path(name):
        raise ValueError(
            "names a path, and a name does not say what lies there; expected content, which reads"
            " the files, or a name that is no path, as name:my-model-v1"
        )
    return name


def names_a_path(text: str) -> bool:
    """Whether a text is written like a path, or has a slash and names a file that exists."""
    return text.strip().startswith(("/", "~", "./", "../")) or (
        "/" in text and os.path.lexists(text)
    )


def shown_url(url: str | os.PathLike[str]) -> str:
    """Return a URL without its secrets: user, password, query and fragment.

    If the end of the password is ambiguous, only the protocol is left. Paths are returned
    unchanged. What is neither a path nor a URL may be a URL without its protocol.
    """
    text = os.fspath(url)
    protocol, mark, address = text.partition("://")
    user, at, behind = text.rpartition("@")
    if not mark:
        is_path = text.startswith(("/", ".", "~")) and not text.startswith("//")
        return text if is_path or ":" not in user else f"…{at}{re.split('[?#]', behind)[0]}"
    protocol = protocol.lower()
    host = re.split("[/?#]", address, maxsplit=1)[0]
    tail = address[len(host) :]
    if protocol in ("file", "local"):
        return f"{protocol}://{host.rpartition('@')[2]}{tail}"
    if ":" in address.rpartition("@")[0] and "@" in tail:
        # The password may contain a slash.
        return f"{protocol}://…"
    return f"{protocol}://{host.rpartition('@')[2]}{re.split('[?#]', tail, maxsplit=1)[0]}"


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
            f"{shown_url(text)!r} names a host: expected three slashes, as in "
            f"{protocol}:///{parts.netloc.rpartition('@')[2]}{parts.path}"
        )
    # urlsplit would cut the path at ? and #, which are ordinary characters in a path.
    path = unquote(text[scheme.end() + len(parts.netloc) :])
    if not path.startswith("/"):
        raise ConfigError(f"{text!r} has no path: expected {protocol}:///absolute/path")
    return path


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for the files that kvshelf keeps for this user on this machine.

    Parameters
    ----------
    environ : Mapping, optional
        The environment; ``os.environ`` when absent.

    Returns
    -------
    Path
        ``KVSHELF_CACHE_DIR``, else ``$XDG_CACHE_HOME/kvshelf``, else
        ``~/.cache/kvshelf``. Not created.
    """
    environ = os.environ if environ is None else environ
    if own := environ.get("KVSHELF_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME")
    # The XDG specification requires that a relative path be ignored.
    if not base or not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    # A user without a home, as containers have them, has no entry to expand "~" by either.
    return Path(base if os.path.isabs(base) else "/.cache") / "kvshelf"
