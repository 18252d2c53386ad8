"""A connector whose long requests wait for ever, for comparison.

It does no more than to tell vLLM so, and to let steps in which nothing is computed rest as kvshelf
does. What such an engine costs is vLLM's. The methods run on the engine's step thread.

Use it with ``kv_connector="HoldingConnector"`` and
``kv_connector_module_path="benchmarks.holding"``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.inert import InertConnector

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

#: Requests with so many prompt tokens or fewer are served.
SERVED_TOKENS = 1000
_REST_SECONDS = 10e-3


class HoldingConnector(InertConnector):
    """Lets every request with a long prompt wait."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Find no answer for a long prompt."""
        return (None if request.num_prompt_tokens > SERVED_TOKENS else 0), False

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Rest where nothing is computed."""
        if not scheduler_output.total_num_scheduled_tokens:
            time.sleep(_REST_SECONDS)
        return super().build_connector_meta(scheduler_output)
