"""Copies objects from one shelf to another and verifies each of them.

Owns what happens to each object, and the counts of a copy (:class:`CopyReport`). The shelf
publishes objects, in the place of bad ones too.

Contracts
---------
* Only verified objects are published: header, size and the hash of every tensor. An object
  that fails is left out, counted and reported.
* An object that the target has with the right size is not touched. One with the wrong size is
  replaced.
* An interrupted copy continues when it is started again: published objects are complete, and
  are skipped.
* The source is never changed. Objects that vanish from it during the copy are not a failure; a
  namespace folder that vanishes is an error, because the source may have been unmounted.
* Only objects and ``namespace.json`` are copied; temporaries and foreign files are not.
  An existing folder of the namespace at the target is used, whatever its slug.
* A storage error with one object is retried after growing pauses, then counted and reported.
  The copy ends with an error if the target is read-only or full, or if every object fails.

Threads
-------
:func:`copy_shelf` lists and probes on the calling thread and copies on the threads of
:mod:`kvshelf.tools.work`; large objects are copied one after another. `on_progress` and
`on_problem` are called on any of these threads, one call at a time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import Final

from kvshelf.capacity.parallel import threads_for
from kvshelf.errors import ConfigError, NotRegularError, ObjectNameError, StorageError
from kvshelf.format.keys import Chunk
from kvshelf.format.names import ParsedName, parse_path
from kvshelf.format.objects import ObjectFormat
from kvshelf.prompts import Prompt, TokenPrompt
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, Presence, find_together
from kvshelf.tools.prompt_objects import known_format, prompt_objects
from kvshelf.tools.work import Work

#: Objects that are probed at the target at once.
_BATCH: Final = 256
#: Objects over this size are copied one at a time, and those over the other one not at all: a
#: forged namespace may demand any size, and a copy holds objects in memory.
_LARGE_BYTES: Final = 256 << 20
_MOST_BYTES: Final = 4 << 30


@dataclass(slots=True)
class CopyReport:
    """The result of a copy. Counts objects, except `bytes` and `seconds`.

    Attributes
    ----------
    found : int
        Selected at the source.
    copied : int
        Published by this copy, or by the copy that a dry run predicts.
    repaired : int
        Of these, the ones that replaced a bad object.
    existed : int
        Already at the target.
    bad : int
        Not copied: the source's object is invalid.
    failed : int
        Not copied: the storage failed, or the target has a folder of that name.
    gone : int
        Vanished from the source before they were read.
    skipped_namespaces : int
        Left out, because without a namespace record objects cannot be verified.
    bytes : int
        Total size of the objects in `copied`.
    seconds : float
    """

    found: int = 0
    copied: int = 0
    repaired: int = 0
    existed: int = 0
    bad: int = 0
    failed: int = 0
    gone: int = 0
    skipped_namespaces: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> int:
        """Objects that are finished."""
        return self.copied + self.existed + self.bad + self.failed + self.gone

    @property
    def complete(self) -> bool:
        """Whether the target now has all selected objects."""
        return not (self.bad or self.failed or self.skipped_namespaces)


@dataclass(frozen=True, slots=True)
class _Item:
    """One selected object; `fmt` is of its kind."""

    fmt: ObjectFormat
    name: str
    parsed: ParsedName
    chunk: Chunk
    size: int


def copy_shelf(
    source: Shelf,
    target: Shelf,
    folders: Collection[str] | None = None,
    prompts: Sequence[Prompt | TokenPrompt] | None = None,
    *,
    dry_run: bool = False,
    report: CopyReport | None = None,
    on_progress: Callable[[CopyReport], None] = lambda report: None,
    on_problem: Callable[[str, str], None] = lambda name, text: None,
) -> CopyReport:
    """Copy the selected objects that the target does not have.

    Parameters
    ----------
    source, target : Shelf
        Open the source read-only if possible.
    folders : Collection of str, optional
        Only these namespace folders.
    prompts : Sequence of Prompt, optional
        Only the whole chunks of these prompts, which must be token ids. They are probed by
        their keys; nothing is listed.
    dry_run : bool
        Only count: do not change the target and do not read objects.
    report : CopyReport, optional
        Updated during the copy, so that it is available after an interruption.
    on_progress : Callable
        Called with the report after each change.
    on_problem : Callable
        Called with an object's name and a description of the problem.

    Returns
    -------
    CopyReport

    Raises
    ------
    StorageError
        If a shelf cannot be listed, a namespace vanishes from the source, or the target accepts
        no objects.
    """
    begin = time.monotonic()
    report = CopyReport() if report is None else report
    work = Work(report, on_progress, on_problem)
    large = threading.Lock()
    done: list[str] = []

    def copy(item: _Item) -> None:
        size = item.fmt.object_size(item.parsed.shard, item.parsed.tail_tokens)
        if size > _MOST_BYTES:
            text = f"it cannot be copied: {size} bytes, more than {_MOST_BYTES}"
            return work.problem("failed", item.name, text)
        with large if size > _LARGE_BYTES else contextlib.nullcontext():
            return _copy(source, target, item, memoryview(bytearray(size)), work)

    def missing() -> Iterator[_Item]:
        for item, there in _find(source, target, folders, prompts, work, done):
            if there:
                work.count(existed=1)
            elif dry_run:
                work.count(copied=1, bytes=item.size)
            else:
                yield item

    try:
        work.run_over(missing(), copy, threads_for(source.backend, target.backend))
        if report.gone:
            _check_there(source, done)
    finally:
        report.seconds = time.monotonic() - begin
    return report


def _copy(
    source: Shelf, target: Shelf, item: _Item, buffer: memoryview, work: Work[CopyReport]
) -> None:
    """Copy one object by way of a buffer of its size, and count it."""
    chunk = source.view(item.fmt).load_named(item.parsed, buffer)
    try:
        result = target.view(item.fmt).publish(ObjectRef(chunk, item.parsed.shard), buffer)
    except NotRegularError as error:
        text = f"it cannot be published: {error}; remove it, then start the copy again"
        return work.problem("failed", item.name, text)
    if result.value == "existed":
        return work.count(existed=1)
    return work.count(copied=1, bytes=len(buffer), repaired=int(result.value == "replaced"))


def _find(
    source: Shelf,
    target: Shelf,
    folders: Collection[str] | None,
    prompts: Sequence[Prompt | TokenPrompt] | None,
    work: Work[CopyReport],
    done: list[str],
) -> Iterator[tuple[_Item, bool]]:
    """Yield the selected objects, and whether the target has each; note which folders are done."""
    for info in source.namespaces():
        if folders is not None and info.folder not in folders:
            continue
        try:
            fmt = known_format(info)
        except ConfigError as error:
            work.problem("skipped_namespaces", info.folder, str(error))
            continue
        if prompts is None:
            items = _listed(source, info.folder, fmt, work)
        else:
            items = _of_prompts(source, info.folder, fmt, prompts)
        while batch := list(islice(items, _BATCH)):
            work.count(found=len(batch))
            kinds = [
                (target.view(own), [ObjectRef(one.chunk, one.parsed.shard) for one in some])
                for own, some in groupby(batch, key=attrgetter("fmt"))
            ]
            # If the probe gave no answer, the write will detect an existing object.
            for item, answer in zip(batch, chain(*find_together(kinds)), strict=True):
                yield item, answer is Presence.PRESENT
        done.append(info.folder)
        _check_there(source, [info.folder])


def _check_there(source: Shelf, folders: Sequence[str]) -> None:
    """Raise if a folder vanished from the source: its listing would just end, without an error."""
    there = set(source.backend.folders())
    for folder in folders:
        if folder not in there:
            raise StorageError(
                f"{source.url}: {folder} vanished while it was copied; check that the source is "
                "still mounted, and start it again"
            )


def _listed(
    source: Shelf, folder: str, fmt: ObjectFormat, work: Work[CopyReport]
) -> Iterator[_Item]:
    for row in source.objects(folder):
        try:
            own = fmt.of_name(row.parsed)
            chunk = own.named_chunk(row.parsed)
        except ObjectNameError as error:
            work.count(found=1)
            work.problem("bad", row.name, str(error))
            continue
        yield _Item(own, row.name, row.parsed, chunk, row.size)


def _of_prompts(
    source: Shelf, folder: str, fmt: ObjectFormat, prompts: Sequence[Prompt | TokenPrompt]
) -> Iterator[_Item]:
    """Yield the objects of the prompts that the source has, of all kinds."""
    for found in prompt_objects(source.backend, folder, fmt, prompts):
        parsed = parse_path(found.name)
        assert parsed is not None
        yield _Item(fmt.of(found.kind), found.name, parsed, found.chunk, found.size)
