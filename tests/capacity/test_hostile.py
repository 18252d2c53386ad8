"""Whatever one file says: sweeps end, keep to their own bounds and delete nothing else."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvshelf.backends import open_backend
from kvshelf.capacity import marks
from kvshelf.capacity.collect import plan
from kvshelf.capacity.files import NamespaceFolder
from kvshelf.capacity.inventory import Scan
from kvshelf.capacity.marks import MARKS, Marks
from kvshelf.capacity.rules import Rules
from kvshelf.capacity.sweeper import Sweeper
from kvshelf.cli.app import app
from kvshelf.config import CapacityConfig
from kvshelf.format.names import parse_path
from kvshelf.metrics import Counters
from tests.capacity.shelves import Place
from tests.server.serve_process import ServeProcess
from tests.support.formats import make_format
from tests.support.prompts import make_chunks
from tests.support.waiting import until

FMT = make_format()
CHUNKS = make_chunks(FMT, 10)
CHUNK_BYTES = sum(FMT.object_size(shard) for shard in range(FMT.shards))
TAG: Final = "0123456789abcdef"
DAY = 86400.0
#: Numbers that JSON can hold and that nothing should.
NUMBERS = ["Infinity", "-Infinity", "NaN", "9" * 400, "-" + "9" * 400, "1e308", "9" * 5000, "true"]


def mark(age: str, keys: str) -> bytes:
    section = f'{{"namespace":"x-{TAG}","kind":"full","age":{age},"keys":{keys}}}'
    return b'{"version":1,"sections":[%s]}\n' % section.encode() + bytes(16)


def write(root: Path, name: str, data: bytes) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def child(root: Path, key: str, index: int, parent: str) -> None:
    """Write an object that names a parent."""
    digest = TAG + "0" * 48
    header = (
        f'{{"__metadata__":{{"format":"kvshelf/1","namespace":"{digest}","key":"{key}",'
        f'"parent":"{parent}"'
    )
    name = f"x-{TAG}/_/{key[:2]}/{key}-{index}-0of1.safetensors"
    write(root, name, bytes(8) + header.encode() + b" " * 40)


def circle(root: Path, keys: list[str], indexes: list[int]) -> None:
    """Write objects of which each names the next one as its parent."""
    for number, key in enumerate(keys):
        child(root, key, indexes[number], keys[(number + 1) % len(keys)])


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("field", ["age", "keys"])
def test_numbers_of_marks_that_make_no_sense(tmp_path: Path, number: str, field: str) -> None:
    given_numbers = {"age": "1", "keys": "1"} | {field: number}
    write(tmp_path, f"{MARKS}/1-{TAG}", mark(**given_numbers))
    write(tmp_path, f"{MARKS}/2-{TAG}", mark("1", "1"))
    backend = open_backend(str(tmp_path))
    assert len(Marks.read(backend)) == 1, "the other file marks"
    Marks.compact(backend)


@settings(max_examples=70, deadline=None)
@given(
    st.binary(max_size=300)
    | st.builds(mark, st.sampled_from(NUMBERS), st.sampled_from(NUMBERS))
    | st.builds(
        lambda value: json.dumps({"version": 1, "sections": value}).encode() + b"\n",
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["namespace", "kind", "age", "keys"]), inner, max_size=4
                )
            ),
        ),
    )
)
def test_any_bytes_may_be_a_mark(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    root = tmp_path_factory.getbasetemp() / "marks"
    write(root, f"{MARKS}/1-{TAG}", data)
    backend = open_backend(str(root))
    Marks.read(backend)
    list(marks.unreadable(backend))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=1 << 60, max_value=1 << 70)
    | st.floats()
    | st.sampled_from(["full", "window", "state", "kvshelf/1", ""]),
    lambda inner: st.lists(inner, max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["format", "kinds", "sliding_windows", "chunk_size"]), JSON, max_size=4
    )
    | st.fixed_dictionaries(
        {
            "format": st.just("kvshelf/1"),
            "kinds": st.lists(st.sampled_from(["full", "window", "state"]), max_size=3),
            "sliding_windows": st.lists(st.integers(), max_size=3),
            "chunk_size": st.integers(),
        }
    )
)
def test_any_record_may_describe_a_namespace(record: dict[str, Any]) -> None:
    folder = NamespaceFolder(f"x-{TAG}", TAG, record)
    assert 0 <= folder.rule.mask < 8
    assert 0 <= folder.rule.reach < 1 << 63
    assert folder.of_other_version in (True, False)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_may_be_the_header_of_an_object(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    root = tmp_path_factory.getbasetemp() / "headers"
    write(root, f"x-{TAG}/_/aa/{'aa' * 32}-1-0of1.safetensors", data)
    found = Scan(open_backend(str(root)), parents=True).run()
    assert found is not None
    plan(found, Rules(max_age=60.0))


def within(seconds: float, work: Callable[[], object]) -> None:
    """Run something that may hang for ever."""
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert done, "it hangs, or has failed"


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("kind", ["same", "rising", "mixed"])
def test_parents_in_a_circle_hang_nothing(tmp_path: Path, length: int, kind: str) -> None:
    keys = [f"{number + 1:02x}" * 32 for number in range(length)]
    indexes = {
        "same": [1] * length,
        "rising": list(range(1, length + 1)),
        "mixed": [1 + (number * 3) % 5 for number in range(length)],
    }[kind]
    circle(tmp_path, keys, indexes)
    # Where the parent of any chunk is gone, the chunks behind it are looked for.
    child(tmp_path, "ee" * 32, 1, "ff" * 32)
    found = Scan(open_backend(str(tmp_path)), parents=True).run()
    assert found is not None and len(found) == length + 1
    units = found.units()
    named = np.flatnonzero(units.parent >= 0)
    assert (units.index[units.parent[named]] + 1 == units.index[named]).all()
    # A process of its own is slow to start, and a thread that hangs ends with this one.
    within(60, lambda: plan(found, Rules(max_age=60.0, max_bytes=1)))


# ------------------------------------------------------------------------ files, one by one


def infinite_mark(root: Path) -> None:
    write(root, f"{MARKS}/1-{TAG}", mark("1", "Infinity"))


def long_mark(root: Path) -> None:
    write(root, f"{MARKS}/1-{TAG}", mark("9" * 400, "1"))


def small_bound(root: Path) -> None:
    record = {"version": 1, "owner": "x", "until": 0, "max_bytes": 1, "max_bytes_at": time.time()}
    write(root, ".kvshelf/sweep", json.dumps(record).encode())


def lying_finding(root: Path) -> None:
    finding = {"at": time.time(), "nbytes": 1 << 62, "seconds": 1e18}
    record = {"version": 1, "owner": "x", "until": 0, "finding": finding}
    write(root, ".kvshelf/sweep", json.dumps(record).encode())


def no_windows(root: Path) -> None:
    record = {"format": "kvshelf/1", "kinds": ["full", "window"], "sliding_windows": []}
    data = json.dumps(record | {"chunk_size": 64}).encode()
    write(root, f"x-{TAG}/namespace.json", data)
    write(root, f"x-{TAG}/_/aa/{'aa' * 32}-0-window-0of1.safetensors", bytes(300))


def three_parents(root: Path) -> None:
    circle(root, ["aa" * 32, "bb" * 32, "cc" * 32], [1, 1, 1])
    write(root, f"x-{TAG}/_/dd/{'dd' * 32}-1-window-0of1.safetensors", bytes(300))


def not_files(root: Path) -> None:
    """Pipes, folders and links in the place of files."""
    for name in (f"{MARKS}/1-{TAG}", ".kvshelf/pins/x.json", f"x-{TAG}/namespace.json"):
        write(root, name, b"").unlink()
        os.mkfifo(root / name)
    (root / ".kvshelf" / "sweep").mkdir()
    (root / MARKS / f"2-{TAG}").symlink_to("/dev/zero")


HOSTILE = [
    infinite_mark,
    long_mark,
    small_bound,
    lying_finding,
    no_windows,
    three_parents,
    not_files,
]


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda one: one.__name__)
def test_an_engine_keeps_its_bound_beside_one_file(
    tmp_path: Path, hostile: Callable[[Path], None]
) -> None:
    """Of ten chunks stay what its own bound allows, and no fewer than a sweep leaves."""
    place = Place(tmp_path, ahead=0.0)
    place.put(FMT, CHUNKS, age=3600.0)
    hostile(tmp_path)
    small = Sweeper(
        place.shelf, CapacityConfig.model_validate({"max_bytes": 6 * CHUNK_BYTES}), Counters()
    )
    large = Sweeper(place.shelf, CapacityConfig.model_validate({"max_bytes": "10TiB"}), Counters())

    def objects() -> int:
        return sum(
            parsed is not None and name.startswith(FMT.namespace.folder)
            for name in place.files()
            if (parsed := parse_path(name)) is not None
        )

    within(60, large.step)
    assert objects() == 10 * FMT.shards
    # The first sweep, which left more than this one may hold, was a minute ago.
    place.later.ahead = 120.0
    within(60, small.step)
    assert 3 * FMT.shards <= objects() <= 6 * FMT.shards
    for sweeper in (small, large):
        assert sweeper._counters.snapshot().get("sweep_errors", 0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda one: one.__name__)
def test_a_node_server_keeps_its_bound_beside_one_file(
    tmp_path: Path, hostile: Callable[[Path], None]
) -> None:
    """A process of its own, with the bound that it was started with."""
    root = tmp_path / "shelf"
    place = Place(root, ahead=0.0)
    place.put(FMT, CHUNKS, age=3600.0)
    hostile(root)
    bound = {"KVSHELF_CAPACITY": json.dumps({"max_bytes": 6 * CHUNK_BYTES})}
    with ServeProcess(root, tmp_path / "socket", **bound) as server:
        until(lambda: server.metrics()["sweeps"] >= 1)
        assert server.metrics()["sweep_errors"] == 0
        code, errors = server.stop()
    assert code == 0, errors
    assert "Traceback" not in errors
    left = [name for name in place.files() if name.startswith(f"{FMT.namespace.folder}/")]
    left = [name for name in left if name.endswith(".safetensors")]
    assert 3 * FMT.shards <= len(left) <= 6 * FMT.shards


@pytest.mark.long
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda one: one.__name__)
def test_commands_end_beside_one_file(tmp_path: Path, hostile: Callable[[Path], None]) -> None:
    """Each with a code of its own, and without a traceback."""
    place = Place(tmp_path, ahead=0.0)
    place.put(FMT, CHUNKS, age=3600.0)
    hostile(tmp_path)
    before = {name for name in place.files() if name.endswith(".safetensors")}
    for arguments in (["gc", "--yes"], ["ls"], ["rm", "--unused-for", "9d", "--yes"], ["verify"]):
        result = CliRunner().invoke(app, [arguments[0], str(tmp_path), *arguments[1:]])
        assert result.exit_code in (0, 1), result.output
        assert isinstance(result.exception, SystemExit | None), result.exception
    left = {name for name in place.files() if name.endswith(".safetensors")}
    assert {name for name in before if name.startswith(FMT.namespace.folder)} <= left
