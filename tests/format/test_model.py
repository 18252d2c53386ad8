"""Facts about models: the namespaces that they make, and what engines would make of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvshelf.config import Config
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.format.model import ModelFacts, rope_text
from kvshelf.format.namespace import FieldValue, Namespace
from kvshelf.weights.fingerprints import sampled_fingerprint, weight_files, weights_fingerprint

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
#: Namespace records that engines of earlier versions wrote.
RECORDED = sorted(
    (Path(__file__).parents[1] / "golden" / "v0.1.0" / "shelf").glob("*/namespace.json")
)


#: The facts of a model with a layer of full attention and a short convolution.
STATES: dict[str, Any] = {
    "kinds": ("full", "state"),
    "kv_heads": (8, 0),
    "attention": ("full", "short_conv"),
    "layer_names": ("a", "b"),
    "layer_shapes": ("2,*,8,64", "conv:2,512/"),
    "layer_dtypes": ("BF16", "BF16"),
    "state_shards": 8,
}


def facts(**changes: Any) -> ModelFacts:
    given = {
        "layers": 2,
        "kv_heads": 8,
        "head_size": 64,
        "dtype": "bfloat16",
        "weights": "name:w",
    }
    return ModelFacts(**{**given, **changes})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    return folder


def _items(record: dict[str, FieldValue], name: str) -> tuple[Any, ...]:
    value = record[name]
    assert isinstance(value, list)
    return tuple(value)


def test_options_of_a_configuration_decide_too() -> None:
    record = facts().namespace().record
    assert (record["chunk_size"], record["shards"]) == (256, 8)
    record = facts().namespace(chunk_size=100, shards=2, version="v").record
    assert (record["chunk_size"], record["shards"], record["version"]) == (100, 2, "v")
    assert facts().namespace(weights="name:named").record["weights"] == "user:named"
    assert facts().namespace().record["weights"] == "user:w"


def test_kinds_that_are_all_full_are_no_kinds() -> None:
    assert facts(kinds=("full", "full")).namespace() == facts().namespace()
    with pytest.raises(ConfigError, match="no layer is of kind state"):
        facts(state_shards=1).namespace()
    with pytest.raises(ConfigError, match="shards is 4, expected 2"):
        facts(kinds=("window", "window"), window_shards=2).namespace(shards=4)


def test_weights_are_known_by_their_content(checkpoint: Path) -> None:
    files = weight_files(checkpoint)
    content = weights_fingerprint(files)
    assert facts(weights=checkpoint).namespace().record["weights"] == content
    assert facts(weights=tuple(files)).namespace().record["weights"] == content
    assert facts(weights=None, fingerprint=content).namespace().record["weights"] == content
    sampled = facts(weights=checkpoint).namespace(weights="sampled").record["weights"]
    assert sampled == sampled_fingerprint(files)


@pytest.mark.parametrize("text", ["/not/there", "./x", "../x", "~/x", "~", " /x"])
def test_weights_with_a_text_that_is_written_like_a_path_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"pathlib\.Path"):
        facts(weights=f"name:{text}")
    with pytest.raises(ConfigError, match=r"pathlib\.Path"):
        facts(weights=None, fingerprint=text)
    with pytest.raises(ConfigError, match=r"pathlib\.Path"):
        facts().namespace(weights=f"name:{text}")


@pytest.mark.parametrize("text", ["my-model", "content", "Content", "name:", "name: x", "Name:x"])
def test_weights_without_the_form_of_a_name_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="name:my-model-v1"):
        facts(weights=text)


@pytest.mark.parametrize("name", ["my-model-v1", "org/Model-8B", "s3://bucket/model", "v1.0 ~ 2"])
def test_names_of_weights_stay_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the working directory happens to have a file of that name."""
    (tmp_path / "my-model-v1").touch()
    monkeypatch.chdir(tmp_path)
    assert facts(weights=f"name:{name}").namespace().record["weights"] == f"user:{name}"
    assert facts().namespace(weights=f"name:{name}").record["weights"] == f"user:{name}"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": "int8"}, "'int8'"),
        ({"layers": 0}, "layers is 0"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"kv_heads": (8, 0)}, r"kv_heads is \(8, 0\)"),
        ({"kv_heads": (8,)}, "kv_heads has 1 entries for 2 layers"),
        ({"head_size": (64,)}, "head_size has 1 entries for 2 layers"),
        ({"layer_names": ("a",)}, "layer_names has 1 entries"),
        ({"dtype": "int8", "layer_dtypes": ("U8",)}, "layer_dtypes has 1 entries"),
        ({"fingerprint": "user:x"}, "leave one out"),
        ({"stages": (1, 2)}, "expected 2 layers in sum"),
        ({"kinds": ("full",)}, "kinds has 1 entries"),
        ({"kinds": ("full", "draft")}, "kind 'draft'"),
        ({"kinds": ("full", "state")}, "attention is missing"),
        ({**STATES, "layer_shapes": None}, "layer_shapes is missing"),
        ({**STATES, "state_shards": None}, "state_shards is missing"),
        ({**STATES, "kv_heads": (0, 8)}, "kv_heads is"),
    ],
)
def test_facts_that_contradict_themselves_are_refused(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        facts(**changes)


# --------------------------------------------------------------------- transformers


def llama(**changes: Any) -> SimpleNamespace:
    given = {
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "hidden_size": 1024,
        "head_dim": 64,
        "dtype": "torch.bfloat16",
        "rope_parameters": ROPE,
        "name_or_path": "org/Model",
    }
    return SimpleNamespace(**{**given, **changes})


def test_facts_come_from_a_configuration() -> None:
    found = ModelFacts.from_transformers(llama(), weights="name:w")
    assert found == facts(
        rope='{"rope_parameters":{"rope_theta":10000.0,"rope_type":"default"}}',
        sliding_windows=(-1, -1),
        name="model",
    )
    without = llama(head_dim=None, num_key_value_heads=None)
    found = ModelFacts.from_transformers(without, weights="name:w")
    assert (found.kv_heads, found.head_size) == (16, 64)


def test_windows_are_those_of_each_layer() -> None:
    mixed = llama(layer_types=["full_attention", "sliding_attention"], sliding_window=100)
    assert ModelFacts.from_transformers(mixed, weights="name:w").sliding_windows == (-1, 100)
    everywhere = llama(sliding_window=100)
    assert ModelFacts.from_transformers(everywhere, weights="name:w").sliding_windows == (100, 100)
    unused = llama(sliding_window=100, use_sliding_window=False)
    assert ModelFacts.from_transformers(unused, weights="name:w").sliding_windows == (-1, -1)


@pytest.mark.parametrize(
    ("changes", "error", "problem"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, UnsupportedError, "linear"),
        ({"kv_lora_rank": 512}, UnsupportedError, "MLA"),
        ({"dtype": None}, ConfigError, "dtype"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, ConfigError, "max_model_len"),
    ],
)
def test_what_a_configuration_cannot_say_is_refused(
    changes: dict[str, Any], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        ModelFacts.from_transformers(llama(**changes), weights="name:w")


def test_rope_that_depends_on_the_longest_prompt_holds_its_length() -> None:
    config = llama(rope_parameters={"rope_type": "dynamic"})
    assert rope_text(config, 4096) != rope_text(config, 8192)
    assert rope_text(llama(), 4096) == rope_text(llama(), 8192) == rope_text(llama())


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", [{"rope_type": "longrope"}, {"type": "su"}])
def test_longest_prompt_decides_only_which_factors_longrope_has(
    place: str, kind: dict[str, str]
) -> None:
    factors = {"short_factor": [1.0], "long_factor": [2.0]}
    original = {"original_max_position_embeddings": 4096}
    for config in (
        llama(**{"rope_parameters": None, place: factors | kind}, **original),
        llama(**{"rope_parameters": None, place: factors | kind | original}),
    ):
        config.model_type, config.max_position_embeddings = "phi3", 131072
        short, long = rope_text(config, 4096), rope_text(config, 131072)
        assert short != long
        assert rope_text(config, 100) == short
        assert rope_text(config, 4097) == rope_text(config, 40000) == rope_text(config, 60000)
        assert rope_text(config, 40000) == long
        # As in records of engines that serve these lengths, before and since.
        assert json.loads(short)["max_model_len"] == 4096
        assert json.loads(long)["max_model_len"] == 131072
        # Nothing longer than the original length is published.
        config.max_position_embeddings = 4096
        assert rope_text(config, 4096) != rope_text(config, 8192) == rope_text(config, 40000)
        # Other models may divide by the length itself, as vLLM's Plamo 3 does.
        config.model_type = "plamo3"
        assert rope_text(config, 40000) != rope_text(config, 60000)


# ---------------------------------------------------------------------------- vLLM


def built(
    hf: object,
    *reports: Mapping[str, Any],
    heads: int,
    name: str = "model",
    weights: str = "user:w",
    version: str | None = None,
    cache_dtype: str = "auto",
    split: int = 1,
    **model: object,
) -> Namespace:
    """The namespace of the connector, from stand-ins for vLLM's configuration."""
    pytest.importorskip("vllm")
    from kvshelf.vllm.metadata import WorkerReport
    from kvshelf.vllm.namespace import build_namespace

    given = {
        "get_total_num_kv_heads": lambda: heads,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "served_model_name": name,
        "model": name,
        "hf_text_config": hf,
        "max_model_len": 4096,
    }
    engine = SimpleNamespace(
        model_config=SimpleNamespace(**given | model),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        parallel_config=SimpleNamespace(tensor_parallel_size=split, pipeline_parallel_size=split),
    )
    parts = [WorkerReport(**report) for report in reports]
    return build_namespace(engine, Config(version=version), parts, weights)


#: Fields of a record that are fields of a worker's report.
REPORTED = (
    "layer_names",
    "layer_shapes",
    "layer_dtypes",
    "layouts",
    "attention",
    "head_sizes",
    "sliding_windows",
)


@pytest.mark.real
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing vLLM warns
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.parent.name)
def test_engines_name_recorded_namespaces_to_the_byte(file: Path) -> None:
    record = Namespace.from_bytes(file.read_bytes(), "tiny").record
    hf = SimpleNamespace(**json.loads(str(record["rope"])))
    report = {name: _items(record, name) for name in REPORTED}
    found = built(hf, report, heads=2, name="tiny", weights=str(record["weights"]))
    assert found.encoded == file.read_bytes()
    assert found.folder == file.parent.name
