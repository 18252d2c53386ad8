"""Record what kvshelf relies on in a version of vLLM: signatures, attributes, calls.

The source is parsed, not imported, so that a version is recorded which is not installed, or which
this machine could not run: from a wheel, or from the folder that holds the package ``vllm``. ::

    python tests/vllm/record_signatures.py vllm-0.33.0-cp38-abi3-manylinux_2_31_x86_64.whl

writes ``tests/golden/vllm-signatures/0.33.0.json``, and the names of what could shape KV into the
ledger of :mod:`record_inputs`. ``test_signatures.py`` holds kvshelf against the records. A record
has

* ``classes``: by ``module:class``, its bases, methods with their parameters (defaults are ``...``),
  and attributes that it declares or sets; likewise functions, and what they set on their first
  parameter;
* ``exports``: what packages offer that kvshelf imports from;
* ``calls``: how vLLM calls each method of a connector;
* ``order``: in which order functions of the two model runners call what decides when KV is
  complete, and when vLLM learns that a step is over;
* ``implementations``: every attention implementation, its bases and the parameters of the cache
  update that it defines;
* ``backends``: every attention backend, its bases, its implementation, and whether it says that
  attention updates the cache;
* ``inputs``: the names of everything that could shape KV, see :mod:`record_inputs`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.vllm import record_inputs

RECORDS: Final = Path(__file__).parents[1] / "golden" / "vllm-signatures"
_V1: Final = "vllm.distributed.kv_transfer.kv_connector.v1"
#: The classes and functions of each module that kvshelf uses, or whose instances it is given.
SUBJECTS: Final = {
    f"{_V1}.base": (
        "KVConnectorBase_V1",
        "KVConnectorMetadata",
        "KVConnectorRole",
        "KVConnectorTransferResults",
        "KVConnectorWorkerMetadata",
        "SupportsHMA",
    ),
    f"{_V1}.metrics": ("KVConnectorPromMetrics", "KVConnectorStats"),
    f"{_V1}.multi_connector": ("MultiConnector",),
    "vllm.distributed.kv_transfer.kv_connector.factory": ("KVConnectorFactory",),
    "vllm.distributed.kv_transfer.kv_transfer_state": ("get_kv_transfer_group",),
    "vllm.distributed.parallel_state": ("get_dcp_group", "model_parallel_is_initialized"),
    "vllm.config.cache": ("CacheConfig",),
    "vllm.config.compilation": ("CompilationConfig",),
    "vllm.config.kv_transfer": ("KVTransferConfig",),
    "vllm.config.load": ("LoadConfig",),
    "vllm.config.lora": ("LoRAConfig",),
    "vllm.config.model": ("ModelConfig",),
    "vllm.config.model_arch": ("ModelArchitectureConfig",),
    "vllm.config.multimodal": ("MultiModalConfig",),
    "vllm.config.parallel": ("ParallelConfig",),
    "vllm.config.scheduler": ("SchedulerConfig",),
    "vllm.config.speculative": ("SpeculativeConfig",),
    "vllm.config.vllm": ("VllmConfig",),
    "vllm.engine.arg_utils": ("EngineArgs",),
    "vllm.entrypoints.common.offline": ("OfflineInferenceMixin",),
    "vllm.lora.request": ("LoRARequest",),
    "vllm.lora.worker_manager": ("WorkerLoRAManager", "LRUCacheWorkerLoRAManager"),
    "vllm.model_executor.layers.attention.attention": ("Attention", "set_default_quant_scales"),
    "vllm.model_executor.layers.attention.mla_attention": ("MLAAttention",),
    "vllm.model_executor.layers.attention_layer_base": ("AttentionLayerBase",),
    "vllm.model_executor.layers.mamba.abstract": ("MambaBase",),
    "vllm.model_executor.layers.mamba.mamba_utils": ("is_conv_state_dim_first",),
    "vllm.model_executor.models.utils": ("extract_layer_index",),
    "vllm.multimodal.hasher": ("MultiModalHasher",),
    "vllm.multimodal.inputs": ("MultiModalFeatureSpec", "PlaceholderRange"),
    "vllm.multimodal.processing.context": ("BaseProcessingInfo",),
    "vllm.multimodal.processing.inputs": ("ProcessorInputs",),
    "vllm.transformers_utils.utils": ("convert_model_repo_to_path",),
    "vllm.v1.attention.backend": (
        "AttentionBackend",
        "AttentionImpl",
        "AttentionImplBase",
        "MLAAttentionImpl",
    ),
    "vllm.v1.core.encoder_cache_manager": ("EncoderCacheManager",),
    "vllm.v1.core.kv_cache_manager": ("KVCacheBlocks",),
    "vllm.v1.core.sched.output": (
        "CachedRequestData",
        "KVConnectorBlockState",
        "NewRequestData",
        "SchedulerOutput",
    ),
    "vllm.v1.engine": ("EngineCoreRequest",),
    "vllm.v1.engine.input_processor": ("InputProcessor",),
    "vllm.v1.kv_cache_interface": (
        "AttentionSpec",
        "ChunkedLocalAttentionSpec",
        "CircularBufferSpec",
        "FullAttentionSpec",
        "KVCacheConfig",
        "KVCacheGroupSpec",
        "KVCacheSpec",
        "MLAAttentionSpec",
        "MambaSpec",
        "SlidingWindowSpec",
        "UniformTypeKVCacheSpecs",
        "iter_layer_specs",
    ),
    "vllm.v1.metrics.cache_hit_source": ("CacheHitSource",),
    "vllm.v1.outputs": ("KVConnectorOutput",),
    "vllm.v1.request": ("Request",),
    "vllm.v1.spec_decode.llm_base_proposer": ("SpecDecodeBaseProposer",),
    "vllm.v1.worker.gpu.spec_decode.speculator": ("DraftModelSpeculator",),
    "vllm.v1.worker.gpu_worker": ("Worker",),
}
#: Packages with a list of what they offer, which is defined elsewhere.
PACKAGES: Final = (
    "vllm",
    "vllm.config",
    "vllm.distributed.kv_transfer",
    "vllm.platforms",
    "vllm.renderers",
)
#: Functions of the model runners, and the calls in them whose order kvshelf relies on.
ORDERED: Final = {
    "vllm.v1.worker.gpu.model_runner": {
        "execute_model": ("pre_forward", "run_pw_graph", "run_fullgraph", "finish_forward"),
        "sample_tokens": ("sample", "AsyncOutput", "propose", "post_forward", "finalize_step"),
    },
    "vllm.v1.worker.gpu.kv_connector": {
        "post_forward": ("_start_load_kv", "wait_for_save", "get_transfer_results"),
        "finalize_step": ("wait_for_save",),
        "no_forward": ("pre_forward", "finish_forward", "post_forward"),
    },
    "vllm.v1.worker.gpu_model_runner": {
        "execute_model": ("maybe_get_kv_connector_output", "_model_forward"),
        "sample_tokens": ("_sample", "finalize_kv_connector", "AsyncGPUModelRunnerOutput"),
    },
    "vllm.v1.worker.kv_connector_model_runner_mixin": {
        "_get_kv_connector_output": ("start_load_kv", "wait_for_save", "get_transfer_results"),
    },
}
_CONNECTOR: Final = f"{_V1}.base:KVConnectorBase_V1"
# What is called a connector of KV, and not of encoder outputs or of others.
_RECEIVERS: Final = re.compile(
    r"^(?!.*(ec_connector|aux_output|get_ec_transfer)).*(connector|kv_transfer_group\(\)|^c$)",
    re.IGNORECASE,
)
_OTHERS: Final = (
    "vllm/distributed/kv_transfer/",
    "vllm/distributed/ec_transfer/",
    "vllm/v1/simple_kv_offload/",
)
_UPDATE: Final = "do_kv_cache_update"
_IN_ATTENTION: Final = "forward_includes_kv_cache_update"
_ROOTS: Final = {"AttentionImpl", "AttentionImplBase", "MLAAttentionImpl"}
_BACKEND: Final = "AttentionBackend"

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """The Python files of a package ``vllm``, of a wheel or a folder.

    Parameters
    ----------
    place : Path
        A wheel, or the folder ``vllm`` itself, or one that holds it.
    """

    def __init__(self, place: Path) -> None:
        if place.suffix == ".whl":
            with zipfile.ZipFile(place) as wheel:
                names = [name for name in wheel.namelist() if _is_source(name)]
                self._texts = {name: wheel.read(name).decode() for name in names}
        else:
            root = place.parent if place.name == "vllm" else place
            files = sorted((root / "vllm").rglob("*.py"))
            self._texts = {file.relative_to(root).as_posix(): file.read_text() for file in files}
        self._trees: dict[str, ast.Module] = {}
        if not self._texts:
            raise FileNotFoundError(f"{place} holds no package vllm")

    @property
    def version(self) -> str:
        """The version that the package states."""
        found = re.search(r"version = ['\"]([^'\"]+)['\"]", self._texts.get("vllm/_version.py", ""))
        if found is None:
            raise ValueError("vllm/_version.py states no version")
        return found[1].partition("+")[0]

    def module(self, name: str) -> ast.Module | None:
        """Return a module; None if there is none of this name."""
        path = name.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in self._texts:
                return self.tree(file)
        return None

    def tree(self, file: str) -> ast.Module:
        """Return a file's syntax tree."""
        if file not in self._trees:
            self._trees[file] = ast.parse(self._texts[file])
        return self._trees[file]

    def with_words(self, *words: str) -> Iterator[str]:
        """Yield the files in which one of these words occurs."""
        for file, text in self._texts.items():
            if any(word in text for word in words):
                yield file


def _is_source(name: str) -> bool:
    return name.startswith("vllm/") and name.endswith(".py")


def record(source: Source) -> dict[str, Any]:
    """Return the record of a version."""
    classes = {}
    for module, names in SUBJECTS.items():
        tree = source.module(module)
        for name in names if tree is not None else ():
            found = _find(tree, name)
            if isinstance(found, ast.ClassDef):
                classes[f"{module}:{name}"] = _class(found)
            elif found is not None:
                classes[f"{module}:{name}"] = _function(found)
    methods = classes.get(_CONNECTOR, {}).get("methods", {})
    implementations, backends = _attention(source)
    return {
        "version": source.version,
        "classes": classes,
        "exports": {name: _exports(source.module(name)) for name in PACKAGES},
        "calls": _calls(source, methods),
        "order": _order(source),
        "implementations": implementations,
        "backends": backends,
        "inputs": sorted(record_inputs.names(source)),
    }


def _find(tree: ast.Module | None, name: str) -> ast.ClassDef | _Function | None:
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.ClassDef | _Function) and node.name == name:
            return node
    return None


def _exports(tree: ast.Module | None) -> list[str]:
    for node in tree.body if tree is not None else ():
        if "__all__" in _targets(node):
            return sorted(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    return []


def _class(node: ast.ClassDef) -> dict[str, Any]:
    methods, attributes = {}, set()
    for item in node.body:
        if isinstance(item, _Function):
            methods[item.name] = _parameters(item)
            attributes |= set(_set_on("self", item))
        else:
            attributes |= set(_targets(item))
    return {
        "bases": [_last_name(base) for base in node.bases],
        "methods": dict(sorted(methods.items())),
        "attributes": sorted(attributes),
    }


def _function(node: _Function) -> dict[str, Any]:
    parameters = node.args.posonlyargs + node.args.args
    attributes = sorted(set(_set_on(parameters[0].arg, node))) if parameters else []
    return {"parameters": _parameters(node), "attributes": attributes}


def _parameters(function: _Function) -> str:
    """Return a function's parameters without annotations, with ``...`` for each default."""
    arguments = function.args
    for one in ast.walk(arguments):
        if isinstance(one, ast.arg):
            one.annotation = None
    default = ast.Constant(...)
    arguments.defaults = [default for _ in arguments.defaults]
    arguments.kw_defaults = [one and default for one in arguments.kw_defaults]
    return ast.unparse(arguments)


def _targets(item: ast.AST) -> Iterator[str]:
    targets: Iterable[ast.expr] = ()
    if isinstance(item, ast.AnnAssign):
        targets = (item.target,)
    elif isinstance(item, ast.Assign):
        targets = item.targets
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id


def _set_on(receiver: str, function: _Function) -> Iterator[str]:
    """Yield the attributes that a function sets on one of its parameters."""
    for node in ast.walk(function):
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            for part in getattr(target, "elts", [target]):
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == receiver:
                    yield part.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{receiver}.register_buffer":
            yield ast.literal_eval(node.args[0])


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)


def _calls(source: Source, methods: Iterable[str]) -> dict[str, list[str]]:
    """Return the forms in which each method of a connector is called."""
    found: dict[str, set[str]] = {name: set() for name in sorted(methods)}
    for file in source.with_words("connector", "get_kv_transfer_group"):
        # Other connectors call their own parts by the same names.
        if file.startswith(_OTHERS) and "multi_connector" not in file:
            continue
        for node in ast.walk(source.tree(file)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in found
                and _RECEIVERS.search(ast.unparse(node.func.value))
            ):
                found[node.func.attr].add(_form(node))
    return {name: sorted(forms) for name, forms in found.items() if forms}


def _order(source: Source) -> dict[str, list[str]]:
    """Return the calls of :data:`ORDERED` in the order of the source."""
    found = {}
    for module, functions in ORDERED.items():
        classes = getattr(source.module(module), "body", ())
        methods = [
            f for node in classes if isinstance(node, ast.ClassDef) for f in _functions(node)
        ]
        for name, wanted in functions.items():
            # A base class may define it as well, without any calls.
            calls = [
                (call.lineno, _last_name(call.func))
                for function in methods
                if function.name == name
                for call in ast.walk(function)
                if isinstance(call, ast.Call)
            ]
            found[f"{module}:{name}"] = [called for _, called in sorted(calls) if called in wanted]
    return found


def _form(call: ast.Call) -> str:
    given = ["*_" if isinstance(one, ast.Starred) else "_" for one in call.args]
    named = [f"{one.arg}=_" if one.arg else "**_" for one in call.keywords]
    return ", ".join((*given, *named))


def _attention(source: Source) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the attention implementations, and the attention backends."""
    files = source.with_words(_UPDATE, "AttentionImpl", "Impl(", _BACKEND, "Backend(")
    classes: dict[str, ast.ClassDef] = {}
    for file in files:
        for node in ast.walk(source.tree(file)):
            if isinstance(node, ast.ClassDef):
                # Some models have classes of one name for several kinds of hardware.
                classes[node.name if node.name not in classes else f"{node.name} in {file}"] = node

    def descends(node: ast.ClassDef, roots: set[str], seen: frozenset[str] = frozenset()) -> bool:
        for base in map(_last_name, node.bases):
            if base in roots:
                return True
            known = base in classes and base not in seen
            if known and descends(classes[base], roots, seen | {base}):
                return True
        return False

    implementations, backends = {}, {}
    for name, node in sorted(classes.items()):
        update = next((f for f in _functions(node) if f.name == _UPDATE), None)
        entry: dict[str, Any] = {"bases": [_last_name(base) for base in node.bases]}
        if node.name in _ROOTS or descends(node, _ROOTS) or update is not None:
            if update is not None:
                entry["update"] = _parameters(update)
            implementations[name] = entry
        elif name == _BACKEND or descends(node, {_BACKEND}):
            entry["implementation"] = _implementation_of(node)
            entry["updates_in_attention"] = _updates_in_attention(node)
            backends[name] = {key: value for key, value in entry.items() if value is not None}
    return implementations, backends


def _functions(node: ast.ClassDef) -> Iterator[_Function]:
    yield from (item for item in node.body if isinstance(item, _Function))


def _implementation_of(node: ast.ClassDef) -> str | None:
    """Return the class that a backend's ``get_impl_cls`` returns."""
    for function in _functions(node):
        if function.name == "get_impl_cls":
            for statement in ast.walk(function):
                if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Name):
                    return statement.value.id
    return None


def _updates_in_attention(node: ast.ClassDef) -> bool | None:
    for item in node.body:
        if _IN_ATTENTION in _targets(item):
            value = getattr(item, "value", None)
            return value.value if isinstance(value, ast.Constant) else None
    return None


def write(place: Path, folder: Path = RECORDS) -> Path:
    """Write the record of the vLLM in `place`, and its names in the ledger; return its file."""
    made = record(Source(place))
    file = folder / f"{made['version']}.json"
    file.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    record_inputs.write(made["inputs"])
    return file


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(write(Path(argument)))
