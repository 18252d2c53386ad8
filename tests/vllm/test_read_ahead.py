"""Which waiting requests are read ahead: the rules of one step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    # vLLM's own imports are not ours to judge.
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    from kvshelf.format.kinds import FULL
    from kvshelf.vllm.messages import Outbox
    from kvshelf.vllm.metadata import Orders, StepMetadata
    from kvshelf.vllm.scheduler.hits import Loadable
    from kvshelf.vllm.scheduler.read_ahead import ReadAheadPlan
from tests.support.formats import make_format
from tests.support.prompts import make_chunks


def make_plan(loadable: Callable[[str], Loadable | None]) -> ReadAheadPlan:
    """A plan for requests that are their names."""

    class Names(dict[str, str]):
        def __missing__(self, name: str) -> str:
            return name

    engine: Any = SimpleNamespace(requests=Names(), orders=Outbox(Orders))
    hits: Any = SimpleNamespace(loadable=loadable)
    lookups: Any = SimpleNamespace(loads_are_paused=lambda: False)
    return ReadAheadPlan(engine, hits, lookups)


def test_step_looks_at_few_requests_however_many_wait() -> None:
    asked: list[str] = []

    def loadable(name: str) -> Loadable:
        asked.append(name)
        return Loadable()

    plan = make_plan(loadable)
    plan.enable(None)
    for number in range(50_000):
        plan.wait(str(number))
    taken: list[str] = []

    class Counting(dict):  # type: ignore[type-arg]
        """Counts the entries that are taken of it."""

        def items(self):  # type: ignore[no-untyped-def]
            for name, waiting in super().items():
                taken.append(name)
                yield name, waiting

    plan.waiting = Counting(plan.waiting)  # type: ignore[assignment]
    plan.plan(SimpleNamespace(num_scheduled_tokens={"3": 1}), StepMetadata())
    assert len(taken) <= 33
    assert asked == [str(number) for number in range(32) if number != 3]
    # The one that was admitted waits no more.
    assert "3" not in plan.waiting


def test_what_the_engine_has_is_not_read_for_requests_that_wait() -> None:
    """Or a long queue of prompts with one beginning would read that from the storage."""
    chunks = make_chunks(make_format(), 6)
    found = Loadable(chunks, {FULL: range(6)})
    plan = make_plan(lambda _: found)
    plan.enable(4)
    plan.wait("first")
    plan.note_in_engine_cache(chunks[:4])
    step = SimpleNamespace(num_scheduled_tokens={})
    meta = StepMetadata()
    plan.plan(step, meta)
    plan.plan(step, meta)
    assert [list(op.chunks) for op in meta.prefetches] == [chunks[4:]]
    plan.engine_cache_was_reset()
    plan.wait("second")
    meta = StepMetadata()
    plan.plan(step, meta)
    plan.plan(step, meta)
    assert [list(op.chunks) for op in meta.prefetches] == [chunks]
