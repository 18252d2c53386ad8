"""Connectors for models with states and drafts on CPUs.

vLLM copies states where a step with drafts crosses a block boundary, by two kernels of Triton
(``postprocess_mamba_fused_kernel`` and ``precopy_mamba_align_fused_kernel`` in
``vllm/v1/worker/mamba_utils.py``), which have no form for CPUs. Importing this module gives them
one: the same copies by torch, decided as the kernels decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import (
    get_conv_copy_spec,
    is_conv_state_dim_first,
)
from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

from benchmarks.inert import InertConnector
from tests.support.connector import SharedStorageConnector

#: The states and the block tables of each group, as the kernels get their addresses.
_States = list[tuple[torch.Tensor, list[tuple[torch.Tensor, bool]]]]


def _initialize(
    self: Any,
    kv_cache_config: Any,
    forward_context: Any,
    copy_funcs: Any,
    block_tables: Sequence[torch.Tensor],
    aligned_index_block_tables: object = None,
) -> None:
    if self.is_initialized:
        return
    assert not is_conv_state_dim_first()
    self.states = []
    for group_id, table in zip(self.mamba_group_ids, block_tables, strict=True):
        group = kv_cache_config.kv_cache_groups[group_id]
        funcs = copy_funcs[group.kv_cache_spec.mamba_type]
        states = [
            (state, func is get_conv_copy_spec)
            for name in group.layer_names
            for state, func in zip(forward_context[name].kv_cache, funcs, strict=True)
        ]
        # The table's memory is that of the whole table.
        whole = table._base if table._base is not None else table
        self.states.append((whole, states))
    self.is_initialized = True


def _copy(groups: _States, row: int, source: int, target: int, bias: int) -> None:
    """Copy the states of one request from a column of its tables to another."""
    for table, states in groups:
        blocks = table[row].tolist()
        for state, is_conv in states:
            if is_conv:
                shifted = state[blocks[source]][bias:].clone()
                state[blocks[target]][: len(shifted)] = shifted
            else:
                state[blocks[target]] = state[blocks[source + bias]].clone()


def _postprocess(
    self: Any,
    num_reqs: int,
    accepted: torch.Tensor,
    columns: torch.Tensor,
    scheduled: torch.Tensor,
    computed: torch.Tensor,
    drafts: torch.Tensor,
) -> None:
    self.num_accepted_tokens_out[:num_reqs].copy_(accepted[:num_reqs])
    for row in range(num_reqs):
        running = int(computed[row] + scheduled[row] - drafts[row])
        after = running + int(accepted[row]) - 1
        aligned = after // self.block_size * self.block_size
        if aligned < running:
            continue
        source, target = int(columns[row]), aligned // self.block_size - 1
        if source == target:
            self.num_accepted_tokens_out[row] = 1
        if source != target or aligned != running:
            _copy(self.states, row, source, target, aligned - running)


def _precopy(
    self: Any,
    num_reqs: int,
    state_idx_gpu: torch.Tensor,
    src_col_gpu: torch.Tensor,
    token_bias_gpu: torch.Tensor,
    idx_mapping: torch.Tensor | None,
) -> None:
    assert idx_mapping is None
    for row in range(num_reqs):
        source, target = int(src_col_gpu[row]), int(state_idx_gpu[row])
        if source >= 0 and source != target:
            _copy(self.states, row, source, target, int(token_bias_gpu[row]))


def _run_postprocess(self: Any, num_reqs: int, **inputs: torch.Tensor) -> None:
    names = (
        "num_accepted_tokens_gpu",
        "mamba_state_idx_gpu",
        "num_scheduled_tokens_gpu",
        "num_computed_tokens_gpu",
        "num_draft_tokens_gpu",
    )
    _postprocess(self, num_reqs, *(inputs[name] for name in names))


MambaSpecDecodeGPUContext.initialize_from_forward_context = _initialize  # type: ignore[method-assign]
MambaSpecDecodeGPUContext.run_fused_precopy = _precopy  # type: ignore[method-assign]
MambaSpecDecodeGPUContext.run_fused_postprocess = _run_postprocess  # type: ignore[method-assign]


class DraftingConnector(SharedStorageConnector):
    """kvshelf's connector."""


class DraftingInertConnector(InertConnector):
    """The connector that does nothing."""
