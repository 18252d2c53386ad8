"""What engines share that differ in caches, blocks, and how ranks divide heads and tokens."""

from __future__ import annotations

import tempfile
from math import gcd
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import ConfigError
from tests.sim.engine import EngineModel, Start
from tests.sim.engine_caches import FORMS, HEADS, LAYERS, Layers, names, stated_heads
from tests.support.prompts import prompt

pytestmark = pytest.mark.usefixtures("one_thread")

#: KV heads of the layers of a model, such as Gemma 4's: with a window there are more of them.
MODELS = [(2, 2), (4, 2), (8, 2), (2, 8, 8), (4, 4), (6, 4), (4, 1)]
#: Two heads over ranks that share the tokens of each block.
CONTEXTS: list[dict[str, int]] = [
    {"tensor_parallel": 4, "decode_context": 2},
    {"tensor_parallel": 8, "decode_context": 4},
    {"tensor_parallel": 4, "prefill_context": 2, "decode_context": 2},
]


def engine_options(
    form: str = "NHD",
    block_size: int = 16,
    *,
    heads: tuple[int, ...] = (HEADS,) * LAYERS,
    kind: str = "full",
    is_stated: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """The options of an engine whose layers have these heads.

    Unless `is_stated`, vLLM's configuration tells only the most heads of a layer.
    """
    groups = [Layers(kind, names("attn", len(heads)), block_size, heads)]
    model = {"model_arch_config": stated_heads(heads)} if is_stated else {}
    given = {"groups": groups, "form": form, "model": model, "admission": "always"}
    return {**given, "memory_bytes": 8 << 20, **options}


@pytest.fixture
def start(start_model: Start) -> Start:
    """Start engines on one shelf."""
    return lambda *caches, **options: start_model(**engine_options(*caches, **options))


def degrees(heads: tuple[int, ...]) -> list[int]:
    """The tensor-parallel degrees over which vLLM can spread these heads."""
    return [n for n in (1, 2, 4, 8) if all(h % n == 0 or n % h == 0 for h in heads)]


@st.composite
def models(draw: st.DrawFn) -> tuple[tuple[int, ...], int, dict[str, int]]:
    """Heads of a model, a degree that can store it, and the parallelism of one that loads it."""
    is_shared = draw(st.booleans())
    heads = (2, 2) if is_shared else draw(st.sampled_from(MODELS))
    whole = [n for n in degrees(heads) if n <= gcd(*heads) or len(set(heads)) == 1]
    # With prefill context parallelism alone each rank holds all tokens.
    loading = [
        {"tensor_parallel": degree, "prefill_context": context}
        for degree in degrees(heads)
        for context in (1, 2, 3)
        if context == 1 or degree * context <= 4
    ]
    loading = CONTEXTS if is_shared else loading
    return heads, draw(st.sampled_from(whole)), draw(st.sampled_from(loading))


@given(
    model=models(),
    forms=st.tuples(st.sampled_from(FORMS), st.sampled_from(FORMS)),
    blocks=st.tuples(st.sampled_from([16, 32, 48]), st.sampled_from([16, 32, 48])),
    interleave=st.sampled_from([1, 2, 16]),
    chunk_size=st.integers(5, 150),
    length=st.integers(1, 300),
    budget=st.integers(8, 300),
    computed=st.integers(0, 5),
    longer=st.integers(0, 40),
)
@settings(max_examples=6, deadline=None)
def test_load_from_an_engine_with_other_caches_and_ranks_brings_all_whole_blocks(
    model: tuple[tuple[int, ...], int, dict[str, int]],
    forms: tuple[str, str],
    blocks: tuple[int, int],
    interleave: int,
    chunk_size: int,
    length: int,
    budget: int,
    computed: int,
    longer: int,
) -> None:
    heads, degree, parallel = model
    tokens, others = prompt(length), prompt(100, seed=8)
    options: dict[str, Any] = {"heads": heads, "chunk_size": chunk_size, "layout": "canonical"}
    with tempfile.TemporaryDirectory() as folder:
        writing = engine_options(
            forms[0], blocks[0], tensor_parallel=degree, budget=budget, **options
        )
        with EngineModel(folder, **writing) as writer:
            writer.run(tokens)
        loading = engine_options(forms[1], blocks[1], interleave=interleave, **parallel, **options)
        with EngineModel(folder, **loading) as reader:
            reader.run(others)
            assert reader.format.namespace == writer.format.namespace
            asked = tokens + prompt(longer, seed=9)
            unit = reader.unit[0]
            # vLLM's prefix cache has the first blocks.
            cached = min(computed * unit, (length - 1) // unit * unit)
            if cached:
                reader.run(asked[: cached + 1], answer=1)
            hit = min(length // chunk_size * chunk_size, len(asked) - 1)
            assert reader.run(asked) == [max(0, hit - hit % unit - cached)]
            # Their blocks are in vLLM's prefix cache, and as they were.
            assert reader.run(others) == [0]
            assert not reader.failed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "canonical"}, "layout=canonical cannot be"),
        ({"chunk_size": 24}, "set chunk_size to a multiple"),
        (
            {"kind": "latent", "tensor_parallel": 2, "decode_context": 2},
            r"is unknown.*set decode_context_parallel_size to 1",
        ),
    ],
)
def test_engine_with_caches_of_unknown_layout_is_refused_at_its_start_where_chunks_need_one(
    start: Start, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        start("odd", **options)


@pytest.mark.parametrize("bound", [None, [], torch.tensor([])])
def test_caches_that_do_not_come_back_from_sleep_are_not_used(start: Start, bound: Any) -> None:
    engine = start(chunk_size=32, prefix_caching=False)
    engine.run(prompt(100))
    next(iter(engine.worker.layers.values())).kv_cache = bound
    engine.worker.side.wake_up()
    engine.step()
    assert engine.run(prompt(100)) == [0]


def test_each_degree_is_on_its_own_where_the_configuration_does_not_tell_heads(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether a rank's only head is a copy cannot be seen."""
    options: dict[str, Any] = {"heads": (4, 2), "is_stated": False, "chunk_size": 64}
    alone, stated = start(**options), start(**options | {"is_stated": True})
    for engine in (alone, stated):
        engine.run(prompt(3))
    assert alone.format.namespace == stated.format.namespace
    # Two ranks: heads 2 and 1. Its only head may be one of two, or a copy.
    unknown = start(**options, tensor_parallel=2, prefix_caching=False)
    assert "a rank holds one KV head, and vLLM's configuration does not state which" in caplog.text
    assert unknown.run(prompt(200)) == [0]
    layouts = unknown.format.namespace.record["layouts"]
    assert all(str(layout).startswith("opaque-") for layout in layouts)
    assert unknown.run(prompt(200)) == [192]
    # Four ranks: each has one head of each layer, as if all layers had four.
    assert start(**options, tensor_parallel=4).run(prompt(200)) == [0]
    assert start(**options, tensor_parallel=4, seed=3).run(prompt(200)) == [192]
    with pytest.raises(ConfigError, match="does not state which"):
        start(**options, tensor_parallel=2, layout="canonical")


@pytest.mark.parametrize(
    ("kind", "layouts", "shards"), [("latent", "replicated-", 1), ("full", "opaque-", 4)]
)
def test_ranks_share_objects_where_vllm_says_that_they_hold_the_same(
    start: Start, caplog: pytest.LogCaptureFixture, kind: str, layouts: str, shards: int
) -> None:
    """As vLLM says of MLA, and of sparse indexers."""
    engine = start("odd", kind=kind, heads=(1, 1), tensor_parallel=4, chunk_size=32)
    engine.run(prompt(3))
    record = engine.format.namespace.record
    assert all(str(layout).startswith(layouts) for layout in record["layouts"])
    assert record["shards"] == shards
    says_it = "exactly like this one, with any number of tensor-parallel ranks," in caplog.text
    assert says_it is (kind == "latent")
    if says_it:
        assert (record["attention"], record["kv_heads"]) == (["mla", "mla"], 1)


def test_replicas_of_prefill_context_parallelism_take_turns_too(start: Start) -> None:
    options: dict[str, Any] = {"kind": "latent", "heads": (1, 1), "chunk_size": 32}
    writer = start("odd", tensor_parallel=2, prefill_context=2, **options)
    writer.run(prompt(200))
    assert sorted(rank.counted["stored_chunks"] for rank in writer.ranks) == [1, 1, 2, 2]
    reader = start("odd", **options)
    assert reader.run(prompt(200)) == [192]
    assert not reader.failed
