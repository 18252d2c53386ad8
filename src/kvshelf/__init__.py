"""kvshelf: a shared KV-cache store for vLLM.

Owns the package's version and its public names. Importing it costs nothing: each public
name is imported from its module on first use, so that reading a shelf or parsing a
configuration needs neither torch nor vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvshelf.cache import ChunkCache, PromptIdentity, StoreReport
    from kvshelf.config import Config
    from kvshelf.errors import KVShelfError
    from kvshelf.format.model import ModelFacts
    from kvshelf.kv.layout import PagedLayout
    from kvshelf.kv.sources import BlobKV, PagedKV, TupleKV
    from kvshelf.shelf.shelf import Shelf, open_shelf

#: Wheels and the command line take it from here. Objects do not hold it.
__version__ = "0.2.0.dev0"

__all__ = [
    "BlobKV",
    "ChunkCache",
    "Config",
    "KVShelfError",
    "ModelFacts",
    "PagedKV",
    "PagedLayout",
    "PromptIdentity",
    "Shelf",
    "StoreReport",
    "TupleKV",
    "__version__",
    "open_shelf",
]

#: The modules whose ``__all__`` is the public API; nothing else is promised.
PUBLIC_MODULES = (
    "kvshelf",
    "kvshelf.backends",
    "kvshelf.errors",
    "kvshelf.format.keys",
    "kvshelf.forms",
    "kvshelf.kv.caches",
    "kvshelf.kv.layout",
    "kvshelf.memory.chunk_memory",
    "kvshelf.ops",
    "kvshelf.server.client",
    "kvshelf.testing.backends",
    "kvshelf.tiers.disk_tier",
    "kvshelf.vllm.multiprocess",
    "kvshelf.weights.fingerprints",
)

_HOME = {
    "BlobKV": "kvshelf.kv.sources",
    "ChunkCache": "kvshelf.cache",
    "Config": "kvshelf.config",
    "KVShelfError": "kvshelf.errors",
    "ModelFacts": "kvshelf.format.model",
    "PagedKV": "kvshelf.kv.sources",
    "PagedLayout": "kvshelf.kv.layout",
    "PromptIdentity": "kvshelf.cache",
    "Shelf": "kvshelf.shelf.shelf",
    "StoreReport": "kvshelf.cache",
    "TupleKV": "kvshelf.kv.sources",
    "open_shelf": "kvshelf.shelf.shelf",
}


def __getattr__(name: str) -> object:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        text = f"kvshelf.{name} needs torch, which is not installed: pip install torch"
        raise ModuleNotFoundError(text, name="torch") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
