"""Fingerprints of the weight files that an engine loads.

Owns the choice of files (:func:`weight_files`, :func:`adapter_files`), their digests
(:func:`weights_fingerprint`, :func:`sampled_fingerprint`, :func:`lora_digest`) and the cache of
digests of unchanged files (:class:`FingerprintCache`).

Contracts
---------
* A fingerprint is a pure function of the files' names and content: equal on every machine.
* No torch, no storage backend, no vLLM.

Threads
-------
Everything is safe to call from any thread. Files are read on daemon threads, which end with the
call, or with the process if a read hangs; on the caller's where the system allows no more threads.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

import xxhash

from kvshelf.background import try_to_start
from kvshelf.errors import ConfigError, KVShelfError, TransientStorageError

__all__ = [
    "adapter_files",
    "lora_digest",
    "sampled_fingerprint",
    "weight_files",
    "weights_fingerprint",
]


#: Device, inode, size, and the times of the last changes of content and status in nanoseconds.
Stamp: TypeAlias = tuple[int, int, int, int, int]


class FingerprintCancelledError(KVShelfError):
    """The caller cancelled the computation of a fingerprint."""


#: That read and hash.
_THREADS: Final = 2
_READ_BYTES: Final = 8 * 2**20
_SAMPLE_BYTES: Final = 64 * 1024
_SAMPLES: Final = 16
_SETTLED_NS: Final = 2 * 10**9
_CACHE_ENTRIES: Final = 4096
_BLOB: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SAFETENSORS_FORMATS: Final = {
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "runai_streamer_sharded",
    "sharded_state",
}
_TRAINING_LEFTOVERS: Final = (
    "training_args.bin",
    "optimizer.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
)


def weight_files(
    model_dir: str | Path, load_format: str = "auto", *, patterns: Sequence[str] | None = None
) -> list[Path]:
    """Return the weight files that vLLM's loader reads from a local model, sorted.

    Mirrors vLLM's default loader: ``consolidated*.safetensors`` (Mistral's own format)
    has precedence with ``auto``; otherwise ``*.safetensors``, else ``*.bin``, else ``*.pt``;
    safetensors files that the index does not name are left out, as are leftovers of
    training among ``*.bin`` and ``*.pt``.

    Parameters
    ----------
    model_dir : str or Path
        Folder of the model, or one weight file (GGUF).
    load_format : str
        vLLM's ``load_format``.
    patterns : Sequence of str, optional
        Where the model names its files itself, in folders below too: those that the first pattern
        matches that matches any.

    Raises
    ------
    ConfigError
        If the format's weights are not files of this folder, the index names a missing
        file, or there are no weight files. The message advises to set ``weights``.
    """
    folder = Path(model_dir)
    if folder.is_file():
        return [folder]
    remedy = "set `weights` to `name:` and a text that changes whenever the weights change"
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a local folder, so its weights cannot be read; {remedy}"
        )
    if load_format == "auto":
        consolidated = any(path.is_file() for path in folder.rglob("consolidated*.safetensors"))
        load_format = "mistral" if consolidated else "hf"
    index_file = "model.safetensors.index.json"
    if load_format in ("hf", "bitsandbytes"):
        of_format = ["*.safetensors", "*.bin", "*.pt"]
    elif load_format in _SAFETENSORS_FORMATS:
        of_format = ["*.safetensors"]
    elif load_format == "mistral":
        of_format = ["consolidated*.safetensors"]
        index_file = "consolidated.safetensors.index.json"
    elif load_format == "pt":
        of_format = ["*.pt"]
    elif load_format == "npcache":
        of_format = ["*.bin", "*.pt"]
    elif load_format == "gguf":
        of_format = ["*.gguf"]
    else:
        raise ConfigError(
            f"load_format {load_format!r} does not read weight files known to kvshelf; {remedy}"
        )
    files: list[Path] = []
    chosen = of_format if patterns is None else patterns
    for pattern in chosen:
        # Path.glob matches hidden files; the loader's glob.glob does not.
        files = [path for path in folder.glob(pattern) if not _is_hidden(path, folder)]
        if files:
            break
    if files and files[0].suffix == ".safetensors":
        if patterns is None:
            files = _files_of_index(folder / index_file, files)
    elif load_format != "gguf":
        files = [path for path in files if not path.name.endswith(_TRAINING_LEFTOVERS)]
    if not files:
        raise ConfigError(f"{folder} contains no weight files ({', '.join(chosen)}); {remedy}")
    return sorted(files)


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _files_of_index(index: Path, files: list[Path]) -> list[Path]:
    if not index.is_file():
        return files
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        named = {index.parent / str(name) for name in weight_map.values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files ({error})") from error
    missing = named.difference(files)
    if missing:
        names = ", ".join(sorted(path.name for path in missing))
        raise ConfigError(f"{index} names missing files: {names}")
    return [path for path in files if path in named]


def stamp_of(status: os.stat_result) -> Stamp:
    """Return numbers that change when a file or its content does."""
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_dev, status.st_ino, status.st_size, *times


class FingerprintCache:
    """Digests of weight files, remembered in one small JSON file.

    An entry is valid only for the same (device, inode, size, mtime_ns, ctime_ns). If the
    cache is missing, damaged or read-only, files are hashed again. Several processes may
    use one cache at once: what one writes another may lose, which costs hashing it again.

    Parameters
    ----------
    path : str, Path or None
        The file; its folder is created (private) on the first write. None caches
        nothing.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)

    @staticmethod
    def _name(status: os.stat_result) -> str:
        return ":".join(map(str, stamp_of(status)))

    def _entries(self) -> dict[str, str]:
        if self.path is None:
            return {}
        try:
            content = json.loads(self.path.read_bytes())
            files = content["xxh3-128"]
            return {
                name: digest
                for name, digest in files.items()
                if isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{32}", digest, re.ASCII)
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def put(self, status: os.stat_result, digest: str) -> None:
        """Cache the xxh3-128 hex digest of a file. Best effort: ignores I/O errors."""
        if self.path is None:
            return
        with suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            merged = self._entries()
            merged.pop(self._name(status), None)
            merged[self._name(status)] = digest
            newest = dict(list(merged.items())[-_CACHE_ENTRIES:])
            data = json.dumps({"xxh3-128": newest}, indent=0).encode()
            unique = f"{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
            temporary = self.path.with_name(f".{self.path.name}.{unique}.tmp")
            try:
                temporary.write_bytes(data)
                os.replace(temporary, self.path)
            except OSError:
                with suppress(OSError):
                    temporary.unlink()
                raise


def _hub_digest(path: Path) -> str | None:
    """Return the SHA-256 that the link of a hub snapshot names, None for other files."""
    try:
        target = Path(os.readlink(path))
    except OSError:
        return None
    if target.parent.name == "blobs" and _BLOB.fullmatch(target.name) and path.is_file():
        return target.name
    return None


def _check_cancelled(cancel: threading.Event) -> None:
    if cancel.is_set():
        raise FingerprintCancelledError("computing the weights' fingerprint was cancelled")


def is_settled(written_ns: int, now_ns: int) -> bool:
    """Whether a file's times distinguish its present version from every later one.

    A write within the clock's granularity does not change the times, so a file written just now
    cannot be distinguished from its next version.
    """
    return now_ns - written_ns > _SETTLED_NS


def _open_regular(path: Path) -> tuple[int, os.stat_result]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ConfigError(f"weight file {path} is not a regular file")
    return descriptor, status


def _hash_content(
    path: Path, buffer: memoryview, cancel: threading.Event
) -> tuple[os.stat_result, str, bool]:
    """Return status and xxh3-128 hex of a file's content, and whether it may be cached."""
    for _ in range(4):
        started = time.time_ns()
        descriptor, stat_before = _open_regular(path)
        try:
            state = xxhash.xxh3_128()
            total = 0
            while True:
                _check_cancelled(cancel)
                count = os.readv(descriptor, [buffer])
                if not count:
                    break
                total += count
                state.update(buffer[:count])
            after = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if total == stat_before.st_size and stamp_of(stat_before) == stamp_of(after):
            settled = is_settled(max(stat_before.st_mtime_ns, stat_before.st_ctime_ns), started)
            return stat_before, state.hexdigest(), settled
    raise TransientStorageError(
        f"weight file {path} keeps changing while it is read; wait until it is complete"
    )


def _hash_samples(path: Path) -> str:
    descriptor, status = _open_regular(path)
    try:
        size = status.st_size
        state = xxhash.xxh3_128(struct.pack("<Q", size))
        last = max(size - _SAMPLE_BYTES, 0)
        for number in range(_SAMPLES):
            state.update(os.pread(descriptor, _SAMPLE_BYTES, last * number // (_SAMPLES - 1)))
        return state.hexdigest()
    finally:
        os.close(descriptor)


def _hash_files(
    files: Sequence[Path],
    cache: FingerprintCache,
    cancel: threading.Event,
    on_thread_start: Callable[[], None] | None,
) -> dict[Path, str]:
    """Return the xxh3-128 hex of each file, from the cache or by hashing in parallel."""
    digests: dict[Path, str] = {}
    sizes: dict[Path, int] = {}
    entries = cache._entries()
    for path in dict.fromkeys(files):
        status = os.stat(path)
        digest = entries.get(cache._name(status))
        if digest is not None:
            digests[path] = digest
        else:
            sizes[path] = status.st_size
    if not sizes:
        return digests
    # Largest first, so that the threads finish at about the same time.
    todo = sorted(sizes, key=sizes.__getitem__)
    lock = threading.Lock()
    results: queue.SimpleQueue[tuple[Path, str | BaseException]]
    results = queue.SimpleQueue()
    stop = threading.Event()

    def work(prepare: Callable[[], None] | None = on_thread_start) -> None:
        if prepare is not None:
            prepare()
        buffer = memoryview(bytearray(_READ_BYTES))
        while True:
            with lock:
                if not todo or stop.is_set():
                    return
                path = todo.pop()
            try:
                status, digest, settled = _hash_content(path, buffer, stop)
                if settled:
                    with lock:
                        cache.put(status, digest)
            except BaseException as error:  # noqa: BLE001  passed on to the caller
                results.put((path, error))
                return
            results.put((path, digest))

    expected = len(todo)
    started = 0
    for number in range(min(_THREADS, expected)):
        thread = threading.Thread(target=work, name=f"kvshelf-fingerprint-{number}", daemon=True)
        started += try_to_start(thread)
    if not started:
        work(None)
    try:
        for _ in range(expected):
            while True:
                _check_cancelled(cancel)
                with suppress(queue.Empty):
                    path, result = results.get(timeout=0.05)
                    break
            if isinstance(result, BaseException):
                raise result
            digests[path] = result
    finally:
        stop.set()
    return digests


def _lines_digest(lines: Iterable[tuple[str, str]]) -> bytes:
    encoded = []
    for name, digest in lines:
        if "\n" in name:
            raise ConfigError(f"weight file {name!r}: a line break in its name is not allowed")
        encoded.append(f"{name} {digest}\n".encode("utf-8", "surrogateescape"))
    if not encoded:
        raise ConfigError("no weight files were given, so there is nothing to fingerprint")
    return hashlib.sha256(b"".join(sorted(encoded))).digest()


def _content_digest(
    files: Sequence[str | Path],
    root: Path | None,
    cache: FingerprintCache | None,
    cancel: threading.Event | None,
    on_thread_start: Callable[[], None] | None,
) -> bytes:
    paths = [Path(path) for path in files]
    digests = {path: f"sha256:{hub}" for path in paths if (hub := _hub_digest(path))}
    hashed = _hash_files(
        [path for path in paths if path not in digests],
        FingerprintCache(None) if cache is None else cache,
        threading.Event() if cancel is None else cancel,
        on_thread_start,
    )
    digests |= {path: f"xxh3-128:{digest}" for path, digest in hashed.items()}
    return _lines_digest((_name_below(root, path), digests[path]) for path in paths)


def _name_below(root: Path | None, path: Path) -> str:
    return path.name if root is None else path.relative_to(root).as_posix()


def weights_fingerprint(
    files: Sequence[str | Path],
    *,
    root: Path | None = None,
    cache: FingerprintCache | None = None,
    cancel: threading.Event | None = None,
    on_thread_start: Callable[[], None] | None = None,
) -> str:
    """Return the fingerprint of weight files by content, as the namespace holds it.

    Blocks until all files are hashed or found in the cache; call it on a background thread.

    Parameters
    ----------
    files : Sequence[str | Path]
        The files, as :func:`weight_files` lists them. Order does not matter.
    root : Path, optional
        The folder below which files are named by their path; without it by the last part.
    cache : FingerprintCache or None
        Caches the digests of files.
    cancel : threading.Event or None
        Setting it makes the call raise within 0.1 s, even if a read hangs.
    on_thread_start : Callable, optional
        Called first on each thread that reads and hashes. It must not lower their priority: they
        take the GIL for microseconds between reads, and a thread that is descheduled while it holds
        the GIL stops the engine. On busy processors the engine's longest measured stall was 2.6 s
        with SCHED_IDLE, 1 s with nice 19 and 0.2 s with nice 10.

    Returns
    -------
    str
        ``sha256:<64 hex>``.

    Raises
    ------
    FingerprintCancelledError
        If `cancel` was set first.
    ConfigError
        If no files are given, or one is not a regular file.
    TransientStorageError
        If a file keeps changing.
    OSError
        If a file cannot be read.
    """
    return "sha256:" + _content_digest(files, root, cache, cancel, on_thread_start).hex()


def sampled_fingerprint(files: Sequence[str | Path], *, root: Path | None = None) -> str:
    """Return a fingerprint from the size and 16 pieces of 64 KiB of each file.

    Takes milliseconds, but misses changes between the pieces: use it only where checkpoints
    are never edited in place.

    Parameters
    ----------
    files, root
        As for :func:`weights_fingerprint`.

    Returns
    -------
    str
        ``sampled:<64 hex>``.
    """

    def line(path: Path) -> tuple[str, str]:
        hub = _hub_digest(path)
        digest = f"sha256:{hub}" if hub else f"sampled:{_hash_samples(path)}"
        return _name_below(root, path), digest

    return "sampled:" + _lines_digest(map(line, map(Path, files))).hex()


def adapter_files(adapter_dir: str | Path) -> list[Path]:
    """Return the files that define a LoRA adapter.

    Raises
    ------
    ConfigError
        If the folder contains no adapter.
    """
    folder = Path(adapter_dir)
    config = folder / "adapter_config.json"
    names = [f"adapter_model.{kind}" for kind in ("safetensors", "bin", "pt")]
    weights = next((folder / name for name in names if (folder / name).is_file()), None)
    if weights is None or not config.is_file():
        raise ConfigError(
            f"{folder} is not a LoRA adapter: expected adapter_config.json and one of "
            + ", ".join(names)
        )
    return [config, weights]


def lora_digest(adapter_dir: str | Path, *, cache: FingerprintCache | None = None) -> bytes:
    """Return the digest of a LoRA adapter by content: 32 raw bytes.

    Covers ``adapter_config.json`` and the weights that vLLM loads: the first existing file of
    ``adapter_model.safetensors``, ``.bin``, ``.pt``.

    Raises
    ------
    ConfigError
        If the folder contains no adapter.
    TransientStorageError, OSError
        As for :func:`weights_fingerprint`.
    """
    return _content_digest(adapter_files(adapter_dir), None, cache, None, None)
