"""Files with one prompt per line, for the commands that take prompts.

Owns the format of the lines. It has no tokenizer and no engine. A line is JSON:

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

A file is read completely before a prompt is used. All bad lines are reported together, by their
numbers.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvshelf.errors import ConfigError, short_repr

_MAX_REPORTED_LINES: Final = 20


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """One prompt as the engine sees it: its line in the file, its token ids and its cache_salt."""

    line: int
    tokens: Sequence[int]
    salt: str = ""


@dataclass(frozen=True, slots=True)
class SourcePrompt:
    """One prompt as a file has it; exactly one of `text`, `messages` and `tokens` is set.

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


class _PromptFields(BaseModel):
    """What every form of a prompt may have."""

    model_config = ConfigDict(extra="forbid", strict=True)

    cache_salt: str | None = None
    id: Any = None


class _Text(_PromptFields):
    prompt: Annotated[str, Field(min_length=1)]


class _Tokens(_PromptFields):
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[Any] | None = None


class _Messages(_PromptFields):
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = None


#: The forms of a prompt, by the field that only this form has.
_FORMS: Final[dict[str, type[_PromptFields]]] = {
    "prompt": _Text,
    "messages": _Messages,
    "tokens": _Tokens,
}


def read_prompts(path: str | os.PathLike[str]) -> list[SourcePrompt]:
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


def parse_prompts(lines: Iterable[str], source_name: str) -> list[SourcePrompt]:
    """Parse prompts from lines; empty lines are skipped.

    Parameters
    ----------
    lines : Iterable of str
    source_name : str
        Name of the file, for messages.

    Raises
    ------
    ConfigError
        If there are bad lines, or no prompts at all.
    """
    prompts: list[SourcePrompt] = []
    problems: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(_parse(line, number))
            except ValueError as error:
                problems.append((number, str(error)))
    raise_bad_lines(problems, source_name)
    if not prompts:
        raise ConfigError(f"{source_name}: found no prompts; expected one JSON value per line")
    return prompts


def raise_bad_lines(problems: Sequence[tuple[int, str]], source_name: str = "the prompts") -> None:
    """Raise an error that lists the bad lines, if there are any.

    Raises
    ------
    ConfigError
        If `problems`, pairs of a line's number and its problem, is not empty.
    """
    if problems:
        lines = [f"line {number}: {text}" for number, text in problems[:_MAX_REPORTED_LINES]]
        if len(problems) > _MAX_REPORTED_LINES:
            lines.append(f"and {len(problems) - _MAX_REPORTED_LINES} more")
        count = f"{len(problems)} bad line{'s' if len(problems) > 1 else ''}"
        raise ConfigError("\n  ".join([f"{source_name}: {count}", *lines]))


def _parse(line: str, number: int) -> SourcePrompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if isinstance(value, str):
        value = {"prompt": value}
    elif isinstance(value, list):
        value = {"messages" if value and isinstance(value[0], dict) else "tokens": value}
    elif not isinstance(value, dict):
        raise ValueError(f"found {short_repr(value)}; expected a string, a list or an object")
    forms = [name for name in _FORMS if name in value]
    if len(forms) != 1:
        names = " and ".join(forms) or f"only {', '.join(map(repr, value)) or 'an empty object'}"
        raise ValueError(f"found {names}; expected one of {', '.join(_FORMS)}")
    [form] = forms
    try:
        _FORMS[form].model_validate(value)
    except ValidationError as error:
        raise ValueError(_problem(form, error)) from None
    salt = value.get("cache_salt") or ""
    if form == "prompt":
        return SourcePrompt(number, text=value["prompt"], salt=salt)
    if form == "tokens":
        return SourcePrompt(number, tokens=array("I", value["tokens"]), salt=salt)
    template = set(_Messages.model_fields) - set(_PromptFields.model_fields) - {"messages"}
    chat = {name: value[name] for name in template if value.get(name) is not None}
    return SourcePrompt(number, messages=value["messages"], salt=salt, chat=chat)


def _problem(form: str, error: ValidationError) -> str:
    """Return what is wrong with the first bad field of a prompt."""
    detail = error.errors()[0]
    location = " ".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        fields = sorted(set(_FORMS[form].model_fields) - {form})
        return f"unknown field {location!r}; {form} can have {', '.join(fields)}"
    return f"{location} is {short_repr(detail['input'])}: {detail['msg']}"
