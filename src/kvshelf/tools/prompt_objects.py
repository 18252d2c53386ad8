"""The chunks of prompts, and their objects on a shelf.

Owns which chunks a prompt has in a namespace, in which salt groups they may be, how their objects
are found (by name, without a listing), and which namespaces have a prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvshelf.backends import Backend
from kvshelf.errors import ConfigError, StorageError
from kvshelf.format.keys import Chunk, KeyChain, salt_group_of
from kvshelf.format.kinds import Kind
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.prompts import Prompt, TokenPrompt
from kvshelf.shelf.shelf import NamespaceInfo, Shelf

_BATCH: Final = 256


@dataclass(frozen=True, slots=True)
class PromptObject:
    """An object of a prompt that a shelf has: its name below the root, and its bytes."""

    name: str
    chunk: Chunk
    kind: Kind
    size: int


def prompt_chunks(
    fmt: ObjectFormat, prompts: Iterable[Prompt | TokenPrompt], *, tails: bool = False
) -> Iterator[Chunk]:
    """Yield the chunks of prompts in each salt group that they may be in, each once.

    Parameters
    ----------
    fmt : ObjectFormat
        Of the namespace; its kind is of no matter.
    prompts : Iterable of Prompt or TokenPrompt
        With token ids.
    tails : bool
        Also the tail of each prompt.
    """
    seen: set[tuple[bytes, str]] = set()
    for prompt in prompts:
        # Grouping is an option of each engine, and no part of a key.
        groups = ["_", salt_group_of(prompt.salt)] if prompt.salt else ["_"]
        for group in groups:
            chain = KeyChain(
                fmt.namespace.digest, fmt.chunk_size, salt=prompt.salt, salt_group=group
            )
            chunks = chain.extend(prompt.tokens or ())
            if tails and (tail := chain.tail()) is not None:
                chunks.append(tail)
            for chunk in chunks:
                if (chunk.key, group) not in seen:
                    seen.add((chunk.key, group))
                    yield chunk


def prompt_objects(
    backend: Backend,
    folder: str,
    fmt: ObjectFormat,
    prompts: Iterable[Prompt | TokenPrompt],
    *,
    tails: bool = False,
) -> Iterator[PromptObject]:
    """Yield the objects of prompts that a shelf has, of all kinds and shards and of any size.

    Parameters
    ----------
    backend : Backend
    folder : str
        The namespace folder.
    fmt, prompts, tails
        As for :func:`prompt_chunks`.

    Raises
    ------
    StorageError
        If the storage failed.
    """
    wanted = (
        (chunk, own.kind, f"{folder}/{object_name(chunk, shard, own.shards, own.kind)}")
        for chunk in prompt_chunks(fmt, prompts, tails=tails)
        for own in map(fmt.of, fmt.kinds)
        for shard in range(own.shards)
    )
    while batch := list(islice(wanted, _BATCH)):
        answers = backend.stat([name for _, _, name in batch])
        for (chunk, kind, name), answer in zip(batch, answers, strict=True):
            if isinstance(answer, StorageError):
                raise answer
            if isinstance(answer, int):
                yield PromptObject(name, chunk, kind, answer)


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


def known_formats(
    shelf: Shelf, folders: Collection[str] | None
) -> Iterator[tuple[str, ObjectFormat]]:
    """Yield namespace folders and their formats: of certain folders, or of all that have one.

    Raises
    ------
    ConfigError
        If one of `folders` has none.
    StorageError
        If the storage failed.
    """
    for info in shelf.namespaces():
        if folders is None or info.folder in folders:
            try:
                yield info.folder, known_format(info)
            except ConfigError:
                if folders is not None:
                    raise


def known_format(info: NamespaceInfo) -> ObjectFormat:
    """Return the format of a namespace.

    Raises
    ------
    ConfigError
        If it is unknown.
    """
    try:
        if info.namespace is not None:
            return ObjectFormat(info.namespace)
        problem = str(info.problem)
    except ConfigError as error:
        problem = str(error)
    raise ConfigError(
        f"the keys of chunks in {info.folder} are unknown: {problem}; an engine that stores to it"
        " writes a new namespace.json"
    )
