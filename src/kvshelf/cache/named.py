"""Objects of this process by name, each made once for a configuration and a model.

Any thread may call everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Generic, TypeVar

from kvshelf.config import Config
from kvshelf.errors import ConfigError
from kvshelf.format.model import ModelFacts

T = TypeVar("T")


class Named(Generic[T]):
    """The caches that were made by name."""

    def __init__(self) -> None:
        #: Of those who make one: a storage that hangs keeps nobody from the caches that are there.
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Config, ModelFacts, T]] = {}

    def get_or_create(
        self, name: str, config: Config, model: ModelFacts, make: Callable[[Config, ModelFacts], T]
    ) -> T:
        """Return the cache of this name; make it if there is none.

        Raises
        ------
        ConfigError
            If it exists with another configuration or other facts.
        """
        entry = self._known.get(name)
        if entry is None:
            with self._lock:
                entry = self._known.get(name)
                if entry is None:
                    entry = self._known[name] = config, model, make(config, model)
        known_config, known_model, cache = entry
        # Values may be secret.
        different = [
            field
            for entry, asked, names in (
                (known_config, config, Config.model_fields),
                (known_model, model, [field.name for field in fields(model)]),
            )
            for field in names
            if getattr(entry, field) != getattr(asked, field)
        ]
        if different:
            raise ConfigError(
                f"the cache {name!r} exists already, with another {', '.join(different)}:"
                " use another instance_id, or destroy it first"
            )
        return cache

    def get(self, name: str) -> T | None:
        """Return the cache of this name, None if there is none, or it is only being made."""
        entry = self._known.get(name)
        return None if entry is None else entry[2]

    def pop(self, name: str) -> T | None:
        """Forget the cache of this name, and return it; not one that is only being made."""
        entry = self._known.pop(name, None)
        return None if entry is None else entry[2]
