"""How much one process may write to a shelf until its next sweep.

Owns the account of one process (:class:`StoreBudget`): a *credit* below ``max_bytes``, what it may
write because of the free space, and the estimated bytes of the shelf. Where there is no room for a
chunk of each keeper, they take turns by the storage's clock, in the order of their names.

Without ``max_bytes`` a directory of which little is free *pays* for stores: a sweep deletes as many
bytes as they write, the oldest first. So the shelf stops growing, and does not shrink because
others write to the disk. Below half of the reserve that stores leave free, it pays only with what
the storage shows as free after the deletion. Where a write found no inode, or a quota reached, it
pays for an hour, also below ``max_bytes``. A write that finds it again although it was paid for
makes sweeps free four times as much, up to a limit: a quota may count deletions late, or count more
than a store's bytes.

Nothing here knows a clock, a thread or a storage: the caller says the time (monotonic, in seconds),
and makes one call at a time.
"""

from __future__ import annotations

import math
from typing import Final

from kvshelf.backends.base import Space
from kvshelf.capacity import limits

#: Of a storage that says nothing.
UNKNOWN_SPACE: Final = Space(free=1 << 62, total=0)


def least_free(space: Space) -> int:
    """Return the bytes that stores leave free on a storage."""
    if space.memory:
        return int(space.total * limits.FREE_PART_IN_MEMORY)
    return min(int(space.total * limits.FREE_PART), limits.FREE_BYTES)


class StoreBudget:
    """What one process may write.

    Parameters
    ----------
    max_bytes : int or None
        The bound of the shelf.

    Attributes
    ----------
    begun, written : int
        Bytes of writes under way, and written since the last sweep began.
    largest : int
        Bytes of the largest write that was asked for.
    asked, refused : bool
        A write was asked for since the last look at the free space; one was refused since the last
        sweep began.
    credit, granted : float
        What may be written for the bound, now and at the last grant.
    free : float
        What may be written because of the free space.
    space : Space
        The storage's, at the last look.
    pays : bool
        Each store deletes as many bytes as it writes.
    keepers, rank, unknown : int
        How many keepers there are, the place of this one, and how many there may be.
    clock_ahead : float
        What the storage's clock is ahead of the caller's.
    listed_bytes, unlisted_bytes : float
        Estimated bytes of the shelf: what listings had, and what was written since if all keepers
        write as much as this one.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.begun = self.written = self.largest = 0
        self.asked = self.refused = False
        # Nothing is stored before the first sweep.
        self.credit = self.granted = math.inf if max_bytes is None else 0.0
        self.keepers, self.rank = 1, 0
        self.unknown = limits.MOST_UNKNOWN * limits.KNOWN_PART
        self.clock_ahead = 0.0
        self.free = math.inf
        self.space = UNKNOWN_SPACE
        self.pays = False
        self.listed_bytes = self.unlisted_bytes = 0.0
        self._credit_until = math.inf
        #: How many keepers have a credit at a time.
        self._turns = self.unknown
        self._has_room = True
        self._pays_again_at = self._short_until = -math.inf
        self._short_of = ""
        self._freed_at_once = limits.FREED_AT_ONCE
        #: Why stores are dropped: the subject of the log line, and its text.
        self.refusal = ("", "")
        if max_bytes is not None:
            text = "a store is dropped: the first sweep has not ended; loads continue"
            self.refusal = "max_bytes", text

    # ------------------------------------------------------------- stores

    def allows(self, nbytes: int, now: float) -> bool:
        """Whether `nbytes` may be written now; remember that they were asked for."""
        self.asked = True
        # Nothing is deleted for what will never fit.
        if self.largest < nbytes <= (self.max_bytes or math.inf):
            self.largest = nbytes
        allowed = nbytes <= min(self._usable_credit(now), self.free)
        self.refused |= not allowed
        return allowed

    def begin(self, nbytes: int) -> None:
        """Reserve room for a write that was allowed."""
        self.begun += nbytes
        self.credit -= nbytes
        self.free -= nbytes

    def end(self, nbytes: int, written: bool) -> None:
        """Note that a write has ended, and whether it wrote anything."""
        self.begun -= nbytes
        if written:
            self.written += nbytes
        else:
            self.credit += nbytes
            self.free += nbytes

    def can_wait(self, nbytes: int) -> bool:
        """Whether sweeps may make room for `nbytes`."""
        fits = nbytes <= (self.max_bytes or math.inf)
        return fits and (self.pays or nbytes <= self.free)

    def needs_sweep(self, now: float, written_during_sweep: float = 0.0) -> bool:
        """Whether half of the credit is used up, or what is left is too little for a sweep's time.

        What is written while a sweep takes place must fit as well.
        """
        if self.credit < max(self.granted / 2, written_during_sweep):
            return True
        return self.refused and self._usable_credit(now) < self.largest

    @property
    def pays_ahead(self) -> bool:
        """Whether the next stores have to be paid for now."""
        return self.pays and self.free < 2 * self.largest

    def _usable_credit(self, now: float) -> float:
        return self.credit if now < self._credit_until else 0.0

    # ------------------------------------------------------------- sweeps

    @property
    def used_bytes(self) -> float:
        """Estimated bytes of all objects: never more than the storage says is used."""
        used = self.space.total - self.space.free if self.space.total else math.inf
        return max(0.0, min(self.listed_bytes + self.unlisted_bytes, used))

    @property
    def has_room(self) -> bool:
        """Whether the last sweep left room for one more store."""
        return self.free >= self.largest if self.pays else self._has_room

    @property
    def bytes_to_free(self) -> float:
        """What a sweep has to delete to pay for stores."""
        return max(self._freed_at_once * self.largest - self.free, 0.0) if self.pays else 0.0

    def begin_sweep(self) -> None:
        """Note that a sweep begins: it lists what was written before."""
        self.refused = False
        self.unlisted_bytes += self.keepers * self.written
        self.written = 0

    def grant(self, now: float, slice_share: float) -> None:
        """Say how much may be written until the next sweep, which lists this share of the shelf."""
        if self.max_bytes is None:
            return
        bound, used, count = self.max_bytes, self.used_bytes, max(self.keepers, self.unknown)
        free_bytes = max(0.0, bound - used - self.begun)
        if free_bytes < count * self.largest:
            # Those whose turn it is do not know what the last ones still write.
            free_bytes /= 2
        least = max(self.largest, 1)
        self._has_room = free_bytes >= least
        self._turns = min(count, max(1, int(free_bytes // least)))
        below_low = min(limits.LOW * bound - used, limits.STEP * bound) / count
        step = max(limits.STEP * bound * slice_share, below_low, self.largest)
        seconds = self.turn_left(now)
        self.granted = min(free_bytes / self._turns, step) if seconds > 0 else 0.0
        self._credit_until = now + seconds
        # The estimate lacks what was written since the last sweep began.
        self.credit = max(0.0, self.granted - self.written)
        if self.refusal[0] != "free":
            self.refusal = (
                "max_bytes",
                f"store dropped: the shelf holds about {used:.0f} bytes of max_bytes {bound}, and"
                " this process has used up what it may write until its next sweep; loads continue",
            )

    def turn_left(self, now: float) -> float:
        """Return the seconds for which this keeper may have a credit; below 0: until it may.

        Where there is no room for a store of each keeper, some have a turn, and then the next ones.
        """
        at, count = now + self.clock_ahead, max(self.keepers, self.unknown)
        turn = limits.TURN_SECONDS
        turns, passed = (self.rank - int(at // turn)) % count, at % turn
        if count <= self._turns:
            return limits.CREDIT_SECONDS
        if turns < self._turns:
            return min((turns + 1) * turn - passed, limits.CREDIT_SECONDS)
        return passed - (turns - self._turns + 1) * turn

    # ------------------------------------------------------------- free space

    def look(self, space: Space, now: float, *, is_full: bool) -> str | None:
        """Update what may be written because of the free space.

        Parameters
        ----------
        space : Space
        now : float
        is_full : bool
            A write found no space, and not all of the shelf was swept since.

        Returns
        -------
        str or None
            Why stores are paid for, if they are.
        """
        reserve = least_free(space)
        shown = f"{space.free} bytes are free, and stores leave {reserve} free"
        free_bytes = space.free - reserve - self.begun
        paid = self.free if self.pays else 0.0
        self.asked, self.space = False, space
        # All processes see the same free space.
        least = self.largest if free_bytes >= self.largest else 0
        self.free = max(free_bytes / 2, least, 0.0) if reserve else math.inf
        is_short = now < self._short_until
        is_full |= is_short or self.free < max(self.largest, 1)
        needs_disk_space = is_short or (is_full and self.max_bytes is None and reserve > 0)
        self.pays = needs_disk_space and now >= self._pays_again_at
        if self.pays:
            self.free = max(0.0, min(paid, space.free))
        if not is_full and self.refusal[0] == "free":
            self.refusal = ("", "")
        elif is_full and reserve and not self.pays:
            text = f"{shown}: nothing is stored until more is free; loads continue"
            self.refusal = "free", text
        if not self.pays:
            return None
        return f"its {self._short_of} ran out, looked at again in an hour" if is_short else shown

    def pay(self, deleted: float, before: Space, now: float) -> None:
        """Let stores write what a sweep has deleted, after a new look at the free space.

        Parameters
        ----------
        deleted : float
            Bytes.
        before : Space
            The storage's before the deletion.
        now : float
        """
        if before.free < least_free(before) / 2:
            # What was deleted may free nothing: a backup may link to it, a snapshot have it.
            deleted = max(0.0, min(deleted, self.space.free - before.free))
            self._pays_again_at = now + (0.0 if deleted else limits.FULL_SECONDS)
        self.free += deleted

    def run_short(self, of: str, now: float) -> None:
        """Note that a write found no inode, or a quota reached."""
        if now >= self._short_until:
            self._freed_at_once = limits.FREED_AT_ONCE
        elif self.free > 0 and self._freed_at_once < limits.MOST_FREED_AT_ONCE:
            self._freed_at_once *= 4
        elif self.free > 0 and not self.written:
            # What is deleted frees nothing.
            self._pays_again_at = now + limits.FULL_SECONDS
        self._short_of, self._short_until = of, now + limits.HOUR
        # Others may have taken what was paid for.
        self.free, self.refused = 0.0, True
