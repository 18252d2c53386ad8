"""Why prompts miss: what a shelf has of a prompt.

Owns the search for causes (:class:`Explainer`) and their texts (:class:`Cause`).

A prompt is token ids and a cache salt. Its chunk keys are computed in each namespace of the shelf,
and the objects of these names are probed, as an engine's lookup does. What ends the hit is then
looked for in other namespaces, without the salt, and behind the gap.

Contracts
---------
* Nothing is changed, and no object is read.
* What a shelf says is not trusted: no content of it is an error here.
* Adapters, images and drafters are no part of the keys that are computed here.
* All functions block on storage, on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeAlias

from kvshelf.capacity import keepers
from kvshelf.errors import ConfigError
from kvshelf.format.differences import differing_fields, how_to_unite
from kvshelf.format.hit_rule import HitRule
from kvshelf.format.keys import Chunk, KeyChain, salt_group_of
from kvshelf.format.kinds import FULL, Kind
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.prompts import Prompt, TokenPrompt
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, Presence
from kvshelf.tools.prompt_objects import known_format

#: A prompt whose `tokens` are set.
AnyPrompt: TypeAlias = "Prompt | TokenPrompt"

_BATCH: Final = 256
#: Namespaces, and pieces that are missing, that an explanation lists.
_MOST_NEAR: Final = 16
_MOST_MISSING: Final = 16
#: The code for what stands in the place of an object, and what to do about it.
_STANDS: Final = {
    "wrong size": (
        "wrong_size",
        "it is still being copied there, or damaged: the next store replaces it",
    ),
    "not a regular file": ("not_regular", "remove it"),
    "error": (
        "probe_error",
        "the storage did not say whether it has it: kvshelf doctor SHELF tries the storage",
    ),
}


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason for a miss.

    Attributes
    ----------
    code : str
        For programs.
    text, advice : str
        What was found, and what to do; `advice` may be empty.
    """

    code: str
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What ends a hit: a kind of a chunk that is not whole.

    Attributes
    ----------
    kind : Kind
    chunk, first_token, last_token : int
        Its index, and its tokens in the prompt.
    objects : dict
        For each name that was probed, what stands there: a value of
        :class:`~kvshelf.shelf.view.Presence`.
    """

    kind: Kind
    chunk: int
    first_token: int
    last_token: int
    objects: dict[str, str]


@dataclass(frozen=True, slots=True)
class Near:
    """What a namespace has of a prompt.

    Attributes
    ----------
    namespace : str
        Its folder.
    group : str
        The salt group in which the most was found.
    chunks, hit_chunks : int
        Whole chunks of the prompt, and how many of them a lookup finds.
    chunk_size : int
    differs : list of str
        Fields of the record that differ from those of the prompt's namespace.
    unite : str
        What differs, and what to set; empty if nothing does.
    """

    namespace: str
    group: str
    chunks: int
    hit_chunks: int
    chunk_size: int
    differs: list[str]
    unite: str


@dataclass(slots=True)
class Explanation:
    """The answer for one prompt.

    Attributes
    ----------
    line, tokens : int
        Of the prompt: its line in the file, and its length.
    namespace : str or None
        The folder of the namespace in which it was looked for; None if there is none.
    chosen : str
        Why that one.
    chunk_size, chunks, usable_chunks, hit_chunks : int
        Tokens of a chunk; whole chunks of the prompt; those of them that a hit can have; and those
        that a lookup finds now.
    missing : list of Piece
        What ends the hit; at most 16.
    causes : list of Cause
        The likeliest first.
    near : list of Near
        The namespaces of the shelf, those with the longest hit first.
    """

    line: int
    tokens: int
    namespace: str | None = None
    chosen: str = ""
    chunk_size: int = 0
    chunks: int = 0
    usable_chunks: int = 0
    hit_chunks: int = 0
    missing: list[Piece] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    near: list[Near] = field(default_factory=list)

    @property
    def hits(self) -> bool:
        """Whether an engine can load all that a hit can have."""
        return 0 < self.usable_chunks == self.hit_chunks


@dataclass(slots=True)
class _Found:
    """What a namespace has of a prompt, in one salt group."""

    folder: str
    fmt: ObjectFormat
    chunks: list[Chunk]
    #: Chunks that a hit can have.
    usable: int
    #: Of each kind, what stands in the place of each object of a chunk, by its index.
    seen: dict[Kind, dict[int, list[str]]]

    def present(self) -> dict[Kind, set[int]]:
        """Return the chunks of each kind that are there."""
        there = {Presence.PRESENT.value}
        return {
            kind: {index for index, states in seen.items() if set(states) == there}
            for kind, seen in self.seen.items()
        }

    @property
    def full(self) -> int:
        """Leading chunks whose full objects are there; all without kind full."""
        there = self.present().get(FULL, range(len(self.chunks)))
        return next((n for n in range(len(self.chunks)) if n not in there), len(self.chunks))

    @property
    def rule(self) -> HitRule:
        return HitRule.of(self.fmt.namespace.record)

    @property
    def hit(self) -> int:
        """Chunks that a lookup finds."""
        return self.rule.longest(range(1, min(self.usable, self.full) + 1), self.present())


class Explainer:
    """Explains misses of prompts on one shelf.

    Parameters
    ----------
    shelf : Shelf
        Open it read-only.
    folder : str, optional
        The namespace folder in which prompts are looked for. When absent: the only one, or the one
        with the longest hit.

    Raises
    ------
    StorageError
        If the shelf cannot be listed.
    """

    def __init__(self, shelf: Shelf, *, folder: str | None = None) -> None:
        self._shelf = shelf
        self._folder = folder
        self._problems: list[Cause] = []
        self._formats: dict[str, ObjectFormat] = {}
        #: The namespaces with salt groups.
        self._grouped: set[str] = set()
        for info in shelf.namespaces():
            try:
                self._formats[info.folder] = known_format(info)
            except ConfigError as error:
                self._problems.append(Cause("description", str(error)))
            if {*shelf.backend.folders(info.folder)} - {"_"}:
                self._grouped.add(info.folder)

    def explain(self, prompt: AnyPrompt) -> Explanation:
        """Explain one prompt, which is token ids.

        Raises
        ------
        StorageError
            If the storage fails as a whole.
        """
        answer = Explanation(prompt.line, len(prompt.tokens or ()))
        found = {folder: self._best(folder, prompt) for folder in self._formats}
        if not found or (self._folder is not None and self._folder not in found):
            answer.causes = [
                *self._problems,
                Cause(
                    "no_namespace",
                    f"{self._shelf.url} has no namespace that can be used: nothing is stored there",
                    "compare it with the shelf in the line that the engine logs at start",
                ),
            ]
            return answer
        if self._folder is not None:
            own, answer.chosen = found[self._folder], "it was named"
        else:
            own = max(found.values(), key=lambda one: one.hit * one.fmt.chunk_size)
            only = len(found) == 1
            answer.chosen = "the only one of the shelf" if only else "the one with the longest hit"
        answer.namespace = own.folder
        answer.chunk_size, answer.chunks = own.fmt.chunk_size, len(own.chunks)
        answer.usable_chunks, answer.hit_chunks = own.usable, own.hit
        answer.near = _near(own, found.values())
        answer.missing = list(islice(_missing(own), _MOST_MISSING))
        answer.causes = list(self._causes(prompt, own, answer))
        return answer

    # ------------------------------------------------------------------------- what is there

    def _best(self, folder: str, prompt: AnyPrompt) -> _Found:
        """Look a prompt up in the salt group in which the most of it is."""
        groups = ["_", salt_group_of(prompt.salt)] if prompt.salt else ["_"]
        if folder in self._grouped:
            # Where neither has any, an engine would store it there.
            groups.reverse()
        found = [self._look(folder, prompt, group, prompt.salt) for group in groups]
        return max(found, key=lambda one: one.hit)

    def _look(self, folder: str, prompt: AnyPrompt, group: str, salt: str) -> _Found:
        fmt, tokens = self._formats[folder], prompt.tokens or ()
        chain = KeyChain(fmt.namespace.digest, fmt.chunk_size, salt=salt, salt_group=group)
        chunks = chain.extend(tokens)
        hybrid = fmt.kinds != (FULL,)
        # A hit of a hybrid model ends at a chunk, and leaves one token to compute.
        usable = max(0, len(tokens) - 1) // fmt.chunk_size if hybrid else len(chunks)
        seen: dict[Kind, dict[int, list[str]]] = {kind: {} for kind in fmt.kinds}
        for own in map(fmt.of, fmt.kinds):
            refs = (ObjectRef(chunk, shard) for chunk in chunks for shard in range(own.shards))
            while batch := list(islice(refs, _BATCH)):
                for ref, answer in zip(batch, self._shelf.view(own).probe(batch), strict=True):
                    seen[own.kind].setdefault(ref.chunk.index, []).append(answer.value)
        return _Found(folder, fmt, chunks, usable, seen)

    # ------------------------------------------------------------------------- causes

    def _causes(self, prompt: AnyPrompt, own: _Found, answer: Explanation) -> Iterator[Cause]:
        if not own.chunks:
            size = own.fmt.chunk_size
            text = f"the prompt has {len(prompt.tokens or ())} tokens, and a chunk has {size}"
            yield Cause("too_short", text, "only whole chunks are stored")
        if not answer.missing:
            return
        yield from _of_objects(answer.missing)
        have = own.hit * own.fmt.chunk_size
        near = answer.near[0]
        if near.unite and near.hit_chunks * near.chunk_size > have:
            yield Cause(
                "other_namespace",
                f"{near.namespace} has {near.hit_chunks} of its {near.chunks} chunks of this"
                " prompt, and is another namespace",
                near.unite,
            )
        if prompt.salt and (bare := self._look(own.folder, prompt, "_", "")).hit > own.hit:
            yield Cause(
                "cache_salt",
                f"{bare.hit} of {bare.usable} chunks are stored without a cache_salt, and this"
                " prompt has one",
                "requests share KV only if they have the same cache_salt",
            )
        yield from self._not_there(own, answer.missing)

    def _not_there(self, own: _Found, missing: Sequence[Piece]) -> Iterator[Cause]:
        """Yield what may have become of what ends the hit."""
        piece, size = missing[0], own.fmt.chunk_size
        if piece.kind != FULL:
            names = ", ".join(str(piece.chunk) for piece in missing)
            yield Cause(
                f"no_{piece.kind}",
                f"full KV of {own.full} chunks is there, but not the {piece.kind} of chunk {names}",
                "it was not stored, or deleted before the rest",
            )
        elif set(piece.objects.values()) - {Presence.MISSING.value}:
            return
        elif own.full == 0:
            yield Cause(
                "never_stored",
                "not even its first chunk is stored: no engine has stored a prompt that begins with"
                f" these {size} tokens, or it was deleted",
                "a token near the beginning may differ, such as a date in a chat template. LoRA"
                " adapters and images are part of the key too",
            )
            return
        elif later := [index for index in own.present()[FULL] if index > own.full]:
            # Chunks are stored from the prompt's beginning on.
            yield Cause(
                "deleted",
                f"chunk {piece.chunk} is missing and chunk {min(later)} is there: it was stored,"
                " and deleted since",
                "capacity.max_bytes, kvshelf gc, a lifecycle rule or a script deletes objects",
            )
        else:
            yield Cause(
                "parts_here",
                f"the first {own.full} chunks are stored, and nothing behind them: stored prompts"
                f" differ from this one in tokens {piece.first_token} to {piece.last_token}, or the"
                " rest was not stored yet, or was deleted",
                "a store may take some seconds",
            )
        yield from self._bounds()

    def _bounds(self) -> Iterator[Cause]:
        """Yield the bounds of the shelf, as its keepers say them."""
        if bounds := keepers.bounds(keepers.read(self._shelf.backend)):
            values = (f"{name} {value:.0f}" for name, value in bounds.items())
            yield Cause(
                "bounds",
                f"engines keep this shelf within {' and '.join(values)}",
                "their logs say what was deleted. Raise capacity.max_bytes or max_age, or pin the"
                " prompt: kvshelf pin SHELF NAME PROMPTS",
            )


# ------------------------------------------------------------------------------- pure functions


def _near(own: _Found, found: Iterable[_Found]) -> list[Near]:
    """Return what the namespaces have, those with the longest hit first."""
    near = []
    for one in found:
        theirs, ours = one.fmt.namespace, own.fmt.namespace
        group = one.chunks[0].salt_group if one.chunks else "_"
        differs = differing_fields(ours, theirs)
        unite = how_to_unite(ours, theirs) if differs else ""
        size = one.fmt.chunk_size
        near.append(Near(one.folder, group, len(one.chunks), one.hit, size, differs, unite))
    near.sort(key=lambda row: (-row.hit_chunks * row.chunk_size, len(row.differs)))
    return near[:_MOST_NEAR]


def _missing(own: _Found) -> Iterator[Piece]:
    """Yield what ends the hit."""
    if own.hit >= own.usable:
        return
    end = min(own.full, own.usable)
    pieces = [(FULL, own.full)] if own.hit == end else own.rule.missing(end, own.present())
    for kind, index in pieces:
        fmt, size = own.fmt.of(kind), own.fmt.chunk_size
        names = (
            f"{own.folder}/{object_name(own.chunks[index], shard, fmt.shards, kind)}"
            for shard in range(fmt.shards)
        )
        objects = dict(zip(names, own.seen[kind].get(index, ()), strict=False))
        yield Piece(kind, index, index * size, index * size + size - 1, objects)


def _of_objects(missing: Sequence[Piece]) -> Iterator[Cause]:
    """Yield what stands in the places of missing pieces."""
    for piece in missing:
        states = list(piece.objects.values())
        for name, state in piece.objects.items():
            if found := _STANDS.get(state):
                yield Cause(found[0], f"{name}: {state}", found[1])
        lacking = [str(number) for number, state in enumerate(states) if state == "missing"]
        if 0 < len(lacking) < len(states):
            yield Cause(
                "missing_shard",
                f"of chunk {piece.chunk}, kind {piece.kind}, shard {', '.join(lacking)} of"
                f" {len(states)} is missing",
                "a rank of the engine that stored it dropped its part, or it was deleted",
            )
