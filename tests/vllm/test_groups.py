"""Which kinds of KV an engine's groups have, which engines are refused, and the chunk size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from kvshelf.config import Config
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.vllm.groups import CacheGroups, with_chunk_size
from tests.sim.engine_caches import make_config, speculation
from tests.vllm.hybrid_specs import (
    cache_config,
    full,
    latent,
    latent_window,
    models,
    ring,
    state,
    window,
)


def _groups(tmp_path: Path, specs: Any, **options: Any) -> CacheGroups:
    config = make_config(str(tmp_path))
    config.__dict__.update(options)
    return CacheGroups(config, cache_config(specs))


def test_tokens_that_vllm_keeps_before_a_window_belong_to_it(tmp_path: Path) -> None:
    groups = _groups(tmp_path, [window(8, 16, extra=3), full(8)])
    assert groups.window == 19


_REPLAYED = replace(latent_window(8, 16), bounded_replay=True)
_ENCODER = EncoderOnlyAttentionSpec(block_size=8, num_kv_heads=1, head_size=8, dtype=full(8).dtype)


@pytest.mark.parametrize(
    ("specs", "found"),
    [
        (
            [full(8), _REPLAYED],
            r"group 1 .*SlidingWindowMLASpec.* anew behind a hit.* remove --kv-transfer-config",
        ),
        # As DeepSeek V4.1.
        ([latent(32, 4), ring(8), _REPLAYED], r"group 2 .*SlidingWindowMLASpec"),
        ([ring(8)], r"no KV cache group .* remove --kv-transfer-config"),
        ([full(8), _ENCODER], r"EncoderOnlyAttentionSpec; remove --kv-transfer-config"),
        (
            [full(8), state(8, "MAMBA2", ((3, 8),), mode="none")],
            r"prefix caching is off: start it with --enable-prefix-caching",
        ),
        ([state(8, "MAMBA2", ((3, 8),), mode="none")], r"--enable-prefix-caching"),
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
        CacheGroups(config, cache_config(models()[model]))


@pytest.mark.parametrize("method", ["ngram", "eagle3", "mtp"])
@pytest.mark.parametrize("model", ["Gemma 3", "Qwen3-Next", "Mamba2"])
def test_drafts_beside_windows_and_states_are_served(
    tmp_path: Path, model: str, method: str
) -> None:
    specs, drafts = models()[model], speculation(method)
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
        ([state(640, "GDN_ATTN", ((3, 8),)), full(640)], 640),
        ([state(544, "MAMBA2", ((3, 8),)), full(544)], 544),
        ([state(128, "GDN_ATTN", ((3, 8),)), full(128)], 128),
        ([state(48, "GDN_ATTN", ((3, 8),)), full(16)], 144),
        ([state(16, "SHORT_CONV", ((3, 8),)), full(16)], 128),
        ([window(16, 64), full(16)], 256),
        ([window(16, 64), full(96)], 288),
        ([window(64, 64), full(768)], 768),
    ],
)
def test_the_chunk_size_follows_from_the_blocks(tmp_path: Path, specs: Any, chosen: int) -> None:
    groups = _groups(tmp_path, specs)
    assert with_chunk_size(Config(), groups).chunk_size == chosen
    given = Config(chunk_size=2 * groups.alignment)
    assert with_chunk_size(given, groups) is given
    with pytest.raises(ConfigError, match=rf"set chunk_size to {chosen} or another multiple"):
        with_chunk_size(Config(chunk_size=groups.alignment + 1), groups)
