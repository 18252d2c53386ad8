"""Prompts as an argument of commands, and salt groups.

Owns how a file of prompts becomes token ids: as they are, or by the tokenizer of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kvshelf.cli.common import read_text
from kvshelf.errors import ConfigError, ObjectNameError
from kvshelf.format.keys import check_salt_group, salt_group_of
from kvshelf.tools.naming import may_be_group
from kvshelf.tools.prompts import Prompt, TokenPrompt, read_prompts

PromptsArgument: TypeAlias = Annotated[
    Path,
    typer.Argument(
        metavar="PROMPTS",
        help="JSON lines: texts, lists of token ids, or lists of chat messages; with cache_salt"
        " where requests have one.",
    ),
]
PromptsOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Only these prompts: JSON lines, as for `kvshelf seed`.",
    ),
]
ModelOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="The model whose tokenizer reads prompts that are not token ids; needs vLLM.",
    ),
]
GroupOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--group",
        metavar="G",
        help="This salt group: its 16 hex, the first of them, or _ for no salt.",
    ),
]
SaltFileOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--salt-file",
        metavar="FILE",
        help="The group of the cache_salt in this file (one line end is no part of it).",
    ),
]


def token_prompts(file: Path, model: str | None) -> Sequence[Prompt | TokenPrompt]:
    """Return the prompts of a file as token ids.

    Raises
    ------
    ConfigError
        If the file cannot be used, or it needs a model and none is named.
    UnsupportedError
        If it needs vLLM, which is missing.
    """
    prompts = read_prompts(file)
    text = next((prompt for prompt in prompts if prompt.tokens is None), None)
    if text is None:
        return prompts
    if model is None:
        raise ConfigError(
            f"{file}: line {text.line} is text; name the model whose tokenizer reads it with"
            " --model, or give token ids"
        )
    from kvshelf.vllm.rendering import PromptRenderer

    return PromptRenderer.of_model(model).render(prompts)


def salt_group(group: str | None, salt_file: Path | None) -> str | None:
    """Return the salt group that the options name, or a beginning of it; None without any.

    Raises
    ------
    ConfigError
        If both are given, the group may not be the name of one, or the file cannot be read.
    """
    if group is not None and salt_file is not None:
        raise ConfigError("--group and --salt-file both name it; give one of them")
    if group is not None:
        try:
            return group if may_be_group(group) else check_salt_group(group)
        except ObjectNameError as error:
            raise ConfigError(f"--group: {error}") from None
    if salt_file is None:
        return None
    salt = read_text(salt_file, "--salt-file").removesuffix("\n").removesuffix("\r")
    if not salt:
        raise ConfigError(f"--salt-file: {salt_file} holds no salt; --group _ is that of no salt")
    return salt_group_of(salt)
