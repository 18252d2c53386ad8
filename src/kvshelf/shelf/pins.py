"""Pins: what no keeper and no ``kvshelf gc`` deletes.

Owns the files ``.kvshelf/pins/<name>.json`` at the root of a shelf: their form, which is part of
the format (``docs/format.md``), how they are read, written and removed, and what they cover.

Contracts
---------
* A pin protects chunks from deletions that bound a shelf. It does not lift a bound: chunks that are
  pinned count against ``max_bytes`` like all others.
* A damaged or expired pin pins nothing, and does not stop a sweep. One that may not be read, or
  that a later version wrote, pins all of the namespace and group that can be read in it, or else of
  the shelf. A storage that does not answer is an error: without the pins nothing may be deleted.
* What is read is bounded: 1 MiB for each pin, 4096 pins, 64 MiB for all. More of them pin the whole
  shelf. An empty file and one that is too large are not read.

Threads
-------
Reading, adding and removing block on the storage. :class:`Pins` is immutable after it was read, and
may be used from any thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from kvshelf.backends import Backend
from kvshelf.backends.base import delete_one, probe
from kvshelf.errors import ConfigError, ObjectMissingError, StorageError, short_repr
from kvshelf.format.keys import check_salt_group
from kvshelf.format.names import parse_namespace_folder
from kvshelf.logs import RateLimitedLog
from kvshelf.shelf.leftovers import read_small

logger = logging.getLogger(__name__)
_log: Final = RateLimitedLog(logger, lines=8)

#: The folder of pins at the root of a shelf.
PINS: Final = ".kvshelf/pins"
#: Most bytes of one pin.
MAX_BYTES: Final = 1 << 20
#: Most pins, and bytes of all of them; while there are more, all is pinned.
MAX_PINS: Final = 4096
MAX_TOTAL_BYTES: Final = 64 << 20
#: Seconds after a change before a file's size and time tell it from any later one.
_SETTLED_SECONDS: Final = 60.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)

#: A namespace by the 16 hex digits of its folder, and a salt group; None: all.
_Scope = tuple[str | None, str | None]


#: A chunk key; in a file 64 hex digits.
_Key = Annotated[bytes, Field(min_length=32, max_length=32)]


def _check_namespace(folder: str) -> str:
    if parse_namespace_folder(folder) is None:
        raise ValueError(f"found {short_repr(folder)}; expected <slug>-<16 hex>")
    return folder


class Pin(BaseModel):
    """One pin: the chunks of a namespace, of a salt group, and with certain keys.

    Conditions that are given all have to hold; a file gives at least one.

    Attributes
    ----------
    version : int
        Of the file.
    namespace : str or None
        Folder of a namespace. Its digest decides, not its slug.
    group : str or None
        A salt group: ``_`` or 16 hex.
    keys : tuple of bytes or None
        Chunk keys, 32 bytes each.
    until : float or None
        When it expires, in seconds since the epoch.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="hex", val_json_bytes="hex"
    )

    version: Literal[1] = 1
    namespace: Annotated[str, AfterValidator(_check_namespace)] | None = None
    group: Annotated[str, AfterValidator(check_salt_group)] | None = None
    keys: Annotated[tuple[_Key, ...], Field(fail_fast=True)] | None = None
    until: Annotated[float, Field(ge=0, le=1 << 53, allow_inf_nan=False)] | None = None

    def expired(self, now: float) -> bool:
        """Whether it has expired at `now`, in seconds since the epoch."""
        return self.until is not None and self.until <= now

    def to_bytes(self) -> bytes:
        """Return the content of its file.

        Raises
        ------
        ConfigError
            If its file would be larger than 1 MiB.
        """
        data = self.model_dump_json().encode("ascii")
        if len(data) > MAX_BYTES:
            raise ConfigError(
                f"the pin has {len(data)} bytes with its {len(self.keys or ())} keys; expected at"
                f" most {MAX_BYTES}: pin the prompts in several parts"
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Pin:
        """Return the pin that a file holds.

        Raises
        ------
        UnknownPinError
            If a later version wrote it.
        ValueError
            If it is no pin.
        """
        try:
            value = json.loads(data.decode("utf-8"))
        except RecursionError as error:
            raise ValueError(str(error)) from None
        fields: dict[str, Any] = value if isinstance(value, dict) else {}
        version, unknown = fields.get("version"), sorted(fields.keys() - cls.model_fields.keys())
        if type(version) is not int or version < 1:
            raise ValueError(f"its version is {short_repr(version)}; expected 1")
        if version > 1:
            problem = f"its version is {short_repr(version)}; expected 1"
            raise UnknownPinError(problem, cls._widest(fields))
        if unknown:
            raise UnknownPinError(f"unknown field {short_repr(unknown[0])}", cls._widest(fields))
        try:
            pin = cls.model_validate_json(data, strict=True)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            lines = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in problems)
            raise ValueError("; ".join(lines)) from None
        if pin.namespace is None and pin.group is None and pin.keys is None:
            raise ValueError("found neither a namespace, nor a group, nor keys")
        return pin

    @classmethod
    def _widest(cls, fields: Mapping[str, Any]) -> Pin:
        """Return all that a pin of a later version can pin, by its namespace and group."""
        namespace = group = None
        with contextlib.suppress(ValidationError):
            namespace = cls.model_validate({"namespace": fields.get("namespace")}).namespace
        with contextlib.suppress(ValidationError):
            group = cls.model_validate({"group": fields.get("group")}).group
        return cls(namespace=namespace, group=group)


class UnknownPinError(ValueError):
    """A pin of a later version.

    Attributes
    ----------
    pin : Pin
        Its namespace and group, as far as they can be read.
    """

    def __init__(self, problem: str, pin: Pin) -> None:
        super().__init__(problem)
        self.pin = pin


class Pins:
    """The pins of one shelf, as they were when they were read.

    Parameters
    ----------
    pins : Mapping
        All pins by name, also those that have expired.
    unreadable : Mapping
        The files of pins that pin nothing, by name, and why.
    now : float
        Seconds since the epoch: pins that have expired then cover nothing.
    unknown : Mapping
        The files of pins that may not be read or are of a later version, by name: what they pin at
        most, and why that is not known.

    Attributes
    ----------
    all : Mapping
    unreadable : Mapping
    unknown : Mapping
    """

    def __init__(
        self,
        pins: Mapping[str, Pin] | None = None,
        unreadable: Mapping[str, str] | None = None,
        now: float = 0.0,
        unknown: Mapping[str, tuple[Pin, str]] | None = None,
    ) -> None:
        self.all: Mapping[str, Pin] = dict(pins or {})
        self.unreadable: Mapping[str, str] = dict(unreadable or {})
        self.unknown: Mapping[str, tuple[Pin, str]] = dict(unknown or {})
        whole_scopes: set[_Scope] = set()
        keys: dict[_Scope, set[bytes]] = {}
        for pin in (*self.all.values(), *(pin for pin, _ in self.unknown.values())):
            if pin.expired(now):
                continue
            tag = None if pin.namespace is None else parse_namespace_folder(pin.namespace)
            scope = tag, pin.group
            if pin.keys is None:
                whole_scopes.add(scope)
            else:
                keys.setdefault(scope, set()).update(pin.keys)
        self._whole: Final = whole_scopes
        self._keys: Final = keys
        #: Sizes and times of the files of pins that will not change without one of them.
        self._files: Mapping[str, tuple[int, float]] = {}

    def __bool__(self) -> bool:
        """Whether anything can be covered."""
        return bool(self._whole or self._keys)

    @property
    def problem(self) -> str | None:
        """Why more is kept than the pins name; None if each pin is known."""
        for name, (pin, why) in self.unknown.items():
            return (
                f"the pin {name} is not known, and nothing is deleted in {_scope_text(pin)}: {why}."
                " Allow that it is read, use the version of kvshelf that wrote it, or remove it"
                " with `kvshelf pin SHELF NAME --remove`"
            )
        return None

    @classmethod
    def load(cls, backend: Backend, now: float | None = None, before: Pins | None = None) -> Pins:
        """Read the pins of a shelf; log one warning for each that is damaged.

        Parameters
        ----------
        backend : Backend
        now : float, optional
            Seconds since the epoch, by the clock of the storage; this machine's when absent.
        before : Pins, optional
            Those that were read before: a pin whose file did not change is not read again.

        Raises
        ------
        StorageError
            If the storage did not answer, or does not allow that pins are listed.
        """
        pins = cls.read(backend, now, before)
        for name, problem in pins.unreadable.items():
            _log.warning(
                "the pin %s on %s pins nothing: %s. Make it anew, or remove it"
                " with `kvshelf pin SHELF NAME --remove`",
                name,
                backend.url,
                problem,
                about=(backend.url, name),
            )
        return pins

    @classmethod
    def read(cls, backend: Backend, now: float | None = None, before: Pins | None = None) -> Pins:
        """As :meth:`load`, without warnings."""
        now = time.time() if now is None else now
        files: dict[str, tuple[int, float]] = {}
        pins: dict[str, Pin] = {}
        unreadable: dict[str, str] = {}
        unknown: dict[str, tuple[Pin, str]] = {}
        total = 0
        rows = sorted(islice(_files(backend), MAX_PINS + 1))
        for number, (name, size, changed) in enumerate(rows):
            if not 0 < size <= MAX_BYTES:
                unreadable[name] = f"it has {size} bytes; expected 1 to {MAX_BYTES}"
                continue
            total += size
            if number == MAX_PINS or total > MAX_TOTAL_BYTES:
                limits = f"{MAX_PINS} pins with {MAX_TOTAL_BYTES} bytes together"
                unknown[name] = Pin(), f"found more than {limits}"
                break
            if changed < now - _SETTLED_SECONDS:
                files[name] = size, changed
            if before is not None and before._files.get(name) == (size, changed):
                pins[name] = before.all[name]
                continue
            try:
                pins[name] = Pin.from_bytes(read_small(backend, pin_file(name), MAX_BYTES))
            except ObjectMissingError:
                continue
            except UnknownPinError as error:
                unknown[name] = error.pin, str(error)
            except ValueError as error:
                # Also things that are no files.
                unreadable[name] = str(error)
            except StorageError as error:
                if error.retryable:
                    raise
                unknown[name] = Pin(), str(error)
        result = cls(pins, unreadable, now, unknown)
        result._files = {name: file for name, file in files.items() if name in pins}
        return result

    def covers(self, namespace_folder: str, group: str, key: bytes) -> bool:
        """Whether a chunk of one salt group (``_`` or 16 hex) of one namespace is pinned."""
        tag = parse_namespace_folder(namespace_folder)
        scopes: list[_Scope] = [(tag, group), (tag, None), (None, group), (None, None)]
        return any(scope in self._whole or key in self._keys.get(scope, ()) for scope in scopes)

    @staticmethod
    def add(
        backend: Backend, name: str, pin: Pin, *, replace: bool = False, dry_run: bool = False
    ) -> bool:
        """Write a pin; return False if there is one with this name that is not to be replaced.

        With `dry_run` nothing is written.

        Raises
        ------
        ConfigError
            If `name` is not a pin's name, or the pin would pin nothing for a reason of its own.
        StorageError
            If it could not be written.
        """
        check_pin_name(name)
        data = pin.to_bytes()
        files = _files(backend)
        sizes = [size for file_name, size, _ in files if file_name != name and size <= MAX_BYTES]
        if len(sizes) >= MAX_PINS or sum(sizes) + len(data) > MAX_TOTAL_BYTES:
            raise ConfigError(
                f"the other {len(sizes)} pins have {sum(sizes)} bytes, and this one {len(data)};"
                f" expected at most {MAX_PINS} pins with {MAX_TOTAL_BYTES} bytes together: remove"
                " pins, or pin a namespace or a salt group"
            )
        if dry_run:
            return replace or probe(backend, pin_file(name)) is None
        result = backend.write(pin_file(name), [data], "replace" if replace else "create")
        return result.value != "existed"

    @staticmethod
    def remove(backend: Backend, name: str, *, dry_run: bool = False) -> bool:
        """Remove a pin, readable or not; return False if there was none of this name.

        With `dry_run` nothing is removed.

        Raises
        ------
        ConfigError
            If `name` is not a pin's name.
        StorageError
            If it could not be removed.
        """
        file = pin_file(name)
        return probe(backend, file) is not None if dry_run else delete_one(backend, file)


def check_pin_name(name: str) -> str:
    """Return `name` if a pin can have it.

    Raises
    ------
    ConfigError
        If not.
    """
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{short_repr(name)} is not a name of a pin: expected 1 to 64 letters, digits, '.', '_'"
            " and '-', and a letter or a digit first"
        )
    return name


def pin_file(name: str) -> str:
    """Return the name of a pin's file below the root.

    Raises
    ------
    ConfigError
        If `name` is not a pin's name.
    """
    return f"{PINS}/{check_pin_name(name)}.json"


def _files(backend: Backend) -> Iterator[tuple[str, int, float]]:
    """Yield names, sizes and times of the files of pins; what else lies there is skipped."""
    for row in backend.list(PINS, flat=True):
        folder, _, base = row.name.rpartition("/")
        name = base.removesuffix(".json")
        if folder == PINS and name != base and _NAME.fullmatch(name) is not None:
            yield name, row.size, row.mtime


def _scope_text(pin: Pin) -> str:
    named = [part for part in (pin.namespace, pin.group) if part is not None]
    return "/".join(named) or "the whole shelf"
