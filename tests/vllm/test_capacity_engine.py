"""A bounded shelf under real engines: what stops, what goes, and that answers stay right."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends import open_backend
from kvshelf.capacity.collect import plan
from kvshelf.capacity.deletion import carry_out
from kvshelf.capacity.inventory import Inventory
from kvshelf.capacity.rules import Rules
from kvshelf.format.keys import salt_group_of
from tests.support.engines import Answer, Engine, assert_same, assert_same_up_to_ties
from tests.support.fleet import Engines, Places
from tests.support.waiting import until
from tests.vllm.shelf_files import ShelfFiles

MakePrompt = Callable[[int], list[int]]
Reference = Callable[..., Answer]
Start = Callable[..., Engine]

PROMPTS = 6


@pytest.fixture(scope="module")
def start(engines: Engines, places: Places) -> Iterator[Start]:
    started: list[Engine] = []

    def start(
        name: str, capacity: dict[str, Any], *, by_salt: bool = False, **arguments: Any
    ) -> Engine:
        engine = engines.on_shelf(
            name, places.root / name, {"capacity": capacity, "group_by_salt": by_salt}, **arguments
        )
        started.append(engine)
        return engine.wait_ready()

    yield start
    for engine in started:
        engine.stop(at_once=True)


def gauge(engine: Engine, name: str) -> float:
    return engine.metrics().get(f"vllm:kvshelf_{name}", 0.0)


def dropped_for_room(engine: Engine) -> float:
    found = re.findall(
        r'^vllm:kvshelf_dropped_chunks_total\{.*reason="no_room".*\} (\S+)$',
        engine.metrics_text(),
        re.M,
    )
    return sum(map(float, found))


def known(engine: Engine, prompt: MakePrompt, name: str) -> None:
    """Let the engine run until it has told this gauge."""

    def told() -> bool:
        engine.generate(prompt(10), max_tokens=1)
        return gauge(engine, name) > 0

    until(told, name)


def used(root: Path) -> int:
    return sum(path.lstat().st_size for path in root.rglob("*") if path.is_file())


def test_a_full_storage_gets_nothing_and_is_named_once(
    start: Start, places: Places, inert: Engine, reference: Reference, prompt: MakePrompt
) -> None:
    engine = start("full", {"min_free": "1PiB"})
    known(engine, prompt, "storage_free_bytes")
    for _ in range(3):
        tokens = prompt(600)
        for _ in range(2):
            answer = engine.generate(tokens)
            assert answer.shelf_tokens == 0
            assert_same(answer, reference(tokens))
            engine.reset_prefix_cache()
    until(lambda: dropped_for_room(engine) >= 3, "stores were dropped")
    assert not ShelfFiles(places.root / "full").objects()
    assert len(engine.log_lines("(min_free)")) == 1
    assert not engine.log_lines("circuit breaker open")
    engine.stop(at_once=True)


@pytest.fixture(scope="module")
def chunk_bytes(engines: Engines, places: Places) -> int:
    """Bytes of a chunk's objects, as the session's engine stores them."""
    engine, files = engines["on_shelf"], ShelfFiles(places.shelf)
    tokens = [3 + number % 500 for number in range(300)]
    engine.generate(tokens, max_tokens=1)
    (objects,) = files.wait_stored(tokens)
    return sum(path.stat().st_size for path in objects)


def test_a_bound_holds_and_what_was_deleted_is_computed(
    start: Start,
    places: Places,
    chunk_bytes: int,
    inert: Engine,
    reference: Reference,
    prompt: MakePrompt,
) -> None:
    bound = 10 * chunk_bytes
    engine = start("bounded", {"max_bytes": bound, "min_free": 0})
    shelf = ShelfFiles(places.root / "bounded")
    known(engine, prompt, "shelf_limit_bytes")
    prompts = [prompt(1100) for _ in range(PROMPTS)]
    for tokens in prompts:
        engine.generate(tokens)
        # A sweep makes room for the next one. Nine chunks call for none, however large the files
        # beside them are; and a sweep that took a second is not followed by another one at once.
        until(lambda: used(shelf.root) <= 0.95 * bound, "room for more", 120.0)
        assert used(shelf.root) <= 1.1 * bound
    assert len(shelf.objects()) > 0
    hits = 0
    for tokens in prompts:
        engine.reset_prefix_cache()
        answer = engine.generate(tokens)
        assert_same(answer, reference(tokens))
        hits += answer.shelf_tokens or 0
    assert 0 < hits < PROMPTS * 1024

    def evicts() -> bool:
        # Near the bound little of a prompt is stored.
        engine.generate(prompt(1100), max_tokens=1)
        return gauge(engine, "shelf_evicted_objects_total") > 0

    until(evicts, "a sweep", 120.0)
    assert not engine.log_lines("Traceback")


@pytest.mark.slow
def test_a_salt_group_above_its_bound_costs_no_other_group(
    start: Start,
    places: Places,
    chunk_bytes: int,
    inert: Engine,
    reference: Reference,
    prompt: MakePrompt,
) -> None:
    bound = 10 * chunk_bytes
    capacity = {"group_max_bytes": bound, "min_free": 0}
    engine = start("groups", capacity, by_salt=True)
    shelf = ShelfFiles(places.root / "groups")

    def group(salt: str) -> int:
        return sum(used(path) for path in shelf.root.glob(f"*/{salt_group_of(salt)}"))

    few = prompt(1100)
    engine.generate(few, cache_salt="few")
    until(lambda: group("few") == 4 * chunk_bytes, "the smaller group is stored")
    for _ in range(PROMPTS):
        engine.generate(prompt(1100), cache_salt="many")
    # A listing alone tells the size of a group, and such sweeps are a minute apart.
    until(lambda: bool(engine.log_lines(": deleted")), "a sweep", 150.0)
    until(lambda: group("many") <= 0.9 * bound, "the larger group is smaller", 150.0)
    assert group("few") == 4 * chunk_bytes
    engine.reset_prefix_cache()
    answer = engine.generate(few, cache_salt="few")
    assert answer.shelf_tokens == 1024
    assert_same(answer, reference(few))
    assert not engine.log_lines("Traceback")


def test_what_is_deleted_while_it_is_loaded_is_a_miss(
    start: Start,
    places: Places,
    engine: Engine,
    inert: Engine,
    reference: Reference,
    prompt: MakePrompt,
) -> None:
    """Somebody sweeps with a bound of nothing while requests load."""
    shelf = ShelfFiles(places.shelf)
    tokens = prompt(2000)
    alone = [reference(tokens + tail) for tail in ([5], [6], [7])]
    stop = threading.Event()

    def sweep() -> None:
        backend = open_backend(str(places.shelf))
        while not stop.is_set():
            inventory = Inventory.scan(backend)
            assert inventory is not None
            carry_out(backend, plan(inventory, Rules(max_bytes=1)))
        backend.close()

    thread = threading.Thread(target=sweep)
    for _ in range(3):
        engine.reset_prefix_cache()
        engine.generate(tokens, max_tokens=1)
        shelf.wait_stored(tokens)
        engine.reset_prefix_cache()
        if not thread.is_alive():
            stop.clear()
            thread = threading.Thread(target=sweep)
            thread.start()
        answers = [
            request.result()
            for request in [engine.submit(tokens + tail) for tail in ([5], [6], [7])]
        ]
        stop.set()
        thread.join()
        assert_same_up_to_ties(answers, alone, alone)
    assert not engine.log_lines("Traceback")


def test_without_the_right_to_delete_one_line_says_that_nothing_is_bounded(
    start: Start, places: Places, inert: Engine, reference: Reference, prompt: MakePrompt
) -> None:
    """The shelf is full of objects that this engine may not delete."""
    folder = places.root / "kept" / "others-0123456789abcdef" / "_" / "00"
    folder.mkdir(parents=True)
    for number in range(4):
        (folder / f"{number:064x}-{number}-0of1.safetensors").write_bytes(bytes(1 << 20))
    folder.chmod(0o555)
    capacity = {"max_bytes": "1MiB", "min_free": 0}
    engine = start("kept", capacity, heed_permissions=True)
    try:
        if not engine.heeds_permissions:
            pytest.skip("these tests run as a root that cannot give up its privileges")
        known(engine, prompt, "shelf_used_bytes")
        tokens = prompt(600)
        for _ in range(3):
            answer = engine.generate(tokens)
            assert_same(answer, reference(tokens))
            assert answer.shelf_tokens == 0
            engine.reset_prefix_cache()
        assert len(engine.log_lines("keeps the shelf within no bounds")) == 1
        assert engine.log_lines("does not allow it to delete")
        assert len(ShelfFiles(places.root / "kept").objects()) == 4
    finally:
        folder.chmod(0o755)
