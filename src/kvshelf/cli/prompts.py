"""Prompts and salt groups as options of commands.

Owns how a file of prompts becomes token ids: as they are, or by the tokenizer of a model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kvshelf.cli.common import option
from kvshelf.errors import ConfigError, ObjectNameError
from kvshelf.format.keys import check_salt_group
from kvshelf.prompts import Prompt, TokenPrompt, read_prompts

logger = logging.getLogger(__name__)

PromptsArgument: TypeAlias = Annotated[
    Path,
    typer.Argument(
        metavar="PROMPTS",
        help="File with a prompt a line, as JSON: a text, a list of token ids, or a list of chat"
        " messages.",
    ),
]
PromptsOption: TypeAlias = Annotated[
    Path | None, option("--prompts", "FILE", "Only these: a JSON text or list of token ids a line.")
]
ModelOption: TypeAlias = Annotated[
    str | None,
    option("--model", "NAME", "Whose tokenizer reads prompts that are not token ids; needs vLLM."),
]
GroupOption: TypeAlias = Annotated[
    str | None, option("--group", "G", "This salt group: its 16 hex, or _ for no salt.")
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
    logger.warning("importing vLLM, whose tokenizer of %s reads the prompts", model)
    from kvshelf.vllm.seeding import PromptRenderer

    return PromptRenderer.of_model(model).render(prompts)


def check_group(group: str | None) -> str | None:
    """Return a salt group that an option names.

    Raises
    ------
    ConfigError
        If it is not the name of one.
    """
    try:
        return None if group is None else check_salt_group(group)
    except ObjectNameError as error:
        raise ConfigError(f"--group: {error}") from None
