"""``kvshelf explain``: says why prompts miss.

Owns the options and the output; :mod:`kvshelf.tools.explain` looks for the causes.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvshelf.cli.codes import PROBLEM
from kvshelf.cli.common import JsonOption, OneShelf, open_found, write
from kvshelf.cli.prompts import ModelOption, PromptsArgument, token_prompts
from kvshelf.errors import printable
from kvshelf.format.kinds import FULL
from kvshelf.tools.explain import Explainer, Explanation

_MOST_OBJECTS = 8


def explain(
    shelf: OneShelf,
    prompts: PromptsArgument,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="The namespace of the engine that missed: its folder, its 16 hex, or how either"
            " begins. Default: the only one, or the one with the longest hit.",
        ),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="PROMPTS", help="Prompts that should have been stored: says what differs."
        ),
    ] = None,
    model: ModelOption = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read and verify all objects of the prompts.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say why prompts miss; --json writes one object per prompt."""
    asked = token_prompts(prompts, model)
    earlier = [] if like is None else token_prompts(like, model)
    complete = True
    with open_found(shelf) as opened:
        explainer = Explainer(opened, namespace=namespace, verify=verify)
        for prompt in asked:
            found = explainer.explain(prompt, earlier)
            complete = complete and found.hits
            write(as_json, _row, _text, found)
            sys.stdout.flush()
    if not complete:
        raise typer.Exit(PROBLEM)


def _row(found: Explanation) -> dict[str, Any]:
    return {"hits": found.hits, **asdict(found)}


def _text(found: Explanation) -> str:
    lines = [f"line {found.line}: {found.tokens} tokens"]
    if found.namespace is not None:
        lines[0] += (
            f", {found.chunks} chunks of {found.chunk_size}: a lookup finds {found.hit_chunks} of"
            f" the {found.usable_chunks} that it can use"
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
        lines.append(f"  cause      {cause.text}")
        if cause.advice:
            lines.append(f"             {cause.advice}")
    others = [near for near in found.near if near.namespace != found.namespace]
    for near in others:
        lines.append(
            f"  near       {near.namespace}: {near.hit_chunks} of {near.chunks} chunks; differs in"
            f" {', '.join(near.differs)}"
        )
    return "".join(f"{printable(line)}\n" for line in lines)
