"""The connector for real engines of tests: it sets the constants that a test has replaced."""

from __future__ import annotations

from kvshelf.vllm.connector import KVShelfConnector, SharedStorageConnector
from tests.support.constants import put_from_environment

__all__ = ["KVShelfConnector", "SharedStorageConnector"]

put_from_environment()
