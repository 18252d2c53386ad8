"""The namespace record: everything that determines KV values, as canonical bytes and a digest.

Owns the name of the format, the fields of a record, and :class:`Namespace`.

Contracts
---------
* Bytes and digest are pure functions of the record: equal on every machine, Python version,
  byte order and hash seed.
* Everything that determines KV values is in the namespace digest or in the chunk key. Only
  SHA-256 separates the keys of tenants, so it must not be replaced by a faster hash that can be
  collided.
* No torch, no storage backend, no vLLM.

Threads
-------
Everything is safe to call from any thread.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from kvshelf.errors import ConfigError

#: Name of the format: the first bytes of every key root, and a field of every header.
FORMAT: Final = "kvshelf/1"

FieldValue: TypeAlias = "int | str | Sequence[int] | Sequence[str]"


_MAX_JSON_INT: Final = 2**53 - 1


#: Every field a namespace record may hold, and the type of its value.
FIELDS: Final[Mapping[str, str]] = {
    "attention": "list[str]",
    "attention_temperature": "list[str]",
    "chunk_size": "int",
    "code": "list[str]",
    "compute_dtype": "str",
    "config": "list[str]",
    "config_overrides": "str",
    "data_offset": "int",
    "format": "str",
    "head_sizes": "list[int]",
    "kinds": "list[str]",
    "kv_dtype": "str",
    "kv_heads": "int",
    "kv_scales": "str",
    "layer_dtypes": "list[str]",
    "layer_names": "list[str]",
    "layer_shapes": "list[str]",
    "layers": "int",
    "layouts": "list[str]",
    "mla_rank": "int",
    "precision": "list[str]",
    "quantization": "str",
    "rope": "str",
    "shards": "int",
    "signing_key": "str",
    "sliding_windows": "list[int]",
    "stages": "list[int]",
    "state_shards": "int",
    "version": "str",
    "weights": "str",
    "window_shards": "int",
}


# --------------------------------------------------------------------------- namespace


def _canonical_int(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(
            f"namespace field {field!r}: found {value!r}, expected an integer "
            "(a float is written as its shortest decimal in a string)"
        )
    if not -_MAX_JSON_INT <= value <= _MAX_JSON_INT:
        raise ConfigError(f"namespace field {field!r}: {value} does not fit 53 bits")
    return int(value)


def _canonical_str(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"namespace field {field!r}: found {value!r}, expected a string")
    normal = unicodedata.normalize("NFC", str(value))
    try:
        normal.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"namespace field {field!r}: {value!r} holds a lone surrogate, which is not UTF-8"
        ) from error
    return normal


def _canonical_value(field: str, value: object) -> int | str | list[int] | list[str]:
    kind = FIELDS.get(field)
    if kind is None:
        raise ConfigError(
            f"namespace field {field!r} is unknown to {FORMAT}; known fields: "
            + ", ".join(sorted(FIELDS))
        )
    if kind == "int":
        return _canonical_int(field, value)
    if kind == "str":
        return _canonical_str(field, value)
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ConfigError(f"namespace field {field!r}: found {value!r}, expected a {kind}")
    if kind == "list[int]":
        return [_canonical_int(field, item) for item in value]
    return [_canonical_str(field, item) for item in value]


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Namespace:
    """Everything except tokens that determines KV values and their layout.

    Immutable. Two namespaces are equal when their canonical bytes are equal.

    Parameters
    ----------
    record : Mapping[str, int | str | Sequence[int] | Sequence[str]]
        The fields (table in ``docs/format.md``). Absent fields are left out, never
        None. Strings are normalised to NFC.
    slug : str
        Readable prefix of the folder's name; not part of the identity.

    Attributes
    ----------
    encoded : bytes
        The canonical JSON.
    digest : bytes
        SHA-256 of `encoded`, 32 bytes.
    slug : str
        The slug as normalised by :func:`slugify`.
    folder : str
        ``<slug>-<first 16 hex of the digest>``.

    Raises
    ------
    ConfigError
        If a field is unknown, has a value of the wrong type, or ``format`` is not
        ``kvshelf/1``.
    """

    _record: Mapping[str, int | str | list[int] | list[str]]
    encoded: bytes
    digest: bytes
    slug: str
    folder: str

    def __init__(self, record: Mapping[str, FieldValue], slug: str = "model") -> None:
        canonical = {field: _canonical_value(field, record[field]) for field in sorted(record)}
        if canonical.get("format") != FORMAT:
            raise ConfigError(
                f"namespace field 'format': found {canonical.get('format')!r}, expected {FORMAT!r}"
            )
        encoded = json.dumps(canonical, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        digest = hashlib.sha256(encoded).digest()
        name = slugify(slug)
        folder = f"{name}-{digest.hex()[:16]}"
        # An instance is frozen.
        vars(self).update(
            _record=canonical, encoded=encoded, digest=digest, slug=name, folder=folder
        )

    @classmethod
    def from_bytes(cls, data: bytes, slug: str = "model") -> Namespace:
        """Decode canonical bytes; reject any other encoding of the record.

        Raises
        ------
        ConfigError
            If `data` is not the canonical encoding of a valid record.
        """

        def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            fields = dict(pairs)
            if len(fields) != len(pairs):
                raise ConfigError("namespace record: a field appears twice")
            return fields

        try:
            record = json.loads(data.decode("utf-8"), object_pairs_hook=no_duplicates)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"namespace record: not UTF-8 JSON ({error})") from error
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"namespace record: a number is out of range ({error})") from error
        if not isinstance(record, dict):
            raise ConfigError(
                f"namespace record: found {type(record).__name__}, expected an object"
            )
        try:
            namespace = cls(record, slug)
        except ConfigError as error:
            # The message shows values, which may be forged and of any length.
            text = str(error)
            raise ConfigError(text if len(text) <= 400 else text[:397] + "...") from None
        if namespace.encoded != data:
            raise ConfigError(
                "namespace record: the bytes are valid JSON but not canonical (sorted keys, no "
                'spaces, NFC, no escapes except \\" \\\\ and control characters)'
            )
        return namespace

    @property
    def record(self) -> dict[str, int | str | list[int] | list[str]]:
        """The fields, as a fresh copy."""
        return {
            field: value.copy() if isinstance(value, list) else value
            for field, value in self._record.items()
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.encoded == other.encoded

    def __hash__(self) -> int:
        return hash(self.encoded)

    def __repr__(self) -> str:
        return f"Namespace({self.folder!r})"

    def __reduce__(self) -> tuple[Callable[[bytes, str], Namespace], tuple[bytes, str]]:
        return Namespace.from_bytes, (self.encoded, self.slug)


def slugify(model_name: str) -> str:
    """Return the readable part of a namespace folder for a model's name or path.

    The last path component, lowercased, each character outside ``[a-z0-9._-]``
    replaced by ``-``, at most 40 characters; ``model`` when nothing is left.
    """
    last = model_name.rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9._-]", "-", last)[:40] or "model"
