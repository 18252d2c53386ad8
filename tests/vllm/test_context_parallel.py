"""Decode and prefill context parallelism. Simulated engines: no CPU engine has either."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.worker import block_table
from vllm.v1.worker.gpu import block_table as block_table_of_v2

from kvshelf.errors import UnsupportedError
from kvshelf.kv.interleave import InterleavedBlocks
from kvshelf.kv.topology import Topology
from kvshelf.vllm.connector import SharedStorageConnector
from kvshelf.vllm.worker import registration
from tests.sim.engine_caches import make_config, make_groups

pytestmark = pytest.mark.usefixtures("one_thread")

# ------------------------------------------------------------------------- vLLM's own arithmetic


@dataclass
class Pointer:
    """An address inside an array, as Triton's kernels use it."""

    array: Any
    index: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.array, self.index + offset)


class Triton:
    """What vLLM's slot mapping kernels use of Triton's language, for one program at a time."""

    constexpr = int
    int64 = torch.int64
    int32 = torch.int32
    arange = staticmethod(torch.arange)
    where = staticmethod(torch.where)

    def __init__(self) -> None:
        self.program, self.programs = (0, 0), (1, 1)

    def program_id(self, axis: int) -> int:
        return self.program[axis]

    def num_programs(self, axis: int) -> int:
        return self.programs[axis]

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
        index = torch.as_tensor(pointer.index)
        if mask is None:
            return pointer.array[index]
        return torch.where(mask, pointer.array[torch.where(mask, index, 0)], other)

    def store(self, pointer: Pointer, value: Any, mask: Any) -> None:
        index = torch.as_tensor(pointer.index)
        pointer.array[index[mask]] = torch.as_tensor(value).expand(index.shape)[mask]


def kernel(module: Any, name: str, tl: Triton) -> Callable[..., None]:
    """Return a kernel of vLLM as a Python function, made from its source."""
    [found] = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    found.decorator_list = []
    scope: dict[str, Any] = {"tl": tl, "_load_ptr": lambda pointer, _: pointer.array[pointer.index]}
    exec(compile(ast.Module([found], []), module.__file__, "exec"), scope)
    function: Callable[..., None] = scope[name]
    return function


def slots_of_v1(ids: list[int], blocks: InterleavedBlocks, start: int, count: int) -> list[int]:
    tl = Triton()
    run = kernel(block_table, "kernel", tl)
    tl.program, tl.programs = (0,), (2,)
    slots = torch.full((count,), -7)
    run(
        count,
        count,
        Pointer(torch.tensor([0, count])),
        Pointer(torch.arange(start, start + count)),
        Pointer(torch.tensor(ids)),
        len(ids),
        Pointer(slots),
        KV_CACHE_BLOCK_SIZE=blocks.block_size,
        TOTAL_CP_WORLD_SIZE=blocks.ranks,
        TOTAL_CP_RANK=blocks.rank,
        CP_KV_CACHE_INTERLEAVE_SIZE=blocks.interleave,
        PAD_ID=-1,
        BLOCK_SIZE=64,
    )
    return slots.tolist()


def slots_of_v2(ids: list[int], blocks: InterleavedBlocks, start: int, count: int) -> list[int]:
    tl = Triton()
    run = kernel(block_table_of_v2, "_compute_slot_mappings_kernel", tl)
    tl.program, tl.programs = (0, 0), (1, 2)
    slots = torch.full((count,), -7)
    run(
        count,
        Pointer(torch.tensor([0])),
        Pointer(torch.tensor([0, count])),
        Pointer(torch.arange(start, start + count)),
        Pointer([Pointer(torch.tensor(ids))]),
        Pointer(torch.tensor([len(ids)])),
        Pointer(torch.tensor([blocks.block_size])),
        Pointer(torch.tensor([True])),
        Pointer(torch.tensor([True])),
        Pointer(slots),
        count,
        blocks.rank,
        CP_SIZE=blocks.ranks,
        CP_INTERLEAVE=blocks.interleave,
        PAD_ID=-1,
        TRITON_BLOCK_SIZE=64,
    )
    return slots.tolist()


@pytest.mark.parametrize("slots_of_vllm", [slots_of_v1, slots_of_v2])
@pytest.mark.parametrize(
    ("size", "ranks", "interleave"),
    [(16, 1, 1), (16, 2, 1), (16, 8, 1), (16, 4, 4), (64, 2, 64), (12, 3, 2)],
)
def test_slots_are_those_of_vllms_kernels(
    slots_of_vllm: Callable[..., list[int]], size: int, ranks: int, interleave: int
) -> None:
    ids = [5, 2, 9, 7, 1, 8]
    for rank in range(ranks):
        blocks = InterleavedBlocks(size, ranks, rank, interleave)
        for start, count in ((0, 6 * size * ranks), (size, 3 * size * ranks + 5)):
            count = min(count, 6 * size * ranks - start)
            slots = blocks.slots_of(ids, start, count).tolist()
            assert slots == slots_of_vllm(ids, blocks, start, count)


@pytest.mark.parametrize(
    ("tensor", "prefill", "decode", "stages"),
    [(8, 1, 2, 1), (8, 1, 8, 2), (4, 2, 2, 1), (2, 2, 4, 2), (1, 4, 4, 1), (4, 2, 1, 2)],
)
def test_ranks_of_a_group_are_those_of_vllm(
    tensor: int, prefill: int, decode: int, stages: int
) -> None:
    """As ``initialize_model_parallel`` makes the groups in vllm/distributed/parallel_state.py."""
    ranks = torch.arange(stages * prefill * tensor).reshape(1, 1, stages, prefill, tensor)
    if decode > 1:
        ranks = ranks.transpose(-1, -2)
    topology = Topology(1, stages, tensor, stages, prefill_context=prefill, decode_context=decode)
    for group in ranks.reshape(-1, decode).tolist():
        plans = [topology.plan(rank) for rank in group]
        assert [plan.context_rank for plan in plans] == list(range(decode))
        assert len({(plan.shards, plan.replica) for plan in plans}) == 1


class Group:
    world_size = 4
    rank_in_group = 1


def test_group_of_another_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(registration, "get_dcp_group", Group)
    topology = Topology(1, 1, 8, decode_context=4)
    for rank in (1, 5):
        registration._check_context_group(topology.plan(rank))
    with pytest.raises(UnsupportedError, match=r"rank 1 of 4 .* expects rank 2 of 4: set decode_"):
        registration._check_context_group(topology.plan(2))


# ------------------------------------------------------------------------- the connector


def test_engine_says_that_it_only_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for size, role, warned in ((1, "kv_both", 0), (2, "kv_both", 1), (2, "kv_consumer", 0)):
        config = make_config(str(tmp_path), role=role)
        config.parallel_config.decode_context_parallel_size = size
        caplog.clear()
        connector = SharedStorageConnector(config, KVConnectorRole.SCHEDULER, make_groups(config))
        with closing(SimpleNamespace(close=connector.shutdown)):
            side = connector._scheduler
            assert side.engine.may_store == (size == 1)
            assert connector._groups.alignment == 4 * size
        lines = [line for line in caplog.messages if "stores none" in line]
        assert len(lines) == warned
