"""What killed writers leave, deleted at once."""

from __future__ import annotations

import pytest

from kvshelf.backends.base import time_for_ages
from kvshelf.backends.guard import GuardedBackend
from kvshelf.capacity import inventory
from kvshelf.capacity.walk import Walk
from kvshelf.metrics import Counters


def clean(guard: GuardedBackend, later: float = 0.0) -> int:
    """Walk through a whole shelf as if so much later, since nobody can date a change back.

    Returns
    -------
    int
        Number of files that were deleted.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inventory, "time_for_ages", lambda now, url: time_for_ages(now, url) + later)
        return Walk(guard, Counters()).free_space()
