"""Real engines on two mounts of one directory, whose caches lie for some seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.faultfs import FaultMount, mounted
from tests.support.engines import (
    Ask,
    Engines,
    MakePrompt,
    Reference,
    ShelfFiles,
    eventually_hits,
)

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


def test_engines_on_two_mounts_share_a_directory(
    engines: Engines,
    two_mounts: tuple[FaultMount, FaultMount],
    reference: Reference,
    ask: Ask,
    prompt: MakePrompt,
) -> None:
    known, new = prompt(1000), prompt(1000)
    one, other = two_mounts
    shelf = ShelfFiles(one.source / "kv")
    writer = engines.start("on mount a", one.path / "kv", core=0)
    reader = engines.start("on mount b", other.path / "kv", core=1)
    with writer, reader:
        assert writer.generate(known).shelf_tokens == 0
        shelf.wait_stored(known)
        # The other mount may believe for a while that the folders are not there.
        eventually_hits(reader, known, reference(known), HIT, 6 * CACHE_SECONDS)

        # Both know that it is not there when one of them stores it.
        ask(reader, new)
        writer.reset_prefix_cache()
        ask(writer, new)
        shelf.wait_stored(new)
        for engine in (reader, writer):
            eventually_hits(engine, new, reference(new), HIT, 6 * CACHE_SECONDS)
    shelf.check_all()
