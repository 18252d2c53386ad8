"""Real engines on two mounts of one directory, whose caches lie for some seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.faultfs import FaultMount, mounted
from tests.support.engines import Answer, Engine, assert_same
from tests.support.fleet import Engines
from tests.vllm.shelf_files import ShelfFiles

pytestmark = pytest.mark.slow

#: What the kernel believes of names, attributes and what is not there, as with NFS.
CACHE_SECONDS = 5.0
HIT = 768


@pytest.fixture
def two_mounts(tmp_path: Path) -> Iterator[tuple[FaultMount, FaultMount]]:
    """One directory, mounted twice, by processes that know nothing of each other."""
    first = mounted(tmp_path / "a", cache_seconds=CACHE_SECONDS)
    with first:
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "source").symlink_to(first.source)
        with mounted(tmp_path / "b", cache_seconds=CACHE_SECONDS) as second:
            yield first, second


def start(engines: Engines, name: str, mount: FaultMount, core: int) -> Engine:
    return engines.on_shelf(name, mount.path / "kv", core=core)


def test_engines_on_two_mounts_share_a_directory(
    engines: Engines,
    two_mounts: tuple[FaultMount, FaultMount],
    reference: Callable[..., Answer],
    prompt: Callable[[int], list[int]],
) -> None:
    known, new = prompt(1000), prompt(1000)
    one, other = two_mounts
    shelf = ShelfFiles(one.source / "kv")
    writer = start(engines, "on mount a", one, 0)
    reader = start(engines, "on mount b", other, 1)
    with writer, reader:
        assert writer.generate(known).shelf_tokens == 0
        shelf.wait_stored(known)
        # The other mount may believe for a while that the folders are not there.
        eventually_shared(reader, known, reference(known))

        # Both know that it is not there when one of them stores it.
        assert_same(reader.generate(new), reference(new))
        writer.reset_prefix_cache()
        assert_same(writer.generate(new), reference(new))
        shelf.wait_stored(new)
        for engine in (reader, writer):
            eventually_shared(engine, new, reference(new))
    shelf.check_all()


def eventually_shared(engine: Engine, tokens: list[int], expected: Answer) -> None:
    """Ask until a prompt comes from the shelf; every answer must be right."""
    deadline = time.monotonic() + 6 * CACHE_SECONDS
    while True:
        engine.reset_prefix_cache()
        answer = engine.generate(tokens)
        assert_same(answer, expected)
        if answer.shelf_tokens == HIT:
            return
        assert time.monotonic() < deadline, "caches ran out long ago"
