"""The engine-independent part of ``kvshelf seed``: which prompts to compute, in which batches.

Owns the plan and the counts of a seeding. :class:`Computer` is the interface of the engine;
:mod:`kvshelf.vllm.seeding` implements it with vLLM.

Contracts
---------
* A prompt is not computed if all its chunks are on the shelf, so an interrupted seeding
  continues when it is started again. Of windows and states that is what its longest hit needs.
* A prompt counts as stored when all of this was found on the shelf. A prompt with dropped
  chunks (stores never wait for storage) is computed again, a few times.
* Only whole chunks are stored: a prompt shorter than a chunk stores nothing.

Everything here runs on one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from kvshelf.format.hit_rule import HitRule
from kvshelf.format.keys import Chunk, KeyChain, salt_group_of
from kvshelf.format.kinds import FULL, Kind
from kvshelf.format.objects import ObjectFormat
from kvshelf.prompts import TokenPrompt
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import Presence, find_pieces

_ATTEMPTS: Final = 3
_MAX_PROMPTS: Final = 64
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
    """A prompt, what of it can be on the shelf, and what of that was missing."""

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
    on_progress: Callable[[SeedReport], None] = lambda report: None,
    on_problem: Callable[[int, str], None] = lambda line, text: None,
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
    on_progress : Callable
        Called with the report after each change.
    on_problem : Callable
        Called with the line of a failed prompt and a description of the problem.

    Raises
    ------
    StorageError
        If the shelf cannot be probed.
    """
    begin = time.monotonic()
    report = SeedReport() if report is None else report
    report.prompts = len(prompts)
    # Prompts with a common prefix share chunks: each counts once.
    counted: set[_Piece] = set()
    try:
        for left in _batches(shelf, fmt, prompts, batch_chunks, group_by_salt, report):
            report.tokens += sum(len(todo.prompt.tokens) for todo in left)
            for _ in range(_ATTEMPTS):
                computer.compute([todo.prompt for todo in left])
                again = []
                for todo in left:
                    missing = _missing(shelf, fmt, todo.pieces)
                    arrived = {one for one in todo.missing - missing if one[0] == fmt.kind}
                    report.chunks += len(arrived - counted)
                    counted |= arrived
                    if missing:
                        again.append(todo)
                report.stored += len(left) - len(again)
                on_progress(report)
                left = again
                if not left:
                    break
            for todo in left:
                report.failed += 1
                on_problem(
                    todo.prompt.line,
                    "computed, but not all of its chunks were stored: the storage is too slow or "
                    "fails; see the log",
                )
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
        held = sum(len(todo.missing) for todo in batch)
        if batch and (held + len(missing) > batch_chunks or len(batch) == _MAX_PROMPTS):
            yield batch
            batch = []
        batch.append(_Todo(prompt, pieces, missing))
    if batch:
        yield batch


def _pieces(fmt: ObjectFormat, chunks: Sequence[Chunk], tokens: int) -> list[_Piece]:
    """Return what of a prompt can be on a shelf and is of use, grouped by kind."""
    # A hit leaves one token to compute; full chunks are of use to longer prompts too.
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
        wanted = [(kind, chunk, range(views[kind].fmt.shards)) for kind, chunk in part]
        found = zip(part, find_pieces(views, wanted), strict=True)
        missing |= {piece for piece, answers in found if {*answers} != {Presence.PRESENT}}
    return missing
