"""kvshelf against recorded versions of vLLM: what it overrides, calls and reads is there.

The records are made by ``record_signatures.py`` and lie in ``tests/golden/vllm-signatures/``. The
slow variant of each test looks at the newest release instead.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    # vLLM's own imports are not ours to judge.
    warnings.simplefilter("ignore")
    vllm = pytest.importorskip("vllm")
    from kvshelf.vllm import connector, metadata, stats
    from kvshelf.vllm.layout_discovery import ATTENTION_UPDATE, MLA_UPDATE, takes
    from kvshelf.vllm.weight_changes import READING

from tests.vllm.record_signatures import PACKAGES, RECORDS, SUBJECTS, Source, record

REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted((REPOSITORY / "src" / "kvshelf" / "vllm").rglob("*.py"))
RECORDED = ("0.32.0", "0.33.0")
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
DOWNLOAD_SECONDS = 570

#: Our classes and vLLM's that they stand for.
OVERRIDES = [
    (connector.SharedStorageConnector, f"{V1}.base:KVConnectorBase_V1"),
    (metadata.WorkerMetadata, f"{V1}.base:KVConnectorWorkerMetadata"),
    (stats.ShelfStats, f"{V1}.metrics:KVConnectorStats"),
    (stats.ShelfPromMetrics, f"{V1}.metrics:KVConnectorPromMetrics"),
]
#: Names in our code for objects of vLLM, of which every attribute that is read must exist.
OBJECTS = {
    "adapter": "LoRARequest",
    "arch": "ModelArchitectureConfig",
    "attn_backend": "AttentionBackend",
    "cache_config": "CacheConfig",
    "compilation_config": "CompilationConfig",
    "connector_output": "KVConnectorOutput",
    "decides": "KVTransferConfig",
    "feature": "MultiModalFeatureSpec",
    "kv_cache_config": "KVCacheConfig",
    "kv_cache_spec": "KVCacheSpec",
    "kv_connector_block_state": "KVConnectorBlockState",
    "kv_transfer_config": "KVTransferConfig",
    "load_config": "LoadConfig",
    "lora_config": "LoRAConfig",
    "manager": "EncoderCacheManager",
    "mm_position": "PlaceholderRange",
    "model_config": "ModelConfig",
    "multimodal": "MultiModalConfig",
    "output": "SchedulerOutput",
    "parallel": "ParallelConfig",
    "parallel_config": "ParallelConfig",
    "request": "Request",
    "scheduler_config": "SchedulerConfig",
    "scheduling": "SchedulerConfig",
    "settings": "MultiModalConfig",
    "speculative_config": "SpeculativeConfig",
    "speculator": "DraftModelSpeculator",
    "transfer": "KVTransferConfig",
    "vllm_config": "VllmConfig",
}
#: Attributes that are read of objects with other names, or by a name in a string.
ATTRIBUTES = {
    "Attention": (
        "attn_backend",
        "head_size",
        "head_size_v",
        "impl",
        "kv_cache",
        "kv_cache_dtype",
        "kv_sharing_target_layer_name",
        "num_kv_heads",
        "sliding_window",
    ),
    "AttentionLayerBase": ("is_draft_layer",),
    "AttentionSpec": ("max_tp_shards",),
    "CachedRequestData": ("num_computed_tokens", "req_ids"),
    "CacheHitSource": ("DISK",),
    "EngineArgs": ("kv_transfer_config",),
    "KVCacheBlocks": ("get_block_ids",),
    "KVCacheGroupSpec": ("kv_cache_spec", "layer_names"),
    "KVConnectorTransferResults": ("failed_recving", "finished_recving"),
    "KVTransferConfig": ("kv_connector", "kv_connector_extra_config"),
    "LoRAConfig": (
        "enable_moe_shared_loras",
        "enable_tower_connector_lora",
        "lora_dtype",
        "target_modules",
    ),
    "MLAAttention": (
        "head_size",
        "impl",
        "kv_cache",
        "kv_cache_dtype",
        "kv_lora_rank",
        "qk_rope_head_dim",
    ),
    "MLAAttentionImpl": ("hisparse_cache",),
    "ModelArchitectureConfig": ("total_num_kv_heads",),
    "ModelConfig": (
        "code_revision",
        "hf_config",
        "hf_config_path",
        "hf_overrides",
        "is_diffusion",
        "is_encoder_decoder",
        "is_prefix_caching_supported",
        "model_arch_config",
        "model_class_overrides",
        "model_weights",
        "quantization_config",
        "revision",
        "served_model_name",
        "skip_tokenizer_init",
        "tokenizer",
        "tokenizer_revision",
        "trust_remote_code",
        "use_mla",
    ),
    "MultiConnector": ("_kv_transfer_config",),
    "BaseProcessingInfo": ("ctx", "model_id"),
    "EngineCoreRequest": ("mm_features",),
    "EncoderCacheManager": ("reset",),
    "InputProcessor": ("vllm_config",),
    "NewRequestData": ("num_computed_tokens", "req_id"),
    "SpecDecodeBaseProposer": ("_draft_attn_layer_names",),
    "UniformTypeKVCacheSpecs": ("kv_cache_specs",),
    "set_default_quant_scales": ("_k_scale", "_k_scale_float", "_v_scale", "_v_scale_float"),
}


@functools.cache
def recorded(version: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / f"{version}.json").read_text())
    return found


@pytest.fixture(scope="session")
def newest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of the newest release, from its wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", f"--dest={folder}", "vllm"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the newest wheel did not arrive within {DOWNLOAD_SECONDS} s")
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        pytest.skip(f"pip cannot download the newest wheel: {lines[-1] if lines else error}")
    (wheel,) = folder.glob("*.whl")
    made = record(Source(wheel))
    wheel.unlink()
    return made


@pytest.fixture(
    params=[*RECORDED, pytest.param("newest", marks=[pytest.mark.slow, pytest.mark.real])]
)
def version(request: pytest.FixtureRequest) -> Any:
    """The record of one version."""
    if request.param == "newest":
        return request.getfixturevalue("newest")
    return recorded(request.param)


def the_class(version: dict[str, Any], name: str) -> dict[str, Any]:
    """A class by its name, without its module."""
    (found,) = [one for key, one in version["classes"].items() if key.endswith(f":{name}")]
    assert isinstance(found, dict)
    return found


def names_of(version: dict[str, Any], name: str) -> set[str]:
    """Attributes and methods of a class, with those of its recorded bases."""
    known = {key.partition(":")[2] for key in version["classes"]}
    entry = the_class(version, name)
    inherited = [names_of(version, base) for base in entry.get("bases", ()) if base in known]
    return {*entry["attributes"], *entry.get("methods", ())}.union(*inherited)


def signature(parameters: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {parameters}: None"))


def without_self(parameters: str) -> inspect.Signature:
    made = signature(parameters)
    return made.replace(parameters=list(made.parameters.values())[1:])


# ------------------------------------------------------------------------- the records


@pytest.mark.slow
def test_record_of_the_installed_version_is_what_the_script_makes() -> None:
    version = vllm.__version__.partition("+")[0]
    if version not in RECORDED:
        pytest.skip(f"vLLM {version} is not recorded")
    assert recorded(version) == record(Source(Path(vllm.__file__).parent))


def test_record_has_everything_that_is_to_be_recorded(version: dict[str, Any]) -> None:
    expected = {f"{module}:{name}" for module, names in SUBJECTS.items() for name in names}
    assert set(version["classes"]) == expected


def test_kv_is_gathered_before_vllm_learns_that_a_step_is_over(version: dict[str, Any]) -> None:
    """From the event of the step's output on, vLLM may free blocks, and others may fill them."""
    order = {key.removeprefix("vllm.v1.worker."): calls for key, calls in version["order"].items()}
    # The second runner: finish_forward ends the first function, which runs before the second.
    assert order["gpu.model_runner:execute_model"][0] == "pre_forward"
    assert order["gpu.model_runner:execute_model"][-1] == "finish_forward"
    # The first call is that of the pipeline's earlier stages, which sample nothing.
    first, *sampled = order["gpu.model_runner:sample_tokens"]
    assert first == "post_forward"
    assert sampled in (
        ["sample", "AsyncOutput", "propose", "post_forward"],
        # With drafts, saves end the step, and its results are taken before.
        ["sample", "AsyncOutput", "post_forward", "propose", "finalize_step"],
    )
    deferred = sampled[-1] == "finalize_step"
    assert order["gpu.kv_connector:finalize_step"] == ["wait_for_save"] * deferred
    assert order["gpu.kv_connector:post_forward"] == [
        "_start_load_kv",
        "wait_for_save",
        "get_transfer_results",
    ]
    assert order["gpu.kv_connector:no_forward"] == ["pre_forward", "finish_forward", "post_forward"]
    # The first runner: all is saved when the forward pass ends, or behind the drafts.
    assert order["gpu_model_runner:execute_model"] == [
        "maybe_get_kv_connector_output",
        "_model_forward",
    ]
    assert order["gpu_model_runner:sample_tokens"] == [
        "_sample",
        "finalize_kv_connector",
        "AsyncGPUModelRunnerOutput",
    ]
    assert order["kv_connector_model_runner_mixin:_get_kv_connector_output"] == [
        "start_load_kv",
        "start_load_kv",
        "wait_for_save",
        "get_transfer_results",
    ]


def test_wheel_and_a_folder_are_read_alike(tmp_path: Path) -> None:
    folder = tmp_path / "vllm"
    (folder / "config").mkdir(parents=True)
    (folder / "_version.py").write_text("__version__ = version = '9.8.7+cpu'\n")
    (folder / "config" / "cache.py").write_text(
        "class CacheConfig(Base[int], a.Other):\n"
        "    block_size: int = 3\n"
        "    both = either = 1\n"
        "    def m(self, a: int, /, b: str = 'x', *c: int, d, e: int = 2, **f): self.g = a\n"
        "    async def n(self): self.h, (x, y) = 1, (2, 3)\n"
    )
    wheel = tmp_path / "vllm-9.8.7.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in folder.rglob("*.py"):
            archive.write(file, file.relative_to(tmp_path))
    made = record(Source(wheel))
    assert made == record(Source(folder)) == record(Source(tmp_path))
    assert made["version"] == "9.8.7"
    assert made["classes"] == {
        "vllm.config.cache:CacheConfig": {
            "bases": ["Base", "Other"],
            "methods": {"m": "self, a, /, b=..., *c, d, e=..., **f", "n": "self"},
            "attributes": ["block_size", "both", "either", "g", "h"],
        }
    }
    with pytest.raises(FileNotFoundError, match="no package vllm"):
        Source(tmp_path / "elsewhere")


# ------------------------------------------------------------------------- what is overridden


def own_signature(ours: type, name: str) -> inspect.Signature | None:
    """The parameters behind ``self`` of a method that a class of ours defines."""
    method = ours.__dict__.get(name)
    if method is None or isinstance(method, property):
        return None
    made = inspect.signature(getattr(method, "__func__", method))
    return made.replace(parameters=list(made.parameters.values())[1:])


@pytest.mark.parametrize(
    ("ours", "theirs"), OVERRIDES, ids=[ours.__name__ for ours, _ in OVERRIDES]
)
def test_overrides_take_what_their_originals_take(
    version: dict[str, Any], ours: type, theirs: str
) -> None:
    overridden = 0
    for name, parameters in version["classes"][theirs]["methods"].items():
        own = own_signature(ours, name)
        if own is None or name.startswith("__"):
            continue
        overridden += 1
        values = list(without_self(parameters).parameters.values())
        named = [one for one in values if one.kind is one.POSITIONAL_OR_KEYWORD]
        required = [one for one in named if one.default is one.empty]
        for count in range(len(required), len(named) + 1):
            own.bind(*named[:count])
        own.bind(**{one.name: one for one in named})
        if any(one.kind is one.VAR_KEYWORD for one in values):
            own.bind(*named, something_else=1)
    assert overridden


def test_connector_takes_the_calls_that_vllm_makes(version: dict[str, Any]) -> None:
    checked = 0
    for name, forms in version["calls"].items():
        own = own_signature(connector.SharedStorageConnector, name)
        for form in forms if own is not None else ():
            given = form.split(", ")
            own.bind(
                *(one for one in given if one == "_"),
                **{one[:-2]: one for one in given if one.endswith("=_") and one[0] != "*"},
            )
            checked += 1
    assert checked > 20


def test_what_is_abstract_or_a_property_is_so_with_us(version: dict[str, Any]) -> None:
    base = version["classes"][f"{V1}.base:KVConnectorBase_V1"]
    assert "requires_kv_delivery" in base["methods"]
    assert "_cache_hit_source" in names_of(version, "KVConnectorBase_V1")
    constructor = signature(base["methods"]["__init__"])
    assert list(constructor.parameters)[1:] == ["vllm_config", "role", "kv_cache_config"]


def test_methods_of_the_base_class_that_are_called_exist(version: dict[str, Any]) -> None:
    known = names_of(version, "KVConnectorBase_V1")
    called = set(re.findall(r"super\(\)\.(\w+)\(", inspect.getsource(connector)))
    assert len(called) >= 3
    assert called <= known


# ------------------------------------------------------------------------- what is read


def imports() -> Iterator[tuple[str, str]]:
    """(module, name) of everything that our code imports from vLLM."""
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                yield from ((str(node.module), one.name) for one in node.names)


def test_what_is_imported_exists(version: dict[str, Any]) -> None:
    found = set(imports())
    assert len(found) > 10
    for module, name in found:
        if module in PACKAGES:
            assert name in version["exports"][module], f"{module} offers no {name}"
        else:
            assert f"{module}:{name}" in version["classes"], f"{module} has no {name}"


@functools.cache
def reads() -> dict[str, set[str]]:
    """The attributes that our code reads of objects, by what it calls them."""
    found: dict[str, set[str]] = {}
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Attribute(value=receiver, attr=name, ctx=ast.Load()):
                    pass
                case ast.Call(
                    func=ast.Name(id="getattr"), args=[receiver, ast.Constant(value=str(name)), *_]
                ):
                    pass
                case _:
                    continue
            called = ast.unparse(receiver).rpartition(".")[2].removeprefix("_")
            found.setdefault(called, set()).add(name)
    return found


@pytest.mark.parametrize("name", sorted(set(OBJECTS.values()) | set(ATTRIBUTES)))
def test_what_is_read_of_vllm_s_objects_exists(version: dict[str, Any], name: str) -> None:
    read = set(ATTRIBUTES.get(name, ()))
    for called, kind in OBJECTS.items():
        if kind == name:
            read |= reads().get(called, set())
    assert read
    assert read - names_of(version, name) == set()


def test_methods_that_are_wrapped_exist(version: dict[str, Any]) -> None:
    worker = the_class(version, "Worker")["methods"]
    assert {"sleep", "discard", "wake_up", "start_draft_weight_update", *READING} <= set(worker)
    # By their names, since calls may give them so.
    assert "tags" in signature(worker["wake_up"]).parameters
    assert "tags" in signature(worker["discard"]).parameters
    load = the_class(version, "WorkerLoRAManager")["methods"]["_load_adapter"]
    without_self(load).bind("an adapter")


def test_ids_of_images_can_be_marked(version: dict[str, Any]) -> None:
    hashing = the_class(version, "MultiModalHasher")["methods"]["hash_kwargs"]
    without_self(hashing).bind("blake3", model_id="a model", image="an image")
    inputs = the_class(version, "ProcessorInputs")
    assert "mm_uuid_items" in inputs["attributes"]
    assert "hf_processor_mm_kwargs" in inputs["attributes"]
    without_self(inputs["methods"]["get_mm_hashes"]).bind("a model", "blake3")
    start = the_class(version, "InputProcessor")["methods"]["__init__"]
    assert next(iter(without_self(start).parameters)) == "vllm_config"
    assert "process_inputs" in the_class(version, "InputProcessor")["methods"]


def test_connector_can_be_registered(version: dict[str, Any]) -> None:
    factory = the_class(version, "KVConnectorFactory")
    assert "_registry" in factory["attributes"]
    parameters = without_self(factory["methods"]["register_connector"])
    parameters.bind("name", "module", "class")


# ------------------------------------------------------------------------- attention


def ancestors(classes: dict[str, Any], name: str) -> Iterator[str]:
    """A class and its bases, nearest first."""
    yield name
    for base in classes.get(name, {}).get("bases", ()):
        yield from ancestors(classes, base)


def verdict(version: dict[str, Any], name: str) -> str:
    """``learned`` if kvshelf would write through an implementation's cache update."""
    implementations, backends = version["implementations"], version["backends"]
    line = list(ancestors(implementations, name))
    updates = [
        implementations[one]["update"] for one in line if "update" in implementations.get(one, {})
    ]
    if not updates:
        return "unknown"
    update = without_self(updates[0])
    if "MLAAttentionImpl" in line:
        return "learned" if takes(update, MLA_UPDATE) else "unknown"
    users = [key for key, one in backends.items() if one.get("implementation") == name]
    for user in users:
        flags = [
            backends[one]["updates_in_attention"]
            for one in ancestors(backends, user)
            if "updates_in_attention" in backends.get(one, {})
        ]
        if flags[:1] != [False]:
            return "unknown"
    return "learned" if "AttentionImpl" in line and takes(update, ATTENTION_UPDATE) else "unknown"


def expected() -> dict[str, str]:
    """What the signature of each implementation must lead to: `learned` or `unknown`."""
    ledger = json.loads((REPOSITORY / "tests" / "golden" / "vllm-attention.json").read_text())
    return {name: result for result, names in ledger.items() for name in names}


def test_attention_is_served_as_the_ledger_says(version: dict[str, Any]) -> None:
    said = expected()
    used = {
        one["implementation"] for one in version["backends"].values() if "implementation" in one
    }
    judged = {name: verdict(version, name) for name in used}
    assert {name: one for name, one in judged.items() if said.get(name, one) != one} == {}
    if version["version"] in RECORDED:
        assert set(judged) - set(said) == set(), "the ledger leaves them out"


def test_what_the_ledger_names_exists() -> None:
    known = {
        one.get("implementation")
        for version in RECORDED
        for one in recorded(version)["backends"].values()
    }
    assert set(expected()) - known == set()
