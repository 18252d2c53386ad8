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
    tag = digest.hex()[:16]
    try:
        folders = [one for one in shelf.backend.folders() if parse_namespace_folder(one) == tag]
        other = read_namespace(shelf.backend, folders[0]) if folders else None
    except (KVShelfError, ValueError) as error:
        why = f"its description cannot be read: {error}"
    else:
        if other is None or other.digest != digest:
            why = (
                "it is not on this shelf; set shared_storage_path of producer and consumer to the"
                " same place"
            )
        else:
            why = f"this engine has {own.folder}. {how_to_unite(own, other)}"
    logger.warning("requests that wait for KV of namespace %s are computed: %s", tag, why)
