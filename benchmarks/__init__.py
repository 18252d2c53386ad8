"""Measures kvshelf against floors: what ``make bench`` and ``python -m benchmarks`` run.

Owns what is measured, how pairs are measured, and how results are shown. Every figure is a ratio of
two pieces of work, measured in turn on the same bytes, so it depends less on the machine than
milliseconds do.

Parts: :mod:`~benchmarks.measure` (pairs and statistics), :mod:`~benchmarks.report` (table and
JSON), :mod:`~benchmarks.samples` (namespaces, chunks and shelves to measure on),
:mod:`~benchmarks.engines` (engines in child processes), and one module for each group of rows.
:mod:`~benchmarks.plots` is a program of its own. ``RESULTS.md`` has the newest figures.
"""
