"""vLLM's adapters for LMCache's server and ours: signatures, arguments, and the page about them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.server.node import LocalServer

with warnings.catch_warnings():
    # vLLM's own imports are not ours to judge.
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    from kvshelf.vllm import engine_facts, multiprocess
    from kvshelf.vllm.multiprocess import (
        LMCacheMPSchedulerAdapter,
        LMCacheMPWorkerAdapter,
        LoadStoreOp,
        MPSchedulerAdapter,
        MPWorkerAdapter,
        ParallelStrategy,
        learn_layouts,
        model_facts,
        striding_block_hashes,
    )
    from tests.sim.engine_caches import (
        FORMS,
        HEADS,
        LAYERS,
        SIZE,
        Layers,
        PagedCaches,
        Writing,
        names,
    )

from kvshelf import ModelFacts, PromptIdentity
from kvshelf.adapters import SchedulerAdapter, WorkerAdapter
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.kv.layout import PagedLayout, PermutedLayout
from kvshelf.kv.topology import ShardPlan
from kvshelf.weights.configuration import published_lines
from tests.sim.engine_caches import PUBLISHED
from tests.support.waiting import until

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "src" / "kvshelf" / "adapters" / "README.md"
CLASSES = {
    "LMCacheMPSchedulerAdapter": LMCacheMPSchedulerAdapter,
    "LMCacheMPWorkerAdapter": LMCacheMPWorkerAdapter,
    "ParallelStrategy": ParallelStrategy,
    "LoadStoreOp": LoadStoreOp,
}
CHUNK, BLOCK = 16, 4


def original() -> ast.Module:
    """vLLM's file, which cannot be imported without LMCache."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "distributed/kv_transfer/kv_connector/v1"
    return ast.parse((folder / "lmcache_integration/multi_process_adapter.py").read_text())


def classes() -> dict[str, ast.ClassDef]:
    return {node.name: node for node in original().body if isinstance(node, ast.ClassDef)}


def methods(of: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in of.body if isinstance(node, ast.FunctionDef)}


def fields(of: ast.ClassDef) -> list[str]:
    return [
        node.target.id
        for node in of.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def public_names() -> set[str]:
    """Every name that vLLM's file defines: functions, classes, methods, fields and attributes."""
    names = set()
    for node in original().body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ClassDef):
            names.update((node.name, *fields(node), *methods(node)))
            for inner in ast.walk(node):
                if isinstance(inner, (ast.Assign, ast.AnnAssign)):
                    targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                    names.update(
                        target.attr
                        for target in targets
                        if isinstance(target, ast.Attribute)
                        and isinstance(target.value, ast.Name)
                        and target.value.id == "self"
                    )
    return {name for name in names if not name.startswith("_")}


# ------------------------------------------------------------------------------ the page


def test_page_names_all_of_the_original() -> None:
    names = public_names()
    assert {"LoadStoreOp", "get_finished", "previously_finished", "pp_size"} <= names
    page = PAGE.read_text()
    missing = {name for name in names if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", page)}
    assert not missing
    for definition in classes().values():
        init = methods(definition).get("__init__")
        for argument in [] if init is None else init.args.args[1:]:
            assert f"`{argument.arg}`" in page


def test_page_names_all_errors_of_the_original() -> None:
    """Each assert of the original has a row; it raises nothing else."""
    nodes = list(ast.walk(original()))
    assert not [node for node in nodes if isinstance(node, ast.Raise)]
    asserted = {
        name.id
        for node in nodes
        if isinstance(node, ast.Assert)
        for name in ast.walk(node.test)
        if isinstance(name, ast.Name)
    }
    rows = [line for line in PAGE.read_text().splitlines() if "AssertionError" in line]
    for name in asserted - {"self", "op"}:
        said = {"request_id": "of an id without a lookup", "vllm_block_size": "block size"}
        assert any(said.get(name, name) in row for row in rows), name


def rows() -> Iterator[list[str]]:
    """The cells of all rows with a test."""
    header: list[str] = []
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            header = []
            continue
        # A bar inside code would be no border.
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not header:
            header = cells
        elif header[-1] == "test" and not set(line) <= set("|-"):
            assert len(cells) == len(header), line
            yield cells


def test_each_row_has_a_verdict_and_a_test_that_exists() -> None:
    tests_of_page = ROOT / "tests"
    files = [
        *(tests_of_page / "vllm").glob("test_multiprocess*.py"),
        *(tests_of_page / "adapters").glob("test_*.py"),
        *(tests_of_page / "server").glob("test_*.py"),
    ]
    tests = {
        node.name
        for file in files
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    found = list(rows())
    assert len(found) > 50
    for cells in found:
        assert re.match(r"(equal|different|none)\b", cells[-2]), cells
        named = re.findall(r"`(test_\w+)`", cells[-1])
        assert named and set(named) <= tests, (cells, set(named) - tests)


def test_code_of_the_page_runs(tmp_path: Path) -> None:
    """What one engine has stored, the page's adapters find and load, by both constructors."""
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(code) == 2
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    tokens, blocks = list(range(300)), list(range(1, 17))
    shape = (18, 8, 16, 256)
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(32)]
    theirs = {name: torch.randn(shape).bfloat16() for name in layers}
    with LocalServer(tmp_path / "run", tmp_path / "shelf", memory_bytes=256 << 20) as server:
        page: dict[str, Any] = {
            "MODEL_FOLDER": str(folder),
            "request_id": "b",
            "tokens": tokens,
            "block_ids": blocks,
            "caches": {name: torch.zeros(shape, dtype=torch.bfloat16) for name in layers},
            "finished_request_ids": set(),
            "zmq_context": None,
            "model_name": "model",
            "vllm_block_size": 16,
            "parallel_strategy": ParallelStrategy(False, 1, 0, 1, 0, 1, 1),
            "world_size": 1,
            "kv_rank": 0,
        }
        first, second = (
            text.replace("ipc:///run/user/1000/kvshelf/node.sock", server.url) for text in code
        )
        facts = ModelFacts(layers=32, kv_heads=8, head_size=128, dtype="bfloat16", weights=folder)
        other = LMCacheMPWorkerAdapter(server.url, None, "model", 1, 0, 16, namespace=facts)
        other.register_kv_caches(theirs, PagedLayout.from_bhnc(theirs[layers[0]], 128))
        other.submit_store_request("a", LoadStoreOp(blocks, token_ids=tokens, start=0, end=256))
        until(lambda: "a" in (other.get_finished({"a"})[0] or ()))
        exec(compile(first, "adapters/README.md", "exec"), page)
        assert page["hit"] == 256
        loaded = set(page["loaded"] or ())
        until(lambda: loaded.update(page["worker"].get_finished(set())[1] or ()) or "b" in loaded)
        assert not page["failed_blocks"] and not page["worker"].get_block_ids_with_load_errors()
        for name in layers:
            assert torch.equal(page["caches"][name][blocks], theirs[name][blocks])
        made = [other, page["worker"], page["scheduler"]]
        exec(compile(second, "adapters/README.md", "exec"), page)
        assert page["worker"].namespace == page["scheduler"].namespace == other.namespace
        for adapter in (*made, page["worker"], page["scheduler"]):
            adapter.shutdown()


# ------------------------------------------------------------------------------ signatures


@pytest.mark.parametrize("name", CLASSES)
def test_arguments_are_in_the_same_order(name: str) -> None:
    ours = CLASSES[name]
    theirs = classes()[name]
    assert fields(theirs) == list(getattr(ours, "__dataclass_fields__", ()))[: len(fields(theirs))]
    for method in methods(theirs).values():
        if method.name.startswith("_"):
            continue
        found = getattr(ours, method.name)
        if isinstance(found, property):
            continue
        parameters = list(inspect.signature(found).parameters.values())
        names = [argument.arg for argument in method.args.args]
        assert [one.name for one in parameters[: len(names)]] == names, method.name
        # Whatever the original lets a caller leave out, and no further argument is needed.
        required = len(names) - len(method.args.defaults)
        for one in parameters[required:]:
            assert one.default is not one.empty, (method.name, one.name)


def test_functions_have_the_same_arguments() -> None:
    [theirs] = [
        node
        for node in original().body
        if isinstance(node, ast.FunctionDef) and node.name == striding_block_hashes.__name__
    ]
    assert list(inspect.signature(striding_block_hashes).parameters) == [
        argument.arg for argument in theirs.args.args
    ]


# ------------------------------------------------------------------------------ arguments


@pytest.fixture
def passed_on(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """What the classes hand to those that they are made of."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def noted(name: str) -> Any:
        return lambda self, *args, **options: calls.append((name, args, options))

    for base, names in (
        (SchedulerAdapter, ["__init__", "maybe_submit_lookup_request"]),
        (
            WorkerAdapter,
            [
                "__init__",
                "register_kv_caches",
                "batched_submit_store_requests",
                "batched_submit_retrieve_requests",
            ],
        ),
    ):
        for name in names:
            monkeypatch.setattr(base, name, noted(name))
    return calls


STRATEGY = ParallelStrategy(True, 2, 1, 4, 2, 2, 2)
FACTS = ModelFacts(layers=2, kv_heads=4, head_size=8, dtype="bfloat16", weights="name:w")


def test_attributes_of_the_strategy(passed_on: list[Any]) -> None:
    scheduler = MPSchedulerAdapter("url", None, "model", BLOCK, STRATEGY, namespace=FACTS)
    worker = MPWorkerAdapter("url", None, "model", BLOCK, STRATEGY, namespace=FACTS)
    for one in (scheduler, worker):
        assert (one.model_name, one.world_size, one.worker_id) == ("model", 2, 1)
        assert one.parallel_strategy is STRATEGY
    assert scheduler.tp_size == 2
    assert worker.use_mla
    assert worker.is_first_rank_of_pp_group
    scheduler.report_block_allocations([object()])


#: Arguments of the constructors of vLLM's classes: of this version, and of earlier ones.
CONSTRUCTORS = {
    "0.32": ["server_url", "context", "model_name", "vllm_block_size", "parallel_strategy"],
    "earlier": ["server_url", "context", "model_name", "world_size", "kv_rank", "vllm_block_size"],
}


@pytest.mark.parametrize("name", ["LMCacheMPSchedulerAdapter", "LMCacheMPWorkerAdapter"])
def test_constructors_take_the_arguments_of_the_original(name: str, passed_on: list[Any]) -> None:
    theirs = [argument.arg for argument in methods(classes()[name])["__init__"].args.args]
    assert theirs == ["self", *CONSTRUCTORS["0.32"]]
    values = {
        "server_url": "url",
        "context": None,
        "model_name": "model",
        "vllm_block_size": BLOCK,
        "parallel_strategy": STRATEGY,
        "world_size": 2,
        "kv_rank": 1,
    }
    expected = {"0.32": STRATEGY, "earlier": ParallelStrategy(False, 2, 1, 2, 1, 2, 1)}
    for version, names in CONSTRUCTORS.items():
        for positional in range(len(names) + 1):
            made = getattr(multiprocess, name)(
                *[values[one] for one in names[:positional]],
                **{one: values[one] for one in names[positional:]},
                namespace=FACTS,
            )
            assert passed_on.pop()[1] == ("url", FACTS, BLOCK)
            assert made.parallel_strategy == expected[version]
            assert made.model_name == "model"


@pytest.mark.parametrize("adapter", [LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter])
def test_arguments_of_neither_constructor_are_refused(
    adapter: type[Any], passed_on: list[Any]
) -> None:
    for engine, named in (
        ((), {}),
        ((BLOCK,), {}),
        ((1, 0, BLOCK, STRATEGY), {}),
        ((BLOCK, STRATEGY), {"kv_rank": 0}),
        ((BLOCK,), {"parallel_strategie": STRATEGY}),
    ):
        with pytest.raises(TypeError, match="expected vllm_block_size and parallel_strategy, or"):
            adapter("url", None, "model", *engine, namespace=FACTS, **named)
    with pytest.raises(TypeError, match="expected a ParallelStrategy"):
        adapter("url", None, "model", BLOCK, 3, namespace=FACTS)
    for ranks in ((0, 0), (2, 2), (2, -1)):
        with pytest.raises(ConfigError, match="expected a rank"):
            adapter("url", None, "model", *ranks, BLOCK, namespace=FACTS)
    with pytest.raises(ConfigError, match="keyword namespace"):
        adapter("url", None, "model", 1, 0, BLOCK)
    assert not passed_on


def test_strategy_of_vllm_is_taken(passed_on: list[Any]) -> None:
    theirs = SimpleNamespace(**vars(STRATEGY))
    made = MPWorkerAdapter("url", None, "model", BLOCK, theirs, namespace=FACTS)
    assert made.parallel_strategy == STRATEGY


def test_counted_ranks_are_those_of_the_stages(passed_on: list[Any]) -> None:
    facts = ModelFacts(
        layers=2, kv_heads=4, head_size=8, dtype="bfloat16", weights="name:w", stages=(1, 1)
    )
    space = facts.namespace(chunk_size=CHUNK)
    for model in (facts, space):
        made = LMCacheMPWorkerAdapter("url", None, "model", 4, 3, BLOCK, namespace=model)
        assert made.parallel_strategy == ParallelStrategy(False, 4, 3, 4, 3, 2, 2)
        assert made.parallel_strategy.shard_plan(space).shards == (6, 7)
    with pytest.raises(ConfigError, match=r"stages \(2\)"):
        LMCacheMPWorkerAdapter("url", None, "model", 3, 0, BLOCK, namespace=space)


def test_timeouts_of_the_original(passed_on: list[Any]) -> None:
    options: dict[str, Any] = {"mq_timeout": 7.0, "heartbeat_interval": 1.0, "namespace": FACTS}
    MPSchedulerAdapter("url", None, "model", BLOCK, STRATEGY, **options)
    MPWorkerAdapter("url", None, "model", BLOCK, STRATEGY, **options)
    assert [call[1] for call in passed_on] == [("url", FACTS, BLOCK)] * 2
    assert [call[2]["timeout_s"] for call in passed_on] == [2.0, 7.0]


def test_salts_separate_prompts(passed_on: list[Any]) -> None:
    scheduler = MPSchedulerAdapter("url", None, "model", BLOCK, STRATEGY, namespace=FACTS)
    worker = MPWorkerAdapter("url", None, "model", BLOCK, STRATEGY, namespace=FACTS)
    passed_on.clear()
    scheduler.maybe_submit_lookup_request("a", token_ids=[1], cache_salt="s")
    worker.batched_submit_store_requests(["a"], [LoadStoreOp([0])], None, cache_salts=["s"])
    worker.batched_submit_retrieve_requests(["a"], [LoadStoreOp([0])], None, cache_salts=[""])
    assert passed_on[0][2]["identity"] == PromptIdentity("s")
    assert passed_on[1][2]["identities"] == [PromptIdentity("s")]
    assert passed_on[2][2]["identities"] == [PromptIdentity()]


@pytest.mark.parametrize("adapter", [MPSchedulerAdapter, MPWorkerAdapter])
def test_name_is_no_namespace(adapter: type[Any]) -> None:
    with pytest.raises(ConfigError, match="'model' does not say which weights"):
        adapter("ipc:///none", None, "model", BLOCK, STRATEGY)


def test_strategy_says_which_shards_a_worker_holds() -> None:
    whole = ParallelStrategy(False, 1, 0, 1, 0, 1, 1)
    space = FACTS.namespace(chunk_size=CHUNK, shards=4)
    assert whole.shard_plan(space) == ShardPlan((0, 1, 2, 3))
    halves = [ParallelStrategy(False, 2, rank, 2, rank, 2, 1) for rank in range(2)]
    assert [half.shard_plan(space).shards for half in halves] == [(0, 1), (2, 3)]
    # Eight ranks for four heads: two hold the same, and take turns.
    ranks = [ParallelStrategy(False, 8, rank, 8, rank, 8, 1).shard_plan(space) for rank in (2, 3)]
    assert [plan.shards for plan in ranks] == [(1,), (1,)]
    assert [plan.writes(5) for plan in ranks] == [(), (1,)]
    with pytest.raises(ConfigError, match="1 pipeline stages, the engine 2"):
        ParallelStrategy(False, 2, 0, 2, 0, 1, 2).shard_plan(space)
    latent = ModelFacts(
        layers=2,
        kv_heads=1,
        head_size=8,
        dtype="bfloat16",
        weights="name:w",
        layer_shapes=("*,24", "*,24"),
        attention=("mla", "mla"),
        stages=(1, 1),
    ).namespace(chunk_size=CHUNK, shards=2)
    # The connector lets the first rank of a stage store, and only that one.
    first = ParallelStrategy(True, 2, 1, 4, 2, 2, 2).shard_plan(latent)
    assert first.shards == first.writes(0) == first.writes(1) == (1,)


# ------------------------------------------------------------------------------ vLLM's objects


def engine_config(form: str = "HND") -> tuple[SimpleNamespace, dict[str, torch.Tensor]]:
    """What is read of an engine's configuration, and its caches."""
    caches = PagedCaches([Layers("full", names("attn", LAYERS), BLOCK, (HEADS,))], 4, form).caches
    layers = {
        name: SimpleNamespace(
            impl=Writing(form, BLOCK),
            kv_cache=cache,
            num_kv_heads=HEADS,
            head_size=SIZE,
            head_size_v=SIZE,
            kv_sharing_target_layer_name=None,
            kv_cache_dtype="auto",
            attn_backend=SimpleNamespace(forward_includes_kv_cache_update=False),
            _k_scale_float=1.0,
            _v_scale_float=1.0,
        )
        for name, cache in caches.items()
    }
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto", num_gpu_blocks=4),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    return config, caches


@pytest.mark.parametrize("form", [form for form in FORMS if form != "amx"])
def test_layouts_are_learned_through_layers(form: str, passed_on: list[Any]) -> None:
    config, caches = engine_config(form)
    before = {name: cache.clone() for name, cache in caches.items()}
    worker = MPWorkerAdapter("url", None, "m", BLOCK, STRATEGY, namespace=FACTS, vllm_config=config)
    worker.register_kv_caches(caches)
    name, (registered, layouts), _ = passed_on[-1]
    assert name == "register_kv_caches" and registered is caches
    for layer, cache in caches.items():
        expected = PermutedLayout if form == "vec" else PagedLayout
        assert isinstance(layouts[layer], expected)
        assert torch.equal(cache, before[layer])
    worker.register_kv_caches(caches, layouts[layer])
    assert passed_on[-1][1] == (caches, layouts[layer])


def test_number_of_blocks_comes_from_either_configuration() -> None:
    config, caches = engine_config()
    config.cache_config.num_gpu_blocks = None
    with pytest.raises(ConfigError, match="kv_cache_config"):
        learn_layouts(config, caches)
    layouts = learn_layouts(config, caches, SimpleNamespace(num_blocks=4))
    assert {layout.num_blocks for layout in layouts.values()} == {4}


def test_layout_that_cannot_be_learned_is_refused() -> None:
    config, caches = engine_config("odd")
    with pytest.raises(UnsupportedError, match=r"KV cache of model\.layers\.0\.attn"):
        learn_layouts(config, caches)


@pytest.mark.parametrize(
    ("where", "field", "value", "text"),
    [
        ("cache_config", "cache_dtype", "fp8", "dtype fp8"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline stage"),
    ],
)
def test_facts_that_only_a_running_engine_knows(
    where: str, field: str, value: Any, text: str
) -> None:
    config, _ = engine_config()
    setattr(getattr(config, where), field, value)
    with pytest.raises(ConfigError, match=text):
        model_facts(config)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration of an engine whose facts it states."""
    from transformers import LlamaConfig

    monkeypatch.setattr(engine_facts, "local_model_dir", lambda config: Path("/models/m"))
    monkeypatch.setattr(engine_facts, "config_overrides", lambda model, config, media: "overrides")
    config, _ = engine_config()
    config.model_config = SimpleNamespace(
        dtype=torch.float16,
        hf_config=LlamaConfig(
            num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=32
        ),
        served_model_name="served",
        model="m",
        hf_config_path=str(PUBLISHED),
        trust_remote_code=False,
        max_model_len=128,
        quantization=None,
    )
    return config


@pytest.mark.parametrize("what", ["a quantized model", "Llama 4"])
def test_what_only_a_loaded_model_knows_needs_a_namespace(
    what: str, described: Any, passed_on: list[Any]
) -> None:
    model = described.model_config
    if what == "Llama 4":
        model.hf_config.architectures = ["Llama4ForConditionalGeneration"]
    else:
        model.quantization = "fp8"
    arguments = ("url", None, "model", BLOCK, STRATEGY)
    with pytest.raises(ConfigError, match="only to the loaded model: pass namespace"):
        MPSchedulerAdapter(*arguments, vllm_config=described)
    facts = ModelFacts(
        layers=1, kv_heads=1, head_size=8, dtype="bfloat16", weights="name:w", precision=("8 int8",)
    )
    MPSchedulerAdapter(*arguments, vllm_config=described, namespace=facts)
    assert passed_on[-1][1] == ("url", facts, BLOCK)


def test_facts_of_an_engine_follow_from_its_configuration(
    described: Any, passed_on: list[Any]
) -> None:
    config, facts = described, model_facts(described)
    assert (facts.layers, facts.kv_heads, facts.head_size) == (3, 2, 8)
    assert (facts.dtype, facts.weights, facts.name) == ("float16", Path("/models/m"), "served")
    assert facts.config_overrides == "overrides"
    assert facts.config == published_lines(PUBLISHED)
    MPSchedulerAdapter("url", None, "model", BLOCK, STRATEGY, vllm_config=config)
    assert passed_on[-1][1] == ("url", facts, BLOCK)
    for name, text in (
        ("MoonshotKimiaForCausalLM", "beside those"),
        ("Llama4ForCausalLM", "Llama"),
    ):
        config.model_config.hf_config.architectures = [name]
        with pytest.raises(ConfigError, match=f"{text}.*pass namespace"):
            model_facts(config)


def test_module_needs_no_lmcache() -> None:
    assert "lmcache" not in sys.modules
