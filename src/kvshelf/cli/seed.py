"""``kvshelf seed``: an engine computes prompts and stores their KV on the shelf.

All prompts are read and checked before the engine starts. The engine is vLLM
(:mod:`kvshelf.vllm.seeding`); :mod:`kvshelf.tools.seeding` decides what it computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvshelf.cli.common import (
    DryRunOption,
    JsonOption,
    OneShelf,
    find_shelf,
    summary,
)
from kvshelf.cli.progress import Display
from kvshelf.cli.prompts import PromptsArgument
from kvshelf.errors import ConfigError
from kvshelf.tools.prompts import read_prompts
from kvshelf.tools.seeding import SeedReport, seed_shelf


def seed(
    shelf: OneShelf,
    prompts: PromptsArgument,
    model: Annotated[str, typer.Option("--model", help="The model, as for `vllm serve`.")],
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-arg",
            metavar="NAME=VALUE",
            help="An argument of vLLM's engine, such as tensor_parallel_size=2; VALUE may be JSON."
            " Repeatable.",
        ),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compute prompts with an offline vLLM and store them; stored prompts are skipped."""
    arguments = _engine_arguments(engine_arg or [])
    wanted = read_prompts(prompts)
    url, _ = find_shelf(shelf)
    report = SeedReport(prompts=len(wanted))
    display = Display("seeding", as_json=as_json, things="prompts")
    would = f"would read {len(wanted)} prompts with {model}, and store them on {url}\n"
    problems: list[int] = []

    def problem(line: int, text: str) -> None:
        problems.append(line)
        display.problem(f"{prompts}: line {line}", text, line=line)

    def work() -> None:
        if not dry_run:
            _run(wanted, model, url, arguments, report, display, problem)

    display.run(
        work,
        row=lambda: asdict(report) | {"dry_run": dry_run, "shelf": url},
        summary=lambda: would if dry_run else _summary(report),
        complete=lambda: not problems,
    )


def _run(
    wanted: list[Any],
    model: str,
    url: str,
    arguments: dict[str, Any],
    report: SeedReport,
    display: Display,
    on_problem: Callable[[int, str], None],
) -> None:
    from kvshelf.format.objects import ObjectFormat
    from kvshelf.shelf.shelf import open_shelf
    from kvshelf.vllm.seeding import OfflineEngine

    display.stage("starting the engine")
    with OfflineEngine(model, url, arguments) as engine:
        config = engine.config
        display.stage("reading prompts")
        rendered = engine.render(wanted)
        display.stage("waiting for the fingerprint of the weights")
        fmt = ObjectFormat(engine.namespace())
        with open_shelf(url, storage_options=config.storage_options, read_only=True) as opened:
            seed_shelf(
                opened,
                fmt,
                rendered,
                engine,
                batch_chunks=engine.batch_chunks(fmt),
                group_by_salt=config.group_by_salt,
                report=report,
                on_progress=lambda now: display.show(now.done, len(rendered)),
                on_problem=on_problem,
            )


def _engine_arguments(pairs: list[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
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
    return summary(
        [
            f"{report.prompts} prompts: {report.stored} computed and stored "
            f"({report.chunks} chunks, {report.tokens} tokens in {report.seconds:.1f} s, "
            f"{rate:.0f} tokens/s)",
            f"{report.existed} there already",
        ],
        (report.short, "shorter than a chunk"),
        (report.failed, "failed"),
    )
