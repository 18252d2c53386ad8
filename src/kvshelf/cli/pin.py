"""``kvshelf pin``: what stays when a shelf is bounded.

Owns the options, the listing of pins and the texts; :mod:`kvshelf.capacity.pins` owns pins, and
:mod:`kvshelf.tools.pinning` finds the chunks of prompts.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvshelf.backends import Backend
from kvshelf.capacity.files import time_of
from kvshelf.capacity.lease import LEASE_SECONDS, Lease
from kvshelf.capacity.pins import PINS_SECONDS, Pin, Pins, check_pin_name
from kvshelf.cli.codes import PROBLEM
from kvshelf.cli.common import (
    DryRunOption,
    JsonOption,
    OneShelf,
    columns,
    message,
    namespace_folder,
    open_found,
    size_text,
    time_text,
    write,
    write_json,
)
from kvshelf.cli.namespaces import NamespacesOption
from kvshelf.cli.prompts import (
    GroupOption,
    ModelOption,
    SaltFileOption,
    salt_group,
    token_prompts,
)
from kvshelf.cli.values import moment
from kvshelf.errors import ConfigError, printable
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.naming import group_named
from kvshelf.tools.pinning import PromptKeys, bytes_if_stored, prompt_keys

#: Seconds after which a running sweep has read a new pin: in between one call may take as long
#: as a lease lasts.
_READ_SECONDS: Final = PINS_SECONDS + LEASE_SECONDS
_POLL_SECONDS: Final = 1.0


def pin(
    shelf: OneShelf,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of the new pin.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Argument(
            metavar="PROMPTS", help="Only these prompts: JSON lines, as for `kvshelf seed`."
        ),
    ] = None,
    namespaces: NamespacesOption = None,
    group: GroupOption = None,
    salt_file: SaltFileOption = None,
    model: ModelOption = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="When it expires: a time from now (12h, 7d, 2w) or a date (2026-01-31).",
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the pin that has this name.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until a running sweep must have read the pin.")
    ] = False,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            "--remove",
            metavar="NAME",
            help="Remove this pin, so that its chunks may be deleted again. Repeatable.",
        ),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Keep chunks from being deleted when a shelf is bounded; without a name, list the pins."""
    chosen = salt_group(group, salt_file)
    expires = None if until is None else moment(until, "--until", ahead=True)
    if expires is not None and expires <= time.time():
        raise ConfigError(
            f"--until: found {until}, which has passed: such a pin pins nothing; expected a time"
            " that is to come, such as 12h or a later date"
        )
    if name is None:
        if namespaces or chosen or model or until or replace or wait or (dry_run and not remove):
            raise ConfigError("the pin has no name; give one, or no options to list the pins")
        if remove:
            _remove(shelf, remove, dry_run, as_json)
            return
        with open_found(shelf) as opened:
            _list(opened, as_json)
        return
    if remove:
        raise ConfigError(f"found the name {name} and --remove; give one of them")
    check_pin_name(name)
    if prompts is None and len(namespaces or ()) > 1:
        raise ConfigError("a pin without prompts has one namespace; make one pin for each")
    if prompts is None and not namespaces and chosen is None:
        raise ConfigError("found nothing to pin; give PROMPTS, --namespace, --group or --salt-file")
    wanted = None if prompts is None else token_prompts(prompts, model)
    with open_found(shelf, change=not dry_run) as opened:
        folders = [namespace_folder(opened, each) for each in namespaces or ()]
        chosen = None if chosen is None else group_named(opened, chosen, folders)
        keys = None if wanted is None else prompt_keys(opened, wanted, folders)
        made = _pin(folders, chosen, keys, expires)
        if not Pins.add(opened.backend, name, made, replace=replace, dry_run=dry_run):
            message(
                f"there is a pin {name} on {opened.url} already; choose another name, or replace it"
                " with --replace"
            )
            raise typer.Exit(PROBLEM)
        row = _row(name, made, time.time()) | {"dry_run": dry_run, "shelf": opened.url}
        done = "would pin" if dry_run else "pinned"
        write(as_json, lambda: row | _counts(keys), lambda: f"{done} {name}: {_text(made, keys)}\n")
        if not dry_run:
            _tell_of_sweep(opened.backend, wait)


def _tell_of_sweep(backend: Backend, wait: bool) -> None:
    """Name the process that sweeps the shelf now; wait until it must have read the new pin."""
    now, lease = time_of(backend), Lease(backend)
    record = lease.read(now)
    owner = record.owner
    if not lease.is_others(record, now):
        return
    message(
        f"{printable(owner)} sweeps {backend.url} now, and may delete what is pinned until it reads"
        f" the pin, within {_READ_SECONDS:g} s"
        + (": waiting for that" if wait else "; --wait waits for that"),
        error=False,
    )
    end = time.monotonic() + _READ_SECONDS
    while wait and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        now = time_of(backend)
        record = lease.read(now)
        if record.owner != owner or not lease.is_others(record, now):
            return


def _remove(shelf: str, wanted: list[str], dry_run: bool, as_json: bool) -> None:
    """Remove pins; deletes no chunk itself."""
    for name in wanted:
        check_pin_name(name)
    missing = []
    with open_found(shelf, change=not dry_run) as opened:
        for name in wanted:
            removed = Pins.remove(opened.backend, name, dry_run=dry_run)
            if as_json:
                problem = None if removed else f"there is no such pin on {opened.url}"
                row = {"pin": name, "removed": removed, "problem": problem, "dry_run": dry_run}
                write_json(row | {"shelf": opened.url})
            elif removed:
                sys.stdout.write(f"{'would unpin' if dry_run else 'unpinned'} {name}\n")
            if not removed:
                missing.append(name)
        if missing:
            text = f"no pin {', '.join(missing)} on {opened.url}; `kvshelf pin SHELF` lists them"
            message(text, error=False)
            raise typer.Exit(PROBLEM)


def _pin(
    folders: list[str], group: str | None, found: list[PromptKeys] | None, until: float | None
) -> Pin:
    """Return the pin; one of prompts in several namespaces has no namespace, only their keys."""
    if found is None:
        return Pin(folders[0] if folders else None, group, None, until)
    keys = list(dict.fromkeys(key for each in found for key in each.keys))
    return Pin(found[0].folder if len(found) == 1 else None, group, keys, until)


def _counts(found: list[PromptKeys] | None) -> dict[str, Any]:
    if found is None:
        return {}
    return {
        "namespaces": [each.folder for each in found],
        "stored": sum(each.stored for each in found),
        "bytes": sum(each.bytes for each in found),
    }


def _text(made: Pin, found: list[PromptKeys] | None) -> str:
    parts = [
        f"{len(each.keys)} chunks of {each.folder}, {each.stored} of them stored"
        f" ({size_text(each.bytes)})"
        for each in found or ()
    ]
    if found is None and made.namespace is not None:
        parts.append(f"all of {made.namespace}" if made.group is None else f"of {made.namespace}")
    if made.group is not None:
        parts.append(f"salt group {made.group}")
    if made.until is not None:
        parts.append(f"until {time_text(made.until)}")
    return ", ".join(parts)


# ---------------------------------------------------------------------------------- the listing

_cells = columns(7, 10, -16, -16, -24, 0)


def _list(opened: Shelf, as_json: bool) -> None:
    now = time.time()
    pins = Pins.read(opened.backend, now)
    if not as_json:
        head = _cells("CHUNKS", "IF STORED", "UNTIL", "GROUP", "NAME", "NAMESPACE")
        sys.stdout.write(head if pins.all else f"{opened.url} has no pins\n")
    for name, each in pins.all.items():
        nbytes = bytes_if_stored(opened.backend, each)
        if as_json:
            write_json(_row(name, each, now) | {"bytes_if_stored": nbytes})
        else:
            sys.stdout.write(_line(name, each, now, nbytes))
    unknown = {name: problem for name, (_, problem) in pins.unknown.items()}
    for name, problem in [*pins.unreadable.items(), *unknown.items()]:
        if as_json:
            write_json({"pin": name, "problem": problem})
        if name in pins.unreadable:
            message(f"the pin {name} pins nothing: {printable(problem)}", error=False)
    if pins.problem is not None:
        message(printable(pins.problem))
    if pins.unreadable or pins.unknown:
        raise typer.Exit(PROBLEM)


def _row(name: str, each: Pin, now: float) -> dict[str, Any]:
    return {
        "pin": name,
        "problem": None,
        "namespace": each.namespace,
        "group": each.group,
        "chunks": None if each.keys is None else len(each.keys),
        "until": each.until,
        "expired": each.expired(now),
    }


def _line(name: str, each: Pin, now: float, nbytes: int | None) -> str:
    size = "-" if nbytes is None else size_text(nbytes)
    chunks = "all" if each.keys is None else str(len(each.keys))
    until = "-" if each.until is None else time_text(each.until)
    until = "expired" if each.expired(now) else until
    return _cells(chunks, size, until, each.group or "all", name, each.namespace or "all")
