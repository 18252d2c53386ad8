"""Namespaces: what the golden vectors and a second implementation say, and what users notice."""

from __future__ import annotations

import copy
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.errors import ConfigError
from kvshelf.format.namespace import FIELDS, Namespace
from tests.format.golden_format import VECTORS, reference

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
INTEGERS = st.integers(-(2**53) + 1, 2**53 - 1)
VALUES = {
    "int": INTEGERS,
    "str": TEXT,
    "list[int]": st.lists(INTEGERS, max_size=4),
    "list[str]": st.lists(TEXT, max_size=4),
}
RECORDS = st.fixed_dictionaries(
    {"format": st.just("kvshelf/1")},
    optional={name: VALUES[kind] for name, kind in FIELDS.items() if name != "format"},
)


@pytest.mark.parametrize("name", VECTORS["namespaces"])
def test_golden_namespaces(name: str) -> None:
    vector = VECTORS["namespaces"][name]
    namespace = Namespace(vector["record"], slug="org/Some Model")
    assert namespace.encoded == vector["encoded"].encode()
    assert namespace.digest.hex() == vector["digest"]
    assert namespace.folder == "some-model-" + vector["digest"][:16]
    assert Namespace.from_bytes(namespace.encoded) == namespace


@given(RECORDS)
def test_namespaces_as_the_second_implementation_writes_them(record: dict[str, Any]) -> None:
    namespace = Namespace(record)
    assert namespace.encoded == reference.canonical(record)
    assert namespace.digest == reference.digest(record)
    again = Namespace.from_bytes(namespace.encoded)
    assert again == namespace
    assert hash(again) == hash(namespace)
    assert again.record == namespace.record


def test_documented_fields_are_those_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    table = text.split("### Fields")[1].split("### Fingerprint")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([\w\[\]]+) \|", table, re.MULTILINE)
    assert dict(rows) == dict(FIELDS)
    assert len(rows) == len(FIELDS)


@given(RECORDS, st.randoms())
def test_order_and_normal_form_of_the_input_do_not_matter(record: dict[str, Any], rng: Any) -> None:
    def decompose(value: Any) -> Any:
        if isinstance(value, str):
            return unicodedata.normalize("NFD", value)
        return [decompose(item) for item in value] if isinstance(value, list) else value

    fields = [(name, decompose(value)) for name, value in record.items()]
    rng.shuffle(fields)
    assert Namespace(dict(fields)) == Namespace(record)


@pytest.mark.parametrize(
    "field",
    [
        {"layers": True},
        {"layers": 1.5},
        {"layers": None},
        {"layers": 2**53},
        {"layers": "1"},
        {"weights": 1},
        {"weights": "\ud800"},
        {"stages": 1},
        {"stages": "1"},
        {"stages": [1.0]},
        {"stages": [[1]]},
        {"layouts": ["canonical", 1]},
        {"model": "/models/x"},
        {"format": "kvshelf/2"},
    ],
)
def test_records_that_cannot_be_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(field))):
        Namespace({"format": "kvshelf/1", **field})
    with pytest.raises(ConfigError, match="format"):
        Namespace({})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"\xff",
        b'{"format": "kvshelf/1"}',
        b'{"format":"kvshelf/1"}\n',
        b'{"format":"kvshelf/1","format":"kvshelf/1"}',
        b'{"format":"kvshelf\\/1"}',
        b'{"format":"kvshelf/1","chunk_size":1}',
        b'{"chunk_size":1e2,"format":"kvshelf/1"}',
        b'{"chunk_size":NaN,"format":"kvshelf/1"}',
        b'{"chunk_size":' + b"9" * 5000 + b',"format":"kvshelf/1"}',
        b'{"format":"kvshelf/1","version":"e\xcc\x81"}',
        b'{"format":"kvshelf/1","version":"\\u00e9"}',
        b'{"format":"kvshelf/1","version":"\\ud800"}',
        b'{"format":"kvshelf/1","version":null}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_bytes_that_are_not_canonical_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        Namespace.from_bytes(data)


def test_namespaces_are_immutable_and_copy() -> None:
    namespace = Namespace({"format": "kvshelf/1", "stages": [1, 2]}, "m")
    with pytest.raises(AttributeError):
        namespace.digest = b""
    with pytest.raises(AttributeError):
        del namespace.slug
    stages = namespace.record["stages"]
    assert isinstance(stages, list)
    stages.clear()
    assert namespace.record["stages"] == [1, 2]
    assert copy.deepcopy(namespace) == namespace
    assert namespace != namespace.encoded
    assert namespace.folder in repr(namespace)
