"""States of layers: their parts, and that engines with other tensor-parallel degrees load them.

Whole engines are simulated: an oracle divides the state of a model among ranks as vLLM does, and
lays it out in blocks; one engine gathers, the other scatters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.format.kinds import STATE
from kvshelf.format.model import default_shards
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.caches import HostKVCache, KVCache, layer_calls
from kvshelf.kv.states import (
    StateLayer,
    StateParts,
    StateSlots,
    can_divide,
    split_state,
    state_runs,
)
from kvshelf.kv.topology import ShardPlan, Topology
from tests.sim.device import on_a_device
from tests.support.formats import make_format

BF16, F32 = torch.bfloat16, torch.float32
BLOCKS = 6
ROWS = 3


@dataclass(frozen=True)
class Family:
    """A kind of state layer, with the sizes of the whole model.

    `sections` are the channels of each section of the convolution, `ssm` is the shape of the rest.
    """

    mamba_type: str
    sections: tuple[int, ...]
    ssm: tuple[int, ...]
    conv_dtype: torch.dtype = BF16
    ssm_dtype: torch.dtype = F32

    def shapes(self, ranks: int, conv_dim_first: bool) -> list[tuple[int, ...]]:
        """As vLLM's MambaSpec gives them."""
        shapes = []
        if self.sections:
            channels = sum(self.sections) // ranks
            shapes.append((channels, ROWS) if conv_dim_first else (ROWS, channels))
        if self.ssm:
            shapes.append((self.ssm[0] // ranks, *self.ssm[1:]))
        return shapes

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [self.conv_dtype] * bool(self.sections) + [self.ssm_dtype] * bool(self.ssm)

    def split(self, ranks: int, conv_dim_first: bool) -> StateParts:
        shapes = self.shapes(ranks, conv_dim_first)
        return split_state(self.mamba_type, shapes, self.dtypes, ranks, conv_dim_first)

    def random(self, seed: int) -> list[torch.Tensor]:
        """The state of the whole model: each section [rows, channels, bytes], then the rest."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(ROWS, channels, self.conv_dtype.itemsize) for channels in self.sections]
        if self.ssm:
            shapes.append((*self.ssm, self.ssm_dtype.itemsize))
        return [
            torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes
        ]

    def share(
        self, state: Sequence[torch.Tensor], number: int, count: int, conv_dim_first: bool
    ) -> list[torch.Tensor]:
        """One of `count` equal shares of each tensor of :meth:`random`, in the stored order."""
        found = []
        for section in state[: len(self.sections)]:
            part = section.chunk(count, dim=1)[number]
            found.append(part.transpose(0, 1) if conv_dim_first else part)
        return found + [ssm.chunk(count, dim=0)[number] for ssm in state[len(self.sections) :]]

    def block(
        self, state: Sequence[torch.Tensor], rank: int, ranks: int, conv_dim_first: bool
    ) -> torch.Tensor:
        """The bytes of a block of a rank."""
        share = self.share(state, rank, ranks, conv_dim_first)
        sections = share[: len(self.sections)]
        whole = [torch.cat(sections, dim=0 if conv_dim_first else 1)] if sections else []
        return torch.cat([part.reshape(-1) for part in (*whole, *share[len(sections) :])])


LFM2 = Family("short_conv", (256,), ())


@pytest.mark.parametrize(
    ("mamba_type", "shapes", "names"),
    [
        # Mamba2 with one group for each rank: the model may have fewer, which ranks then copy.
        ("mamba2", [(3, 64 + 2 * 8), (4, 16, 8)], "conv:3,80;ssm:4,16,8"),
        # What vLLM adds for ReplaySSM.
        (
            "mamba2",
            [(3, 64 + 4 * 8), (4, 16, 8), (4, 8, 16), (4, 8), (2, 8, 8)],
            "conv:3,96;ssm:4,16,8;part2:4,8,16;part3:4,8;part4:2,8,8",
        ),
        # Shapes that are not those of the type.
        ("gdn_attn", [(3, 100), (4, 16, 8)], "conv:3,100;ssm:4,16,8"),
        ("gdn_attn", [(3, 64), (4, 16, 8)], "conv:3,64;ssm:4,16,8"),
        ("mamba1", [(3, 64), (32, 8)], "conv:3,64;ssm:32,8"),
        ("mamba1", [(3, 64), (64, 8, 2)], "conv:3,64;ssm:64,8,2"),
        ("short_conv", [(3, 64), (64, 8)], "conv:3,64;part1:64,8"),
        ("linear", [(4, 16)], "ssm:4,16"),
        ("custom", [(3, 64), (64, 8)], "part0:3,64;part1:64,8"),
    ],
)
def test_state_of_unknown_division_is_stored_by_rank(
    mamba_type: str, shapes: list[tuple[int, ...]], names: str
) -> None:
    state = split_state(mamba_type, shapes, [F32] * len(shapes), 2, False)
    assert state.layout == "state-tp2"
    assert state.fields[0] == names


def test_all_states_of_a_model_are_divided_or_none() -> None:
    divided = LFM2.split(4, False)
    whole = split_state("short_conv", LFM2.shapes(4, False), [BF16], 4, False, divide=False)
    assert can_divide([divided, divided])
    assert not can_divide([divided, whole])
    assert not can_divide([whole])
    # Twelve channels make six shards, which two ranks can divide, and four cannot.
    twelve = Family("short_conv", (12,), ())
    assert can_divide([twelve.split(2, False)])
    assert not can_divide([twelve.split(4, False)])


def test_drafts_widen_the_block_and_not_what_is_stored() -> None:
    channels, ssm, drafts = 2 * 64 + 64, (4, 16, 64), 2
    arguments = ([BF16, F32], 2, False)
    plain = split_state("gdn_attn", [(ROWS, channels), ssm], *arguments)
    wide = split_state("gdn_attn", [(ROWS + drafts, channels), ssm], *arguments, drafts=drafts)
    added = drafts * channels * BF16.itemsize
    *sections, last = plain.places
    assert wide.parts == plain.parts
    assert wide.places == (*sections, replace(last, offset=last.offset + added))
    assert wide.nbytes == plain.nbytes + added


@pytest.mark.parametrize(
    ("mamba_type", "shapes", "conv_dim_first"),
    [
        ("custom", [(ROWS, 192), (4, 16, 64)], False),
        ("mamba1", [(ROWS, 64), (64, 8)], False),
        ("gdn_attn", [(192, ROWS), (4, 16, 64)], True),
        ("gdn_attn", [(2, 192), (4, 16, 64)], False),
    ],
)
def test_states_of_which_drafts_may_have_any_part_are_refused(
    mamba_type: str, shapes: list[tuple[int, ...]], conv_dim_first: bool
) -> None:
    with pytest.raises(UnsupportedError, match="belongs to drafts"):
        split_state(mamba_type, shapes, [F32, F32], 1, conv_dim_first, drafts=2)


def test_dtype_without_a_name_in_the_format_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="mamba_ssm_cache_dtype"):
        split_state("linear", [(4, 16, 16)], [torch.float64], 1, False)


# ------------------------------------------------------------------------- engines


def states_format(
    families: Sequence[Family], stages: list[int], conv_dim_first: bool, **fields: Any
) -> ObjectFormat:
    states = [family.split(1, conv_dim_first) for family in families]
    shards = default_shards(gcd(*(state.heads for state in states)), len(stages))
    own: dict[str, Any] = {
        "chunk_size": 128,
        "shards": shards,
        "state_shards": shards,
        "kinds": [STATE] * len(states),
        "stages": stages,
        "layouts": [state.layout for state in states],
        "layer_shapes": [state.fields[0] for state in states],
        "layer_dtypes": [state.fields[1] for state in states],
    }
    return make_format(len(states), **(own | fields))


def slots_of(slots: dict[int, StateSlots], blocks: dict[int, int]) -> torch.Tensor:
    """The slots of a state in one block of each group."""
    return torch.tensor([slot for group, of in slots.items() for slot in of.of(blocks[group])])


class SimulatedEngine:
    """The state caches of all workers of an engine; layers alternate between two groups."""

    GROUPS = (3, 7)

    def __init__(
        self,
        families: Sequence[Family],
        fmt: ObjectFormat,
        ranks: int,
        stages: list[int],
        conv_dim_first: bool,
        *,
        on_device: bool,
    ) -> None:
        self.families, self.ranks, self.first = families, ranks, conv_dim_first
        states = [family.split(ranks, conv_dim_first) for family in families]
        heads = gcd(*(state.heads for state in states))
        self.topology = Topology(heads, fmt.shards, ranks, len(stages))
        self.layers: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        self.memories: list[KVCache] = []
        self.slots: list[dict[int, StateSlots]] = []
        for worker in range(ranks * len(stages)):
            stage, rank = divmod(worker, ranks)
            begin = sum(stages[:stage])
            layers = []
            for number in range(begin, begin + stages[stage]):
                page = states[number].nbytes + 64 * (1 + number % 2)
                memory = torch.randint(0, 256, (BLOCKS, page), dtype=torch.uint8)
                cache = memory.view(torch.int8)[:, None, None, : states[number].nbytes]
                layers.append(StateLayer(cache, states[number], self.GROUPS[number % 2]))
                self.layers.append((number, rank, memory, memory.clone()))
            plan = self.topology.plan(worker)
            runs, slots = state_runs(layers, len(plan.shards))
            calls = layer_calls(fmt, runs, plan)
            self.memories.append(on_a_device(calls) if on_device else HostKVCache(calls))
            self.slots.append(slots)

    def place(self, model: Sequence[Sequence[torch.Tensor]], blocks: dict[int, int]) -> None:
        """Put the state of a model into one block of each group, as a forward pass would."""
        for memory, after in self.expected(model, blocks):
            memory[:] = after

    def expected(
        self, model: Sequence[Sequence[torch.Tensor]], blocks: dict[int, int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """All memory of each layer, and what it must be with the state in these blocks."""
        found = []
        for number, rank, memory, before in self.layers:
            after = before.clone()
            of_rank = self.families[number].block(model[number], rank, self.ranks, self.first)
            after[blocks[self.GROUPS[number % 2]], : len(of_rank)] = of_rank
            found.append((memory, after))
        return found


@st.composite
def families(draw: st.DrawFn) -> Family:
    heads = draw(st.sampled_from([4, 8]))
    size = draw(st.sampled_from([4, 6, 8]))
    dtype = draw(st.sampled_from([BF16, F32]))
    match draw(st.sampled_from(["gdn", "kda", "mamba1", "mamba2", "short_conv", "linear"])):
        case "gdn":
            keys, values = size * heads, draw(st.sampled_from([4, 10]))
            ratio = draw(st.sampled_from([1, 2]))
            sections = (keys, keys, values * heads * ratio)
            return Family("gdn_attn", sections, (heads * ratio, values, size), BF16, dtype)
        case "kda":
            return Family("gdn_attn", (heads * size,) * 3, (heads, size, size), BF16, dtype)
        case "mamba1":
            return Family("mamba1", (heads * size,), (heads * size, 5), dtype, dtype)
        case "mamba2":
            groups = (8 * size,) * 2
            return Family("mamba2", (16 * 4, *groups), (16, 4, size), dtype, dtype)
        case "short_conv":
            return Family("short_conv", (heads * size,), (), dtype)
        case _:
            return Family("linear", (), (heads, size, size), ssm_dtype=dtype)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_state_stored_by_one_tensor_parallel_degree_is_loaded_by_another(
    data: st.DataObject,
) -> None:
    kinds = data.draw(st.lists(families(), min_size=1, max_size=2))
    stages = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    models = [data.draw(st.sampled_from(kinds)) for _ in range(sum(stages))]
    first = data.draw(st.booleans())
    fmt = states_format(models, stages, first)
    degrees = [n for n in (1, 2, 4) if fmt.shards // len(stages) % n == 0]
    writer, reader = (
        SimulatedEngine(
            models,
            fmt,
            data.draw(st.sampled_from(degrees)),
            stages,
            first,
            on_device=data.draw(st.booleans()),
        )
        for _ in range(2)
    )
    state = [family.random(seed) for seed, family in enumerate(models)]
    there, here = {3: 4, 7: 1}, {3: 0, 7: 5}
    writer.place(state, there)
    payloads: dict[int, torch.Tensor] = {}
    for worker, memory in enumerate(writer.memories):
        shards = writer.topology.plan(worker).writes(17)
        fresh = [torch.zeros(fmt.payload_size(shard), dtype=torch.uint8) for shard in shards]
        copy = memory.gather(slots_of(writer.slots[worker], there), fresh)
        assert copy is not None
        copy.wait()
        assert not set(shards) & set(payloads)
        payloads.update(zip(shards, fresh, strict=True))
    split = fmt.shards // len(stages)
    for shard in range(fmt.shards):
        stage, number = divmod(shard, split)
        begin = sum(stages[:stage])
        expected = [
            part.reshape(-1)
            for layer in range(begin, begin + stages[stage])
            for part in models[layer].share(state[layer], number, split, first)
        ]
        assert torch.equal(payloads[shard], torch.cat(expected))
    for worker, memory in enumerate(reader.memories):
        slots = slots_of(reader.slots[worker], here)
        for shard in reader.topology.plan(worker).shards:
            memory.scatter(shard, slots, payloads[shard], memory.fence())
    for found, after in reader.expected(state, here):
        assert torch.equal(found, after)
    for memory in (*writer.memories, *reader.memories):
        memory.close()


def test_undivided_states_go_back_to_the_rank_that_stored_them() -> None:
    # Mamba2 with one group for each of two ranks, which nothing proves to be two of the model's.
    rows, ranks = [(3, 64 + 2 * 8), (4, 16, 8)], 2
    state = split_state("mamba2", rows, [BF16, F32], ranks, False)
    shape, dtype = state.fields
    fmt_fields = {"layouts": [state.layout], "layer_shapes": [shape], "layer_dtypes": [dtype]}
    fmt = states_format(
        [Family("linear", (), (2, 4, 4))], [1], False, shards=2, state_shards=2, **fmt_fields
    )
    topology = Topology(1, fmt.shards, ranks, whole_ranks=True)
    for rank in range(ranks):
        plan = topology.plan(rank)
        assert plan == ShardPlan((rank,))
        memory = torch.randint(0, 256, (BLOCKS, 4096), dtype=torch.uint8)
        layer = StateLayer(memory.view(torch.int8)[:, None, None, : state.nbytes], state, 0)
        runs, slots = state_runs([layer], 1)
        cache = HostKVCache(layer_calls(fmt, runs, plan))
        payload = torch.zeros(fmt.payload_size(rank), dtype=torch.uint8)
        cache.gather(slots_of(slots, {0: 2}), [payload])
        assert torch.equal(payload, memory[2, : state.nbytes])
        before = memory.clone()
        cache.scatter(rank, slots_of(slots, {0: 5}), payload)
        before[5, : state.nbytes] = payload
        assert torch.equal(memory, before)


def test_cache_that_cannot_hold_the_state_is_refused() -> None:
    state = LFM2.split(1, False)
    small = torch.zeros(BLOCKS, 1, 1, state.nbytes - 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="expected blocks of at least 1536 contiguous bytes"):
        state_runs([StateLayer(small, state, 0)], 1)
    other = torch.zeros(BLOCKS, 1, 1, state.nbytes, dtype=torch.int16)
    with pytest.raises(ValueError, match="expected blocks"):
        state_runs([StateLayer(other, state, 0)], 1)
    apart = torch.zeros(BLOCKS, 2, state.nbytes, dtype=torch.int8)[:, :, : state.nbytes // 2]
    with pytest.raises(ValueError, match="expected blocks"):
        state_runs([StateLayer(apart, state, 0)], 1)
    with pytest.raises(ValueError, match="cannot be split over 3 shards"):
        state_runs([StateLayer(other.view(torch.int8), state, 0)], 3)


def test_model_with_other_states_than_the_namespace_is_refused() -> None:
    fmt = states_format([LFM2], [1], False)
    state = Family("short_conv", (128,), ()).split(1, False)
    cache = torch.zeros(BLOCKS, 1, 1, state.nbytes, dtype=torch.int8)
    runs, _ = state_runs([StateLayer(cache, state, 0)], fmt.shards)
    with pytest.raises(ConfigError, match="does not match the namespace"):
        layer_calls(fmt, runs)
