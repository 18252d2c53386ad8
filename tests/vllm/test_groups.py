"""Which kinds of KV an engine's groups have, which engines are refused, and the chunk size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowMLASpec,
)

from kvshelf.config import Config
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.vllm.groups import CacheGroups, with_chunk_size
from tests.sim.engine_caches import PUBLISHED_MODELS, Layers, make_config, speculation


def layer(kind: str, block_size: int, reach: int = 0) -> Any:
    """vLLM's specification of a layer."""
    return Layers(kind, (), block_size, reach=reach).layer_spec(0)


def cache_config(specs: Sequence[Any]) -> KVCacheConfig:
    """The configuration of an engine with groups of one layer."""
    groups = [KVCacheGroupSpec([f"layers.{n}.attn"], spec) for n, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=groups)


def specs_of(model: str) -> list[Any]:
    return [group.spec() for group in PUBLISHED_MODELS[model]]


def _groups(tmp_path: Path, specs: Sequence[Any], **options: Any) -> CacheGroups:
    config = make_config(str(tmp_path))
    config.__dict__.update(options)
    return CacheGroups(config, cache_config(specs))


def test_tokens_that_vllm_keeps_before_a_window_belong_to_it(tmp_path: Path) -> None:
    groups = _groups(
        tmp_path, [replace(layer("window", 8, 16), extra_retained_tokens=3), layer("full", 8)]
    )
    assert groups.window == 19


_SIZES: Any = {"block_size": 8, "num_kv_heads": 1, "head_size": 16, "dtype": torch.uint8}
_REPLAYED = SlidingWindowMLASpec(**_SIZES, sliding_window=16, bounded_replay=True)
_ENCODER = EncoderOnlyAttentionSpec(**_SIZES)
_FORGETFUL = replace(layer("GDN_ATTN", 8), mamba_cache_mode="none")


@pytest.mark.parametrize(
    ("specs", "found"),
    [
        (
            [layer("full", 8), _REPLAYED],
            r"group 1 .*SlidingWindowMLASpec.* anew behind a hit.* remove --kv-transfer-config",
        ),
        # As DeepSeek V4.1.
        ([layer("latent", 32), layer("ring", 8), _REPLAYED], r"group 2 .*SlidingWindowMLASpec"),
        ([layer("ring", 8)], r"no KV cache group .* remove --kv-transfer-config"),
        ([layer("full", 8), _ENCODER], r"EncoderOnlyAttentionSpec; remove --kv-transfer-config"),
        (
            [layer("full", 8), _FORGETFUL],
            r"prefix caching is off: start it with --enable-prefix-caching",
        ),
        ([_FORGETFUL], r"--enable-prefix-caching"),
    ],
)
def test_groups_without_prefixes_are_refused(tmp_path: Path, specs: Any, found: str) -> None:
    with pytest.raises(UnsupportedError, match=found):
        _groups(tmp_path, specs)


@pytest.mark.parametrize("option", ["decode", "prefill"])
@pytest.mark.parametrize("model", ["Gemma 3", "Mamba2", "Jamba"])
def test_context_parallelism_is_refused_with_several_groups(
    tmp_path: Path, model: str, option: str
) -> None:
    config = make_config(str(tmp_path))
    setattr(config.parallel_config, f"{option}_context_parallel_size", 2)
    advice = "disable-hybrid-kv-cache-manager" if model == "Gemma 3" else "kv-transfer-config"
    with pytest.raises(UnsupportedError, match=rf"{option}_context_parallel_size .*{advice}"):
        CacheGroups(config, cache_config(specs_of(model)))


@pytest.mark.parametrize("method", ["ngram", "eagle3", "mtp"])
@pytest.mark.parametrize("model", ["Gemma 3", "Qwen3-Next", "Mamba2"])
def test_drafts_beside_windows_and_states_are_served(
    tmp_path: Path, model: str, method: str
) -> None:
    specs, drafts = specs_of(model), speculation(method)
    assert _groups(tmp_path, specs, speculative_config=drafts).hybrid
    config = make_config(str(tmp_path))
    config.speculative_config = drafts
    config.parallel_config.pipeline_parallel_size = 2
    if model == "Gemma 3" and method == "ngram":
        assert CacheGroups(config, cache_config(specs)).hybrid
        return
    advice = "a method without KV" if model == "Gemma 3" else "use tensor parallelism, or remove"
    with pytest.raises(UnsupportedError, match=rf"pipeline stages.* {advice}"):
        CacheGroups(config, cache_config(specs))


@pytest.mark.parametrize(
    ("specs", "chosen"),
    [
        ([layer("GDN_ATTN", 640), layer("full", 640)], 640),
        ([layer("GDN_ATTN", 544), layer("full", 544)], 544),
        ([layer("GDN_ATTN", 128), layer("full", 128)], 128),
        ([layer("GDN_ATTN", 48), layer("full", 16)], 144),
        ([layer("GDN_ATTN", 16), layer("full", 16)], 128),
        ([layer("window", 16, 64), layer("full", 16)], 256),
        ([layer("window", 16, 64), layer("full", 96)], 288),
        ([layer("window", 64, 64), layer("full", 768)], 768),
    ],
)
def test_chunk_size_follows_from_the_blocks(tmp_path: Path, specs: Any, chosen: int) -> None:
    groups = _groups(tmp_path, specs)
    assert with_chunk_size(Config(), groups).chunk_size == chosen
    given = Config(chunk_size=2 * groups.alignment)
    assert with_chunk_size(given, groups) is given
    with pytest.raises(ConfigError, match=rf"set chunk_size to {chosen} or another multiple"):
        with_chunk_size(Config(chunk_size=groups.alignment + 1), groups)
