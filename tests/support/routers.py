"""What routers send to the engines that prefill and decode, transcribed from their sources.

For each router: the ``kv_transfer_params`` of the first leg, and those of the second, given what
the first one answered; None without the field. Above each stands which version was read. vLLM's own
router is none of them: its tests run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Params: TypeAlias = "dict[str, Any] | None"

_DECODES = {"do_remote_decode": True, "do_remote_prefill": False}
_PREFILLED = {"do_remote_decode": False, "do_remote_prefill": True}
_UNNAMED = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
#: As vLLM's example proxy.
_ASKS = _DECODES | dict.fromkeys(_UNNAMED)
_HOST = {"remote_host": "producer.svc"}

ROUTERS: Mapping[str, tuple[Params, Callable[[Params], Params]]] = {
    # llm-d-router ebab687, pkg/coordinator/connectors/kv/shared_storage.go
    "llm-d coordinator, kv-shared-storage": (_DECODES, lambda answered: {**_PREFILLED}),
    # llm-d-router ebab687, pkg/coordinator/connectors/kv/nixl.go
    "llm-d coordinator, kv-nixl": (_ASKS, lambda answered: (answered or {}) | _PREFILLED),
    # llm-d-router ebab687, pkg/sidecar/proxy/connector_shared_storage.go: beside this, max_tokens 1
    # and cache_hit_threshold 0 in the first leg, and the latter in the second.
    "llm-d sidecar, shared-storage": (None, lambda answered: None),
    # production-stack a6c01db, src/vllm_router/services/request_service/request.py
    "production-stack, disaggregated_prefill": (None, lambda answered: None),
    "production-stack, disaggregated_prefill_orchestrated": (
        _ASKS,
        lambda answered: answered and answered | _HOST,
    ),
    # ray 1205202, python/ray/llm/_internal/serve/engines/common/kv_transfer/base.py
    "Ray Serve LLM, DefaultConnectorBackend": (_ASKS, lambda answered: answered),
    # ai-dynamo 1.6.1, dynamo/vllm/kv_connector_protocols.py
    "Dynamo, NixlConnectorProtocol": (_ASKS, lambda answered: answered),
    "Dynamo, MultiConnector with LMCacheMPConnector": ({}, lambda answered: {}),
}
#: Those that do not tell an engine that it prefills for another one: no tail is stored.
WITHOUT_PARAMS = [name for name, (prefill, _) in ROUTERS.items() if not prefill]
