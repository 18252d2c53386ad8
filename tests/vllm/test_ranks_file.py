"""Ranks that have a directory each: rank 0 writes a file, and one that does not find it says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvshelf.assembly import Assembly
from kvshelf.backends import Backend
from kvshelf.errors import TransientStorageError
from kvshelf.shelf.shelf import Shelf
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.waiting import until
from tests.vllm import simulated
from tests.vllm.simulated import SimulatedEngine

FILE = ".kvshelf/.ranks.*.tmp"


def start(
    monkeypatch: pytest.MonkeyPatch, path: Path, of_rank_1: Backend, **options: object
) -> SimulatedEngine:
    """An engine of two ranks, of which the second has a shelf of its own."""
    shelf = Shelf(of_rank_1)
    ranks = iter([lambda engine: engine, lambda _: shelf])

    def assemble(config: object, counters: object, of_engine: Callable[[], Shelf]) -> Assembly:
        choose = next(ranks)
        return Assembly(config, counters, lambda: choose(of_engine()))  # type: ignore[arg-type]

    monkeypatch.setattr(simulated, "Assembly", assemble)
    return SimulatedEngine(path, "NHD", 16, tensor_parallel=2, **options)  # type: ignore[arg-type]


def pass_time(engine: SimulatedEngine, seconds: float) -> None:
    """Make empty steps, while the other threads look once a second."""
    for _ in range(int(seconds)):
        engine.step([])
        simulated.time.sleep(1.0)


def test_rank_that_does_not_find_the_file_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = posix(tmp_path / "other")
    with closing(start(monkeypatch, tmp_path / "shelf", other)) as engine:
        until(lambda: (pass_time(engine, 1), engine.scheduler.disabled)[1])
    (line,) = [
        line for line in caplog.messages if "all ranks of an engine need one storage" in line
    ]
    assert "rank 1 does not find the file .kvshelf/.ranks." in line
    assert str(tmp_path / "other") in line


@pytest.mark.parametrize("storage", ["shared", "in trouble", "in trouble, and not the same"])
def test_ranks_that_may_see_one_storage_are_served_and_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    backend = FaultyStorage(posix(tmp_path / ("other" if "not" in storage else "shelf")))
    if storage != "shared":
        backend.add(Fault("stat", FILE, error=TransientStorageError("in trouble")))
    with closing(start(monkeypatch, tmp_path / "shelf", backend)) as engine:
        pass_time(engine, 7200)
        assert len(list((tmp_path / "shelf").glob(FILE))) == 1
        assert not engine.scheduler.disabled
    until(lambda: not list((tmp_path / "shelf").glob(FILE)))


def test_engine_of_one_rank_writes_no_file(tmp_path: Path) -> None:
    with closing(SimulatedEngine(tmp_path, "NHD", 16)) as engine:
        pass_time(engine, 20)
        assert not list(tmp_path.glob(FILE))
