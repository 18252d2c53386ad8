"""The description of a namespace on a shelf, ``namespace.json``: published beside its objects.

When a process publishes its first object, and every ten seconds while it publishes more, it makes
sure that the description is there, and once that its bytes are right. Races of threads only repeat
this check of the storage, on which all methods block.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from kvshelf.backends import Backend, WriteResult
from kvshelf.errors import StorageError
from kvshelf.format.names import DESCRIPTION
from kvshelf.format.namespace import Namespace
from kvshelf.shelf import repairs
from kvshelf.shelf.leftovers import read_small

logger = logging.getLogger(__name__)

_DESCRIPTION_SECONDS: Final = 10.0


class Description:
    """The description of one namespace.

    Parameters
    ----------
    backend : Backend
    namespace : Namespace
    """

    def __init__(self, backend: Backend, namespace: Namespace) -> None:
        self._backend = backend
        self._namespace = namespace
        self._described_until = 0.0

    def publish(self, folder: str) -> None:
        """Publish the description in a folder of the namespace, if it is not there.

        Raises
        ------
        StorageError
            If the storage refused or failed.
        """
        if time.monotonic() < self._described_until:
            return
        name, encoded = f"{folder}/{DESCRIPTION}", self._namespace.encoded
        first, size = not self._described_until, len(encoded)
        # On a high-latency storage the create serves as the first probe: a backend learns from it.
        creates = first and self._backend.properties.high_latency
        if creates or self._backend.stat([name])[0] != size:
            first &= repairs.create(self._backend, name, encoded, size) is WriteResult.EXISTED
        if first:
            self._compare(name, encoded)
        self._described_until = time.monotonic() + _DESCRIPTION_SECONDS

    def _compare(self, name: str, encoded: bytes) -> None:
        """Replace a description of the right size but other bytes, as a power loss leaves it."""
        try:
            found = read_small(self._backend, name, len(encoded))
        except (StorageError, ValueError) as error:
            logger.debug("%s could not be compared: %s", name, error)
            return
        if len(found) == len(encoded) and found != encoded:
            logger.warning(
                "%s/%s is damaged: its bytes are not those of the namespace; it is replaced",
                self._backend.url,
                name,
            )
            repairs.replace(self._backend, name, encoded)
