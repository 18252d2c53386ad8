"""A connector for real engines that name their namespaces as earlier releases did."""

from __future__ import annotations

from typing import Any

from kvshelf.vllm import namespace
from kvshelf.vllm.published import Published
from tests.support.connector import SharedStorageConnector


class ConnectorWithoutConfiguration(SharedStorageConnector):
    """The connector of an engine whose record holds nothing of the published configuration."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        namespace.read_published = lambda *_: Published()
        super().__init__(*arguments, **named)
