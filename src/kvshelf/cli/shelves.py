"""Which shelf and which of its namespaces a command works on, with which storage options.

Owns the arguments that name a shelf and its namespaces, and how a command opens a shelf. The
configuration is that of engines, and a command that reads it refuses what an engine refuses. Only
the shelf's address and its storage options are used.

Contracts
---------
* A command without a shelf ends: the private shelf of engines is not meant.
* The configured storage options go to the configured shelf. If only storage options are configured,
  they go to the named shelf, if that is a URL. ``--storage-options`` go to the named shelf.
* A namespace is named by its folder, by the 16 hex digits at the folder's end, or by the first
  characters of either if no other namespace begins with them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Annotated, Any, Final, TypeAlias

import typer

from kvshelf.backends import open_backend
from kvshelf.cli.common import COMMON_OPTIONS, option
from kvshelf.cli.values import json_object
from kvshelf.config import Config
from kvshelf.errors import ConfigError, StorageError
from kvshelf.format.names import parse_namespace_folder
from kvshelf.shelf.shelf import Shelf, is_missing
from kvshelf.urls import check_shelf, shown_url

Options: TypeAlias = dict[str, Any]

#: No request waits for a command, so slow storage has long deadlines before the breaker opens.
PATIENT: Final = {"probe": 60.0, "read": 60.0, "write": 60.0, "bytes_per_second": 1e6}
#: Also the error of an engine's configuration that names a node server, which has the shelf.
NO_SHELF: Final = (
    "found no shelf; expected SHELF on the command line, the variable KVSHELF_SHARED_STORAGE_PATH,"
    " or shared_storage_path in the file of --config or KVSHELF_CONFIG"
)
#: Namespaces that an error lists.
_MAX_LISTED: Final = 10


def _namespaces(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the namespaces that complete a word of the command line."""
    try:
        with open_found(next(iter(ctx.args), None)) as opened:
            folders = list(filter(parse_namespace_folder, opened.backend.folders()))
    except Exception:  # noqa: BLE001  a shell shows no errors
        return []
    return [folder for folder in folders if folder.startswith(incomplete)]


_shelf_argument: Final = partial(typer.Argument, metavar="SHELF", show_default=False)
ShelfArgument: TypeAlias = Annotated[
    str | None,
    _shelf_argument(
        help="Directory or URL; default: the configured one [env: KVSHELF_SHARED_STORAGE_PATH]."
    ),
]
OneShelf: TypeAlias = Annotated[str, _shelf_argument(help="Directory or URL.")]
NamespacesOption: TypeAlias = Annotated[
    list[str] | None,
    option(
        "--namespace",
        "X",
        "Only this namespace: the name of its folder, its 16-digit id, or the first characters of"
        " either. Repeatable. (-n is no dry run.)",
        "-n",
        autocompletion=_namespaces,
    ),
]


def find_shelf(shelf: str | None) -> tuple[str, Options]:
    """Return URL and storage options of the shelf for a command.

    Parameters
    ----------
    shelf : str or None
        The command line's shelf; None selects the configured shelf.

    Raises
    ------
    ConfigError
        If the configuration cannot be used, or there is no shelf.
    """
    text = COMMON_OPTIONS["storage_options"]
    storage_options = None if text is None else json_object(text, "--storage-options")
    url = _configuration().shared_storage_path if shelf is None else shelf
    if url is None:
        raise ConfigError(NO_SHELF)
    url = located(url)
    return url, options_of(url, storage_options)


def _configuration() -> Config:
    """Read the configuration as if it named no node server: commands open the shelf themselves."""
    return Config.load({"server": None}, file=COMMON_OPTIONS["config"])


def located(url: str) -> str:
    """Return the URL or the absolute path of a shelf that the command line names.

    A path is relative to the folder in which the command runs.

    Raises
    ------
    ConfigError
        If it is empty or was written by mistake, see :func:`kvshelf.urls.check_shelf`.
    """
    if not url.strip():
        raise ConfigError(f"found {url!r} for a shelf; expected a directory or a URL")
    check_shelf(url)
    return url if "://" in url else os.path.abspath(os.path.expanduser(url))


def options_of(url: str, given: Options | None = None, beside: str | None = None) -> Options:
    """Return the storage options of a shelf that is named.

    Parameters
    ----------
    url : str
    given : dict, optional
        Options that the command line gives to this shelf. They replace the configured ones.
    beside : str, optional
        Another shelf that the command line names.

    Raises
    ------
    ConfigError
        If the configured options may be those of either shelf.
    """
    config = _configuration()
    if given is not None:
        return {**given}
    if config.shared_storage_path is not None:
        is_configured = place_of(config.shared_storage_path) == place_of(url)
        return config.storage_options if is_configured else {}
    if is_local(url):
        return {}
    if config.storage_options and beside is not None and not is_local(beside):
        raise ConfigError(
            f"KVSHELF_STORAGE_OPTIONS may be those of {shown_url(url)} or of {shown_url(beside)};"
            " give --source-options and --target-options"
        )
    return config.storage_options


def is_local(url: str) -> bool:
    """Whether a shelf's path or URL names a directory of this machine."""
    return "://" not in url or url.startswith(("file://", "local://"))


def place_of(url: str) -> str:
    """Return where a shelf is, the same for all its spellings."""
    if not is_local(url):
        return url.rstrip("/")
    path = url.removeprefix("file://").removeprefix("local://")
    return os.path.realpath(os.path.expanduser(path))


def is_inside(url: str, outer: str) -> bool:
    """Whether a shelf is the shelf `outer`, or lies inside it."""
    return f"{place_of(url)}/".startswith(f"{place_of(outer)}/")


def open_patiently(url: str, options: Options, *, change: bool = False) -> Shelf:
    """Open a shelf that exists, to look at it or to change it, with long deadlines.

    Reads are not uses of its chunks.

    Raises
    ------
    ConfigError
        If URL or options cannot be used.
    StorageError
        If it is missing or cannot be opened.
    """
    if is_local(url):
        options = options | {"create": False}
    backend = open_backend(url, storage_options=options, read_only=not change, keep_atime=True)
    if is_missing(backend):
        backend.close()
        raise StorageError(f"{backend.url} does not exist; check the path, or mount the filesystem")
    return Shelf(backend, deadlines=replace(backend.properties.deadlines, **PATIENT))


def open_found(shelf: str | None, *, change: bool = False) -> Shelf:
    """Open the shelf of a command: :func:`find_shelf`, :func:`open_patiently`."""
    return open_patiently(*find_shelf(shelf), change=change)


def find_folders(shelf: Shelf, names: Sequence[str] | None) -> list[str] | None:
    """Return the folders of the namespaces that a command line names; None if it names none.

    Several folders may be of one namespace: then their digits are equal.

    Raises
    ------
    ConfigError
        If the shelf has no such namespace, or several.
    StorageError
        If the shelf cannot be listed.
    """
    if not names:
        return None
    folders = list(filter(parse_namespace_folder, shelf.backend.folders()))
    matches = (_folders_named(name.rstrip("/"), folders, shelf.url) for name in names)
    return list(dict.fromkeys(chain.from_iterable(matches)))


def _folders_named(name: str, folders: list[str], url: str) -> list[str]:
    """Return the folders that a name means: those of this whole name, else those it begins."""
    if matches := [folder for folder in folders if name in (folder, folder[-16:])]:
        return matches
    matches = [f for f in folders if name and (f.startswith(name) or f[-16:].startswith(name))]
    if len({folder[-16:] for folder in matches}) == 1:
        return matches
    listed = matches or folders
    text = ", ".join(listed[:_MAX_LISTED]) or "none"
    if len(listed) > _MAX_LISTED:
        text += f" and {len(listed) - _MAX_LISTED} more"
    if matches:
        raise ConfigError(f"{name} begins several namespaces on {url}: {text}; give more of it")
    raise ConfigError(f"no namespace {shown_url(name)} on {url}; it has: {text}")
