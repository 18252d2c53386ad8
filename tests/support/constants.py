"""Constants of the product that tests replace, by the names under which tests give them.

Rigs and engines take them among the options of kvshelf. They hold for the whole process: until
:func:`reset`, which the tests of ``tests/vllm`` call after each. A real engine gets them in the
variable ``TEST_CONSTANTS``, and sets them when it imports :mod:`tests.support.connector`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, Final

from kvshelf.backends.guard import GuardedBackend
from tests.support.waiting import PATIENCE

VARIABLE: Final = "TEST_CONSTANTS"
#: A busy machine holds threads and files up for seconds: what tests expect is not given up. Reads
#: keep their deadline, for which a test waits.
PATIENT: Final[Mapping[str, Any]] = {
    "lookup_seconds": PATIENCE,
    "identity_seconds": PATIENCE,
    "deadlines": {"probe": PATIENCE, "write": PATIENCE},
}
_MEMORY = "kvshelf.vllm.worker.memory"
_create_guard = GuardedBackend.__init__


def _guarded(deadlines: Mapping[str, float]) -> Callable[..., None]:
    def create(guard: GuardedBackend, *arguments: Any, **options: Any) -> None:
        _create_guard(guard, *arguments, **options)
        guard.deadlines = replace(guard.deadlines, **deadlines)

    return create


def _places(value: Any) -> dict[str, list[tuple[str, str, Any]]]:
    """Return by names the modules or classes, their attributes and what these become."""
    return {
        "lookup_seconds": [("kvshelf.vllm.scheduler.lookups", "LOOKUP_SECONDS", value)],
        "identity_seconds": [("kvshelf.vllm.handshake", "IDENTITY_SECONDS", value)],
        "interval": [("kvshelf.vllm.scheduler.hits", "INTERVAL", value)],
        "drain_seconds": [("kvshelf.vllm.worker.side", "DRAIN_SECONDS", value)],
        # So many bytes, whatever a step needs; at least what the threads and two chunks need.
        "memory_bytes": [
            (_MEMORY, "DEFAULT_MEMORY", value),
            (_MEMORY, "_MEMORY_SHARE", 1 << 60),
        ],
        "io_threads": [
            (_MEMORY, "default_io_threads", lambda _: (value, max(1, value // 2))),
        ],
        "least_free": [("kvshelf.capacity.budget", "least_free", lambda _: value)],
        "deadlines": [("kvshelf.backends.guard:GuardedBackend", "__init__", _guarded(value))],
    }


_NAMES: Final = _places(None).keys()
_before: dict[tuple[str, str], Any] = {}


def put(**values: Any) -> None:
    """Replace constants, until :func:`reset`."""
    for name, value in values.items():
        for place, attribute, new in _places(value)[name]:
            found = resolve_name(place)
            _before.setdefault((place, attribute), getattr(found, attribute))
            setattr(found, attribute, new)


def reset() -> None:
    """Give all constants their own values again."""
    for (place, attribute), value in _before.items():
        setattr(resolve_name(place), attribute, value)
    _before.clear()


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is an option among `options`, and what is a constant."""
    ours = {name: value for name, value in options.items() if name in _NAMES}
    return {name: value for name, value in options.items() if name not in ours}, ours


def taken(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the constants among `options`; return the options. Memory gets its unit."""
    rest, ours = split(options)
    put(**ours)
    if isinstance(rest.get("memory"), int):
        rest["memory"] = f"{rest['memory']}B"
    return rest


def put_from_environment() -> None:
    """Replace the constants that the environment names."""
    put(**json.loads(os.environ.get(VARIABLE, "{}")))
