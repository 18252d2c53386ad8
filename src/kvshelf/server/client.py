"""Opens caches whose shelf is that of a node server, for programs."""

from __future__ import annotations

from kvshelf.cache import ChunkCache
from kvshelf.config import Config
from kvshelf.errors import ConfigError
from kvshelf.format.model import ModelFacts
from kvshelf.server.connection import NodeClient
from kvshelf.server.view import open_served


def open_cache(config: Config, model: ModelFacts, *, timeout_s: float = 30.0) -> ChunkCache:
    """Open a cache whose shelf is that of the node server which ``config.server`` names.

    Blocks for some seconds while the server does not answer, and while weight files are
    fingerprinted.

    Parameters
    ----------
    config : Config
        Its option `server` names the server.
    model, timeout_s
        As for :meth:`kvshelf.cache.ChunkCache.open`.

    Raises
    ------
    ConfigError
        If no server is configured, or the configuration or the facts cannot be used.
    StorageError
        If the server does not answer.
    """
    if config.server is None:
        raise ConfigError(
            "no node server is configured: set server to the address that `kvshelf serve` shows, or"
            " use ChunkCache.open for a shelf without one"
        )
    client = NodeClient(config.server)
    try:
        return ChunkCache.open(
            config,
            model,
            timeout_s=timeout_s,
            open_served=lambda counters: open_served(
                client, read_only=config.read_only, counters=counters
            ),
        )
    except BaseException:
        client.close()
        raise
