"""kvshelf's vLLM connector: the only package of kvshelf that imports vllm.

Owns the entry point that registers ``SharedStorageConnector`` with vLLM, and the check of
vLLM's version. Importing this package does not import vllm.
"""

from __future__ import annotations

from kvshelf.errors import UnsupportedError

CONNECTOR_NAME = "SharedStorageConnector"
SUPPORTED_VLLM = ((0, 32), (0, 34))


def register() -> None:
    """Register the connector with vLLM; a ``vllm.general_plugins`` entry point.

    vLLM calls this in each of its processes, perhaps more than once.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            CONNECTOR_NAME, "kvshelf.vllm.connector", CONNECTOR_NAME
        )


def check_vllm_version(version: str) -> None:
    """Raise unless kvshelf works with this version of vLLM.

    Raises
    ------
    UnsupportedError
        If `version` is outside ``>=0.32,<0.34``.
    """
    parts = version.split("+", maxsplit=1)[0].split(".")
    try:
        found = (int(parts[0]), int(parts[1]))
    except (IndexError, ValueError):
        # Builds from source name no release.
        return
    if found == (0, 0) or "dev" in version:
        return
    low, high = SUPPORTED_VLLM
    if not low <= found < high:
        raise UnsupportedError(
            f"vLLM {version} found; this kvshelf works with vLLM"
            f" >={low[0]}.{low[1]},<{high[0]}.{high[1]}:"
            f" pip install 'vllm>={low[0]}.{low[1]},<{high[0]}.{high[1]}'"
            " or a kvshelf release made for yours"
        )
