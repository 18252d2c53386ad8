"""The golden vectors and the second implementation of the format, for tests."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden" / "format"
VECTORS: dict[str, Any] = json.loads((GOLDEN / "vectors.json").read_text())


def load_reference() -> Any:
    spec = importlib.util.spec_from_file_location("kvshelf_reference", GOLDEN / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load_reference()
