"""Logs how the namespace of a hand-over's producer differs from this engine's, and what to set.

Params may name any namespace; the caller asks for a few of them. Runs on a lookup thread, since the
record of the other namespace is on the shelf.
"""

from __future__ import annotations

import logging

from kvshelf.errors import KVShelfError
from kvshelf.format.differences import how_to_unite
from kvshelf.format.names import parse_namespace_folder
from kvshelf.format.namespace import Namespace
from kvshelf.shelf.shelf import read_namespace
from kvshelf.tiers.tiered import AnyShelf

logger = logging.getLogger(__name__)


def log_difference(shelf: AnyShelf, own: Namespace, digest: bytes) -> None:
    """Log in one line why KV of another namespace cannot be used.

    Parameters
    ----------
    shelf : AnyShelf
    own : Namespace
    digest : bytes
        Of the other one, 32 bytes.
    """
    try:
        other = _find(shelf, digest)
    except (KVShelfError, ValueError) as error:
        why = f"its description cannot be read: {error}"
    else:
        if other is None:
            why = (
                "it is not on this shelf; set shared_storage_path of producer and consumer to the"
                " same place"
            )
        else:
            why = f"this engine has {own.folder}. {how_to_unite(own, other)}"
    logger.warning(
        "requests that wait for KV of namespace %s are computed: %s", digest.hex()[:16], why
    )


def _find(shelf: AnyShelf, digest: bytes) -> Namespace | None:
    """Read a namespace by its digest; None if the shelf has none."""
    for folder in shelf.backend.folders():
        if parse_namespace_folder(folder) == digest.hex()[:16]:
            namespace = read_namespace(shelf.backend, folder)
            if namespace.digest == digest:
                return namespace
    return None
