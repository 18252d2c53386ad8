"""The page for those who come from elsewhere names everything that they may look for."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "migrating.md").read_text()

#: What others have, by where it is written. Rows of the page name each of them.
NAMES = {
    "LMCache of 2026, lmcache/v1/config.py: keys": """
        chunk_size local_cpu max_local_cpu_size local_cpu_use_hugepages reserve_local_cpu_size
        local_disk local_disk_path_sharding max_local_disk_size remote_url remote_serde
        use_layerwise save_decode_cache pre_caching_hash_algorithm enable_blending
        blend_recompute_ratios blend_thresholds blend_check_layers blend_min_tokens
        blend_special_str retrieve_locations store_location enable_p2p p2p_host p2p_init_ports
        p2p_lookup_ports mp_host mp_port enable_controller lmcache_instance_id
        controller_pull_url controller_reply_url lmcache_worker_ports lmcache_worker_ids
        lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time enable_pd pd_role
        pd_buffer_size pd_buffer_device pd_peer_host pd_peer_init_port pd_peer_alloc_port
        pd_peer_query_port pd_proxy_host pd_proxy_port pd_allocation_timeout_sec
        pd_shutdown_timeout_sec pd_condition_poll_interval_sec pd_max_prefill_len pd_backend_mode
        pd_skip_proxy_notification pd_bidirectional transfer_channel nixl_backends
        nixl_buffer_size nixl_buffer_device gds_path gds_path_sharding gds_buffer_size maru_path
        maru_pool_size use_gds gds_backend audit_actual_remote_url internal_api_server_host
        extra_config save_unfull_chunk blocking_timeout_secs external_lookup_client py_enable_gc
        cache_policy cost_aware_half_life_seconds cost_aware_ewma_alpha numa_mode
        enable_async_loading internal_api_server_enabled internal_api_server_port_start
        priority_limit internal_api_server_include_index_list
        internal_api_server_socket_path_prefix runtime_plugin_locations storage_plugins
        remote_storage_plugins lookup_timeout_ms min_retrieve_tokens hit_miss_ratio
        lookup_server_worker_ids enable_scheduler_bypass_lookup script_allowed_imports
        enable_lazy_memory_allocator lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio
        lazy_memory_step_ratio lazy_memory_safe_size enable_chunk_statistics
        chunk_statistics_auto_start_statistics chunk_statistics_auto_exit_timeout_hours
        chunk_statistics_auto_exit_target_unique_chunks chunk_statistics_strategy enable_kv_events
        use_gpu_connector_v3 pin_timeout_sec pin_check_interval_sec remote_config_url app_id
        enable_hidden_state_cache max_hidden_state_cpu_size hidden_state_layers
        hidden_states_retrieve_mode
    """,
    "LMCache of 2026, lmcache/v1/config.py: earlier names": """
        enable_xpyd nixl_peer_host nixl_peer_init_port nixl_peer_alloc_port nixl_proxy_host
        nixl_proxy_port nixl_role nixl_peer_port controller_url lmcache_worker_port
        plugin_locations external_backends
    """,
    "LMCache of 2025, lmcache/v1/config.py": """
        blend_recompute_ratio lookup_url distributed_url error_handling
        from_defaults from_env from_file from_legacy
    """,
    "LMCache of 2025, lmcache/v1/cache_engine.py": """
        store retrieve prefetch lookup mask search_range get_or_create get destroy close
        LMCacheEngine LMCacheEngineBuilder LMCacheEngineConfig LMCacheEngineMetadata Hot
        CacheEngineKey StorageManager
    """,
    "LMCache of 2025, lmcache/v1/token_database.py and gpu_connector.py": """
        process_tokens TokenDatabase ChunkedTokenDatabase RadixTokenDatabase
        GPUConnectorInterface from_gpu to_gpu get_shape
        VLLMNestedTupleGPUConnector VLLMPagedMemGPUConnector VLLMPagedMemGPUConnectorV2
    """,
    "LMCache of 2025, lmcache/v1/memory_management.py": """
        MemoryObj MemoryObjMetadata MemoryFormat KV_BLOB BINARY UNDEFINED MemoryAllocatorInterface
        allocate ref_count_up ref_count_down get_ref_count FreeBlock TensorMemoryAllocator
        HostMemoryAllocator PinMemoryAllocator GPUMemoryAllocator BufferAllocator
        MixedMemoryAllocator TensorMemoryObj BytesBufferMemoryObj
    """,
    "LMCache of 2025, lmcache/v1/storage_backend/local_disk_backend.py": """
        LocalDiskBackend contains get_blocking submit_put_task exists_in_put_tasks
        submit_prefetch_task insert_key remove async_save_bytes_to_disk load_bytes_from_disk
        async_load_bytes_from_disk load_disk
    """,
    "vLLM of 2025, shared_storage_connector.py": """
        SharedStorageConnector SharedStorageConnectorMetadata ReqMeta make_meta add_request
        inject_kv_into_layer extract_kv_from_layer align_to_block_size
    """,
    "vLLM 0.32, distributed/kv_transfer/kv_connector/v1/base.py": """
        start_load_kv wait_for_layer_load save_kv_layer wait_for_save get_finished
        request_finished take_events get_kv_connector_kv_cache_events
        get_external_cache_hit_sources
    """,
}

#: Files of vLLM's connectors of which every class and every public method and function is named.
FILES = ("example_connector.py", "lmcache_integration/multi_process_adapter.py")
#: Methods of the adapters have rows on a page of their own.
ELSEWHERE = {
    "LMCacheMPSchedulerAdapter": "multiprocess.md",
    "LMCacheMPWorkerAdapter": "multiprocess.md",
    "ParallelStrategy": "multiprocess.md",
    "LoadStoreOp": "multiprocess.md",
}
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]
#: Words in the first column of the tables.
QUOTED = {
    word
    for row in ROWS
    for code in re.findall(r"`([^`]+)`", row.split(" | ", 1)[0])
    for word in re.findall(r"\w+", code)
}


@pytest.mark.parametrize("source", NAMES)
def test_every_name_of_a_list_is_on_the_page(source: str) -> None:
    missing = [name for name in NAMES[source].split() if name not in QUOTED]
    assert not missing


def public_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
            if node.name in ELSEWHERE:
                assert ELSEWHERE[node.name] in PAGE
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    yield method.name
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name


@pytest.mark.parametrize("file", FILES)
def test_every_public_name_of_a_connector_of_vllm_is_on_the_page(file: str) -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.origin).parent / "distributed" / "kv_transfer" / "kv_connector" / "v1"
    names = set(public_names(ast.parse((folder / file).read_text())))
    assert len(names) > 5
    assert not names - QUOTED


def test_rows_about_gpus_say_that_nothing_was_checked_on_one() -> None:
    about = [
        row for row in ROWS if re.search(r"CUDA devices|`pinned`|device buffers|slot mapping", row)
    ]
    assert len(about) >= 4
    claims = [row for row in about if "| refused |" not in row]
    assert all("not checked on a GPU" in row for row in claims)
