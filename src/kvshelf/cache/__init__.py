"""``ChunkCache``: the KV of prompts on a shelf, for any program.

==============  ====================================================================================
module          holds
==============  ====================================================================================
`chunk_cache`   :class:`ChunkCache`, the interface by tokens
`named`         this process's caches, by name
`operations`    lookups, stores, retrieves and prefetches, and their handles
`parts`         what a cache has for each kind of KV: places in memory, lookups, transfer
`prompts`       the arguments of calls: tokens, masks, forms of KV
==============  ====================================================================================
"""

from kvshelf.cache.chunk_cache import ChunkCache
from kvshelf.cache.operations import Handle, StoreReport
from kvshelf.cache.prompts import ChunkKey, PromptIdentity

__all__ = ["ChunkCache", "ChunkKey", "Handle", "PromptIdentity", "StoreReport"]
