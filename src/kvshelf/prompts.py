"""Files with one prompt per line, for the commands that take prompts.

Owns the format of the lines. A line is JSON:

=============================================  ==============================================
line                                           prompt
=============================================  ==============================================
``"text"``                                     text
``[1, 15043, …]``                              token ids
``[{"role": …, "content": …}, …]``             chat messages
``{"prompt": …}``                              text
``{"messages": …}``                            chat messages; with ``tools``,
                                               ``chat_template``, ``chat_template_kwargs``,
                                               ``add_generation_prompt`` as for vLLM's server
``{"tokens": …}``                              token ids
=============================================  ==============================================

An object may also have ``cache_salt``, and ``id``, which is ignored. Any other field is an error:
ignoring it could seed the wrong chunks.

Contracts
---------
* A file is read completely before a prompt is used. All bad lines are reported at once, by
  their numbers.
* No tokenizer, no engine.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvshelf.errors import ConfigError, short_repr

_MAX_REPORTED: Final = 20
_KINDS: Final = ("prompt", "messages", "tokens")
_CHAT: Final = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; exactly one of `text`, `messages` and `tokens` is set.

    Attributes
    ----------
    line : int
        Its line in the file, from 1.
    text : str or None
    messages : Sequence of dict or None
        Chat messages.
    tokens : Sequence of int or None
        Token ids.
    salt : str
        The request's cache_salt.
    chat : dict
        Arguments for the chat template.
    """

    line: int
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tokens: Sequence[int] | None = None
    salt: str = ""
    chat: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """One prompt as the engine sees it: its line in the file, its token ids and its cache_salt."""

    line: int
    tokens: Sequence[int]
    salt: str = ""


def parse_prompts(lines: Iterable[str], where: str) -> list[Prompt]:
    """Parse prompts from lines; empty lines are skipped.

    Parameters
    ----------
    lines : Iterable of str
    where : str
        Name of the file, for messages.

    Raises
    ------
    ConfigError
        If there are bad lines, or no prompts at all.
    """
    prompts: list[Prompt] = []
    problems: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(_parse(line, number))
            except ValueError as error:
                problems.append((number, str(error)))
    raise_bad_lines(problems, where)
    if not prompts:
        raise ConfigError(f"{where}: found no prompts; expected one JSON value per line")
    return prompts


def raise_bad_lines(problems: Sequence[tuple[int, str]], where: str = "the prompts") -> None:
    """Raise an error that lists the bad lines, if there are any.

    Raises
    ------
    ConfigError
        If `problems`, pairs of a line's number and its problem, is not empty.
    """
    if problems:
        lines = [f"line {number}: {text}" for number, text in problems[:_MAX_REPORTED]]
        if len(problems) > _MAX_REPORTED:
            lines.append(f"and {len(problems) - _MAX_REPORTED} more")
        count = f"{len(problems)} bad line{'s' if len(problems) > 1 else ''}"
        raise ConfigError("\n  ".join([f"{where}: {count}", *lines]))


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Return the prompts of a file.

    Raises
    ------
    ConfigError
        If it cannot be read, or for the reasons of :func:`parse_prompts`.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return parse_prompts(file, os.fspath(path))
    except IsADirectoryError:
        raise ConfigError(
            f"{os.fspath(path)} is a directory; expected a file of prompts, behind the SHELF"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{os.fspath(path)} cannot be read: {reason}") from None


def _parse(line: str, number: int) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if isinstance(value, str):
        return Prompt(number, text=_text(value))
    if isinstance(value, list):
        if value and isinstance(value[0], dict):
            return Prompt(number, messages=_messages(value))
        return Prompt(number, tokens=_tokens(value))
    if not isinstance(value, dict):
        raise ValueError(f"found {short_repr(value)}; expected a string, a list or an object")
    return _parse_object(value, number)


def _parse_object(value: dict[str, Any], number: int) -> Prompt:
    kinds = [name for name in _KINDS if name in value]
    if len(kinds) != 1:
        found = " and ".join(kinds) or f"only {', '.join(map(repr, value)) or 'an empty object'}"
        raise ValueError(f"found {found}; expected one of {', '.join(_KINDS)}")
    kind = kinds[0]
    allowed = {kind, "cache_salt", "id", *(_CHAT if kind == "messages" else ())}
    if unknown := sorted(set(value) - allowed):
        raise ValueError(
            f"unknown field {', '.join(map(repr, unknown))}; {kind} can have "
            f"{', '.join(sorted(allowed - {kind}))}"
        )
    salt = value.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise ValueError(f"cache_salt is {short_repr(salt)}; expected a string")
    content = value[kind]
    if kind == "messages":
        chat = {name: value[name] for name in _CHAT if value.get(name) is not None}
        return Prompt(number, messages=_messages(content), salt=salt, chat=chat)
    if kind == "prompt":
        return Prompt(number, text=_text(content), salt=salt)
    return Prompt(number, tokens=_tokens(content), salt=salt)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"the prompt is {short_repr(value)}; expected a text")
    return value


def _tokens(value: object) -> array[int]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"found {short_repr(value)}; expected a list of token ids")
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token < 2**32:
            raise ValueError(
                f"token {position} is {short_repr(token)}; token ids are 0 to {2**32 - 1}"
            )
    return array("I", value)


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages is {short_repr(value)}; expected a list of messages")
    for position, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"message {position} is {short_repr(message)}; expected an object with role and "
                "content"
            )
        if not isinstance(message.get("content"), str | list | None):
            raise ValueError(f"the content of message {position} is neither text nor a list")
    return value
