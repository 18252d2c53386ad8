"""In which order chunks are deleted, and how many.

Owns the *score* of a unit (:func:`score`), and the scores from which on a sweep deletes
(:class:`EvictionOrder`). Everything is pure: the caller says the time by the storage's clock.

The oldest go first, by the time since the last use. A unit that was never used since it was stored
ages twice as fast, because most chunks are never used. Of about the same age the end of a prompt
goes before its beginning: a chunk is of no use without those before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from kvshelf.capacity import limits
from kvshelf.capacity.sweep import Cuts, Unit


def aged(unit: Unit, now: float) -> float:
    """Return by how much a unit has aged since its last use, in seconds."""
    return max(now - unit.used, 0.0) * (1.0 if unit.hit else limits.NEVER_USED_AGES)


def same_age(age: float, most: float) -> float:
    """Return the seconds within which ages count as equal where units have about `age` seconds.

    At most `most` seconds, and at least one: the uses of a hit are recorded one after the other.
    """
    return max(limits.LEAST_SAME, min(most, age * limits.SAME_PART))


def score(age: float, place: float, same: float) -> float:
    """Return the score of a unit, in seconds; a larger one is evicted first.

    Parameters
    ----------
    age : float
        By how much it has :func:`aged`.
    place : float
        See :attr:`~kvshelf.capacity.sweep.Unit.place`.
    same : float
        Seconds within which ages count as equal, and the place in the prompt decides. Of equal
        places the older goes first, so that few units have the same score.
    """
    equal, remainder = divmod(age, same)
    share = limits.DEPTH_PART
    return same * (equal + share * place / (place + limits.HALF_DEPTH)) + (1 - share) * remainder


def score_to_free(scored: Iterable[tuple[float, int]], free: float) -> float:
    """Return the score from which on units have at least `free` bytes; infinite if that is 0.

    Parameters
    ----------
    scored : Iterable of (float, int)
        Scores and bytes, the largest score first.
    free : float
        Where units have fewer bytes, all of them are included.
    """
    threshold = math.inf
    for unit_score, nbytes in scored if free > 0 else ():
        threshold, free = unit_score, free - nbytes
        if free <= 0:
            break
    return threshold


class EvictionOrder:
    """What a shelf's groups hold, and from which scores on their units go.

    Parameters
    ----------
    max_bytes, group_max_bytes : int or None
        Bounds of the shelf, and of each salt group of a namespace.

    Attributes
    ----------
    nbytes : dict of str to float
        Estimated bytes of each group, by its folder.
    """

    def __init__(self, max_bytes: int | None, group_max_bytes: int | None) -> None:
        self._max_bytes, self._group_max_bytes = max_bytes, group_max_bytes
        self.nbytes: dict[str, float] = {}
        #: Scores from which on units were deleted, smoothed over sweeps: of a group by its folder,
        #: of the shelf by "".
        self._learned: dict[str, float] = {}

    @property
    def evicts_after(self) -> float | None:
        """The age in seconds at which chunks that were used are deleted; None: none were."""
        threshold = self._learned.get("")
        return None if threshold is None else max(threshold, 1.0)

    def note(
        self, units: Iterable[Unit], shares: Mapping[str, float], groups: Iterable[str]
    ) -> float:
        """Update the estimated bytes of each group; return their sum.

        Parameters
        ----------
        units : Iterable of Unit
            What a sweep listed.
        shares : Mapping of str to float
            The part of each group that it listed, by folder.
        groups : Iterable of str
            All groups that are there; the others are forgotten.
        """
        listed = dict.fromkeys(shares, 0)
        for unit in units:
            listed[unit.where] += unit.nbytes
        there = {*groups}
        self.nbytes = {group: nbytes for group, nbytes in self.nbytes.items() if group in there}
        self._learned = {
            group: learned for group, learned in self._learned.items() if group in {"", *there}
        }
        for group, share in shares.items():
            nbytes = listed[group] / share
            nbytes_before = self.nbytes.get(group, nbytes)
            self.nbytes[group] = nbytes_before + (nbytes - nbytes_before) * max(
                share, 1 / limits.SMOOTH
            )
        return sum(self.nbytes.values())

    def thresholds(
        self,
        candidates: Sequence[tuple[float, Unit]],
        shares: Mapping[str, float],
        *,
        shelf_share: float,
        used_bytes: float,
        bytes_to_free: float,
        largest: int,
        weight: float,
        now: float,
    ) -> Cuts:
        """Return the scores from which on the units of a sweep are deleted.

        Parameters
        ----------
        candidates : Sequence of (float, Unit)
            Scores and units that may be deleted, the largest score first.
        shares : Mapping of str to float
            The part of each group that was listed.
        shelf_share : float
            The part of the shelf's bytes that was listed.
        used_bytes : float
            Estimated bytes of the shelf.
        bytes_to_free : float
            What stores have to be paid with.
        largest : int
            Bytes of the largest store.
        weight : float
            Of this sweep against those before.
        now : float
        """
        cuts: dict[str, float] = {}
        quota, bound = self._group_max_bytes, self._max_bytes
        if quota is not None:
            groups: dict[str, list[tuple[float, int]]] = {}
            for unit_score, unit in candidates:
                if unit.group != "_":
                    groups.setdefault(unit.where, []).append((unit_score, unit.nbytes))
            for group, scored in groups.items():
                low, high = (
                    (self.nbytes[group] - part * quota) * shares[group]
                    for part in (limits.LOW, limits.HIGH)
                )
                cuts[group] = self.threshold(group, scored, low, high, weight)
        low = high = bytes_to_free
        if bound is None:
            # What pays for stores was not used within an hour.
            candidates = [pair for pair in candidates if pair[1].used < now - limits.HOUR]
        else:
            # There must be room for one more store, also below a small bound.
            room = min(2 * largest, bound / 2)
            low = used_bytes - min(limits.LOW * bound, bound - room)
            high = used_bytes - min(limits.HIGH * bound, bound - room / 2)
            low, high = (max(part * shelf_share, bytes_to_free) for part in (low, high))
        scored = [(unit_score, unit.nbytes) for unit_score, unit in candidates]
        cuts[""] = self.threshold("", scored, low, high, weight)
        return cuts

    def threshold(
        self,
        where: str,
        scored: Sequence[tuple[float, int]],
        low: float,
        high: float,
        weight: float,
    ) -> float:
        """Return the score from which on units of a group are deleted; learn from it.

        Parameters
        ----------
        where : str
            Folder of the group; "" for the shelf.
        scored : Sequence of (float, int)
            Scores and bytes of the units that may be deleted, the largest score first.
        low, high : float
            Bytes to delete of them: on average over slices, and in any case.
        weight : float
            Of this sweep against those before.
        """
        if low <= 0:
            return math.inf
        score = score_to_free(scored, low)
        if score < math.inf:
            # A sweep of the whole shelf sets exactly what it found: an ulp more deletes nothing.
            learned = self._learned.get(where, score)
            self._learned[where] = learned * (1 - weight) + score * weight
        threshold = min(self._learned.get(where, math.inf), score_to_free(scored, high))
        # Where most units have about the same age, all of them may be older than what was learned.
        return max(threshold, score_to_free(scored, limits.MOST_PART * low))
