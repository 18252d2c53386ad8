"""The split of states into parts, against vLLM's own shapes, views, weights and transfers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvshelf.errors import UnsupportedError
from kvshelf.kv.caches import HostKVCache, LayerCall
from kvshelf.kv.states import StateLayer, StateParts, split_state, state_runs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import (
        derive_mamba_conv_split,
    )
    from vllm.model_executor.layers.mamba import mamba_utils
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend
    from vllm.v1.kv_cache_interface import MambaSpec

RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Model:
    """How vLLM describes the states of a model: :attr:`shapes` gives them for a rank."""

    backend: Backend
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    fields: str  # with [tokens, channels]
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    groups: int | None = None

    def split(self, ranks: int, *, first: bool = False) -> StateParts:
        name = self.backend.name.lower()
        return split_state(name, self.shapes(ranks), self.dtypes, ranks, first, groups=self.groups)

    def spec(self, ranks: int) -> MambaSpec:
        return MambaSpec(
            block_size=128,
            shapes=self.shapes(ranks),
            dtypes=self.dtypes,
            mamba_type=self.backend,
        )


MODELS = {
    "Qwen3-Next": Model(
        Backend.GDN_ATTN,
        lambda ranks: Shapes.gated_delta_net_state_shape(ranks, 16, 32, 128, 128, 4),
        "conv_q:3,2048/;conv_k:3,2048/;conv_v:3,4096/;ssm:32/,128,128",
    ),
    "Kimi-Linear": Model(
        Backend.GDN_ATTN,
        lambda ranks: Shapes.kda_state_shape(ranks, 32, 128),
        "conv_q:3,4096/;conv_k:3,4096/;conv_v:3,4096/;ssm:32/,128,128",
    ),
    "Jamba": Model(
        Backend.MAMBA1,
        lambda ranks: Shapes.mamba1_state_shape(ranks, 8192, 16, 4),
        "conv:3,8192/;ssm:8192/,16",
    ),
    "Nemotron-H": Model(
        Backend.MAMBA2,
        lambda ranks: Shapes.mamba2_state_shape(ranks, 128 * 64, 8, 128, 64, 128, 4),
        "conv_x:3,8192/;conv_b:3,1024/;conv_c:3,1024/;ssm:128/,64,128",
    ),
    "as many groups as ranks": Model(
        Backend.MAMBA2,
        lambda ranks: Shapes.mamba2_state_shape(ranks, 16 * 8, 4, 16, 8, 16, 4),
        "conv_x:3,128/;conv_b:3,64/;conv_c:3,64/;ssm:16/,8,16",
        groups=4,
    ),
    "LFM2": Model(
        Backend.SHORT_CONV,
        lambda ranks: Shapes.short_conv_state_shape(ranks, 2048, 3),
        "conv:2,2048/",
        (torch.bfloat16,),
    ),
    "MiniMax": Model(
        Backend.LINEAR,
        lambda ranks: Shapes.linear_attention_state_shape(64, ranks, 128),
        "ssm:64/,128,128",
        (torch.float32,),
    ),
}


@pytest.fixture(params=["SD", "DS"])
def first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether vLLM stores convolutions as [channels, tokens]."""
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    mamba_utils.get_conv_state_layout.cache_clear()
    assert mamba_utils.is_conv_state_dim_first() is (request.param == "DS")
    yield request.param == "DS"
    monkeypatch.undo()
    mamba_utils.get_conv_state_layout.cache_clear()


def test_vllm_has_no_other_types_of_states() -> None:
    assert {each.name.lower() for each in Backend} == {
        "mamba1",
        "mamba2",
        "short_conv",
        "linear",
        "gdn_attn",
        "custom",
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", RANKS)
def test_all_tensor_parallel_degrees_give_the_same_record(
    name: str, ranks: int, first: bool
) -> None:
    model = MODELS[name]
    state = model.split(ranks, first=first)
    assert state.layout == "state"
    assert state.fields == model.split(1, first=first).fields
    if not first:
        assert state.fields[0] == model.fields
    assert state.nbytes == model.spec(ranks).state_content_size_bytes


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_groups_that_ranks_may_have_copies_of_are_not_divided(ranks: int) -> None:
    shapes = Shapes.mamba2_state_shape(ranks, 128 * 64, 1, 128, 64, 128, 4)
    dtypes = (torch.bfloat16, torch.float32)
    for groups in (None, 1):
        assert split_state("mamba2", shapes, dtypes, ranks, False, groups=groups).heads == 0
    # With a single rank there are no copies.
    whole = Shapes.mamba2_state_shape(1, 128 * 64, 1, 128, 64, 128, 4)
    assert split_state("mamba2", whole, dtypes, 1, False).heads == 128


@pytest.mark.parametrize(
    "name", ["Qwen3-Next", "Kimi-Linear", "Jamba", "Nemotron-H", "as many groups as ranks"]
)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("first", ["DS"], indirect=True)
def test_convolutions_have_the_sections_that_vllms_own_transfer_has(
    name: str, ranks: int, first: bool
) -> None:
    model = MODELS[name]
    state = model.split(ranks, first=first)
    theirs = derive_mamba_conv_split(model.spec(ranks), ranks)
    ours = [(place.offset, place.row_bytes * place.rows) for place in state.places]
    assert ours[:-1] == theirs.local_conv_offsets
    assert ours[-1] == theirs.ssm_sizes
    for rank in range(ranks):
        # Where a rank finds its share in a block of a single rank.
        whole = model.split(1, first=first)
        shares = [
            (place.offset + rank * place.row_bytes // ranks, place.row_bytes // ranks)
            for place in whole.places[:-1]
        ]
        assert shares == theirs.remote_conv_offsets(rank, ranks)


def gathered(cache: torch.Tensor, state: StateParts, nbytes: int) -> torch.Tensor:
    """The payload of the state in block 1, which has so many bytes."""
    runs, slots = state_runs([StateLayer(cache, state, 0)], 1)
    calls, start = [], 0
    for run in runs:
        end = start + len(run.caches) * run.layout.chunk_bytes(run.layout.block_size)
        calls.append(LayerCall(run.caches, run.layout, start, end, 1, first_slot=run.first_slot))
        start = end
    assert start == nbytes
    payload = torch.zeros(start, dtype=torch.uint8)
    HostKVCache({0: calls}).gather(torch.tensor(slots[0].of(1)), [payload])
    return payload


def bytes_of(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.contiguous().view(torch.uint8).reshape(-1) for part in parts])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_are_what_vllms_layers_see_in_their_caches(
    name: str, ranks: int, first: bool
) -> None:
    model = MODELS[name]
    state = model.split(ranks, first=first)
    blocks, page = 3, state.nbytes + 256
    memory = torch.randint(-128, 128, (blocks, page), dtype=torch.int8)
    cache = memory[:, None, None, : state.nbytes]
    layer: Any = SimpleNamespace(
        get_state_shape=lambda: model.shapes(ranks), get_state_dtype=lambda: model.dtypes
    )
    MambaBase.bind_kv_cache(layer, cache)
    seen: list[torch.Tensor] = []
    for part in state.parts:
        if part.name.startswith("conv"):
            conv = layer.kv_cache[0][1].transpose(0, 1) if first else layer.kv_cache[0][1]
            before = sum(section.shape[0 if first else 1] for section in seen)
            channels = part.shape[0 if first else 1] // ranks
            section = conv[:, before : before + channels]
            seen.append(section.transpose(0, 1) if first else section)
        else:
            seen.append(layer.kv_cache[-1][1])
    assert torch.equal(gathered(cache, state, state.nbytes), bytes_of(seen))


# ------------------------------------------------------------------------- drafts

DRAFTS = 2
#: The shapes that vLLM gives states with drafts, for a rank.
WIDENED: dict[str, Callable[[int], tuple[tuple[int, ...], ...]]] = {
    "Qwen3-Next": lambda ranks: Shapes.gated_delta_net_state_shape(
        ranks, 16, 32, 128, 128, 4, num_spec=DRAFTS
    ),
    "Kimi-Linear": lambda ranks: Shapes.kda_state_shape(ranks, 32, 128, num_spec=DRAFTS),
    "Nemotron-H": lambda ranks: Shapes.mamba2_state_shape(
        ranks, 128 * 64, 8, 128, 64, 128, 4, num_spec=DRAFTS
    ),
    "LFM2": lambda ranks: Shapes.short_conv_state_shape(ranks, 2048, 3, num_spec=DRAFTS),
}


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", WIDENED)
def test_tokens_of_drafts_are_no_part_of_a_state(name: str, ranks: int, divide: bool) -> None:
    model, shapes = MODELS[name], WIDENED[name](ranks)
    kind, tokens = model.backend.name.lower(), shapes[0][0] - DRAFTS
    state = split_state(kind, shapes, model.dtypes, ranks, False, divide=divide, drafts=DRAFTS)
    plain = split_state(kind, model.shapes(ranks), model.dtypes, ranks, False, divide=divide)
    assert state.fields == plain.fields
    assert state.layout == plain.layout
    cache = torch.randint(-128, 128, (3, 1, 1, state.nbytes), dtype=torch.int8)
    layer: Any = SimpleNamespace(
        get_state_shape=lambda: shapes, get_state_dtype=lambda: model.dtypes
    )
    MambaBase.bind_kv_cache(layer, cache)
    convolution = layer.kv_cache[0][1][:tokens]
    sections = [place.row_bytes // convolution.element_size() for place in state.places]
    if divide:
        count = len(sections) - len(shapes) + 1
        parts = list(convolution.split(sections[:count], dim=1))
    else:
        parts = [convolution]
    parts += [part[1] for part in layer.kv_cache[1:]]
    assert torch.equal(gathered(cache, state, plain.nbytes), bytes_of(parts))


@pytest.mark.parametrize("name", ["Jamba", "MiniMax"])
def test_state_of_which_it_is_not_known_what_drafts_add_is_refused(name: str) -> None:
    model = MODELS[name]
    kind = model.backend.name.lower()
    with pytest.raises(UnsupportedError, match="remove --speculative-config"):
        split_state(kind, model.shapes(1), model.dtypes, 1, False, drafts=DRAFTS)


@pytest.mark.parametrize("first", ["DS"], indirect=True)
def test_drafts_are_refused_where_channels_come_first(first: bool) -> None:
    with pytest.raises(UnsupportedError, match="VLLM_SSM_CONV_STATE_LAYOUT"):
        split_state("short_conv", WIDENED["LFM2"](1), [torch.bfloat16], 1, True, drafts=DRAFTS)
