"""Why an object is invalid: the typed errors, and the comparisons that choose among them.

Owns the errors, the header parser, and :func:`describe_header`, which shows any header to people.
The errors only explain: :mod:`kvshelf.format.objects` detects an invalid object by comparing
bytes. No torch, no storage, no vLLM. Safe to call from any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvshelf.errors import BadObjectError, short_repr
from kvshelf.format.tensors import TensorSpec

#: Key of the metadata in a header.
METADATA: Final = "__metadata__"

#: Largest header that the safetensors library reads.
MAX_HEADER: Final = 100_000_000

#: Largest header parsed for display; parsing 100 MB can take minutes and gigabytes.
_MAX_SHOWN_HEADER: Final = 16 << 20

# --------------------------------------------------------------------------- errors
# Named for what is wrong; their base class already says that they are errors.
# ruff: noqa: N818


class EmptyObject(BadObjectError):
    """The object has no bytes."""


class TruncatedObject(BadObjectError):
    """The object is shorter than expected."""


class WrongSize(BadObjectError):
    """The object is longer than expected."""


class HeaderTooLarge(BadObjectError):
    """The length field names a header larger than the file or than 100 MB."""


class WrongHeaderLength(BadObjectError):
    """The length field is not the namespace's data offset − 8."""


class HeaderNotJson(BadObjectError):
    """The header is not a JSON object in UTF-8."""


class DuplicateKey(BadObjectError):
    """A key appears twice in the header."""


class HeaderNotCanonical(BadObjectError):
    """The header is equivalent but not canonical (spacing, order or escapes)."""


class WrongMetadata(BadObjectError):
    """A field of ``__metadata__`` is missing, unknown or has another value."""


class WrongNamespace(WrongMetadata):
    """The object belongs to another namespace."""


class WrongKey(WrongMetadata):
    """The object holds another chunk."""


class MalformedTensor(BadObjectError):
    """A tensor's entry is not ``dtype``, ``shape``, ``data_offsets``."""


class WrongTensorName(BadObjectError):
    """A tensor is missing or unexpected."""


class WrongTensorOrder(BadObjectError):
    """The tensors are the expected ones in another order."""


class WrongDtype(BadObjectError):
    """A tensor has another dtype."""


class WrongShape(BadObjectError):
    """A tensor has another shape."""


class TensorOverlap(BadObjectError):
    """A tensor starts before the previous one ends."""


class TensorGap(BadObjectError):
    """Unused bytes lie between two tensors."""


class WrongTensorSize(BadObjectError):
    """A tensor's offsets do not span dtype × shape."""


class PayloadDamaged(BadObjectError):
    """A tensor's bytes do not match the hash in the header."""


def parse_header(text: bytes) -> dict[str, Any]:
    """Parse a header's JSON.

    Raises
    ------
    HeaderNotJson, DuplicateKey
    """

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise DuplicateKey(f"key {key[:200]!r} appears twice in the header")
            found[key] = value
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=no_duplicates)
    except BadObjectError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeaderNotJson(f"the header is not JSON in UTF-8 ({error})") from None
    if not isinstance(header, dict):
        raise HeaderNotJson("the header is JSON, but not an object")
    return header


def compare_metadata(metadata: object, expected: Mapping[str, str], tensors: int) -> None:
    """Raise the error that names the first difference of `metadata`, if there is one."""
    if not isinstance(metadata, dict):
        raise WrongMetadata(f"{METADATA}: found {short_repr(metadata)}, expected an object")
    kinds: dict[str, type[WrongMetadata]] = {"namespace": WrongNamespace, "key": WrongKey}
    for field, value in expected.items():
        found = metadata.get(field)
        if found != value:
            kind = kinds.get(field, WrongMetadata)
            raise kind(f"{field}: found {short_repr(found)}, expected {value!r}")
    for field in metadata:
        if field not in expected and field != "xxh3":
            raise WrongMetadata(f"{short_repr(field)} is not a field of {METADATA}")
    hashes = metadata.get("xxh3")
    if not isinstance(hashes, str) or not re.fullmatch(
        rf"[0-9a-f]{{32}}(,[0-9a-f]{{32}}){{{tensors - 1}}}", hashes
    ):
        raise WrongMetadata(
            f"xxh3: found {short_repr(hashes)}, expected {tensors} hashes of 32 hex digits"
        )


def _tensor_entry(name: str, entry: object) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Return dtype, shape and offsets of one entry of a header."""
    if isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if (
            isinstance(dtype, str)
            and isinstance(shape, list)
            and isinstance(offsets, list)
            and len(offsets) == 2
            and all(type(number) is int and number >= 0 for number in shape + offsets)
        ):
            return dtype, tuple(shape), (offsets[0], offsets[1])
    raise MalformedTensor(
        f"tensor {short_repr(name)}: found {short_repr(entry)}, "
        "expected dtype, shape and data_offsets"
    )


def compare_tensors(header: Mapping[str, object], specs: Sequence[TensorSpec]) -> None:
    """Raise the error that names the first difference of the tensors, if there is one."""
    entries = {name: _tensor_entry(name, entry) for name, entry in header.items()}
    names = [spec.name for spec in specs]
    for name in names:
        if name not in entries:
            raise WrongTensorName(f"tensor {name!r} is missing")
    known = set(names)
    for name in entries:
        if name not in known:
            raise WrongTensorName(f"tensor {short_repr(name)} does not belong to this object")
    if list(entries) != names:
        raise WrongTensorOrder(f"tensors are in the order {short_repr(list(entries))}")
    cursor = 0
    for spec in specs:
        dtype, shape, (begin, end) = entries[spec.name]
        if dtype != spec.dtype:
            raise WrongDtype(
                f"tensor {spec.name!r}: found {short_repr(dtype)}, expected {spec.dtype}"
            )
        if shape != spec.shape:
            raise WrongShape(
                f"tensor {spec.name!r}: found {short_repr(list(shape))}, "
                f"expected {list(spec.shape)}"
            )
        if begin < cursor:
            raise TensorOverlap(
                f"tensor {spec.name!r} starts at byte {begin}, expected {cursor}: it overlaps"
            )
        if begin > cursor:
            raise TensorGap(
                f"tensor {spec.name!r} starts at byte {begin}, expected {cursor}: there is a gap"
            )
        if end - begin != spec.nbytes:
            raise WrongTensorSize(
                f"tensor {spec.name!r} spans {end - begin} bytes, expected {spec.nbytes}"
            )
        cursor = end


def header_length(start: bytes) -> int:
    """Return the length of a safetensors header, in bytes, from the file's first 8 bytes.

    Raises
    ------
    EmptyObject, TruncatedObject
        If there are fewer than 8 bytes.
    HeaderTooLarge
        If the length exceeds 16 MiB, more than any object of kvshelf needs.
    """
    if not start:
        raise EmptyObject("empty object: expected a safetensors file")
    if len(start) < 8:
        raise TruncatedObject(f"truncated object: found {len(start)} bytes, expected at least 8")
    length = int.from_bytes(start[:8], "little")
    if length > _MAX_SHOWN_HEADER:
        raise HeaderTooLarge("not a safetensors file, or one with a header of more than 16 MiB")
    return length


def describe_header(raw: bytes) -> dict[str, Any]:
    """Decode the header of any object for display. Nothing is verified.

    Parameters
    ----------
    raw : bytes
        The object's first bytes, at least 8 + :func:`header_length`.

    Returns
    -------
    dict
        ``data_offset`` (int), ``metadata`` (dict of str), and ``tensors``: a list of dicts with
        name, dtype, shape, data_offsets.

    Raises
    ------
    EmptyObject, TruncatedObject, HeaderTooLarge, HeaderNotJson, DuplicateKey, WrongMetadata, \
MalformedTensor
    """
    length = header_length(raw)
    if len(raw) < 8 + length:
        raise TruncatedObject(
            f"truncated object: found {len(raw)} bytes, but its header ends at {8 + length}"
        )
    header = parse_header(raw[8 : 8 + length])
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise WrongMetadata(f"{METADATA}: found {short_repr(metadata)}, expected strings")
    tensors = []
    for name, entry in header.items():
        dtype, shape, offsets = _tensor_entry(name, entry)
        tensors.append(
            {"name": name, "dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}
        )
    return {
        "data_offset": 8 + length,
        "metadata": metadata,
        "tensors": tensors,
    }
