"""Real engines whose shelf is behind a node server: hits, crashes, hand-overs.

The engines know nothing of the storage. What is on it is looked at from outside, and the server's
own counts tell what was read. No test asserts times: what must not be waited for would miss
deadlines that are longer than a test may take.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.server.serve_process import ServeProcess
from tests.support.engines import (
    Answer,
    Ask,
    Engine,
    Engines,
    MakePrompt,
    Reference,
    ShelfFiles,
    assert_same,
    assert_same_up_to_ties,
    eventually_hits,
)
from tests.support.waiting import PATIENCE, until
from tests.vllm.handing_over import Counted, Promises, prefill

#: Seconds that an engine waits for a hand-over: longer than a test may take.
NEVER = 600.0


@pytest.fixture(scope="module")
def shelf(engines: Engines) -> ShelfFiles:
    return ShelfFiles(engines.root / "behind a server")


@pytest.fixture(scope="module")
def node(shelf: ShelfFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    socket = tmp_path_factory.mktemp("node") / "socket" / "node.sock"
    # What engines are told does not concern the server.
    environment = {"KVSHELF_SERVER": f"ipc://{socket}"}
    with ServeProcess(shelf.root, socket, "256MiB", **environment) as node:
        yield node


@pytest.fixture(scope="module")
def served(engines: Engines, node: ServeProcess, shelf: ShelfFiles) -> Iterator[Engine]:
    options = {
        "server": node.url,
        "handover_wait_s": NEVER,
        "lookup_seconds": PATIENCE,
        "identity_seconds": PATIENCE,
    }
    engine = engines.start("over a server", extra_config=options, core=1)
    # Tests name hand-overs by its namespace.
    shelf.fill(engine, list(range(2, 302)))
    yield engine
    engine.stop(at_once=True)


@pytest.fixture
def one(served: Engine) -> Engine:
    """The engine, its own prefix cache empty."""
    served.reset_prefix_cache()
    return served


# ------------------------------------------------------------------------------------------- hits


def test_what_is_stored_is_a_hit_without_a_read(
    one: Engine, node: ServeProcess, shelf: ShelfFiles, ask: Ask, prompt: MakePrompt
) -> None:
    tokens = prompt(1500)
    stored = node.metrics()["stored_objects"]
    ask(one, tokens)
    count = sum(map(len, shelf.wait_stored(tokens)))
    # A file is there a moment before the server has it in its memory.
    until(lambda: node.metrics()["stored_objects"] >= stored + count)
    # A step tells the scheduler what was stored.
    one.generate([7] * 20, max_tokens=1)
    before = node.metrics()
    one.reset_prefix_cache()
    ask(one, tokens, 1280)
    assert node.metrics()["read_bytes"] == before["read_bytes"]
    assert node.metrics()["memory_hits"] > before["memory_hits"]


# ------------------------------------------------------------------------------------- hand-overs


@pytest.mark.parametrize("length", [40, 256, 900])
def test_prompt_is_handed_over(one: Engine, ask: Ask, prompt: MakePrompt, length: int) -> None:
    """With tails; what the producer has just stored is in the server's memory."""
    tokens = prompt(length)
    counted = Counted(one)
    params = prefill(one, tokens)
    one.reset_prefix_cache()
    ask(one, tokens, length, kv_transfer_params=params)
    counted.wait(handovers_complete=1, handovers_late=0, handovers_gave_up=0)


def test_marker_ends_the_wait(
    one: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    tokens = prompt(700)
    promises = Promises(shelf)
    params = promises.params(tokens)
    request = one.submit(tokens, kv_transfer_params=params)
    one.generate(prompt(5))
    marker = promises.marker(params["kvshelf_attempt"])
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    assert_same(request.result(), reference(tokens))


# --------------------------------------------------------------------------- servers that are gone


def test_server_is_killed_under_load_and_restarted(
    one: Engine,
    inert: Engine,
    node: ServeProcess,
    shelf: ShelfFiles,
    reference: Reference,
    prompt: MakePrompt,
) -> None:
    known = prompt(1100)
    shelf.fill(one, known)
    prompts = [known + prompt(5) for _ in range(4)] + [prompt(900) for _ in range(4)]
    requests = [one.submit(tokens) for tokens in prompts]
    node.kill()
    try:
        answers = [request.result() for request in requests]
        alone = [reference(tokens) for tokens in prompts]
        inert.reset_prefix_cache()
        assert_same_up_to_ties(answers, alone, inert.generate_all(prompts))
        # Without a server it goes on without a cache.
        eventually_hits(one, known, reference(known), 0)
    finally:
        node.start()
    eventually_hits(one, known, reference(known), 1024)
    # It stores again, too.
    new = prompt(600)
    until(lambda: _stores(one, new, shelf, reference(new)), "a store")


def _stores(engine: Engine, tokens: list[int], shelf: ShelfFiles, expected: Answer) -> bool:
    engine.reset_connector()
    assert_same(engine.generate(tokens), expected)
    return all(path.is_file() for chunk in shelf.of(tokens) for path in chunk)


def test_server_hangs_while_requests_run(
    one: Engine,
    node: ServeProcess,
    shelf: ShelfFiles,
    reference: Reference,
    ask: Ask,
    prompt: MakePrompt,
) -> None:
    known, new, after = prompt(1100), prompt(600), prompt(600)
    shelf.fill(one, known)
    node.signal(signal.SIGSTOP)
    try:
        for tokens in (known, new, known):
            ask(one, tokens)
    finally:
        node.signal(signal.SIGCONT)
    eventually_hits(one, known, reference(known), 1024)
    # A worker that saw the server hang stores nothing until its own circuit breaker closes.
    until(lambda: _stores(one, after, shelf, reference(after)), "a store")


# ------------------------------------------------------------------------------- engines that end


def test_engine_is_killed_while_it_uses_the_server(
    one: Engine, node: ServeProcess, shelf: ShelfFiles, prompt: MakePrompt
) -> None:
    """The last test with this engine. What it held is given back at once."""
    known = prompt(1500)
    shelf.fill(one, known)
    requests = [one.submit(tokens) for tokens in (known, prompt(900), prompt(900))]
    requests[0].wait_first_token()
    assert node.metrics()["clients"] > 0
    one.kill()
    until(lambda: node.metrics()["clients"] == 0, "the end of a session")
    until(lambda: node.metrics()["lent_bytes"] == 0, "no lease left")
    shelf.check_all()
