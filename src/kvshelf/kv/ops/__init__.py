"""Gather and scatter between paged KV caches and chunk buffers.

Owns the torch.library operators ``kvshelf::gather_kv`` and ``kvshelf::scatter_kv`` for
strided caches, the same for caches whose elements are permuted inside each (block, head), which
torch's dispatcher does not know, all their checks, and the choice of what carries them out: CUDA
kernels for strided caches on GPUs and the compiled CPU twin for caches in host memory where they
are installed, else Triton on GPUs, else plain torch.

One call copies one or several chunks of equally many tokens, and of each chunk one or
several shards of equally many heads. Each (chunk, shard) has a *buffer*: uint8 and
contiguous, for each layer [kv_planes, tokens, heads, row_bytes], layers one after another,
which is the payload of a shard's safetensors file. The buffers of a call are one tensor:
``[bytes]``, ``[chunks, bytes]`` or ``[chunks, shards, bytes]``. For permuted caches a call
copies one chunk into one buffer.

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
* On a GPU a call is enqueued on torch's current stream, waits for nothing, allocates
  nothing there, and can be captured in a CUDA graph (:func:`prepare` first, outside the
  capture). A slot mapping on the CPU is part of what is enqueued: it may change
  afterwards, and a captured graph keeps it. Triton and plain torch on a GPU allocate, plain
  torch may wait as well, and neither can be captured.
* Any thread may call. Shared are only the choice of implementation and a bounded record
  of which caches have passed the checks; neither keeps a cache alive. The compiled
  implementations release the GIL while they copy.
* Importing this package loads no compiler, no CUDA and not the compiled library;
  :func:`implementation`, :func:`prepare` or the first call loads the latter, and lets Triton
  compile where it serves.

The environment variable ``KVSHELF_OPS`` (``auto``, ``cpp``, ``cuda``, ``triton``, ``torch``)
overrides the choice; it is read once.
"""

from __future__ import annotations

from kvshelf.kv.ops.checks import blocks_in_one_piece, check_caches, check_slots
from kvshelf.kv.ops.choice import Implementation, check_served, implementation
from kvshelf.kv.ops.dispatch import gather_kv, prepare, scatter_kv
from kvshelf.kv.ops.library import KernelBuild, kernel_build, kernel_problem

__all__ = [
    "Implementation",
    "KernelBuild",
    "blocks_in_one_piece",
    "check_caches",
    "check_served",
    "check_slots",
    "gather_kv",
    "implementation",
    "kernel_build",
    "kernel_problem",
    "prepare",
    "scatter_kv",
]
