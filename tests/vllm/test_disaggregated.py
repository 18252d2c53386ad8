"""Producers and consumers on real engines: hand-overs that succeed, and all that can end one.

The consumer's answer is compared with that of an engine that computes everything, and bit by bit
with a hit of as many tokens in vLLM's own prefix cache where vLLM can have one: behind whole
blocks. No test asserts times: what must not be waited for is told by counters and by deadlines of
requests that are longer than tests may take.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.engines import (
    CHUNK,
    NEAR_TIE,
    Answer,
    Ask,
    Engine,
    Engines,
    MakePrompt,
    Reference,
    ShelfFiles,
    assert_same,
    assert_same_up_to_ties,
    flip_byte,
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
def test_the_consumer_loads_the_whole_prompt(
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


def test_behind_what_the_consumer_has_itself(
    pair: Pair, reference: Reference, ask: Ask, prompt: MakePrompt
) -> None:
    """A second turn of a conversation: only what is new is loaded."""
    tokens = prompt(1100)
    params = prefill(pair.producer, tokens)
    pair.consumer.reset_prefix_cache()
    pair.consumer.generate(tokens[:600], max_tokens=1)
    answer = pair.consumer.generate(tokens, kv_transfer_params=params)
    check(answer, reference(tokens), 1100 - 600 // BLOCK * BLOCK)
    # Everything is in memory now: nothing is loaded, whatever the tail would add.
    again = ask(pair.consumer, tokens, kv_transfer_params=params)
    assert again.cached_tokens >= 1100 // BLOCK * BLOCK


def test_behind_what_the_producer_has_itself(
    pair: Pair, reference: Reference, prompt: MakePrompt
) -> None:
    """The producer computes little or nothing, and promises all the same."""
    tokens = prompt(900)
    pair.producer.generate(tokens, max_tokens=1)
    pair.shelf.wait_stored(tokens)
    for connector in (False, True):
        if connector:
            pair.producer.reset_connector()
        params = prefill(pair.producer, tokens)
        check(pair.consume(tokens, params), reference(tokens), 900)
        for path in pair.promises.wait_tail(tokens):
            path.unlink()


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


# ---------------------------------------------------------------------- consumers that are early


def test_long_before_the_producer_begins(
    pair: Pair, reference: Reference, ask: Ask, prompt: MakePrompt
) -> None:
    """Others are served meanwhile."""
    beginning, other = prompt(600), prompt(900)
    tokens = prompt(900, after=beginning)
    pair.consumer.reset_prefix_cache()
    request = pair.consumer.submit(tokens, kv_transfer_params=pair.promises.params(tokens))
    for number in range(10):
        # Requests without params and hand-overs go ahead of what waits.
        ask(pair.consumer, other, max_tokens=8)
        if number == 5:
            params = prefill(pair.producer, beginning)
            ask(pair.consumer, beginning, kv_transfer_params=params)
    prefill(pair.producer, tokens)
    answer = request.result()
    assert_same(answer, reference(tokens))
    assert answer.cached_tokens == 1500


def test_a_request_that_waits_is_aborted(
    pair: Pair, reference: Reference, prompt: MakePrompt
) -> None:
    tokens = prompt(900)
    pair.consumer.reset_prefix_cache()
    request = pair.consumer.submit(tokens, kv_transfer_params=pair.promises.params(tokens))
    pair.consumer.generate(prompt(5))
    request.abort()
    assert request.result().finish_reason == "abort"
    # It held no blocks, and nothing of it is left.
    pair.consumer.reset_prefix_cache()
    params = prefill(pair.producer, tokens)
    check(pair.consume(tokens, params), reference(tokens), 900)


# ------------------------------------------------------------------- hand-overs that never come


def test_past_the_deadline_what_is_there_is_loaded(
    pair: Pair, reference: Reference, prompt: MakePrompt
) -> None:
    """The rest is computed: here, and if the tail was deleted since."""
    tokens = prompt(1100)
    prefill(pair.producer, tokens[:700])
    pair.shelf.wait_stored(tokens[:700])
    counted = Counted(pair.consumer)
    answer = pair.consume(tokens, pair.promises.params(tokens, kvshelf_wait_s=3.0))
    check(answer, reference(tokens), 512)
    params = prefill(pair.producer, tokens)
    for path in pair.promises.wait_tail(tokens):
        path.unlink()
    answer = pair.consume(tokens, {**params, "kvshelf_wait_s": 3.0})
    check(answer, reference(tokens), 1024)
    counted.wait(handovers_late=2)


def test_a_marker_ends_the_wait(pair: Pair, reference: Reference, prompt: MakePrompt) -> None:
    """What is there is loaded, and the rest computed, long before the deadline."""
    tokens = prompt(1100)
    prefill(pair.producer, tokens[:700])
    pair.shelf.wait_stored(tokens[:700])
    params = pair.promises.params(tokens)
    pair.consumer.reset_prefix_cache()
    counted = Counted(pair.consumer)
    request = pair.consumer.submit(tokens, kv_transfer_params=params)
    pair.consumer.generate(prompt(5))
    marker = pair.promises.marker(params["kvshelf_attempt"])
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    answer = request.result()
    assert answer.cached_tokens == 512
    assert_same(answer, reference(tokens))
    counted.wait(handovers_gave_up=1, handovers_late=0)
    # Of what is complete, a marker says nothing.
    complete = prefill(pair.producer, tokens)
    pair.promises.wait_tail(tokens)
    pair.promises.marker(complete["kvshelf_attempt"]).touch()
    check(pair.consume(tokens, complete), reference(tokens), 1100)


def test_a_damaged_tail_costs_what_it_holds(
    pair: Pair, reference: Reference, prompt: MakePrompt
) -> None:
    tokens = prompt(900)
    params = prefill(pair.producer, tokens)
    [*_, tail] = pair.promises.wait_tail(tokens)
    flip_byte(tail)
    answer = pair.consume(tokens, {**params, "kvshelf_wait_s": 1.0})
    assert_same(answer, reference(tokens))


def test_another_namespace_is_not_waited_for(
    pair: Pair, reference: Reference, prompt: MakePrompt
) -> None:
    tokens = prompt(900)
    params = prefill(pair.producer, tokens)
    # It does not wait for the chunks.
    pair.shelf.wait_stored(tokens)
    other = {**params, "kvshelf_namespace": secrets.token_hex(32)}
    counted = Counted(pair.consumer)
    # What both name alike is loaded as from any cache.
    check(pair.consume(tokens, other), reference(tokens), 768)
    counted.wait(handovers_other_namespace=1, handovers_late=0)


@pytest.mark.parametrize(
    "field",
    [{"kvshelf_namespace": "../../etc"}, {"kvshelf_key": "%s\n\x1b[31mred"}],
    ids=repr,
)
def test_params_that_nobody_answered(
    pair: Pair, reference: Reference, prompt: MakePrompt, field: dict[str, Any]
) -> None:
    """Any client may send them; the request is served as from a plain cache.

    What is refused of each field is in test_handover.py.
    """
    tokens = prompt(600)
    params = prefill(pair.producer, tokens)
    pair.shelf.wait_stored(tokens)
    counted = Counted(pair.consumer)
    answer = pair.consume(tokens, {**params, **field})
    assert answer.shelf_tokens == 512
    assert_same(answer, reference(tokens))
    counted.wait(handovers_invalid=1, handovers_complete=0)
    assert "\x1b[31mred" not in pair.consumer.log()
    assert not pair.consumer.log_lines("Traceback")


def test_params_of_another_prompt(pair: Pair, reference: Reference, prompt: MakePrompt) -> None:
    tokens, other = prompt(900), prompt(900)
    params = prefill(pair.producer, other)
    check(pair.consume(tokens, params), reference(tokens), 0)
    # Params of the prompt's beginning, as where a proxy adds tokens: what they name is loaded.
    longer = prompt(200, after=other)
    answer = pair.consume(longer, params)
    assert answer.shelf_tokens in (768, 900)
    assert_same(answer, reference(longer))


def test_a_consumer_stores_nothing(pair: Pair, reference: Reference, prompt: MakePrompt) -> None:
    tokens, after = prompt(600), prompt(600)
    check(pair.consume(tokens, None), reference(tokens), 0)
    pair.producer.generate(after)
    pair.shelf.wait_stored(after)
    assert not any(path.exists() for chunk in pair.shelf.of(tokens) for path in chunk)


def test_no_line_of_the_logs_is_an_error(pair: Pair) -> None:
    """The last test with these engines."""
    for engine in (pair.producer, pair.consumer):
        assert not engine.log_lines("ERROR")
        assert not engine.log_lines("Traceback")
