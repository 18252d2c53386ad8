"""``kvshelf explain``: says why prompts miss.

Owns the options and the output; :mod:`kvshelf.tools.explain` looks for the causes.
"""

from __future__ import annotations

from dataclasses import asdict

import typer

from kvshelf.cli.codes import PROBLEM, write_out
from kvshelf.cli.common import JsonOption, number, write_json
from kvshelf.cli.prompts import ModelOption, PromptsArgument, token_prompts
from kvshelf.cli.shelves import NamespacesOption, OneShelf, find_folders, open_found
from kvshelf.errors import ConfigError, printable
from kvshelf.format.kinds import FULL
from kvshelf.tools.explain import Explainer, Explanation

_MOST_OBJECTS = 8


def explain(
    shelf: OneShelf,
    prompts: PromptsArgument,
    namespaces: NamespacesOption = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why prompts miss; --json writes one object per prompt."""
    asked = token_prompts(prompts, model)
    complete = True
    with open_found(shelf) as opened:
        folders = find_folders(opened, namespaces) or []
        if len(folders) > 1:
            raise ConfigError("expected one --namespace: that of the engine that missed")
        explainer = Explainer(opened, folder=next(iter(folders), None))
        for prompt in asked:
            found = explainer.explain(prompt)
            complete = complete and found.hits
            if as_json:
                write_json({"hits": found.hits, **asdict(found)})
            else:
                write_out(_text(found))
            write_out("")
    if not complete:
        raise typer.Exit(PROBLEM)


def _text(found: Explanation) -> str:
    lines = [f"line {found.line}: {found.tokens} tokens"]
    if found.namespace is not None:
        lines[0] += (
            f", {number(found.chunks, 'chunk')} of {found.chunk_size}: a lookup finds"
            f" {found.hit_chunks} of the {found.usable_chunks} that it can use"
        )
        lines.append(f"  namespace  {found.namespace} ({found.chosen})")
    for piece in found.missing:
        kind = "" if piece.kind == FULL else f", kind {piece.kind}"
        lines.append(
            f"  missing    chunk {piece.chunk}{kind}, tokens {piece.first_token} to"
            f" {piece.last_token}"
        )
        rows = list(piece.objects.items())
        lines += [f"             {name}: {state}" for name, state in rows[:_MOST_OBJECTS]]
        if len(rows) > _MOST_OBJECTS:
            lines.append(f"             and {len(rows) - _MOST_OBJECTS} more objects")
    for cause in found.causes:
        lines.append(f"  cause      {cause.text} [{cause.code}]")
        if cause.advice:
            lines.append(f"             {cause.advice}")
    others = [near for near in found.near if near.namespace != found.namespace]
    for near in others:
        lines.append(
            f"  near       {near.namespace}: {near.hit_chunks} of {near.chunks} chunks; differs in"
            f" {', '.join(near.differs)}"
        )
    return "".join(f"{printable(line)}\n" for line in lines)
