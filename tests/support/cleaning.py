"""What killed writers and hand-overs leave, deleted at once."""

from __future__ import annotations

from kvshelf.backends import Backend
from kvshelf.capacity import keepers
from kvshelf.capacity.keepers import time_for_ages
from kvshelf.capacity.sweep import KEEPERS, Lister, Reason, Rules, delete, is_old


def clean(backend: Backend, later: float = 0.0) -> int:
    """Delete what is old in a whole shelf, as if so much later: nobody can date a change back.

    Returns
    -------
    int
        Number of files that were deleted.
    """
    name = "0" * 16
    now = keepers.say(backend, name, {})[0]
    backend.delete([f"{KEEPERS}/{name}"])
    old_at = time_for_ages(now, backend.url) + later
    old = [
        (leftover, leftover.reason)
        for part in Lister(backend).whole(None, now)
        for leftover in part.leftovers
        if leftover.reason is not Reason.EMPTY and is_old(leftover, Rules(), old_at)
    ]
    return delete(backend, old, now=now).deleted.total()
