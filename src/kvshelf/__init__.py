"""kvshelf: a shared KV-cache store for vLLM.

Owns the package's version and its public names. Importing it costs nothing: each public name is
imported from its module on first use, so that reading a shelf or parsing a configuration needs
neither torch nor vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvshelf.cache import ChunkCache as ChunkCache
    from kvshelf.cache import PromptIdentity as PromptIdentity
    from kvshelf.cache import StoreReport as StoreReport
    from kvshelf.config import Config as Config
    from kvshelf.errors import KVShelfError as KVShelfError
    from kvshelf.format.keys import Chunk as Chunk
    from kvshelf.format.keys import KeyChain as KeyChain
    from kvshelf.format.keys import MultimodalItem as MultimodalItem
    from kvshelf.format.keys import salt_group_of as salt_group_of
    from kvshelf.format.model import ModelFacts as ModelFacts
    from kvshelf.kv.layout import PagedLayout as PagedLayout
    from kvshelf.kv.layout import PermutedLayout as PermutedLayout
    from kvshelf.kv.sources import BlobKV as BlobKV
    from kvshelf.kv.sources import PagedKV as PagedKV
    from kvshelf.kv.sources import TupleKV as TupleKV
    from kvshelf.kv.sources import blob_of_tuples as blob_of_tuples
    from kvshelf.kv.sources import empty_blob as empty_blob
    from kvshelf.kv.sources import empty_tuples as empty_tuples
    from kvshelf.kv.sources import tuples_of_blob as tuples_of_blob
    from kvshelf.kv.state_tensors import empty_state as empty_state
    from kvshelf.memory.chunk_memory import ChunkMemory as ChunkMemory
    from kvshelf.server.client import open_cache as open_cache
    from kvshelf.shelf.shelf import Shelf as Shelf
    from kvshelf.shelf.shelf import open_shelf as open_shelf
    from kvshelf.tiers.disk_tier import DiskTier as DiskTier
    from kvshelf.weights.fingerprints import adapter_files as adapter_files
    from kvshelf.weights.fingerprints import lora_digest as lora_digest
    from kvshelf.weights.fingerprints import sampled_fingerprint as sampled_fingerprint
    from kvshelf.weights.fingerprints import weight_files as weight_files
    from kvshelf.weights.fingerprints import weights_fingerprint as weights_fingerprint

#: Wheels and the command line take it from here. Objects do not hold it.
__version__ = "0.2.0.dev0"

#: The public names of each module, by which a name is found on first use.
_NAMES = {
    "kvshelf.cache": "ChunkCache PromptIdentity StoreReport",
    "kvshelf.config": "Config",
    "kvshelf.errors": "KVShelfError",
    "kvshelf.format.keys": "Chunk KeyChain MultimodalItem salt_group_of",
    "kvshelf.format.model": "ModelFacts",
    "kvshelf.kv.layout": "PagedLayout PermutedLayout",
    "kvshelf.kv.sources": (
        "BlobKV PagedKV TupleKV blob_of_tuples empty_blob empty_tuples tuples_of_blob"
    ),
    "kvshelf.kv.state_tensors": "empty_state",
    "kvshelf.memory.chunk_memory": "ChunkMemory",
    "kvshelf.server.client": "open_cache",
    "kvshelf.shelf.shelf": "Shelf open_shelf",
    "kvshelf.tiers.disk_tier": "DiskTier",
    "kvshelf.weights.fingerprints": (
        "adapter_files lora_digest sampled_fingerprint weight_files weights_fingerprint"
    ),
}

__all__ = ["__version__", *(name for names in _NAMES.values() for name in names.split())]  # noqa: PLE0604

#: The modules whose ``__all__`` is the public API; nothing else is promised.
PUBLIC_MODULES = (
    "kvshelf",
    "kvshelf.adapters",
    "kvshelf.backends",
    "kvshelf.errors",
    "kvshelf.kv.ops",
    "kvshelf.testing.backends",
    "kvshelf.vllm.multiprocess",
)


def __getattr__(name: str) -> object:
    module = next((module for module, names in _NAMES.items() if name in names.split()), None)
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
