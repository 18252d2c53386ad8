"""The worker side of the connector: moves KV between the paged caches and the shelf.

:class:`kvshelf.vllm.worker.side.WorkerSide` has the methods that the connector calls, and makes the
parts: :mod:`~kvshelf.vllm.worker.parts` (the caches of the model's layers,
and what moves KV), :mod:`~kvshelf.vllm.worker.loads` and
:mod:`~kvshelf.vllm.worker.stores` (what a step does), :mod:`~kvshelf.vllm.worker.drafter`, and
:mod:`~kvshelf.vllm.worker.weights` (what the worker knows of its weights). The scheduler side
imports nothing of it.
"""
