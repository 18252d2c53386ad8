"""Producers and consumers on real engines: hand-overs that succeed.

The consumer's answer is compared with that of an engine that computes everything, and bit by bit
with a hit of as many tokens in vLLM's own prefix cache where vLLM can have one: behind whole
blocks. :mod:`tests.vllm.test_handover_scheduler` has all that can end a hand-over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.engines import (
    CHUNK,
    NEAR_TIE,
    Answer,
    Engine,
    Engines,
    MakePrompt,
    Reference,
    ShelfFiles,
    assert_same,
    assert_same_up_to_ties,
)
from tests.vllm.handing_over import ASKED, Counted, Promises, prefill

#: Tokens of a block of the consumer.
BLOCK = 64
#: Longer than a test may take: what waits for it fails.
NEVER = 600.0


@dataclass
class Pair:
    """A producer and a consumer on one shelf."""

    shelf: ShelfFiles
    producer: Engine
    consumer: Engine
    promises: Promises

    def consume(self, tokens: list[int], params: Any, **options: Any) -> Answer:
        """Run a request on the consumer, whose own prefix cache is empty."""
        self.consumer.reset_prefix_cache()
        return self.consumer.generate(tokens, kv_transfer_params=params, **options)


@pytest.fixture(scope="module")
def pair(engines: Engines, inert: Engine) -> Iterator[Pair]:
    """The consumer's blocks are others, so chunks are canonical."""
    shelf = ShelfFiles(engines.root / "hand-overs")
    producer, consumer = (
        engines.start(
            role.removeprefix("kv_"),
            shelf.root,
            extra_config={"layout": "canonical", "handover_wait_s": NEVER},
            transfer={"kv_role": role},
            block_size=block,
            core=core,
        )
        for core, (role, block) in enumerate((("kv_producer", 128), ("kv_consumer", BLOCK)))
    )
    first = list(range(2, 302))
    prefill(producer, first)
    shelf.wait_stored(first)
    yield Pair(shelf, producer, consumer, Promises(shelf))
    for engine in (producer, consumer):
        engine.stop(at_once=True)


def check(answer: Answer, expected: Answer, shelf_tokens: int) -> None:
    """Assert what an answer is, and how many of its prompt's tokens came from the shelf."""
    assert answer.shelf_tokens == shelf_tokens
    assert_same(answer, expected)
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=NEAR_TIE)


# ------------------------------------------------------------------------- what is handed over


@pytest.mark.parametrize("length", [1, 40, 256, 1000])
def test_consumer_loads_the_whole_prompt(
    pair: Pair, reference: Reference, prompt: MakePrompt, length: int
) -> None:
    """It computes one token; prompts shorter than a chunk, ending with a chunk, and longer."""
    tokens = prompt(length)
    counted = Counted(pair.consumer)
    params = prefill(pair.producer, tokens)
    assert params == pair.promises.params(tokens, kvshelf_attempt=params["kvshelf_attempt"])
    check(pair.consume(tokens, params), reference(tokens), length)
    # The same tokens were hit that a hand-over can have, whatever became of the last one.
    counted.wait(handovers_complete=1, handovers_late=0, handovers_gave_up=0)


def test_as_a_hit_in_memory_to_the_last_bit(pair: Pair, prompt: MakePrompt) -> None:
    """Whole blocks and one token: vLLM's own prefix cache has all but the last token, too."""
    length = CHUNK + 2 * BLOCK + 1
    tokens = prompt(length)
    params = prefill(pair.producer, tokens)
    loaded = pair.consume(tokens, params, max_tokens=16)
    assert loaded.shelf_tokens == length
    pair.consumer.reset_prefix_cache()
    alone = {"cache_salt": "of its own"}
    pair.consumer.generate(tokens, max_tokens=1, **alone)
    own = pair.consumer.generate(tokens, max_tokens=16, **alone)
    assert (own.cached_tokens, own.shelf_tokens) == (length - 1, 0)
    assert (loaded.tokens, loaded.logprobs, loaded.gaps) == (own.tokens, own.logprobs, own.gaps)


def test_many_at_once(pair: Pair, inert: Engine, reference: Reference, prompt: MakePrompt) -> None:
    """Consumers are asked before, while and after producers work, all at the same time."""
    shared = prompt(520)
    prompts = [shared + prompt(200 + 75 * number) for number in range(9)]
    pair.consumer.reset_prefix_cache()
    counted = Counted(pair.consumer)
    early = [
        pair.consumer.submit(tokens, kv_transfer_params=pair.promises.params(tokens))
        for tokens in prompts[::2]
    ]
    asked = [
        pair.producer.submit(tokens, max_tokens=1, kv_transfer_params=ASKED) for tokens in prompts
    ]
    late = [
        pair.consumer.submit(tokens, kv_transfer_params=request.result().kv_transfer_params)
        for tokens, request in zip(prompts[1::2], asked[1::2], strict=True)
    ]
    answers = [request.result() for request in (*early, *late)]
    order = prompts[::2] + prompts[1::2]
    expected = [reference(tokens) for tokens in order]
    inert.reset_prefix_cache()
    assert_same_up_to_ties(answers, expected, inert.generate_all(order))
    counted.wait(handovers_complete=len(prompts), handovers_late=0)


def test_no_line_of_the_logs_is_an_error(pair: Pair) -> None:
    """The last test with these engines."""
    for engine in (pair.producer, pair.consumer):
        assert not engine.log_lines("ERROR")
        assert not engine.log_lines("Traceback")
