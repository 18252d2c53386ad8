"""Why prompts miss: what a shelf has of a prompt.

Owns the search for causes (:class:`Explainer`) and their texts (:class:`Cause`).

A prompt is token ids and a cache salt. Its chunk keys are computed in each namespace of the shelf,
and the objects of these names are probed, as an engine's lookup does. What is missing is then
looked for elsewhere: in other namespaces, without the salt, in the other salt group, in quarantine
and behind the gap.

Contracts
---------
* Nothing is changed. Objects are read only to verify them.
* What a shelf says is not trusted: no content of it is an error here.
* Adapters, images and drafters are no part of the keys that are computed here.
* All functions block on storage, on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Final, TypeAlias

from kvshelf.capacity.files import time_of
from kvshelf.capacity.inventory import Scan
from kvshelf.capacity.lease import SWEEP, Lease
from kvshelf.errors import BadObjectError, KVShelfError, StorageError
from kvshelf.format.differences import differing_fields, how_to_unite
from kvshelf.format.hit_rule import HitRule
from kvshelf.format.keys import Chunk, KeyChain, salt_group_of
from kvshelf.format.kinds import FULL, STATE, WINDOW, Kind
from kvshelf.format.names import object_name, parse_namespace_folder
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.leftovers import QUARANTINE
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, Presence
from kvshelf.tools.naming import folders_named
from kvshelf.tools.prompts import Prompt, TokenPrompt

#: A prompt whose `tokens` are set.
AnyPrompt: TypeAlias = "Prompt | TokenPrompt"

_BATCH: Final = 256
#: Chunks that are probed behind a missing one, to tell a deleted chunk from one never stored.
_BEYOND: Final = 64
#: Namespaces, and pieces that are missing, that an explanation lists.
_MOST_NEAR: Final = 16
_MOST_MISSING: Final = 16


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
        For each name that was probed, what stands there, as a value of
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
        bad = any(cause.code == "bad_object" for cause in self.causes)
        return 0 < self.usable_chunks == self.hit_chunks and not bad


@dataclass(slots=True)
class _Space:
    """A namespace of the shelf."""

    fmt: ObjectFormat
    folder: str


@dataclass(slots=True)
class _Found:
    """What a namespace has of a prompt, in one salt group."""

    space: _Space
    chunks: list[Chunk]
    #: Chunks that a hit can have.
    usable: int
    #: Leading chunks whose full objects are there; all without kind full.
    full: int
    hit: int
    #: Of each kind, what was probed of a chunk, by its index.
    seen: dict[Kind, dict[int, list[Presence]]]

    @property
    def rule(self) -> HitRule:
        return HitRule.of(self.space.fmt.namespace.record)

    def there(self, kind: Kind, index: int) -> bool:
        seen = self.seen[kind].get(index, ())
        return bool(seen) and all(answer is Presence.PRESENT for answer in seen)

    def present(self) -> dict[Kind, set[int]]:
        """Return the chunks of each kind that are there."""
        return {
            kind: {index for index in seen if self.there(kind, index)}
            for kind, seen in self.seen.items()
        }


class Explainer:
    """Explains misses of prompts on one shelf.

    Parameters
    ----------
    shelf : Shelf
        Open it read-only.
    namespace : str, optional
        In which namespace prompts are looked for, as
        :func:`~kvshelf.tools.naming.folders_named` takes it. When absent: the only one, or the one
        with the longest hit.
    verify : bool
        Read and verify all objects that a hit needs.

    Raises
    ------
    ConfigError
        If the shelf does not have `namespace`, or it cannot be used.
    StorageError
        If the shelf cannot be listed.
    """

    def __init__(self, shelf: Shelf, *, namespace: str | None = None, verify: bool = False) -> None:
        self._shelf = shelf
        self._verify = verify
        #: What is in quarantine, by namespace folder.
        self._bad: dict[str, list[str]] = {}
        self._problems: list[Cause] = []
        self._spaces: list[_Space] = []
        for info in shelf.namespaces():
            problem = info.problem
            if info.namespace is not None:
                try:
                    self._spaces.append(_Space(ObjectFormat(info.namespace), info.folder))
                    continue
                except KVShelfError as error:
                    problem = str(error)
            self._problems.append(
                Cause(
                    "description",
                    f"the objects in {info.folder} cannot be named: {problem}",
                    "an engine that stores to it writes a new namespace.json",
                )
            )
        self._own, self._chosen = self._choose(namespace)

    # ------------------------------------------------------------------------- which namespace

    def _choose(self, wanted: str | None) -> tuple[_Space | None, str]:
        """Return the namespace of the prompts, and why it is that one."""
        if wanted is not None:
            name = parse_namespace_folder(wanted.rstrip("/")) or wanted
            folders = [space.folder for space in self._spaces]
            folder = folders_named(name, folders, self._shelf.url)[0]
            return self._spaces[folders.index(folder)], "it was named"
        if len(self._spaces) == 1:
            return self._spaces[0], "the only one of the shelf"
        return None, "the one with the longest hit"

    # ------------------------------------------------------------------------- one prompt

    def explain(self, prompt: AnyPrompt, earlier: Sequence[AnyPrompt] = ()) -> Explanation:
        """Explain one prompt.

        Parameters
        ----------
        prompt : Prompt
            Token ids.
        earlier : Sequence of Prompt
            Prompts that are thought to have been stored, as token ids.

        Raises
        ------
        StorageError
            If the storage fails as a whole.
        """
        answer = Explanation(prompt.line, len(prompt.tokens or ()))
        if not self._spaces:
            answer.causes = [
                *self._problems,
                Cause(
                    "no_namespace",
                    f"{self._shelf.url} has no namespace that can be used: nothing is stored there",
                    "compare it with the shelf in the line that the engine logs at start",
                ),
            ]
            return answer
        found = {space.folder: self._best(space, prompt) for space in self._spaces}
        if self._own is None:
            own = max(found.values(), key=lambda one: one.hit * one.space.fmt.chunk_size)
        else:
            own = found[self._own.folder]
        fmt = own.space.fmt
        answer.namespace, answer.chosen = own.space.folder, self._chosen
        answer.chunk_size, answer.chunks = fmt.chunk_size, len(own.chunks)
        answer.usable_chunks, answer.hit_chunks = own.usable, own.hit
        answer.near = self._near(own, found.values())
        answer.missing = list(islice(self._missing(own), _MOST_MISSING))
        answer.causes = list(self._causes(prompt, own, answer, earlier))
        return answer

    def _best(self, space: _Space, prompt: AnyPrompt) -> _Found:
        """Look a prompt up in the salt group in which the most of it is."""
        groups = ["_", salt_group_of(prompt.salt)] if prompt.salt else ["_"]
        found = [self._look(space, prompt, group, prompt.salt) for group in groups]
        return max(found, key=lambda one: one.hit)

    def _look(self, space: _Space, prompt: AnyPrompt, group: str, salt: str) -> _Found:
        fmt, tokens = space.fmt, prompt.tokens or ()
        chain = KeyChain(fmt.namespace.digest, fmt.chunk_size, salt=salt, salt_group=group)
        chunks = chain.extend(tokens)
        hybrid = fmt.kinds != (FULL,)
        # A hit of a hybrid model ends at a chunk, and leaves one token to compute.
        usable = max(0, len(tokens) - 1) // fmt.chunk_size if hybrid else len(chunks)
        seen: dict[Kind, dict[int, list[Presence]]] = {kind: {} for kind in fmt.kinds}
        found = _Found(space, chunks, usable, len(chunks), 0, seen)
        if FULL in fmt.kinds:
            found.full = self._leading(fmt.of(FULL), chunks, seen[FULL])
        for kind in fmt.kinds:
            if kind != FULL:
                self._probe(fmt.of(kind), chunks[: found.full], seen[kind])
        found.hit = found.rule.longest(range(1, usable + 1), found.present())
        return found

    def _leading(
        self, fmt: ObjectFormat, chunks: Sequence[Chunk], seen: dict[int, list[Presence]]
    ) -> int:
        """Probe chunks up to the first that is not whole; return how many are before it."""
        step = max(1, _BATCH // fmt.shards)
        for start in range(0, len(chunks), step):
            part = chunks[start : start + step]
            self._probe(fmt, part, seen)
            for chunk in part:
                if any(answer is not Presence.PRESENT for answer in seen[chunk.index]):
                    return chunk.index
        return len(chunks)

    def _probe(
        self, fmt: ObjectFormat, chunks: Sequence[Chunk], seen: dict[int, list[Presence]]
    ) -> None:
        """Probe all shards of chunks."""
        view = self._shelf.view(fmt)
        refs = (ObjectRef(chunk, shard) for chunk in chunks for shard in range(fmt.shards))
        while batch := list(islice(refs, _BATCH)):
            for ref, answer in zip(batch, view.probe(batch), strict=True):
                seen.setdefault(ref.chunk.index, []).append(answer)

    def _near(self, own: _Found, found: Iterable[_Found]) -> list[Near]:
        """Return what the namespaces have, those with the longest hit first."""
        near = []
        for one in found:
            theirs, ours = one.space.fmt.namespace, own.space.fmt.namespace
            group = one.chunks[0].salt_group if one.chunks else "_"
            differs = differing_fields(ours, theirs)
            unite = how_to_unite(ours, theirs) if differs else ""
            size = one.space.fmt.chunk_size
            near.append(
                Near(one.space.folder, group, len(one.chunks), one.hit, size, differs, unite)
            )
        near.sort(key=lambda row: (-row.hit_chunks * row.chunk_size, len(row.differs)))
        return near[:_MOST_NEAR]

    # ------------------------------------------------------------------------- what is missing

    def _missing(self, own: _Found) -> Iterator[Piece]:
        """Yield what ends the hit."""
        if own.hit >= own.usable:
            return
        end = min(own.full, own.usable)
        pieces = [(FULL, own.full)] if own.hit == end else own.rule.missing(end, own.present())
        for kind, index in pieces:
            fmt, chunk = own.space.fmt.of(kind), own.chunks[index]
            names = [
                f"{own.space.folder}/{object_name(chunk, shard, fmt.shards, kind)}"
                for shard in range(fmt.shards)
            ]
            states = [answer.value for answer in own.seen[kind].get(index, ())]
            size = fmt.chunk_size
            yield Piece(
                kind,
                index,
                index * size,
                index * size + size - 1,
                dict(zip(names, states, strict=False)),
            )

    # ------------------------------------------------------------------------- causes

    def _causes(
        self, prompt: AnyPrompt, own: _Found, answer: Explanation, earlier: Sequence[AnyPrompt]
    ) -> Iterator[Cause]:
        if not own.chunks:
            yield self._too_short(prompt, own)
            return
        if self._verify:
            yield from self._bad_objects(own)
        if not answer.missing:
            return
        yield from self._objects(answer.missing)
        if own.hit < own.full:
            yield from _kinds_missing(own, answer.missing)
            yield from self._bounds()
        yield from self._elsewhere(prompt, own, answer)
        yield from _differences(prompt, own, earlier)
        yield from self._not_there(own, answer)

    def _too_short(self, prompt: AnyPrompt, own: _Found) -> Cause:
        size = own.space.fmt.chunk_size
        text = f"the prompt has {len(prompt.tokens or ())} tokens, and a chunk has {size}"
        return Cause("too_short", text, "only whole chunks are stored")

    def _bad_objects(self, own: _Found) -> Iterator[Cause]:
        """Read the objects of a hit, and yield a cause for each that is bad."""
        for kind in own.space.fmt.kinds:
            fmt = own.space.fmt.of(kind)
            view = self._shelf.view(fmt)
            for chunk in own.chunks[: own.full]:
                if not own.there(kind, chunk.index):
                    continue
                for shard in range(fmt.shards):
                    try:
                        view.load(
                            ObjectRef(chunk, shard), memoryview(bytearray(fmt.object_size(shard)))
                        )
                    except BadObjectError as error:
                        name = object_name(chunk, shard, fmt.shards, kind)
                        yield Cause(
                            "bad_object",
                            f"{own.space.folder}/{name} is bad: {error}",
                            "an engine that stores replaces it; kvshelf verify --repair moves it"
                            " aside",
                        )
                    except StorageError as error:
                        yield Cause("storage_error", f"chunk {chunk.index} is unreadable: {error}")

    def _objects(self, missing: Sequence[Piece]) -> Iterator[Cause]:
        """Yield what the objects of the missing pieces tell."""
        for piece in missing:
            states = list(piece.objects.values())
            lacking = [number for number, state in enumerate(states) if state == "missing"]
            for name, state in piece.objects.items():
                if state == Presence.WRONG_SIZE.value:
                    yield Cause(
                        "wrong_size",
                        f"{name} has the wrong size",
                        "it is still being copied there, or damaged: the next store replaces it",
                    )
                elif state == Presence.NOT_REGULAR.value:
                    yield Cause("not_regular", f"{name} is not a regular file", "remove it")
                elif state == Presence.ERROR.value:
                    yield Cause(
                        "probe_error",
                        f"the storage did not say whether it has {name}",
                        "kvshelf doctor SHELF tries the storage",
                    )
                elif where := self._quarantined(name):
                    yield Cause(
                        "quarantined",
                        f"{name} was found bad and moved to {where}",
                        "the next engine that computes the chunk stores it anew",
                    )
            if 0 < len(lacking) < len(states):
                shards = ", ".join(map(str, lacking))
                yield Cause(
                    "missing_shard",
                    f"of chunk {piece.chunk}, kind {piece.kind}, shard {shards} of {len(states)} is"
                    " missing",
                    "a rank of the engine that stored it dropped its part, or it was deleted",
                )

    def _quarantined(self, name: str) -> str:
        """Return where an object lies in quarantine; empty if it does not."""
        folder, _, _ = name.partition("/")
        if folder not in self._bad:
            try:
                folders = (f"{folder}/{QUARANTINE}",)
                bad = Scan(self._shelf.backend, folders=folders, parents=None).run()
                self._bad[folder] = [] if bad is None else [left.name for left in bad.leftovers]
            except StorageError:
                self._bad[folder] = []
        base = name.rpartition("/")[2]
        return next((where for where in self._bad[folder] if where.endswith(base)), "")

    def _elsewhere(self, prompt: AnyPrompt, own: _Found, answer: Explanation) -> Iterator[Cause]:
        """Yield where more of the prompt is than in its namespace, salt and group."""
        have = own.hit * own.space.fmt.chunk_size
        for near in answer.near:
            if near.unite and near.hit_chunks * near.chunk_size > have:
                yield Cause(
                    "other_namespace",
                    f"{near.namespace} has {near.hit_chunks} of its {near.chunks} chunks of this"
                    " prompt, and is another namespace",
                    near.unite,
                )
                break
        if prompt.salt:
            bare = self._look(own.space, prompt, "_", "")
            if bare.hit > own.hit:
                yield Cause(
                    "cache_salt",
                    f"{bare.hit} of {bare.usable} chunks are stored without a cache_salt, and this"
                    " prompt has one",
                    "requests share KV only if they have the same cache_salt",
                )

    def _not_there(self, own: _Found, answer: Explanation) -> Iterator[Cause]:
        """Yield what may have become of the chunk that ends the hit."""
        piece = answer.missing[0]
        if set(piece.objects.values()) - {Presence.MISSING.value} or own.hit < own.full:
            return
        # Beyond the gap: chunks are stored from the prompt's beginning on.
        fmt = own.space.fmt.of(piece.kind)
        later = own.chunks[piece.chunk + 1 : piece.chunk + 1 + _BEYOND]
        answers = self._shelf.view(fmt).probe([ObjectRef(chunk, 0) for chunk in later])
        if there := [c.index for c, a in zip(later, answers, strict=True) if a is Presence.PRESENT]:
            yield Cause(
                "deleted",
                f"chunk {piece.chunk} is missing and chunk {there[0]} is there: it was stored, and"
                " deleted since",
                "capacity.max_bytes, kvshelf gc, a lifecycle rule or a script deletes objects",
            )
            yield from self._bounds()
        elif own.full == 0:
            yield Cause(
                "never_stored",
                "not even its first chunk is stored: no engine has stored a prompt that begins with"
                f" these {fmt.chunk_size} tokens, or it was deleted",
                "a token near the beginning may differ, such as a date in a chat template: --like"
                " compares with another prompt. LoRA adapters and images are part of the key too",
            )
        else:
            yield Cause(
                "parts_here",
                f"the first {own.full} chunks are stored, and nothing behind them: stored prompts"
                f" differ from this one in tokens {piece.first_token} to {piece.last_token}, or the"
                " rest was not stored yet, or was deleted",
                "--like compares with another prompt; a store may take some seconds",
            )
            yield from self._bounds()

    def _bounds(self) -> Iterator[Cause]:
        """Yield the bounds within which sweeps keep the shelf, by the record that they leave."""
        backend = self._shelf.backend
        written = backend.info(SWEEP)
        now = max(time_of(backend), 0.0 if written is None else written.mtime)
        if bounds := Lease(backend).read(now).bounds(now):
            values = (f"{name} {value:.0f}" for name, value in bounds.items())
            yield Cause(
                "bounds",
                f"sweeps keep this shelf within {' and '.join(values)}",
                "the log line of a sweep says what went. Raise capacity.max_bytes or max_age, or"
                " pin the prompt: kvshelf pin SHELF NAME PROMPTS",
            )


# ------------------------------------------------------------------------------- pure functions


def _kinds_missing(own: _Found, missing: Sequence[Piece]) -> Iterator[Cause]:
    """Yield why a hit ends although its full chunks are there."""
    kinds = {piece.kind for piece in missing}
    end = min(own.full, own.usable)
    if STATE in kinds:
        states = [index for index in range(own.full) if own.there(STATE, index)]
        last = f"the last one is that of chunk {states[-1]}" if states else "there is none"
        yield Cause(
            "no_state",
            f"full KV of {own.full} chunks is there, but not the state after chunk {end - 1};"
            f" {last}",
            "an engine that computes these chunks stores those at which its steps end",
        )
    if WINDOW in kinds:
        names = ", ".join(str(piece.chunk) for piece in missing if piece.kind == WINDOW)
        yield Cause(
            "no_window",
            f"a hit of {end} chunks needs windows that are missing: chunk {names}",
            "they were dropped (window_dropped_chunks), or deleted before the rest",
        )


def _differences(prompt: AnyPrompt, own: _Found, earlier: Sequence[AnyPrompt]) -> Iterator[Cause]:
    """Yield where a prompt differs from the earlier one that is most like it."""
    tokens = list(prompt.tokens or ())
    best, common = None, -1
    for other in earlier:
        same = _common(tokens, list(other.tokens or ()))
        if same > common:
            best, common = other, same
    if best is None:
        return
    if best.salt != prompt.salt:
        yield Cause(
            "cache_salt",
            f"the prompt in line {best.line} has another cache_salt",
            "requests share KV only if they have the same cache_salt",
        )
    if common < len(tokens):
        yield Cause(
            "tokens_differ",
            f"the prompt in line {best.line} has the same {common} tokens at its beginning; token"
            f" {common} differs, in chunk {common // own.space.fmt.chunk_size}",
            "what changes between prompts belongs behind what they share",
        )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two prompts have in common at their beginnings."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
