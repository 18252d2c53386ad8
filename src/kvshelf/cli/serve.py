"""``kvshelf serve``: the node server of a machine.

The work is in :mod:`kvshelf.server`, whose packages the extra ``kvshelf[server]`` installs; they
are imported when the command runs.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvshelf.cli.common import ShelfArgument, address, shown_address, size_text
from kvshelf.cli.values import MaxAgeOption, MaxBytesOption, bounds, size
from kvshelf.config import FILE_KEY, Config
from kvshelf.errors import ConfigError


def serve(
    shelf: ShelfArgument = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for objects, such as 20GiB, taken at the start; default: the configured"
            " memory.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="YAML file with options; default: the one that KVSHELF_CONFIG names.",
            show_default=False,
        ),
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
        typer.Option(
            metavar="[HOST:]PORT",
            help="Where to answer /health, /ready and /metrics; port 0: any free one. Without it"
            " nowhere.",
            show_default=False,
        ),
    ] = None,
    max_bytes: MaxBytesOption = None,
    max_age: MaxAgeOption = None,
    lease: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.1, help="How long an engine may read what it was lent."
        ),
    ] = 30.0,
) -> None:
    """Serve one memory tier and one shelf to all engines of this machine."""
    try:
        from kvshelf.server.process import Place, default_socket
        from kvshelf.server.process import serve as run
    except ImportError as error:
        raise ConfigError(
            f"kvshelf serve needs packages that are missing ({error}):"
            " pip install 'kvshelf[server]'"
        ) from error
    # The same file or environment may name this server to engines.
    given: dict[str, Any] = {"server": None}
    if config is not None:
        given[FILE_KEY] = config
    if shelf is not None:
        given["shared_storage_path"] = shelf
    if memory is not None:
        given["memory"] = size(memory, "--memory")
    if capacity := bounds(max_bytes=max_bytes, max_age=max_age):
        given["capacity"] = capacity
    options = Config.load(given)
    if options.memory is None:
        raise ConfigError("the server has no memory: give --memory 20GiB, or set memory")
    nbytes = int(options.memory)
    place = Place(socket or default_socket(), None if http is None else address("--http", http))

    def ready(opened: str, port: int | None) -> None:
        where = ""
        if place.http is not None and port is not None:
            where = f", {shown_address(place.http[0], port)}"
        typer.echo(
            f"kvshelf serve: {place.url}, {size_text(nbytes)} of memory, shelf {opened}{where}"
        )

    run(options, place, nbytes, ready=ready, lease_seconds=lease)
