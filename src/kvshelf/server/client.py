"""The node server's clients for engines and programs that bring their own connector.

The public names of :mod:`kvshelf.server.scheduler` and :mod:`kvshelf.server.worker`. No vLLM.
"""

from __future__ import annotations

from kvshelf.server.naming import striding_block_hashes
from kvshelf.server.scheduler import SchedulerAdapter
from kvshelf.server.worker import Event, Layout, LoadStoreOp, WorkerAdapter

__all__ = [
    "Event",
    "Layout",
    "LoadStoreOp",
    "SchedulerAdapter",
    "WorkerAdapter",
    "striding_block_hashes",
]
