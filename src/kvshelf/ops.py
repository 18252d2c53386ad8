"""Gather and scatter between paged KV caches and buffers: the public face of :mod:`kvshelf.kv.ops`.

Importing it registers the operators of ``torch.ops.kvshelf``.
"""

from __future__ import annotations

from kvshelf.kv.ops import (
    Implementation,
    check_slots,
    gather_kv,
    implementation,
    kernel_problem,
    prepare,
    scatter_kv,
)

__all__ = [
    "Implementation",
    "check_slots",
    "gather_kv",
    "implementation",
    "kernel_problem",
    "prepare",
    "scatter_kv",
]
