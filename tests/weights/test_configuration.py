"""Configurations as published: canonical JSON, what shapes no KV, and remote code."""

from __future__ import annotations

import hashlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import ConfigError
from kvshelf.weights.configuration import (
    canonical_json,
    code_lines,
    config_files,
    published_lines,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": 2,
    "hidden_size": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "use_cache": True,
    "vision_config": {"rope_theta": 1.0, "dtype": "float32"},
}


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ('{"b": 1, "a": [true, null]}', '{"a":[true,null],"b":1}'),
        ('{"a": 1e-05, "b": 0.00001, "c": 1E2}', '{"a":1e-05,"b":1e-05,"c":100.0}'),
        ('{"a": 1, "b": 1.0, "c": -0.0}', '{"a":1,"b":1.0,"c":-0.0}'),
        ('{"a": Infinity, "b": -Infinity, "c": NaN}', '{"a":Infinity,"b":-Infinity,"c":NaN}'),
        ('{"a": 1, "a": 2}', '{"a":2}'),
        ('{"ä": "\u2028😀", "z": "/"}', '{"z":"/","\\u00e4":"\\u2028\\ud83d\\ude00"}'),
    ],
)
def test_canonical_json_is_as_the_format_says(text: str, canonical: str) -> None:
    assert canonical_json(json.loads(text)) == canonical.encode("ascii")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(), values))
def test_canonical_json_says_the_same_and_of_it_there_is_one(value: dict[str, Any]) -> None:
    text = canonical_json(value)
    again = json.loads(text)
    assert canonical_json(again) == text
    shuffled = dict(reversed(again.items()))
    assert canonical_json(json.loads(json.dumps(shuffled, indent=3))) == text


def write(folder: Path, **files: Any) -> None:
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))


TEXT: dict[str, Any] = {"rope_theta": 1e4, "dtype": "bf16", "n": 1}
PARTS: dict[str, Any] = {"text_config": TEXT, "rope_theta": 2.0, "dtype": "f"}
THINKER = {"thinker_config": PARTS}
FIRST = {"architectures": ["Other", "LlamaForCausalLM"], "eos_token_id": 1}


@pytest.mark.parametrize(
    ("published", "changes", "is_same"),
    [
        (LLAMA, {}, True),
        (LLAMA, {"use_cache": False, "transformers_version": "9", "eos_token_id": 7}, True),
        (LLAMA, {"rope_theta": 5e5, "torch_dtype": "float16"}, True),
        (LLAMA, {"rms_norm_eps": 1e-6}, False),
        (LLAMA, {"extra": None}, False),
        (LLAMA, {"hidden_size": 64.0}, False),
        (LLAMA, {"vision_config": LLAMA["vision_config"] | {"dtype": "float16"}}, False),
        (LLAMA, {"vision_config": LLAMA["vision_config"] | {"rope_theta": 2.0}}, False),
        (LLAMA, {"vision_config": LLAMA["vision_config"] | {"use_cache": True}}, True),
        (LLAMA, {"vision_config": None}, False),
        # Labels shape no KV at any depth, also in lists.
        ({"layers": [{"n": 1, "use_cache": True}]}, {"layers": [{"n": 1}]}, True),
        ({"layers": [{"n": 1}]}, {"layers": [{"n": 2}]}, False),
        # Of the architectures the first is loaded, and decides whether ids of tokens count.
        (FIRST, {"eos_token_id": 7}, False),
        (FIRST | {"architectures": ["LlamaForCausalLM", "Other"]}, {"eos_token_id": 7}, True),
        (FIRST | {"architectures": "LlamaForCausalLM"}, {"eos_token_id": 7}, False),
        # The decoder has a part of its own, or is a part of a part.
        *(
            case
            for whole, wrap in ((PARTS, dict), (THINKER, lambda parts: {"thinker_config": parts}))
            for case in (
                (
                    whole,
                    wrap(PARTS | {"text_config": TEXT | {"rope_theta": 1}}),
                    True,
                ),
                (whole, wrap(PARTS | {"text_config": TEXT | {"dtype": "f"}}), True),
                (whole, wrap(PARTS | {"text_config": TEXT | {"n": 2}}), False),
                (whole, wrap(PARTS | {"rope_theta": 3.0}), False),
            )
        ),
        (PARTS, {"dtype": "other"}, True),
        (THINKER, {"dtype": "other"}, True),
    ],
)
def test_configurations_differ_in_what_shapes_kv(
    published: dict[str, Any], changes: dict[str, Any], is_same: bool
) -> None:
    assert (published_lines(published) == published_lines(published | changes)) is is_same


def test_folder_s_files(tmp_path: Path) -> None:
    write(tmp_path, config=LLAMA, generation_config={"a": 1}, tokenizer_config={"b": 1})
    assert [file.name for file in config_files(tmp_path)] == ["config.json"]
    assert published_lines(tmp_path) == published_lines(tmp_path / "config.json")
    assert published_lines(tmp_path) == published_lines(LLAMA)
    # Of two formats only the one that vLLM chooses counts.
    write(tmp_path, params={"dim": 64})
    assert published_lines(tmp_path) == published_lines(LLAMA)
    (tmp_path / "consolidated.safetensors").touch()
    names = [line.split()[0] for line in published_lines(tmp_path)]
    assert names == ["config.json", "params.json"]
    assert published_lines(tmp_path, config_format="hf") == published_lines(LLAMA)


def test_quantization_that_the_configuration_lacks(tmp_path: Path) -> None:
    write(tmp_path, config=LLAMA, hf_quant_config={"quantization": {"quant_algo": "FP8"}})
    first = published_lines(tmp_path)
    assert [line.split()[0] for line in first] == ["config.json", "hf_quant_config.json"]
    write(tmp_path, hf_quant_config={"quantization": {"quant_algo": "NVFP4"}})
    assert published_lines(tmp_path) != first
    write(tmp_path, config=LLAMA | {"quantization_config": {"bits": 4}})
    assert len(published_lines(tmp_path)) == 1
    write(tmp_path, sparse_attention_config={"block": 64})
    names = [line.split()[0] for line in published_lines(tmp_path)]
    assert names == ["config.json", "sparse_attention_config.json"]
    (tmp_path / "sparse_attention_config.json").unlink()
    # Of two formats it may be the second that has it.
    write(tmp_path, params={"dim": 64})
    (tmp_path / "consolidated.safetensors").touch()
    assert [file.name for file in config_files(tmp_path)] == ["params.json", "config.json"]


@pytest.mark.parametrize("text", ["[]", "{", "\xff", "[" * 100_000])
def test_what_is_no_configuration_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        published_lines(tmp_path)
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json"):
        published_lines(tmp_path)
    with pytest.raises(ConfigError, match="JSON"):
        published_lines({"a": object()})


# ---------------------------------------------------------------------------- remote code


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Path]:
    """A model's code as transformers loads it."""
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def load(folder: Path, commit: str, **sources: str) -> type:
    package = f"transformers_modules.org.repo.{commit}"
    for name, source in sources.items():
        file = folder / f"{name}.py"
        file.write_text(source)
        module = types.ModuleType(f"{package}.{name}")
        module.__file__, module.__package__ = str(file), package
        sys.modules[module.__name__] = module
    return type("Model", (), {"__module__": f"{package}.modeling"})


def test_remote_code_is_named_by_the_files_that_are_used(repository: Path) -> None:
    sources = {
        "modeling": "from .layers import Layer\nimport torch\n",
        "layers": "from . import numbers\nX = 1\n",
        "numbers": "from .modeling import Model\n",
        "tokenization": "never imported by the model",
    }
    found = code_lines([load(repository, "c1", **sources), dict])
    assert found == tuple(
        f"{name}.py {hashlib.sha256(sources[name].encode()).hexdigest()}"
        for name in ("layers", "modeling", "numbers")
    )
    # The same files of another commit, or of another repository.
    assert code_lines([load(repository, "c2", **sources)]) == found
    sources["numbers"] += "\n"
    assert code_lines([load(repository, "c3", **sources)]) != found
    assert code_lines([dict, Path]) == ()


def test_remote_code_without_a_file_is_an_error(repository: Path) -> None:
    model = load(repository, "c1", modeling="")
    Path(str(sys.modules[model.__module__].__file__)).unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        code_lines([model])
    del sys.modules[model.__module__]
    with pytest.raises(ConfigError, match="not its file"):
        code_lines([model])
