"""Measures kvshelf against floors: what ``make bench`` and ``python -m benchmarks`` run.

Owns what is measured, how pairs are measured, and how results are shown. Every figure is a ratio
(or a difference) of two pieces of work, measured in turn in the same process on the same bytes, so
it depends less on the machine than milliseconds do.

Nothing here imports vLLM: engines, and the connector's code on the step thread, run in child
processes (``python -m benchmarks.engine_process``).

Parts: :mod:`~benchmarks.measure` (pairs and statistics), :mod:`~benchmarks.report` (table
and JSON), :mod:`~benchmarks.samples` (namespaces, chunks and shelves to measure on), and one
module for each group of rows.
"""
