"""Outputs of encoders that stay in vLLM's cache when the weights change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from kvshelf.vllm import encoder_outputs
from kvshelf.vllm.encoder_outputs import EncoderOutputs
from kvshelf.vllm.scheduler.block_weights import BlockWeights


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> EncoderOutputs:
    monkeypatch.setattr(encoder_outputs._managers, "data", {})
    return EncoderOutputs()


@pytest.fixture
def manager(outputs: EncoderOutputs) -> EncoderCacheManager:
    return EncoderCacheManager(cache_size=8)


def items(*names: str) -> list[Any]:
    return [SimpleNamespace(identifier=name) for name in names]


def encode(manager: EncoderCacheManager, name: str) -> None:
    embeds = SimpleNamespace(
        request_id="r", mm_features=items(name), get_num_encoder_embeds=lambda _: 4
    )
    manager.allocate(embeds, 0)  # type: ignore[arg-type]


def evict(manager: EncoderCacheManager) -> None:
    manager.cached.clear()


def test_what_was_encoded_before_a_change_is_old_until_a_reset(
    outputs: EncoderOutputs, manager: EncoderCacheManager, caplog: pytest.LogCaptureFixture
) -> None:
    encode(manager, "cat")
    outputs.begin()
    assert not outputs.settle(changed=False)
    assert not outputs.are_old(items("cat"))
    outputs.begin()
    assert not outputs.settle(changed=True)
    encode(manager, "dog")
    assert outputs.are_old(items("cat"))
    assert outputs.are_old(items("dog", "cat"))
    assert not outputs.are_old(items("dog"))
    assert not outputs.are_old([])
    assert not outputs.are_old(None)
    assert len(caplog.records) == 1
    manager.reset()
    assert not outputs.are_old(items("cat"))


def test_requests_that_began_while_it_was_not_known_may_have_used_them(
    outputs: EncoderOutputs, manager: EncoderCacheManager
) -> None:
    encode(manager, "cat")
    for changed in (True, False):
        outputs.begin()
        assert not outputs.are_old([])
        assert not outputs.settle(changed=changed)
        manager.reset()
        outputs.begin()
        assert not outputs.are_old(items("cat"))
        assert outputs.settle(changed=changed) is changed


def test_without_a_cache_that_is_known_all_is_old(outputs: EncoderOutputs) -> None:
    outputs.begin()
    outputs.settle(changed=True)
    assert outputs.are_old(items("cat"))
    assert not outputs.are_old([])


def test_blocks_of_requests_with_old_outputs_belong_to_no_weights() -> None:
    blocks = BlockWeights()
    blocks.begin()
    blocks.settle(changed=False)
    assert not blocks.is_valid(blocks.admit([[1, 2]], [0], old=True))
    # Another request gets one of them from vLLM's own prefix cache.
    assert not blocks.is_valid(blocks.admit([[1, 3]], [1]))
    assert blocks.is_valid(blocks.admit([[4]], [0]))
