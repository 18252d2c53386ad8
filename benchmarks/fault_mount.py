"""The filesystem that makes trouble on order, where a measurement can have it.

Owns the check for it: it lies in the tests of a source checkout, and needs FUSE.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from benchmarks.child import ChildError


def require_faultfs() -> Any:
    """Return the module :mod:`tests.faults.faultfs`.

    Raises
    ------
    ChildError
        If this is no source checkout, or FUSE is missing.
    """
    try:
        faultfs = import_module("tests.faults.faultfs")
    except ImportError as error:
        raise ChildError(f"not a source checkout: {error}") from None
    missing = faultfs.why_not()
    if missing is not None:
        raise ChildError(missing)
    return faultfs
