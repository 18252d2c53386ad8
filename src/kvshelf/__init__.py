"""kvshelf: a shared KV-cache store for vLLM.

Owns the package's version and its public names. Importing it costs nothing: each public
name is imported from its module on first use, so that reading a shelf or parsing a
configuration needs neither torch nor vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvshelf.config import Config
    from kvshelf.errors import KVShelfError
    from kvshelf.shelf import Shelf, open_shelf

__version__ = "0.1.0"

__all__ = ["Config", "KVShelfError", "Shelf", "__version__", "open_shelf"]

_HOME = {
    "Config": "kvshelf.config",
    "KVShelfError": "kvshelf.errors",
    "Shelf": "kvshelf.shelf",
    "open_shelf": "kvshelf.shelf",
}


def __getattr__(name: str) -> object:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
