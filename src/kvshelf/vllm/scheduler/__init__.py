"""The scheduler side of the connector: what the shelf holds, what to load and what to store.

A request's life
----------------
1. ``new_request`` starts its lookup (:mod:`~kvshelf.vllm.scheduler.lookups`).
2. vLLM calls ``matched_tokens``, perhaps many times (:mod:`~kvshelf.vllm.scheduler.side`): the
   answer is (None, False) until the lookup is done or its time is up. A request that brings a
   hand-over keeps waiting until all of it is on the shelf
   (:mod:`~kvshelf.vllm.scheduler.handovers`).
3. ``allocated`` turns the answer into a load, unless vLLM did not use it
   (:mod:`~kvshelf.vllm.scheduler.loads`).
4. ``step_metadata`` hands loads to the worker, and as stores all chunks that the step completes
   and that the lookup did not find (:mod:`~kvshelf.vllm.scheduler.stores`). It also names chunks of
   waiting requests, which the worker reads ahead (:mod:`~kvshelf.vllm.scheduler.read_ahead`).
5. ``worker_output`` takes what failed, so that these chunks are computed and stored again, and what
   makes the namespace (:mod:`~kvshelf.vllm.scheduler.engine`).
6. ``finished`` forgets the request, and cancels its load if it is still running. It returns what
   is promised to another engine (:mod:`~kvshelf.vllm.scheduler.stores`).

:mod:`kvshelf.vllm.scheduler.side` has these methods, and calls the other modules.
"""

from __future__ import annotations

from kvshelf.vllm.scheduler.engine import SchedulerEngine
from kvshelf.vllm.scheduler.side import SchedulerSide

__all__ = ["SchedulerEngine", "SchedulerSide"]
