"""Every option of kvshelf, in one place.

Owns the model :class:`Config`, the rules by which its values are found, and the text of
the page ``docs/configuration.md``.

Contracts
---------
* Three sources, the first that sets an option wins: the engine's
  ``kv_connector_extra_config``, ``KVSHELF_*`` environment variables, a YAML file.
* Nothing is ignored: an unknown key, an unknown ``KVSHELF_*`` variable, a value that
  cannot be used and options that contradict each other are one :class:`ConfigError`,
  which names all of them and where each came from.
* A :class:`Config` is frozen and is built once, at start, on the thread that builds the
  connector.
* Values of ``storage_options`` may be secrets: they appear in no message and no ``repr``.
* Imports neither torch nor vLLM.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import types
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ByteSize, Field, ValidationError, field_validator, model_validator
from pydantic import ConfigDict as ModelOptions
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from kvshelf.errors import ConfigError
from kvshelf.urls import directory_of, shown_url

ENV_PREFIX: Final = "KVSHELF_"

#: Environment variables that steer a process and are no options of a shelf.
PROCESS_VARIABLES: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        "KVSHELF_CONFIG": "Path of a YAML file with options.",
        "KVSHELF_OPS": (
            "Which gather and scatter to use: `auto` (default), `cpp` (fail where the native "
            "library is missing), `cuda` (fail also where its kernels do not serve the GPU) or "
            "`torch`."
        ),
        "KVSHELF_CACHE_DIR": (
            "Folder for what kvshelf keeps for one user on one machine: remembered weight "
            "fingerprints and the private shelf. Default: `$XDG_CACHE_HOME/kvshelf`, else "
            "`~/.cache/kvshelf`."
        ),
    }
)

#: Key of ``kv_connector_extra_config`` that names the YAML file.
FILE_KEY: Final = "config_file"

_EXTRA: Final = "kv_connector_extra_config"
_FAR_PREFETCH_BYTES: Final = 256 << 20
_FAR_PROBE_SECONDS: Final = 1e-3
_SECRET_FIELDS: Final = frozenset({"storage_options"})
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")
_SERVICE_LINK = re.compile(r"KVSHELF_(\w+_)?(SERVICE_(HOST|PORT)\w*|PORT(_\d+_\w+)?)")


@dataclass(frozen=True, slots=True)
class _Sources:
    """What :meth:`Config.load` found besides the engine's own configuration."""

    environ: Mapping[str, str]
    file: Mapping[str, Any]


class DiskTierConfig(BaseModel):
    """The option ``disk_tier``.

    Attributes
    ----------
    path : str
        A directory, absolute.
    max_bytes : ByteSize
        Most bytes of all objects there.
    """

    model_config = ModelOptions(frozen=True, extra="forbid")

    path: str
    max_bytes: Annotated[ByteSize, Field(gt=0)]

    @field_validator("path", mode="before")
    @classmethod
    def _place(cls, value: object) -> object:
        place = _absolute(value)
        if isinstance(place, str) and _URL.match(place):
            raise ValueError("is a URL; a disk tier is a directory on this machine")
        return place

    @field_validator("max_bytes", mode="before")
    @classmethod
    def _count(cls, value: object) -> object:
        return _no_boolean(value)


def _absolute(value: object) -> object:
    """Make a path absolute, and leave a URL as it is."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        return value
    if not value.strip():
        raise ValueError("is empty; give a directory or a URL, or leave the option out")
    return value if _URL.match(value) else os.path.abspath(os.path.expanduser(value))


def _overlap(shelf: str | None, folder: str) -> bool:
    """Whether a shelf is a directory that holds a folder, or lies in it.

    By their names only, since no storage is touched here: links are left to those who open both.
    """
    if shelf is None:
        sources = _sources.get()
        place: str | None = str(cache_dir(None if sources is None else sources.environ) / "shelf")
    else:
        try:
            place = directory_of(shelf)
        except ConfigError:
            # It cannot be opened, and that will be said.
            return False
    if place is None:
        return False
    place = os.path.abspath(os.path.expanduser(place))
    return os.path.commonpath((place, folder)) in (place, folder)


def _no_boolean(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("is a boolean; expected a number")
    return value


_sources: ContextVar[_Sources | None] = ContextVar("kvshelf_config_sources", default=None)


class Config(BaseSettings):
    """All options of one connector.

    Use :meth:`load` to read all sources. Calling the class itself takes the given values
    and defaults only, whatever the environment holds.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        allow_inf_nan=False,
    )

    shared_storage_path: str | None = Field(
        default=None,
        description=(
            "Where the shelf is: a directory (local, NFS, any mounted filesystem) or any URL "
            "that fsspec understands, such as `s3://bucket/kv` (but no chained ones, `a::b`). "
            "All engines that are to share KV name the same place. When it is absent kvshelf uses "
            "a directory that only this user can enter, and says so in a warning: enough to try "
            "things on one machine."
        ),
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description=(
            "Arguments for the storage. For a URL they go to its fsspec filesystem: "
            "credentials, endpoint, region. A directory knows two: `create` (`false` refuses "
            "to work when the directory is missing, for instance because it is not mounted; "
            "default `true`) and `fsync` (flush each object to the disk before it is "
            "announced; default `false`, because loads verify what they read). Sources are "
            "merged key by key, so that secrets can stay in the environment "
            "(`KVSHELF_STORAGE_OPTIONS` is a JSON object) and the rest in a file."
        ),
    )
    disk_tier: DiskTierConfig | None = Field(
        default=None,
        description=(
            "A directory on a disk of this machine that keeps copies of a shelf's objects near: "
            '`{"path": "/nvme/kv", "max_bytes": "200GiB"}`. What is loaded from the shelf and '
            "what is stored on it is copied there, and from then on loaded from there. Those used "
            "longest ago go when there are more than `max_bytes`. Any number of engines on one "
            "machine may share it. See [Storage](storage.md#disk-tier)."
        ),
    )
    read_only: bool = Field(
        default=False,
        description=(
            "Load from the shelf, never write to it. A shelf that cannot be written (a "
            "read-only mount, missing permission) is noticed by itself; this option is for "
            "one that could be."
        ),
    )
    chunk_size: int = Field(
        default=256,
        ge=1,
        description=(
            "Tokens in a chunk. A hit is a whole number of chunks: smaller chunks find a "
            "little more, larger ones cost fewer objects and read faster. Engines share "
            "chunks only when it is the same on all of them. The native layout needs a "
            "multiple of the engine's block size; others are stored in the canonical layout."
        ),
    )
    shards: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Objects in which one chunk is stored, each with its share of the KV heads. When "
            "it is absent kvshelf takes the largest divisor of the model's KV heads up to 8, "
            "a choice that depends on the model only. If it is set, set it alike on all engines."
        ),
    )
    layout: Literal["auto", "native", "canonical"] = Field(
        default="auto",
        description=(
            "How K and V lie in the stored tensors where the engine permutes them inside a "
            "block, as vLLM's CPU backend does. `native` stores blocks as they are: fastest, "
            "and shared only by engines with the same permutation and block size. `canonical` "
            "stores `[2, tokens, heads, head_size]`, which every engine can load. `auto` is "
            "native where the chunk size is a multiple of the block size, else canonical. "
            "Elsewhere chunks are canonical, and `native` is refused."
        ),
    )
    weights: str = Field(
        default="content",
        min_length=1,
        description=(
            "How the model's weights are told apart. `content` reads the weight files once, in "
            "the background, and remembers the result until a file changes. `sampled` reads "
            "parts of them: faster, and able to miss a change. Any other string is taken as "
            "the name of the weights: you promise that equal names mean equal weights."
        ),
    )
    version: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "A string of yours that separates what would otherwise be shared: engines with "
            "different versions never load each other's chunks."
        ),
    )
    group_by_salt: bool = Field(
        default=False,
        description=(
            "Put the chunks of each `cache_salt` into a folder of its own, so that one "
            "tenant's chunks can be measured and deleted. Requests with different salts never "
            "share chunks, with or without this option."
        ),
    )
    save_decode: bool = Field(
        default=False,
        description=(
            "Also store chunks that are completed while the answer is generated. Worth it for "
            "conversations, where the answer is part of the next prompt."
        ),
    )
    check_finite: bool = Field(
        default=False,
        description=(
            "Do not store KV that holds NaN or infinity: it is counted and logged instead. The "
            "check runs in the background. KV whose layout kvshelf does not know is not checked."
        ),
    )
    staging_bytes: Annotated[ByteSize, Field(gt=0)] = Field(
        default=ByteSize(1 << 30),
        description=(
            "Host memory for chunks on their way between the KV cache and the shelf: a number "
            "of bytes or a size such as `512MiB`. When it is full, further stores are dropped "
            "and counted; the engine never waits for it."
        ),
    )
    prefetch_bytes: Annotated[ByteSize, Field(ge=0)] | None = Field(
        default=None,
        description=(
            "Host memory of each worker for objects that are read while their requests still "
            "wait for their turn: a number of bytes or a size such as `1GiB`; `0` turns that "
            "off. It is taken when it is needed, beside `staging_bytes`. When it is absent: "
            "`256MiB` where a probe of the storage takes 1 ms or more, as on S3; none where it is "
            "quicker, as on local disks and near mounts."
        ),
    )
    io_threads: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description=(
            "Threads that read objects in each worker; where it is set, half as many write them. "
            "When it is absent the storage decides: 2 for a local disk, where they compete with "
            "the model for cores; up to 16 for one behind a network, where they wait. Beside a "
            "GPU, where most cores are idle, at least up to 8 for any storage."
        ),
    )
    lookup_budget_ms: float = Field(
        default=0.2,
        ge=0,
        description=(
            "Milliseconds of a scheduler step that a look-up may use before it goes on in the "
            "background."
        ),
    )
    lookup_wait_s: float = Field(
        default=1.0,
        ge=0,
        description=(
            "Seconds that a request waits at most for its look-up. After that it is computed "
            "as if nothing had been found."
        ),
    )
    identity_wait_s: float = Field(
        default=2.0,
        ge=0,
        description=(
            "Seconds that the first requests of a fresh engine wait at most until it is known "
            "which weights and which layout it has. After that they are computed without the "
            "shelf."
        ),
    )
    probe_deadline_s: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Seconds that the storage may take to say which of a batch of objects exist. A call "
            "that takes longer is not waited for. When it is absent the kind of storage decides: "
            "1 for a directory, 5 for a remote URL."
        ),
    )
    read_deadline_s: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Seconds that the storage may take to deliver an object, beyond what its bytes take "
            "at `deadline_bandwidth`. An object that comes later is computed instead. When it is "
            "absent: 5 for a directory, 15 for a remote URL."
        ),
    )
    write_deadline_s: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Seconds that the storage may take to accept an object, beyond what its bytes take. "
            "A store that takes longer is not waited for. When it is absent: 5 for a directory, "
            "15 for a remote URL."
        ),
    )
    deadline_bandwidth: Annotated[ByteSize, Field(gt=0)] | None = Field(
        default=None,
        description=(
            "The slowest speed, in bytes a second, at which objects may still arrive and be "
            "written. When it is absent: 50 MB a second."
        ),
    )
    shutdown_drain_s: float = Field(
        default=4.0,
        ge=0,
        description=(
            "Seconds that an engine which shuts down may spend on stores still under way. What "
            "is left then is dropped, and the log says how much. vLLM ends its workers after "
            "5 seconds (`VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS`)."
        ),
    )

    @field_validator("disk_tier", mode="before")
    @classmethod
    def _tier(cls, value: object) -> object:
        if value is None or isinstance(value, Mapping | DiskTierConfig):
            return value
        raise ValueError('is not a mapping; expected {"path": …, "max_bytes": …}, as JSON')

    @field_validator("shared_storage_path", mode="before")
    @classmethod
    def _place(cls, value: object) -> object:
        return _absolute(value)

    @property
    def deadlines(self) -> dict[str, float]:
        """The deadlines that are set, by the names of :class:`kvshelf.backends.Deadlines`."""
        given = {
            "probe": self.probe_deadline_s,
            "read": self.read_deadline_s,
            "write": self.write_deadline_s,
            "bytes_per_second": self.deadline_bandwidth,
        }
        return {name: float(value) for name, value in given.items() if value is not None}

    def prefetch_budget(self, probe_seconds: float) -> int:
        """Bytes for prefetching from a storage whose probes take so long."""
        if self.prefetch_bytes is not None:
            return int(self.prefetch_bytes)
        return _FAR_PREFETCH_BYTES if probe_seconds >= _FAR_PROBE_SECONDS else 0

    @field_validator(
        "chunk_size",
        "shards",
        "staging_bytes",
        "prefetch_bytes",
        "io_threads",
        "deadline_bandwidth",
        mode="before",
    )
    @classmethod
    def _count(cls, value: object) -> object:
        return _no_boolean(value)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        shelf, tier = self.shared_storage_path, self.disk_tier
        if tier is not None and _overlap(shelf, tier.path):
            where = "not set, so that the shelf is this user's own" if shelf is None else shelf
            raise ValueError(
                f"disk_tier.path is {tier.path} and shared_storage_path {where}: one is inside "
                "the other, but a disk tier is a directory of its own"
            )
        if self.read_only and self.save_decode:
            raise ValueError(
                "read_only and save_decode are both true, but a read-only shelf stores "
                "nothing: remove one of them"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources in order of precedence (called by pydantic-settings)."""
        found = _sources.get()
        if found is None:
            return (init_settings,)
        environment = EnvSettingsSource(settings_cls)
        environment.env_vars = {k.lower(): v for k, v in found.environ.items() if v}
        return (
            init_settings,
            environment,
            InitSettingsSource(settings_cls, init_kwargs=dict(found.file)),
        )

    @classmethod
    def load(
        cls,
        extra: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Config:
        """Read all sources, check them and return the configuration.

        Parameters
        ----------
        extra : Mapping, optional
            The connector's ``kv_connector_extra_config``. Its key ``config_file`` names
            a YAML file and wins over the variable ``KVSHELF_CONFIG``.
        environ : Mapping, optional
            The environment; ``os.environ`` when absent.

        Returns
        -------
        Config

        Raises
        ------
        ConfigError
            If a key or a ``KVSHELF_*`` variable is unknown, a value cannot be used,
            options contradict each other, or the file cannot be read. The message lists
            every trouble found.
        """
        environ = os.environ if environ is None else environ
        given = dict(extra or {})
        path = given.pop(FILE_KEY, None)
        named_by = f"{FILE_KEY} of {_EXTRA}"
        if path is None:
            path, named_by = environ.get("KVSHELF_CONFIG") or None, "KVSHELF_CONFIG"
        file = {} if path is None else _read_file(path, named_by)
        file_source = f"the file {path}"

        problems = [
            *_unknown_keys(given, _EXTRA, {FILE_KEY}),
            *_unknown_variables(environ),
            *_unknown_keys(file, file_source, set()),
        ]
        if problems:
            raise _error(problems)

        token = _sources.set(_Sources(environ, file))
        try:
            return cls(**given)
        except ValidationError as error:
            raise _error(_explain(error, given, environ, file_source)) from None
        except SettingsError:
            # The cause, left out here, holds the variable's whole value.
            raise _error(
                [
                    f"variable {_variable('storage_options')} in the environment is not JSON; "
                    'expected an object such as {"anon": true}'
                ]
            ) from None
        finally:
            _sources.reset(token)


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for what kvshelf keeps for this user on this machine.

    Parameters
    ----------
    environ : Mapping, optional
        The environment; ``os.environ`` when absent.

    Returns
    -------
    Path
        ``KVSHELF_CACHE_DIR``, else ``$XDG_CACHE_HOME/kvshelf``, else
        ``~/.cache/kvshelf``. Not created.
    """
    environ = os.environ if environ is None else environ
    if own := environ.get("KVSHELF_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    # The XDG specification says that a relative path is to be ignored.
    if (base := environ.get("XDG_CACHE_HOME")) and os.path.isabs(base):
        return Path(base) / "kvshelf"
    return Path("~/.cache/kvshelf").expanduser()


def default_shelf_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return the private shelf of this user, made on first use.

    Parameters
    ----------
    environ : Mapping, optional
        The environment; ``os.environ`` when absent.

    Returns
    -------
    Path
        An existing directory that this user owns and nobody else can write.

    Raises
    ------
    ConfigError
        If the directory cannot be made, or what stands there is a link, belongs to
        somebody else or can be written by others.
    """
    folder = cache_dir(environ)
    advice = "set shared_storage_path to the directory you want"
    for path in (folder, folder / "shelf"):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            found = path.lstat()
        except OSError as error:
            raise ConfigError(f"cannot make the private shelf {path}: {error}; {advice}") from error
        if not stat.S_ISDIR(found.st_mode):
            trouble = "is not a directory of its own but a link or a file"
        elif found.st_uid != os.geteuid():
            trouble = f"belongs to user {found.st_uid}, not to user {os.geteuid()}"
        elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            trouble = f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
        else:
            continue
        raise ConfigError(
            f"the private shelf {path} {trouble}; expected a directory that only you can "
            f"write: remove it or mend it (chmod 700), or {advice}"
        )
    return folder / "shelf"


def _read_file(path: object, named_by: str) -> dict[str, Any]:
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{named_by} is {path!r}; expected the path of a YAML file")
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the file {path} (from {named_by}): {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the file {path} (from {named_by}) is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"the file {path} (from {named_by}) holds a {type(content).__name__}; expected "
            "a mapping of options, one `key: value` on each line"
        )
    return content


def _error(problems: list[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(f"kvshelf's configuration cannot be used: {problems[0]}")
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return ConfigError(f"kvshelf's configuration cannot be used:{lines}")


def _suggest(word: str, candidates: list[str]) -> str:
    near = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(candidates))}"


def _unknown_keys(values: Mapping[Any, Any], source: str, also: set[str]) -> list[str]:
    known = [*Config.model_fields, *also]
    return [
        f"unknown key {key!r} in {source}; {_suggest(str(key), known)}"
        for key in values
        if key not in known
    ]


def _variable(field: str) -> str:
    return ENV_PREFIX + field.upper()


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    known = [*map(_variable, Config.model_fields), *PROCESS_VARIABLES]
    problems = []
    for name in sorted(environ):
        if not name.upper().startswith(ENV_PREFIX) or name.upper() in known:
            continue
        if _SERVICE_LINK.fullmatch(name):
            hint = (
                "it looks like one that Kubernetes sets for a Service named kvshelf: set "
                "enableServiceLinks: false in the pod, or give the Service another name"
            )
        else:
            hint = _suggest(name.upper(), known)
        problems.append(f"unknown variable {name} in the environment; {hint}")
    return problems


def _explain(
    error: ValidationError,
    extra: Mapping[str, Any],
    environ: Mapping[str, str],
    file_source: str,
) -> list[str]:
    variables = {name.upper() for name, value in environ.items() if value}
    problems: dict[str, str] = {}
    for detail in error.errors():
        cause = detail.get("ctx", {}).get("error")
        reason = str(cause) if cause is not None else detail["msg"]
        if not detail["loc"]:
            problems[""] = reason
            continue
        field = str(detail["loc"][0])
        if field not in _SECRET_FIELDS and len(detail["loc"]) > 1:
            reason = f"{'.'.join(map(str, detail['loc'][1:]))}: {reason}"
        if field in extra:
            where = f"{field} in {_EXTRA}"
        elif _variable(field) in variables:
            where = f"variable {_variable(field)} in the environment"
        else:
            where = f"{field} in {file_source}"
        value = detail["input"]
        value = shown_url(value) if isinstance(value, str) else value
        shown = "" if field in _SECRET_FIELDS else f" {value!r}"
        problems.setdefault(field, f"{where}: the value{shown} cannot be used: {reason}")
    return list(problems.values())


def _type_text(annotation: Any) -> str:
    """Name a field's type for readers of the documentation."""
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_text(a) for a in arguments if a is not types.NoneType)
    if origin is Annotated:
        return _type_text(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    names = {str: "string", bool: "boolean", int: "integer", float: "number", ByteSize: "size"}
    return names.get(origin or annotation, "mapping")


def _default_text(default: object) -> str:
    if default is None:
        return "none"
    if isinstance(default, ByteSize):
        return f"`{default.human_readable(separator='')}`".replace(".0", "")
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, dict):
        return "`{}`"
    return f"`{default}`"


_PAGE_HEAD = """\
<!-- Generated from src/kvshelf/config.py by `make docs`; do not edit. -->
# Configuration

Everything has a default except the place of the shelf, and even without that kvshelf starts,
with a private directory and a warning. Most set-ups need one line:

```json
{"shared_storage_path": "/mnt/kv"}
```

## Where options come from

Each option is looked for in three places; the first that has it wins.

1. `kv_connector_extra_config` of vLLM's `--kv-transfer-config`:

    ```bash
    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "SharedStorageConnector",
      "kv_role": "kv_both",
      "kv_connector_extra_config": {"shared_storage_path": "/mnt/kv", "chunk_size": 512}}'
    ```

2. The environment: the option's name in capitals after `KVSHELF_`, as in
   `KVSHELF_CHUNK_SIZE=512`. An empty variable counts as absent.
3. A YAML file, named by the key `config_file` in `kv_connector_extra_config` or by the variable
   `KVSHELF_CONFIG`:

    ```yaml
    shared_storage_path: /mnt/kv
    chunk_size: 512
    staging_bytes: 2GiB
    ```

Nothing is ignored. A misspelt key or variable, a value that cannot be used and options that
contradict each other stop the engine at start, with a message that names each of them, where it
came from and what was probably meant.

## All options

| option | type | default |
|---|---|---|
"""


def render_page() -> str:
    """Return the text of ``docs/configuration.md``."""
    rows, sections = [], []
    for name, field in Config.model_fields.items():
        kind = _type_text(field.annotation)
        default = _default_text(field.get_default(call_default_factory=True))
        rows.append(f"| [`{name}`](#{name}) | {kind} | {default} |\n")
        sections.append(
            f"\n### `{name}` {{ #{name} }}\n\n"
            f"{field.description}\n\n"
            f"Variable: `{_variable(name)}`. Default: {default}.\n"
        )
    processes = "".join(f"| `{name}` | {text} |\n" for name, text in PROCESS_VARIABLES.items())
    return (
        _PAGE_HEAD
        + "".join(rows)
        + "".join(sections)
        + "\n## Variables of a process\n\n"
        + "These are no options of a shelf and exist only as environment variables.\n\n"
        + "| variable | meaning |\n|---|---|\n"
        + processes
    )


if __name__ == "__main__":
    print(render_page(), end="")
