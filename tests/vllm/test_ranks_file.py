"""Ranks that have a directory each: rank 0 writes a file, and one that does not find it says so."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshelf.errors import TransientStorageError
from kvshelf.shelf.shelf import Shelf
from kvshelf.vllm import connector
from tests.sim.engine import EngineModel
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.waiting import until

FILE = ".kvshelf/.ranks.*.tmp"


def start(monkeypatch: pytest.MonkeyPatch, path: Path, of_rank_1: FaultyStorage) -> EngineModel:
    """An engine of two ranks, of which the second has a storage of its own."""
    open_runtime, shelf, runtimes = connector.open_runtime, Shelf(of_rank_1), list[Any]()

    def open_for_rank(*arguments: Any, **options: Any) -> Any:
        runtimes.append(open_runtime(*arguments, **options))
        if len(runtimes) == 2:
            runtimes[1].shelf = lambda: shelf
        return runtimes[-1]

    monkeypatch.setattr(connector, "open_runtime", open_for_rank)
    return EngineModel(str(path), tensor_parallel=2)


def pass_time(engine: EngineModel, seconds: int) -> None:
    """Make an empty step every ten seconds, while the other threads look once a second."""
    for _ in range(0, seconds, 10):
        engine.step()
        time.sleep(10.0)


def test_rank_that_does_not_find_the_file_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = FaultyStorage(posix(tmp_path / "other"))
    with start(monkeypatch, tmp_path / "shelf", backend) as engine:
        until(lambda: (pass_time(engine, 10), engine.side.disabled)[1])
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
    with start(monkeypatch, tmp_path / "shelf", backend) as engine:
        pass_time(engine, 7200)
        assert len(list((tmp_path / "shelf").glob(FILE))) == 1
        assert not engine.side.disabled
    until(lambda: not list((tmp_path / "shelf").glob(FILE)))


def test_engine_of_one_rank_writes_no_file(tmp_path: Path) -> None:
    with EngineModel(str(tmp_path)) as engine:
        pass_time(engine, 20)
        assert not list(tmp_path.glob(FILE))
