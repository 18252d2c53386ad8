"""The folder of the files that kvshelf keeps for a user."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for the files that kvshelf keeps for this user on this machine.

    Parameters
    ----------
    environ : Mapping, optional
        The environment; ``os.environ`` when absent.

    Returns
    -------
    Path
        ``KVSHELF_CACHE_DIR``, else ``$XDG_CACHE_HOME/kvshelf``, else
        ``~/.cache/kvshelf``. Not created.
    """
    environ = os.environ if environ is None else environ
    if own := environ.get("KVSHELF_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME")
    # The XDG specification requires that a relative path be ignored.
    if not base or not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    # A user without a home, as containers have them, has no entry to expand "~" by either.
    return Path(base if os.path.isabs(base) else "/.cache") / "kvshelf"
