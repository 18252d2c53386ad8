"""``kvshelf`` with the constants that the environment names: ``python -m`` this module."""

from __future__ import annotations

from kvshelf.cli import main
from tests.support.constants import put_from_environment

put_from_environment()
main()
