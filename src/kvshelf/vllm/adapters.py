"""What the KV of requests with a LoRA adapter is addressed by.

Owns the digest of each adapter that the engine has seen.

vLLM knows an adapter by its integer id, reads its files when it first uses it, and again
whenever it was dropped from memory meanwhile or a request says ``load_inplace``. So KV is
addressed by the content that an id had when this engine first saw it; as soon as an id
shows other content, nobody can tell which of the two some KV was computed with, and its
requests are neither stored nor loaded any more.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from kvshelf.errors import KVShelfError
from kvshelf.identity import FingerprintCache, lora_digest

logger = logging.getLogger(__name__)


class AdapterDigests:
    """Digests of LoRA adapters, by the id that vLLM knows them by. Any thread.

    Parameters
    ----------
    cache : FingerprintCache
        Where digests of files are remembered.
    """

    def __init__(self, cache: FingerprintCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        # Never forgotten: an id that changed would look new. None: not to be used.
        self._digests: dict[int, bytes | None] = {}
        self._unreadable: set[int] = set()

    def digest(self, adapter: Any) -> bytes | None:
        """Return the digest for a request's adapter; reads files.

        Parameters
        ----------
        adapter : LoRARequest or None

        Returns
        -------
        bytes or None
            32 bytes; empty without an adapter; None when the request has no address.
        """
        if adapter is None:
            return b""
        number = int(adapter.lora_int_id)
        with self._lock:
            if number in self._digests and self._digests[number] is None:
                return None
        try:
            found = lora_digest(_folder(str(adapter.lora_path)), cache=self._cache)
        except (KVShelfError, OSError, ValueError) as error:
            # vLLM may fetch the files only when it first uses the adapter.
            if number not in self._unreadable:
                self._unreadable.add(number)
                _warn(adapter, f"its files cannot be read ({error})")
            return None
        with self._lock:
            known = self._digests.setdefault(number, found)
            if known != found:
                self._digests[number] = None
        if known == found:
            return found
        if known is not None:
            _warn(adapter, "its files changed; restart the engine, or give the adapter a new id")
        return None


def _warn(adapter: Any, why: str) -> None:
    logger.warning(
        "requests with LoRA adapter %r are neither stored nor loaded: %s", adapter.lora_name, why
    )


def _folder(path: str) -> Path:
    """Return the folder that vLLM reads an adapter from."""
    folder = Path(path).expanduser()
    if folder.is_absolute() or folder.exists():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))
