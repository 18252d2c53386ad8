"""RateLimitedLog: how many lines come through."""

from __future__ import annotations

import logging

import pytest

from kvshelf.logs import RateLimitedLog

logger = logging.getLogger("kvshelf.tests.logs")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [row.getMessage() for row in caplog.records if row.levelno == logging.WARNING]


def test_without_lines_all_are_debug_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    RateLimitedLog(logger, 0).warning("line %d", 1)
    assert warnings(caplog) == []
    assert [row.getMessage() for row in caplog.records] == ["line 1"]


def test_one_line_about_each_subject() -> None:
    log = RateLimitedLog(logger, lines=3)
    assert [log.allows(about) for about in ("a", "a", "b", None, None)] == [
        True,
        False,
        True,
        True,
        False,
    ]


def test_an_error_shows_its_exception(caplog: pytest.LogCaptureFixture) -> None:
    RateLimitedLog(logger).error("failed", exc_info=ValueError("why"))
    assert "ValueError: why" in caplog.text
