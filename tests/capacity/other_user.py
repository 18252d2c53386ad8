"""A process of another user that hits chunks: ``python other_user.py ROOT``."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing

from kvshelf.backends.posix import PosixBackend
from kvshelf.capacity.uses import Uses
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks


def use(root: str) -> None:
    """Hit three chunks of somebody else, store one chunk and hit it."""
    fmt = make_format(native=False)
    (own,) = make_chunks(fmt, 1, seed=5)
    with closing(Shelf(PosixBackend(root))) as shelf, closing(Uses(Counters())) as uses:
        view = shelf.view(fmt)
        for shard in range(fmt.shards):
            ref = ObjectRef(own, shard)
            view.publish(ref, sealed(fmt, own, shard))
            then = time.time() - 1000
            os.utime(os.path.join(root, view.name(ref)), (then, then))
        uses.hit(view, [*make_chunks(fmt, 6)[:3], own])
        if not uses.flush(30.0):
            raise RuntimeError("the uses were not recorded in time")


if __name__ == "__main__":
    # Only now: this user may not be allowed to read Python's own files.
    os.setgid(65534)
    os.setuid(65534)
    use(sys.argv[1])
