"""A bounded shelf under real engines: what stops, what goes, and that answers stay right."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends import open_backend
from kvshelf.capacity.visit import Lister, Reason, delete
from tests.support.engines import Engine, assert_same_up_to_ties
from tests.support.fleet import Ask, Engines, MakePrompt, Places, Reference
from tests.support.waiting import until
from tests.vllm.shelf_files import ShelfFiles

pytestmark = pytest.mark.slow

Start = Callable[..., Engine]

PROMPTS = 6


@pytest.fixture(scope="module")
def start(engines: Engines, places: Places) -> Iterator[Start]:
    started: list[Engine] = []

    def start(name: str, capacity: dict[str, Any], least_free: int) -> Engine:
        options = {"capacity": capacity, "least_free": least_free}
        engine = engines.on_shelf(name, places.root / name, options)
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
    found = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # it was deleted, or published, meanwhile
                found += os.lstat(os.path.join(folder, name)).st_size
    return found


def test_a_full_storage_gets_nothing_and_is_named_once(
    start: Start, places: Places, inert: Engine, ask: Ask, prompt: MakePrompt
) -> None:
    engine = start("full", {}, least_free=1 << 50)
    known(engine, prompt, "storage_free_bytes")
    for _ in range(2):
        tokens = prompt(600)
        ask(engine, tokens, 0)
    until(lambda: dropped_for_room(engine) >= 2, "stores were dropped")
    assert not ShelfFiles(places.root / "full").objects()
    assert len(engine.log_lines("stores leave")) == 1
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
    start: Start, places: Places, chunk_bytes: int, inert: Engine, ask: Ask, prompt: MakePrompt
) -> None:
    bound = 10 * chunk_bytes
    engine = start("bounded", {"max_bytes": f"{bound}B"}, least_free=0)
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
    # What was stored last is asked for before anything else makes it the oldest.
    for tokens in reversed(prompts):
        engine.reset_prefix_cache()
        answer = ask(engine, tokens)
        hits += answer.shelf_tokens or 0
    assert 0 < hits < PROMPTS * 1024

    def evicts() -> bool:
        # Near the bound little of a prompt is stored.
        engine.generate(prompt(1100), max_tokens=1)
        return gauge(engine, "shelf_evicted_objects_total") > 0

    until(evicts, "a sweep", 120.0)
    assert not engine.log_lines("Traceback")


def test_what_is_deleted_while_it_is_loaded_is_a_miss(
    start: Start,
    places: Places,
    engine: Engine,
    inert: Engine,
    reference: Reference,
    prompt: MakePrompt,
) -> None:
    """Somebody deletes all objects while requests load."""
    shelf = ShelfFiles(places.shelf)
    tokens = prompt(2000)
    alone = [reference(tokens + tail) for tail in ([5], [6], [7])]
    stop = threading.Event()

    def sweep() -> None:
        backend = open_backend(str(places.shelf))
        while not stop.is_set():
            for part in Lister(backend).whole(None, time.time()):
                units = [(unit, Reason.SIZE) for unit in part.units]
                delete(backend, units, now=time.time())
        backend.close()

    thread = threading.Thread(target=sweep)
    for _ in range(2):
        engine.reset_prefix_cache()
        shelf.fill(engine, tokens, max_tokens=1)
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
