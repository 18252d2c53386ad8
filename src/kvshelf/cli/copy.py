"""``kvshelf copy``: copies objects from one shelf to another and verifies each copied object.

Owns the selection of objects, the counts of a copy (:class:`CopyReport`), and the command. The
target shelf publishes each object, and replaces a bad one. :class:`~kvshelf.cli.progress.Work`
counts the objects that vanish, are bad or fail.

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
  If the target has a folder of the namespace, it is used, even if its slug differs.
* A storage error with one object is retried after growing pauses, then counted and reported.
  The copy ends with an error if the target is read-only or full, or if every object fails.

:func:`copy_shelf` lists and probes on the calling thread and copies on the threads of
:class:`~kvshelf.cli.progress.Work`; large objects are copied one after another.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvshelf.capacity.parallel import threads_for
from kvshelf.cli.common import (
    COMMON_OPTIONS,
    DryRunOption,
    JsonOption,
    option,
    pace_text,
    summary,
)
from kvshelf.cli.listing import format_of
from kvshelf.cli.progress import Display, Work
from kvshelf.cli.prompts import PromptsOption, prompt_chunks, stored_objects, token_prompts
from kvshelf.cli.shelves import (
    PATIENT,
    NamespacesOption,
    find_folders,
    is_inside,
    is_local,
    located,
    open_patiently,
    options_of,
)
from kvshelf.cli.values import json_object, read_text
from kvshelf.errors import ConfigError, NotRegularError, ObjectNameError, StorageError, size_text
from kvshelf.format.keys import Chunk
from kvshelf.format.names import ParsedName, parse_path
from kvshelf.format.objects import ObjectFormat
from kvshelf.prompts import TokenPrompt
from kvshelf.shelf.shelf import Shelf, open_shelf
from kvshelf.shelf.view import ObjectRef, Presence, find_together

#: Objects that are probed at the target in one call.
_BATCH: Final = 256
#: Objects above this size are copied one at a time.
_LARGE_BYTES: Final = 256 << 20
#: Objects above this size are refused: a copy holds objects in memory, and a forged namespace may
#: demand any size.
_MAX_BYTES: Final = 4 << 30


@dataclass(slots=True)
class CopyReport:
    """The result of a copy. Counts objects, unless said otherwise.

    Attributes
    ----------
    found : int
        Selected at the source.
    copied : int
        Published; in a dry run, expected to be published.
    repaired : int
        The part of `copied` that replaced a bad object at the target.
    existed : int
        Already at the target.
    bad : int
        Not copied: the source's object is invalid.
    failed : int
        Not copied: the storage failed, the object is too large, or the target has a folder where
        the object's file belongs.
    gone : int
        Vanished from the source before they were read.
    skipped_namespaces : int
        Namespaces without a usable record, by which their objects could be verified.
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
        """Whether no object was left out, except those that vanished from the source."""
        return not (self.bad or self.failed or self.skipped_namespaces)


@dataclass(frozen=True, slots=True)
class _SourceObject:
    """One selected object: the format of its kind, and its name below the root of the shelf."""

    fmt: ObjectFormat
    name: str
    parsed: ParsedName
    chunk: Chunk
    size: int


def copy_shelf(
    source: Shelf,
    target: Shelf,
    folders: Collection[str] | None = None,
    prompts: Sequence[TokenPrompt] | None = None,
    *,
    dry_run: bool = False,
    report: CopyReport | None = None,
    display: Display | None = None,
) -> CopyReport:
    """Copy the selected objects that the target does not have, or has with a wrong size.

    Parameters
    ----------
    source, target : Shelf
        The caller should open the source read-only if possible.
    folders : Collection of str, optional
        Only these namespace folders.
    prompts : Sequence of TokenPrompt, optional
        Only the whole chunks of these prompts. Their objects are looked up by name, not listed.
    dry_run : bool
        Only count: do not change the target and do not read objects.
    report : CopyReport, optional
        Updated during the copy, so that it is available after an interruption.
    display : Display, optional
        Shows the report after each change, and each object that is not copied.

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
    work = Work(report, Display("copying") if display is None else display)
    one_large_object = threading.Lock()
    listed_folders: list[str] = []

    def copy_object(item: _SourceObject) -> None:
        size = item.fmt.object_size(item.parsed.shard, item.parsed.tail_tokens)
        with one_large_object if size > _LARGE_BYTES else contextlib.nullcontext():
            _copy_object(source, target, item, memoryview(bytearray(size)), work)

    def objects_to_copy() -> Iterator[_SourceObject]:
        for info in source.namespaces():
            if folders is not None and info.folder not in folders:
                continue
            try:
                fmt = format_of(info)
            except ConfigError as error:
                work.problem("skipped_namespaces", info.folder, str(error))
                continue
            if prompts is None:
                items = _listed_objects(source, info.folder, fmt, work)
            else:
                items = _prompt_objects(source, info.folder, fmt, prompts)
            while batch := list(islice(items, _BATCH)):
                work.count(found=len(batch))
                for item, is_there in zip(batch, _probe(target, batch), strict=True):
                    size = item.fmt.object_size(item.parsed.shard, item.parsed.tail_tokens)
                    if is_there:
                        work.count(existed=1)
                    elif size > _MAX_BYTES:
                        text = f"it cannot be copied: {size} bytes, more than {_MAX_BYTES}"
                        work.problem("failed", item.name, text)
                    elif dry_run:
                        work.count(copied=1, bytes=item.size)
                    else:
                        yield item
            listed_folders.append(info.folder)
            _check_there(source, [info.folder])

    try:
        threads = threads_for(source.backend, target.backend)
        work.run_over(objects_to_copy(), copy_object, threads)
        if report.gone or folders is not None:
            _check_there(source, [*listed_folders, *(folders or ())])
    finally:
        report.seconds = time.monotonic() - begin
    return report


def _copy_object(
    source: Shelf, target: Shelf, item: _SourceObject, buffer: memoryview, work: Work[CopyReport]
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


def _probe(target: Shelf, items: Sequence[_SourceObject]) -> Iterator[bool]:
    """Yield True for each object that the target is known to have.

    Where its storage gives no answer, the write will detect an existing object.
    """
    runs_of_one_kind = [
        (target.view(fmt), [ObjectRef(item.chunk, item.parsed.shard) for item in same_kind])
        for fmt, same_kind in groupby(items, key=attrgetter("fmt"))
    ]
    for answer in chain(*find_together(runs_of_one_kind)):
        yield answer is Presence.PRESENT


def _check_there(source: Shelf, folders: Sequence[str]) -> None:
    """Raise if a folder vanished from the source, where its listing ends without an error."""
    existing = set(source.backend.folders())
    for folder in folders:
        if folder not in existing:
            raise StorageError(
                f"{source.url}: {folder} vanished while it was copied; check that the source is "
                "still mounted, and start the copy again"
            )


def _listed_objects(
    source: Shelf, folder: str, fmt: ObjectFormat, work: Work[CopyReport]
) -> Iterator[_SourceObject]:
    for row in source.objects(folder):
        try:
            kind_fmt = fmt.of_name(row.parsed)
            chunk = kind_fmt.named_chunk(row.parsed)
        except ObjectNameError as error:
            work.count(found=1)
            work.problem("bad", row.name, str(error))
            continue
        yield _SourceObject(kind_fmt, row.name, row.parsed, chunk, row.size)


def _prompt_objects(
    source: Shelf, folder: str, fmt: ObjectFormat, prompts: Sequence[TokenPrompt]
) -> Iterator[_SourceObject]:
    """Yield the objects of the prompts that the source has, of all kinds."""
    for stored in stored_objects(source.backend, folder, fmt, prompt_chunks(fmt, prompts)):
        parsed = parse_path(stored.name)
        assert parsed is not None
        yield _SourceObject(fmt.of(stored.kind), stored.name, parsed, stored.chunk, stored.size)


# ----------------------------------------------------------------------------- the command


def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Directory or URL to copy from.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Directory or URL to copy to.")],
    namespaces: NamespacesOption = None,
    prompts: PromptsOption = None,
    dry_run: DryRunOption = False,
    source_options: Annotated[
        Path | None, option("--source-options", "FILE", "storage_options of SRC, a JSON object.")
    ] = None,
    target_options: Annotated[
        Path | None, option("--target-options", "FILE", "storage_options of DST, a JSON object.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a shelf, or a part of it: verified, in parallel, and only missing objects."""
    if COMMON_OPTIONS["storage_options"] is not None:
        raise ConfigError(
            "found --storage-options for two shelves; expected --source-options or --target-options"
        )
    source, target = located(source), located(target)
    of_source = options_of(source, _options(source_options, "--source-options"), target)
    of_target = options_of(target, _options(target_options, "--target-options"), source)
    # Two servers may have a bucket of the same name.
    is_same_server = of_source == of_target or is_local(source)
    if is_same_server and (is_inside(source, target) or is_inside(target, source)):
        raise ConfigError(f"SRC is {source} and DST is {target}; expected two places")
    selected_prompts = None if prompts is None else token_prompts(prompts, None)
    report = CopyReport()
    display = Display("looking" if dry_run else "copying", as_json=as_json)
    with (
        open_patiently(source, of_source) as from_,
        open_shelf(
            target,
            storage_options=of_target,
            read_only=dry_run,
            keep_atime=True,
            deadlines=PATIENT,
        ) as to,
    ):
        folders = find_folders(from_, namespaces)
        with display.working():
            copy_shelf(
                from_,
                to,
                folders,
                selected_prompts,
                dry_run=dry_run,
                report=report,
                display=display,
            )
        row = asdict(report) | {"dry_run": dry_run, "source": from_.url, "target": to.url}
        display.finish(row, _summary(report, dry_run), complete=report.complete)


def _options(file: Path | None, option: str) -> dict[str, Any] | None:
    return None if file is None else json_object(read_text(file, option), option)


def _summary(report: CopyReport, dry_run: bool) -> str:
    pace = "" if dry_run else f" in {pace_text(report.bytes, report.seconds)}"
    return summary(
        [
            f"{'would copy' if dry_run else 'copied'} {report.copied} objects,"
            f" {size_text(report.bytes)}{pace}",
            f"{report.existed} there already",
        ],
        (report.repaired, "of the copied in the place of bad ones"),
        (report.bad, "bad, left out"),
        (report.failed, "failed"),
        (report.gone, "gone meanwhile"),
        (report.skipped_namespaces, "namespaces left out"),
    )
