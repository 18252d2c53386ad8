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
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Inspect, copy and fill a kvshelf store, and check an installation of kvshelf.",
    epilog=f"Exit codes: {_CODES}.",
)
#: The commands in the order of the help, and an example of each.
_EXAMPLES = {
    ls: "/mnt/kv --by age",
    verify: "/mnt/kv --sample 1%",
    explain: "/mnt/kv prompts.jsonl",
    copy: "/mnt/kv s3://bucket/kv --since 7d",
    gc: "/mnt/kv --max-bytes 2TiB --yes",
    rm: "/mnt/kv --unused-for 2w --yes",
    pin: "/mnt/kv system-prompts prompts.jsonl --until 7d",
    seed: "/mnt/kv prompts.jsonl --model meta-llama/Llama-3.1-8B-Instruct",
    serve: "/mnt/kv --memory 20GiB",
    doctor: "/mnt/kv",
}
for each, example in _EXAMPLES.items():
    app.command(epilog=f"Example: kvshelf {each.__name__} {example}")(guarded(each))


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
