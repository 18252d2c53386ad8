"""``kvshelf pin``: what stays when a shelf is bounded.

Owns the options and the texts; :mod:`kvshelf.shelf.pins` owns pins, ``kvshelf ls`` lists them,
and :mod:`kvshelf.tools.prompt_objects` finds the chunks of prompts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvshelf.cli.codes import PROBLEM, write_out
from kvshelf.cli.common import (
    DryRunOption,
    JsonOption,
    message,
    number,
    option,
    time_text,
    write_json,
)
from kvshelf.cli.prompts import GroupOption, ModelOption, check_group, token_prompts
from kvshelf.cli.shelves import NamespacesOption, OneShelf, find_folders, open_found
from kvshelf.cli.values import age
from kvshelf.errors import ConfigError, size_text
from kvshelf.shelf.pins import Pin, Pins, check_pin_name
from kvshelf.tools.prompt_objects import PromptKeys, prompt_keys


def pin(
    shelf: OneShelf,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the pin.")],
    prompts: Annotated[
        Path | None,
        typer.Argument(
            metavar="PROMPTS", help="Only these: a JSON text or list of token ids a line."
        ),
    ] = None,
    namespaces: NamespacesOption = None,
    group: GroupOption = None,
    model: ModelOption = None,
    until: Annotated[
        str | None, option("--until", "AGE", "When it expires, from now: 12h, 7d, 2w.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the pin that has this name.")
    ] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove it: its chunks may be deleted again.")
    ] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Keep chunks from being deleted when a shelf is bounded; `kvshelf ls` lists the pins."""
    check_pin_name(name)
    chosen = check_group(group)
    seconds = age(until, "--until")
    selects = prompts is not None or bool(namespaces) or chosen is not None
    if remove == selects:
        raise ConfigError("expected PROMPTS, --namespace or --group to pin, or --remove")
    wanted = None if prompts is None else token_prompts(prompts, model)
    with open_found(shelf, change=not dry_run) as opened:
        row = {"pin": name, "problem": None, "dry_run": dry_run, "shelf": opened.url}
        would = "would " if dry_run else ""
        if remove:
            if removed := Pins.remove(opened.backend, name, dry_run=dry_run):
                text = f"{would}unpin {name}"
            else:
                row["problem"] = f"there is no pin {name} on {opened.url}"
            row["removed"] = removed
        else:
            folders = find_folders(opened, namespaces) or []
            if wanted is None and len(folders) > 1:
                raise ConfigError("a pin without prompts has one namespace; make one pin for each")
            keys = None if wanted is None else prompt_keys(opened, wanted, folders)
            made = _made(folders, chosen, keys, seconds)
            text = f"{would}pin {name}: {_text(made, keys)}"
            row |= _row(made, keys)
            if not Pins.add(opened.backend, name, made, replace=replace, dry_run=dry_run):
                row["problem"] = f"there is a pin {name} already; --replace replaces it"
        if as_json:
            write_json(row)
        if row["problem"] is not None:
            message(str(row["problem"]), error=False)
            raise typer.Exit(PROBLEM)
        if not as_json:
            write_out(text + "\n")


def _made(
    folders: list[str], group: str | None, found: list[PromptKeys] | None, seconds: float | None
) -> Pin:
    """Return the pin; one of prompts in several namespaces has no namespace, only their keys."""
    until = None if seconds is None else time.time() + seconds
    if found is None:
        return Pin(namespace=folders[0] if folders else None, group=group, until=until)
    keys = tuple(dict.fromkeys(key for each in found for key in each.keys))
    folder = found[0].folder if len(found) == 1 else None
    return Pin(namespace=folder, group=group, keys=keys, until=until)


def _row(made: Pin, found: list[PromptKeys] | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "namespace": made.namespace,
        "group": made.group,
        "chunks": None if made.keys is None else len(made.keys),
        "until": made.until,
    }
    if found is not None:
        row["namespaces"] = [each.folder for each in found]
        row["stored"] = sum(each.stored for each in found)
        row["bytes"] = sum(each.bytes for each in found)
    return row


def _text(made: Pin, found: list[PromptKeys] | None) -> str:
    parts = [
        f"{number(len(each.keys), 'chunk')} of {each.folder}, {each.stored} of them stored"
        f" ({size_text(each.bytes)})"
        for each in found or ()
    ]
    if found is None and made.namespace is not None:
        parts.append(f"all of {made.namespace}")
    if made.group is not None:
        parts.append(f"salt group {made.group}")
    if made.until is not None:
        parts.append(f"until {time_text(made.until)}")
    return ", ".join(parts)
