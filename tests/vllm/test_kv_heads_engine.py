"""A model of Gemma 4's kind on real engines: layers with two KV heads, and one layer with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.engines import NEAR_TIE, Engine, assert_same
from tests.support.fleet import Engines, MakePrompt, of_ranks
from tests.vllm.shelf_files import ShelfFiles

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(engines: Engines) -> Path:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma4TextConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        sliding_window=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_global_key_value_heads=1,
        global_head_dim=128,
        attention_k_eq_v=True,
        max_position_embeddings=4096,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        initializer_range=0.1,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    folder = engines.places.root / "models" / "of two kinds"
    transformers.Gemma4ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def degrees(engines: Engines, model: Path) -> Iterator[tuple[ShelfFiles, Engine, Engine]]:
    """A shelf, and engines with one rank and with two on it."""
    shelf = ShelfFiles(engines.places.root / "shelf of two kinds")
    one, two = (
        engines.on_shelf(
            f"of two kinds, {ranks} ranks",
            shelf.root,
            # A native layout holds the size of blocks, which vLLM chooses by the heads of a rank.
            {"layout": "canonical"},
            model=model,
            **of_ranks(ranks),
        )
        for ranks in (1, 2)
    )
    yield shelf, one.wait_ready(), two.wait_ready()
    one.stop(at_once=True)
    two.stop(at_once=True)


def test_one_rank_stores_and_two_load_their_parts(
    degrees: tuple[ShelfFiles, Engine, Engine], prompt: MakePrompt
) -> None:
    shelf, one, two = degrees
    tokens = [token % 1000 for token in prompt(900)]
    cold = one.generate(tokens)
    assert [len(chunk) for chunk in shelf.wait_stored(tokens)] == [1, 1, 1]
    one.reset_prefix_cache()
    warm = one.generate(tokens)
    assert (cold.shelf_tokens, warm.shelf_tokens) == (0, 768)
    assert_same(warm, cold)
    loaded = two.generate(tokens)
    assert loaded.shelf_tokens == 768
    two.reset_prefix_cache()
    computed = two.generate(tokens, cache_salt="of its own")
    assert computed.shelf_tokens == 0
    assert_same(loaded, computed, NEAR_TIE)
    assert len(shelf.namespaces()) == 1
    assert shelf.check_all()
