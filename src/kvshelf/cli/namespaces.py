"""How a command line names namespaces of a shelf, see :mod:`kvshelf.tools.naming`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import typer

from kvshelf.cli.common import namespace_folders
from kvshelf.shelf.shelf import Shelf

NamespacesOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--namespace",
        "-n",
        metavar="X",
        help="Only this namespace: its folder, its 16 hex, or how either begins. Repeatable.",
        show_default=False,
    ),
]


def find_folders(shelf: Shelf, wanted: Sequence[str] | None) -> list[str] | None:
    """Return the folders of the wanted namespaces; None if all are wanted.

    Raises
    ------
    ConfigError
        If the shelf has not such a namespace.
    StorageError
        If the shelf cannot be listed.
    """
    if not wanted:
        return None
    found = {folder: None for name in wanted for folder in namespace_folders(shelf, name)}
    return list(found)
