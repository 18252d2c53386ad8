"""kvshelf's vLLM connector: the only package of kvshelf that imports vllm.

Owns the check of vLLM's version, and the plugin, which registers ``KVShelfConnector`` with vLLM,
also as ``SharedStorageConnector``, its name of earlier versions. The plugin marks the ids of
multimodal items (:mod:`kvshelf.vllm.item_ids`) and records when configurations were made
(:mod:`kvshelf.vllm.published`). Importing this package does not import vllm, nor torch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvshelf.config import Config
from kvshelf.errors import ConfigError, UnsupportedError

logger = logging.getLogger(__name__)

CONNECTOR_NAME = "KVShelfConnector"
#: The same connector, under the name of an example that earlier versions of vLLM ship.
EARLIER_NAME = "SharedStorageConnector"
SUPPORTED_VLLM = ((0, 32), (0, 34))


def register() -> None:
    """Prepare a process of vLLM; a ``vllm.general_plugins`` entry point.

    vLLM calls this in each of its processes, perhaps more than once. A connector that another
    plugin has registered under one of the names keeps it.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in (CONNECTOR_NAME, EARLIER_NAME):
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "kvshelf.vllm.connector", name)
    from kvshelf.vllm.published import note_begins

    note_begins()
    try:
        # Modules of this package are used by processes that have neither vLLM nor torch.
        from kvshelf.vllm.item_ids import mark_ids

        mark_ids()
    except (ImportError, AttributeError) as error:
        logger.warning("ids of images, audio and video are not marked: %r", error)


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


def check_vllm_version(version: str) -> None:
    """Raise unless kvshelf works with this version of vLLM.

    A build from source between two releases may differ from both: it is let through with a warning
    if its number is in the range, or if it has none, as one of a clone without tags.

    Raises
    ------
    UnsupportedError
        If `version` is outside ``>=0.32,<0.34``.
    """
    parts = version.split("+", maxsplit=1)[0].split(".")
    try:
        found = (int(parts[0]), int(parts[1]))
    except (IndexError, ValueError):
        # As "unknown".
        found = (0, 0)
    low, high = SUPPORTED_VLLM
    unnumbered = found == (0, 0) or version.startswith("0.1.dev")
    if unnumbered or ("dev" in version and low <= found < high):
        logger.warning(
            "vLLM %s is a build from source: kvshelf is tested with releases >=%d.%d,<%d.%d",
            version,
            *low,
            *high,
        )
        return
    if not low <= found < high:
        raise UnsupportedError(
            f"vLLM {version} found; this kvshelf works with vLLM"
            f" >={low[0]}.{low[1]},<{high[0]}.{high[1]}:"
            f" pip install 'vllm>={low[0]}.{low[1]},<{high[0]}.{high[1]}'"
            " or a kvshelf release made for yours"
        )
