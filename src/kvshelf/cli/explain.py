"""``kvshelf explain``: says why prompts miss.

A prompt is token ids and a cache salt. Its chunk keys are computed in each namespace of the shelf,
and the objects of these names are probed, as an engine's lookup does. The cause of a miss is then
looked for in other namespaces, without the salt, and behind the gap.

Owns the search for causes (:class:`Explainer`), their texts (:class:`Cause`), and the command.

Contracts
---------
* Nothing is changed, and no object is read.
* The content of a shelf is not trusted: none of it is an error here.
* The keys that are computed here have no adapters, images and drafters.
* All functions block on storage, on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Final

import typer

from kvshelf.capacity import keepers
from kvshelf.cli.common import PROBLEM, JsonOption, count_text, write_json, write_out
from kvshelf.cli.listing import format_of
from kvshelf.cli.prompts import ModelOption, PromptsArgument, token_prompts
from kvshelf.cli.shelves import NamespacesOption, OneShelf, find_folders, open_found
from kvshelf.errors import ConfigError, printable
from kvshelf.format.differences import differing_fields, how_to_unite
from kvshelf.format.hit_rule import HitRule
from kvshelf.format.keys import Chunk, KeyChain, salt_group_of
from kvshelf.format.kinds import FULL, Kind
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.prompts import TokenPrompt
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, Presence

#: Objects that are probed in one call.
_BATCH: Final = 256
#: Most namespaces that an explanation lists.
_MAX_NEAR: Final = 3
#: Most missing pieces that an explanation lists.
_MAX_MISSING: Final = 16
#: Most objects of a missing piece that the text lists.
_MAX_OBJECTS: Final = 8
#: By the state of a probed name: the code of the cause, and advice.
_STATES: Final = {
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
    """One reason for a miss: a code for programs, the finding, and advice, which may be empty."""

    code: str
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class MissingPiece:
    """What ends a hit: a kind of a chunk that is not whole.

    Attributes
    ----------
    kind : Kind
    chunk, first_token, last_token : int
        Its index, and its tokens in the prompt.
    objects : dict
        The state of each name that was probed: a value of
        :class:`~kvshelf.shelf.view.Presence`.
    """

    kind: Kind
    chunk: int
    first_token: int
    last_token: int
    objects: dict[str, str]


@dataclass(frozen=True, slots=True)
class NearNamespace:
    """How much of a prompt a namespace has.

    Attributes
    ----------
    namespace : str
        Its folder.
    group : str
        The salt group with the longest hit.
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
    missing : list of MissingPiece
        What ends the hit; at most 16.
    causes : list of Cause
        The likeliest first.
    near : list of NearNamespace
        The three namespaces with the longest hit, the longest first.
    """

    line: int
    tokens: int
    namespace: str | None = None
    chosen: str = ""
    chunk_size: int = 0
    chunks: int = 0
    usable_chunks: int = 0
    hit_chunks: int = 0
    missing: list[MissingPiece] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    near: list[NearNamespace] = field(default_factory=list)

    @property
    def hits(self) -> bool:
        """Whether an engine can load all that a hit can have."""
        return 0 < self.usable_chunks == self.hit_chunks


@dataclass(slots=True)
class _NamespaceSearch:
    """The chunks of a prompt in one namespace and salt group, and the states of their objects.

    Attributes
    ----------
    folder : str
    fmt : ObjectFormat
    group : str
    chunks : list of Chunk
    usable : int
        Number of chunks that a hit can have.
    states : dict
        Of each kind, the states of the objects of each chunk, by its index.
    """

    folder: str
    fmt: ObjectFormat
    group: str
    chunks: list[Chunk]
    usable: int
    states: dict[Kind, dict[int, list[str]]]

    def present(self) -> dict[Kind, set[int]]:
        """Return the chunks of each kind of which all objects are there."""
        return {
            kind: {index for index, of_chunk in states.items() if {*of_chunk} == {"present"}}
            for kind, states in self.states.items()
        }

    @property
    def full(self) -> int:
        """Leading chunks whose full objects are there; all without kind full."""
        present = self.present().get(FULL, range(len(self.chunks)))
        return next((n for n in range(len(self.chunks)) if n not in present), len(self.chunks))

    @property
    def rule(self) -> HitRule:
        return HitRule.of(self.fmt.namespace.record)

    @property
    def hit(self) -> int:
        """Chunks that a lookup finds."""
        return self.rule.longest(range(1, min(self.usable, self.full) + 1), self.present())

    @property
    def hit_tokens(self) -> int:
        return self.hit * self.fmt.chunk_size

    def missing(self) -> Iterator[MissingPiece]:
        """Yield what ends the hit."""
        if self.hit >= self.usable:
            return
        end = min(self.full, self.usable)
        pieces = [(FULL, self.full)] if self.hit == end else self.rule.missing(end, self.present())
        for kind, index in pieces:
            fmt, size = self.fmt.of(kind), self.fmt.chunk_size
            names = (
                f"{self.folder}/{object_name(self.chunks[index], shard, fmt.shards, kind)}"
                for shard in range(fmt.shards)
            )
            objects = dict(zip(names, self.states[kind].get(index, ()), strict=False))
            yield MissingPiece(kind, index, index * size, index * size + size - 1, objects)


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
        self._folders_with_salt_groups: set[str] = set()
        for info in shelf.namespaces():
            try:
                self._formats[info.folder] = format_of(info)
            except ConfigError as error:
                self._problems.append(Cause("description", str(error)))
            if {*shelf.backend.folders(info.folder)} - {"_"}:
                self._folders_with_salt_groups.add(info.folder)

    def explain(self, prompt: TokenPrompt) -> Explanation:
        """Explain one prompt.

        Raises
        ------
        StorageError
            If the storage fails as a whole.
        """
        answer = Explanation(prompt.line, len(prompt.tokens))
        searches = {folder: self._search(folder, prompt) for folder in self._formats}
        if not searches or (self._folder is not None and self._folder not in searches):
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
            search, answer.chosen = searches[self._folder], "it was named"
        else:
            search = max(searches.values(), key=lambda search: search.hit_tokens)
            is_only = len(searches) == 1
            answer.chosen = (
                "the only one of the shelf" if is_only else "the one with the longest hit"
            )
        answer.namespace = search.folder
        answer.chunk_size, answer.chunks = search.fmt.chunk_size, len(search.chunks)
        answer.usable_chunks, answer.hit_chunks = search.usable, search.hit
        near = [_near(search, candidate) for candidate in searches.values()]
        near.sort(key=lambda row: (-row.hit_chunks * row.chunk_size, len(row.differs)))
        answer.near = near[:_MAX_NEAR]
        answer.missing = list(islice(search.missing(), _MAX_MISSING))
        answer.causes = list(self._causes(prompt, search, answer))
        return answer

    def _search(self, folder: str, prompt: TokenPrompt) -> _NamespaceSearch:
        """Look a prompt up in the salt group with the longest hit."""
        groups = ["_", salt_group_of(prompt.salt)] if prompt.salt else ["_"]
        if folder in self._folders_with_salt_groups:
            # If neither has a hit, an engine would store the prompt in its salt group.
            groups.reverse()
        searches = [self._look_up(folder, prompt, group, prompt.salt) for group in groups]
        return max(searches, key=lambda search: search.hit)

    def _look_up(self, folder: str, prompt: TokenPrompt, group: str, salt: str) -> _NamespaceSearch:
        fmt = self._formats[folder]
        chain = KeyChain(fmt.namespace.digest, fmt.chunk_size, salt=salt, salt_group=group)
        chunks = chain.extend(prompt.tokens)
        is_hybrid = fmt.kinds != (FULL,)
        # A hit of a hybrid model ends at a chunk, and leaves one token to compute.
        usable = max(0, len(prompt.tokens) - 1) // fmt.chunk_size if is_hybrid else len(chunks)
        states: dict[Kind, dict[int, list[str]]] = {kind: {} for kind in fmt.kinds}
        for kind_fmt in map(fmt.of, fmt.kinds):
            refs = (ObjectRef(chunk, shard) for chunk in chunks for shard in range(kind_fmt.shards))
            while batch := list(islice(refs, _BATCH)):
                answers = self._shelf.view(kind_fmt).probe(batch)
                for ref, answer in zip(batch, answers, strict=True):
                    states[kind_fmt.kind].setdefault(ref.chunk.index, []).append(answer.value)
        return _NamespaceSearch(folder, fmt, group, chunks, usable, states)

    # ------------------------------------------------------------------------- causes

    def _causes(
        self, prompt: TokenPrompt, search: _NamespaceSearch, answer: Explanation
    ) -> Iterator[Cause]:
        if not search.chunks:
            size = search.fmt.chunk_size
            text = f"the prompt has {len(prompt.tokens)} tokens, and a chunk has {size}"
            yield Cause("too_short", text, "only whole chunks are stored")
        if not answer.missing:
            return
        yield from _object_causes(answer.missing)
        near = answer.near[0]
        if near.unite and near.hit_chunks * near.chunk_size > search.hit_tokens:
            yield Cause(
                "other_namespace",
                f"{near.namespace} has {near.hit_chunks} of its {near.chunks} chunks of this"
                " prompt, and is another namespace",
                near.unite,
            )
        if prompt.salt:
            unsalted = self._look_up(search.folder, prompt, "_", "")
            if unsalted.hit > search.hit:
                yield Cause(
                    "cache_salt",
                    f"{unsalted.hit} of {unsalted.usable} chunks are stored without a cache_salt,"
                    " and this prompt has one",
                    "requests share KV only if they have the same cache_salt",
                )
        yield from self._absence_causes(search, answer.missing)

    def _absence_causes(
        self, search: _NamespaceSearch, missing: Sequence[MissingPiece]
    ) -> Iterator[Cause]:
        """Yield why the pieces that end a hit may be absent."""
        piece = missing[0]
        if piece.kind != FULL:
            names = ", ".join(str(missing_piece.chunk) for missing_piece in missing)
            yield Cause(
                f"no_{piece.kind}",
                f"full KV of {search.full} chunks is there, but not the {piece.kind} of chunk"
                f" {names}",
                "it was not stored, or deleted before the rest",
            )
        elif set(piece.objects.values()) - {Presence.MISSING.value}:
            return
        elif search.full == 0:
            yield Cause(
                "never_stored",
                "not even its first chunk is stored: no engine has stored a prompt that begins with"
                f" these {search.fmt.chunk_size} tokens, or it was deleted",
                "a token near the beginning may differ, such as a date in a chat template. LoRA"
                " adapters and images are part of the key too",
            )
            return
        elif later := [index for index in search.present()[FULL] if index > search.full]:
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
                f"the first {search.full} chunks are stored, and nothing behind them: stored"
                f" prompts differ from this one in tokens {piece.first_token} to"
                f" {piece.last_token}, or the rest was not stored yet, or was deleted",
                "a store may take some seconds",
            )
        if bounds := keepers.bounds(keepers.read(self._shelf.backend)):
            values = (f"{name} {value:.0f}" for name, value in bounds.items())
            yield Cause(
                "bounds",
                f"engines keep this shelf within {' and '.join(values)}",
                "their logs say what was deleted. Raise capacity.max_bytes or max_age, or pin the"
                " prompt: kvshelf pin SHELF NAME PROMPTS",
            )


def _near(search: _NamespaceSearch, other: _NamespaceSearch) -> NearNamespace:
    """Return how much of a prompt another namespace has, compared with the prompt's own."""
    record, other_record = search.fmt.namespace, other.fmt.namespace
    differs = differing_fields(record, other_record)
    return NearNamespace(
        namespace=other.folder,
        group=other.group if other.chunks else "_",
        chunks=len(other.chunks),
        hit_chunks=other.hit,
        chunk_size=other.fmt.chunk_size,
        differs=differs,
        unite=how_to_unite(record, other_record) if differs else "",
    )


def _object_causes(missing: Sequence[MissingPiece]) -> Iterator[Cause]:
    """Yield a cause for each object of missing pieces that is there and cannot be loaded."""
    for piece in missing:
        states = list(piece.objects.values())
        for name, state in piece.objects.items():
            if state in _STATES:
                code, advice = _STATES[state]
                yield Cause(code, f"{name}: {state}", advice)
        absent = [str(shard) for shard, state in enumerate(states) if state == "missing"]
        if 0 < len(absent) < len(states):
            yield Cause(
                "missing_shard",
                f"of chunk {piece.chunk}, kind {piece.kind}, shard {', '.join(absent)} of"
                f" {len(states)} is missing",
                "a rank of the engine that stored it dropped its part, or it was deleted",
            )


# ----------------------------------------------------------------------------- the command


def explain(
    shelf: OneShelf,
    prompts: PromptsArgument,
    namespaces: NamespacesOption = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why prompts miss; --json writes one object per prompt."""
    misses = 0
    token_lists = token_prompts(prompts, model)
    with open_found(shelf) as opened:
        folders = find_folders(opened, namespaces) or []
        if len(folders) > 1:
            raise ConfigError("expected one --namespace: that of the engine that missed")
        explainer = Explainer(opened, folder=next(iter(folders), None))
        for prompt in token_lists:
            answer = explainer.explain(prompt)
            misses += not answer.hits
            if as_json:
                write_json({"hits": answer.hits, **asdict(answer)})
            else:
                write_out(_text(answer))
            write_out("")
    if misses:
        raise typer.Exit(PROBLEM)


def _text(answer: Explanation) -> str:
    lines = [f"line {answer.line}: {answer.tokens} tokens"]
    if answer.namespace is not None:
        lines[0] += (
            f", {count_text(answer.chunks, 'chunk')} of {answer.chunk_size}: a lookup finds"
            f" {answer.hit_chunks} of the {answer.usable_chunks} that it can use"
        )
        lines.append(f"  namespace  {answer.namespace} ({answer.chosen})")
    for piece in answer.missing:
        kind = "" if piece.kind == FULL else f", kind {piece.kind}"
        lines.append(
            f"  missing    chunk {piece.chunk}{kind}, tokens {piece.first_token} to"
            f" {piece.last_token}"
        )
        states = list(piece.objects.items())
        lines += [f"             {name}: {state}" for name, state in states[:_MAX_OBJECTS]]
        if len(states) > _MAX_OBJECTS:
            lines.append(f"             and {len(states) - _MAX_OBJECTS} more objects")
    for cause in answer.causes:
        lines.append(f"  cause      {cause.text} [{cause.code}]")
        if cause.advice:
            lines.append(f"             {cause.advice}")
    for near in answer.near:
        if near.namespace != answer.namespace:
            lines.append(
                f"  near       {near.namespace}: {near.hit_chunks} of {near.chunks} chunks; differs"
                f" in {', '.join(near.differs)}"
            )
    return "".join(f"{printable(line)}\n" for line in lines)
