"""Tensor-parallel ranks and pipeline stages: every head in one shard, every shard on one shelf.

Whole engines are simulated: the caches of all workers are filled from one KV, by an oracle of
its own for each cache form; one engine gathers, the other scatters into other blocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import gcd
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from kvshelf.backends import open_backend
from kvshelf.errors import ConfigError
from kvshelf.format.model import default_shards
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.caches import HostKVCache, KVCache, KVMemory, LayerRun, layer_calls
from kvshelf.kv.layout import (
    PagedLayout,
    PermutedLayout,
    packed_positions,
    permutation_bytes,
    slots_of,
)
from kvshelf.kv.topology import ShardPlan, Topology, fitting_shards, shard_plans
from kvshelf.memory.chunk_memory import ChunkMemory
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.transfer.context import ChunkSlots, TransferContext
from kvshelf.transfer.transfers import Transfers
from tests.sim.device import on_a_device
from tests.support import formats
from tests.support.prompts import make_chunks
from tests.support.waiting import PATIENCE

CHUNK = 16
CHUNKS = 2
HEAD_SIZE = 8
CONTENT = 24
BLOCKS = 20

# ------------------------------------------------------------------------- who has what


def held_heads(rank: int, ranks: int, heads: int) -> range:
    """The heads of a layer that vLLM gives a tensor-parallel rank."""
    if heads < ranks:
        first = rank // (ranks // heads)
        return range(first, first + 1)
    return range(rank * heads // ranks, (rank + 1) * heads // ranks)


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        # Stage by stage.
        (
            Topology(4, 8, 2, 2),
            [ShardPlan(s) for s in ((0, 1), (2, 3), (4, 5), (6, 7))],
        ),
        (
            Topology(1, 1, 1, whole_ranks=True, prefill_context=2),
            [ShardPlan((0,), 2, n) for n in range(2)],
        ),
        # Blocks of an unknown layout are not split, nor shared by replicas.
        (Topology(1, 4, 2, 2, whole_ranks=True), [ShardPlan((n,)) for n in range(4)]),
    ],
)
def test_plans_of_stages_and_of_whole_ranks(topology: Topology, expected: list[ShardPlan]) -> None:
    assert [topology.plan(worker) for worker in range(len(expected))] == expected


@pytest.mark.parametrize(
    ("ranks", "copies", "context"),
    [
        (ranks, copies, context)
        for ranks, copies, context in product((1, 2, 4, 8), repeat=3)
        if ranks * copies <= 8 and ranks * copies % context == 0
    ],
)
def test_each_rank_loads_the_heads_that_vllm_gives_it_and_one_group_stores_them(
    ranks: int, copies: int, context: int
) -> None:
    """All layers with up to eight heads: those with fewest heads, and those with most."""
    degrees = [(few, most) for few, most in product((1, 2, 4, 8), repeat=2) if few <= most]
    for few, most in degrees:
        shards = fitting_shards(few, ranks)
        arguments = (few, shards, ranks, 1, False, copies, context, most)
        if ranks * copies // min(most, ranks) % context:
            with pytest.raises(ConfigError, match="ranks with different KV heads"):
                Topology(*arguments)
            continue
        topology = Topology(*arguments)
        writers: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for worker in range(ranks * copies):
            copy, rank = divmod(worker, ranks)
            # vLLM fills the groups that share tokens by tensor-parallel rank, then by copy.
            place = rank * copies + copy
            plan = topology.plan(worker)
            assert (plan.context_ranks, plan.context_rank) == (context, place % context)
            for heads in (few, most):
                own = held_heads(rank, ranks, heads)
                each = heads // shards
                parts = max(1, len(plan.shards) * each // len(own))
                begin = plan.shards[0] * each + plan.part(parts) * len(own)
                assert list(own) == list(range(begin, begin + len(own)))
            for index, shard in product(range(plan.replicas * 2), plan.shards):
                if shard in plan.writes(index):
                    writers[index, shard].append(place)
        if topology.divided:
            assert not writers
            continue
        assert {shard for _, shard in writers} == set(range(shards))
        for places in writers.values():
            first = min(places)
            assert sorted(places) == list(range(first, first + context))
            assert first % context == 0


def test_context_ranks_of_a_hybrid_model_hold_whole_states() -> None:
    fields, ranks, expected = HEADS_OF_RECORDS[-1]
    assert {
        kind: found.decode_context
        for kind, found in Topology.of(fields, ranks, decode_context=2).items()
    } == dict.fromkeys(expected, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_heads": 12, "shards": 6, "tensor_parallel": 4}, "expected 4, for instance"),
        # A rank would hold half a shard.
        ({"kv_heads": 16, "shards": 8, "tensor_parallel": 16}, "expected 16, for instance"),
        ({"kv_heads": 8, "shards": 3}, "expected 8, for instance"),
        ({"kv_heads": 8, "shards": 3, "stages": 2}, "expected 16, for instance"),
        ({"kv_heads": 6, "shards": 2, "tensor_parallel": 4}, "cannot be spread over"),
        (
            {"kv_heads": 4, "shards": 4, "tensor_parallel": 2, "whole_ranks": True},
            "each of the 2 ranks stores whole blocks",
        ),
        (
            {"kv_heads": 2, "shards": 2, "tensor_parallel": 12, "decode_context": 4},
            "different KV heads: set it to a divisor of 6",
        ),
        (
            {"kv_heads": 2, "shards": 2, "tensor_parallel": 8, "decode_context": 4}
            | {"most_kv_heads": 4},
            "different KV heads: set it to a divisor of 2",
        ),
        (
            {"kv_heads": 1, "shards": 2, "tensor_parallel": 2, "whole_ranks": True}
            | {"decode_context": 2},
            "blocks of an unknown layout cannot be stored: set it to 1",
        ),
    ],
)
def test_shards_that_do_not_fit_are_refused_with_a_number_that_does(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology(**arguments)


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "stages", "shards"),
    [
        (8, 1, 1, 8),
        (8, 8, 2, 16),
        (8, 16, 1, 8),
        # Twelve heads make six shards, which four ranks cannot divide.
        (12, 4, 1, 4),
        (30, 5, 1, 5),
        # A rank would hold half of one of eight.
        (16, 16, 2, 32),
        (12, 12, 1, 12),
    ],
)
def test_new_namespace_has_the_most_shards_that_fit_the_ranks(
    kv_heads: int, ranks: int, stages: int, shards: int
) -> None:
    assert fitting_shards(kv_heads, ranks, stages) == shards
    Topology(kv_heads, shards, ranks, stages)


def record(shapes: str, **fields: Any) -> dict[str, Any]:
    """The fields of a namespace record that say how its layers are divided."""
    layers = shapes.split()
    return {
        "stages": [len(layers)],
        "layouts": ["canonical"] * len(layers),
        "layer_shapes": layers,
        "layer_dtypes": ["BF16"] * len(layers),
        "kv_heads": 8,
        **fields,
    }


HEADS_OF_RECORDS: list[tuple[dict[str, Any], int, dict[str, Topology]]] = [
    (record("2,*,8,4 2,*,8,4", shards=4), 2, {"full": Topology(8, 4, 2)}),
    # A new namespace gets the shards that follow from its heads, or from whole ranks.
    (record("2,*,8,4 2,*,2,4"), 2, {"full": Topology(2, 2, 2, most_kv_heads=8)}),
    (
        record("*,9 *,9", stages=[1, 1], layouts=["opaque-1", "opaque-1"]),
        2,
        {"full": Topology(8, 4, 2, 2, whole_ranks=True)},
    ),
    # One content for all heads, whatever else is said of the model's.
    (record("*,24", shards=1), 4, {"full": Topology(1, 1, 4)}),
    (
        record(
            "2,*,2,4 2,*,4,4 conv:3,8/;ssm:4/,16",
            kinds=["full", "window", "state"],
            stages=[1, 2],
            layouts=["canonical", "canonical", "state"],
            layer_dtypes=["BF16", "BF16", "BF16;F32"],
            shards=2,
            window_shards=4,
        ),
        2,
        {"full": Topology(2, 2, 2), "window": Topology(4, 4, 2), "state": Topology(4, 4, 2)},
    ),
]


@pytest.mark.parametrize(("fields", "ranks", "expected"), HEADS_OF_RECORDS)
def test_topology_of_each_kind_follows_from_the_record(
    fields: dict[str, Any], ranks: int, expected: dict[str, Topology]
) -> None:
    found = Topology.of(fields, ranks)
    assert list(found) == list(expected)
    for kind, topology in expected.items():
        most = topology.most_kv_heads or topology.kv_heads
        if kind == "state":
            most = 8
        assert found[kind] == replace(topology, most_kv_heads=most)  # type: ignore[index]
        plans = [shard_plans(fields, found, worker) for worker in range(ranks * 2)]
        shards = [shard for plan in plans if kind in plan for shard in plan[kind].shards]  # type: ignore[index]
        assert set(shards) == set(range(topology.shards))
    if "window" in expected:
        assert [set(plan) for plan in plans] == [{"full"}] * 2 + [{"window", "state"}] * 2


# ------------------------------------------------------------------------- caches of all forms


@dataclass(frozen=True)
class Form:
    """One way in which a paged cache may lie, and how to read a token's KV from it by hand."""

    make: Callable[[int, int, int], torch.Tensor]
    layout: Callable[[torch.Tensor], PagedLayout | PermutedLayout]
    #: (cache, block, offset) -> view [kv_planes, heads, width]
    at: Callable[[torch.Tensor, int, int], torch.Tensor]


def _int16(*shape: int) -> torch.Tensor:
    # The bytes of bfloat16, in a dtype whose values compare as bytes do.
    return torch.full(shape, -1, dtype=torch.int16)


def _vec(cache: torch.Tensor) -> PermutedLayout:
    blocks, heads, size, _ = cache.shape
    positions = packed_positions("vec", size, HEAD_SIZE, 2)
    assert positions is not None
    return PermutedLayout(
        size,
        cache.stride(0) * 2,
        cache.stride(1) * 2,
        2,
        heads,
        HEAD_SIZE,
        2,
        blocks,
        permutation_bytes(positions),
    )


def _vec_at(cache: torch.Tensor, block: int, offset: int) -> torch.Tensor:
    # K transposed, then V. K and V have different strides, so this is a copy: see `write`.
    blocks, heads, size, _ = cache.shape
    flat = cache.view(blocks, heads, -1)[block]
    keys = flat[:, : size * HEAD_SIZE].view(heads, HEAD_SIZE, size)[:, :, offset]
    values = flat[:, size * HEAD_SIZE :].view(heads, size, HEAD_SIZE)[:, offset]
    return torch.stack((keys, values))


FORMS = {
    "HND": Form(
        lambda b, h, n: _int16(b, h, n, 2 * HEAD_SIZE),
        lambda cache: PagedLayout.from_bhnc(cache, HEAD_SIZE),
        lambda c, b, o: c[b, :, o].view(-1, 2, HEAD_SIZE).transpose(0, 1),
    ),
    "NHD": Form(
        lambda b, h, n: _int16(b, n, h, 2 * HEAD_SIZE).transpose(1, 2),
        lambda cache: PagedLayout.from_bhnc(cache, HEAD_SIZE),
        lambda c, b, o: c[b, :, o].view(-1, 2, HEAD_SIZE).transpose(0, 1),
    ),
    "2BNHD": Form(
        lambda b, h, n: _int16(2, b, n, h, HEAD_SIZE),
        PagedLayout.from_2bnhd,
        lambda c, b, o: c[:, b, o],
    ),
    "B2NHD": Form(
        lambda b, h, n: _int16(b, 2, n, h, HEAD_SIZE),
        PagedLayout.from_b2nhd,
        lambda c, b, o: c[b, :, o],
    ),
    "vec": Form(lambda b, h, n: _int16(b, h, n, 2 * HEAD_SIZE), _vec, _vec_at),
}
MLA = Form(
    lambda b, h, n: _int16(b, n, CONTENT),
    PagedLayout.from_mla,
    lambda c, b, o: c[b, o].view(1, 1, CONTENT),
)


def write(name: str, cache: torch.Tensor, block: int, offset: int, kv: torch.Tensor) -> None:
    form = FORMS.get(name, MLA)
    if name == "vec":
        blocks, heads, size, _ = cache.shape
        flat = cache.view(blocks, heads, -1)[block]
        flat[:, : size * HEAD_SIZE].view(heads, HEAD_SIZE, size)[:, :, offset] = kv[0]
        flat[:, size * HEAD_SIZE :].view(heads, size, HEAD_SIZE)[:, offset] = kv[1]
    else:
        form.at(cache, block, offset)[:] = kv


class SimulatedEngine:
    """The paged caches of all workers of an engine."""

    def __init__(
        self,
        topology: Topology,
        fmt: ObjectFormat,
        stages: list[int],
        form: str,
        block: int,
        heads: Sequence[int],
        *,
        on_device: bool = False,
        whole_blocks: bool = False,
    ) -> None:
        self.topology, self.fmt, self.form, self.block = topology, fmt, form, block
        self.stages, self.heads = stages, heads
        how = FORMS.get(form, MLA)
        self.caches: list[list[torch.Tensor]] = []
        self.memories: list[KVCache] = []
        for worker in range(topology.stages * topology.tensor_parallel):
            stage = worker // topology.tensor_parallel
            first = sum(stages[:stage])
            of_stage = heads[first : first + stages[stage]]
            counts = [max(1, count // topology.tensor_parallel) for count in of_stage]
            caches = [how.make(BLOCKS * 16 // block, count, block) for count in counts]
            runs = []
            for _, numbers in groupby(range(len(counts)), key=of_stage.__getitem__):
                alike = list(numbers)
                layout = how.layout(caches[alike[0]])
                run = LayerRun(alike[0], [caches[n] for n in alike], layout)
                if whole_blocks:
                    assert isinstance(layout, PermutedLayout)
                    run = replace(run, layout=layout.as_blocks(), token_layout=layout)
                runs.append(run)
            calls = layer_calls(fmt, runs, topology.plan(worker))
            self.caches.append(caches)
            self.memories.append(on_a_device(calls) if on_device else HostKVCache(calls))

    def held(self, worker: int, layer: int) -> list[int]:
        """The heads of a layer that vLLM gives this worker."""
        ranks = self.topology.tensor_parallel
        return list(held_heads(worker % ranks, ranks, self.heads[layer]))

    def slots(self, seed: int, chunk: int, tokens: int = CHUNK) -> torch.Tensor:
        """Slots of one chunk or tail in scattered blocks, other ones for each seed."""
        order = torch.randperm(
            BLOCKS * 16 // self.block, generator=torch.Generator().manual_seed(seed)
        )
        return slots_of(order.tolist(), self.block, chunk * CHUNK, tokens)

    def each(self) -> list[tuple[int, int, int, torch.Tensor]]:
        """(worker, layer of the model, layer of the worker, cache)."""
        found = []
        for worker, caches in enumerate(self.caches):
            first = sum(self.stages[: worker // self.topology.tensor_parallel])
            found += [(worker, first + n, n, cache) for n, cache in enumerate(caches)]
        return found

    def fill(self, kv: torch.Tensor, seed: int) -> None:
        """Put ``kv[layer, kv, token, head, element]`` where a model would."""
        for position, slot in enumerate(self.slots(seed, 0, kv.shape[2]).tolist()):
            for worker, layer, _, cache in self.each():
                token = kv[layer, :, position, self.held(worker, layer)]
                write(self.form, cache, slot // self.block, slot % self.block, token)

    def holds(self, kv: torch.Tensor, seed: int) -> bool:
        at = FORMS.get(self.form, MLA).at
        return all(
            torch.equal(
                at(cache, slot // self.block, slot % self.block),
                kv[layer, :, position, self.held(worker, layer)],
            )
            for position, slot in enumerate(self.slots(seed, 0, kv.shape[2]).tolist())
            for worker, layer, _, cache in self.each()
        )


def make_format(
    heads: Sequence[int],
    shards: int,
    stages: list[int],
    *,
    mla: bool = False,
    layout: str = "canonical",
) -> ObjectFormat:
    shapes = [f"*,{CONTENT}" if mla else f"2,*,{h},{HEAD_SIZE}" for h in heads]
    return formats.make_format(
        sum(stages),
        layout=layout,
        chunk_size=CHUNK,
        shards=shards,
        stages=stages,
        kv_heads=max(heads),
        layer_shapes=shapes,
    )


def random_kv(
    layers: int, kv_heads: int, mla: bool, seed: int, tokens: int = CHUNKS * CHUNK
) -> torch.Tensor:
    return torch.randint(
        0,
        2**15,
        (layers, 1 if mla else 2, tokens, kv_heads, CONTENT if mla else HEAD_SIZE),
        dtype=torch.int16,
        generator=torch.Generator().manual_seed(seed),
    )


@dataclass(frozen=True)
class Pairing:
    """Two engines of one model that can share a shelf; the first can store."""

    fmt: ObjectFormat
    stages: list[int]
    heads: list[int]
    topologies: list[Topology]
    mla: bool


@st.composite
def pairings(draw: st.DrawFn) -> Pairing:
    mla = draw(st.booleans())
    stages = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    several = st.sampled_from([[2, 4], [2, 8], [4, 16], [1, 2], [4, 6], [3, 12]])
    one = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]).map(lambda heads: [heads])
    kinds = draw(several | one)
    layers = sum(stages)
    heads = [1] * layers if mla else [draw(st.sampled_from(kinds)) for _ in range(layers)]
    common = gcd(*heads)
    degrees = [n for n in (1, 2, 4, 8) if all(h % n == 0 or n % h == 0 for h in heads)]
    whole = [n for n in degrees if n <= common or max(heads) == common]
    pair = [draw(st.sampled_from(whole)), draw(st.sampled_from(degrees))]
    possible = [n for n in range(1, common + 1) if common % n == 0]
    chosen = [default_shards(common), *possible]
    fitting = [
        split * len(stages)
        for split in chosen
        if all(split % min(ranks, common) == 0 for ranks in pair)
    ]
    shards = draw(st.sampled_from(fitting))
    topologies = [
        Topology(common, shards, ranks, len(stages), most_kv_heads=max(heads)) for ranks in pair
    ]
    return Pairing(make_format(heads, shards, stages, mla=mla), stages, heads, topologies, mla)


def of_piece(memory: KVMemory, tokens: int) -> KVMemory:
    """The memory in the form that takes a chunk or a tail."""
    return memory if tokens == CHUNK else memory.of_tail(tokens)


@settings(max_examples=50, deadline=None)
@given(pairings(), st.data())
def test_what_one_topology_stores_another_loads(pairing: Pairing, data: st.DataObject) -> None:
    fmt, stages, heads, topologies = (
        pairing.fmt,
        pairing.stages,
        pairing.heads,
        pairing.topologies,
    )
    note(f"{heads} {topologies}")
    forms = st.just("MLA") if pairing.mla else st.sampled_from(sorted(FORMS))
    engines = []
    for topology in topologies:
        form = data.draw(forms)
        block = data.draw(st.sampled_from([4, 8, 16]))
        on_device = form != "vec" and data.draw(st.booleans())
        engines.append(
            SimulatedEngine(topology, fmt, stages, form, block, heads, on_device=on_device)
        )
    writer, reader = engines
    # Whole chunks, and a tail.
    pieces = [CHUNK] * CHUNKS + [data.draw(st.integers(1, CHUNK - 1))]
    kv = random_kv(sum(stages), max(heads), pairing.mla, data.draw(st.integers(0, 99)), sum(pieces))
    writer.fill(kv, seed=1)
    for index, count in enumerate(pieces):
        payloads: dict[int, torch.Tensor] = {}
        for worker, memory in enumerate(writer.memories):
            shards = topologies[0].plan(worker).writes(index)
            assert not set(shards) & set(payloads), "written twice"
            fresh = [
                torch.zeros(fmt.payload_size(shard, count), dtype=torch.uint8) for shard in shards
            ]
            if shards:
                copy = of_piece(memory, count).gather(writer.slots(1, index, count), fresh)
                assert copy is not None
                copy.wait()
            payloads.update(zip(shards, fresh, strict=True))
        assert sorted(payloads) == list(range(fmt.shards))
        # Format: tokens outside heads, K in front of V, heads of the shard in order.
        for shard, payload in payloads.items():
            split = fmt.shards // len(stages)
            stage, place = divmod(shard, split)
            tokens = slice(index * CHUNK, index * CHUNK + count)
            expected = [
                kv[layer, :, tokens, place * heads[layer] // split :][
                    :, :, : heads[layer] // split
                ].reshape(-1)
                for layer in range(sum(stages[:stage]), sum(stages[: stage + 1]))
            ]
            assert torch.equal(payload.view(torch.int16), torch.cat(expected))
        for worker, memory in enumerate(reader.memories):
            for shard in topologies[1].plan(worker).shards:
                slots = reader.slots(2, index, count)
                of_piece(memory, count).scatter(shard, slots, payloads[shard])
    assert reader.holds(kv, seed=2)
    for memory in (*writer.memories, *reader.memories):
        memory.close()


@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 4]),
    split=st.sampled_from([1, 2]),
    block=st.sampled_from([2, 4, 8, 16]),
    tokens=st.integers(1, CHUNK - 1),
    skipped=st.sets(st.integers(0, CHUNK - 2)),
)
def test_tail_is_canonical_also_where_chunks_are_whole_blocks(
    heads: int, split: int, block: int, tokens: int, skipped: set[int]
) -> None:
    shards = min(heads, split)
    fmt = make_format([heads] * 2, shards, [2], layout=f"cpu-vec-bf16-b{block}")
    topology = Topology(heads, shards)
    engines = [
        SimulatedEngine(topology, fmt, [2], "vec", block, [heads] * 2, whole_blocks=True)
        for _ in range(2)
    ]
    kv = random_kv(2, heads, False, 3, tokens)
    writer, reader = engines
    writer.fill(kv, seed=1)
    payloads = [
        torch.zeros(fmt.payload_size(shard, tokens), dtype=torch.uint8) for shard in range(shards)
    ]
    writer.memories[0].of_tail(tokens).gather(writer.slots(1, 0, tokens), payloads)
    each = heads // shards
    for shard, payload in enumerate(payloads):
        own = kv[:, :, :, shard * each : (shard + 1) * each]
        assert torch.equal(payload.view(torch.int16), own.reshape(-1))
        slots = reader.slots(2, 0, tokens)
        slots[[at for at in skipped if at < tokens]] = -1
        reader.memories[0].of_tail(tokens).scatter(shard, slots, payload)
    # What was skipped is as it was made.
    kv[:, :, [at for at in skipped if at < tokens]] = -1
    assert reader.holds(kv, seed=2)


def test_tail_needs_its_own_slots_and_payloads() -> None:
    fmt = make_format([2, 2], 2, [2])
    engine = SimulatedEngine(Topology(2, 2), fmt, [2], "NHD", 4, [2, 2])
    on_device = SimulatedEngine(Topology(2, 2), fmt, [2], "NHD", 4, [2, 2], on_device=True)
    good = [torch.zeros(fmt.payload_size(shard, 5), dtype=torch.uint8) for shard in range(2)]
    for memory in (*engine.memories, *on_device.memories):
        for tokens in (0, CHUNK, CHUNK + 1):
            with pytest.raises(ValueError, match=f"a tail of {tokens} tokens: expected 1 to 15"):
                memory.of_tail(tokens)
        tails = memory.of_tail(5)
        for count in (4, 6):
            with pytest.raises(ValueError, match="slot_mapping"):
                tails.gather(torch.arange(count), good)
            with pytest.raises(ValueError, match="slot_mapping"):
                tails.scatter(0, torch.arange(count), good[0])
        short = [payload[:-1] for payload in good]
        with pytest.raises(ValueError, match="expected"):
            tails.gather(torch.arange(5), short)
        with pytest.raises(ValueError, match="expected"):
            tails.scatter_chunk(range(2), torch.arange(5), short)
        memory.close()


# ------------------------------------------------------------------------- through a shelf


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "stages"),
    [(4, (4, 1), [2]), (4, (1, 2), [2]), (2, (4, 8), [1, 2]), (1, (8, 2), [2])],
)
def test_stores_of_all_ranks_make_one_chunk_that_other_ranks_load(
    kv_heads: int, ranks: tuple[int, int], stages: list[int]
) -> None:
    shards = default_shards(kv_heads, len(stages))
    heads = [kv_heads] * sum(stages)
    fmt = make_format(heads, shards, stages)
    shelf = Shelf(open_backend(f"memory://topology-{kv_heads}-{ranks[0]}-{ranks[1]}"))
    writer, reader = (
        SimulatedEngine(Topology(kv_heads, shards, n, len(stages)), fmt, stages, form, 8, heads)
        for n, form in zip(ranks, ("vec", "NHD"), strict=True)
    )
    kv = random_kv(sum(stages), kv_heads, mla=False, seed=5)
    writer.fill(kv, seed=1)
    chunks = make_chunks(fmt, CHUNKS)
    written: Counter[str] = Counter()
    view = shelf.view(fmt)
    for engine, stores in ((writer, True), (reader, False)):
        for worker, memory in enumerate(engine.memories):
            plan = engine.topology.plan(worker)
            counters, host = Counters(), ChunkMemory(1 << 20)
            context = TransferContext(fmt, shelf.backend, memory, host, counters, plan)
            with closing(host), closing(Transfers([context])) as transfer:
                if stores:
                    for chunk in chunks:
                        item = ChunkSlots(chunk, writer.slots(1, chunk.index))
                        transfer.stores[fmt.kind].store(view, item)
                    assert transfer.drain(PATIENCE) == 0
                    written["bytes"] += counters.take().get("stored_bytes", 0)
                    continue
                items = [ChunkSlots(chunk, reader.slots(2, chunk.index)) for chunk in chunks]
                transfer.load("r", {fmt.kind: view}, {fmt.kind: items})
                while not (loads := transfer.poll(0.01)):
                    assert transfer.loading
                assert not loads[0].failed
    # Nothing was written twice, not even what several ranks hold.
    assert written["bytes"] == CHUNKS * sum(fmt.object_size(n) for n in range(shards))
    assert reader.holds(kv, seed=2)
