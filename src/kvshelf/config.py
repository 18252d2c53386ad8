"""Every option of kvshelf: what it means, how it is written, and where it is given.

Owns the model :class:`Config`, the rules by which its values are found, and how sizes, ages and
numbers are written.

Contracts
---------
* :func:`merge` puts three sources together before anything is validated. In order of precedence:
  the engine's ``kv_connector_extra_config``, ``KVSHELF_*`` environment variables, a YAML file.
  Mappings are merged key by key.
* Nothing is ignored: unknown keys, unknown ``KVSHELF_*`` variables, invalid values and
  contradicting options raise one :class:`ConfigError`, which names all of them and the
  source of each. The only exception are the variables that Kubernetes makes for a Service whose
  name begins with ``kvshelf``.
* A :class:`Config` is frozen. It is built once, at start, on the thread that builds the
  connector.
* Values of ``storage_options`` may be secrets: no message and no ``repr`` shows them.
* No torch, no vLLM. YAML is imported only to read a file.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic import ConfigDict as ModelOptions

from kvshelf.errors import ConfigError, size_text
from kvshelf.urls import cache_dir, directory_of, refuse_mistakes, shown_url, weights_name

ENV_PREFIX: Final = "KVSHELF_"

#: Environment variables that configure a process, not a shelf.
PROCESS_VARIABLES: Final[Mapping[str, str]] = {
    "KVSHELF_CONFIG": "Path of a YAML file with options.",
    "KVSHELF_OPS": (
        "Implementation of gather and scatter: `auto` (default), `cpp` (an error if the native"
        " library is missing), `cuda` (an error if the kernel cannot run on the GPU) or `torch`."
    ),
    "KVSHELF_CACHE_DIR": (
        "Folder for the files that kvshelf keeps for one user on one machine: cached weight"
        " fingerprints and the private shelf. Default: `$XDG_CACHE_HOME/kvshelf`, else"
        " `~/.cache/kvshelf`."
    ),
}

#: Key of ``kv_connector_extra_config`` that names the YAML file.
FILE_KEY: Final = "config_file"

#: Where options are given, for messages; the third source is a file, which has a name.
_EXTRA: Final = "kv_connector_extra_config"
_ENVIRONMENT: Final = "the environment"
_ARGUMENTS: Final = "the arguments of Config"
#: Longest path of a Unix socket on Linux (sockaddr_un), less the ending of the server's second one.
_SOCKET_BYTES: Final = 107 - len(".session")
#: Options that a node server decides for its engines.
_SERVER_OPTIONS = ("shared_storage_path", "storage_options", "disk_tier", "memory", "capacity")
#: Bytes of host memory for chunks where `memory` is not set and a model needs no more.
DEFAULT_MEMORY: Final = 1 << 30
LEAST_MEMORY: Final = 4096
#: A shorter age would delete chunks in use: uses are recorded about once a minute at most.
LEAST_MAX_AGE: Final = 120.0
_READS_AHEAD_FROM_PROBE_SECONDS: Final = 1e-3
#: Options that are mappings, and what they look like.
_MAPPINGS: Final = {
    "storage_options": '{"anon": true}',
    "disk_tier": '{"path": "/nvme/kv", "max_bytes": "200GiB"}',
    "capacity": '{"max_bytes": "2TiB", "max_age": "7d"}',
}
#: The option whose values may be secrets.
_SECRET: Final = "storage_options"  # noqa: S105
#: Keys of LMCache and of vLLM's own tiers, and what to set here instead.
_FOREIGN_KEYS: Final = {
    "remote_url": "the storage that engines share is shared_storage_path",
    "local_cpu": "memory for objects is memory",
    "max_local_cpu_size": "memory for objects is memory, such as 5GiB",
    "local_disk": 'a local disk is disk_tier: {"path": …, "max_bytes": …}',
    "max_local_disk_size": "the size of a local disk is disk_tier.max_bytes",
    "cpu_bytes_to_use": "memory for objects is memory, such as 20GiB",
    "spec_name": "it is of vLLM's OffloadingConnector: leave it out",
    "path": "the directory that engines share is shared_storage_path",
}
#: How sizes and ages are written, for messages.
SIZES: Final = "a size such as 500MB, 20GiB or 2TiB"
AGES: Final = "an age such as 90s, 30m, 12h, 7d or 2w"

_NUMBER: Final = r"[0-9]{1,18}(?:\.[0-9]{1,18})?"
_SIZE: Final = re.compile(rf"({_NUMBER}) ?(?:([kmgtp])(i?))?b", re.ASCII | re.IGNORECASE)
_AGE: Final = re.compile(rf"({_NUMBER}) ?([smhdw])", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")
#: Variables that Kubernetes makes for a Service whose name begins with kvshelf.
_SERVICE_VARIABLE: Final = re.compile(
    r"KVSHELF(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


def parse_size(text: str, least: int = 1) -> int:
    """Return the bytes that a text such as ``20GiB`` means; ``GB`` is a power of ten.

    Raises
    ------
    ValueError
        If it is no size, or less than `least` bytes.
    """
    if match := _SIZE.fullmatch(text):
        number, prefix, binary = match.groups()
        power = "kmgtp".index(prefix.lower()) + 1 if prefix else 0
        count = int(Decimal(number) * (1024 if binary else 1000) ** power)
        if count >= least:
            return count
    raise ValueError(f"expected {SIZES}{f', at least {least} bytes' if least > 1 else ''}")


def parse_age(text: str, least: float = 0.0) -> float:
    """Return the seconds that a text such as ``7d`` or ``90s`` means.

    Raises
    ------
    ValueError
        If it is no age, or less than `least` seconds.
    """
    if match := _AGE.fullmatch(text):
        seconds = float(match[1]) * _SECONDS[match[2]]
        if seconds >= least:
            return seconds
    raise ValueError(f"expected {AGES}{f', at least {least:g}s' if least else ''}")


def parse_number(text: str, least: float = 0.0) -> float:
    """Return a number that is written in digits, such as ``256`` or ``0.5``.

    Raises
    ------
    ValueError
        If it is none, or less than `least`.
    """
    if re.fullmatch(_NUMBER, text, re.ASCII) is not None and float(text) >= least:
        return float(text)
    more = f", at least {least:g}" if least else ""
    raise ValueError(f"expected a number such as 256 or 0.5{more}")


def _absolute(value: object) -> object:
    """Check a path or a URL; a path begins at the root, or with ``~``."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        return value
    if not value.strip():
        raise ValueError("is empty; give a directory or a URL, or leave the option out")
    refuse_mistakes(value)
    if _URL.match(value):
        return value
    path = os.path.expanduser(value)
    if not os.path.isabs(path):
        raise ValueError(
            "is relative to a working directory, which engines do not share; expected an absolute"
            " path, such as /mnt/kv"
        )
    return os.path.abspath(path)


def _directory(value: object) -> object:
    """Check the path of a directory on this machine."""
    path = _absolute(value)
    if isinstance(path, str) and _URL.match(path):
        raise ValueError("is a URL; expected a directory on this machine")
    return path


def _weights(value: str) -> str:
    """Check how weights are identified."""
    if value not in ("content", "sampled") and weights_name(value) is None:
        raise ValueError("expected content, sampled, or name: and a text, as name:my-model-v1")
    return value


def _socket(value: object) -> object:
    """Check where a node server listens; make its path absolute."""
    if not isinstance(value, str):
        return value
    scheme, _, path = value.partition("://")
    if scheme != "ipc" or not path.strip():
        raise ValueError(
            "is not the address of a node server; expected ipc:// and the path of its socket, such"
            " as ipc:///run/user/1000/kvshelf/node.sock"
        )
    path = os.path.abspath(os.path.expanduser(path))
    if (path_bytes := len(os.fsencode(path))) > _SOCKET_BYTES:
        raise ValueError(
            f"has a path of {path_bytes} bytes; the system allows {_SOCKET_BYTES} for a socket of a"
            " node server"
        )
    return f"ipc://{path}"


def _quantity(parse: Callable[[str, Any], float], least: float) -> BeforeValidator:
    """Check a text with a unit. Arguments of Config may also be a number of bytes or seconds."""

    def check(value: object, info: ValidationInfo) -> object:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and info.context is None and value >= least:  # type: ignore[operator]
            return value
        return parse(value if isinstance(value, str) else "", least)

    return BeforeValidator(check)


def _number(value: object) -> object:
    """Refuse texts and booleans that pydantic takes for a number, such as ``1_000`` and true."""
    return parse_number(str(value)) if isinstance(value, str | bool) else value


_Size: TypeAlias = Annotated[int, _quantity(parse_size, 1)]
_Age: TypeAlias = Annotated[float, _quantity(parse_age, LEAST_MAX_AGE)]


class CapacityConfig(BaseModel):
    """The option ``capacity``.

    Attributes
    ----------
    max_bytes : int or None
        Most bytes of all objects on the shelf, of all namespaces. Above it the chunks that were
        used longest ago are deleted. None: no bound but the free space of the storage.
    max_age : float or None
        Seconds after its last use at which a chunk is deleted. None: never.
    group_max_bytes : int or None
        Most bytes of each salt group of a namespace. None: no bound.
    """

    model_config = ModelOptions(frozen=True, extra="forbid", allow_inf_nan=False)

    max_bytes: _Size | None = None
    max_age: _Age | None = None
    group_max_bytes: _Size | None = None


class DiskTierConfig(BaseModel):
    """The option ``disk_tier``.

    Attributes
    ----------
    path : str
        A directory, absolute.
    max_bytes : int
        Largest total size of its objects, in bytes.
    """

    model_config = ModelOptions(frozen=True, extra="forbid")

    path: Annotated[str, BeforeValidator(_directory)]
    max_bytes: _Size


class Config(BaseModel):
    """All options of one connector.

    Use :meth:`load` to read all sources. The constructor uses only its arguments and the
    defaults, not the environment.

    Raises
    ------
    ConfigError
        As :meth:`load`.
    """

    # Unknown keys are told with their source, see _unknown_keys.
    model_config = ModelOptions(frozen=True, extra="ignore", allow_inf_nan=False)

    shared_storage_path: Annotated[str, BeforeValidator(_absolute)] | None = None
    """The shared store, called the *shelf*: a directory (local, NFS, any mounted filesystem) or a
    URL that fsspec supports, such as `s3://bucket/kv`. All engines name the same one. If it is not
    set, kvshelf logs a warning and uses a directory that only this user can enter: enough for a
    first try on one machine. Chained URLs (`a::b`) are not supported. See [Storage](storage.md)."""
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Arguments for the storage. For a URL they are passed to its client: credentials, endpoint,
    region. A directory has two. `create` (default `true`): with `false` an engine does not start
    without the directory, for instance one that is not mounted, and never makes it while it runs.
    `fsync` (default `false`): `true` flushes each object to disk before it is published. Loads
    verify what they read in either case. Sources are merged key by key, so secrets can stay in the
    environment (`KVSHELF_STORAGE_OPTIONS` is a JSON object) and the rest in a file."""
    disk_tier: DiskTierConfig | None = None
    """A directory on a local disk that keeps copies of the shelf's objects: `{"path": "/nvme/kv",
    "max_bytes": "200GiB"}`. Objects that are loaded from the shelf or stored on it are copied
    there, and later loads read the copies. Above `max_bytes`, the least recently used copies are
    deleted. Any number of engines on one machine may share it. See [Storage](storage.md)."""
    server: Annotated[str, BeforeValidator(_socket)] | None = None
    """The node server of this machine, as `kvshelf serve` shows it: `ipc://` and the path of its
    socket. Its engines share one memory tier and one set of connections to the storage. Shelf,
    bounds and tiers are then options of the server: `shared_storage_path`, `storage_options`,
    `capacity`, `disk_tier` and `memory` must not be set together with this option. While the server
    does not answer, the engine computes everything. See [Storage](storage.md)."""
    memory: Annotated[int, _quantity(parse_size, LEAST_MEMORY)] | None = None
    """Host memory of the engine on each machine for chunks: `20GiB`. The ranks of a machine have
    equal parts. Chunks are loaded and stored through it, and it keeps what was loaded from the
    shelf or stored on it: later loads read that in place. If so much is not free when the engine
    starts, it does not start; the engine takes the memory in the background, 1 GiB at a time. When
    it is full, the engine evicts chunks that were not used lately. At most half of it holds chunks
    that are being stored, and at most half chunks that were read ahead for requests that wait to be
    scheduled. If the option is not set, the engine takes what four steps need: at least `1GiB`, and
    beyond that at most a sixteenth of the machine's memory. It keeps nothing then but chunks that
    were read ahead, from remote storage such as S3 or NFS. See [Storage](storage.md)."""
    capacity: CapacityConfig = CapacityConfig()
    """Bounds of the shelf, all optional: `{"max_bytes": "2TiB", "max_age": "7d"}`. `max_bytes`
    bounds all objects on the shelf, of all models and engines together. Near it, engines delete the
    chunks that were used longest ago. If engines give several values, each deletes down to its own.
    `max_age` deletes a chunk that long after its last use: a number and `s`, `m`, `h`, `d` or `w`,
    at least `120s`. `group_max_bytes` bounds each salt group, with `group_by_salt` only.
    In any case stores leave 5 % of the storage free, at most 20 GiB, and 10 % of a filesystem in
    memory (tmpfs). When less than that is free, new chunks are dropped and counted; an engine
    without `max_bytes` deletes old chunks instead to make room. An engine with `read_only` deletes
    nothing. See [Keep it bounded](capacity.md)."""
    read_only: bool = False
    """Load from the shelf, never write to it. kvshelf detects a shelf that cannot be written (a
    read-only mount, missing permission) without this option. Set it for a shelf that is writable
    but must not be written."""
    chunk_size: Annotated[int, BeforeValidator(_number)] = Field(default=256, ge=1, le=1 << 16)
    """Tokens per chunk. A hit is a whole number of chunks, so prompts shorter than a chunk are
    never stored. Smaller chunks make hits slightly longer; larger ones need fewer objects and read
    faster. Engines share chunks only if they use the same size. For hybrid models it must be a
    multiple of the least common multiple of the block sizes of all KV cache groups. If it is not
    set, it is for them the smallest multiple of at least 256, or of at least 128 for models with
    states. See [How it works](how-it-works.md#hybrid-models)."""
    layout: Literal["auto", "canonical"] = "auto"
    """How tensors are stored if the engine permutes K and V inside a block, as vLLM's CPU backend
    does. `auto` stores such blocks unchanged if the chunk size is a multiple of the block size:
    fastest, but only engines with the same permutation and block size can load them. `canonical`
    stores `[2, tokens, heads, head_size]`, which every engine can load. Engines that do not permute
    always store canonical. See [How it works](how-it-works.md#layouts)."""
    weights: Annotated[str, AfterValidator(_weights)] = "content"
    """How the model's weights are identified. `content` reads the weight files once, in the
    background, and caches the result until a file changes. `sampled` reads parts of them: faster,
    but it can miss a change. Where vLLM loads weights from elsewhere (S3, tensorizer), both hash
    the parameters in memory instead of files. `name:` and a text, such as `name:my-model-v1`, names
    the weights: you promise that equal names mean equal weights. A name that is a path is rejected.
    See [What is shared](sharing.md#how-the-weights-are-identified)."""
    version: str | None = Field(default=None, min_length=1)
    """A string of your choice. Engines with different versions never load each other's chunks. Set
    it where engines differ in something that kvshelf [cannot see](sharing.md#your-duty)."""
    group_by_salt: bool = False
    """Store the chunks of each `cache_salt` in a folder of its own, so that one tenant's chunks can
    be measured, bounded and deleted. Requests with different salts never share chunks, with or
    without this option. See [Security and tenants](security.md)."""
    trust_uuids: bool = False
    """Share images, audio and video that clients name by a `uuid` of their own. Another client that
    sends the same `uuid` with another content would get wrong KV. So a request with one is loaded
    and stored only if it has a `cache_salt`. `true` serves all: you promise that all clients of all
    engines use a `uuid` for one content only. See [What is
    shared](sharing.md#images-audio-and-video)."""
    save_decode: bool = False
    """Also store chunks that are completed while the answer is generated. Useful for conversations,
    where the answer is part of the next prompt. Off for models whose tokens see only a window of
    the answer (R-SWA)."""
    admission: Literal["auto", "always"] = "auto"
    """Which hits are loaded. `auto`: a hit is loaded only if loading is expected to be faster than
    computing, by the times that the engine has measured, and a load that turns out slower is
    stopped. `always`: every hit is loaded. KV that another engine hands over is loaded in either
    case. See [How it works](how-it-works.md#admission)."""
    handover_wait_s: Annotated[float, BeforeValidator(_number)] = Field(default=30.0, ge=0)
    """How many seconds after its arrival a request may wait for KV that a producer has promised, or
    that a router only says is coming. What is missing then is computed. A request's params may
    shorten its own wait. See [Prefill and decode](disaggregation.md)."""

    if not TYPE_CHECKING:  # a type checker makes the constructor's arguments of the fields

        def __init__(self, **values: Any) -> None:
            self._set_options({_ARGUMENTS: values})

    @classmethod
    def load(
        cls,
        extra: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        file: str | None = None,
    ) -> Config:
        """Read all sources, check them and return the configuration.

        Parameters
        ----------
        extra : Mapping, optional
            The connector's ``kv_connector_extra_config``. Its key ``config_file`` names
            a YAML file and has precedence over the variable ``KVSHELF_CONFIG``.
        environ : Mapping, optional
            The environment; ``os.environ`` when absent.
        file : str, optional
            The YAML file that a command's ``--config`` names, in place of ``KVSHELF_CONFIG``.

        Returns
        -------
        Config

        Raises
        ------
        ConfigError
            If a key or a ``KVSHELF_*`` variable is unknown, a value is invalid, options
            contradict each other, or the file cannot be read. The message lists every
            problem.
        """
        environ = os.environ if environ is None else environ
        extra = dict(extra or {})
        path, named_by = extra.pop(FILE_KEY, None), f"{FILE_KEY} of {_EXTRA}"
        if path is None:
            path, named_by = file, "--config"
        if path is None:
            path, named_by = environ.get("KVSHELF_CONFIG") or None, "KVSHELF_CONFIG"
        file_options = {} if path is None else _read_file(path, named_by)
        variables, problems = _read_variables(environ)
        sources = {_EXTRA: extra, _ENVIRONMENT: variables, f"the file {path}": file_options}
        config = cls.__new__(cls)
        config._set_options(sources, problems, environ)
        return config

    def _set_options(
        self,
        sources: Mapping[str, Mapping[Any, Any]],
        problems: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Set all options from their sources, or raise one error that names every problem.

        The validators have the environment as their context; it is None for the constructor.
        """
        problems = [*_unknown_keys(sources), *problems]
        options = merge(*sources.values())
        try:
            self.__pydantic_validator__.validate_python(
                options, self_instance=self, context=environ
            )
        except ValidationError as error:
            problems += _wrong_values(error, sources)
        if problems:
            mark = " " if len(problems) == 1 else "\n  - "
            text = "".join(mark + problem for problem in problems)
            raise ConfigError(f"kvshelf's configuration cannot be used:{text}") from None

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Config:
        unset: tuple[object, ...] = (None, {}, CapacityConfig())
        forbidden = [name for name in _SERVER_OPTIONS if getattr(self, name) not in unset]
        if self.server is not None and forbidden:
            raise ValueError(
                f"server is {self.server}, and {' and '.join(forbidden)} "
                f"{'is' if len(forbidden) == 1 else 'are'} set too, but an engine with a node"
                " server has no shelf and no tiers of its own: give these options to"
                " `kvshelf serve`, or remove server"
            )
        shelf, tier = self.shared_storage_path, self.disk_tier
        if tier is not None and _overlap(shelf, tier.path, info.context):
            address = "not set, so the shelf is this user's private one" if shelf is None else shelf
            raise ValueError(
                f"disk_tier.path is {tier.path} and shared_storage_path {address}: one is inside "
                "the other; give the disk tier a directory of its own"
            )
        if self.capacity.group_max_bytes is not None and not self.group_by_salt:
            raise ValueError(
                "capacity.group_max_bytes is set and group_by_salt is not: without it the chunks of"
                " all salts lie in one group; set group_by_salt to true, or remove group_max_bytes"
            )
        if self.read_only and self.save_decode:
            raise ValueError(
                "read_only and save_decode are both true, but a read-only shelf stores "
                "nothing: remove one of them"
            )
        return self

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Leave the password of a URL out."""
        for name, value in super().__repr_args__():
            is_address = name == "shared_storage_path" and value is not None
            yield name, shown_url(value) if is_address else value

    @property
    def memory_bytes(self) -> int:
        """Bytes of `memory`; 0 if it is not set."""
        return int(self.memory or 0)

    @property
    def bounds_told(self) -> str:
        """What bounds memory and shelf, for the log."""
        capacity = self.capacity
        bounds = {
            "memory": self.memory and size_text(self.memory),
            "max_bytes": capacity.max_bytes and size_text(capacity.max_bytes),
            "max_age": capacity.max_age and f"{capacity.max_age:.0f}s",
        }
        return ", ".join(f"{name} {text}" for name, text in bounds.items() if text) or "no bounds"

    def reads_ahead(self, probe_seconds: float) -> bool:
        """Whether chunks are read ahead from storage with this probe latency.

        With a node server nothing is read ahead here: the memory is the server's.
        """
        if self.server is not None:
            return False
        return self.memory_bytes > 0 or probe_seconds >= _READS_AHEAD_FROM_PROBE_SECONDS


def merge(*sources: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the options of several sources. The first source that gives an option counts.

    Mappings are merged key by key, at all depths.
    """
    merged: dict[Any, Any] = {}
    for options in sources:
        for name, value in options.items():
            if name not in merged:
                merged[name] = value
            elif isinstance(merged[name], Mapping) and isinstance(value, Mapping):
                merged[name] = merge(merged[name], value)
    return merged


def variable_of(option: str) -> str:
    """Return the name of an option's environment variable."""
    return ENV_PREFIX + option.upper()


def default_shelf_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return the private shelf of this user, created on first use.

    Parameters
    ----------
    environ : Mapping, optional
        The environment; ``os.environ`` when absent.

    Returns
    -------
    Path
        An existing directory that this user owns and no other user can write.

    Raises
    ------
    ConfigError
        If the directory cannot be created, is a link, belongs to another user or can be
        written by others.
    """
    folder = cache_dir(environ)
    advice = "set shared_storage_path to the directory you want"
    for path in (folder, folder / "shelf"):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            status = path.lstat()
        except OSError as error:
            raise ConfigError(
                f"cannot create the private shelf {path}: {error}; {advice}"
            ) from error
        if not stat.S_ISDIR(status.st_mode):
            trouble = "is a link or a file, not a directory"
        elif status.st_uid != os.geteuid():
            trouble = f"belongs to user {status.st_uid}, not to user {os.geteuid()}"
        elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            trouble = f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
        else:
            continue
        raise ConfigError(
            f"the private shelf {path} {trouble}; expected a directory that only you can "
            f"write: remove it or correct it (chmod 700), or {advice}"
        )
    return folder / "shelf"


def _overlap(shelf: str | None, folder: str, environ: Mapping[str, str] | None) -> bool:
    """Whether a shelf is a directory that contains `folder` or lies inside it.

    Compares names only, because no storage is touched here. Links are checked when both are opened.
    """
    try:
        path = str(cache_dir(environ) / "shelf") if shelf is None else directory_of(shelf)
    except ConfigError:
        # Opening the shelf will report this error.
        return False
    if path is None:
        return False
    path = os.path.abspath(os.path.expanduser(path))
    return os.path.commonpath((path, folder)) in (path, folder)


def _read_file(path: object, named_by: str) -> dict[Any, Any]:
    """Return the options of a YAML file, in which each key is given once, with a value."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value]
            for key, value in node.value:
                if names.count(key.value) > 1:
                    raise yaml.MarkedYAMLError(problem=f"the key {key.value} is given twice")
                if value.value == "" and value.tag.endswith(":null"):
                    raise yaml.MarkedYAMLError(problem=f"the key {key.value} has no value")
            return super().construct_mapping(node, deep)

    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{named_by} is {path!r}; expected the path of a YAML file")
    name = f"the file {shown_url(path)} (from {named_by})"
    try:
        with open(path, encoding="utf-8") as file:
            options = yaml.load(file, Loader)  # noqa: S506 - it is a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read {name}: {reason}") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{name} cannot be used as YAML: {reason}") from error
    if not isinstance(options, dict):
        content = "is empty" if options is None else f"holds a {type(options).__name__}"
        raise ConfigError(
            f"{name} {content}; expected a mapping of options, one `key: value` on each line"
        )
    return options


def _read_variables(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options that variables give, and a problem for each unusable variable."""
    process_names = [variable.removeprefix(ENV_PREFIX).lower() for variable in PROCESS_VARIABLES]
    options: dict[str, Any] = {}
    problems = []
    for variable, text in sorted(environ.items()):
        if not variable.upper().startswith(ENV_PREFIX) or _SERVICE_VARIABLE.fullmatch(variable):
            continue
        name = variable[len(ENV_PREFIX) :].lower()
        if name not in Config.model_fields and name not in process_names:
            names = [*process_names, *Config.model_fields]
            remedy = _FOREIGN_KEYS.get(name) or _suggest(name, names, variable_of)
            problems.append(f"unknown variable {variable} in {_ENVIRONMENT}; {remedy}")
        elif not text:
            problems.append(f"variable {variable} in {_ENVIRONMENT} is empty; unset or set it")
        elif name in _MAPPINGS:
            try:
                options[name] = json.loads(text)
            except ValueError:
                problems.append(
                    f"variable {variable} in {_ENVIRONMENT} is not JSON; expected an object such as"
                    f" {_MAPPINGS[name]}"
                )
        elif name in Config.model_fields:
            options[name] = text
    return options, problems


def _suggest(name: str, names: list[str], shown: Callable[[str], str] = str) -> str:
    """Return which of these names was meant, or all; `shown` writes a name as the user does."""
    if name == "shelf":
        name = "shared_storage_path"
    if similar := difflib.get_close_matches(name, names, n=1, cutoff=0.7):
        return f"did you mean {shown(similar[0])}?"
    return f"known: {', '.join(map(shown, sorted(names)))}"


def _unknown_keys(sources: Mapping[str, Mapping[Any, Any]]) -> list[str]:
    """Return a problem for each key that is no option."""
    problems = []
    for source, options in sources.items():
        names = [*Config.model_fields, *([FILE_KEY] if source == _EXTRA else [])]
        for key in options:
            if key not in names:
                name = str(key).removeprefix("lmcache.")
                remedy = _FOREIGN_KEYS.get(name) or _suggest(name, names)
                problems.append(f"unknown key {key!r} in {source}; {remedy}")
    return problems


def _wrong_values(
    error: ValidationError, sources: Mapping[str, Mapping[Any, Any]]
) -> Iterable[str]:
    """Return a problem for each value that cannot be used, and for each contradiction."""
    details = error.errors(include_url=False)
    misspelt = {detail["loc"][0] for detail in details if detail["type"] == "extra_forbidden"}
    problems = []
    for detail in details:
        kind, location, value = detail["type"], detail["loc"], detail["input"]
        reason = detail["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        if not location:
            problems.append(reason)
            continue
        option, *keys = map(str, location)
        if kind == "missing" and option in misspelt:
            # The misspelt key is named, and not the key that is missing for it.
            continue
        if kind in ("missing", "dict_type", "model_type"):
            reason = f"expected a mapping such as {_MAPPINGS[option]}"
        if kind == "extra_forbidden":
            model = CapacityConfig if option == "capacity" else DiskTierConfig
            reason = f"no such key; {_suggest(keys[-1], [*model.model_fields])}"
        source = _source_of(location, sources)
        name = f"variable {variable_of(option)}" if source == _ENVIRONMENT else option
        if keys and option != _SECRET:
            name = f"{'.'.join(keys)} of {name}"
        shown = repr(shown_url(value) if isinstance(value, str) else value)
        problem = f"the value {shown} cannot be used: {reason}"
        if option == _SECRET:
            problem = f"the value cannot be used: {reason}"
        elif reason.startswith("expected"):
            problem = f"found {shown}; {reason}"
        problems.append(f"{name} in {source}: {problem}")
    return dict.fromkeys(problems)


def _source_of(location: Sequence[object], sources: Mapping[str, Mapping[Any, Any]]) -> str:
    """Return which source gives a value, or the mapping in which the value is missing."""

    def depth(source: str) -> int:
        options: Any = sources[source]
        for count, key in enumerate(location):
            if not isinstance(options, Mapping) or key not in options:
                return count
            options = options[key]
        return len(location)

    return max(sources, key=depth)
