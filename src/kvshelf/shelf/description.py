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
from kvshelf.backends.base import read_into
from kvshelf.errors import StorageError
from kvshelf.format.names import DESCRIPTION
from kvshelf.format.namespace import Namespace
from kvshelf.shelf.repairs import Repairs

logger = logging.getLogger(__name__)

_DESCRIPTION_SECONDS: Final = 10.0


class Description:
    """The description of one namespace.

    Parameters
    ----------
    backend : Backend
    namespace : Namespace
    repairs : Repairs
    """

    def __init__(self, backend: Backend, namespace: Namespace, repairs: Repairs) -> None:
        self._backend = backend
        self._namespace = namespace
        self._repairs = repairs
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
            first &= self._repairs.create(name, encoded, size) is WriteResult.EXISTED
        if first:
            self._compare(name, encoded)
        self._described_until = time.monotonic() + _DESCRIPTION_SECONDS

    def _compare(self, name: str, encoded: bytes) -> None:
        """Replace a description of the right size but other bytes, as a power loss leaves it."""
        found = bytearray(len(encoded))
        try:
            count = read_into(self._backend, name, memoryview(found))
        except StorageError as error:
            logger.debug("%s could not be compared: %s", name, error)
            return
        if count == len(encoded) and found != encoded:
            logger.warning(
                "%s/%s is damaged: its bytes are not those of the namespace; it is replaced",
                self._backend.url,
                name,
            )
            self._repairs.replace(name, encoded)
