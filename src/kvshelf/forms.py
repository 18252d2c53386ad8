"""The forms in which KV and states are handed over.

The public names of :mod:`kvshelf.kv.sources` and :mod:`kvshelf.kv.state_tensors`.
"""

from __future__ import annotations

from kvshelf.kv.sources import (
    BlobKV,
    PagedKV,
    TupleKV,
    blob_of_tuples,
    empty_blob,
    empty_tuples,
    tuples_of_blob,
)
from kvshelf.kv.state_tensors import empty_state

__all__ = [
    "BlobKV",
    "PagedKV",
    "TupleKV",
    "blob_of_tuples",
    "empty_blob",
    "empty_state",
    "empty_tuples",
    "tuples_of_blob",
]
