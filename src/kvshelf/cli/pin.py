"""``kvshelf pin``: keeps chunks from being deleted when a shelf is bounded.

Owns the options and the texts. :mod:`kvshelf.shelf.pins` owns pins, ``kvshelf ls`` lists them, and
:mod:`kvshelf.cli.prompts` finds the chunks of prompts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvshelf.cli.common import (
    PROBLEM,
    DryRunOption,
    JsonOption,
    count_text,
    option,
    time_text,
    warn,
    write_json,
    write_out,
)
from kvshelf.cli.prompts import (
    GroupOption,
    ModelOption,
    PromptKeys,
    check_group,
    prompt_keys,
    token_prompts,
)
from kvshelf.cli.shelves import NamespacesOption, OneShelf, find_folders, open_found
from kvshelf.cli.values import age
from kvshelf.errors import ConfigError, size_text
from kvshelf.shelf.pins import Pin, Pins, check_pin_name


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
    salt_group = check_group(group)
    seconds = age(until, "--until")
    selects = prompts is not None or bool(namespaces) or salt_group is not None
    if remove == selects:
        raise ConfigError("expected PROMPTS, --namespace or --group to pin, or --remove")
    selected = None if prompts is None else token_prompts(prompts, model)
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
            if selected is None and len(folders) > 1:
                raise ConfigError("a pin without prompts has one namespace; make one pin for each")
            keys = None if selected is None else prompt_keys(opened, selected, folders)
            new_pin = _pin(folders, salt_group, keys, seconds)
            text = f"{would}pin {name}: {_text(new_pin, keys)}"
            row |= _row(new_pin, keys)
            if not Pins.add(opened.backend, name, new_pin, replace=replace, dry_run=dry_run):
                row["problem"] = f"there is a pin {name} already; --replace replaces it"
        if as_json:
            write_json(row)
        if row["problem"] is not None:
            warn(str(row["problem"]), is_error=False)
            raise typer.Exit(PROBLEM)
        if not as_json:
            write_out(text + "\n")


def _pin(
    folders: list[str],
    group: str | None,
    prompt_keys: list[PromptKeys] | None,
    seconds: float | None,
) -> Pin:
    """Return the pin; a pin of prompts in several namespaces has only their keys, no namespace."""
    until = None if seconds is None else time.time() + seconds
    if prompt_keys is None:
        return Pin(namespace=folders[0] if folders else None, group=group, until=until)
    keys = tuple(dict.fromkeys(key for namespace in prompt_keys for key in namespace.keys))
    folder = prompt_keys[0].folder if len(prompt_keys) == 1 else None
    return Pin(namespace=folder, group=group, keys=keys, until=until)


def _row(new_pin: Pin, prompt_keys: list[PromptKeys] | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "namespace": new_pin.namespace,
        "group": new_pin.group,
        "chunks": None if new_pin.keys is None else len(new_pin.keys),
        "until": new_pin.until,
    }
    if prompt_keys is not None:
        row["namespaces"] = [namespace.folder for namespace in prompt_keys]
        row["stored"] = sum(namespace.stored for namespace in prompt_keys)
        row["bytes"] = sum(namespace.bytes for namespace in prompt_keys)
    return row


def _text(new_pin: Pin, prompt_keys: list[PromptKeys] | None) -> str:
    parts = [
        f"{count_text(len(namespace.keys), 'chunk')} of {namespace.folder},"
        f" {namespace.stored} of them stored ({size_text(namespace.bytes)})"
        for namespace in prompt_keys or ()
    ]
    if prompt_keys is None and new_pin.namespace is not None:
        parts.append(f"all of {new_pin.namespace}")
    if new_pin.group is not None:
        parts.append(f"salt group {new_pin.group}")
    if new_pin.until is not None:
        parts.append(f"until {time_text(new_pin.until)}")
    return ", ".join(parts)
