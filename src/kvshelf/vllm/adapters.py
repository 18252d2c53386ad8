"""What the KV of requests with a LoRA adapter is addressed by.

Owns the digests of the adapters that an engine uses: on the scheduler's side
(:class:`AdapterDigests`) those of the files that a request names, which address its KV; on the
worker's side (:class:`LoadedAdapters`) those of the files that vLLM loaded, with which KV is
computed.

vLLM knows an adapter by its integer id. It reads the files when an API server says so or when it
first uses the adapter, again whenever it was dropped from memory meanwhile, and in every step for
requests that say ``load_inplace``. Its own prefix cache knows an adapter by name and path. So files
that change show in three ways, and in each of them nobody can tell any more what some KV was
computed with:

* The files of an id change between two requests, or a worker loaded other content for an id than
  the scheduler addresses KV by: then the worker neither stores nor loads for it, and says so.
* An adapter with another id has the name and path of an earlier one, and other content. Blocks
  that were computed with the one may be in vLLM's prefix cache for the other, until that is reset
  together with the connector.
* ``load_inplace``: content may change between two steps of one request.

Requests with such an adapter are neither stored nor loaded.

Contracts
---------
* Files are looked at on threads of their own, at most one for each adapter and side. Nobody
  waits for one longer than a second after it began, so that a storage that never answers costs
  nothing but the adapter.
* :class:`AdapterDigests` may be used from any thread, :class:`LoadedAdapters` from the worker's
  step thread.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvshelf.backends.guard import try_to_start
from kvshelf.errors import ConfigError
from kvshelf.identity import FingerprintCache, adapter_files, lora_digest
from kvshelf.vllm.metadata import AdapterContent

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 1.0
_MODULE = "vllm.lora.worker_manager"


def adapter_settings(vllm_config: Any) -> bytes:
    """Return what stands for how an engine applies adapters, empty when as their files say.

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


def _digest(path: str, settings: bytes, cache: FingerprintCache) -> bytes:
    digest = lora_digest(_folder(path), cache=cache)
    return hashlib.sha256(digest + settings).digest() if settings else digest


class _Look:
    """The digest of one adapter's files, found on a thread of its own."""

    def __init__(self, work: Callable[[], bytes]) -> None:
        self.digest: bytes | None = None
        self.problem = ""
        self._done = threading.Event()
        self._wait_until = time.monotonic() + _LOOK_SECONDS
        thread = threading.Thread(
            target=self._run, args=(work,), name="kvshelf-adapter", daemon=True
        )
        if not try_to_start(thread):
            self.problem = "no thread can be started"
            self._done.set()

    def _run(self, work: Callable[[], bytes]) -> None:
        try:
            self.digest = work()
        except Exception as error:  # noqa: BLE001 - there is nobody else to tell
            self.problem = str(error) or repr(error)
        finally:
            self._done.set()

    @property
    def over(self) -> bool:
        """Whether it is over, in one way or another."""
        return self._done.is_set()

    def wait(self) -> bool:
        """Wait for as long as may be waited at all; whether it is over."""
        return self._done.wait(max(0.0, self._wait_until - time.monotonic()))


class AdapterDigests:
    """Digests of LoRA adapters, by the id that vLLM knows them by. Any thread.

    Parameters
    ----------
    cache : FingerprintCache
        Where digests of files are remembered.
    settings : bytes
        What :func:`adapter_settings` says.
    prefix_caching : bool
        vLLM keeps KV under an adapter's name and path.
    """

    def __init__(
        self, cache: FingerprintCache, *, settings: bytes = b"", prefix_caching: bool = True
    ) -> None:
        self._cache = cache
        self._settings = settings
        self._prefix_caching = prefix_caching
        self._lock = threading.Lock()
        self._looks: dict[tuple[int, str], _Look] = {}
        # Never forgotten: an id that changed would look new.
        self._digests: dict[int, bytes] = {}
        self._untrusted: set[int] = set()
        self._warned: set[tuple[int, str]] = set()
        #: What vLLM's prefix cache may hold KV of under a name and path: digests by id, empty
        #: where they are not known; None: of several.
        self._at_hand: dict[tuple[str, str], dict[int, bytes] | None] = {}

    def digest(self, adapter: Any) -> bytes | None:
        """Return the digest for a request's adapter; waits while it is being found.

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
        self._note_at_hand(adapter, b"")
        if adapter.load_inplace:
            self._warn(adapter, "it is loaded anew for every step (load_inplace)")
            return None
        if not self.trusts(adapter):
            return None
        look = self._look(adapter)
        if not look.wait():
            self._warn(adapter, "its files have not been read in time")
            return None
        if look.digest is None:
            self._warn(adapter, f"its files cannot be read ({look.problem})")
            return None
        known = self._digests.setdefault(int(adapter.lora_int_id), look.digest)
        if known != look.digest:
            self._untrusted.add(int(adapter.lora_int_id))
            self._warn(
                adapter, "its files changed; restart the engine, or load them under a new name"
            )
            return None
        self._note_at_hand(adapter, known)
        return known if self.trusts(adapter) else None

    def _look(self, adapter: Any) -> _Look:
        """Return a look at an adapter's files that began just now, or is not over yet."""
        path = str(adapter.lora_path)
        name = int(adapter.lora_int_id), path
        with self._lock:
            look = self._looks.get(name)
            if look is None or look.over:
                work = functools.partial(_digest, path, self._settings, self._cache)
                look = self._looks[name] = _Look(work)
            return look

    def _note_at_hand(self, adapter: Any, digest: bytes) -> None:
        """Note what vLLM's prefix cache will hold KV of; an empty digest means not known yet."""
        if not self._prefix_caching:
            return
        name = adapter.lora_name, adapter.lora_path
        with self._lock:
            digests = self._at_hand.setdefault(name, {})
            if digests is not None:
                number = int(adapter.lora_int_id)
                digests[number] = digest or digests.get(number, b"")
                if len(set(digests.values())) > 1:
                    self._at_hand[name] = digests = None
        if digests is None:
            self._warn(
                adapter,
                "vLLM's prefix cache may hold KV of another adapter with this name and path;"
                " give it a new name, or reset the prefix cache together with the connector",
            )

    def trusts(self, adapter: Any) -> bool:
        """Whether what an adapter's KV is computed with is what its digest says."""
        if adapter is None:
            return True
        if adapter.lora_int_id in self._untrusted:
            return False
        return self._at_hand.get((adapter.lora_name, adapter.lora_path), {}) is not None

    def distrust(self, number: int) -> None:
        """Use this id no more: a worker loaded other content for it."""
        if number not in self._untrusted:
            self._untrusted.add(number)
            logger.warning(
                "requests with the LoRA adapter of id %d are neither stored nor loaded: the files"
                " that were loaded for it are not those that it was known by. Load it again under"
                " a new name, or restart the engine",
                number,
            )

    def prefix_cache_was_reset(self) -> None:
        """Note that vLLM holds no KV any more."""
        with self._lock:
            self._at_hand.clear()

    def _warn(self, adapter: Any, why: str) -> None:
        if (adapter.lora_int_id, why) not in self._warned:
            self._warned.add((adapter.lora_int_id, why))
            logger.warning(
                "requests with LoRA adapter %r are neither stored nor loaded: %s",
                adapter.lora_name,
                why,
            )


class LoadedAdapters:
    """What a worker loaded for each adapter id. Step thread only.

    Parameters
    ----------
    settings : bytes
        What :func:`adapter_settings` says.
    """

    def __init__(self, settings: bytes = b"") -> None:
        self._settings = settings
        #: By id; None: several contents, or one that nobody knows.
        self._known: dict[int, bytes | None] = {}
        self._looks: dict[int, _Look] = {}
        self._others: set[int] = set()

    def watch(self, manager_class: type | None = None) -> bool:
        """Hear of every adapter that this process loads from now on.

        Parameters
        ----------
        manager_class : type, optional
            The class that loads them; vLLM's when absent.

        Returns
        -------
        bool
            False when there is no such class in this process. Then nothing is stored for adapters.
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

    def loaded(self, adapter: Any, before: _Stamp | None) -> None:
        """Note that vLLM has just loaded an adapter.

        Parameters
        ----------
        adapter : LoRARequest
        before : tuple
            What told the state of its files before; None if they were not there yet.
        """
        number = int(adapter.lora_int_id)
        unknown = number in self._looks and not self._take(number)
        if unknown or adapter.load_inplace:
            self._known[number] = None
        if adapter.load_inplace:
            return
        path = str(adapter.lora_path)

        def content() -> bytes:
            # Nothing is remembered: the step thread may wait for this, and for no other file.
            found = _digest(path, self._settings, FingerprintCache(None))
            if before is not None and _stamp(path) != before:
                raise ConfigError("its files changed while they were loaded")
            return found

        self._looks[number] = _Look(content)

    def _take(self, number: int, *, wait: bool = True) -> bool:
        """Take over what was found for an id; False while it is not known."""
        look = self._looks.get(number)
        if look is None:
            return number in self._known
        if not (look.wait() if wait else look.over):
            return False
        del self._looks[number]
        found = look.digest
        known = self._known.setdefault(number, found)
        if found is None or known != found:
            self._known[number] = None
        return True

    def may_store(self, content: AdapterContent | None) -> bool:
        """Whether KV that was just computed is what this content makes of it."""
        return content is None or (self._take(content.number) and self._agrees(content))

    def may_load(self, content: AdapterContent | None) -> bool:
        """Whether the worker computes what this content makes of KV, as far as it knows."""
        if content is None or not self._take(content.number, wait=False):
            return True
        return self._agrees(content)

    def _agrees(self, content: AdapterContent) -> bool:
        if self._known[content.number] == content.digest:
            return True
        self._others.add(content.number)
        return False

    def take_others(self) -> list[int]:
        """Return the ids that turned out to stand for other content than the scheduler thinks."""
        others, self._others = self._others, set()
        return sorted(others)


#: Paths, inodes, sizes and times of an adapter's files.
_Stamp = tuple[tuple[str, int, int, int, int, int], ...]


def _watched(method: Any) -> Any:
    listeners: weakref.WeakSet[LoadedAdapters] = weakref.WeakSet()

    @functools.wraps(method)
    def load(self: Any, adapter: Any, *args: Any, **kwargs: Any) -> Any:
        before = _stamp(str(getattr(adapter, "lora_path", "")))
        made = method(self, adapter, *args, **kwargs)
        for listener in list(listeners):
            try:
                listener.loaded(adapter, before)
            except Exception as error:
                logger.error("an adapter that was loaded was not noted", exc_info=error)
        return made

    load.kvshelf_listeners = listeners  # type: ignore[attr-defined]
    return load


def _stamp(path: str) -> _Stamp | None:
    """Return what changes when an adapter's files do; None where there are none."""
    try:
        files = [(str(file), os.stat(file)) for file in adapter_files(_folder(path))]
    except Exception:  # noqa: BLE001 - it is vLLM that says what is wrong with an adapter
        return None
    return tuple(
        (name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        for name, found in files
    )


def _folder(path: str) -> Path:
    """Return the folder that vLLM reads an adapter from."""
    folder = Path(path).expanduser()
    if folder.is_absolute() or folder.exists():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))
