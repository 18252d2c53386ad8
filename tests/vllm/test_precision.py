"""In which precision quantized models compute, read from layers as vLLM builds them."""

from __future__ import annotations

import ast
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

import vllm
import vllm.envs as vllm_envs
from vllm.model_executor.kernels.linear import (
    CPUWNA16LinearKernel,
    CutlassFP8ScaledMMLinearKernel,
    MarlinFP8ScaledMMLinearKernel,
    MarlinLinearKernel,
)
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.fused_moe import config as moe
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.experts.trtllm_mxfp4_moe import (
    TrtLlmMxfp4ExpertsModular,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
)
from vllm.scalar_type import scalar_types

from kvshelf.errors import UnsupportedError
from kvshelf.vllm.worker import precision as subject
from kvshelf.vllm.worker.precision import precision
from tests.sim.engine_caches import model_config
from tests.vllm.record_inputs import LEDGER

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing vLLM warns

FP8 = FP8ScaledMMLinearLayerConfig(
    weight_quant_key=kFp8StaticChannelSym,
    activation_quant_key=kFp8DynamicTokenSym,
    weight_shape=(64, 64),
    input_dtype=torch.bfloat16,
    out_dtype=torch.bfloat16,
)
#: Kernels that the next release of vLLM has, and 0.32 has not.
LATER = {"CPUFp8ChannelWiseScaledMMLinearKernel"}


def engine(**fields: Any) -> Any:
    """An engine's configuration, by default with a quantized model."""
    attention = {
        name: fields.pop(name, False)
        for name in ("disable_flashinfer_q_quantization", "use_prefill_query_quantization")
    }
    return SimpleNamespace(
        model_config=model_config(**{"quantization": "fp8"} | fields),
        cache_config=SimpleNamespace(cache_dtype=fields.get("cache_dtype", "auto")),
        attention_config=SimpleNamespace(**attention),
    )


def kernel(made: type, config: Any = FP8) -> Any:
    """A kernel of vLLM as it is when the weights are loaded, of which no device is asked for."""
    one = object.__new__(made)
    one.config = config
    return one


def four_bits(activations: torch.dtype = torch.bfloat16) -> MPLinearLayerConfig:
    return MPLinearLayerConfig(
        full_weight_shape=(64, 64),
        partition_weight_shape=(64, 64),
        weight_type=scalar_types.uint4b8,
        act_type=activations,
        group_size=32,
        zero_points=False,
    )


def layer(method: Any = None, **attributes: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in {"quant_method": method, **attributes}.items():
        setattr(module, name, value)
    return module


def linear(one: Any, **attributes: Any) -> torch.nn.Module:
    return layer(SimpleNamespace(fp8_linear=one), **attributes)


def experts(made: type, config: Any) -> torch.nn.Module:
    one = object.__new__(made)
    one.quant_config = config
    return layer(SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=one)))


def found(*modules: torch.nn.Module, **fields: Any) -> tuple[str, ...]:
    return precision(engine(**fields), modules)


@pytest.fixture(autouse=True)
def defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*subject._VARIABLES, *subject._OF_ALL_MODELS):
        monkeypatch.delenv(name, raising=False)
    subject._note.cache_clear()


def test_weights_that_meet_other_activations_are_told_apart() -> None:
    marlin = found(linear(kernel(MarlinFP8ScaledMMLinearKernel)))
    cutlass = found(linear(kernel(CutlassFP8ScaledMMLinearKernel)))
    assert marlin == ("8 bfloat16",)
    assert cutlass == (f"8 {str(FP8.activation_quant_key.dtype).removeprefix('torch.')}",)
    half = linear(kernel(MarlinFP8ScaledMMLinearKernel))
    assert found(half, dtype=torch.float16) == ("8 float16",)


def test_kernels_are_found_where_methods_keep_them() -> None:
    one = kernel(MarlinLinearKernel, four_bits())
    for module in (
        layer(SimpleNamespace(kernel=one)),
        layer(SimpleNamespace(quantization_config=None), scheme=SimpleNamespace(kernel=one)),
        layer(SimpleNamespace(scheme=SimpleNamespace(linear_method=SimpleNamespace(kernel=one)))),
        layer(SimpleNamespace(quant_method=SimpleNamespace(kernel=one))),
    ):
        assert found(module) == ("4 bfloat16",)


def test_int4_on_cpus_with_and_without_amx() -> None:
    one = kernel(CPUWNA16LinearKernel, four_bits())
    assert found(linear(one, use_w4a8=False)) == ("4 bfloat16",)
    assert found(linear(one, use_w4a8=True)) == ("4 int8",)


def test_defaults_are_those_of_vllm() -> None:
    variables = {**subject._VARIABLES, **subject._OF_ALL_MODELS}
    for name, default in variables.items():
        assert getattr(vllm_envs, name) == default, name
    ledger = json.loads(LEDGER.read_text())["names"].items()
    assert variables.keys() == {
        name.removeprefix("env ") for name, group in ledger if group == "precision-of-variables"
    }


def test_experts() -> None:
    scale = torch.ones(1)
    eight = found(experts(TritonExperts, moe.fp8_w8a8_moe_quant_config(scale, scale)))
    sixteen = found(experts(MarlinExperts, moe.fp8_w8a16_moe_quant_config(scale, scale)))
    assert (eight[0].split()[0], sixteen) == ("8", ("8 bfloat16",))
    assert eight != sixteen
    marlin = experts(MarlinExperts, moe.mxfp4_w4a16_moe_quant_config(scale, scale))
    trtllm = experts(TrtLlmMxfp4ExpertsModular, moe.mxfp4_mxfp8_moe_quant_config(scale, scale))
    assert found(marlin) == ("4 bfloat16",)
    assert found(trtllm) == ("4 mxfp8",)


def test_what_is_unknown_is_named_by_its_class_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class NewKernel(CutlassFP8ScaledMMLinearKernel):  # type: ignore[misc]
        """It may compute otherwise than the class that it derives from."""

    class NewMethod:
        pass

    class OwnExperts(torch.nn.Module):
        """A model's own layer, without a method of vLLM."""

        def __init__(self) -> None:
            super().__init__()
            packed = torch.zeros(4, dtype=torch.uint8)
            self.packed = torch.nn.Parameter(packed, requires_grad=False)

    class NewExperts:
        pass

    modules = [
        linear(kernel(NewKernel)),
        layer(NewMethod()),
        OwnExperts(),
        experts(NewExperts, moe.fp8_w8a8_moe_quant_config(torch.ones(1), torch.ones(1))),
        layer(SimpleNamespace(), scheme=SimpleNamespace()),
    ]
    names = ("NewExperts", "NewKernel", "NewMethod", "OwnExperts", "SimpleNamespace")
    with caplog.at_level(logging.WARNING):
        once, twice = found(*modules), found(*modules, *modules)
    assert once == twice
    assert tuple(one.split()[0] for one in once) == names
    lines = [record.getMessage() for record in caplog.records]
    assert sorted(line.split("precision ")[1].split()[0] for line in lines) == list(names)


def test_what_is_unknown_is_told_apart_by_the_activations_that_it_states() -> None:
    class Unknown:
        config = quant_config = layer_config = None

    def of(**attributes: Any) -> tuple[str, ...]:
        one = Unknown()
        vars(one).update(attributes)
        return found(linear(one))

    assert of() == ("Unknown",)
    assert of(config=FP8) == of(layer_config=SimpleNamespace(a_dtype=torch.float8_e4m3fn))
    assert of(config=FP8) == ("Unknown float8_e4m3fn",)
    assert of(config=four_bits(torch.float16)) == ("Unknown float16",)
    plain, eight = (moe.FusedMoEQuantConfig.make(dtype) for dtype in (None, torch.float8_e4m3fn))
    assert found(experts(Unknown, plain)) == ("Unknown",)
    assert found(experts(Unknown, eight)) == ("Unknown float8_e4m3fn",)


def test_layers_that_stay_as_they_are_have_none() -> None:
    cache = object.__new__(BaseKVCacheMethod)
    plain = layer(UnquantizedLinearMethod(), weight=torch.nn.Parameter(torch.zeros(2)))
    mask = layer(weight=torch.nn.Parameter(torch.zeros(2, dtype=torch.bool), requires_grad=False))
    assert found(layer(cache), plain, mask, torch.nn.LayerNorm(2)) == ()


def test_what_rounds_other_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.nn.Parameter(torch.zeros(1, dtype=torch.float8_e4m3fn), requires_grad=False)
    latent = layer(is_aiter_triton_fp8_bmm_enabled=True, W_K=made)
    assert found(latent) == found(latent, quantization=None) == ("8 float8_e4m3fn",)
    assert found(layer(is_aiter_triton_fp4_bmm_enabled=True), quantization=None) == ("4 mxfp4",)
    monkeypatch.setenv("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "INT4")
    assert found(quantization=None) == ('VLLM_ROCM_QUICK_REDUCE_QUANTIZATION="INT4"',)


def test_quantized_model_that_vllm_does_not_show_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="in which precision"):
        found()


@pytest.mark.parametrize(
    ("option", "implementation", "other"),
    [
        ("disable_flashinfer_q_quantization", "FlashInferImpl", "FlashAttentionImpl"),
        ("use_prefill_query_quantization", "FlashInferMLAImpl", "FlashInferImpl"),
    ],
)
def test_queries_beside_an_fp8_cache(option: str, implementation: str, other: str) -> None:
    def queries(name: str, **fields: Any) -> tuple[str, ...]:
        return found(layer(impl=type(name, (), {})()), quantization=None, **fields)

    on = {option: True, "cache_dtype": "fp8"}
    assert queries(implementation, **on) == (f"{option}=true",)
    assert queries(other, **on) == ()
    assert queries(implementation, cache_dtype="fp8") == ()
    assert queries(implementation, **{option: True}) == ()


def test_classes_and_places_are_those_of_vllm() -> None:
    folder = Path(vllm.__file__).parent / "model_executor"
    classes, attributes = set(), set()
    for part in ("kernels/linear", "layers/quantization", "layers/fused_moe", "layers/attention"):
        for file in (folder / part).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    classes.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    attributes.add(node.attr)
    listed = {*subject._LINEAR, *subject._EXPERTS, *subject._OTHER_EXPERTS}
    assert listed - classes <= LATER
    assert "BaseKVCacheMethod" in classes
    read = {*subject._KERNELS, *subject._INNER, subject._INT8_ACTIVATIONS, "moe_kernel"}
    read |= {"is_aiter_triton_fp4_bmm_enabled", "is_aiter_triton_fp8_bmm_enabled"}
    assert read <= attributes
