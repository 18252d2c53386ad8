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
    published_digest,
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

#: Texts and their canonical form, as in docs/format.md.
VECTORS = [
    ('{"b": 1, "a": [true, null]}', '{"a":[true,null],"b":1}'),
    ('{"a": 1e-05, "b": 0.00001, "c": 1E2}', '{"a":1e-05,"b":1e-05,"c":100.0}'),
    ('{"a": 1, "b": 1.0, "c": -0.0}', '{"a":1,"b":1.0,"c":-0.0}'),
    ('{"a": Infinity, "b": -Infinity, "c": NaN}', '{"a":Infinity,"b":-Infinity,"c":NaN}'),
    ('{"a": 1, "a": 2}', '{"a":2}'),
    ('{"ä": "\\u00e4\\u2028\\ud83d\\ude00", "z": "/"}', None),
]


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


def changed(**changes: Any) -> str:
    return published_digest(LLAMA | changes)


def test_the_decoder_of_a_model_with_several_parts() -> None:
    parts = {"text_config": {"rope_theta": 1e4, "dtype": "bfloat16", "n": 1}, "rope_theta": 2.0}

    def digest(**text: Any) -> str:
        return published_digest(parts | {"text_config": parts["text_config"] | text})  # type: ignore[operator]

    assert digest() == digest(rope_theta=1e6) == digest(dtype="float16")
    assert digest() != digest(n=2)
    assert digest() != published_digest(parts | {"rope_theta": 3.0})


def write(folder: Path, **files: Any) -> None:
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))


def test_in_which_keys_configurations_differ(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"

    def write(folder: Path, **changes: Any) -> None:
        folder.mkdir(exist_ok=True)
        content = LLAMA | changes
        (folder / "config.json").write_text(json.dumps(content))

    write(one)
    for changes, keys in [
        ({}, []),
        ({"use_cache": False, "transformers_version": "9", "eos_token_id": 7}, []),
        ({"rope_theta": 5e5, "torch_dtype": "float16"}, []),
        ({"rms_norm_eps": 1e-6, "extra": None}, ["extra", "rms_norm_eps"]),
        ({"vision_config": {"rope_theta": 2.0, "layers": 1}}, ["dtype", "layers", "rope_theta"]),
        ({"hidden_size": 64.0}, ["hidden_size"]),
        ({"vision_config": None}, ["vision_config"]),
    ]:
        write(other, **changes)
        assert (published_lines(one) == published_lines(other)) is (not keys)
    first = LLAMA | {"architectures": ["Other", *LLAMA["architectures"]]}
    assert published_lines(first) != published_lines(first | {"eos_token_id": 7})


def test_a_folder_s_files(tmp_path: Path) -> None:
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
