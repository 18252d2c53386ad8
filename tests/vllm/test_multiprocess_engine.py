"""vLLM's own connector for a cache server, in real engines, over kvshelf's adapters and server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.serve_process import ServeProcess
from tests.support.engines import Ask, Engine, MakePrompt, Reference, assert_same
from tests.support.waiting import until

CHUNK, BLOCK = 256, 128

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("node")
    (folder / "shelf").mkdir()
    with ServeProcess(folder / "shelf", folder / "sockets" / "node.sock") as node:
        yield node


@pytest.fixture(scope="module")
def start(
    tiny_model: Path, node: ServeProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Engine]]:
    started: list[Engine] = []

    def engine() -> Engine:
        started.append(
            Engine(
                tiny_model,
                tmp_path_factory.mktemp("engine") / "log",
                connector=("MPConnector", "tests.vllm.mp_connector"),
                extra_config={"lmcache.mp.host": node.url, "lmcache.mp.port": 0},
                transfer={"kv_load_failure_policy": "recompute"},
                core=len(started) % (os.cpu_count() or 1),
            )
        )
        return started[-1]

    yield engine
    for one in started:
        one.stop(at_once=True)


def stored(node: ServeProcess) -> int:
    return int(node.metrics()["stored_objects"])


def test_engines_with_vllms_connector_share_a_server(
    start: Callable[[], Engine],
    node: ServeProcess,
    reference: Reference,
    ask: Ask,
    prompt: MakePrompt,
) -> None:
    one = start()
    tokens = prompt(3 * CHUNK + 50)
    cold = one.generate(tokens)
    assert cold.cached_tokens == 0
    assert_same(cold, reference(tokens))
    until(lambda: stored(node) >= 3)
    one.stop(at_once=True)
    # Nothing but the server and the shelf outlives the first engine.
    other = start()
    for length, hit in ((len(tokens), 3 * CHUNK), (2 * CHUNK + 1, 2 * CHUNK), (CHUNK - 1, 0)):
        part = tokens[:length]
        other.reset_prefix_cache()
        warm = other.generate(part)
        assert warm.cached_tokens == warm.shelf_tokens == hit
        assert_same(warm, reference(part))
    node.kill()
    gone = prompt(2 * CHUNK)
    ask(other, gone)
    node.start()
    again = prompt(2 * CHUNK)
    ask(other, again)
