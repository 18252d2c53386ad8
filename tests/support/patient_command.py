"""``kvshelf`` with the constants that the environment names: ``python -m`` this module."""

from __future__ import annotations

import faulthandler

from kvshelf.cli import main
from tests.support.constants import put_from_environment

faulthandler.enable()
put_from_environment()
main()
