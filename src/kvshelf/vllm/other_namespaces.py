"""Logs why this engine cannot use a producer's KV: how their namespaces differ.

Owns one log line for each other namespace of which a request brings a hand-over, with what to set.
The record of the other namespace is read from the shelf, on a thread of its own. Params may name
any namespace, so only a few of them are looked up.

:meth:`OtherNamespaces.met` runs on the engine's step thread and does no I/O.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from kvshelf.errors import KVShelfError
from kvshelf.format.differences import how_to_unite
from kvshelf.format.names import parse_namespace_folder
from kvshelf.format.namespace import Namespace
from kvshelf.shelf.shelf import read_namespace
from kvshelf.tiers.tiered import AnyShelf

logger = logging.getLogger(__name__)

#: Most other namespaces that an engine looks up.
_MOST: Final = 16


class OtherNamespaces:
    """The other namespaces that hand-overs have named."""

    def __init__(self) -> None:
        self._met: set[bytes] = set()

    def met(self, shelf: AnyShelf, own: Namespace, digest: bytes) -> None:
        """Log once, later, how another namespace differs from this engine's.

        Parameters
        ----------
        shelf : AnyShelf
        own : Namespace
        digest : bytes
            Of the other one, 32 bytes.
        """
        if digest in self._met or len(self._met) == _MOST:
            return
        self._met.add(digest)
        thread = threading.Thread(
            target=_explain, args=(shelf, own, digest), name="kvshelf-namespace", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("%s: no thread can be started: %s", _hand_over(digest), error)


def _hand_over(digest: bytes) -> str:
    return f"requests that wait for KV of namespace {digest.hex()[:16]} are computed"


def _explain(shelf: AnyShelf, own: Namespace, digest: bytes) -> None:
    try:
        other = _find(shelf, digest)
    except (KVShelfError, ValueError) as error:
        logger.warning("%s: its description cannot be read: %s", _hand_over(digest), error)
        return
    if other is None:
        logger.warning(
            "%s: it is not on this shelf; set shared_storage_path of producer and consumer to the"
            " same place",
            _hand_over(digest),
        )
        return
    logger.warning(
        "%s: this engine has %s. %s", _hand_over(digest), own.folder, how_to_unite(own, other)
    )


def _find(shelf: AnyShelf, digest: bytes) -> Namespace | None:
    """Read a namespace by its digest; None if the shelf has none."""
    for folder in shelf.backend.folders():
        if parse_namespace_folder(folder) == digest.hex()[:16]:
            namespace = read_namespace(shelf.backend, folder)
            if namespace.digest == digest:
                return namespace
    return None
