"""vLLM's own router before engines without a model: what it makes of kvshelf's params.

It is the real one, in a process of its own. What engines answer and get is made and read by the
product.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvshelf.vllm.handover import (
    Handover,
    asks_for_handover,
    no_handover,
    read_bare,
    read_handover,
)
from tests.support.vllm_router import routing
from tests.test_example_proxy import (
    EVENTS,
    WAIT,
    WHOLE,
    Behaviour,
    Engine,
    Rig,
    bodies,
    decodes,
    says,
    serving,
)

pytestmark = pytest.mark.real

HANDOVER = Handover(b"n" * 32, 300, b"k" * 32, 44, "0f" * 16)
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "p"}]},
}


def promises(params: dict[str, Any] | None) -> Behaviour:
    """An engine that prefills answers this."""
    answered = {"id": "1", "choices": [{}], "kv_transfer_params": params}
    return says(json.dumps(answered).encode())


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    engines = [Engine(decodes) for _ in range(4)]
    log = tmp_path_factory.mktemp("router") / "log"
    with (
        httpx.Client(timeout=WAIT, trust_env=False) as client,
        serving(*engines) as urls,
        routing(urls[:2], urls[2:], log) as url,
    ):
        yield Rig(engines[:2], engines[2:], None, url, client)  # type: ignore[arg-type]


@pytest.fixture
def rig(router: Rig) -> Rig:
    for engine in router.prefill + router.decode:
        engine.asked.clear()
    for engine in router.prefill:
        engine.behaviour = promises(HANDOVER.params())
    return router


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
def test_handover_passes_it_untouched(rig: Rig, path: str, stream: bool) -> None:
    found = rig.post(path, stream=stream, **REQUESTS[path])
    assert found.content == (b"".join(EVENTS) if stream else WHOLE)
    [first], [second] = bodies(rig.prefill), bodies(rig.decode)
    assert asks_for_handover(first["kv_transfer_params"])
    assert (first["max_tokens"], first["min_tokens"], first["stream"]) == (1, 1, False)
    assert read_handover(second["kv_transfer_params"]) == HANDOVER


@pytest.mark.parametrize("params", [no_handover(), None])
def test_where_nothing_is_promised_the_second_engine_learns_it(
    rig: Rig, params: dict[str, Any] | None
) -> None:
    """A producer of another kind answers nothing: only a consumer waits then, and for chunks."""
    for engine in rig.prefill:
        engine.behaviour = promises(params)
    assert rig.post().content == WHOLE
    [second] = bodies(rig.decode)
    answered = second["kv_transfer_params"]
    assert answered == params and read_handover(answered) is None
    assert (read_bare(answered, expected=True) is None) == (params is not None)
    assert read_bare(answered, expected=False) is None


@pytest.mark.parametrize("status", [500, 503])
def test_first_leg_that_fails_is_the_clients_error(rig: Rig, status: int) -> None:
    """The router sends neither leg again: clients do."""
    for engine in rig.prefill:
        engine.behaviour = says(b"{}", status)
    assert rig.post().status_code == 500
    assert len(bodies(rig.prefill)) == 1 and not bodies(rig.decode)
