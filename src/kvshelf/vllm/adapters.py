"""Digests of LoRA adapters, which enter the chunk keys of their requests.

Owns, on the scheduler's side (:class:`AdapterDigests`), the digests of the files that requests
name, and stamps of these files: their paths, inodes, sizes and times. On the worker's side
(:class:`LoadedAdapters`) the stamps of the files that vLLM loaded, with which KV is computed.

vLLM identifies an adapter by an integer id. It reads the adapter's files when an API server
requests it or when it first uses the adapter, again after it evicted the adapter, and in every
step for requests with ``load_inplace``. vLLM's own prefix cache identifies an adapter by name and
path. If an adapter's files change, it can become unknown with which content some KV was computed,
in three ways:

* The files of an id change between two requests, or a worker loads other files for an id than
  the scheduler has hashed: its stamp is none of those that had the digest. The worker then neither
  stores nor loads for this id, and reports it.
* An adapter with another id has the name and path of an earlier one: vLLM may have loaded other
  content for it, and its prefix cache may serve blocks that were computed with the one adapter to
  requests with the other. A reset of that cache is no end of this: vLLM tells connectors of it also
  where it failed.
* ``load_inplace``: the content may change between two steps of one request.

KV of requests with such an adapter is neither stored nor loaded. Nor is it where the workers read
copies of their own on other machines: these have other stamps.

Contracts
---------
* One thread checks the files of all adapters and hashes those that have changed. No step waits for
  it: a request's lookup continues when its digest is known. Where an adapter takes longer than a
  second, further requests of it are computed without the shelf, and another thread goes on with the
  other adapters: only that one suffers if its files' storage never answers.
* What vLLM has loaded for an id is compared with a load's chunks when the load begins and again
  when it ends. If the files are replaced between a lookup and the first time that vLLM reads them,
  which may be after the load, one answer may depend on both contents, as with vLLM's own prefix
  cache when it reads an adapter again.
* :class:`AdapterDigests` may be used from any thread, :class:`LoadedAdapters` from the worker's
  step thread.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import queue
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvshelf.background import Background
from kvshelf.errors import ConfigError
from kvshelf.vllm.messages import Outbox
from kvshelf.vllm.metadata import AdapterContent, WorkerFacts
from kvshelf.weights.fingerprints import (
    FingerprintCache,
    adapter_files,
    is_settled,
    lora_digest,
    stamp_of,
)

logger = logging.getLogger(__name__)

_HASHING_SECONDS: Final = 1.0
_MODULE = "vllm.lora.worker_manager"


def adapter_settings(vllm_config: Any) -> bytes:
    """Return the engine's settings that change how adapters apply; empty if all are defaults.

    Parameters
    ----------
    vllm_config : VllmConfig
    """
    lora = getattr(vllm_config, "lora_config", None)
    if lora is None:
        return b""
    settings: dict[str, Any] = {}
    if modules := getattr(lora, "target_modules", None):
        settings["target_modules"] = sorted(modules)
    dtype = getattr(lora, "lora_dtype", "auto")
    if str(dtype) not in ("auto", str(vllm_config.model_config.dtype)):
        settings["lora_dtype"] = str(dtype)
    for name in ("enable_tower_connector_lora", "enable_moe_shared_loras"):
        if getattr(lora, name, False):
            settings[name] = True
    return json.dumps(settings, sort_keys=True).encode() if settings else b""


class _Content(NamedTuple):
    """The digest of an adapter's files, and their stamp."""

    digest: bytes
    stamp: bytes


class _Hashing(Future[_Content]):
    """What the files of one adapter have."""

    overdue_at = math.inf

    @property
    def overdue(self) -> bool:
        """Whether it is not done a second after it began."""
        return not self.done() and time.monotonic() >= self.overdue_at


class AdapterDigests:
    """Digests of the LoRA adapters that requests name, by vLLM's id. Any thread.

    Parameters
    ----------
    cache : FingerprintCache
        Remembers digests of files.
    settings : bytes
        From :func:`adapter_settings`.
    prefix_caching : bool
        Whether vLLM's own prefix cache is on, which identifies adapters by name and path.
    """

    def __init__(
        self, cache: FingerprintCache, *, settings: bytes = b"", prefix_caching: bool = True
    ) -> None:
        self._cache = cache
        self._settings = settings
        self._prefix_caching = prefix_caching
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[_Hashing, str]] = queue.SimpleQueue()
        self._thread = Background("kvshelf-adapter", self._read_queued)
        #: What the thread reads, or has read last.
        self._reading: _Hashing | None = None
        self._hashings: dict[tuple[int, str], _Hashing] = {}
        #: By path, what was hashed last.
        self._read_before: dict[str, _Content] = {}
        # Never removed: else a changed digest of an id would count as its first one.
        self._digests: dict[int, bytes] = {}
        #: By id, the stamps of all files that had its digest.
        self._stamps: dict[int, tuple[bytes, ...]] = {}
        self._untrusted: set[int] = set()
        self._warned: set[tuple[int, str]] = set()
        #: By name and path, the ids of the adapters whose KV vLLM's prefix cache may hold.
        self._in_engine_cache: dict[tuple[str, str], set[int]] = {}

    def ask(self, adapter: Any) -> Future[bytes | None]:
        """Return the digest of a request's adapter, which may become known later. Never blocks.

        Parameters
        ----------
        adapter : LoRARequest

        Returns
        -------
        Future
            32 bytes, or None if the request can have no chunk keys. Done at once, or on the thread
            that reads the adapter's files.
        """
        digest_future: Future[bytes | None] = Future()
        if adapter.load_inplace:
            self._warn(adapter, "it is loaded again for every step (load_inplace)")
        elif self.trusts(adapter):
            hashing = self._hash(adapter)
            if not hashing.overdue:
                hashing.add_done_callback(
                    lambda _: digest_future.set_result(self._found(adapter, hashing))
                )
                return digest_future
            self._warn(adapter, "its files have not been read in time")
        digest_future.set_result(None)
        return digest_future

    def _found(self, adapter: Any, hashing: _Hashing) -> bytes | None:
        """Return the digest that was just computed, if it is that of all other requests."""
        if (error := hashing.exception()) is not None:
            self._warn(adapter, f"its files cannot be read ({str(error) or repr(error)})")
            return None
        number, (digest, stamp) = int(adapter.lora_int_id), hashing.result()
        first_digest = self._digests.setdefault(number, digest)
        if first_digest != digest:
            self._untrusted.add(number)
            self._warn(
                adapter, "its files changed; restart the engine, or load them under a new name"
            )
            return None
        with self._lock:
            stamps = self._stamps.get(number, ())
            if stamp not in stamps:
                self._stamps[number] = (*stamps, stamp)
        return first_digest if self.trusts(adapter) else None

    def _hash(self, adapter: Any) -> _Hashing:
        """Return the hashing of an adapter's files that is running, or start it."""
        path = str(adapter.lora_path)
        name = int(adapter.lora_int_id), path
        with self._lock:
            if self._reading is not None and self._reading.overdue:
                self._thread.close()
                self._thread = Background("kvshelf-adapter", self._read_queued)
                self._reading = None
            started = self._thread.start()
            hashing = self._hashings.get(name)
            if hashing is None or hashing.done():
                hashing = self._hashings[name] = _Hashing()
                if started:
                    self._queue.put((hashing, path))
                else:
                    hashing.set_exception(RuntimeError("no thread can be started"))
            self._thread.wake()
            return hashing

    def _read_queued(self) -> None:
        # A thread that was stuck leaves the rest to the one in its place.
        while self._thread.is_current and not self._queue.empty():
            hashing, path = self._queue.get()
            self._reading = hashing
            hashing.overdue_at = time.monotonic() + _HASHING_SECONDS
            try:
                hashing.set_result(self._read(path))
            except Exception as error:  # noqa: BLE001 - who asks for the digest learns of it
                hashing.set_exception(error)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.close()

    def _read(self, path: str) -> _Content:
        """Return an adapter's files as they are now."""
        began, (stamp, written) = time.time_ns(), _stamp(path)
        earlier_read = self._read_before.get(path)
        if earlier_read is not None and earlier_read.stamp == stamp:
            return earlier_read
        digest = lora_digest(_folder(path), cache=self._cache)
        if self._settings:
            digest = hashlib.sha256(digest + self._settings).digest()
        if _stamp(path)[0] != stamp:
            raise ConfigError("they changed while they were read")
        content = _Content(digest, stamp)
        if is_settled(written, began):
            self._read_before[path] = content
        return content

    def content(self, adapter: Any) -> AdapterContent | None:
        """Return what the digest of a request's adapter stands for; None without an adapter."""
        if adapter is None:
            return None
        number = int(adapter.lora_int_id)
        return AdapterContent(number, self._stamps.get(number, ()))

    def note_request(self, adapter: Any) -> None:
        """Note that vLLM's prefix cache will hold KV of an adapter. Every request must be noted."""
        if not self._prefix_caching:
            return
        name = adapter.lora_name, adapter.lora_path
        with self._lock:
            ids = self._in_engine_cache.setdefault(name, set())
            ids.add(int(adapter.lora_int_id))
        if len(ids) > 1:
            self._warn(
                adapter,
                "vLLM's prefix cache may hold KV of another adapter with this name and path;"
                " give it a new name",
            )

    def trusts(self, adapter: Any) -> bool:
        """Whether an adapter's KV is computed with the content that its digest stands for."""
        if adapter is None:
            return True
        name = adapter.lora_name, adapter.lora_path
        several = len(self._in_engine_cache.get(name, ())) > 1
        return not several and adapter.lora_int_id not in self._untrusted

    def distrust(self, number: int) -> None:
        """Stop using this id: a worker loaded other content for it."""
        if number not in self._untrusted:
            self._untrusted.add(number)
            logger.warning(
                "KV of requests with the LoRA adapter of id %d is neither stored nor loaded: a"
                " worker loaded other files for it than the scheduler hashed. Load the adapter"
                " again under a new name, or restart the engine",
                number,
            )

    def _warn(self, adapter: Any, why: str) -> None:
        if (adapter.lora_int_id, why) not in self._warned:
            self._warned.add((adapter.lora_int_id, why))
            logger.warning(
                "KV of requests with LoRA adapter %r is neither stored nor loaded: %s",
                adapter.lora_name,
                why,
            )


class LoadedAdapters:
    """Stamps of the files that a worker loaded for each adapter id. Step thread only.

    Parameters
    ----------
    facts : Outbox of WorkerFacts
        Gets the ids for which this worker loaded other content than the scheduler hashed.
    """

    def __init__(self, facts: Outbox[WorkerFacts]) -> None:
        self._facts = facts
        #: By id; one that is empty is not known.
        self._stamps: dict[int, set[bytes]] = {}

    def watch(self, manager_class: type | None = None) -> bool:
        """Notice every adapter that this process loads from now on.

        Parameters
        ----------
        manager_class : type, optional
            The class that loads them; vLLM's when absent.

        Returns
        -------
        bool
            False if this process has no such class: then nothing is stored for adapters.
        """
        if manager_class is None:
            manager_class = getattr(sys.modules.get(_MODULE), "WorkerLoRAManager", None)
        method = getattr(manager_class, "_load_adapter", None)
        if manager_class is None or method is None:
            return False
        if not hasattr(method, "kvshelf_listeners"):
            method = _watched(method)
            manager_class._load_adapter = method  # type: ignore[attr-defined]
        method.kvshelf_listeners.add(self)
        return True

    def loaded(self, adapter: Any, before: bytes) -> None:
        """Note that vLLM has just loaded an adapter; `before` is the stamp of before it did."""
        number = int(adapter.lora_int_id)
        is_unchanged = not adapter.load_inplace and before == _stamp_or_empty(adapter)
        self._stamps.setdefault(number, set()).add(before if is_unchanged else b"")

    def may_store(self, content: AdapterContent | None) -> bool:
        """Whether KV that was just computed is known to be computed with this content."""
        return content is None or (content.number in self._stamps and self._agrees(content))

    def may_load(self, content: AdapterContent | None) -> bool:
        """Whether the worker computes with this content, or has loaded nothing of its id yet."""
        return content is None or content.number not in self._stamps or self._agrees(content)

    def _agrees(self, content: AdapterContent) -> bool:
        if self._stamps[content.number].issubset(content.stamps):
            return True
        other_adapters = self._facts.next.other_adapters
        if content.number not in other_adapters:
            other_adapters.append(content.number)
        return False


def _watched(method: Any) -> Any:
    listeners: weakref.WeakSet[LoadedAdapters] = weakref.WeakSet()

    @functools.wraps(method)
    def load(self: Any, adapter: Any, *args: Any, **kwargs: Any) -> Any:
        stamp_before = _stamp_or_empty(adapter)
        made = method(self, adapter, *args, **kwargs)
        for listener in list(listeners):
            try:
                listener.loaded(adapter, stamp_before)
            except Exception as error:
                logger.error("could not note that an adapter was loaded", exc_info=error)
        return made

    load.kvshelf_listeners = listeners  # type: ignore[attr-defined]
    return load


def _stamp(path: str) -> tuple[bytes, int]:
    """Return what changes when an adapter's files do, and when one was written last, in ns."""
    stamps = [(str(file), stamp_of(file.stat())) for file in adapter_files(_folder(path))]
    # Machines that mount one filesystem know it as different devices.
    lines = [f"{name} {stamp[1:]}" for name, stamp in stamps]
    written = max(time for _, stamp in stamps for time in stamp[-2:])
    return hashlib.sha256("\n".join(lines).encode()).digest(), written


def _stamp_or_empty(adapter: Any) -> bytes:
    """Return the stamp of an adapter's files; empty if they cannot be read."""
    try:
        return _stamp(str(adapter.lora_path))[0]
    except Exception:  # noqa: BLE001 - vLLM reports what is wrong with an adapter
        return b""


def _folder(path: str) -> Path:
    """Return the folder from which vLLM reads an adapter."""
    folder = Path(path).expanduser()
    if folder.is_absolute() or folder.exists():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))
