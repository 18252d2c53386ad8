"""The options of kvshelf in vLLM's configuration, as far as a process without vLLM reads them.

Owns the connector's names, and the check of options in the process that vLLM starts first, before a
worker exists. Imports neither vllm nor torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvshelf.config import Config
from kvshelf.errors import ConfigError

CONNECTOR_NAME = "KVShelfConnector"
#: The same connector, under the name of an example that earlier versions of vLLM ship.
EARLIER_NAME = "SharedStorageConnector"


def own_options(configuration: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the ``kv_connector_extra_config`` of each of our connectors in a configuration.

    Parameters
    ----------
    configuration : Mapping
        As ``--kv-transfer-config`` has it; its connector may be a MultiConnector.
    """
    extra = configuration.get("kv_connector_extra_config") or {}
    if configuration.get("kv_connector") in (CONNECTOR_NAME, EARLIER_NAME):
        yield extra
    elif configuration.get("kv_connector") == "MultiConnector":
        for child in extra.get("connectors", ()):
            yield from own_options(child)


def check_options(transfer: Any) -> None:
    """Refuse options with which no worker could start; end a program of vLLM in one line.

    Parameters
    ----------
    transfer : KVTransferConfig or Mapping or None

    Raises
    ------
    ConfigError
        If a connector of ours has such options, and the program is another one.
    SystemExit
        The same in vLLM's own programs, whose users have no use for a traceback.
    """
    try:
        given = transfer if isinstance(transfer, Mapping) else vars(transfer) if transfer else {}
        for extra in own_options(given):
            Config.load(extra)
    except ConfigError as error:
        module = getattr(sys.modules["__main__"], "__spec__", None)
        if Path(sys.argv[0]).name == "vllm" or (module and module.name.startswith("vllm.")):
            sys.exit(str(error))
        raise
