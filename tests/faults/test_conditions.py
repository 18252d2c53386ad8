"""Conditions of a machine that last: full filesystems, power losses, files that change.

Beside the table of single faults (test_table.py): here the storage is as it is, for every call. An
engine goes on in each of them, never takes wrong KV, and uses the storage again once it is well.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvshelf.backends import open_backend
from kvshelf.format.names import parse_path
from kvshelf.shelf.shelf import open_shelf
from tests.faults.cells import (
    CHUNKS,
    EngineStandIn,
    MountedStorage,
    Prompt,
    bad_objects,
    damage,
    eventually,
    make_prompt,
)
from tests.faults.faultfs import FaultMount
from tests.faults.test_table import loads_all
from tests.support.formats import make_format
from tests.support.waiting import until

pytestmark = [pytest.mark.real, pytest.mark.slow]

FMT = make_format()
PROMPT_BYTES = CHUNKS * sum(FMT.object_size(shard) for shard in range(FMT.shards))


@pytest.fixture
def condition(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    """Count the test for its row: the first line of its docstring."""
    text = request.function.__doc__.splitlines()[0].rstrip(".")
    record_property("condition", text)


@pytest.fixture
def small(tmp_path: Path, short_pauses: None) -> Iterator[Callable[..., Path]]:
    """Mount real filesystems in memory, with options of tmpfs."""
    with ExitStack() as stack:

        def mount(**options: object) -> Path:
            place = tmp_path / f"tmpfs-{len(os.listdir(tmp_path))}"
            place.mkdir()
            given = ",".join(f"{name}={value}" for name, value in options.items())
            made = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", given, "none", place],
                capture_output=True,
                text=True,
                check=False,
            )
            if made.returncode:
                pytest.skip(f"tmpfs cannot be mounted here: {made.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", "-l", place], check=False)
            return place

        yield mount


def engine_at(place: Path | str) -> EngineStandIn:
    return EngineStandIn(open_backend(place))


def store(place: Path, *prompts: Prompt) -> None:
    """Have an engine store prompts, and end."""
    with closing(engine_at(place)) as engine:
        for prompt in prompts:
            engine.answer(prompt)


def objects_in(place: Path) -> list[Path]:
    return sorted(place.rglob("*.safetensors"))


def fill_until_refused(engine: EngineStandIn, seeds: Iterator[int]) -> Prompt:
    """Answer ever new prompts until chunks are dropped; return the last prompt."""
    before = dropped(engine)
    for seed in seeds:
        prompt = make_prompt(FMT, seed)
        assert engine.answer(prompt) == 0
        if dropped(engine) > before:
            return prompt
    raise AssertionError("the filesystem never became full")


def dropped(engine: EngineStandIn) -> float:
    found = engine.rig.counters.snapshot()
    return sum(count for name, count in found.items() if name.startswith("dropped_chunks"))


# --------------------------------------------------------------------------------------- space


@pytest.mark.usefixtures("condition")
@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_full(what: str, small: Callable[..., Path]) -> None:
    """A filesystem without free bytes, or inodes."""
    limit = {"bytes": {"size": 16 * PROMPT_BYTES}, "inodes": {"nr_inodes": 60}}[what]
    place = small(**limit)
    with closing(engine_at(place)) as engine:
        known = make_prompt(FMT, 0)
        engine.answer(known)
        refused = fill_until_refused(engine, iter(range(1, 200)))
        # What is there can be loaded all the time.
        eventually(loads_all(engine, known))
        engine.answer(refused)
        assert list(bad_objects(open_backend(place), FMT, [known])) == []
        # Somebody makes room: stores go on.
        for path in objects_in(place):
            parsed = parse_path(str(path.relative_to(place)))
            assert parsed is not None
            if parsed.key not in {chunk.key for chunk in known.chunks}:
                path.unlink()
        eventually(loads_all(engine, refused))
        engine.check_blocks()


@pytest.mark.usefixtures("condition")
@pytest.mark.parametrize("operation", ["flush", "link", "mkdir"])
@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EMLINK"])
def test_refused_late(operation: str, code: str, mount: FaultMount, short_pauses: None) -> None:
    """No room that is noticed at close, at the publishing link, or for a folder."""
    storage = MountedStorage(mount)
    prompt = make_prompt(FMT, 1)
    with closing(storage), closing(EngineStandIn(storage.backend)) as engine:
        mount.add(operation, f"{storage.name}/*", error=getattr(errno, code))
        for _ in range(2):
            engine.answer(prompt)
        assert mount.met(1)
        # An engine that cannot link may have published by renaming; nothing else is there.
        published = [info.name for info in storage.plain.list() if parse_path(info.name)]
        assert not published or code == "EMLINK"
        storage.heal()
        eventually(loads_all(engine, prompt))
        assert list(bad_objects(storage.plain, FMT, [prompt])) == []


_LIMITED = """
import resource, sys
from pathlib import Path
from contextlib import closing
sys.path[:0] = {paths!r}
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
from tests.faults.cells import EngineStandIn, make_prompt
from kvshelf.backends import open_backend
from tests.support.formats import make_format
from tests.support.waiting import until
with closing(EngineStandIn(open_backend({place!r}))) as engine:
    prompt = make_prompt(make_format(), 0)
    print(engine.answer(prompt), engine.answer(prompt))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    engine.be_patient()
    until(lambda: engine.answer(prompt) == len(prompt.chunks))
    print(True)
"""


@pytest.mark.usefixtures("condition")
def test_largest_file(tmp_path: Path) -> None:
    """A process that may write no file of this size (RLIMIT_FSIZE): it goes on."""
    code = _LIMITED.format(paths=sys.path, place=str(tmp_path / "shelf"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "0", "True"]


# ----------------------------------------------------------------------------------- power losses


def _zero_end(data: bytearray) -> None:
    data[4096:] = bytes(len(data) - 4096)


@pytest.mark.usefixtures("condition")
def test_power_loss(tmp_path: Path, short_pauses: None) -> None:
    """Files of the right size without their bytes: objects, and namespace.json."""
    prompts = [make_prompt(FMT, seed) for seed in range(4)]
    place = tmp_path / "shelf"
    store(place, *prompts)
    plain = open_backend(place)
    for path in objects_in(place):
        damage(plain, str(path.relative_to(place)), _zero_end, old=True)
    description = place / FMT.namespace.folder / "namespace.json"
    description.write_bytes(bytes(description.stat().st_size))
    with closing(engine_at(place)) as engine:
        engine.be_patient()
        for prompt in prompts:
            assert engine.answer(prompt) == 0
        eventually(loads_all(engine, *prompts))
        engine.check_blocks()
    assert list(bad_objects(plain, FMT, prompts)) == []
    with open_shelf(place) as shelf:
        assert [info.namespace for info in shelf.namespaces()] == [FMT.namespace]


@pytest.mark.usefixtures("condition")
def test_two_bodies(tmp_path: Path, short_pauses: None) -> None:
    """One name whose bytes change, good and bad in turn, while it is read."""
    prompt = make_prompt(FMT, 0)
    place = tmp_path / "shelf"
    with closing(engine_at(place)) as engine:
        engine.answer(prompt)
        path = objects_in(place)[0]
        good = path.read_bytes()
        bad = good[:4096] + bytes(reversed(good[4096:]))
        stop = threading.Event()
        turns = [0]

        def alternate() -> None:
            while not stop.is_set():
                for body in (bad, good):
                    # In place, as a foreign program writes.
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(body)
                turns[0] += 1

        writer = threading.Thread(target=alternate, daemon=True)
        writer.start()
        try:
            for _ in range(60):
                # EngineStandIn raises where wrong KV was taken.
                engine.answer(prompt)
        finally:
            until(lambda: turns[0] > 10)
            stop.set()
            writer.join()
        eventually(loads_all(engine, prompt))
        engine.check_blocks()
