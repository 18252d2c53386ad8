"""What is counted, timed and gauged, and how it is handed on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvshelf.metrics import COUNTERS, FAMILIES, GAUGES, OPERATIONS, TIME_BOUNDS, Counters
from tests.sim.storage import posix
from tests.support.prompts import make_chunks
from tests.support.transfers import Rig


def test_gauges_come_with_whatever_else_comes() -> None:
    counters = Counters()
    counters.set_gauge("staging_used_bytes", 7)
    assert counters.take() == {"staging_used_bytes": 7}
    counters.set_gauge("staging_used_bytes", 7)
    assert counters.take() == {}
    counters.add("probes")
    assert counters.take() == {"probes": 1, "staging_used_bytes": 7}
    counters.set_gauge("staging_used_bytes", 0)
    assert counters.take() == {"staging_used_bytes": 0}


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [
        (0.0, 0),
        (TIME_BOUNDS[0], 0),
        (TIME_BOUNDS[0] * 1.01, 1),
        (TIME_BOUNDS[5], 5),
        (TIME_BOUNDS[-1], len(TIME_BOUNDS) - 1),
        (1e9, len(TIME_BOUNDS)),
    ],
)
def test_time_is_counted_in_the_bucket_whose_bound_it_does_not_exceed(
    seconds: float, bucket: int
) -> None:
    counters = Counters()
    counters.observe("probe", seconds)
    counters.observe("probe", seconds)
    *counts, total = counters.times()["probe"]
    assert len(counts) == len(TIME_BOUNDS) + 1
    assert counts[bucket] == sum(counts) == 2
    assert total == 2 * seconds


@pytest.mark.parametrize(
    "use",
    [
        lambda c: c.add("no such"),
        lambda c: c.set_gauge("no such", 1),
        lambda c: c.observe("no such", 1),
    ],
    ids=["add", "set_gauge", "observe"],
)
def test_what_has_no_name_is_refused(use: Callable[[Counters], None]) -> None:
    counters = Counters()
    with pytest.raises(KeyError):
        use(counters)
    assert counters.take() == {}


def test_names_are_different_and_families_are_of_counters() -> None:
    names = [*COUNTERS, *GAUGES, *OPERATIONS]
    assert len(names) == len(set(names))
    grouped = [name for _, reasons in FAMILIES.values() for name in reasons.values()]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) <= set(COUNTERS)
    assert not set(FAMILIES) & set(names)


def test_every_operation_of_a_store_and_a_load_is_timed(tmp_path: Path) -> None:
    backend = posix(tmp_path / "shelf")
    with closing(Rig(backend)) as rig:
        rig.shelf._counters = rig.counters
        chunks = make_chunks(rig.fmt, 2)
        rig.put(chunks)
        load, _ = rig.load(chunks, 20)
        assert load.failed_at is None
        times = rig.counters.times()
    objects = 2 * rig.fmt.shards
    assert {name: sum(t[:-1]) for name, t in times.items()} == {
        "probe": 2,
        "gather": 2,
        "publish": objects,
        "read": objects,
        "verify": objects,
        "scatter": 2,
    }
    assert all(t[-1] > 0 for t in times.values())
