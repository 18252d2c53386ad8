"""What routers send to the engines that prefill and decode, transcribed from their sources.

Each says which version was read. vLLM's own router is none of them: its tests run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

#: ``kv_transfer_params``, None without the field.
Params: TypeAlias = "dict[str, Any] | None"

_UNNAMED = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
_DECODES = {"do_remote_decode": True, "do_remote_prefill": False}
_PREFILLED = {"do_remote_decode": False, "do_remote_prefill": True}


@dataclass(frozen=True)
class Router:
    """The two legs of one request, the second behind the first.

    Attributes
    ----------
    read : str
        The file and its version.
    prefill : Params
        What the engine that prefills gets.
    decode : Callable
        What the engine that decodes gets, of what the other one answered.
    """

    read: str
    prefill: Params
    decode: Callable[[Params], Params]


def _nothing(answered: Params) -> Params:
    return None


def _forwarded(answered: Params) -> Params:
    return answered


def _with_flags(answered: Params) -> Params:
    return {**(answered or {}), **_PREFILLED}


def _with_host(answered: Params) -> Params:
    return {**answered, "remote_host": "producer.svc"} if answered else None


#: By name.
ROUTERS: Mapping[str, Router] = {
    "llm-d coordinator, kv-shared-storage": Router(
        "llm-d-router ebab687, pkg/coordinator/connectors/kv/shared_storage.go",
        _DECODES,
        lambda answered: dict(_PREFILLED),
    ),
    "llm-d coordinator, nixl": Router(
        "llm-d-router ebab687, pkg/coordinator/connectors/kv/nixl.go",
        {**_DECODES, **dict.fromkeys(_UNNAMED)},
        _with_flags,
    ),
    # It adds max_tokens 1 and cache_hit_threshold 0 to the first leg, and the latter to the second.
    "llm-d sidecar, shared-storage": Router(
        "llm-d-router ebab687, pkg/sidecar/proxy/connector_shared_storage.go", None, _nothing
    ),
    "production-stack, disaggregated_prefill": Router(
        "production-stack a6c01db, src/vllm_router/services/request_service/request.py",
        None,
        _nothing,
    ),
    "production-stack, disaggregated_prefill_orchestrated": Router(
        "production-stack a6c01db, src/vllm_router/services/request_service/request.py",
        {**_DECODES, **dict.fromkeys(_UNNAMED)},
        _with_host,
    ),
    "Ray Serve LLM, DefaultConnectorBackend": Router(
        "ray 1205202, python/ray/llm/_internal/serve/engines/common/kv_transfer/base.py",
        {**_DECODES, **dict.fromkeys(_UNNAMED)},
        _forwarded,
    ),
    "Dynamo, NixlConnectorProtocol": Router(
        "ai-dynamo 1.6.1, dynamo/vllm/kv_connector_protocols.py",
        {**_DECODES, **dict.fromkeys(_UNNAMED)},
        _forwarded,
    ),
    "Dynamo, MultiConnector with LMCacheMPConnector": Router(
        "ai-dynamo 1.6.1, dynamo/vllm/kv_connector_protocols.py", {}, lambda answered: {}
    ),
}
#: Those that do not tell an engine that it prefills for another one: no tail is stored.
WITHOUT_PARAMS = [name for name, router in ROUTERS.items() if not router.prefill]
