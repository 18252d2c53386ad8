"""A machine with a GPU may have no package of kvshelf's but torch, numpy and pytest."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

if importlib.util.find_spec("xxhash") is None:
    sys.modules["xxhash"] = ModuleType("xxhash")  # only tests that are skipped then use it
