"""Texts of errors, which may quote anything."""

from __future__ import annotations

import errno

import pytest

from kvshelf import errors
from kvshelf.errors import StorageError, printable

FORGED = "\x1b]0;title\x07\x1b[2J\nINFO forged\u202e\ud800"


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, OSError)
    ],
)
def test_a_storage_error_is_one_printable_line(kind: type[StorageError]) -> None:
    for error in (kind(errno.EIO, FORGED, FORGED), kind(FORGED), kind(errno.EIO, "x" * 10**6)):
        assert str(error).isprintable()
        assert len(str(error)) <= 2000
    assert str(kind(errno.EIO, "plain – text", "place")) == "[Errno 5] plain – text: 'place'"


def test_printable_keeps_what_is_printable() -> None:
    assert printable("naïve – 漢字") == "naïve – 漢字"
    assert printable("a\nb\t\x1b") == "a\\nb\\t\\x1b"
    assert printable("a" * 10, 8) == "aaaaa..."
    assert len(printable("\x1b" * 100, 50)) == 50
