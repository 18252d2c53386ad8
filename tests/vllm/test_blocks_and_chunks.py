"""Chunks and blocks that do not end together, in caches of any layout. Simulated engines."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import ConfigError
from kvshelf.format.keys import KeyChain
from kvshelf.format.kinds import FULL
from kvshelf.format.names import object_name
from kvshelf.format.namespace import Namespace
from kvshelf.kv.caches import LayerRun
from kvshelf.kv.layout import PagedLayout
from kvshelf.vllm.worker.registered_caches import KindCaches, RegisteredCaches
from tests.support.prompts import prompt
from tests.vllm.shelf_files import DAMAGE
from tests.vllm.simulated import FORMS, HEADS, SIZE, SimulatedEngine, engines_on, kv_of

pytestmark = pytest.mark.usefixtures("one_thread")

Start = Callable[..., SimulatedEngine]


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
        for impl, cache, old in zip(rank.impls, rank.caches.values(), olds, strict=True):
            impl.put(cache, slots, impl.get(old, slots))
            assert torch.equal(cache, old)
    return found


@given(
    source=st.sampled_from(FORMS),
    target=st.sampled_from(FORMS),
    source_block=st.sampled_from([16, 32, 48]),
    target_block=st.sampled_from([16, 32, 48]),
    chunk_size=st.integers(5, 70),
    length=st.integers(1, 230),
    pieces=st.lists(st.integers(1, 229), max_size=4),
    computed=st.integers(0, 5),
    longer=st.integers(0, 40),
)
@settings(max_examples=15, deadline=None)
def test_what_one_engine_stores_any_other_loads(
    source: str,
    target: str,
    source_block: int,
    target_block: int,
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
        reader = SimulatedEngine(shelf, target, target_block, seed=1, **options)
        stack.enter_context(closing(reader))
        assert reader.namespace == writer.namespace
        asked = tokens + prompt(longer, seed=9)
        start = min(computed * target_block, length // target_block * target_block)
        found = check_load(reader, asked, start)
        hit = min(length // chunk_size * chunk_size, len(asked) - 1)
        assert found == max(0, hit - hit % target_block - start)


@pytest.mark.parametrize(("chunk_size", "hits"), [(96, 384), (200, 384), (256, 256)])
def test_chunk_sizes_of_real_engines(start: Start, chunk_size: int, hits: int) -> None:
    """Auto is canonical where chunks are no whole blocks, native where they are."""
    tokens = prompt(450)
    engine = start("vec", 128, chunk_size=chunk_size)
    layouts = Namespace.from_bytes(engine.namespace).record["layouts"]
    native = chunk_size == 256
    assert layouts == (["cpu-vec-bf16-b128"] if native else ["canonical"]) * 2
    engine.prefill(tokens, [100, 333])
    assert check_load(engine, tokens) == hits
    assert check_load(engine, tokens, 128) == hits - 128


def test_native_and_canonical_give_the_same_kv(start: Start) -> None:
    tokens = prompt(200)
    for layout in ("native", "canonical"):
        engine = start("amx", 32, chunk_size=64, layout=layout)
        engine.prefill(tokens)
        assert check_load(engine, tokens) == 192


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
    ("form", "layout", "chunk_size", "failing", "first_bad"),
    [
        # Chunk 1 begins in the middle of block 1, chunk 3 at the start of block 4.
        ("NHD", "auto", 24, 1, 1),
        ("vec", "auto", 24, 1, 1),
        ("vec", "canonical", 24, 3, 4),
        ("vec", "auto", 24, 0, 0),
        ("vec", "native", 32, 2, 4),
    ],
)
def test_blocks_from_a_failed_chunk_on_are_bad(
    start: Start, form: str, layout: str, chunk_size: int, failing: int, first_bad: int
) -> None:
    tokens = prompt(150)
    engine = start(form, 16, chunk_size=chunk_size, layout=layout)
    engine.prefill(tokens)
    [*_, damaged] = objects(engine, tokens, chunk_size)[failing]
    DAMAGE["flipped byte of the payload"](damaged)
    found, block_ids = engine.load(tokens)
    assert found == 144 - (144 % 32 if chunk_size == 32 else 0)
    assert engine.bad_blocks == set(block_ids[first_bad : found // 16])
    good = first_bad * 16
    assert torch.equal(engine.get(block_ids, 0, good), kv_of(tokens)[:, :, :good])


def test_a_failed_chunk_does_not_touch_blocks_that_the_engine_had(start: Start) -> None:
    """The failed chunk begins before what was to be loaded."""
    tokens = prompt(150)
    engine = start("NHD", 16, chunk_size=40)
    engine.prefill(tokens)
    [first, *_] = objects(engine, tokens, 40)[1]
    first.unlink()
    chunk_one = first.parent
    assert not list(chunk_one.glob(first.name))
    # The look-up confirms what it announces, so the hole is found before anything is loaded.
    found, _ = engine.load(tokens, 48)
    assert found == 0


def test_blocks_of_an_unknown_layout_are_stored_whole(start: Start) -> None:
    tokens = prompt(150)
    engine = start("odd", 16, chunk_size=32)
    [layout] = set(Namespace.from_bytes(engine.namespace).record["layouts"])
    assert layout.startswith("opaque-")
    assert Namespace.from_bytes(engine.namespace).record["shards"] == 1
    blocks = engine.prefill(tokens)
    same = start("odd", 16, chunk_size=32, seed=5)
    assert same.namespace == engine.namespace
    found, loaded = same.load(tokens)
    assert found == 128
    for mine, theirs in zip(engine.caches.values(), same.caches.values(), strict=True):
        assert torch.equal(mine[blocks[:8]], theirs[loaded[:8]])
    other = start("odd", 32, chunk_size=32)
    assert other.namespace != engine.namespace
    assert other.load(tokens)[0] == 0


@pytest.mark.parametrize(
    ("form", "options", "words"),
    [
        ("vec", {"layout": "native", "chunk_size": 24}, "layout=native cannot be"),
        ("NHD", {"layout": "native"}, "not permuted"),
        ("odd", {"layout": "canonical"}, "layout=canonical cannot be"),
        ("odd", {"chunk_size": 24}, "set chunk_size to a multiple"),
    ],
)
def test_what_cannot_be_is_refused_at_start(
    start: Start, form: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        start(form, 16, **options)


def test_caches_that_come_back_from_sleep_are_compared(start: Start) -> None:
    tokens = prompt(100)
    engine = start("NHD", 16, chunk_size=32)
    engine.prefill(tokens)
    fresh = {
        name: cache.clone(memory_format=torch.preserve_format)
        for name, cache in engine.caches.items()
    }
    engine.bind(fresh)
    engine.worker.wake_up()
    assert check_load(engine, tokens) == 96
    engine.bind({name: cache.contiguous() for name, cache in fresh.items()})
    engine.worker.wake_up()
    engine.step([])
    assert engine.load(tokens)[0] == 0


@pytest.mark.parametrize("bound", [None, [], torch.tensor([])])
def test_caches_that_do_not_come_back_from_sleep_are_not_used(start: Start, bound: Any) -> None:
    tokens = prompt(100)
    engine = start("NHD", 16, chunk_size=32)
    engine.prefill(tokens)
    engine.layers[next(iter(engine.layers))].kv_cache = bound
    engine.worker.wake_up()
    engine.step([])
    assert engine.load(tokens)[0] == 0


def test_memory_that_came_back_elsewhere_is_viewed_as_it_was_registered() -> None:
    """A layer may be bound to another view than the registered one, as those of MLA are."""
    registered = torch.zeros(4, 1, 16, 24, dtype=torch.bfloat16)
    layer = SimpleNamespace(kv_cache=registered.squeeze(1))
    run = LayerRun(0, [registered], PagedLayout.from_mla(layer.kv_cache))
    report: Any = None
    kind = KindCaches(("layer",), (run,))
    caches = RegisteredCaches({"layer": (layer.kv_cache,)}, {FULL: kind}, report)
    memory = torch.arange(5 * 16 * 24, dtype=torch.int16)
    layer.kv_cache = memory.view(torch.bfloat16).view(5, 16, 24)[1:]
    assert caches.rebind({"layer": layer})
    [cache] = run.caches
    assert (cache.shape, cache.stride(), cache.dtype) == (
        registered.shape,
        registered.stride(),
        registered.dtype,
    )
    assert cache.data_ptr() == layer.kv_cache.data_ptr()
    assert torch.equal(cache.view(torch.int16).flatten(), memory[16 * 24 :])
    layer.kv_cache = layer.kv_cache[:3]
    assert not caches.rebind({"layer": layer})
    assert run.caches == [cache]


def test_head_sizes_and_heads_are_those_of_the_model(start: Start) -> None:
    record = Namespace.from_bytes(start("vec", 16, chunk_size=32).namespace).record
    assert record["layer_shapes"] == [f"2,*,{HEADS},{SIZE}"] * 2
