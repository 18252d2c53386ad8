"""What wrappers pass on; counting and faults on order."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvshelf.backends import (
    Checked,
    ObjectInfo,
    Properties,
    Reader,
    Space,
    Touched,
    Whole,
    WriteResult,
)
from kvshelf.backends.wrappers import ReadOnlyBackend, WrappedBackend


class Opened(Reader):
    size = 1

    def read_into(self, buffer: memoryview, offset: int) -> int:
        return 1

    def close(self) -> None:
        """Nothing is open."""


WHOLE = Whole("a", b"", b"", b"", array("q", (0, 1)))
#: Arguments of each method of a backend, and an answer.
CALLS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "stat": ((["a"],), [1]),
    "info": (("a",), ObjectInfo("a", 1, 0.0)),
    "open": (("a", 1), Opened()),
    "read_whole": (("", b"", [WHOLE], [memoryview(bytearray(1))], 1.0), Checked([True], 0, 0)),
    "write": (("a", [b"1"], "replace"), WriteResult.REPLACED),
    "list": (("a",), [ObjectInfo("a/b", 1, 0.0)]),
    "folders": (("a",), ["b"]),
    "delete": ((["a", "b"],), [True, False]),
    "set_aside": (("a",), True),
    "touch": (("a",), Touched.REFUSED),
    "space": ((), Space(1, 2)),
    "close": ((), None),
}
#: Further ones, by name.
OPTIONS = {"list": {"hidden": True, "between": ("0", "f")}}
PROPERTIES = Properties("noting")


class Noting(WrappedBackend):
    """Notes calls that reach it, and answers them."""

    url = "noting://"
    properties = PROPERTIES
    reads_whole = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, Sequence[Any]]] = []


def _answering(name: str) -> Callable[..., Any]:
    def answer(self: Noting, *args: Any, **options: Any) -> Any:
        self.calls.append((name, (*args, *options.values())))
        return CALLS[name][1]

    return answer


for name in CALLS:
    setattr(Noting, name, _answering(name))


def test_a_read_only_backend_passes_on_what_changes_nothing() -> None:
    changing = {"write", "delete", "set_aside", "touch"}
    for name, (args, _) in CALLS.items():
        noting, options = Noting(), OPTIONS.get(name, {})
        if name in ("write", "set_aside"):
            with pytest.raises(PermissionError, match="read-only"):
                getattr(ReadOnlyBackend(noting), name)(*args)
        else:
            getattr(ReadOnlyBackend(noting), name)(*args, **options)
        passed_on = [(name, (*args, *options.values()))]
        assert noting.calls == ([] if name in changing else passed_on)
