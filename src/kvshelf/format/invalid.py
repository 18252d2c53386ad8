"""Why an object is invalid: its defects, and the comparisons that choose among them.

Owns :class:`Defect`, the header parser, and :func:`describe_header`, which shows any header to
people. Defects only explain: :mod:`kvshelf.format.objects` detects an invalid object by comparing
bytes. No torch, no storage, no vLLM. Safe to call from any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final

from kvshelf.errors import BadObjectError, short_repr
from kvshelf.format.tensors import METADATA, TensorSpec

#: Largest header that the safetensors library reads.
MAX_HEADER: Final = 100_000_000

#: Largest header parsed for display; parsing 100 MB can take minutes and gigabytes.
_MAX_SHOWN_HEADER: Final = 16 << 20


class Defect(Enum):
    """The ways in which an object can be invalid; each is the `defect` of a `BadObjectError`."""

    #: The object has no bytes.
    EMPTY_OBJECT = "EmptyObject"
    #: It is shorter than expected.
    TRUNCATED_OBJECT = "TruncatedObject"
    #: It is longer than expected.
    WRONG_SIZE = "WrongSize"
    #: The length field names a header larger than the file or than 100 MB.
    HEADER_TOO_LARGE = "HeaderTooLarge"
    #: The length field is not the namespace's data offset − 8.
    WRONG_HEADER_LENGTH = "WrongHeaderLength"
    #: The header is not a JSON object in UTF-8.
    HEADER_NOT_JSON = "HeaderNotJson"
    #: A key appears twice in the header.
    DUPLICATE_KEY = "DuplicateKey"
    #: The header is equivalent but not canonical (spacing, order or escapes).
    HEADER_NOT_CANONICAL = "HeaderNotCanonical"
    #: A field of ``__metadata__`` is missing, unknown or has another value.
    WRONG_METADATA = "WrongMetadata"
    #: The object belongs to another namespace.
    WRONG_NAMESPACE = "WrongNamespace"
    #: The object holds another chunk.
    WRONG_KEY = "WrongKey"
    #: A tensor's entry is not ``dtype``, ``shape``, ``data_offsets``.
    MALFORMED_TENSOR = "MalformedTensor"
    #: A tensor is missing or unexpected.
    WRONG_TENSOR_NAME = "WrongTensorName"
    #: The tensors are the expected ones in another order.
    WRONG_TENSOR_ORDER = "WrongTensorOrder"
    #: A tensor has another dtype.
    WRONG_DTYPE = "WrongDtype"
    #: A tensor has another shape.
    WRONG_SHAPE = "WrongShape"
    #: A tensor starts before the previous one ends.
    TENSOR_OVERLAP = "TensorOverlap"
    #: Unused bytes lie between two tensors.
    TENSOR_GAP = "TensorGap"
    #: A tensor's offsets do not span dtype × shape.
    WRONG_TENSOR_SIZE = "WrongTensorSize"
    #: A tensor's bytes do not match the hash in the header.
    PAYLOAD_DAMAGED = "PayloadDamaged"


def parse_header(text: bytes) -> dict[str, Any]:
    """Parse a header's JSON.

    Raises
    ------
    BadObjectError
        HEADER_NOT_JSON, DUPLICATE_KEY.
    """

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, value in pairs:
            if key in fields:
                twice = f"key {key[:200]!r} appears twice in the header"
                raise BadObjectError(Defect.DUPLICATE_KEY, twice)
            fields[key] = value
        return fields

    problem = "the header is JSON, but not an object"
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=no_duplicates)
    except BadObjectError:
        raise
    except (ValueError, RecursionError) as error:
        header, problem = None, f"the header is not JSON in UTF-8 ({error})"
    if not isinstance(header, dict):
        raise BadObjectError(Defect.HEADER_NOT_JSON, problem)
    return header


def compare_metadata(metadata: object, expected: Mapping[str, str], tensors: int) -> None:
    """Raise the error that names the first difference of `metadata`, if there is one."""
    if not isinstance(metadata, dict):
        text = f"{METADATA}: found {short_repr(metadata)}, expected an object"
        raise BadObjectError(Defect.WRONG_METADATA, text)
    defects = {"namespace": Defect.WRONG_NAMESPACE, "key": Defect.WRONG_KEY}
    for field, value in expected.items():
        given = metadata.get(field)
        if given != value:
            text = f"{field}: found {short_repr(given)}, expected {value!r}"
            raise BadObjectError(defects.get(field, Defect.WRONG_METADATA), text)
    for field in metadata:
        if field not in expected and field != "xxh3":
            text = f"{short_repr(field)} is not a field of {METADATA}"
            raise BadObjectError(Defect.WRONG_METADATA, text)
    hashes = metadata.get("xxh3")
    pattern = rf"[0-9a-f]{{32}}(,[0-9a-f]{{32}}){{{tensors - 1}}}"
    if not isinstance(hashes, str) or not re.fullmatch(pattern, hashes):
        text = f"xxh3: found {short_repr(hashes)}, expected {tensors} hashes of 32 hex digits"
        raise BadObjectError(Defect.WRONG_METADATA, text)


def _tensor_entry(name: str, entry: object) -> tuple[str, list[int], list[int]]:
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
            return dtype, shape, offsets
    raise BadObjectError(
        Defect.MALFORMED_TENSOR,
        f"tensor {short_repr(name)}: found {short_repr(entry)}, "
        "expected dtype, shape and data_offsets",
    )


def compare_tensors(header: Mapping[str, object], specs: Sequence[TensorSpec]) -> None:
    """Raise the error that names the first difference of the tensors, if there is one."""
    entries = {name: _tensor_entry(name, entry) for name, entry in header.items()}
    names = [spec.name for spec in specs]
    for name in names:
        if name not in entries:
            raise BadObjectError(Defect.WRONG_TENSOR_NAME, f"tensor {name!r} is missing")
    for name in entries.keys() - {*names}:
        text = f"tensor {short_repr(name)} does not belong to this object"
        raise BadObjectError(Defect.WRONG_TENSOR_NAME, text)
    if list(entries) != names:
        text = f"tensors are in the order {short_repr(list(entries))}"
        raise BadObjectError(Defect.WRONG_TENSOR_ORDER, text)
    for spec in specs:
        dtype, shape, (begin, end) = entries[spec.name]
        misplaced = Defect.TENSOR_OVERLAP if begin < spec.offset else Defect.TENSOR_GAP
        comparisons: tuple[tuple[Defect, str, object, object], ...] = (
            (Defect.WRONG_DTYPE, "dtype", dtype, spec.dtype),
            (Defect.WRONG_SHAPE, "shape", shape, list(spec.shape)),
            (misplaced, "first byte", begin, spec.offset),
            (Defect.WRONG_TENSOR_SIZE, "bytes", end - begin, spec.nbytes),
        )
        for defect, field, value, expected in comparisons:
            if value != expected:
                text = f"{field} {short_repr(value)}, expected {expected}"
                raise BadObjectError(defect, f"tensor {spec.name!r}: found {text}")


def header_length(start: bytes) -> int:
    """Return the length of a safetensors header, in bytes, from the file's first 8 bytes.

    Raises
    ------
    BadObjectError
        EMPTY_OBJECT, TRUNCATED_OBJECT: there are fewer than 8 bytes. HEADER_TOO_LARGE: the length
        exceeds 16 MiB, more than any object of kvshelf needs.
    """
    if len(start) < 8:
        defect = Defect.TRUNCATED_OBJECT if start else Defect.EMPTY_OBJECT
        raise BadObjectError(defect, f"found {len(start)} bytes, expected a safetensors file")
    length = int.from_bytes(start[:8], "little")
    if length > _MAX_SHOWN_HEADER:
        text = "not a safetensors file, or one with a header of more than 16 MiB"
        raise BadObjectError(Defect.HEADER_TOO_LARGE, text)
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
    BadObjectError
        If it cannot be decoded.
    """
    end = 8 + header_length(raw)
    if len(raw) < end:
        text = f"truncated object: found {len(raw)} bytes, but its header ends at {end}"
        raise BadObjectError(Defect.TRUNCATED_OBJECT, text)
    header = parse_header(raw[8:end])
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        text = f"{METADATA}: found {short_repr(metadata)}, expected strings"
        raise BadObjectError(Defect.WRONG_METADATA, text)
    keys = ("name", "dtype", "shape", "data_offsets")
    entries = ((name, *_tensor_entry(name, entry)) for name, entry in header.items())
    tensors = [dict(zip(keys, entry, strict=True)) for entry in entries]
    return {"data_offset": end, "metadata": metadata, "tensors": tensors}
