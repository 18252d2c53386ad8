"""The commands of ``kvshelf``, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from kvshelf import __version__
from kvshelf.cli.common import EXIT_CODES, guarded
from kvshelf.cli.copy import copy
from kvshelf.cli.doctor import doctor
from kvshelf.cli.explain import explain
from kvshelf.cli.gc import gc
from kvshelf.cli.ls import ls
from kvshelf.cli.pin import pin
from kvshelf.cli.rm import rm
from kvshelf.cli.seed import seed
from kvshelf.cli.serve import serve
from kvshelf.cli.verify import verify

_CODES = ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Inspect, copy and fill a kvshelf store, and check an installation of kvshelf.",
    epilog=f"Exit codes: {_CODES}.",
)
_COMMANDS = (
    *(ls, verify, explain, copy, gc, seed, pin, rm),
    *(serve, doctor),
)
for each in _COMMANDS:
    app.command()(guarded(each))


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"kvshelf {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass
