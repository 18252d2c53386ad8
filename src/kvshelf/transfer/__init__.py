"""Bytes between KV caches and a shelf: pipelines, and the memory that they pass through."""
