"""The node server: one memory tier and one set of storage connections for all engines of a machine.

Owns what installs its packages; :mod:`kvshelf.server.protocol` describes the protocol. All modules
here need these packages, so other packages import them only where a server is configured.
"""

from __future__ import annotations

from typing import Final

#: What installs the packages of the extra ``server``: kvshelf itself is on no index.
INSTALL: Final = "pip install msgspec prometheus-client"
