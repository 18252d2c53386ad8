"""Pins of prompts: which chunks they have, and which of them a shelf has.

Owns the choice of namespaces for prompts. :mod:`kvshelf.capacity.pins` owns pins themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvshelf.backends import Backend
from kvshelf.capacity.pins import Pin
from kvshelf.errors import BadObjectError, ConfigError, StorageError
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import Shelf, read_namespace
from kvshelf.tools.prompt_objects import known_format, prompt_chunks, prompt_objects
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
    for info in shelf.namespaces():
        if folders and info.folder not in folders:
            continue
        fmt = known_format(info, required=bool(folders))
        if fmt is None:
            continue
        keys = list(dict.fromkeys(chunk.key for chunk in prompt_chunks(fmt, prompts)))
        if not keys:
            short.append(fmt.chunk_size)
            continue
        objects = list(prompt_objects(shelf.backend, info.folder, fmt, prompts))
        stored = len({each.chunk.key for each in objects})
        if stored or folders:
            size = sum(each.size for each in objects)
            found.append(PromptKeys(info.folder, keys, stored, size))
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


def bytes_if_stored(backend: Backend, pin: Pin) -> int | None:
    """Return the bytes of all chunks of a pin by the format of their namespace."""
    if pin.keys is None or pin.namespace is None:
        return None
    try:
        fmt = ObjectFormat(read_namespace(backend, pin.namespace))
    except (StorageError, ConfigError, BadObjectError, ValueError):
        return None
    kinds = map(fmt.of, fmt.kinds)
    chunk = sum(own.object_size(shard) for own in kinds for shard in range(own.shards))
    return chunk * len(pin.keys)
