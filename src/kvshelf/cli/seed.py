"""``kvshelf seed``: an engine computes prompts and stores their KV on the shelf.

All prompts are read and checked before the engine starts. The engine is vLLM
(:mod:`kvshelf.vllm.seeding`); :mod:`kvshelf.tools.seeding` decides what it computes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvshelf.cli.codes import GIVEN
from kvshelf.cli.common import DryRunOption, JsonOption, number, option, summary
from kvshelf.cli.progress import Display
from kvshelf.cli.prompts import PromptsArgument
from kvshelf.cli.shelves import OneShelf, find_shelf
from kvshelf.config import Config
from kvshelf.errors import ConfigError
from kvshelf.prompts import Prompt, read_prompts
from kvshelf.tools.seeding import SeedReport, seed_shelf


def seed(
    shelf: OneShelf,
    prompts: PromptsArgument,
    model: Annotated[str, typer.Option("--model", help="The model, as for `vllm serve`.")],
    engine_arg: Annotated[
        list[str] | None,
        option(
            "--engine-arg",
            "NAME=VALUE",
            "An argument of vLLM's engine, such as tensor_parallel_size=2; VALUE may be JSON."
            " Repeatable.",
        ),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compute prompts with an offline vLLM and store them; stored prompts are skipped."""
    arguments = _engine_arguments(engine_arg or [])
    wanted = read_prompts(prompts)
    if Path(model).is_absolute() and not Path(model, "config.json").is_file():
        raise ConfigError(f"--model: {model} is no folder of a model: it has no config.json")
    url, options = find_shelf(shelf)
    report = SeedReport(prompts=len(wanted))
    display = Display("seeding", as_json=as_json)
    would = f"would read {number(len(wanted), 'prompt')} with {model}, and store them on {url}\n"
    problems: list[int] = []

    def problem(line: int, text: str) -> None:
        problems.append(line)
        display.problem(f"{prompts}: line {line}", text, line=line)

    def work() -> None:
        if not dry_run:
            _configure(url, options)
            _run(wanted, model, url, arguments, report, display, problem)

    display.run(
        work,
        row=lambda: asdict(report) | {"dry_run": dry_run, "shelf": url},
        summary=lambda: would if dry_run else _summary(report),
        complete=lambda: not problems,
    )


def _configure(url: str, options: dict[str, Any]) -> None:
    """Have the engine, which reads the environment, open the shelf with its options only."""
    os.environ["KVSHELF_STORAGE_OPTIONS"] = json.dumps(options)
    if GIVEN["config"]:
        os.environ["KVSHELF_CONFIG"] = GIVEN["config"]
    if Config.load({"shared_storage_path": url, "server": None}).storage_options != options:
        raise ConfigError(f"the storage_options in KVSHELF_CONFIG are not those of {url}; leave it")


def _run(
    wanted: list[Prompt],
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
            arguments[name.lstrip("-").replace("-", "_")] = json.loads(value)
        except ValueError:
            arguments[name.lstrip("-").replace("-", "_")] = value
    return arguments


def _summary(report: SeedReport) -> str:
    rate = report.tokens / report.seconds if report.seconds else 0.0
    return summary(
        [
            f"{number(report.prompts, 'prompt')}: {report.stored} computed and stored"
            f" ({number(report.chunks, 'chunk')}, {report.tokens} tokens in"
            f" {report.seconds:.1f} s, {rate:.0f} tokens/s)",
            f"{report.existed} there already",
        ],
        (report.short, "shorter than a chunk"),
        (report.failed, "failed"),
    )
