"""The fields of hand-overs, which may come from any client."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from kvshelf.vllm.handover import (
    Handover,
    asks_for_handover,
    no_handover,
    read_bare,
    read_handover,
)

FIELDS = (
    "kvshelf_version",
    "kvshelf_namespace",
    "kvshelf_tokens",
    "kvshelf_key",
    "kvshelf_tail",
    "kvshelf_attempt",
)
GOOD = Handover(
    namespace=bytes(range(32)), tokens=1000, key=bytes(range(32, 64)), tail=232, attempt="0f" * 16
)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
hex_texts = st.text("0123456789abcdefAF", min_size=30, max_size=66)
field_values = json_values | hex_texts | st.integers(-2, 2**70) | st.floats(-1, 1e7)
handovers = st.builds(
    lambda namespace, tokens, key, tail, attempt, wait_s: Handover(
        namespace, tokens, key, min(tail, tokens), attempt.hex(), wait_s
    ),
    st.binary(min_size=32, max_size=32),
    st.integers(1, 2**32),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**32),
    st.binary(min_size=16, max_size=16),
    st.none() | st.floats(0, 1e6),
)


@given(handovers)
def test_consumer_reads_what_a_producer_answered(handover: Handover) -> None:
    params = handover.params()
    assert all(name.startswith("kvshelf_") for name in params)
    assert read_handover(json.loads(json.dumps(params))) == handover


@pytest.mark.parametrize("expected", [False, True])
def test_what_promises_nothing_is_no_handover_and_not_bare(expected: bool) -> None:
    params = json.loads(json.dumps({**no_handover(), "do_remote_prefill": True}))
    assert read_handover(params) is None
    assert read_bare(params, expected=expected) is None


def test_later_version_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="found 2, expected 1; run the same release"):
        read_handover(GOOD.params() | {"kvshelf_version": 2})


@given(st.sampled_from([*FIELDS, "kvshelf_wait_s"]), field_values)
def test_one_arbitrary_field_is_refused_or_read(field: str, value: object) -> None:
    read_or_refuse(GOOD.params() | {field: value})


@given(
    json_values
    | st.dictionaries(st.sampled_from([*FIELDS, "kvshelf_wait_s"]) | st.text(), field_values)
)
def test_params_of_any_type_are_no_handover_or_refused(params: object) -> None:
    read_or_refuse(params)
    assert asks_for_handover(params) is False
    assert read_bare(params, expected=False) is None


def read_or_refuse(params: object) -> None:
    try:
        handover = read_handover(params)
    except ValueError as error:
        message = str(error)
        assert message.isascii() and message.isprintable()
        assert len(message) < 250
        return
    if handover is None:
        return
    assert len(handover.namespace) == len(handover.key) == 32
    assert 0 <= handover.tail <= handover.tokens and handover.tokens >= 1
    assert len(handover.attempt) == 32 and set(handover.attempt) <= set("0123456789abcdef")
    assert handover.wait_s is None or 0 <= handover.wait_s < math.inf


@pytest.mark.parametrize("field", ["do_remote_decode", "kvshelf_handover"])
def test_request_asks_by_a_field_that_is_true(field: str) -> None:
    assert asks_for_handover({field: True, "do_remote_prefill": False, "remote_host": None})
    for value in (False, None, 1, "true", [True]):
        assert not asks_for_handover({field: value})
