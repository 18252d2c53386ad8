"""Variants of a test of which few are run each time."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def variants(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Mark a test's parameters slow, but those in `quick`; a tuple is several parameters.

    For tests of the whole whose rule is proved for each variant at a lower level.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in quick else pytest.mark.slow,
        )
        for value in values
    ]
