"""How users name namespaces of a shelf: whole, or by any beginning of one only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvshelf.errors import ConfigError
from kvshelf.urls import shown_url

_MOST_SHOWN: Final = 10


def folders_named(wanted: str, folders: Iterable[str], where: str) -> list[str]:
    """Return the namespace folders that a user names; several only if their digests are equal.

    Parameters
    ----------
    wanted : str
        A folder, the 16 hex digits at its end, or a beginning of either that is of one namespace.
    folders : Iterable of str
        The folders that there are.
    where : str
        Where they are, for messages.

    Raises
    ------
    ConfigError
        If there is none, or `wanted` begins several.
    """
    wanted = wanted.rstrip("/")
    known = list(folders)
    if found := [folder for folder in known if wanted in (folder, folder[-16:])]:
        return found
    found = [f for f in known if wanted and (f.startswith(wanted) or f[-16:].startswith(wanted))]
    if len({folder[-16:] for folder in found}) == 1:
        return found
    if found:
        raise ConfigError(
            f"{wanted} begins several namespaces on {where}: {shown(found)}; give more of it"
        )
    raise ConfigError(f"no namespace {shown_url(wanted)} on {where}; it has: {shown(known)}")


def shown(names: Sequence[str]) -> str:
    """Return names as text, the first ten of them."""
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return (", ".join(names[:_MOST_SHOWN]) or "none") + more
