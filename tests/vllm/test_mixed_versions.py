"""An engine of an earlier version and one of this version on one shelf, while the new one sweeps.

The earlier version is taken from the repository's history. Both run on the vLLM that is installed.
They share only what the new one names with no more fields than the earlier version had.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines import SHELF_CONNECTOR, Answer, Engine, assert_same
from tests.support.fleet import Engines, MakePrompt, Places, Reference
from tests.support.waiting import until
from tests.vllm.shelf_files import ShelfFiles, check_object

#: The commit that was version 0.1.0, before shelves were bounded.
EARLIER = "e47901d8a85435e342b2473ebacb2d7a6d377afa"
REPOSITORY = Path(__file__).parents[2]
#: A prompt's chunks: two objects or so of 300 kB each.
TOKENS = 600
#: Puts the earlier package before the one that is installed for development.
_CUSTOMIZE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable_")]
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the package as it was."""
    archive = subprocess.run(
        ["git", "-C", REPOSITORY, "archive", EARLIER, "src/kvshelf", "backends"],
        capture_output=True,
        check=False,
    )
    if archive.returncode:
        pytest.skip(f"the repository's history is not here: {archive.stderr.decode().strip()}")
    place = tmp_path_factory.mktemp("earlier")
    # Python has the filter "data" from 3.11.4 on.
    subprocess.run(["tar", "-x", "-C", place], input=archive.stdout, check=True)
    (place / "backends").rename(place / "src" / "kvshelf" / "backends")
    (place / "src" / "sitecustomize.py").write_text(_CUSTOMIZE)
    with (place / "src" / "kvshelf" / "vllm" / "connector.py").open("a") as connector:
        connector.write(f"\nprint('this is kvshelf of {EARLIER}', flush=True)\n")
    return place / "src"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> ShelfFiles:
    return ShelfFiles(tmp_path_factory.mktemp("shared"))


def nbytes(shelf: ShelfFiles) -> int:
    found = 0
    for path in shelf.objects():
        try:
            found += path.stat().st_size
        except FileNotFoundError:
            continue
    return found


@pytest.fixture(scope="module")
def bound() -> int:
    """Bytes that the new engine allows."""
    return 24 << 20


@pytest.fixture(scope="module")
def both(
    engines: Engines, places: Places, earlier: Path, shared: ShelfFiles, bound: int
) -> Iterator[tuple[Engine, Engine]]:
    """The earlier engine and the new one, which sweeps."""
    options = {"shared_storage_path": str(shared.root)}
    old = engines.start(
        "earlier",
        model=places.model,
        connector=SHELF_CONNECTOR,
        extra_config=options,
        # The second variable keeps it from being forked from a process of this version.
        env={"PYTHONPATH": str(earlier), "PYTHONNOUSERSITE": "1"},
        core=0,
    )
    new = engines.start(
        "bounded",
        model=places.model,
        connector=("ConnectorWithoutConfiguration", "tests.vllm.earlier_connector"),
        extra_config={**options, "capacity": {"max_bytes": bound}},
        core=1,
    )
    yield old.wait_ready(), new.wait_ready()
    old.stop()
    new.stop()


def answered(
    engine: Engine, new: Engine, tokens: list[int], shared: ShelfFiles
) -> tuple[Answer, list[Path]]:
    """Return an engine's answer and the objects of its prompt; none if the new one had no room.

    Between sweeps the new one takes what others write onto the same disk for a part of the shelf.
    """

    def refusals() -> float:
        # Counters come with steps.
        new.generate([5])
        return new.counters().get("dropped_chunks_no_room", 0)

    before, answer = refusals(), engine.generate(tokens)
    paths = [path for row in shared.of(tokens) for path in row]

    def stored() -> bool:
        return all(path.exists() for path in paths)

    until(lambda: stored() or refusals() > before, "a prompt stored or refused")
    return answer, paths if stored() else []


def test_both_store_and_load_while_one_sweeps(
    both: tuple[Engine, Engine],
    shared: ShelfFiles,
    bound: int,
    reference: Reference,
    prompt: MakePrompt,
) -> None:
    old, new = both

    # An engine stores nothing of prompts that came before its namespace was known.
    for engine in both:
        earlier: list[list[int]] = []

        def stores(engine: Engine = engine, prompts: list[list[int]] = earlier) -> bool:
            prompts.append(prompt(TOKENS))
            engine.generate(prompts[-1])
            files = (row[0] for one in prompts if shared.namespaces() for row in shared.of(one))
            return any(file.exists() for file in files)

        until(stores, "the first chunk of an engine")
    assert f"kvshelf of {EARLIER}" in old.log_path.read_text(errors="replace")
    assert f"kvshelf of {EARLIER}" not in new.log_path.read_text(errors="replace")
    written = 0
    for turn in range(200):
        tokens = prompt(TOKENS)
        first, second = (old, new) if turn % 2 else (new, old)
        expected = reference(tokens)
        answer, stored = answered(first, new, tokens, shared)
        assert_same(answer, expected)
        if not stored:
            continue
        written += sum(path.stat().st_size for path in stored)
        found = second.generate(tokens)
        assert found.shelf_tokens == TOKENS // 256 * 256
        assert_same(found, expected)
        if written > 3 * bound:
            break
    assert written > 3 * bound, "the new engine never had to sweep"
    until(lambda: nbytes(shared) <= 1.1 * bound, "the bound holds")
    for path in shared.objects():
        # A sweep may go on, and delete what is looked at.
        with contextlib.suppress(FileNotFoundError):
            check_object(path)
    # What is left is used by both.
    stored: list[Path] = []
    while not stored:
        tokens = prompt(TOKENS)
        _, stored = answered(new, new, tokens, shared)
    assert old.generate(tokens).shelf_tokens == TOKENS // 256 * 256
