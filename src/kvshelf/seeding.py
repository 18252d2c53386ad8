"""What ``kvshelf seed`` decides without an engine: which prompts to compute, and in what batches.

Owns the plan and the counts of a seeding. The engine is behind :class:`Computer`;
:mod:`kvshelf.vllm.seeding` has the one of vLLM.

Contracts
---------
* A prompt all of whose chunks are on the shelf is not computed, whoever stored them; so a
  seeding that was broken off goes on when it is started again.
* A prompt counts as stored when all its chunks were seen on the shelf. What an engine dropped
  (stores never wait for storage) is computed again, a few times.
* Only whole chunks are stored: a prompt shorter than a chunk leaves nothing behind.

Everything here runs on one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvshelf.chunkfile import ObjectFormat
from kvshelf.identity import Chunk, KeyChain, group_of_salt
from kvshelf.shelf import Shelf

_TRIES: Final = 3
_MOST_PROMPTS: Final = 64
_PROBED: Final = 256


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as an engine takes it: its line, its token ids and its cache_salt."""

    line: int
    tokens: Sequence[int]
    salt: str = ""


@dataclass(slots=True)
class SeedReport:
    """What became of the prompts.

    Attributes
    ----------
    prompts : int
        All of them.
    existed : int
        Not computed: all their chunks were on the shelf.
    short : int
        Not computed: shorter than a chunk.
    stored : int
        Computed, and on the shelf now.
    failed : int
        Computed, and not all on the shelf: the storage was too slow, or failed.
    chunks : int
        Chunks that are on the shelf now and were not before.
    tokens : int
        Tokens of the prompts that were computed.
    seconds : float
        Without the start of the engine.
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
        """Prompts that are dealt with."""
        return self.existed + self.short + self.stored + self.failed


class Computer(Protocol):
    """An engine on the shelf that is seeded."""

    def compute(self, prompts: Sequence[TokenPrompt]) -> None:
        """Compute prompts, and return when their stores are over, well or not."""


@dataclass(frozen=True, slots=True)
class _Todo:
    prompt: TokenPrompt
    chunks: Sequence[Chunk]


def seed_shelf(
    shelf: Shelf,
    fmt: ObjectFormat,
    prompts: Sequence[TokenPrompt],
    computer: Computer,
    *,
    batch_chunks: int,
    group_by_salt: bool = False,
    report: SeedReport | None = None,
    on_progress: Callable[[SeedReport], None] = lambda report: None,
    on_problem: Callable[[int, str], None] = lambda line, text: None,
) -> SeedReport:
    """Have an engine compute the prompts whose chunks are not on a shelf.

    Parameters
    ----------
    shelf : Shelf
        The one that the engine stores to.
    fmt : ObjectFormat
        Format of the engine's namespace.
    prompts : Sequence of TokenPrompt
    computer : Computer
        The engine.
    batch_chunks : int
        Chunks to compute at once at most (but for a prompt that is longer by itself): what
        staging has room for.
    group_by_salt : bool
        The option of this name that the engine has.
    report : SeedReport, optional
        Is counted in.
    on_progress : Callable
        Called with the report whenever it has changed.
    on_problem : Callable
        Called with the line of a prompt that failed, and what is wrong.

    Raises
    ------
    StorageError
        If the shelf cannot be asked.
    """
    begin = time.monotonic()
    report = SeedReport() if report is None else report
    report.prompts = len(prompts)
    # Prompts with a common prefix share chunks: each counts once.
    counted: set[tuple[bytes, str]] = set()
    try:
        for batch in _batches(shelf, fmt, prompts, batch_chunks, group_by_salt, report):
            new = {
                (chunk.key, chunk.group)
                for todo, known in batch
                for chunk, there in zip(todo.chunks, known, strict=True)
                if not there
            } - counted
            left = [todo for todo, _ in batch]
            report.tokens += sum(len(todo.prompt.tokens) for todo in left)
            for _ in range(_TRIES):
                computer.compute([todo.prompt for todo in left])
                before, left = left, []
                for todo in before:
                    present = shelf.present(fmt, todo.chunks)
                    arrived = {
                        (chunk.key, chunk.group)
                        for chunk, there in zip(todo.chunks, present, strict=True)
                        if there
                    } & new
                    report.chunks += len(arrived)
                    counted |= arrived
                    new -= arrived
                    if all(present):
                        report.stored += 1
                    else:
                        left.append(todo)
                on_progress(report)
                if not left:
                    break
            for todo in left:
                report.failed += 1
                on_problem(
                    todo.prompt.line,
                    "computed, but not all of its chunks were stored: the storage is too slow or "
                    "fails; see the log, and raise staging_bytes or deadlines",
                )
            on_progress(report)
    finally:
        report.seconds = time.monotonic() - begin
    on_progress(report)
    return report


def _batches(
    shelf: Shelf,
    fmt: ObjectFormat,
    prompts: Sequence[TokenPrompt],
    batch_chunks: int,
    group_by_salt: bool,
    report: SeedReport,
) -> Iterator[list[tuple[_Todo, list[bool]]]]:
    """Yield prompts to compute, with what is there of their chunks."""
    batch: list[tuple[_Todo, list[bool]]] = []
    missing = 0
    for prompt in prompts:
        group = group_of_salt(prompt.salt) if group_by_salt and prompt.salt else "_"
        chain = KeyChain(fmt.namespace.digest, fmt.chunk_size, salt=prompt.salt, group=group)
        chunks = chain.extend(prompt.tokens)
        if not chunks:
            report.short += 1
            continue
        present = [
            there
            for start in range(0, len(chunks), _PROBED)
            for there in shelf.present(fmt, chunks[start : start + _PROBED])
        ]
        if all(present):
            report.existed += 1
            continue
        needed = present.count(False)
        if batch and (missing + needed > batch_chunks or len(batch) == _MOST_PROMPTS):
            yield batch
            batch, missing = [], 0
        batch.append((_Todo(prompt, chunks), present))
        missing += needed
    if batch:
        yield batch
