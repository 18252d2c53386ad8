"""Texts of errors, which may quote anything."""

from __future__ import annotations

from kvshelf.errors import printable

FORGED = "\x1b]0;title\x07\x1b[2J\nINFO forged\u202e\ud800"


def test_printable_keeps_what_is_printable() -> None:
    assert printable("naïve – 漢字") == "naïve – 漢字"
    assert printable("a\nb\t\x1b") == "a\\nb\\t\\x1b"
    assert printable("a" * 10, 8) == "aaaaa..."
    assert len(printable("\x1b" * 100, 50)) == 50
