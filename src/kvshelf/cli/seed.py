"""``kvshelf seed``: an engine computes prompts and stores their KV on the shelf.

All prompts are read and checked before the engine starts. The engine is vLLM
(:mod:`kvshelf.vllm.seeding`); :mod:`kvshelf.tools.seeding` decides what it computes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvshelf.cli.common import (
    PROBLEM,
    DryRunOption,
    JsonOption,
    ShelfOption,
    find_shelf,
    interruption,
    json_object,
    message,
    write_json,
)
from kvshelf.cli.prompts import PromptsOption, one_file
from kvshelf.errors import ConfigError
from kvshelf.tools.prompts import read_prompts
from kvshelf.tools.seeding import SeedReport, seed_shelf


def seed(
    model: Annotated[str, typer.Option("--model", help="The model, as for `vllm serve`.")],
    prompts: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPTS",
            help="JSON lines: texts, lists of token ids, or lists of chat messages.",
        ),
    ] = None,
    prompts_option: PromptsOption = None,
    shelf: ShelfOption = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-arg",
            metavar="NAME=VALUE",
            help="An argument of vLLM's engine, such as tensor_parallel_size=2. Repeatable.",
        ),
    ] = None,
    engine_args: Annotated[
        str | None, typer.Option(metavar="JSON", help="Engine arguments as one JSON object.")
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compute prompts with an offline vLLM and store them; stored prompts are skipped."""
    arguments = _engine_arguments(engine_args, engine_arg or [])
    file = one_file(prompts, prompts_option)
    wanted = read_prompts(file)
    url, _ = find_shelf(shelf)
    report = SeedReport(prompts=len(wanted))
    problems: list[tuple[int, str]] = []
    try:
        if not dry_run:
            _run(wanted, model, url, arguments, report, problems)
        ended = None
    except KeyboardInterrupt:
        ended = interruption()
    for line, text in problems:
        message(f"{file}: line {line}: {text}", error=False)
    if as_json:
        write_json(
            asdict(report)
            | {
                "dry_run": dry_run,
                "interrupted": ended is not None,
                "shelf": url,
                "problems": [
                    {"name": f"{file}: line {line}", "line": line, "problem": text}
                    for line, text in problems
                ],
            }
        )
    else:
        would = f"would read {len(wanted)} prompts with {model}, and store them on {url}\n"
        sys.stdout.write(would if dry_run else _summary(report))
    if ended is not None:
        raise ended
    if problems:
        raise typer.Exit(PROBLEM)


def _run(
    wanted: list[Any],
    model: str,
    url: str,
    arguments: dict[str, Any],
    report: SeedReport,
    problems: list[tuple[int, str]],
) -> None:
    from kvshelf.format.objects import ObjectFormat
    from kvshelf.shelf.shelf import open_shelf
    from kvshelf.vllm.seeding import OfflineEngine

    console = Console(stderr=True, highlight=False)
    with console.status("starting the engine"):
        engine = OfflineEngine(model, url, arguments)
    with engine:
        config = engine.config
        with console.status("reading prompts"):
            rendered = engine.render(wanted)
        with console.status("waiting for the fingerprint of the weights"):
            fmt = ObjectFormat(engine.namespace())
        opened = open_shelf(
            url, storage_options=config.storage_options, read_only=True, deadlines=config.deadlines
        )
        with opened, _bar(console) as progress:
            task = progress.add_task("seeding", total=len(rendered))
            seed_shelf(
                opened,
                fmt,
                rendered,
                engine,
                batch_chunks=engine.batch_chunks(fmt),
                group_by_salt=config.group_by_salt,
                report=report,
                on_progress=lambda now: progress.update(task, completed=now.done),
                on_problem=lambda line, text: problems.append((line, text)),
            )


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _engine_arguments(text: str | None, pairs: list[str]) -> dict[str, Any]:
    arguments = {} if text is None else json_object(text, "--engine-args")
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--engine-arg: found {pair!r}; expected NAME=VALUE")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return {name.lstrip("-").replace("-", "_"): value for name, value in arguments.items()}


def _summary(report: SeedReport) -> str:
    rate = report.tokens / report.seconds if report.seconds else 0.0
    parts = [
        f"{report.prompts} prompts: {report.stored} computed and stored "
        f"({report.chunks} chunks, {report.tokens} tokens in {report.seconds:.1f} s, "
        f"{rate:.0f} tokens/s)",
        f"{report.existed} there already",
    ]
    for count, what in (
        (report.short, "shorter than a chunk"),
        (report.failed, "failed"),
    ):
        if count:
            parts.append(f"{count} {what}")
    return "; ".join(parts) + "\n"
