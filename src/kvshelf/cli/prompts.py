"""Prompts of commands: the options, their chunks, and the objects of these on a shelf.

Owns how a file of prompts becomes token ids (as they are, or by the tokenizer of a model), which
chunks a prompt has in a namespace, in which salt groups they may be, and how their objects are
found: by name, without a listing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from kvshelf.backends import Backend
from kvshelf.cli.common import option
from kvshelf.cli.listing import formats_of
from kvshelf.errors import ConfigError, ObjectNameError, StorageError
from kvshelf.format.keys import Chunk, KeyChain, check_salt_group, salt_group_of
from kvshelf.format.kinds import Kind
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.prompts import TokenPrompt, read_prompts
from kvshelf.shelf.shelf import Shelf

logger = logging.getLogger(__name__)

#: Names that are asked for in one call.
_BATCH: Final = 256

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


def token_prompts(file: Path, model: str | None) -> list[TokenPrompt]:
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
        return [TokenPrompt(prompt.line, prompt.tokens or (), prompt.salt) for prompt in prompts]
    if model is None:
        raise ConfigError(
            f"{file}: line {text.line} is text; name the model whose tokenizer reads it with"
            " --model, or give token ids"
        )
    logger.warning("importing vLLM, whose tokenizer of %s reads the prompts", model)
    from kvshelf.vllm.seeding import PromptRenderer

    return PromptRenderer.of_model(model).render(prompts)


def prompt_chunks(
    fmt: ObjectFormat, prompts: Iterable[TokenPrompt], *, tails: bool = False
) -> Iterator[Chunk]:
    """Yield the chunks of prompts in each salt group that they may be in, each once.

    Parameters
    ----------
    fmt : ObjectFormat
        Of the namespace, of any kind.
    prompts : Iterable of TokenPrompt
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
            chunks = chain.extend(prompt.tokens)
            if tails and (tail := chain.tail()) is not None:
                chunks.append(tail)
            for chunk in chunks:
                if (chunk.key, group) not in seen:
                    seen.add((chunk.key, group))
                    yield chunk


@dataclass(frozen=True, slots=True)
class ChunkObject:
    """An object of a chunk that a shelf has: its name below the root, and its bytes."""

    name: str
    chunk: Chunk
    kind: Kind
    size: int


def stored_objects(
    backend: Backend, folder: str, fmt: ObjectFormat, chunks: Iterable[Chunk]
) -> Iterator[ChunkObject]:
    """Yield the objects of chunks that a shelf has, of all kinds and shards and of any size.

    Parameters
    ----------
    backend : Backend
    folder : str
        The namespace folder.
    fmt : ObjectFormat
        Of the namespace, of any kind.
    chunks : Iterable of Chunk

    Raises
    ------
    StorageError
        If the storage failed.
    """
    names = (
        (chunk, kind, f"{folder}/{object_name(chunk, shard, fmt.of(kind).shards, kind)}")
        for chunk in chunks
        for kind in fmt.kinds
        for shard in range(fmt.of(kind).shards)
    )
    while batch := list(islice(names, _BATCH)):
        sizes = backend.stat([name for _, _, name in batch])
        for (chunk, kind, name), size in zip(batch, sizes, strict=True):
            if isinstance(size, StorageError):
                raise size
            if isinstance(size, int):
                yield ChunkObject(name, chunk, kind, size)


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
    shelf: Shelf, prompts: Sequence[TokenPrompt], folders: Sequence[str] = ()
) -> list[PromptKeys]:
    """Return the chunks of prompts in namespaces of a shelf.

    Parameters
    ----------
    shelf : Shelf
    prompts : Sequence of TokenPrompt
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
    namespaces = []
    too_large: list[int] = []
    for folder, fmt in formats_of(shelf, folders or None):
        chunks = list(prompt_chunks(fmt, prompts))
        if not chunks:
            too_large.append(fmt.chunk_size)
            continue
        objects = list(stored_objects(shelf.backend, folder, fmt, chunks))
        stored = len({stored_object.chunk.key for stored_object in objects})
        if stored or folders:
            keys = list(dict.fromkeys(chunk.key for chunk in chunks))
            nbytes = sum(stored_object.size for stored_object in objects)
            namespaces.append(PromptKeys(folder, keys, stored, nbytes))
    if too_large and not namespaces:
        raise ConfigError(
            f"no prompt fills a chunk of {min(too_large)} tokens, and only whole chunks can be"
            " pinned"
        )
    if not namespaces:
        raise ConfigError(
            f"no namespace of {shelf.url} has a chunk of these prompts; name the namespaces to pin"
            " what engines will store"
        )
    return namespaces
