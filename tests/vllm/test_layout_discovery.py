"""Layouts learned through vLLM's own cache updates, and what is stored of them. No engine."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

with warnings.catch_warnings():
    # vLLM's own imports are not ours to judge.
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    from vllm.v1.attention.backend import AttentionImpl
    from vllm.v1.attention.backends.cpu_attn import (
        CPUAttentionBackend,
    )
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    from kvshelf.vllm.layout_discovery import (
        LayerCache,
        StoredLayout,
        choose_layout,
        discover_layouts,
    )
    from tests.vllm.cpu_layers import (
        BLOCKS,
        DTYPES,
        FP8,
        FP8_SHAPE,
        HEADS,
        PACKINGS,
        cpu_layer,
        refusal,
    )

from kvshelf.errors import UnsupportedError
from kvshelf.kv.layout import PagedLayout

pytestmark = pytest.mark.usefixtures("one_thread")

ENGINE = {"num_blocks": BLOCKS, "vllm": "0.32.0", "tensor_parallel_size": 1, "block_size": 128}


def probe(
    *layers: Any, dtype: torch.dtype = torch.bfloat16, block_size: int = 0
) -> list[LayerCache]:
    named = {f"layers.{i}": layer for i, layer in enumerate(layers)}
    caches = {name: getattr(layer, "registered", layer.kv_cache) for name, layer in named.items()}
    return discover_layouts(
        named,
        caches,
        list(named),
        num_blocks=BLOCKS,
        block_size=block_size or layers[0].kv_cache.shape[2],
        cache_dtype="auto",
        compute_dtype=dtype,
    )


def choose(
    layers: list[LayerCache],
    option: str = "auto",
    chunk_size: int = 256,
    replicated: bool = False,
    **engine: object,
) -> StoredLayout:
    return choose_layout(
        layers,
        option,
        chunk_size=chunk_size,
        block_size=128,
        engine={**ENGINE, **engine},
        kv_heads=[layer.heads for layer in layers],
        replicated=replicated,
    )


def written(layer: Any, dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
    """Write random K and V through the layer, return (slots, values [2, tokens, heads, size])."""
    slots = torch.randperm(2 * layer.kv_cache.shape[2])[:count] + layer.kv_cache.shape[2]
    values = torch.randint(-8, 8, (2, count, HEADS, layer.head_size)).to(dtype)
    layer.impl.do_kv_cache_update(layer, values[0], values[1], layer.kv_cache, slots)
    return slots, values


# --------------------------------------------------------------------------- packings
# Each packing is written by vLLM's own kernel where this processor has it, and on every machine by
# the recording of that kernel.

NAMES = {"vec": "vec", "vec16": "vec", "amx": "amx"}
sources = pytest.mark.parametrize("recorded", [False, True], ids=["kernel", "recorded"])


def skip_refused(isa: str, *arguments: Any) -> None:
    if why := refusal(isa, *arguments):
        pytest.skip(why)


@pytest.mark.parametrize(
    ("isa", "dtype", "kv_cache_dtype", "block_size", "head_size"),
    [(isa, dtype, "auto", *shape) for isa, *shape in PACKINGS for dtype in DTYPES]
    + [(isa, torch.bfloat16, name, *FP8_SHAPE) for isa in ("vec", "amx") for name in FP8],
)
def test_recording_is_what_the_kernel_does(
    isa: str, dtype: torch.dtype, kv_cache_dtype: str, block_size: int, head_size: int
) -> None:
    skip_refused(isa, dtype, kv_cache_dtype, block_size, head_size)
    real, recording = (
        cpu_layer(
            isa,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            head_size=head_size,
            recorded=recorded,
        )
        for recorded in (False, True)
    )
    recording.kv_cache.copy_(real.kv_cache)
    slots, values = written(real, dtype, 2 * block_size // 3)
    recording.impl.do_kv_cache_update(recording, *values, recording.kv_cache, slots)
    assert torch.equal(real.kv_cache.view(torch.uint8), recording.kv_cache.view(torch.uint8))


def mla_layer(rank: int = 32, rope: int = 16, block_size: int = 16) -> Any:
    impl = CPUMLAImpl.__new__(CPUMLAImpl)
    impl.kv_cache_dtype = "auto"
    registered = torch.zeros(BLOCKS, 1, block_size, rank + rope, dtype=torch.bfloat16)
    return SimpleNamespace(
        impl=impl,
        registered=registered,
        kv_cache=registered.squeeze(1),
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        head_size=rank + rope,
        kv_cache_dtype="auto",
        _k_scale=torch.tensor(1.0),
        hisparse_cache=None,
    )


def test_mla_is_learned_through_its_own_call() -> None:
    layer = mla_layer()
    [found] = probe(layer, block_size=16)
    assert found.learned.layout == PagedLayout.from_mla(layer.kv_cache), found.learned.reason
    stored = choose([found])
    assert (stored.kind, stored.shapes, stored.dtypes) == ("canonical", ("*,48",), ("BF16",))


# --------------------------------------------------------------------------- not written to


class Counting(AttentionImpl):  # type: ignore[type-arg]
    """An implementation that counts how often it is asked to write."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        self.calls += 1


#: What attention's cache updates take.
KNOWN = "layer, key, value, kv_cache, slot_mapping"


def taking(parameters: str) -> Counting:
    """An implementation whose cache update takes these parameters."""
    update = eval(f"lambda self, {parameters}: Counting.do_kv_cache_update(self, *[None] * 5)")
    made: Counting = type("Taking", (Counting,), {"do_kv_cache_update": update})()
    return made


def test_mla_update_that_needs_further_arguments_is_unknown() -> None:
    def update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, scales):  # type: ignore[no-untyped-def]
        raise AssertionError("called without knowing what it means")

    layer = mla_layer()
    layer.impl.__class__ = type("NeedsMore", (CPUMLAImpl,), {"do_kv_cache_update": update})
    [found] = probe(layer, block_size=16)
    assert "k_scale, scales), expected" in found.learned.reason
    assert found.learned.writes == 0


class Updating(CPUAttentionBackend):
    forward_includes_kv_cache_update = True


class PerHead(Counting):
    """Divides by the scale of each head, as vLLM's kernels for CUDA do."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        size = kv_cache.shape[2]
        caches = kv_cache.view(torch.uint8).transpose(1, 2).split(layer.head_size, -1)
        scales = self.used(layer._k_scale), self.used(layer._v_scale)
        for cache, rows, scale in zip(caches, (key, value), scales, strict=True):
            stored = (rows.float() / scale.view(1, -1, 1)).to(torch.float8_e4m3fn)
            cache[slot_mapping // size, slot_mapping % size] = stored.view(torch.uint8)

    def used(self, scale: Tensor) -> Tensor:
        return scale


class OneForAll(PerHead):
    """Divides by the scale of the first head, as a kernel that expects a single one does."""

    def used(self, scale: Tensor) -> Tensor:
        return scale[:1]


def scaled_layer(impl: Counting, k_scale: list[float], v_scale: list[float]) -> Any:
    return cpu_layer(
        "vec",
        kv_cache_dtype="fp8_e4m3",
        impl=impl,
        _k_scale=torch.tensor(k_scale),
        _v_scale=torch.tensor(v_scale),
        _k_scale_float=max(k_scale),
        _v_scale_float=max(v_scale),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("k_scale", "v_scale"),
    [([0.0123, 7.0], [0.3, 0.4]), ([0.3, 0.5], [1.0, 0.7]), ([2.0, 0.5], [1.0, 4.0])],
)
def test_caches_with_scales_for_each_head_are_learned(
    k_scale: list[float], v_scale: list[float], dtype: torch.dtype
) -> None:
    layer = scaled_layer(PerHead(), k_scale, v_scale)
    [found] = probe(layer, dtype=dtype)
    assert found.learned.layout == PagedLayout.from_bhnc(layer.kv_cache, layer.head_size)


@pytest.mark.parametrize(
    ("impl", "scale"),
    [(OneForAll(), [0.1, 0.3]), (PerHead(), [0.1, 0.2, 0.3]), (PerHead(), [0.1, 0.0])],
)
def test_scales_that_do_not_fit_are_unknown(impl: Counting, scale: list[float]) -> None:
    [found] = probe(scaled_layer(impl, scale, scale))
    assert found.learned.kind == "unknown"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"impl": taking("*args, **kwargs")}, "its cache update takes (args, kwargs)"),
        (
            {"impl": taking(f"{KNOWN}, scale")},
            "slot_mapping, scale)",
        ),
        ({"impl": taking("layer, key, value, kv_cache")}, "kv_cache), expected"),
        ({"impl": taking("layer, value, key, kv_cache, slot_mapping")}, "(layer, value, key,"),
        (
            {"impl": taking(f"*, {KNOWN}")},
            "defaults for further ones",
        ),
        ({"impl": SimpleNamespace()}, "not a known kind of attention"),
        ({"impl": Counting(), "kv_sharing_target_layer_name": "layers.0"}, "shares another"),
        ({"impl": Counting(), "attn_backend": Updating}, "inside attention"),
        ({"impl": Counting(), "head_size_v": 32}, "different sizes"),
        ({"impl": Counting(), "kv_cache_dtype": "nvfp4"}, "nvfp4"),
        ({"impl": Counting(), "kv_cache_dtype": "int8_per_token_head"}, "int8_per_token_head"),
        ({"impl": Counting(), "kv_cache_dtype": "fp8_ds_mla"}, "fp8_ds_mla"),
        ({"impl": Counting(), "_k_scale_float": 0.0, "kv_cache_dtype": "fp8"}, "scales"),
    ],
)
def test_what_is_not_known_is_not_written_to(changes: dict[str, Any], reason: str) -> None:
    packed = str(changes.get("kv_cache_dtype", "auto"))
    cache = torch.zeros(
        BLOCKS, HEADS, 128, 128, dtype=torch.bfloat16 if packed == "auto" else torch.uint8
    )
    layer = cpu_layer("vec", registered=cache, **{"kv_cache": cache, **changes})
    [found] = probe(layer, block_size=128)
    assert found.learned.kind == "unknown"
    assert reason in found.learned.reason
    assert found.learned.writes == 0
    assert getattr(layer.impl, "calls", 0) == 0


@pytest.mark.parametrize(
    "bound",
    [torch.tensor([]), torch.zeros(4, 2, 128, 128, dtype=torch.bfloat16), [torch.zeros(4)], None],
)
def test_layer_that_uses_other_memory_is_refused(bound: Any) -> None:
    layer = cpu_layer("vec", impl=Counting())
    layer.registered, layer.kv_cache = layer.kv_cache, bound
    with pytest.raises(UnsupportedError, match="not the one that is bound"):
        probe(layer, block_size=128)
    assert layer.impl.calls == 0


# --------------------------------------------------------------------------- what is stored


def test_what_cannot_be_native_is_canonical() -> None:
    assert choose(probe(cpu_layer("vec")), chunk_size=256).kind == "native"
    assert choose(probe(cpu_layer("vec")), chunk_size=200).kind == "canonical"
    assert choose(probe(mla_layer(), block_size=16)).kind == "canonical"
    mixed = probe(cpu_layer("vec", block_size=64), block_size=64)
    mixed += probe(cpu_layer("vec", block_size=128))
    assert choose(mixed).kind == "canonical"
    assert len(choose(mixed).runs) == 2


def test_cache_that_another_kernel_may_write_is_opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes of vLLM 0.33, on layers of the installed version."""
    plain = cpu_layer("vec")
    assert probe(plain)[0].learned.layout is not None
    bypassed = cpu_layer("vec")
    bypassed.kv_cache_update_bypass = True
    assert "its model writes its cache" in probe(bypassed)[0].learned.reason
    bypassed.kv_cache_update_bypass = False
    assert probe(bypassed)[0].learned.layout is not None
    # The base class has the method, and most implementations do not override it.
    monkeypatch.setattr(AttentionImpl, "set_interleaved_v_cache", lambda self: False, raising=False)
    assert probe(plain)[0].learned.layout is not None
    monkeypatch.setattr(
        type(plain.impl), "set_interleaved_v_cache", lambda self: None, raising=False
    )
    assert "may interleave its V" in probe(plain)[0].learned.reason


def test_blocks_that_are_scattered_over_memory_cannot_be_stored_whole() -> None:
    whole = torch.zeros(HEADS, 2, BLOCKS, 128, 64, dtype=torch.bfloat16)
    cache = whole.permute(2, 0, 1, 3, 4)
    [found] = probe(cpu_layer("vec", impl=Counting(), kv_cache=cache), block_size=128)
    with pytest.raises(UnsupportedError, match="scattered over memory"):
        choose([found])
