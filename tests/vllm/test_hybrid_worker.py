"""The worker half in an engine with several cache groups, or with states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch import Tensor

from kvshelf.config import Config
from kvshelf.errors import UnsupportedError
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, STATE, WINDOW, Kind, kind_key
from kvshelf.format.names import object_name
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.tiers.runtime import Runtime
from kvshelf.vllm.metadata import LoadOp, RefusedStore, StepMetadata, StoreOp, WorkerMetadata
from kvshelf.vllm.namespace import build_namespace
from kvshelf.vllm.scheduler.engine import ranks_with
from kvshelf.vllm.worker.registration import Registration
from kvshelf.vllm.worker.side import WorkerSide
from tests.sim.engine_caches import (
    MODELS,
    Layers,
    PagedCaches,
    model_config,
    names,
    parallel_config,
    speculation,
    vllm_config,
)
from tests.sim.engine_sides import limit_stores, next_number
from tests.sim.storage import FaultyStorage, posix
from tests.support import constants
from tests.support.waiting import PATIENCE, while_patient

CHUNK, BLOCKS = 16, 40
Tables = tuple[list[int], ...]


class HybridWorker(PagedCaches):
    """One worker of a hybrid engine on a shelf.

    Parameters
    ----------
    shelf : Shelf
    model : str or sequence of Layers
        One of :data:`MODELS`, or its groups.
    ranks, rank : int
        Tensor-parallel ranks of a stage; the worker's number over all stages.
    stages : sequence of sequence of int, optional
        For each pipeline stage, the groups whose layers it has.
    native : bool
        The attention backend permutes elements inside blocks, as CPUs do.
    unknown : int, optional
        The layout of this group's caches cannot be learned.
    streams : Any
        The streams of the device on which the caches are.
    others_fill : bool
        Another connector fills free blocks without waiting for the engine's stream.
    **options
        kvshelf's configuration.

    Attributes
    ----------
    namespace_open : Namespace
        The namespace that was announced to it last.
    """

    namespace_open: Namespace

    def __init__(
        self,
        shelf: Shelf,
        model: str | Sequence[Layers],
        *,
        ranks: int = 1,
        rank: int = 0,
        stages: Sequence[Sequence[int]] | None = None,
        native: bool = True,
        unknown: int | None = None,
        streams: Any = None,
        others_fill: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        groups = MODELS[model] if isinstance(model, str) else model
        stages = stages or [range(len(groups))]
        super().__init__(
            groups,
            BLOCKS,
            "vec" if native else "HND",
            rank=rank % ranks,
            ranks=ranks,
            held=stages[rank // ranks],
            odd=unknown,
            seed=seed,
        )
        config = model_config(get_total_num_kv_heads=lambda: 4)
        drafts = any(group.drafts or group.drafted for group in groups)
        self.vllm_config = vllm_config(
            self.layers,
            block_size=8,
            blocks=BLOCKS,
            parallel_config=parallel_config(
                rank=rank,
                world_size=ranks * len(stages),
                tensor_parallel_size=ranks,
                pipeline_parallel_size=len(stages),
            ),
            model_config=config,
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
            speculative_config=speculation("mtp", draft_model_config=config) if drafts else None,
        )
        self.options = Config(
            shared_storage_path="/nowhere",
            weights="name:test",
            chunk_size=CHUNK,
            **constants.taken({"memory_bytes": 8 << 20, **options}),
        )
        runtime = Runtime(self.options, Counters(), lambda: shelf)
        engine = self.vllm_config, self.options, runtime, self.config, rank
        registration = Registration(*engine, streams=lambda device: streams)
        self.side = WorkerSide(registration, others_fill=others_fill)
        self.side.register(self.caches)
        self.registered = self.side.registration.model.caches

    def of(self, kind: Kind) -> list[int]:
        """The numbers of the groups of a kind."""
        return [number for number, group in enumerate(self.groups) if _kind(group) == kind]

    def content(self, group: int, block: int) -> list[Tensor]:
        """The bytes of a block in each layer of a group."""
        return [self.caches[name][block].clone() for name in self.names[group]]

    def namespace(self, *others: HybridWorker, weights: str = "user:test") -> Namespace:
        """The namespace of an engine; `others` are the first workers of its other stages."""
        workers = (self, *others)
        reports = [worker.registered.report for worker in workers if worker.registered]
        return build_namespace(self.vllm_config, self.options, reports, weights)

    def step(self, meta: StepMetadata) -> tuple[set[str], set[str], WorkerMetadata | None]:
        """One step; returns the requests whose loads are over, those to compute, and the rest."""
        self.side.bind(meta)
        self.side.loads.start()
        self.side.stores.save()
        ended = self.side.loads.take_ended()
        assert not ended.bad_blocks
        reported = self.side.worker_metadata()
        self.side.clear(meta)
        return ended.finished, ended.failed, reported


def _kind(group: Layers) -> Kind | None:
    kinds: Mapping[str, Kind | None] = {"full": FULL, "window": WINDOW, "local": WINDOW}
    return kinds.get(group.kind, None if group.kind == "ring" else STATE)


class Rig:
    """A shelf, and workers of hybrid engines on it."""

    def __init__(self, backend: FaultyStorage) -> None:
        self.backend = backend
        self.shelf = Shelf(backend)
        self.workers: list[HybridWorker] = []

    def worker(self, model: str | Sequence[Layers], **options: Any) -> HybridWorker:
        """A worker whose namespace is not known yet."""
        self.workers.append(HybridWorker(self.shelf, model, seed=len(self.workers), **options))
        return self.workers[-1]

    def engine(self, model: str | Sequence[Layers], **options: Any) -> HybridWorker:
        """The only worker of an engine, with its namespace open."""
        worker = self.worker(model, **options)
        open_in(worker, worker.namespace())
        return worker

    def path(self, namespace: Namespace, chunk: Chunk, kind: Kind, shard: int = 0) -> Path:
        """Where an object lies."""
        shards = ObjectFormat(namespace).of(kind).shards
        folder = Path(self.backend.url) / namespace.folder
        return folder / object_name(chunk, shard, shards, kind)

    def close(self) -> None:
        self.backend.heal()
        for worker in self.workers:
            worker.side.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(FaultyStorage(posix(tmp_path / "shelf")))
    yield rig
    rig.close()


def open_in(worker: HybridWorker, namespace: Namespace) -> None:
    """Announce a namespace to a worker."""
    worker.step(StepMetadata(namespace=(namespace.encoded, namespace.slug)))
    assert worker.side.registration.model.serves, worker.side.model.registration
    worker.namespace_open = namespace


def chunks_of(namespace: Namespace, count: int) -> list[Chunk]:
    return KeyChain(namespace.digest, CHUNK).extend(list(range(count * CHUNK)))


def tables(worker: HybridWorker, tokens: int, first: int) -> Tables:
    """Blocks for all tokens of a request in each group, none of which is another group's."""
    found = []
    for group in worker.groups:
        count = 1 if group.kind == "ring" else tokens // group.block_size
        found.append(list(range(first, first + count)))
        first += count
    return tuple(found)


def trimmed(worker: HybridWorker, blocks: Tables, start: int, end: int) -> Tables:
    """The tables of a load, with the null block where vLLM has none."""
    found = []
    for number, (group, ids) in enumerate(zip(worker.groups, blocks, strict=True)):
        size = group.block_size
        if number in worker.of(FULL) or group.kind == "ring":
            first = 0
        elif number in worker.of(WINDOW):
            first = max(0, end - (size + 4) + 1) // size
        else:
            first = end // size - 1
        found.append([0] * first + ids[first : end // size])
    return tuple(found)


def store_ops(worker: HybridWorker, chunks: Sequence[Chunk], blocks: Tables) -> list[StoreOp]:
    """Stores of all kinds of some chunks."""
    ops = []
    for chunk in chunks:
        begin, end = chunk.index * CHUNK, (chunk.index + 1) * CHUNK
        for kind in (FULL, WINDOW, STATE):
            if not worker.of(kind):
                continue
            ids: list[list[int]] = [[] for _ in worker.groups]
            for group in worker.of(kind):
                size = worker.groups[group].block_size
                first = end // size - 1 if kind == STATE else begin // size
                ids[group] = blocks[group][first : end // size]
            ops.append(StoreOp(chunk, tuple(ids), repair=False, age=0.0, kind=kind))
    return ops


def load_op(
    worker: HybridWorker, chunks: Sequence[Chunk], blocks: Tables, start: int = 0, name: str = "r"
) -> LoadOp:
    """A load of all chunks behind token `start`."""
    end = len(chunks) * CHUNK
    reach = max((worker.groups[n].block_size + 4 for n in worker.of(WINDOW)), default=0)
    first = max(start, end - reach + 1) // CHUNK
    return LoadOp(
        next_number(),
        name,
        start,
        end,
        list(chunks[start // CHUNK :]) if worker.of(FULL) else [],
        trimmed(worker, blocks, start, end),
        windows=list(chunks[first:]) if worker.of(WINDOW) else [],
        states=[chunks[-1]] if worker.of(STATE) else [],
    )


def put(worker: HybridWorker, chunks: Sequence[Chunk], first: int = 1) -> Tables:
    """Store all kinds of chunks from blocks, whatever they hold; return the blocks."""
    blocks = tables(worker, len(chunks) * CHUNK, first)
    worker.step(StepMetadata(stores=store_ops(worker, chunks, blocks)))
    assert worker.side.drain(PATIENCE) == 0
    return blocks


def until_loaded(worker: HybridWorker, op: LoadOp) -> set[str]:
    """Load, and return the requests that must be computed."""
    failed: set[str] = set()
    meta = StepMetadata(loads=[op])
    for _ in while_patient():
        finished, more, worker.reported = worker.step(meta)
        failed |= more
        if finished:
            assert finished == {op.request_id}
            return failed
        meta = StepMetadata(idle=True)
    raise AssertionError("the load never ended")


def expect(
    reader: HybridWorker,
    writer: HybridWorker,
    op: LoadOp,
    stored: Tables,
) -> list[Tensor]:
    """The memory of `reader` after a load of what `writer` had in its blocks."""
    expected = [memory.clone() for memory in reader.memory]
    for number, ids in enumerate(op.block_ids):
        size = reader.groups[number].block_size
        if reader.groups[number].kind == "ring":
            # Not touched.
            continue
        for column, block in enumerate(ids):
            if not block or (column + 1) * size <= op.start:
                continue
            for layer in range(len(reader.names[number])):
                content = _content_bytes(reader, number)
                to, source = block * reader.page, stored[number][column] * writer.page
                expected[layer][to : to + content] = writer.memory[layer][source : source + content]
    return expected


def _content_bytes(worker: HybridWorker, group: int) -> int:
    spec = worker.specs[group]
    return int(getattr(spec, "unpadded_page_size_bytes", 0) or spec.real_page_size_bytes)


def holds(worker: HybridWorker, expected: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, worker.memory, expected))


# ------------------------------------------------------------------------- what is described


def test_record_names_the_kind_of_each_layer(rig: Rig) -> None:
    worker = rig.worker("three kinds")
    record = worker.namespace().record
    assert record["layer_names"] == [
        f"model.layers.{number}.{name}"
        for number, name in enumerate(["conv", "attn", "attn", "linear_attn"] * 2)
    ]
    assert record["kinds"] == ["state", "full", "window", "state"] * 2
    assert record["attention"] == ["short_conv@cpu", "full", "sliding", "gdn_attn@cpu"] * 2
    assert record["layouts"][:4] == ["state", "cpu-vec-bf16-b16", "cpu-vec-bf16-b8", "state"]
    assert record["layer_shapes"][0] == "conv:2,16/"
    assert record["layer_shapes"][3] == "conv_q:3,16/;conv_k:3,16/;conv_v:3,32/;ssm:4/,8,8"
    assert record["layer_dtypes"][3] == "BF16;BF16;BF16;F32"
    assert record["head_sizes"][0] == 0
    assert record["sliding_windows"][:4] == [-1, -1, 12, -1]
    assert (record["shards"], record["window_shards"], record["state_shards"]) == (4, 4, 4)
    assert record["stages"] == [8]


def test_attention_within_pieces_of_the_prompt_is_of_kind_window(rig: Rig) -> None:
    record = rig.worker("llama 4").namespace().record
    assert record["kinds"] == ["window", "full"] * 2
    assert record["attention"] == ["chunked", "full"] * 2
    assert record["sliding_windows"] == [-1] * 4


def test_window_that_only_vllm_s_specification_states_is_in_the_record(rig: Rig) -> None:
    known, worker = rig.worker("gemma").namespace(), rig.worker("gemma")
    for layer in worker.layers.values():
        del layer.sliding_window
    worker.side.registration.register(worker.caches)
    worker.registered = worker.side.registration.model.caches
    assert worker.namespace() == known


def test_state_that_lies_elsewhere_is_refused(rig: Rig) -> None:
    worker = rig.worker("qwen")
    name = worker.names[0][0]
    first, second = worker.layers[name].kv_cache
    for parts in ((second, first), (first,), (first, second.clone()), (first.float(), second), ()):
        worker.layers[name].kv_cache = parts
        with pytest.raises(UnsupportedError, match=rf"state of layer {name} does not lie"):
            worker.side.registration.register(worker.caches)


# ------------------------------------------------------------------------- stores and loads


@pytest.mark.parametrize("start", [0, CHUNK, 2 * CHUNK + 8])
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    "model", ["gemma", "qwen", "three kinds", "undivided", "states only", "two windows", "rings"]
)
def test_all_kinds_come_back_to_the_byte(rig: Rig, model: str, native: bool, start: int) -> None:
    writer, reader = (rig.engine(model, native=native) for _ in range(2))
    # vLLM has whole blocks of each group.
    start -= start % math.lcm(*(group.block_size for group in reader.groups))
    chunks = chunks_of(writer.namespace_open, 3)
    stored = put(writer, chunks)
    op = load_op(reader, chunks, tables(reader, 3 * CHUNK, 9), start)
    expected = expect(reader, writer, op, stored)
    assert not holds(reader, expected)
    assert until_loaded(reader, op) == set()
    assert holds(reader, expected)
    assert reader.side.counters.snapshot()["loaded_tokens"] == 3 * CHUNK - start


def test_windows_without_memory_are_dropped_and_full_chunks_are_refused(rig: Rig) -> None:
    """The blocks of windows may be others' in the next step."""
    is_open = rig.backend.hang("write", "*.safetensors")
    worker = rig.engine("gemma")
    limit_stores(worker.side, 4)
    chunks = chunks_of(worker.namespace_open, 6)
    ops = [
        replace(op, request_id="r")
        for op in store_ops(worker, chunks, tables(worker, 6 * CHUNK, 1))
    ]
    _, _, said = worker.step(StepMetadata(stores=ops))
    is_open.set()
    assert worker.side.drain(PATIENCE) == 0
    stored = {
        kind: [rig.path(worker.namespace_open, chunk, kind).exists() for chunk in chunks]
        for kind in (FULL, WINDOW)
    }
    assert stored[FULL] == [True] * 4 + [False] * 2 and 0 < sum(stored[WINDOW]) < 6
    assert said is not None
    ((_, facts),) = said.facts[0]
    assert facts.refused == [RefusedStore("r", chunk, "", 0) for chunk in chunks[4:]]
    dropped = worker.side.counters.snapshot()["dropped_chunks_staging_full"]
    assert dropped == stored[WINDOW].count(False)


@pytest.mark.parametrize("kind", [FULL, WINDOW, STATE])
@pytest.mark.parametrize("damage", [True, False])
def test_load_of_which_one_object_is_missing_or_bad_fails_as_a_whole(
    rig: Rig, kind: Kind, damage: bool
) -> None:
    writer, reader = rig.engine("three kinds"), rig.engine("three kinds")
    chunks = chunks_of(writer.namespace_open, 3)
    put(writer, chunks)
    path = rig.path(writer.namespace_open, chunks[2], kind, 1)
    if damage:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    assert until_loaded(reader, load_op(reader, chunks, tables(reader, 48, 9))) == {"r"}
    told = reader.reported.facts[reader.side.rank]
    failures = [failure for _, facts in told for failure in facts.failures]
    assert failures == [(kind_key(chunks[2].key, kind), damage)]
    assert reader.side.counters.snapshot().get("loaded_tokens", 0) == 0
    # What was missing is stored again, and a bad object is replaced.
    repairs = [
        replace(op, repair=True)
        for op in store_ops(writer, chunks, tables(writer, 48, 1))
        if op.chunk == chunks[2] and op.kind == kind
    ]
    writer.step(StepMetadata(stores=repairs))
    assert writer.side.drain(PATIENCE) == 0
    assert until_loaded(reader, load_op(reader, chunks, tables(reader, 48, 9), name="s")) == set()


def test_load_without_what_it_needs_is_refused(rig: Rig) -> None:
    reader = rig.engine("three kinds")
    chunks = chunks_of(reader.namespace_open, 2)
    whole = load_op(reader, chunks, tables(reader, 32, 1))
    none: Tables = ([0] * 4, *whole.block_ids[1:])
    for number, op in enumerate(
        (
            replace(whole, chunks=[], windows=[], states=[]),
            replace(whole, states=[]),
            replace(whole, block_ids=none),
            replace(whole, block_ids=([],)),
            replace(whole, round=7),
        )
    ):
        op = replace(op, number=next_number(), request_id=f"r{number}")
        before = [memory.clone() for memory in reader.memory]
        assert until_loaded(reader, op) == {op.request_id}
        assert holds(reader, before)


# ------------------------------------------------------------------------- several workers


def whole(workers: Sequence[HybridWorker], group: int, block: int) -> list[Tensor]:
    """What the ranks of a stage hold of a block, with the heads of all ranks, by part."""
    found = []
    for name in workers[0].names[group]:
        if workers[0].of(STATE).count(group):
            parts = [worker.layers[name].kv_cache for worker in workers]
            conv = [each[0][block] for each in parts]
            if len(parts[0]) == 1:
                found.append(torch.cat(conv, 1))
                continue
            # q and k have a quarter of the channels each, v has half of them.
            quarter = conv[0].shape[1] // 4
            found += [
                torch.cat([one[:, begin * quarter : end * quarter] for one in conv], 1)
                for begin, end in ((0, 1), (1, 2), (2, 4))
            ]
            found.append(torch.cat([each[1][block] for each in parts], 0))
        else:
            found.append(torch.cat([worker.caches[name][block] for worker in workers], 0))
    return found


def test_pipeline_stages_have_objects_of_their_own_kinds_only(rig: Rig) -> None:
    stages = ((0, 1), (2, 3))
    first, second = (rig.worker("three kinds", rank=rank, stages=stages) for rank in range(2))
    namespace = first.namespace(second)
    record = namespace.record
    assert record["stages"] == [4, 4]
    assert record["kinds"] == ["state", "full"] * 2 + ["window", "state"] * 2
    assert (record["shards"], record["window_shards"], record["state_shards"]) == (4, 4, 8)
    assert ranks_with(ObjectFormat(namespace), 2) == {FULL: 1, WINDOW: 1, STATE: 2}
    chunks = chunks_of(namespace, 2)
    for worker in (first, second):
        open_in(worker, namespace)
        stored = put(worker, chunks)
    for rank, writer in enumerate((first, second)):
        reader = rig.worker("three kinds", rank=rank, stages=stages)
        open_in(reader, namespace)
        op = load_op(reader, chunks, tables(reader, 32, 9))
        expected = expect(reader, writer, op, stored)
        assert until_loaded(reader, op) == set()
        assert holds(reader, expected)


# ------------------------------------------------------------------------- life of the engine


def test_states_are_used_at_their_new_place_after_sleep(rig: Rig) -> None:
    writer, reader = rig.engine("qwen"), rig.engine("qwen")
    chunks = chunks_of(writer.namespace_open, 2)
    stored = put(writer, chunks)
    reader.side.fall_asleep()
    reader.seed = 9
    reader.allocate()
    reader.side.wake_up()
    op = load_op(reader, chunks, tables(reader, 32, 9))
    expected = expect(reader, writer, op, stored)
    assert until_loaded(reader, op) == set()
    assert holds(reader, expected)


def test_state_of_another_form_after_sleep_ends_caching(rig: Rig) -> None:
    reader = rig.engine("qwen")
    reader.side.fall_asleep()
    name = reader.names[0][0]
    reader.layers[name].kv_cache = reader.layers[name].kv_cache[:1]
    reader.side.wake_up()
    assert reader.side.registration.model.disabled_reason


# ------------------------------------------------------------------------- drafters

DRAFT = "model.layers.6.attn"


def with_drafter(place: str) -> list[Layers]:
    """The groups of "gemma", and where a drafter's layer is."""
    groups = list(MODELS["gemma"])
    if place == "the model's full group":
        groups[2] = replace(groups[2], drafts=(DRAFT,))
    elif place == "the model's windows":
        groups[1] = replace(groups[1], drafts=(DRAFT,))
    elif place == "a full group of its own":
        groups.insert(1, Layers("full", (), 16, drafts=(DRAFT,)))
    else:
        groups.append(Layers("window", (), 8, drafts=(DRAFT,)))
    return groups


WINDOW_DRAFTS = ["the model's windows", "windows of its own"]


@pytest.mark.parametrize("place", WINDOW_DRAFTS)
def test_drafter_with_windows_is_left_out(rig: Rig, place: str) -> None:
    writer, reader = (rig.engine(with_drafter(place)) for _ in range(2))
    assert reader.side.registration.drafter is not None
    assert "sliding windows" in reader.side.registration.drafter.disabled_reason
    chunks = chunks_of(writer.namespace_open, 3)
    put(writer, chunks)
    op = load_op(reader, chunks, tables(reader, 48, 9))
    assert until_loaded(reader, op) == set()
    assert reader.side.counters.snapshot()["loaded_tokens"] == 48


@pytest.mark.parametrize(("models", "drafters"), [("full", "window"), ("window", "full")])
def test_model_of_one_group_has_no_kinds_beside_a_drafter_of_another(
    rig: Rig, models: str, drafters: str
) -> None:
    own = Layers(models, names("attn", 2, 0, 1))
    beside = Layers(drafters, (), 8, drafts=(DRAFT,))
    plain, drafting = rig.engine([own]), rig.engine([beside, own])
    assert "kinds" not in plain.namespace_open.record
    assert drafting.namespace_open == plain.namespace_open


def with_drafted_states() -> list[Layers]:
    """The groups of "qwen", with room for drafts and a drafter's layer."""
    states, others, full = MODELS["qwen"]
    full = replace(full, drafts=(DRAFT,))
    return [replace(states, drafted=2), replace(others, drafted=2), full]


def parts_of(worker: HybridWorker, block: int) -> list[Tensor]:
    """The states in a block of each group, as they are without drafts."""
    found = []
    for number in worker.of(STATE):
        for name in worker.names[number]:
            convolution, recurrent = (part[block] for part in worker.layers[name].kv_cache)
            found += [convolution[: len(convolution) - worker.groups[number].drafted], recurrent]
    return [part.clone() for part in found]


@pytest.mark.parametrize("others_fill", [False, True])
def test_states_of_steps_with_drafts_are_gathered_when_these_are_judged(
    rig: Rig, others_fill: bool
) -> None:
    worker = rig.engine(with_drafted_states(), others_fill=others_fill)
    reader = rig.engine("qwen")
    chunks = chunks_of(worker.namespace_open, 3)
    blocks = tables(worker, 48, 1)
    ops = store_ops(worker, chunks, blocks)
    # The last state is that of an answer.
    ops[-1] = replace(ops[-1], late=True)
    assert ops[-1].kind == STATE
    meta = StepMetadata(stores=ops)
    worker.side.bind(meta)
    worker.side.stores.finish_forward()
    for number in worker.of(STATE):
        for layer in worker.names[number]:
            worker.caches[layer][blocks[number][5]] += 1
    judged = parts_of(worker, blocks[0][5])[:2]
    worker.side.stores.save()
    worker.side.clear(meta)
    assert worker.side.drain(PATIENCE) == 0
    path = rig.path(worker.namespace_open, chunks[2], STATE)
    assert path.exists() is not others_fill
    assert rig.path(worker.namespace_open, chunks[1], STATE).exists()
    if not others_fill:
        op = load_op(reader, chunks, tables(reader, 48, 9))
        assert until_loaded(reader, op) == set()
        assert all(map(torch.equal, parts_of(reader, op.block_ids[0][5])[:2], judged))


def test_layers_that_do_not_tell_their_drafts_are_refused(rig: Rig) -> None:
    worker = rig.worker(with_drafted_states())
    for number in worker.of(STATE):
        for name in worker.names[number]:
            del worker.layers[name].num_spec
    with pytest.raises(UnsupportedError, match="remove --speculative-config"):
        worker.side.registration.register(worker.caches)
