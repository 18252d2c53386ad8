"""``kvshelf seed``: an engine computes prompts and stores their KV on the shelf.

Owns which prompts are computed and in which batches, the counts of a seeding, and the command.
:class:`Computer` is the interface of the engine; :mod:`kvshelf.vllm.seeding` implements it with
vLLM. All prompts are read and checked before the engine starts.

Contracts
---------
* A prompt is not computed if all its chunks are on the shelf, so an interrupted seeding
  continues when it is started again. Of windows and states, only the pieces for its longest hit
  must be there.
* A prompt counts as stored when all of this was found on the shelf. A prompt with dropped
  chunks (stores never wait for storage) is computed again, a few times.
* Only whole chunks are stored: a prompt shorter than a chunk stores nothing.

Everything here runs on one thread.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, TypeAlias

import typer

from kvshelf.cli.common import (
    COMMON_OPTIONS,
    DryRunOption,
    JsonOption,
    count_text,
    option,
    summary,
)
from kvshelf.cli.progress import Display
from kvshelf.cli.prompts import PromptsArgument
from kvshelf.cli.shelves import OneShelf, find_shelf
from kvshelf.config import Config
from kvshelf.errors import ConfigError
from kvshelf.format.hit_rule import HitRule
from kvshelf.format.keys import Chunk, KeyChain, salt_group_of
from kvshelf.format.kinds import FULL, Kind
from kvshelf.format.objects import ObjectFormat
from kvshelf.prompts import SourcePrompt, TokenPrompt, read_prompts
from kvshelf.shelf.shelf import Shelf, open_shelf
from kvshelf.shelf.view import Presence, find_pieces

#: Times that a prompt is computed before it counts as failed.
_ATTEMPTS: Final = 3
#: Most prompts that are computed in one batch.
_MAX_PROMPTS: Final = 64
#: Chunks that are probed in one call.
_PROBE_BATCH: Final = 256


@dataclass(slots=True)
class SeedReport:
    """The result of a seeding.

    Attributes
    ----------
    prompts : int
        All prompts.
    existed : int
        Not computed: all their chunks were on the shelf.
    short : int
        Not computed: shorter than a chunk.
    stored : int
        Computed, and now on the shelf.
    failed : int
        Computed, but not completely stored: the storage was too slow, or failed.
    chunks : int
        Chunks that were added to the shelf.
    tokens : int
        Tokens of the prompts that were computed.
    seconds : float
        Duration, without the start of the engine.
    """

    prompts: int = 0
    existed: int = 0
    short: int = 0
    stored: int = 0
    failed: int = 0
    chunks: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> int:
        """Prompts that are finished."""
        return self.existed + self.short + self.stored + self.failed


class Computer(Protocol):
    """An engine that stores to the shelf."""

    def compute(self, prompts: Sequence[TokenPrompt]) -> None:
        """Compute prompts; return when their stores have finished or failed."""


#: One kind of a chunk.
_Piece: TypeAlias = "tuple[Kind, Chunk]"


@dataclass(frozen=True, slots=True)
class _Todo:
    """A prompt, the pieces of it that the shelf can hold, and those that it does not hold yet."""

    prompt: TokenPrompt
    pieces: Sequence[_Piece]
    missing: set[_Piece]


def seed_shelf(
    shelf: Shelf,
    fmt: ObjectFormat,
    prompts: Sequence[TokenPrompt],
    computer: Computer,
    *,
    batch_chunks: int,
    group_by_salt: bool = False,
    report: SeedReport | None = None,
    display: Display | None = None,
    prompts_file: str = "the prompts",
) -> SeedReport:
    """Let an engine compute the prompts whose chunks are missing from a shelf.

    Parameters
    ----------
    shelf : Shelf
        The shelf that the engine stores to.
    fmt : ObjectFormat
        Format of the engine's namespace, of its first kind. Chunks of this kind are counted.
    prompts : Sequence of TokenPrompt
    computer : Computer
        The engine.
    batch_chunks : int
        Largest number of chunks to compute at once: so many fit into memory. A longer prompt
        is computed alone.
    group_by_salt : bool
        The engine's option of this name.
    report : SeedReport, optional
        Updated during the seeding.
    display : Display, optional
        Shows the report after each change, and each prompt that failed.
    prompts_file : str
        Name of the file of prompts, for messages.

    Raises
    ------
    StorageError
        If the shelf cannot be probed.
    """
    begin = time.monotonic()
    report = SeedReport() if report is None else report
    display = Display("seeding") if display is None else display
    report.prompts = len(prompts)
    # Prompts with a common prefix share chunks: each counts once.
    counted: set[_Piece] = set()
    try:
        for batch in _batches(shelf, fmt, prompts, batch_chunks, group_by_salt, report):
            report.tokens += sum(len(todo.prompt.tokens) for todo in batch)
            for _ in range(_ATTEMPTS):
                computer.compute([todo.prompt for todo in batch])
                again = []
                for todo in batch:
                    missing = _missing(shelf, fmt, todo.pieces)
                    arrived = {piece for piece in todo.missing - missing if piece[0] == fmt.kind}
                    report.chunks += len(arrived - counted)
                    counted |= arrived
                    if missing:
                        again.append(todo)
                report.stored += len(batch) - len(again)
                display.show(report.done, report.prompts)
                batch = again
                if not batch:
                    break
            for todo in batch:
                report.failed += 1
                display.problem(
                    f"{prompts_file}: line {todo.prompt.line}",
                    "computed, but not all of its chunks were stored: the storage is too slow or "
                    "fails; see the log",
                    line=todo.prompt.line,
                )
    finally:
        report.seconds = time.monotonic() - begin
    display.show(report.done, report.prompts)
    return report


def _batches(
    shelf: Shelf,
    fmt: ObjectFormat,
    prompts: Sequence[TokenPrompt],
    batch_chunks: int,
    group_by_salt: bool,
    report: SeedReport,
) -> Iterator[list[_Todo]]:
    """Yield batches of prompts to compute."""
    batch: list[_Todo] = []
    for prompt in prompts:
        group = salt_group_of(prompt.salt) if group_by_salt and prompt.salt else "_"
        chain = KeyChain(fmt.namespace.digest, fmt.chunk_size, salt=prompt.salt, salt_group=group)
        pieces = _pieces(fmt, chain.extend(prompt.tokens), len(prompt.tokens))
        missing = _missing(shelf, fmt, pieces)
        if not missing:
            report.existed += bool(pieces)
            report.short += not pieces
            continue
        batch_missing = sum(len(todo.missing) for todo in batch)
        is_full = batch_missing + len(missing) > batch_chunks or len(batch) == _MAX_PROMPTS
        if batch and is_full:
            yield batch
            batch = []
        batch.append(_Todo(prompt, pieces, missing))
    if batch:
        yield batch


def _pieces(fmt: ObjectFormat, chunks: Sequence[Chunk], tokens: int) -> list[_Piece]:
    """Return the pieces of a prompt that a shelf can hold and a hit can use, grouped by kind."""
    # A hit leaves one token to compute. Longer prompts use the full chunks too.
    last = (tokens - 1) // fmt.chunk_size
    needed = HitRule.of(fmt.namespace.record).needs(last)
    if FULL in needed:
        needed[FULL] = range(len(chunks))
    return [(kind, chunks[index]) for kind, indices in needed.items() for index in indices]


def _missing(shelf: Shelf, fmt: ObjectFormat, pieces: Sequence[_Piece]) -> set[_Piece]:
    """Return the pieces of which an object is not on the shelf."""
    views = {kind: shelf.view(fmt.of(kind)) for kind in fmt.kinds}
    missing: set[_Piece] = set()
    for start in range(0, len(pieces), _PROBE_BATCH):
        part = pieces[start : start + _PROBE_BATCH]
        probes = [(kind, chunk, range(views[kind].fmt.shards)) for kind, chunk in part]
        probed = zip(part, find_pieces(views, probes), strict=True)
        missing |= {piece for piece, answers in probed if {*answers} != {Presence.PRESENT}}
    return missing


# ----------------------------------------------------------------------------- the command


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
    sources = read_prompts(prompts)
    if Path(model).is_absolute() and not Path(model, "config.json").is_file():
        raise ConfigError(f"--model: {model} is no folder of a model: it has no config.json")
    url, options = find_shelf(shelf)
    report = SeedReport(prompts=len(sources))
    display = Display("seeding", as_json=as_json)
    with display.working():
        if not dry_run:
            _configure(url, options)
            _run(sources, model, url, arguments, report, display, str(prompts))
    if dry_run:
        count = count_text(len(sources), "prompt")
        text = f"would read {count} with {model}, and store them on {url}\n"
    else:
        text = _summary(report)
    row = asdict(report) | {"dry_run": dry_run, "shelf": url}
    display.finish(row, text, complete=not report.failed)


def _configure(url: str, options: dict[str, Any]) -> None:
    """Have the engine, which reads the environment, open the shelf with its options only."""
    os.environ["KVSHELF_STORAGE_OPTIONS"] = json.dumps(options)
    if COMMON_OPTIONS["config"]:
        os.environ["KVSHELF_CONFIG"] = COMMON_OPTIONS["config"]
    if Config.load({"shared_storage_path": url, "server": None}).storage_options != options:
        raise ConfigError(f"the storage_options in KVSHELF_CONFIG are not those of {url}; leave it")


def _run(
    sources: list[SourcePrompt],
    model: str,
    url: str,
    arguments: dict[str, Any],
    report: SeedReport,
    display: Display,
    prompts_file: str,
) -> None:
    from kvshelf.vllm.seeding import OfflineEngine

    display.stage("starting the engine")
    with OfflineEngine(model, url, arguments) as engine:
        config = engine.config
        display.stage("reading prompts")
        prompts = engine.render(sources)
        display.stage("waiting for the fingerprint of the weights")
        fmt = ObjectFormat(engine.namespace())
        with open_shelf(url, storage_options=config.storage_options, read_only=True) as opened:
            seed_shelf(
                opened,
                fmt,
                prompts,
                engine,
                batch_chunks=engine.batch_chunks(fmt),
                group_by_salt=config.group_by_salt,
                report=report,
                display=display,
                prompts_file=prompts_file,
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
            f"{count_text(report.prompts, 'prompt')}: {report.stored} computed and stored"
            f" ({count_text(report.chunks, 'chunk')}, {report.tokens} tokens in"
            f" {report.seconds:.1f} s, {rate:.0f} tokens/s)",
            f"{report.existed} there already",
        ],
        (report.short, "shorter than a chunk"),
        (report.failed, "failed"),
    )
