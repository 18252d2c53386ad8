"""A node server's clients for engines that bring their own connector.

Adapters between an engine and the node server of its machine, with the contract of vLLM's adapters
for LMCache's server: one for the engine's scheduler, one for each worker. They are built on
:mod:`kvshelf.server.connection` and do not import vLLM. :mod:`kvshelf.vllm.multiprocess` has them
under vLLM's names and signatures. ``README.md`` compares them with vLLM's, row by row.
"""

from __future__ import annotations

from kvshelf.adapters.copies import Layout, LoadStoreOp
from kvshelf.adapters.names import striding_block_hashes
from kvshelf.adapters.scheduler import SchedulerAdapter
from kvshelf.adapters.worker import Event, WorkerAdapter

__all__ = [
    "Event",
    "Layout",
    "LoadStoreOp",
    "SchedulerAdapter",
    "WorkerAdapter",
    "striding_block_hashes",
]
