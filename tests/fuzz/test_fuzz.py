"""The decoder on the inputs that the fuzz target keeps, and on some changes of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import fuzz_decoder

CORPUS = sorted(fuzz_decoder.CORPUS.iterdir())
EDITS = st.lists(st.tuples(st.integers(0, 1 << 14), st.integers(0, 40), st.binary(max_size=20)))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_kept_inputs(path: fuzz_decoder.Path) -> None:
    fuzz_decoder.run_one(path.read_bytes())


@settings(max_examples=100)
@given(st.sampled_from(CORPUS), EDITS)
def test_changed_inputs(path: fuzz_decoder.Path, edits: list[tuple[int, int, bytes]]) -> None:
    data = path.read_bytes()
    for at, length, new in edits:
        at %= len(data) + 1
        data = data[:at] + new + data[at + length :]
    fuzz_decoder.run_one(data)
