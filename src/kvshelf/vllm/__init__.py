"""kvshelf's vLLM connector: the only package of kvshelf that imports vllm.

Owns the check of vLLM's version, and the plugin, which registers ``KVShelfConnector`` with vLLM,
also as ``SharedStorageConnector``, its name of earlier versions. The plugin marks the ids of
multimodal items (:mod:`kvshelf.vllm.item_ids`) and records when configurations were made
(:mod:`kvshelf.vllm.published`). Importing this package does not import vllm, nor torch.
"""

from __future__ import annotations

import logging

from kvshelf.errors import UnsupportedError
from kvshelf.vllm.options import CONNECTOR_NAME, EARLIER_NAME

logger = logging.getLogger(__name__)

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
        installed_version = (int(parts[0]), int(parts[1]))
    except (IndexError, ValueError):
        # As "unknown".
        installed_version = (0, 0)
    low, high = SUPPORTED_VLLM
    unnumbered = installed_version == (0, 0) or version.startswith("0.1.dev")
    if unnumbered or ("dev" in version and low <= installed_version < high):
        logger.warning(
            "vLLM %s is a build from source: kvshelf is tested with releases >=%d.%d,<%d.%d",
            version,
            *low,
            *high,
        )
        return
    if not low <= installed_version < high:
        raise UnsupportedError(
            f"vLLM {version} found; this kvshelf works with vLLM"
            f" >={low[0]}.{low[1]},<{high[0]}.{high[1]}:"
            f" pip install 'vllm>={low[0]}.{low[1]},<{high[0]}.{high[1]}'"
            " or a kvshelf release made for yours"
        )
