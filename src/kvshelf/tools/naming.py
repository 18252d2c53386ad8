"""How users name namespaces and salt groups of a shelf: whole, or by any beginning of one only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from kvshelf.errors import ConfigError
from kvshelf.format.names import parse_namespace_folder
from kvshelf.shelf.shelf import Shelf

_MOST_SHOWN: Final = 10
_BEGIN_OF_GROUP: Final = re.compile(r"[0-9a-f]{1,15}", re.ASCII)


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
    raise ConfigError(f"no namespace {wanted} on {where}; it has: {shown(known)}")


def group_named(shelf: Shelf, wanted: str, folders: Sequence[str] | None) -> str:
    """Return the salt group that a user names: whole, or by a beginning of one on the shelf only.

    Parameters
    ----------
    shelf : Shelf
    wanted : str
        A name, or a beginning that :func:`may_be_group` accepts.
    folders : Sequence of str or None
        The namespaces whose groups count; None or none for all.

    Raises
    ------
    ConfigError
        If it begins no group on the shelf, or several.
    StorageError
        If the storage failed.
    """
    if not may_be_group(wanted):
        return wanted
    found = {
        group
        for folder in folders or filter(parse_namespace_folder, shelf.backend.folders())
        for group in shelf.backend.folders(folder)
        if len(group) == 16 and group.startswith(wanted)
    }
    if len(found) == 1:
        return found.pop()
    raise ConfigError(
        f"--group: {wanted} begins {len(found)} salt groups on {shelf.url}: {shown(sorted(found))};"
        " give the 16 hex of one"
    )


def may_be_group(text: str) -> bool:
    """Whether a text may be the beginning of a salt group's name."""
    return _BEGIN_OF_GROUP.fullmatch(text) is not None


def shown(names: Sequence[str]) -> str:
    """Return names as text, the first ten of them."""
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return (", ".join(names[:_MOST_SHOWN]) or "none") + more
