"""Which objects are deleted first when space is needed, and which are too old.

Owns the order of eviction: :func:`choose` looks at all units of a storage and returns what to
delete, in order. The disk tier and the tools use the same order as engines.

A *unit* is one chunk, or one tail, with all its shards and kinds. The order is:

1. what was not used for `max_age`;
2. what no hit can use any more (*dead*): chunks whose parent is gone and what follows them, KV of a
   model with states behind the last state of its branch, windows and states that no possible hit
   needs;
3. the rest by age, the oldest first. The age is the time since the last use. What was never used
   since it was stored ages twice as fast, because most chunks are never used. What was used for
   longer than it has been idle ages more slowly, at most by half. Windows inside a prompt, where no
   hit ended and no prompts part, age 32 times as fast.

Of units with about the same age those deepest in their prompts are deleted first: a chunk is
useless without the ones before it. For the same reason a use of a chunk counts for all chunks
before it, as far as parents are known. "About the same" is a small part of the age that most units
have, at most the resolution with which uses are recorded: where all is replaced within minutes, an
hour would make all uses equal.

``python -m benchmarks.traces`` compares this order with others, on traces of requests.

Contracts
---------
* Pure: numpy arrays in, numpy arrays out. It neither reads nor deletes anything, and has no state.
* Deleting the victims in order, and stopping anywhere, leaves the beginnings of prompts.
* A state is deleted before the KV of its chunk only if an older state of the branch stays.
* Pinned units are never chosen.
* A million units take less than a second.

Threads
-------
Everything is safe to call from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvshelf.format.forest import Flags, Forest, HitRules, Integers, Masks
from kvshelf.format.kinds import (
    FULL,
    FULL_BIT,
    KIND_BITS,
    KINDS,
    STATE,
    STATE_BIT,
    WINDOW,
    WINDOW_BIT,
)

Floats: TypeAlias = "npt.NDArray[np.float64]"

#: Seconds for which a stored chunk is not dead, nor are those before it: the prompt may still be
#: computed, and the objects that make it useful not be stored yet.
SETTLE_SECONDS: Final = 300.0

#: Factor by which a unit that was never used since it was stored ages faster.
_NEVER_HIT_AGES: Final = 2.0
#: The same, besides, for a window inside a prompt, where no hit ended and no prompts part.
_UNLIKELY_AGES: Final = 32.0
#: Ratio of time in use to idle time from which on a unit ages at half the rate.
_LONG_USED: Final = 2.0
#: Part of the median age, and least seconds, within which ages count as equal: the uses of one hit
#: are recorded one after the other.
_SAME_PART: Final = 1 / 32
_LEAST_SAME: Final = 1.0
#: Size of the sample of units that shows the ages that most have.
_SAMPLED: Final = 1 << 20
#: Units that are judged at the same time, where each is judged by itself.
_AT_ONCE: Final = 1 << 16
#: The sample shows how many come first to within this part of all.
_SPARE_PART: Final = 1 / 256
#: Most ages that are distinguished, and the place of the rank above them in a sort key.
_MOST_AGES: Final = (1 << 30) - 1
_RANK_BITS: Final = np.uint64(62)
#: Ranks in keys of sorting; what is too old has 0.
_DEAD, _USEFUL = np.uint64(1), np.uint64(2)


@dataclass(slots=True)
class Units:
    """All units of a storage, one row each.

    Attributes
    ----------
    used : float64 array [n]
        Last use of the unit, seconds since the epoch; at least `born`.
    born : float64 array [n]
        When the last of its objects was stored, seconds since the epoch.
    index : uint32 array [n]
        Chunk index: the unit's place in its prompt.
    parent : int32 or int64 array [n]
        Row of the unit before it in its prompt; `UNKNOWN` if that was not looked up, `GONE` if it
        is not there or the unit is the first of its prompt.
    full, window, state : int64 array [n]
        Bytes of all objects of each kind.
    hit : bool array [n]
        It was used since it was stored.
    pinned : bool array [n]
    needs : uint8 array [n] or None
        Kinds of the row's namespace, by its record, as bits: what hits are made of. None: one
        namespace, with the kinds that any row has.
    broken : uint8 array [n] or None
        Kinds of which objects of some shards are missing, as bits. None: nothing is missing.
    window_used, state_used : float64 array [n] or None
        Last use of the objects of these kinds, where known by themselves. None: as `used`.
    """

    used: Floats
    born: Floats
    index: npt.NDArray[np.uint32]
    parent: npt.NDArray[np.signedinteger]
    full: Integers
    window: Integers
    state: Integers
    hit: Flags
    pinned: Flags
    needs: Masks | None = None
    broken: Masks | None = None
    window_used: Floats | None = None
    state_used: Floats | None = None

    def __len__(self) -> int:
        return len(self.used)

    def part(self, some: slice | Integers) -> Units:
        """Return some rows, with the parents that they have."""
        columns: dict[str, Any] = {
            column.name: values[some]
            for column in fields(self)
            if (values := getattr(self, column.name)) is not None
        }
        return Units(**columns)


@dataclass(frozen=True, slots=True)
class Victims:
    """What to delete, in this order.

    A row comes more than once if its kinds are deleted at different times.

    Attributes
    ----------
    rows : int64 array [m]
        Rows of the :class:`Units`.
    kinds : uint8 array [m]
        The kinds to delete, as bits: `FULL_BIT`, `WINDOW_BIT`, `STATE_BIT`.
    nbytes : int64 array [m]
        Their bytes.
    """

    rows: Integers
    kinds: Masks
    nbytes: Integers


def choose(
    units: Units,
    *,
    free: int,
    now: float,
    resolution: float,
    max_age: float | None = None,
    reach: int | Integers = 0,
) -> Victims:
    """Return what to delete so that `free` bytes become free and nothing is too old.

    Parameters
    ----------
    units : Units
    free : int
        Bytes to free. 0 or less: only what is too old is deleted. Victims hold fewer bytes only if
        nothing else may be deleted.
    now : float
        By the clock of the storage, seconds since the epoch.
    resolution : float
        Seconds in which uses are recorded once; above 0.
    max_age : float or None
        Seconds after the last use at which a unit is too old.
    reach : int or int64 array [n]
        :attr:`kvshelf.format.hit_rule.HitRule.reach`, for each row that of its namespace.
    """
    size = len(units)
    if not size or (free <= 0 and max_age is None):
        return _none()
    needs = _needs(units)
    reach = np.broadcast_to(np.asarray(reach, np.int64), (size,))
    # Times in the future count as now.
    same = _LEAST_SAME
    some = slice(None, None, 1 + size // _SAMPLED)
    used = units.used[some][~units.pinned[some]]
    if len(used):
        same = max(same, float(np.median(now - used)) * _SAME_PART)
    same = min(same, resolution)
    keys: list[npt.NDArray[np.uint64]] = []
    several = units.window.any() or units.state.any() or (needs != FULL_BIT).any()
    if several or (units.parent >= 0).any():
        keys = _keys(units, needs, reach, now, same, max_age)
    else:
        # Units are judged one by one: batches need less memory.
        keys.append(np.empty(size, np.uint64))
        for begin in range(0, size, _AT_ONCE):
            some = slice(begin, begin + _AT_ONCE)
            part = units.part(some), needs[some], reach[some]
            (keys[0][some],) = _keys(*part, now, same, max_age)
    return _take(units, keys, free)


def _keys(
    units: Units, needs: Masks, reach: Integers, now: float, same: float, max_age: float | None
) -> list[npt.NDArray[np.uint64]]:
    """Return by what full, window and state are sorted; one where there is full only."""
    size = len(units)
    deepest_first = np.uint32(0xFFFFFFFF) - units.index
    keys: list[npt.NDArray[np.uint64]] = []
    sizes = (units.full, units.window, units.state)
    for of_kind, (used, ages, dead) in zip(sizes, _judge(units, needs, reach, now), strict=True):
        if keys and not of_kind.any():
            keys.append(keys[0])
            continue
        # In place: of a million units each array takes 8 MB.
        scaled = ages / same
        key = np.minimum(scaled, _MOST_AGES, out=scaled).astype(np.uint64)
        del scaled
        np.subtract(np.uint64(_MOST_AGES), key, out=key)
        key <<= np.uint64(32)
        key |= deepest_first
        expired = np.zeros(size, np.bool_) if max_age is None else used < now - max_age
        key[~expired & ~dead] |= _USEFUL << _RANK_BITS
        key[~expired & dead] |= _DEAD << _RANK_BITS
        keys.append(key)
        if not (units.window.any() or units.state.any()):
            break
    return keys


def _none() -> Victims:
    return Victims(np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, np.int64))


def _take(units: Units, keys: list[npt.NDArray[np.uint64]], free: int) -> Victims:
    """Sort what may be deleted by the keys of full, window and state; take what is needed."""
    sizes = (units.full, units.window, units.state)
    has_full = (units.full > 0) & ~units.pinned
    # Kinds that are not deleted before their chunk's full object are deleted with it.
    mask = np.where(has_full, np.uint8(FULL_BIT), np.uint8(0))
    nbytes = units.full
    parts: list[tuple[Integers, Masks, Integers, npt.NDArray[np.uint64]]] = []
    for key, of_kind, bit in zip(keys[1:], sizes[1:], (WINDOW_BIT, STATE_BIT), strict=False):
        there = (of_kind > 0) & ~units.pinned
        if not there.any():
            continue
        if not parts:
            nbytes = np.where(has_full, units.full, 0)
        apart = there & (~has_full | (key < keys[0]))
        together = there & ~apart
        mask[together] |= bit
        nbytes[together] += of_kind[together]
        rows = np.flatnonzero(apart)
        parts.append((rows, np.full(len(rows), bit, np.uint8), of_kind[rows], key[rows]))
    if not parts:
        # Where nothing else is deleted, those that come first are enough.
        has_full &= keys[0] <= _last(keys[0], nbytes, has_full, free)
    rows = np.flatnonzero(has_full)
    parts.append((rows, mask[rows], nbytes[rows], keys[0][rows]))
    keys.clear()
    del mask, nbytes
    if len(parts) == 1:
        rows, kinds, held, key = parts[0]
    else:
        rows, kinds, held, key = (np.concatenate(column) for column in zip(*parts, strict=True))
    del parts
    order = np.argsort(key, kind="stable")
    held = held[order]
    key = key[order]
    before = np.cumsum(held)
    before -= held
    taken = (before < free) | (key < _DEAD << _RANK_BITS)
    order = order[taken]
    return Victims(rows[order].astype(np.int64, copy=False), kinds[order], held[taken])


def _last(key: npt.NDArray[np.uint64], nbytes: Integers, there: Flags, free: int) -> int:
    """Return a key up to which there is all that is taken, and little more."""
    some = np.sort(key[:: 1 + len(key) // _SAMPLED])
    expired = int(_DEAD << _RANK_BITS) - 1
    part = max(0, free) / max(1, int(nbytes.sum())) + _SPARE_PART
    while part < 1:
        last = max(int(some[int(part * len(some))]), expired)
        if int(nbytes[there & (key <= last)].sum()) >= free:
            return last
        part *= 1.5
    return (1 << 64) - 1


def _judge(
    units: Units, needs: Masks, reach: Integers, now: float
) -> Iterator[tuple[Floats, Floats, Flags]]:
    """Yield for each kind: the last use that counts, the age, whether it is dead."""
    broken = np.zeros(len(units), np.uint8) if units.broken is None else units.broken
    sizes = {FULL: units.full, WINDOW: units.window, STATE: units.state}
    whole = {
        kind: (nbytes > 0) & ((broken & KIND_BITS[kind]) == 0) for kind, nbytes in sizes.items()
    }
    forest = Forest(units.parent, units.index)
    rules = HitRules(forest, needs, reach, whole)
    needs_full, needs_window, needs_state = map(rules.has, KINDS)
    # Where a chunk's followers are not known, it counts as useful.
    judged = forest.followers_known(needs_state | needs_window)

    # The following chunks were stored just now: the prompt may still be computed.
    latest = np.maximum(units.used, units.born)
    forest.upwards(latest)
    settled = latest <= now - SETTLE_SECONDS
    del latest

    # A use of a follower is one of this unit as well.
    full_used, full_ages = units.used.copy(), _ages(units, units.used, units.hit, now)
    forest.upwards(full_used)
    np.negative(full_ages, out=full_ages)
    forest.upwards(full_ages)
    np.negative(full_ages, out=full_ages)
    dead = needs_state & judged & ~rules.needed(FULL)
    yield full_used, full_ages, settled & (~rules.reached | dead)

    dead = ~rules.reached
    used, ages, never_hit = _of_kind(units, units.window_used, now)
    if needs_window.any():
        dead |= judged & ~rules.needed(WINDOW)
        # Prompts part where one ends, or where others part already: there hits will end.
        likely = forest.last_before(rules.reached & (forest.followers() != 1), rules.ends)
        unlikely = judged & ~needs_state & ~rules.needed(WINDOW, likely)
        ages[never_hit & unlikely] *= _UNLIKELY_AGES
    yield used, ages, settled & dead

    used, ages, _ = _of_kind(units, units.state_used, now)
    if needs_state.any():
        # The oldest state of a branch is deleted with the KV of its chunk.
        oldest = rules.ends & needs_full & ~forest.any_before(rules.ends)
        used, ages = np.where(oldest, full_used, used), np.where(oldest, full_ages, ages)
    yield used, ages, settled & (~rules.reached | (judged & ~rules.needed(STATE)))


def _ages(units: Units, used: Floats, hit: Flags, now: float) -> Floats:
    """Return by how much each unit has aged since its last use, in seconds."""
    idle = np.maximum(now - used, 0.0)
    used, born, rested = used[hit], units.born[hit], idle[hit]
    with np.errstate(divide="ignore", invalid="ignore"):
        proven = np.nan_to_num((used - born) / rested)
    idle *= _NEVER_HIT_AGES
    idle[hit] = rested / (1.0 + np.clip(proven / _LONG_USED, 0.0, 1.0))
    return idle


def _of_kind(units: Units, used: Floats | None, now: float) -> tuple[Floats, Floats, Flags]:
    """Return last uses and ages of the objects of one kind, and which were never hit."""
    hit = units.hit
    if used is None:
        used = units.used
    else:
        hit = hit & (used > units.born)
    return used, _ages(units, used, hit, now), ~hit


def _needs(units: Units) -> Masks:
    if units.needs is not None:
        return units.needs
    there = (units.full.any(), units.window.any(), units.state.any())
    return np.full(len(units), np.dot(there, list(KIND_BITS.values())), np.uint8)
