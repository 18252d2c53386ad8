"""``kvshelf serve``: the node server of a machine.

The work is in :mod:`kvshelf.server`, whose packages are imported when the command runs. It takes
all options of a server from the configuration.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvshelf.cli.common import COMMON_OPTIONS, option
from kvshelf.cli.shelves import NO_SHELF, ShelfArgument, find_shelf
from kvshelf.cli.values import MaxAgeOption, MaxBytesOption, max_age, size
from kvshelf.config import LEAST_MEMORY, Config
from kvshelf.errors import ConfigError, size_text
from kvshelf.server import INSTALL


def serve(
    shelf: ShelfArgument = None,
    memory: Annotated[
        str | None,
        option("--memory", "SIZE", "Memory for objects, such as 20GiB, taken at the start."),
    ] = None,
    socket: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where engines connect: ipc:// and an absolute path in a folder that only this"
            " user can enter.",
            show_default="$XDG_RUNTIME_DIR/kvshelf/node.sock",
        ),
    ] = None,
    http: Annotated[
        str | None,
        option(
            "--http", "[HOST:]PORT", "Where to answer /health, /ready and /metrics; 0: a free port."
        ),
    ] = None,
    max_bytes: MaxBytesOption = None,
    age: MaxAgeOption = None,
) -> None:
    """Serve one memory tier and one shelf to all engines of this machine."""
    # What is wrong is said of these options, not of those that they stand for.
    size(max_bytes, "--max-bytes")
    max_age(age)
    size(memory, "--memory", least=LEAST_MEMORY)
    address = None if http is None else _address(http)
    # The same file or environment may name this server to engines.
    given: dict[str, Any] = {"server": None}
    if shelf is not None:
        given["shared_storage_path"], (_, options) = shelf, find_shelf(shelf)
    if memory is not None:
        given["memory"] = memory
    bounds = {"max_bytes": max_bytes, "max_age": age}
    if capacity := {name: value for name, value in bounds.items() if value is not None}:
        given["capacity"] = capacity
    config = Config.load(given, file=COMMON_OPTIONS["config"])
    if shelf is not None:
        config = config.model_copy(update={"storage_options": options})
    if config.shared_storage_path is None:
        raise ConfigError(NO_SHELF)
    if not config.memory_bytes:
        raise ConfigError("the server has no memory: give --memory 20GiB")
    nbytes = config.memory_bytes
    try:
        from kvshelf.server.process import default_socket
        from kvshelf.server.process import serve as run
    except ImportError as error:
        raise ConfigError(
            f"kvshelf serve needs packages that are missing ({error}): {INSTALL}"
        ) from error
    url = socket or default_socket()

    def ready(opened: str, port: int | None) -> None:
        host = "" if address is None else f"[{address[0]}]" if ":" in address[0] else address[0]
        at = "" if port is None or address is None else f", http://{host}:{port}"
        typer.echo(f"kvshelf serve: {url}, {size_text(nbytes)} of memory, shelf {opened}{at}")

    run(config, url, nbytes, http=address, ready=ready)


def _address(text: str) -> tuple[str, int]:
    """Return the address and the port that ``[HOST:]PORT`` names; without HOST this machine's own.

    Raises
    ------
    ConfigError
        If it is none.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--http is {text!r}; expected a port, or an address and a port")
    return host or "127.0.0.1", int(port)
