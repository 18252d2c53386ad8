"""Writers and readers that are killed at every step: nothing half-written is ever found."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends import WriteResult
from kvshelf.backends.base import final_name
from kvshelf.errors import ObjectMissingError
from kvshelf.shelf.shelf import Shelf, open_shelf
from kvshelf.shelf.view import ObjectRef
from tests.faults import crash_child
from tests.support.cleaning import clean
from tests.support.formats import present, sealed
from tests.support.prompts import make_chunks
from tests.support.variants import variants

pytestmark = pytest.mark.real

FMT = crash_child.make_format()
CHUNKS = make_chunks(FMT, 2)
ITEMS = [(chunk, shard) for chunk in CHUNKS for shard in range(FMT.shards)]
#: More calls than any job makes.
NEVER = 10_000

Kill = Callable[..., list[int]]


@pytest.fixture(scope="module")
def run() -> Iterator[Kill]:
    """Run jobs at once in processes of their own; see crash_child."""
    process = subprocess.Popen(
        [sys.executable, crash_child.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None and process.stdout is not None

    def order(*jobs: dict[str, Any]) -> list[int]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(jobs) + "\n")
        process.stdin.flush()
        codes: list[int] = json.loads(process.stdout.readline())
        assert set(codes) <= {0, -signal.SIGKILL}, "a job failed: see stderr"
        return codes

    yield order
    process.communicate(timeout=60)


def check(root: Path) -> None:
    """Assert that each object is whole or missing, and that the shelf goes on as usual."""
    with open_shelf(root) as shelf:
        there = set()
        for chunk, shard in ITEMS:
            image = bytearray(FMT.object_size(shard))
            try:
                shelf.view(FMT).load(ObjectRef(chunk, shard), memoryview(image))
            except ObjectMissingError:
                continue
            assert image == sealed(FMT, chunk, shard)
            there.add((chunk.index, shard))
        assert {(o.parsed.index, o.parsed.shard) for o in shelf.objects()} == there
        for info in shelf.namespaces():
            assert info.namespace == FMT.namespace or info.problem == "it has no namespace.json"
        for chunk, shard in ITEMS:
            expected = WriteResult.EXISTED if (chunk.index, shard) in there else WriteResult.CREATED
            image = sealed(FMT, chunk, shard)
            assert shelf.view(FMT).publish(ObjectRef(chunk, shard), image) is expected
        assert present(shelf.view(FMT), CHUNKS) == [True] * len(CHUNKS)
    for left in temporaries(root):
        assert final_name(left.name) is not None


def temporaries(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*") if path.is_file()]


def store_all(shelf: Shelf) -> None:
    for chunk, shard in ITEMS:
        shelf.view(FMT).publish(ObjectRef(chunk, shard), sealed(FMT, chunk, shard))


WAYS = {
    "links": {"half": True},
    "renames": {"half": True, "no_links": True},
    "fsync": {"fsync": True},
}


@pytest.mark.parametrize("way", variants(WAYS, {"links"}))
def test_writer_killed_at_every_step(run: Kill, tmp_path: Path, way: str) -> None:
    left = 0
    for last in itertools.count():
        root = tmp_path / str(last)
        (code,) = run({"root": str(root), "job": "write", "last": last, **WAYS[way]})
        left += len(temporaries(root))
        check(root)
        if temporaries(root):
            with open_shelf(root) as shelf:
                clean(shelf.backend, 3660.0)
            assert temporaries(root) == []
        shutil.rmtree(root, ignore_errors=True)
        if code == 0:
            break
        assert last < NEVER
    # Each of the files is once a temporary while a writer dies, or the steps were not those.
    assert last > 40
    assert left > len(ITEMS)


def test_writer_killed_at_every_step_of_a_repair(run: Kill, tmp_path: Path) -> None:
    good = tmp_path / "good"
    with open_shelf(good) as shelf:
        store_all(shelf)
        names = [shelf.view(FMT).name(ObjectRef(chunk, shard)) for chunk, shard in ITEMS]
    for last in itertools.count():
        root = tmp_path / str(last)
        shutil.copytree(good, root)
        for name in names[::2]:
            data = bytearray((root / name).read_bytes())
            data[-1] ^= 1
            (root / name).write_bytes(data)
        (code,) = run({"root": str(root), "job": "repair", "last": last})
        for name in names[1::2]:
            assert (root / name).read_bytes() == (good / name).read_bytes()
        # What was bad is bad, missing, or repaired; a load never serves it.
        with open_shelf(root) as shelf:
            for chunk, shard in ITEMS:
                shelf.view(FMT).publish(
                    ObjectRef(chunk, shard), sealed(FMT, chunk, shard), suspect=True
                )
        check(root)
        shutil.rmtree(root)
        if code == 0:
            break
    assert last > 40


def test_keeper_killed_at_every_step_of_a_sweep(run: Kill, tmp_path: Path) -> None:
    good = tmp_path / "good"
    with open_shelf(good) as shelf:
        store_all(shelf)
    deleted = set()
    for last in itertools.count():
        root = tmp_path / str(last)
        shutil.copytree(good, root)
        (code,) = run({"root": str(root), "job": "sweep", "last": last})
        with open_shelf(root) as shelf:
            deleted.add(len(ITEMS) - sum(1 for _ in shelf.objects()))
        check(root)
        # What is left of it lifts no bound.
        assert run({"root": str(root), "job": "sweep", "last": NEVER}) == [0]
        with open_shelf(root) as shelf:
            assert list(shelf.objects()) == []
        shutil.rmtree(root)
        if code == 0:
            break
    # It died between any two deletions.
    assert deleted == set(range(len(ITEMS) + 1))


def test_two_writers_killed_at_any_steps(run: Kill, tmp_path: Path) -> None:
    chance = random.Random(1)
    killed = 0
    for number in range(30):
        root = tmp_path / str(number)
        orders = [
            {
                "root": str(root),
                "job": "write",
                "last": chance.randrange(120),
                "no_links": number % 3 == 0,
                "half": chance.random() < 0.5,
            }
            for _ in range(2)
        ]
        killed += sum(code != 0 for code in run(*orders))
        check(root)
        shutil.rmtree(root, ignore_errors=True)
    assert killed > 15


def test_reader_killed_at_every_step_changes_nothing(run: Kill, tmp_path: Path) -> None:
    root = tmp_path / "shelf"
    with open_shelf(root) as shelf:
        store_all(shelf)

    def files() -> dict[str, tuple[int, int]]:
        return {
            str(path): (path.stat().st_ino, path.stat().st_mtime_ns)
            for path in root.rglob("*")
            if path.is_file()
        }

    before = files()
    for last in itertools.count():
        (code,) = run({"root": str(root), "job": "load", "last": last})
        assert files() == before
        if code == 0:
            break
    assert last > 10
    check(root)
