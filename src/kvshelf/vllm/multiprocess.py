"""The node server's adapters under the names and signatures of vLLM's LMCache adapters.

The public names of :mod:`kvshelf.adapters.multiprocess`, those of vLLM's file included, and of
:mod:`kvshelf.vllm.engine_facts`. ``adapters/README.md`` compares them row by row.
"""

from __future__ import annotations

from kvshelf.adapters.copies import LoadStoreOp
from kvshelf.adapters.multiprocess import MPSchedulerAdapter, MPWorkerAdapter, ParallelStrategy
from kvshelf.adapters.names import striding_block_hashes
from kvshelf.vllm.engine_facts import learn_layouts, model_facts

__all__ = [
    "LMCacheMPSchedulerAdapter",
    "LMCacheMPWorkerAdapter",
    "LoadStoreOp",
    "MPSchedulerAdapter",
    "MPWorkerAdapter",
    "ParallelStrategy",
    "learn_layouts",
    "model_facts",
    "striding_block_hashes",
]

LMCacheMPSchedulerAdapter = MPSchedulerAdapter
LMCacheMPWorkerAdapter = MPWorkerAdapter
