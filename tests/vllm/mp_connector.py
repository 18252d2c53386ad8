"""vLLM's own connector for a cache server, with kvshelf's adapters in place of LMCache's.

Nothing of vLLM's class is changed but what it is made of: the adapters, the package ``lmcache``, of
which it imports a logger and two helpers, and on CPUs the events of CUDA.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import types
from typing import Any

import torch

from kvshelf.vllm import multiprocess


class _Event:
    """An event on a CPU: when it is recorded, all work before it has ended."""

    def __init__(self, **_: Any) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def _module(name: str, **content: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module


def _upstream() -> Any:
    """Import vLLM's connector, as if LMCache were installed and had our adapters."""
    for package in ("lmcache", "lmcache.integration", "lmcache.v1", "lmcache.v1.multiprocess"):
        _module(package, __path__=[])
    _module("lmcache.integration.vllm", __path__=[])
    _module("lmcache.integration.vllm.utils", mla_enabled=lambda model: model.use_mla)
    _module("lmcache.utils", init_logger=logging.getLogger)
    _module("lmcache.v1.multiprocess.custom_types", RequestAllocationRecord=dict)
    _module(
        "lmcache.integration.vllm.vllm_multi_process_adapter",
        LMCacheMPSchedulerAdapter=multiprocess.LMCacheMPSchedulerAdapter,
        LMCacheMPWorkerAdapter=multiprocess.LMCacheMPWorkerAdapter,
        LoadStoreOp=multiprocess.LoadStoreOp,
        ParallelStrategy=multiprocess.ParallelStrategy,
    )
    os.environ["LMCACHE_USE_UPSTREAM_MP"] = "1"
    from vllm.distributed.kv_transfer.kv_connector.v1 import lmcache_mp_connector

    if not torch.cuda.is_available():
        cuda = types.SimpleNamespace(
            Event=_Event, current_stream=lambda: None, stream=lambda _: contextlib.nullcontext()
        )
        lmcache_mp_connector.torch = types.SimpleNamespace(cuda=cuda)
    return lmcache_mp_connector


_module_of_vllm = _upstream()


def _adapter(kind: type[Any], server_url: str, config: Any, timeout: float) -> Any:
    parallel = config.parallel_config
    world_size, rank = _module_of_vllm.extract_world_size_and_kv_rank(
        parallel.world_size, parallel.rank, config
    )
    strategy = multiprocess.ParallelStrategy(
        config.model_config.use_mla,
        world_size,
        rank,
        parallel.world_size,
        parallel.rank,
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
    )
    return kind(
        server_url.removesuffix(":0"),
        None,
        config.model_config.model,
        config.cache_config.block_size,
        strategy,
        vllm_config=config,
        mq_timeout=timeout,
    )


_module_of_vllm.create_scheduler_adapter = lambda url, context, config, timeout, _: _adapter(
    multiprocess.LMCacheMPSchedulerAdapter, url, config, timeout
)
_module_of_vllm.create_worker_adapter = lambda url, context, config, timeout, _: _adapter(
    multiprocess.LMCacheMPWorkerAdapter, url, config, timeout
)


class MPConnector(_module_of_vllm.LMCacheMPConnectorUpstream):  # type: ignore[misc,name-defined]
    """vLLM's ``LMCacheMPConnectorUpstream``, which names blocks that could not be loaded."""
