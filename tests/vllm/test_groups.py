"""Which kinds of KV an engine's groups have, which engines are refused, and the chunk size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from kvshelf.config import Config
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.vllm.groups import CacheGroups, with_chunk_size
from tests.vllm.hybrid_specs import (
    cache_config,
    full,
    latent,
    latent_window,
    local,
    models,
    ring,
    state,
    window,
)
from tests.vllm.replay import make_config, speculation


def _groups(tmp_path: Path, specs: Any, **options: Any) -> CacheGroups:
    config = make_config(str(tmp_path))
    config.__dict__.update(options)
    return CacheGroups(config, cache_config(specs))


@pytest.mark.parametrize(
    ("model", "kinds", "alignment", "reach"),
    [
        ("Mamba2", ("state",), 16, 0),
        ("Jamba", ("full", "state"), 16, 0),
        ("Nemotron-H", ("full", "state"), 16, 0),
        ("DeepSeek V4", ("full", "window"), 32, 24),
        ("Gemma 3", ("full", "window"), 8, 24),
        ("Qwen3-Next", ("full", "state"), 16, 0),
        ("LFM2", ("full", "state"), 8, 0),
        ("two windows", ("window",), 8, 20),
        ("Llama 4", ("full", "window"), 8, 32),
        ("GLM-5-next", ("full",), 16, 0),
        ("Qwen4-exp", ("full", "state"), 16, 0),
        ("ring and windows", ("full", "window"), 8, 24),
    ],
)
def test_groups_of_models(
    tmp_path: Path, model: str, kinds: tuple[str, ...], alignment: int, reach: int
) -> None:
    specs = models()[model]
    groups = _groups(tmp_path, specs)
    assert groups.hybrid
    assert groups.kinds == kinds
    assert groups.alignment == alignment
    assert groups.window == reach
    assert [group.index for group in groups] == list(range(len(specs)))
    assert [group.block_size for group in groups] == [spec.block_size for spec in specs]
    stored = sum(len(groups.of(kind)) for kind in groups.kinds)
    assert stored == len(specs) - len(groups.scratch)
    assert all(group.layer_names for group in groups)


def test_tokens_that_vllm_keeps_before_a_window_belong_to_it(tmp_path: Path) -> None:
    groups = _groups(tmp_path, [window(8, 16, extra=3), full(8)])
    assert groups.window == 19


@pytest.mark.parametrize("spec", [full(16), window(16, 32), local(16, 32), latent(16, 1)])
def test_one_group_without_states_is_not_hybrid(tmp_path: Path, spec: Any) -> None:
    groups = _groups(tmp_path, [spec])
    assert not groups.hybrid
    assert groups.kinds == ("full",)
    assert groups.alignment == 16
    config = Config(chunk_size=40)
    assert with_chunk_size(config, groups) is config


def test_without_a_configuration_of_caches_there_is_one_group(tmp_path: Path) -> None:
    groups = CacheGroups(make_config(str(tmp_path), block_size=32), None)
    assert [group.block_size for group in groups] == [32]
    assert not groups.hybrid


def test_context_parallelism_widens_the_blocks_of_one_group(tmp_path: Path) -> None:
    config = make_config(str(tmp_path))
    config.parallel_config.decode_context_parallel_size = 2
    assert CacheGroups(config, cache_config([full(16)]))[0].block_size == 32


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


def test_groups_of_a_drafter_say_nothing_of_the_model(tmp_path: Path) -> None:
    specs = [window(8, 16), full(8), window(4, 64)]
    groups = _groups(tmp_path, specs, speculative_config=speculation("eagle3"))
    assert (groups.window, groups.drafts) == (64, ())
    groups.narrow(["layers.0.attn", "layers.1.attn"])
    assert (groups.window, groups.mixed, groups.kinds) == (16, True, ("full", "window"))
    assert [group.index for group in groups.drafts] == [2]
    assert [group.index for group in groups.of("window")] == [0]
    # Of a model with one group all KV is full.
    groups.narrow(["layers.0.attn"])
    assert (groups.window, groups.mixed, groups.kinds) == (0, False, ("full",))
    assert [group.index for group in groups.drafts] == [1, 2]
    assert [group.kind for group in groups] == ["full", "full", "window"]
    # vLLM has all of them.
    assert groups.hybrid
    assert groups.alignment == 8


def test_rings_are_left_out(tmp_path: Path) -> None:
    groups = _groups(tmp_path, [ring(4), full(12), window(18, 24)])
    assert (groups.scratch, groups.kinds, groups.window) == ({0}, ("full", "window"), 24)
    assert [[one.index for one in groups.of(kind)] for kind in groups.kinds] == [[1], [2]]
    # As vLLM: hashes fit the groups of which it caches prefixes, hits end where all blocks do.
    assert (groups.hash_block_size, groups.alignment) == (6, 36)
    groups.narrow(["layers.0.attn", "layers.1.attn"])
    assert ([one.index for one in groups.drafts], groups.scratch) == ([2], {0})
    groups = _groups(tmp_path, [full(16), ring(8)])
    assert (groups.kinds, groups.hybrid, groups.mixed) == (("full",), True, False)


def test_hashes_are_those_of_the_smallest_common_piece_of_blocks(tmp_path: Path) -> None:
    assert _groups(tmp_path, [full(16)]).hash_block_size == 16
    assert _groups(tmp_path, [window(8, 16), full(12)]).hash_block_size == 4
    config = make_config(str(tmp_path))
    config.cache_config.prefix_match_unit = 2
    assert CacheGroups(config, cache_config([window(8, 16), full(12)])).hash_block_size == 2


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


def test_a_chunk_size_from_the_environment_is_a_given_one(tmp_path: Path) -> None:
    groups = _groups(tmp_path, [window(16, 64), full(96)])
    config = Config.load({}, {"KVSHELF_CHUNK_SIZE": "256"})
    with pytest.raises(ConfigError, match="chunk_size is 256"):
        with_chunk_size(config, groups)
    config = Config.load({}, {})
    assert with_chunk_size(config, groups).chunk_size == 288


def test_specifications_of_others_are_refused_beside_known_ones(tmp_path: Path) -> None:
    other: Any = SimpleNamespace(block_size=8, prefix_cacheable=True)
    with pytest.raises(UnsupportedError, match="SimpleNamespace"):
        _groups(tmp_path, [full(8), other])
