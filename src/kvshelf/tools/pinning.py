"""Pins of prompts: which chunks they have, and which of them a shelf has.

Owns the choice of namespaces for prompts. :mod:`kvshelf.shelf.pins` owns pins themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvshelf.errors import ConfigError
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.prompt_objects import known_formats, prompt_chunks, prompt_objects
from kvshelf.tools.prompts import Prompt, TokenPrompt


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """The chunks of prompts in one namespace.

    Attributes
    ----------
    folder : str
        The namespace folder.
    keys : Sequence of bytes
        Their keys, each once, the beginnings of prompts first.
    stored : int
        Chunks of which the shelf has objects.
    bytes : int
        The sizes of these objects.
    """

    folder: str
    keys: Sequence[bytes]
    stored: int
    bytes: int


def prompt_keys(
    shelf: Shelf, prompts: Sequence[Prompt | TokenPrompt], folders: Sequence[str] = ()
) -> list[PromptKeys]:
    """Return the chunks of prompts in namespaces of a shelf.

    Parameters
    ----------
    shelf : Shelf
    prompts : Sequence of Prompt or TokenPrompt
        With token ids.
    folders : Sequence of str
        Folders of these namespaces; without any, those that have a chunk of the prompts.

    Raises
    ------
    ConfigError
        If a namespace has no usable description, no prompt fills a chunk, or no namespace was
        named and none has a chunk of the prompts.
    StorageError
        If the storage failed.
    """
    found = []
    short: list[int] = []
    for folder, fmt in known_formats(shelf, folders or None):
        keys = list(dict.fromkeys(chunk.key for chunk in prompt_chunks(fmt, prompts)))
        if not keys:
            short.append(fmt.chunk_size)
            continue
        objects = list(prompt_objects(shelf.backend, folder, fmt, prompts))
        stored = len({each.chunk.key for each in objects})
        if stored or folders:
            found.append(PromptKeys(folder, keys, stored, sum(each.size for each in objects)))
    if short and not found:
        raise ConfigError(
            f"no prompt fills a chunk of {min(short)} tokens, and only whole chunks can be pinned"
        )
    if not found:
        raise ConfigError(
            f"no namespace of {shelf.url} has a chunk of these prompts; name the namespaces to pin"
            " what engines will store"
        )
    return found
