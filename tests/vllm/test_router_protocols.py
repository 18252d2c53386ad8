"""Hand-overs as routers make them: each one's params between two engines of vLLM's scheduler.

Dynamo's own file runs where its package is installed, which no other test needs.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.sim.engine import EngineModel, Start
from tests.support.prompts import prompt
from tests.support.routers import ROUTERS, WITHOUT_PARAMS, Params
from tests.vllm.test_bare_handovers import STEPS, take_all
from tests.vllm.test_handover_scheduler import counts, waits

PATCH = Path(__file__).parents[2] / "examples/disaggregated/dynamo.patch"
LENGTH, CHUNKS = 203, 192


def prefilled(engine: EngineModel, tokens: list[int], params: Params) -> Params:
    """Send the first leg; return the params that it answers, as JSON has them."""
    engine.add("prefill", tokens, answer=1, transfer=params)
    engine.finish()
    engine.drain()
    answered: Params = json.loads(json.dumps(engine.params.get("prefill")))
    return answered


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_second_engine_loads_what_the_first_one_stores(start: Start, name: str, late: bool) -> None:
    """The producer may answer before its last stores are on the shelf."""
    (prefill, decode), tokens = ROUTERS[name], prompt(LENGTH)
    producer, consumer = start(role="kv_producer"), start(role="kv_consumer")
    answered = prefilled(producer, tokens, prefill)
    kept = take_all(producer, tokens) if late else {}
    began = time.monotonic()
    consumer.add("r", tokens, transfer=decode(answered))
    for objects in kept.values():
        consumer.wait_for_lookup("r")
        consumer.step()
        assert waits(consumer, "r")
        time.sleep(0.1)
        consumer.put(objects)
    consumer.finish()
    assert time.monotonic() - began < 0.1 * len(kept) + STEPS
    assert consumer.loaded("r") == (CHUNKS if name in WITHOUT_PARAMS else LENGTH)
    # Without params, a request of which nothing was missing is like any other.
    assert counts(consumer) == ({} if name in WITHOUT_PARAMS and not late else {"complete": 1})


@pytest.mark.parametrize("name", [name for name in ROUTERS if name not in WITHOUT_PARAMS])
def test_where_nothing_is_promised_routers_say_so_and_no_request_waits(
    start: Start, name: str
) -> None:
    (prefill, decode), tokens = ROUTERS[name], prompt(32)
    answered = prefilled(start("Gemma 3", role="kv_producer"), tokens, prefill)
    consumer = start("Gemma 3", role="kv_consumer")
    began = time.monotonic()
    consumer.add("r", tokens, transfer=decode(answered))
    consumer.finish()
    assert time.monotonic() - began < STEPS


# ------------------------------------------------------------------------ Dynamo's own file


@pytest.fixture
def dynamo(tmp_path: Path) -> Path:
    """A copy of the file in which Dynamo looks up the protocol of a connector."""
    try:
        installed = distribution("ai-dynamo")
    except PackageNotFoundError:
        pytest.skip("ai-dynamo is not installed: pip install --no-deps ai-dynamo")
    copy = tmp_path / "dynamo/vllm/kv_connector_protocols.py"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(Path(str(installed.locate_file(copy.relative_to(tmp_path)))).read_bytes())
    return copy


def protocol_of(path: Path, name: str, connectors: list[str] | None = None) -> Any:
    """The protocol that Dynamo chooses for a connector."""
    spec = importlib.util.spec_from_file_location("protocols", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    extra = {"connectors": [{"kv_connector": one} for one in connectors or ()]}
    transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)
    return module.make_kv_connector_protocol(SimpleNamespace(kv_transfer_config=transfer))


@pytest.mark.real
def test_dynamo_refuses_the_connectors_name_until_its_registry_has_it(dynamo: Path) -> None:
    with pytest.raises(ValueError, match="Unsupported kv_connector='KVShelfConnector'"):
        protocol_of(dynamo, "KVShelfConnector")
    subprocess.run(["git", "apply", PATCH], cwd=dynamo.parents[2], check=True)
    protocol = protocol_of(dynamo, "KVShelfConnector")
    prefill, decode = ROUTERS["Dynamo, NixlConnectorProtocol"]
    assert protocol.prefill_request_kv_transfer_params() == prefill
    params = {"kvshelf_version": 1, "kvshelf_tokens": 7}
    answered = SimpleNamespace(kv_transfer_params=params)
    assert protocol.decode_request_kv_transfer_params(answered) == decode(params)
    beside = protocol_of(dynamo, "MultiConnector", ["KVShelfConnector", "LMCacheMPConnector"])
    assert type(beside).__name__ == "NixlConnectorProtocol"


@pytest.mark.real
def test_dynamo_with_a_connector_that_it_knows_beside_sends_nothing(dynamo: Path) -> None:
    protocol = protocol_of(dynamo, "MultiConnector", ["KVShelfConnector", "LMCacheMPConnector"])
    prefill, decode = ROUTERS["Dynamo, MultiConnector with LMCacheMPConnector"]
    assert protocol.prefill_request_kv_transfer_params() == prefill
    assert protocol.decode_request_kv_transfer_params(None) == decode(None)


def test_patch_adds_one_line() -> None:
    added = re.findall(r"^\+ .*", PATCH.read_text(), re.M)
    assert added == ['+    "KVShelfConnector": NixlConnectorProtocol,']
