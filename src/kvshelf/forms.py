"""The forms in which KV is handed over: the public face of :mod:`kvshelf.kv.sources`."""

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

__all__ = [
    "BlobKV",
    "PagedKV",
    "TupleKV",
    "blob_of_tuples",
    "empty_blob",
    "empty_tuples",
    "tuples_of_blob",
]
