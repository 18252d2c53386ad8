"""Log lines: how they begin, and how many come through."""

from __future__ import annotations

import io
import logging

import pytest

from kvshelf.logs import RateLimitedLog, prefixed

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


def test_error_shows_its_exception(caplog: pytest.LogCaptureFixture) -> None:
    RateLimitedLog(logger).error("failed", exc_info=ValueError("why"))
    assert "ValueError: why" in caplog.text


def test_each_line_begins_with_the_name_behind_what_the_engine_writes_first() -> None:
    text = io.StringIO()
    theirs = logging.StreamHandler(text)
    theirs.setFormatter(logging.Formatter("%(levelname)s [%(filename)s] %(message)s"))
    ours = logging.getLogger("kvshelf.tests.prefixed")
    ours.propagate = False
    ours.handlers = [prefixed(theirs), prefixed(theirs)]
    ours.warning("100 %% of %s", "it")
    assert text.getvalue() == 2 * "WARNING [test_logs.py] kvshelf: 100 % of it\n"
    theirs.handle(logging.makeLogRecord({"msg": "not ours", "levelname": "INFO"}))
    assert "kvshelf: not ours" not in text.getvalue()
