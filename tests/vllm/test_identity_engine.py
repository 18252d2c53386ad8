"""Real engines with equal weights whose KV differs: they load nothing of each other."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines import Answer, Engine, assert_same
from tests.support.fleet import Engines, MakePrompt, Places
from tests.vllm.shelf_files import ShelfFiles

pytestmark = pytest.mark.slow


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from .scale import SCALE


class CustomConfig(LlamaConfig):
    model_type = "custom_llama"


class CustomModel(LlamaModel):
    config_class = CustomConfig

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        kwargs |= {"position_ids": position_ids, "inputs_embeds": inputs_embeds * SCALE}
        return super().forward(**kwargs)


class CustomForCausalLM(LlamaForCausalLM):
    config_class = CustomConfig
"""


@pytest.fixture
def shelf(tmp_path: Path) -> ShelfFiles:
    return ShelfFiles(tmp_path / "shelf")


@pytest.fixture
def copy(engines: Engines, tmp_path: Path) -> Callable[..., Path]:
    """Copies the model, with other keys in its configuration."""

    def copy(name: str, **changes: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(engines.places.model, folder)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return folder

    return copy


@pytest.fixture
def start(engines: Engines, shelf: ShelfFiles) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(model: Path, **arguments: Any) -> Engine:
        engine = engines.on_shelf(
            f"{model.parent.name} {model.name}", shelf.root, model=model, core=0, **arguments
        )
        started.append(engine)
        return engine.wait_ready()

    yield start
    for engine in started:
        engine.stop(at_once=True)


def answered(engine: Engine, tokens: list[int], hit: int) -> Answer:
    """Let an engine answer as it does without the shelf; `hit` tokens come from there."""
    answer = engine.generate(tokens)
    assert answer.shelf_tokens == hit
    assert_same(answer, engine.generate(tokens, cache_salt="its own"))
    return answer


def test_a_configuration_edited_beside_equal_weights(
    start: Callable[..., Engine], copy: Callable[..., Path], shelf: ShelfFiles, prompt: MakePrompt
) -> None:
    tokens = prompt(1100)
    first = start(copy("first"))
    first.generate(tokens)
    shelf.wait_stored(tokens)
    answered(start(copy("edited", rms_norm_eps=0.1)), tokens, 0)
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    answered(start(copy("another RoPE factor", rope_parameters=scaled)), tokens, 0)
    # A value that decides nothing, and another version of the library that wrote the file.
    answered(start(copy("written anew", transformers_version="9.9", use_cache=False)), tokens, 1024)


def quantized(folder: Path) -> None:
    """Make the weights of linear layers int8, and their activations."""
    of_both = {"num_bits": 8, "type": "int", "symmetric": True}
    file = folder / "config.json"
    content = json.loads(file.read_text())
    content["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "all": {
                "targets": ["Linear"],
                "weights": of_both | {"strategy": "channel", "dynamic": False},
                "input_activations": of_both | {"strategy": "token", "dynamic": True},
            }
        },
    }
    file.write_text(json.dumps(content))
    [weights] = folder.glob("*.safetensors")
    made: dict[str, torch.Tensor] = {}
    for name, value in load_file(weights).items():
        if name.endswith("_proj.weight"):
            scale = value.float().abs().amax(1, keepdim=True) / 127
            made[name] = (value.float() / scale).round().to(torch.int8)
            made[f"{name}_scale"] = scale
        else:
            made[name] = value
    save_file(made, weights, metadata={"format": "pt"})


def test_quantized_models_that_compute_in_other_precisions(
    start: Callable[..., Engine], copy: Callable[..., Path], shelf: ShelfFiles, prompt: MakePrompt
) -> None:
    """The variable stands for other hardware: on one machine, engines choose the same kernels."""
    folder, tokens = copy("int8"), prompt(1100)
    quantized(folder)
    start(folder).generate(tokens)
    shelf.wait_stored(tokens)
    [namespace] = shelf.namespaces()
    assert json.loads((namespace / "namespace.json").read_text())["precision"] == ["8 int8"]
    other = start(folder, env={"VLLM_MARLIN_INPUT_DTYPE": "int8"})
    answered(other, tokens, 0)
    answered(start(folder), tokens, 1024)


def test_remote_code_that_differs(
    start: Callable[..., Engine],
    copy: Callable[..., Path],
    shelf: ShelfFiles,
    prompt: MakePrompt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    tokens = prompt(1100)

    def with_code(name: str, scale: float) -> Engine:
        folder = copy(
            name,
            architectures=["CustomForCausalLM"],
            model_type="custom_llama",
            auto_map={
                "AutoConfig": "modeling_custom.CustomConfig",
                "AutoModel": "modeling_custom.CustomModel",
                "AutoModelForCausalLM": "modeling_custom.CustomForCausalLM",
            },
        )
        (folder / "modeling_custom.py").write_text(CODE)
        (folder / "scale.py").write_text(f"SCALE = {scale}\n")
        return start(
            folder,
            trust_remote_code=True,
            model_impl="transformers",
            env={"HF_MODULES_CACHE": str(tmp_path / "modules")},
        )

    with_code("model_a", 1.0).generate(tokens)
    shelf.wait_stored(tokens)
    answered(with_code("model_b", 2.0), tokens, 0)
    answered(with_code("model_c", 1.0), tokens, 1024)


@pytest.fixture(scope="module")
def llama_4(places: Places) -> Path:
    """A tiny Llama 4 that scales queries by their position from its 64th token on, if it does."""
    import torch
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=64,
        intermediate_size_mlp=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 0, 1, 0],
        max_position_embeddings=65536,
        floor_scale=64,
        attn_scale=1.0,
        use_qk_norm=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = Llama4ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                inputs = weight.shape[
                    -2 if "experts.gate" in name or "experts.down" in name else -1
                ]
                gain = 4 if "o_proj" in name else 1
                weight.normal_(0, 1.0 if "embed" in name else gain / math.sqrt(inputs))
    folder = places.root / "models" / "llama 4"
    model.to(torch.bfloat16).save_pretrained(folder)
    # It says itself whether queries are scaled.
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def test_llama_4_whose_queries_are_scaled_by_their_position(
    start: Callable[..., Engine], llama_4: Path, prompt: MakePrompt, tmp_path: Path
) -> None:
    """vLLM decides on it by the longest prompt, unless the generation's configuration does."""
    tokens = [token % 1000 for token in prompt(1100)]

    def run(model: Path, longest: int, hit: int, **options: Any) -> Answer:
        with start(model, max_model_len=longest, **options) as engine:
            return answered(engine, tokens, hit)

    plain = run(llama_4, 8192, 0)
    assert_same(run(llama_4, 16384, 1024), plain)
    scaled = run(llama_4, 40000, 0)
    assert scaled.tokens != plain.tokens
    not_scaled = {"attn_temperature_tuning": False}
    assert_same(run(llama_4, 40000, 1024, override_generation_config=not_scaled), plain)
    copied = shutil.copytree(llama_4, tmp_path / "with a generation's configuration")
    (copied / "generation_config.json").write_text(json.dumps({"attn_temperature_tuning": True}))
    assert_same(run(copied, 8192, 1024), scaled)
