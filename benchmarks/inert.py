"""A connector that does nothing, for comparison.

vLLM behaves differently with a connector than without one (on its CPU backend a prompt
without any connector takes nearly twice as long), so kvshelf's cost is measured against this
connector, and outputs are compared with its outputs. As kvshelf does, it leaves vLLM's hybrid
allocator on. It has no state and no threads. The scheduler's methods run on the engine's step
thread, the others in the workers.

Use it with ``kv_connector="InertConnector"`` and ``kv_connector_module_path="benchmarks.inert"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

if TYPE_CHECKING:
    import torch
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class InertMetadata(KVConnectorMetadata):
    """The scheduler side's empty message to the workers."""


class InertConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores nothing and loads nothing."""

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether preempted requests must deliver their KV: there is none to deliver."""
        return False

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Store nothing."""

    def wait_for_save(self) -> None:
        """Return at once."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Find no hit."""
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Keep no state."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return empty metadata."""
        return InertMetadata()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let the blocks be freed at once."""
        return False, None
