"""Models whose layers have different numbers of KV heads. Simulated engines.

Such as Gemma 4, whose layers with full attention have fewer heads than those with a window.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from math import gcd
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import ConfigError
from kvshelf.format.namespace import Namespace
from tests.sim.engine_caches import FORMS
from tests.support.prompts import prompt
from tests.vllm.simulated import SimulatedEngine, engines_on
from tests.vllm.test_blocks_and_chunks import check_load

pytestmark = pytest.mark.usefixtures("one_thread")

#: KV heads of the layers of a model.
MODELS = [(4, 2), (8, 2), (2, 8, 8), (4, 4), (6, 4), (4, 1), (2, 2)]


def degrees(heads: tuple[int, ...]) -> list[int]:
    """The tensor-parallel degrees over which vLLM can spread these heads."""
    return [n for n in (1, 2, 4, 8) if all(h % n == 0 or n % h == 0 for h in heads)]


@st.composite
def models(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Heads of a model, a degree that can store it, and one that can load it."""
    heads = draw(st.sampled_from(MODELS))
    whole = [n for n in degrees(heads) if n <= gcd(*heads) or len(set(heads)) == 1]
    return heads, draw(st.sampled_from(whole)), draw(st.sampled_from(degrees(heads)))


@given(
    model=models(),
    forms=st.tuples(st.sampled_from(FORMS), st.sampled_from(FORMS)),
    block=st.sampled_from([16, 32, 48]),
    chunk_size=st.integers(5, 150),
    length=st.integers(1, 300),
    computed=st.integers(0, 3),
    prefill_context=st.integers(1, 2),
)
@settings(max_examples=10, deadline=None)
def test_what_one_degree_stores_another_loads(
    model: tuple[tuple[int, ...], int, int],
    forms: tuple[str, str],
    block: int,
    chunk_size: int,
    length: int,
    computed: int,
    prefill_context: int,
) -> None:
    heads, writing, loading = model
    tokens = prompt(length)
    options: dict[str, Any] = {"chunk_size": chunk_size, "layout": "canonical", "heads": heads}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        shelf = Path(folder)
        writer = SimulatedEngine(shelf, forms[0], 32, tensor_parallel=writing, **options)
        stack.enter_context(closing(writer))
        writer.prefill(tokens)
        reader = SimulatedEngine(
            shelf,
            forms[1],
            block,
            seed=1,
            tensor_parallel=loading,
            prefill_context=prefill_context,
            **options,
        )
        stack.enter_context(closing(reader))
        assert reader.namespace == writer.namespace
        start = min(computed * block, length // block * block)
        found = check_load(reader, tokens, start)
        hit = min(length // chunk_size * chunk_size, length - 1)
        assert found == max(0, hit - hit % block - start)


Start = Callable[..., SimulatedEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start engines on one shelf, which are closed at the end."""
    with engines_on(tmp_path / "shelf", chunk_size=64, blocks=64) as start:
        yield start


def test_each_degree_is_on_its_own_where_the_configuration_does_not_tell(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether a rank's only head is a copy cannot be seen."""
    options: dict[str, Any] = {"heads": (4, 2), "stated": False}
    tokens = prompt(200)
    alone = start(**options)
    assert alone.namespace == start(heads=(4, 2)).namespace
    # Two ranks: heads 2 and 1. Its only head may be one of two, or a copy.
    unknown = start(**options, tensor_parallel=2)
    assert "a rank holds one KV head, and vLLM's configuration does not state which" in caplog.text
    layouts = Namespace.from_bytes(unknown.namespace).record["layouts"]
    assert all(str(layout).startswith("opaque-") for layout in layouts)
    unknown.prefill(tokens)
    assert unknown.load(tokens)[0] == 192
    # Four ranks: each has one head of each layer, as if all layers had four.
    copies = start(**options, tensor_parallel=4)
    assert copies.load(tokens)[0] == 0
    copies.prefill(tokens)
    assert check_load(start(**options, tensor_parallel=4, seed=3), tokens) == 192
    with pytest.raises(ConfigError, match="does not state which"):
        start(**options, tensor_parallel=2, layout="canonical")
