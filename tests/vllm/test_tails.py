"""Tails in the caches of workers: stored and loaded to the byte, whatever chunks are."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL
from kvshelf.format.names import object_name
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.vllm.metadata import LoadOp, StepMetadata, StoreOp, WorkerMetadata
from tests.sim.engine_caches import FORMS
from tests.sim.engine_sides import next_number
from tests.support.prompts import prompt
from tests.support.waiting import PATIENCE
from tests.vllm.simulated import SimulatedEngine, kv_of

pytestmark = pytest.mark.usefixtures("one_thread")

#: Tensor-parallel ranks of each engine: a few heads, replicas, groups that share tokens.
PARALLEL: list[dict[str, int]] = [
    {"tensor_parallel": 1},
    {"tensor_parallel": 2},
    {"tensor_parallel": 4},
]
LOADS_ONLY: list[dict[str, int]] = [
    {"tensor_parallel": 4, "decode_context": 2},
    {"tensor_parallel": 4, "decode_context": 2, "interleave": 4},
]


def format_of(engine: SimulatedEngine) -> ObjectFormat:
    return ObjectFormat(Namespace.from_bytes(engine.namespace))


def pieces(engine: SimulatedEngine, tokens: Sequence[int]) -> list[Chunk]:
    """The chunks of a prompt, and its tail."""
    fmt = format_of(engine)
    chain = KeyChain(fmt.namespace.digest, fmt.chunk_size)
    chain.extend(tokens)
    tail = chain.tail()
    return chain.chunks + ([] if tail is None else [tail])


def step(engine: SimulatedEngine, meta: StepMetadata) -> tuple[set[str], list[WorkerMetadata]]:
    """One step of all workers; the requests whose loads all of them have reported."""
    answers = []
    for worker in (rank.worker for rank in engine.ranks):
        bound = StepMetadata(stores=[*meta.stores], loads=[*meta.loads])
        worker.bind(bound)
        worker.loads.start()
        worker.stores.save()
        ended = worker.loads.take_ended()
        engine.reported.update(ended.finished)
        engine.bad_blocks |= ended.bad_blocks
        answers.append(worker.worker_metadata())
        worker.clear(bound)
    done = {name for name, count in engine.reported.items() if count == len(engine.ranks)}
    return done, [answer for answer in answers if answer is not None]


def store(engine: SimulatedEngine, tokens: Sequence[int], chunks: Sequence[Chunk]) -> list[int]:
    """Compute a prompt and store these pieces of it; return its blocks."""
    block_ids = engine.blocks_for(len(tokens))
    engine.put(tokens, block_ids, 0, len(tokens))
    size, unit = format_of(engine).chunk_size, engine.block_tokens
    ops = []
    for chunk in chunks:
        first = chunk.index * size
        own = block_ids[first // unit : -(-(first + chunk.tokens) // unit)]
        ops.append(StoreOp(chunk, (own,), repair=False, age=0.0))
    step(engine, StepMetadata(stores=ops))
    for rank in engine.ranks:
        assert rank.worker.drain(PATIENCE) == 0
    return block_ids


def load(
    engine: SimulatedEngine, chunks: Sequence[Chunk], start: int, end: int, name: str = "r"
) -> tuple[list[int], list[WorkerMetadata]]:
    """Load tokens of a prompt; return its blocks."""
    size = format_of(engine).chunk_size
    block_ids = engine.blocks_for(end)
    op = LoadOp(next_number(), name, start, end, list(chunks[start // size :]), (block_ids,))
    engine.bad_blocks = set()
    done, answers = step(engine, StepMetadata(loads=[op]))
    deadline = time.monotonic() + PATIENCE
    while name not in done:
        assert time.monotonic() < deadline
        done, more = step(engine, StepMetadata())
        answers += more
    del engine.reported[name]
    return block_ids, answers


def check_load(engine: SimulatedEngine, tokens: Sequence[int], start: int, end: int) -> None:
    """Load, and check that exactly these tokens arrived and nothing else was touched."""
    before = [[cache.clone() for cache in rank.caches.values()] for rank in engine.ranks]
    block_ids, _ = load(engine, pieces(engine, tokens), start, end)
    assert not engine.bad_blocks
    expected = kv_of(tokens, engine.heads)[:, :, start:end]
    assert torch.equal(engine.get(block_ids, start, end), expected)
    for rank, olds in zip(engine.ranks, before, strict=True):
        _, slots = rank.held(block_ids, start, end)
        for (impl, cache, _), old in zip(rank.model_layers(), olds, strict=True):
            impl.put(cache, slots, impl.get(old, slots))
            assert torch.equal(cache, old)


def objects(engine: SimulatedEngine, chunk: Chunk) -> list[Path]:
    fmt = format_of(engine)
    [folder] = Path(engine.shelf.url).glob(f"*-{fmt.namespace.digest.hex()[:16]}")
    return [folder / object_name(chunk, shard, fmt.shards) for shard in range(fmt.shards)]


@settings(max_examples=12, deadline=None)
@given(
    forms=st.tuples(st.sampled_from(FORMS), st.sampled_from(FORMS)),
    blocks=st.tuples(st.sampled_from([16, 32]), st.sampled_from([16, 32])),
    source=st.sampled_from(PARALLEL),
    target=st.sampled_from(PARALLEL + LOADS_ONLY),
    chunk_size=st.sampled_from([24, 32, 40, 64]),
    length=st.integers(1, 150),
    lacks=st.integers(0, 20),
    computed=st.integers(0, 8),
)
def test_canonical_tails_go_from_any_engine_to_any_other(
    forms: tuple[str, str],
    blocks: tuple[int, int],
    source: dict[str, int],
    target: dict[str, int],
    chunk_size: int,
    length: int,
    lacks: int,
    computed: int,
) -> None:
    tokens = prompt(length, seed=length)
    options: dict[str, Any] = {"chunk_size": chunk_size, "layout": "canonical"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        shelf = Path(folder)
        writer = SimulatedEngine(shelf, forms[0], blocks[0], **source, **options)
        stack.enter_context(closing(writer))
        store(writer, tokens, pieces(writer, tokens))
        reader = SimulatedEngine(shelf, forms[1], blocks[1], seed=1, **target, **options)
        stack.enter_context(closing(reader))
        assert reader.namespace == writer.namespace
        whole = length // chunk_size * chunk_size
        # A hit may end inside the tail.
        end = max(length - lacks, whole + 1) if whole < length else length
        unit = reader.block_tokens
        start = min(computed * unit, (end - 1) // unit * unit)
        check_load(reader, tokens, start, end)


@settings(max_examples=10, deadline=None)
@given(
    form=st.sampled_from(["vec", "amx"]),
    block=st.sampled_from([16, 32]),
    degrees=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    length=st.integers(1, 150),
    lacks=st.integers(0, 20),
    computed=st.integers(0, 8),
)
def test_tails_are_canonical_where_chunks_are_whole_blocks(
    form: str, block: int, degrees: tuple[int, int], length: int, lacks: int, computed: int
) -> None:
    tokens = prompt(length, seed=length)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        shelf = Path(folder)
        engines = [
            SimulatedEngine(shelf, form, block, seed=seed, tensor_parallel=degree, chunk_size=64)
            for seed, degree in enumerate(degrees)
        ]
        for engine in engines:
            stack.enter_context(closing(engine))
        writer, reader = engines
        assert reader.namespace == writer.namespace
        fmt = format_of(writer)
        assert fmt.tails
        assert f"-b{block}" in str(fmt.namespace.record["layouts"])
        found = pieces(writer, tokens)
        block_ids = store(writer, tokens, found)
        whole = length // 64 * 64
        if whole < length:
            # [2, tokens, heads, head size] of each layer, in a shard for each head.
            expected = writer.get(block_ids, whole, length)
            for shard, path in enumerate(objects(writer, found[-1])):
                payload = bytearray(path.read_bytes()[fmt.data_offset :])
                rows = torch.frombuffer(payload, dtype=torch.bfloat16)
                heads = expected.shape[3] // fmt.shards
                own = expected[:, :, :, shard * heads : (shard + 1) * heads]
                assert torch.equal(rows, own.reshape(-1))
        end = max(length - lacks, whole + 1) if whole < length else length
        start = min(computed * block, (end - 1) // block * block)
        check_load(reader, tokens, start, end)


def test_a_tail_without_the_blocks_of_all_its_tokens_is_not_stored(tmp_path: Path) -> None:
    tokens = prompt(100)
    with closing(SimulatedEngine(tmp_path, "vec", 16, chunk_size=64)) as engine:
        found = pieces(engine, tokens)
        block_ids = engine.blocks_for(100)
        engine.put(tokens, block_ids, 0, 100)
        # The first one is the null block.
        own = [0, *block_ids[5:7]]
        step(engine, StepMetadata(stores=[StoreOp(found[-1], (own,), repair=False, age=0.0)]))
        assert engine.worker.drain(PATIENCE) == 0
        store(engine, tokens, found[:-1])
        assert all(path.exists() for path in objects(engine, found[0]))
        assert not any(path.exists() for path in objects(engine, found[-1]))


def test_an_engine_of_unknown_layout_says_that_it_has_no_tails(tmp_path: Path) -> None:
    tokens = prompt(100)
    with closing(SimulatedEngine(tmp_path, "odd", 16, chunk_size=64)) as engine:
        assert not format_of(engine).tails
        tail = pieces(engine, tokens)[-1]
        store(engine, tokens, [tail])
        assert engine.worker.counters.snapshot()["dropped_chunks_error"] == 1
        assert engine.worker.model.registration.memories[FULL].staging.in_use == 0
