"""What vLLM's RoPE depends on is what a namespace's record says of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope as vllm_rope

from kvshelf.format.model import rope_text


@pytest.mark.real
def test_longrope_depends_on_the_length_as_the_record_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(
        rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 64},
        model_type="phi3",
        max_position_embeddings=256,
    )

    def rotated(length: int) -> list[float]:
        engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=length))
        monkeypatch.setattr(vllm_rope, "get_current_vllm_config", lambda: engine)
        rope = vllm_rope.Phi3LongRoPEScaledRotaryEmbedding(
            4, 4, 256, 64, 10000, True, torch.float32, [1.0, 1.0], [2.0, 3.0]
        )
        keys = torch.ones(2, 4)
        return rope(torch.tensor([1, 40]), keys, keys)[1].flatten().tolist()

    lengths = (32, 64, 65, 200, 256)
    for one in lengths:
        for two in lengths:
            same = rope_text(config, one) == rope_text(config, two)
            assert (rotated(one) == rotated(two)) is same
