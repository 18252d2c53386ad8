"""Gather and scatter between paged KV caches and chunk buffers.

Owns the torch operators ``kvshelf::gather_kv`` and ``kvshelf::scatter_kv`` for strided caches,
the same for caches whose elements are permuted inside each (block, head), which torch's dispatcher
does not know, all their checks, and the choice of what carries them out: the kernel on GPUs, the
compiled library on CPUs, and plain torch wherever these are not there.

One call copies one chunk, of which it copies one or several shards of equally many heads. Each
shard has a *buffer*: uint8 and contiguous, for each layer [kv_planes, tokens, heads, row_bytes],
layers one after another, which is the payload of a shard's safetensors file. The buffers of a call
are one tensor: ``[bytes]`` or ``[shards, bytes]``. For permuted caches a call copies one shard.

Contracts
---------
* Everything is checked before anything is touched: after a ``ValueError`` neither
  caches nor buffers have changed, whatever implementation is in use.
* Slot −1 means "skip this token": its place in the buffer of a gather becomes zero, a
  scatter writes nothing for it.
* Slot mappings are CPU tensors and are checked with all else.
* A slot that occurs twice in a scatter gets the row of one of its tokens, which one
  (or which mixture of them) is not defined; nothing else is harmed.
* The caches, the slot mapping and the buffers must not share memory.
* On a GPU a call is enqueued on torch's current stream. The slot mapping is part of what is
  enqueued: it may change afterwards. The kernel waits for nothing and allocates nothing, so a CUDA
  graph can capture it. Plain torch allocates, may wait, and cannot be captured.
* Any thread may call. Shared are only the choice of implementation and a bounded record
  of which caches have passed the checks; neither keeps a cache alive. The compiled
  library releases the GIL while it copies.
* Importing this package loads no compiler, no CUDA and not the compiled library.
  :func:`implementation` and the first call on a CPU load the latter. :func:`prepare` begins to
  compile the kernel for a GPU.

The environment variable ``KVSHELF_OPS`` (``auto``, ``cpp``, ``cuda``, ``torch``) overrides the
choice.
"""

from __future__ import annotations

from kvshelf.kv.ops.checks import check_caches, check_slots
from kvshelf.kv.ops.dispatch import (
    Implementation,
    gather_kv,
    implementation,
    prepare,
    scatter_kv,
)
from kvshelf.kv.ops.kernel import kernel_problem

__all__ = [
    "Implementation",
    "check_caches",
    "check_slots",
    "gather_kv",
    "implementation",
    "kernel_problem",
    "prepare",
    "scatter_kv",
]
