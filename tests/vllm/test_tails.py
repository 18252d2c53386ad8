"""Tails in the caches of workers: stored and loaded to the byte, whatever chunks are."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.names import object_name
from kvshelf.vllm.metadata import StepMetadata
from tests.sim.engine import EngineModel
from tests.sim.engine_caches import FORMS, HEADS, PLAIN, make_config
from tests.sim.engine_sides import CHUNK, LoneWorker, MakeWorker, store_op
from tests.sim.storage import FaultyStorage
from tests.support.prompts import prompt
from tests.vllm.test_blocks_and_chunks import engine_options

pytestmark = pytest.mark.usefixtures("one_thread")

#: Tensor-parallel ranks of each engine: a few heads, replicas, groups that share tokens.
DEGREES = [{"tensor_parallel": degree} for degree in (1, 2, 4)]
LOADS_ONLY = [
    {"tensor_parallel": 4, "decode_context": 2},
    {"tensor_parallel": 4, "decode_context": 2, "interleave": 4},
]
ASKED = {"do_remote_decode": True}


def hand_over(
    writer: EngineModel, reader: EngineModel, tokens: list[int], computed: int, lacks: int
) -> None:
    """Have an engine take over a prompt of which vLLM's prefix cache may have some blocks.

    vLLM loads so many tokens less than it was offered, but does not end before the tail.
    """
    unit, others = reader.unit[0], prompt(40, seed=-1)
    reader.run(others)
    # The last block would not be worth a load.
    cached = min(computed, max(0, (len(tokens) - 1) // unit - 1)) * unit
    writer.add("promised", tokens, 1, transfer=ASKED)
    writer.finish()
    writer.drain()
    if cached:
        reader.run(tokens[: cached + 1], answer=1)
    tail = len(tokens) % reader.format.chunk_size
    lacks = min(lacks, max(0, tail - 1))
    ask = reader.connector.get_num_new_matched_tokens

    def ask_for_less(request: Any, computed: int) -> tuple[int | None, bool]:
        matched, is_load = ask(request, computed)
        return matched and max(1, matched - lacks), is_load

    reader.connector.get_num_new_matched_tokens = ask_for_less
    reader.add("taken", tokens, transfer=writer.params["promised"])
    reader.finish()
    assert reader.loaded("taken") == max(1, len(tokens) - cached - lacks)
    # Their blocks are in vLLM's prefix cache, and as they were.
    assert reader.run(others) == [0]
    assert not reader.failed


@settings(max_examples=6, deadline=None)
@given(
    forms=st.tuples(st.sampled_from(FORMS), st.sampled_from(FORMS)),
    blocks=st.tuples(st.sampled_from([16, 32]), st.sampled_from([16, 32])),
    source=st.sampled_from(DEGREES),
    target=st.sampled_from(DEGREES + LOADS_ONLY),
    chunk_size=st.sampled_from([24, 32, 40, 64]),
    length=st.integers(2, 150),
    lacks=st.integers(0, 20),
    computed=st.integers(0, 8),
)
def test_canonical_tail_goes_from_any_engine_to_any_other(
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
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineModel(folder, **engine_options(forms[0], blocks[0], **source, **options)) as writer,
        EngineModel(folder, **engine_options(forms[1], blocks[1], **target, **options)) as reader,
    ):
        hand_over(writer, reader, tokens, computed, lacks)


@settings(max_examples=5, deadline=None)
@given(
    form=st.sampled_from(["vec", "amx"]),
    block=st.sampled_from([16, 32]),
    degrees=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    length=st.integers(2, 150),
    lacks=st.integers(0, 20),
    computed=st.integers(0, 8),
)
def test_tail_is_canonical_where_chunks_are_whole_blocks(
    form: str, block: int, degrees: tuple[int, int], length: int, lacks: int, computed: int
) -> None:
    tokens = prompt(length, seed=length)
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineModel(
            folder, **engine_options(form, block, tensor_parallel=degrees[0], chunk_size=64)
        ) as writer,
        EngineModel(
            folder, **engine_options(form, block, tensor_parallel=degrees[1], chunk_size=64)
        ) as reader,
    ):
        hand_over(writer, reader, tokens, computed, lacks)
        fmt, tail = writer.format, writer.tail_of(tokens)
        assert fmt.tails
        assert f"-b{block}" in str(fmt.namespace.record["layouts"])
        if tail is None:
            return
        # [2, tokens, heads, head size] of each layer, in a shard for each head.
        text, heads = writer.texts["promised"], HEADS // fmt.shards
        for shard in range(fmt.shards):
            path = Path(folder) / fmt.namespace.folder / object_name(tail, shard, fmt.shards)
            payload = bytearray(path.read_bytes()[fmt.data_offset :])
            kv = [
                text.kv(((0.0, ""),), length - tail.tokens, length, name, HEADS)
                for name in writer.worker.layers
            ]
            own = torch.stack(kv)[:, :, :, shard * heads : (shard + 1) * heads]
            assert payload == own.contiguous().view(torch.uint8).numpy().tobytes()


def pieces_of(worker: LoneWorker) -> tuple[Chunk, Chunk]:
    """The chunk and the tail of a prompt."""
    chain = KeyChain(worker.fmt.namespace.digest, CHUNK)
    [chunk] = chain.extend(prompt(CHUNK + 5))
    tail = chain.tail()
    assert tail is not None
    return chunk, tail


def test_tail_without_the_blocks_of_all_its_tokens_is_not_stored(make_worker: MakeWorker) -> None:
    worker = make_worker()
    chunk, tail = pieces_of(worker)
    # The first one is the null block.
    worker.step(StepMetadata(stores=[store_op(tail, (0, 4)), store_op(chunk)]))
    worker.drain()
    assert worker.path(chunk).exists()
    assert not worker.path(tail).exists()


def test_engine_of_unknown_layout_says_that_it_has_no_tails(
    make_worker: MakeWorker, backend: FaultyStorage
) -> None:
    config = make_config(backend.url)
    for name in PLAIN[0].names:
        config.compilation_config.static_forward_context[name].impl.form = "odd"
    worker = make_worker(config=config)
    assert not worker.fmt.tails
    worker.step(StepMetadata(stores=[store_op(pieces_of(worker)[1], (3, 4))]))
    assert worker.counts["dropped_chunks_error"] == 1
    assert worker.gauge("staging_used_bytes") == 0
