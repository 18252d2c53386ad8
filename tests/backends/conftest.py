"""Readable failures for the asserts inside the shipped suite."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kvshelf.testing")
