"""The worker side of the connector: moves KV between the paged caches and the shelf.

:class:`kvshelf.vllm.worker.side.WorkerSide` has the methods that the connector calls, and makes the
parts: :mod:`~kvshelf.vllm.worker.registration` (the registered caches, and what moves their KV),
:mod:`~kvshelf.vllm.worker.loads` and :mod:`~kvshelf.vllm.worker.stores` (what a step does), and
:mod:`~kvshelf.vllm.worker.weights` (what the worker knows of its weights). The scheduler side
imports nothing of it.
"""
