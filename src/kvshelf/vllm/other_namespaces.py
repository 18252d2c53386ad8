"""Says why a producer's KV is of no use to this engine: how their namespaces differ.

Owns one log line for each other namespace of which a request brings a hand-over, with what to set.
The record of the other namespace is read from the shelf, on a thread of its own. Params name
namespaces freely, so only a few of them are looked for.

:meth:`OtherNamespaces.met` runs on the engine's step thread and does no I/O.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, Final

from kvshelf.errors import KVShelfError
from kvshelf.format.names import parse_namespace_folder
from kvshelf.format.namespace import Namespace
from kvshelf.shelf.shelf import read_namespace
from kvshelf.shelf.tiers import AnyShelf

logger = logging.getLogger(__name__)

#: Other namespaces that are looked for, in an engine's life.
_MOST: Final = 16
_SHOWN: Final = 60

#: What to set where a field differs, the likeliest cause first.
_ADVICE: Final[Mapping[str, str]] = {
    "weights": "serve the same weights, or set weights to the same name",
    "version": "set version to the same string",
    "chunk_size": "set chunk_size to the same number",
    "kinds": "turn vLLM's hybrid KV cache manager on or off alike",
    "kv_dtype": "set --kv-cache-dtype to the same type",
    "kv_scales": "load the same scales of the KV cache",
    "compute_dtype": "set --dtype to the same type",
    "quantization": "set --quantization to the same method",
    "stages": "set --pipeline-parallel-size to the same number",
    "layouts": "set layout: canonical",
    "shards": "set shards to the same number",
}
_OPAQUE: Final = (
    "the layout of the KV cache is unknown: run the same release of vLLM with the same"
    " --tensor-parallel-size, --block-size and attention backend"
)


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
    return f"requests are computed that wait for KV of namespace {digest.hex()[:16]}"


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


def how_to_unite(own: Namespace, other: Namespace) -> str:
    """Return how two namespaces differ, and what to set so that engines share one.

    Parameters
    ----------
    own, other : Namespace
        Of the consumer, and of the producer.
    """
    ours, theirs = own.record, other.record
    fields = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    for field, advice in _ADVICE.items():
        if field in fields:
            if field == "layouts" and _is_opaque(ours) | _is_opaque(theirs):
                advice = _OPAQUE
            break
    else:
        field, advice = min(fields), "serve the model with the same configuration"
    return (
        f"{field} is {_shown(theirs.get(field))} there and {_shown(ours.get(field))} here: {advice}"
        " in both engines"
    )


def _is_opaque(record: Mapping[str, Any]) -> bool:
    return any(layout.startswith(("opaque-", "replicated-")) for layout in record["layouts"])


def _shown(value: object) -> str:
    """Return a value of a record: short, and printable whoever wrote the record."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    text = "absent" if value is None else ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
