"""Outputs of encoders that stay in vLLM's cache when the weights change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from kvshelf.vllm import encoder_outputs
from kvshelf.vllm.encoder_outputs import EncoderOutputs


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> EncoderOutputs:
    monkeypatch.setattr(encoder_outputs._resets, "data", {})
    return EncoderOutputs()


@pytest.fixture
def manager(outputs: EncoderOutputs) -> EncoderCacheManager:
    return EncoderCacheManager(cache_size=8)


ITEMS = [SimpleNamespace(identifier="cat")]


def encode(manager: EncoderCacheManager) -> None:
    embeds = SimpleNamespace(request_id="r", mm_features=ITEMS, get_num_encoder_embeds=lambda _: 4)
    manager.allocate(embeds, 0)  # type: ignore[arg-type]


def test_what_was_encoded_before_a_change_is_old_until_a_reset(
    outputs: EncoderOutputs, manager: EncoderCacheManager, caplog: pytest.LogCaptureFixture
) -> None:
    encode(manager)
    outputs.begin()
    assert outputs.are_old(ITEMS)
    outputs.settle(changed=False)
    assert not outputs.are_old(ITEMS)
    outputs.begin()
    outputs.settle(changed=True)
    assert outputs.are_old(ITEMS)
    assert not outputs.are_old([])
    assert not outputs.are_old(None)
    assert len(caplog.records) == 1
    manager.reset()
    assert not outputs.are_old(ITEMS)


def test_reset_while_the_weights_are_compared_leaves_nothing_old(
    outputs: EncoderOutputs, manager: EncoderCacheManager
) -> None:
    encode(manager)
    outputs.begin()
    manager.reset()
    encode(manager)
    outputs.settle(changed=True)
    assert not outputs.are_old(ITEMS)
    # Of two rounds, the first of which did not end.
    outputs.begin()
    manager.cached.clear()
    outputs.begin()
    outputs.settle(changed=True)
    assert outputs.are_old(ITEMS)


def test_without_a_cache_that_is_known_all_is_old(outputs: EncoderOutputs) -> None:
    outputs.begin()
    outputs.settle(changed=True)
    assert outputs.are_old(ITEMS)
    assert not outputs.are_old([])
