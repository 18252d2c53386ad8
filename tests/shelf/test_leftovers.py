"""Which files beside objects are kvshelf's."""

from __future__ import annotations

import pytest

from kvshelf.shelf.leftovers import is_temporary
from tests.support.formats import make_format

FOLDER = make_format(native=False).namespace.folder
HEX = "0123456789abcdef"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{FOLDER}/.namespace.json.{HEX}.tmp", True),
        (f".kvshelf/pins/.mine.json.{HEX}.tmp", True),
        (f"{FOLDER}/.kvshelf/gave-up/.{'1' * 32}.{HEX}.tmp", True),
        (f"{FOLDER}/.notes.{HEX}.tmp", False),
        (f"{FOLDER}/_/ab/.namespace.json.{HEX}.tmp", False),
        (f".namespace.json.{HEX}.tmp", False),
        (f"data/.namespace.json.{HEX}.tmp", False),
        (f"{FOLDER}/namespace.json", False),
    ],
)
def test_which_names_are_those_of_temporaries_of_ours(name: str, expected: bool) -> None:
    assert is_temporary(name) is expected
