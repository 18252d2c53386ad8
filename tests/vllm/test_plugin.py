"""The plugin that vLLM loads in each of its processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs

from kvshelf.errors import ConfigError
from kvshelf.vllm import register
from kvshelf.vllm.options import CONNECTOR_NAME, EARLIER_NAME

MODULE = "kvshelf.vllm.connector"


class SharedStorageConnector:
    """One of the same name that another plugin has."""

    def __init__(self, config: Any, role: Any, kv_cache_config: Any) -> None: ...


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Any]]:
    """vLLM's connectors by name, without those that kvshelf has registered."""
    found: dict[str, Callable[[], Any]] = dict(KVConnectorFactory._registry)
    for name in (CONNECTOR_NAME, EARLIER_NAME):
        found.pop(name, None)
    monkeypatch.setattr(KVConnectorFactory, "_registry", found)
    return found


def connector_of(name: str, **settings: Any) -> Any:
    config = KVTransferConfig(kv_connector=name, kv_role="kv_both", **settings)
    return KVConnectorFactory.get_connector_class(config)


def test_connector_of_another_plugin_keeps_its_name(
    loaders: dict[str, Callable[[], Any]],
) -> None:
    loaders[EARLIER_NAME] = lambda: SharedStorageConnector
    register()
    register()
    assert connector_of(EARLIER_NAME) is SharedStorageConnector
    assert connector_of(CONNECTOR_NAME).__module__ == MODULE
    assert connector_of(EARLIER_NAME, kv_connector_module_path=MODULE).__module__ == MODULE


MISSPELT = {"shared_storge_path": "/mnt/kv"}
CHILD = {"kv_connector": CONNECTOR_NAME, "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        (CONNECTOR_NAME, MISSPELT),
        (EARLIER_NAME, MISSPELT),
        ("MultiConnector", {"connectors": [CHILD | {"kv_connector_extra_config": MISSPELT}]}),
    ],
)
@pytest.mark.parametrize("program", ["vllm", "mine.py"])
def test_option_that_is_unknown_ends_the_first_process(
    monkeypatch: pytest.MonkeyPatch, program: str, name: str, extra: dict[str, Any]
) -> None:
    """Before vLLM makes its configuration, and workers; in one line in a program of its own."""
    register()
    monkeypatch.setattr("sys.argv", [f"/bin/{program}"])
    transfer = KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra
    )
    arguments = EngineArgs(model="/nowhere", kv_transfer_config=transfer)
    with pytest.raises(SystemExit if program == "vllm" else ConfigError) as error:
        arguments.create_engine_config()
    assert "did you mean shared_storage_path?" in str(error.value)
    assert "\n" not in str(error.value)
