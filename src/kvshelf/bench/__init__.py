"""Measures kvshelf against floors: what ``make bench`` and ``python -m kvshelf.bench`` run.

Owns what is measured, how pairs are measured, and how results are shown. Every figure is a
ratio (or a difference) of two things measured in turn in the same process on the same bytes,
so that it survives a change of machine better than milliseconds do.

Nothing here imports vLLM: engines, and the connector's code on the step thread, run in child
processes (``python -m kvshelf.vllm.bench_engine``).

Parts: :mod:`~kvshelf.bench.measure` (pairs and statistics), :mod:`~kvshelf.bench.report` (table
and JSON), :mod:`~kvshelf.bench.samples` (namespaces, chunks and shelves to measure on), and one
module for each group of rows.
"""
