"""Chunks and blocks that do not end together, in caches of any layout. Simulated engines."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import ConfigError
from kvshelf.format.keys import KeyChain
from kvshelf.format.names import object_name
from kvshelf.format.namespace import Namespace
from tests.sim.engine_caches import FORMS
from tests.support.prompts import prompt
from tests.vllm.simulated import SimulatedEngine, engines_on, kv_of

pytestmark = pytest.mark.usefixtures("one_thread")

Start = Callable[..., SimulatedEngine]
#: Two heads over so many ranks. With prefill context parallelism alone each rank holds all tokens.
PARALLEL: list[dict[str, int]] = [
    {"tensor_parallel": 4, "decode_context": 2},
    {"tensor_parallel": 8, "decode_context": 2},
    {"tensor_parallel": 8, "decode_context": 4},
    {"tensor_parallel": 4, "prefill_context": 2, "decode_context": 2},
    {"tensor_parallel": 2, "prefill_context": 2},
    {"prefill_context": 3},
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start engines on one shelf, which are closed at the end."""
    with engines_on(tmp_path / "shelf") as start:
        yield start


def snapshot(engine: SimulatedEngine) -> list[list[torch.Tensor]]:
    return [[cache.clone() for cache in rank.caches.values()] for rank in engine.ranks]


def check_load(engine: SimulatedEngine, tokens: list[int], computed: int = 0) -> int:
    """Load, and check that exactly the hit's tokens arrived and nothing else was touched."""
    before = snapshot(engine)
    found, block_ids = engine.load(tokens, computed)
    assert not engine.bad_blocks
    expected = kv_of(tokens, engine.heads)
    end = computed + found
    assert torch.equal(engine.get(block_ids, computed, end), expected[:, :, computed:end])
    for rank, olds in zip(engine.ranks, before, strict=True):
        _, slots = rank.held(block_ids, computed, end)
        for (impl, cache, _), old in zip(rank.model_layers(), olds, strict=True):
            impl.put(cache, slots, impl.get(old, slots))
            assert torch.equal(cache, old)
    return found


@given(
    source=st.sampled_from(FORMS),
    target=st.sampled_from(FORMS),
    source_block=st.sampled_from([16, 32, 48]),
    target_block=st.sampled_from([16, 32, 48]),
    parallel=st.just({}) | st.sampled_from(PARALLEL),
    interleave=st.sampled_from([1, 2, 16]),
    chunk_size=st.integers(5, 150),
    length=st.integers(1, 300),
    pieces=st.lists(st.integers(1, 229), max_size=4),
    computed=st.integers(0, 5),
    longer=st.integers(0, 40),
)
@settings(max_examples=24, deadline=None)
def test_what_one_engine_stores_any_other_loads(
    source: str,
    target: str,
    source_block: int,
    target_block: int,
    parallel: dict[str, int],
    interleave: int,
    chunk_size: int,
    length: int,
    pieces: list[int],
    computed: int,
    longer: int,
) -> None:
    tokens = prompt(length)
    options = {"chunk_size": chunk_size, "layout": "canonical"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        shelf = Path(folder)
        writer = SimulatedEngine(shelf, source, source_block, **options)
        stack.enter_context(closing(writer))
        writer.prefill(tokens, pieces)
        reader = SimulatedEngine(
            shelf, target, target_block, seed=1, interleave=interleave, **parallel, **options
        )
        stack.enter_context(closing(reader))
        assert reader.namespace == writer.namespace
        asked = tokens + prompt(longer, seed=9)
        unit = reader.block_tokens
        start = min(computed * unit, length // unit * unit)
        found = check_load(reader, asked, start)
        hit = min(length // chunk_size * chunk_size, len(asked) - 1)
        assert found == max(0, hit - hit % unit - start)


def objects(engine: SimulatedEngine, tokens: list[int], chunk_size: int) -> list[list[Path]]:
    namespace = Namespace.from_bytes(engine.namespace)
    [folder] = Path(engine.shelf.url).glob(f"*-{namespace.digest.hex()[:16]}")
    shards = namespace.record["shards"]
    assert isinstance(shards, int)
    chain = KeyChain(namespace.digest, chunk_size)
    return [
        [folder / object_name(chunk, shard, shards) for shard in range(shards)]
        for chunk in chain.extend(tokens)
    ]


@pytest.mark.parametrize(
    ("form", "options", "words"),
    [
        ("odd", {"layout": "canonical"}, "layout=canonical cannot be"),
        ("odd", {"chunk_size": 24}, "set chunk_size to a multiple"),
    ],
)
def test_what_cannot_be_is_refused_at_start(
    start: Start, form: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        start(form, 16, **options)


@pytest.mark.parametrize("bound", [None, [], torch.tensor([])])
def test_caches_that_do_not_come_back_from_sleep_are_not_used(start: Start, bound: Any) -> None:
    tokens = prompt(100)
    engine = start("NHD", 16, chunk_size=32)
    engine.prefill(tokens)
    engine.layers[next(iter(engine.layers))].kv_cache = bound
    engine.worker.wake_up()
    engine.step([])
    assert engine.load(tokens)[0] == 0
