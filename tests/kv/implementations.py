"""The implementations of gather and scatter that this machine has, each by its name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from kvshelf.kv import ops
from kvshelf.kv.ops import library
from tests.native.emulation import emulated

COMPILED = ops.implementation() == "cpp"
#: "kernels": those for GPUs, on a device made of loops. They know no permuted caches.
IMPLEMENTATIONS = ["cpp", "torch", "kernels"] if COMPILED else ["torch", "kernels"]


@contextlib.contextmanager
def using(implementation: str) -> Iterator[None]:
    """Let this implementation carry out all calls."""
    if implementation == "cpp":
        yield
    elif implementation == "kernels":
        with emulated():
            yield
    else:
        with mock.patch.object(library, "compiled_library", return_value=None):
            yield
