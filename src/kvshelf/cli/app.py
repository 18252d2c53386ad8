"""The commands of ``kvshelf``, put together.

Owns the order of the commands, their help and examples, and the options that all of them have. The
module of a command is imported when that command is run or completed, not for the help of
``kvshelf``.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from kvshelf import __version__
from kvshelf.cli.common import COMMON_OPTIONS, EXIT_CODES, ending_in_one_line, guarded, option

_CODES: Final = ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())
#: What each command does, and the arguments of an example, in the order of the help.
COMMANDS: Final = {
    "ls": ("List namespaces, their space and last use, bounds, pins.", "/mnt/kv --by age"),
    "verify": ("Verify objects, all or some; show their headers; repair.", "/mnt/kv --sample 1%"),
    "explain": ("Say why prompts miss.", "/mnt/kv prompts.jsonl"),
    "copy": (
        "Copy a shelf or a part of it: verified, only what is missing.",
        "/mnt/kv s3://bucket/kv --namespace llama",
    ),
    "gc": (
        "Delete leftovers, and chunks above the bounds that are given.",
        "/mnt/kv --max-bytes 2TiB --yes",
    ),
    "rm": ("Delete chosen objects.", "/mnt/kv --unused-for 2w --yes"),
    "pin": (
        "Keep chunks from being deleted; remove pins (`ls` lists them).",
        "/mnt/kv system-prompts prompts.jsonl --until 7d",
    ),
    "seed": (
        "Compute prompts with an offline vLLM and store them.",
        "/mnt/kv prompts.jsonl --model Qwen/Qwen3-8B",
    ),
    "serve": ("Serve memory and a shelf to all engines of this machine.", "/mnt/kv --memory 20GiB"),
    "doctor": ("Check the installation and the access to a shelf.", "/mnt/kv"),
}


class _Commands(TyperGroup):
    """The commands; the modules of those that are not used are not imported."""

    _listing = False

    def __init__(self, **attributes: Any) -> None:
        # Of their names typer makes the help, and what it suggests for a misspelt one.
        super().__init__(**attributes | {"commands": dict.fromkeys(COMMANDS)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        does, example = COMMANDS[cmd_name]
        if self._listing:
            return TyperCommand(cmd_name, help=does)
        module = "rm" if cmd_name == "gc" else cmd_name
        function = getattr(importlib.import_module(f"kvshelf.cli.{module}"), cmd_name)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(cmd_name, epilog=f"Example: kvshelf {cmd_name} {example}")(guarded(function))
        command: Any = typer.main.get_command(alone)
        command.params += [param for param in self.params if param.name in COMMON_OPTIONS]
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        super().format_help(ctx, formatter)
        self._listing = False

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] == "help":
            args = [*args[1:2], "--help"]
        if args[0] == "--help":
            typer.echo(ctx.get_help())
            ctx.exit()
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **more: Any) -> Any:
        with ending_in_one_line(), _plain_errors():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        with ending_in_one_line(), _plain_errors():
            return super().invoke(ctx)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Say where an option belongs that stands before a command, and drop pydantic's prefix."""
    try:
        yield
    except Exception as raised:
        error: Any = raised
        if getattr(error, "option_name", None) in ("--yes", "--dry-run", "--json", "--namespace"):
            error.message += "; if the command has it, write it behind the command's name"
        elif hasattr(error, "message"):
            error.message = error.message.replace("Value error, ", "")
        raise


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Inspect, copy and fill a kvshelf store, and check an installation of kvshelf.",
    epilog=f"Exit codes: {_CODES}.",
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"kvshelf {__version__}")
        raise typer.Exit


def _keep(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    """Remember an option that stands before or behind the name of the command."""
    if value or ctx.parent is None:
        COMMON_OPTIONS[str(param.name)] = value
    return value


_KEPT: Final[dict[str, Any]] = {"callback": _keep, "expose_value": False}


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Also write the log and tracebacks.", **_KEPT),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            callback=_keep,
            expose_value=False,
            help="Write only results and errors.",
        ),
    ] = False,
    config: Annotated[
        str | None,
        option(
            "--config",
            "FILE",
            "YAML file with shared_storage_path and storage_options [env: KVSHELF_CONFIG].",
            **_KEPT,
        ),
    ] = None,
    storage_options: Annotated[
        str | None,
        option(
            "--storage-options",
            "JSON",
            "Options of the shelf that is named [env: KVSHELF_STORAGE_OPTIONS, which other users"
            " cannot see].",
            **_KEPT,
        ),
    ] = None,
) -> None:
    pass
