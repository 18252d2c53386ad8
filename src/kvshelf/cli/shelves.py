"""Which shelf a command works on, with which storage options, and how it is opened.

Owns the arguments that name a shelf and its namespaces. The configuration is that of engines; of it
only the shelf's address and its storage options are used.

Contracts
---------
* Without a shelf a command ends: the private one of engines without a shelf is not meant.
* Options that are configured go to the shelf that they are configured with; without a configured
  shelf to the one that is named, if it is a URL. ``--storage-options`` goes to the one that is
  named.
"""

from __future__ import annotations

import json
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer

from kvshelf.backends import Backend, open_backend
from kvshelf.cli.common import COMMON_OPTIONS, option
from kvshelf.errors import ConfigError, StorageError
from kvshelf.format.names import parse_namespace_folder
from kvshelf.shelf.shelf import Shelf, is_missing
from kvshelf.tools.naming import folders_named
from kvshelf.urls import check_shelf, shown_url

#: No request waits for a command, so slow storage has long deadlines before the breaker opens.
PATIENT: Final = types.MappingProxyType(
    {"probe": 60.0, "read": 60.0, "write": 60.0, "bytes_per_second": 1e6}
)
#: Most characters of a file that an option names.
_MOST_TEXT: Final = 1 << 20
#: Also said where engines have a node server, of which the shelf is an option.
NO_SHELF: Final = (
    "found no shelf; expected SHELF on the command line, the variable KVSHELF_SHARED_STORAGE_PATH,"
    " or shared_storage_path in the file of --config or KVSHELF_CONFIG"
)


def _namespaces(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return how the name of a namespace on the shelf of an incomplete command line may go on."""
    try:
        with open_found(next(iter(ctx.args), None)) as opened:
            folders = list(filter(parse_namespace_folder, opened.backend.folders()))
    except Exception:  # noqa: BLE001  a shell shows no errors
        return []
    return [folder for folder in folders if folder.startswith(incomplete)]


ShelfArgument: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="SHELF",
        help="Directory or URL; default: the configured one [env: KVSHELF_SHARED_STORAGE_PATH].",
        show_default=False,
    ),
]
OneShelf: TypeAlias = Annotated[
    str, typer.Argument(metavar="SHELF", help="Directory or URL.", show_default=False)
]
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


def configured() -> tuple[str | None, dict[str, Any]]:
    """Return the shelf that is configured, None without one, and its storage options.

    Raises
    ------
    ConfigError
        If the configuration cannot be used, as in an engine.
    """
    if not COMMON_OPTIONS["config"] and not any(
        name.upper().startswith("KVSHELF_") for name in os.environ
    ):
        # To import what reads options takes longer than `ls`.
        return None, {}
    from kvshelf.config import Config

    # Engines may have a node server, of which the shelf is an option.
    config = Config.load({"server": None}, file=COMMON_OPTIONS["config"])
    return config.shared_storage_path, config.storage_options


def options_of(
    url: str, given: Mapping[str, Any] | None = None, beside: str | None = None
) -> dict[str, Any]:
    """Return the storage options of a shelf that is named.

    Parameters
    ----------
    url : str
    given : Mapping, optional
        Options that the command line gives to this one.
    beside : str, optional
        Another shelf that the command line names.

    Raises
    ------
    ConfigError
        If the configured options may be those of either.
    """
    address, options = configured()
    if address is not None:
        options = options if place_of(address) == place_of(url) else {}
    elif is_local(url):
        options = {}
    elif options and given is None and beside is not None and not is_local(beside):
        raise ConfigError(
            f"KVSHELF_STORAGE_OPTIONS may be those of {shown_url(url)} or of {shown_url(beside)};"
            " give --source-options and --target-options"
        )
    return options if given is None else {**given}


def place_of(url: str) -> str:
    """Return where a shelf is, the same for all its spellings."""
    if not is_local(url):
        return url.rstrip("/")
    path = url.removeprefix("file://").removeprefix("local://")
    return os.path.realpath(os.path.expanduser(path))


def is_inside(url: str, other: str) -> bool:
    """Whether a shelf's place is that of another, or inside it."""
    return f"{place_of(url)}/".startswith(f"{place_of(other)}/")


def find_shelf(shelf: str | None) -> tuple[str, dict[str, Any]]:
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
    given = None if text is None else json_object(text, "--storage-options")
    url = configured()[0] if shelf is None else shelf
    if url is None:
        raise ConfigError(NO_SHELF)
    url = located(url)
    return url, options_of(url, given)


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


def open_existing(url: str, storage_options: dict[str, Any], *, change: bool = False) -> Backend:
    """Open a storage that exists, to look at it or to change it: reads are not uses.

    Raises
    ------
    ConfigError
        If URL or options cannot be used.
    StorageError
        If it is missing or cannot be opened.
    """
    if is_local(url):
        storage_options = storage_options | {"create": False}
    backend = open_backend(
        url, storage_options=storage_options, read_only=not change, keep_atime=True
    )
    if is_missing(backend):
        backend.close()
        raise StorageError(f"{backend.url} does not exist; check the path, or mount the filesystem")
    return backend


def open_patiently(url: str, storage_options: dict[str, Any], *, change: bool = False) -> Shelf:
    """Open a shelf that exists, with long deadlines; see :func:`open_existing`."""
    backend = open_existing(url, storage_options, change=change)
    return Shelf(backend, deadlines=replace(backend.properties.deadlines, **PATIENT))


def open_found(shelf: str | None, *, change: bool = False) -> Shelf:
    """Open the shelf of a command: :func:`find_shelf`, :func:`open_patiently`."""
    return open_patiently(*find_shelf(shelf), change=change)


def find_folders(shelf: Shelf, wanted: Sequence[str] | None) -> list[str] | None:
    """Return the folders of the wanted namespaces; None if all are wanted.

    Raises
    ------
    ConfigError
        If the shelf has not such a namespace, or several.
    StorageError
        If the shelf cannot be listed.
    """
    if not wanted:
        return None
    known = list(filter(parse_namespace_folder, shelf.backend.folders()))
    return list(
        dict.fromkeys(folder for name in wanted for folder in folders_named(name, known, shelf.url))
    )


def is_local(url: str) -> bool:
    """Whether a shelf's path or URL names a directory of this machine."""
    return "://" not in url or url.startswith(("file://", "local://"))


def read_text(file: Path, option: str) -> str:
    """Return the text of a file that the value of an option names; at most 1 MiB.

    Raises
    ------
    ConfigError
        If it cannot be read as such.
    """
    try:
        with open(file, encoding="utf-8", newline="") as opened:
            return opened.read(_MOST_TEXT)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{option}: {shown_url(file)} cannot be read: {reason}") from None


def json_object(text: str, option: str) -> dict[str, Any]:
    """Parse the JSON object that is the value of an option.

    Raises
    ------
    ConfigError
        If it is not a JSON object.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        # It may hold secrets, and is not shown.
        raise ConfigError(f'{option}: expected a JSON object, such as {{"name": "value"}}')
    return value
