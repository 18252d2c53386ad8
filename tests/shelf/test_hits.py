"""Lookups where a hit needs several kinds of KV: the right end, found in few rounds."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from hybrid_format import hybrid_format
from hypothesis import given
from hypothesis import strategies as st
from kvshelf.backends import Properties, open_backend
from kvshelf.backends.base import StatResults
from kvshelf.backends.wrappers import WrappedBackend

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, STATE, WINDOW, Kind, kind_key
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import Lookup, LookupService
from kvshelf.shelf.shelf import Shelf

PATIENCE = 20.0
SIZE = 8

#: Which kinds a namespace has, and the shards of each.
KINDS_OF: Mapping[str, dict[Kind, int]] = {
    "full and states": {FULL: 1, STATE: 1},
    "full and windows": {FULL: 2, WINDOW: 1},
    "all": {FULL: 1, WINDOW: 2, STATE: 2},
    "windows and states": {WINDOW: 1, STATE: 2},
    "states": {STATE: 2},
    "windows": {WINDOW: 2},
}


def format_of(shards: Mapping[Kind, int]) -> ObjectFormat:
    """A namespace with one layer of each of some kinds."""
    shapes: dict[Kind, tuple[str, str, str]] = {
        FULL: ("canonical", "2,*,2,8", "BF16"),
        WINDOW: ("canonical", "2,*,2,8", "BF16"),
        STATE: ("state", "conv:2,16/;ssm:4/,4", "BF16;F32"),
    }
    first = next(iter(shards))
    return hybrid_format(
        chunk_size=SIZE,
        stages=[len(shards)],
        shards=shards.get(FULL, shards[first]),
        window_shards=shards.get(WINDOW),
        state_shards=shards.get(STATE),
        kinds=list(shards),
        layouts=[shapes[kind][0] for kind in shards],
        layer_names=[f"layers.{i}" for i in range(len(shards))],
        layer_shapes=[shapes[kind][1] for kind in shards],
        layer_dtypes=[shapes[kind][2] for kind in shards],
    )


FORMATS = {name: format_of(shards) for name, shards in KINDS_OF.items()}


class Names(WrappedBackend):
    """A storage with names and sizes only, near or far away."""

    def __init__(self, probe_cost: float) -> None:
        super().__init__(open_backend(f"memory://names-{os.urandom(8).hex()}"))
        self.sizes: dict[str, int] = {}
        self.asked: list[list[str]] = []
        self._probe_cost = probe_cost

    @property
    def properties(self) -> Properties:
        found = self.inner.properties
        return replace(found, probe_cost=self._probe_cost, probes_at_once=64)

    def stat(self, names: Sequence[str]) -> StatResults:
        self.asked.append(list(names))
        return [self.sizes.get(name) for name in names]

    def folders(self, prefix: str = "") -> Sequence[str]:
        return []


class Rig:
    """Lookups in a hybrid namespace, on a storage with names and sizes only."""

    def __init__(self, fmt: ObjectFormat, window: int, *, far: bool) -> None:
        self.fmt = fmt
        self.window = window
        self.backend = Names(0.02 if far else 0.0)
        self.failed = FailedKeys()
        self.counters = Counters()
        shelf = Shelf(self.backend)
        self.service = LookupService(
            shelf.view(fmt),
            failed=self.failed,
            counters=self.counters,
            others={kind: shelf.view(fmt.of(kind)) for kind in fmt.kinds[1:]},
            window=window,
        )

    def name(self, kind: Kind, chunk: Chunk, shard: int) -> str:
        name = object_name(chunk, shard, self.fmt.of(kind).shards, kind)
        return f"{self.fmt.namespace.folder}/{name}"

    def put(self, kind: Kind, chunks: Iterable[Chunk], shards: Iterable[int] | None = None) -> None:
        fmt = self.fmt.of(kind)
        for chunk in chunks:
            for shard in range(fmt.shards) if shards is None else shards:
                self.backend.sizes[self.name(kind, chunk, shard)] = fmt.object_size(shard)

    def chunks(self, tokens: Sequence[int]) -> list[Chunk]:
        return self.chain().extend(tokens)

    def chain(self) -> KeyChain:
        return KeyChain(self.fmt.namespace.digest, SIZE)

    def look(
        self, tokens: Sequence[int], ends: Sequence[int] | None = None, first: int = 0
    ) -> Lookup:
        lookup = self.service.submit(tokens, self.chain, ends=ends, first_chunk=first)
        assert lookup.wait(PATIENCE)
        return lookup

    def close(self) -> None:
        self.service.close()


def prompt(chunks: int, rest: int = 0, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=chunks * SIZE + rest)


@dataclass
class Case:
    """What is on a shelf: for each kind and chunk the shards that are there."""

    name: str
    count: int
    window: int
    first: int
    ends: list[int] | None
    there: dict[Kind, list[frozenset[int]]]
    failed: set[tuple[Kind, int]]


@st.composite
def cases(draw: st.DrawFn, *, gaps: bool) -> Case:
    """Any sets of objects; with `gaps`, of full ones too."""
    name = draw(st.sampled_from(sorted(KINDS_OF)))
    shards = KINDS_OF[name]
    count = draw(st.integers(0, 150))
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    whole = draw(st.sampled_from([0.05, 0.5, 0.9, 1.0]))
    there: dict[Kind, list[frozenset[int]]] = {}
    for kind, number in shards.items():
        every = frozenset(range(number))
        there[kind] = [
            every if rng.random() < whole else frozenset(s for s in every if rng.random() < 0.5)
            for _ in range(count)
        ]
    if FULL in there and not gaps:
        prefix = rng.randint(0, count)
        there[FULL] = [
            frozenset(range(shards[FULL])) if i < prefix else frozenset() for i in range(count)
        ]
    ends = draw(st.none() | st.sets(st.integers(1, max(1, count)), max_size=40).map(sorted))
    kinds = [kind for kind in shards if kind != FULL or gaps]
    failed = {
        (rng.choice(kinds), rng.randrange(count))
        for _ in range(draw(st.integers(0, 3)) if count and kinds else 0)
    }
    window = draw(st.integers(0, 5 * SIZE))
    return Case(name, count, window, draw(st.integers(0, 5)), ends, there, failed)


def expected(case: Case) -> tuple[int, int]:
    """The hit and the full prefix, from the definition of a hit, behind `first`."""
    shards = KINDS_OF[case.name]
    first = min(case.first, case.count)

    def whole(kind: Kind, index: int) -> bool:
        return index < first or (
            len(case.there[kind][index]) == shards[kind] and (kind, index) not in case.failed
        )

    full = case.count
    if FULL in shards:
        full = next((i for i in range(case.count) if not whole(FULL, i)), case.count)
    hit = first
    for end in range(1, case.count + 1) if case.ends is None else case.ends:
        if not first < end <= full:
            continue
        before = range(end * SIZE)
        reached = {token // SIZE for token in before if token > end * SIZE - case.window}
        if STATE in shards and not whole(STATE, end - 1):
            continue
        if WINDOW in shards and not all(whole(WINDOW, index) for index in reached):
            continue
        hit = max(hit, end)
    return hit - first, max(full, first) - first


def check(case: Case, *, far: bool) -> None:
    with closing(Rig(FORMATS[case.name], case.window, far=far)) as rig:
        tokens = prompt(case.count, 3)
        chunks = rig.chunks(tokens)
        for kind, of_kind in case.there.items():
            for chunk, shards in zip(chunks, of_kind, strict=True):
                rig.put(kind, [chunk], shards)
        for kind, index in case.failed:
            rig.failed.add(kind_key(chunks[index].key, kind), bad=True)
        for _ in range(2):
            rig.backend.asked.clear()
            lookup = rig.look(tokens, case.ends, case.first)
            assert (lookup.hit_chunks, lookup.full_chunks) == expected(case)
            assert lookup.chain is not None and lookup.chain.chunks == chunks
            for kind, known in lookup.known.items():
                assert all(len(case.there[kind][i]) == KINDS_OF[case.name][kind] for i in known)
            if far:
                assert len(rig.backend.asked) <= 12, "a bounded number of rounds"


@given(cases(gaps=True))
def test_a_hit_is_what_the_definition_says_on_a_near_storage(case: Case) -> None:
    check(case, far=False)


@given(cases(gaps=False))
def test_a_hit_is_what_the_definition_says_on_a_far_storage(case: Case) -> None:
    check(case, far=True)
