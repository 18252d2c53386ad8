"""Producers and consumers on real engines: hand-overs that succeed, and all that can end one.

The consumer's answer is compared with that of an engine that computes everything, and bit by bit
with a hit of as many tokens in vLLM's own prefix cache where vLLM can have one: behind whole
blocks. No test asserts times: what must not be waited for is told by counters and by deadlines of
requests that are longer than tests may take.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.faultfs import mounted
from tests.support.engines import (
    NEAR_TIE,
    Answer,
    Engine,
    assert_same,
    assert_same_up_to_ties,
)
from tests.support.fleet import Ask, Engines, MakePrompt, Reference, beside_example, of_ranks
from tests.support.make_hybrid_model import make_hybrid_model
from tests.support.variants import variants
from tests.support.waiting import until
from tests.vllm.handing_over import ASKED, Counted, Promises, prefill
from tests.vllm.hybrid_files import HybridFiles
from tests.vllm.shelf_files import CHUNK, DAMAGE, ShelfFiles

BLOCK = 128
DAY = 86400
#: Longer than a test may take: what waits for it fails.
NEVER = 600.0


@dataclass
class Pair:
    """A producer and a consumer on one shelf."""

    shelf: ShelfFiles
    producer: Engine
    consumer: Engine
    promises: Promises
    block: int

    def consume(self, tokens: list[int], params: Any, **options: Any) -> Answer:
        """Run a request on the consumer, whose own prefix cache is empty."""
        self.consumer.reset_prefix_cache()
        return self.consumer.generate(tokens, kv_transfer_params=params, **options)


def start(
    engines: Engines, name: str, shelf: ShelfFiles, role: str = "kv_both", **options: Any
) -> Engine:
    arguments = options.pop("arguments", {})
    return engines.on_shelf(
        name,
        shelf.root,
        options,
        kv_role=role,
        **{"core": 1 if role == "kv_consumer" else 0, **arguments},
    )


@pytest.fixture(scope="module", params=[64, pytest.param(BLOCK, marks=pytest.mark.slow)])
def pair(engines: Engines, inert: Engine, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Where the consumer's blocks are others, chunks are canonical."""
    block = request.param
    options = {"layout": "auto" if block == BLOCK else "canonical", "handover_wait_s": NEVER}
    shelf = ShelfFiles(engines.places.root / f"hand-overs, {options['layout']}")
    producer, consumer = (
        start(
            engines,
            f"{role}, blocks of {size}",
            shelf,
            role,
            arguments={"block_size": size},
            **options,
        )
        for role, size in (("kv_producer", BLOCK), ("kv_consumer", block))
    )
    first = list(range(2, 302))
    prefill(producer, first)
    shelf.wait_stored(first)
    yield Pair(shelf, producer, consumer, Promises(shelf), block)
    for engine in (producer, consumer):
        engine.stop(at_once=True)


def check(answer: Answer, expected: Answer, shelf_tokens: int) -> None:
    """Assert what an answer is, and how many of its prompt's tokens came from the shelf."""
    assert answer.shelf_tokens == shelf_tokens
    assert_same(answer, expected)
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=NEAR_TIE)


# ------------------------------------------------------------------------- what is handed over


@pytest.mark.parametrize(
    "length",
    variants(
        [1, 2, 40, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 1500, 2300],
        {1, 40, 256, 1000},
    ),
)
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


@pytest.mark.parametrize(
    "length",
    variants([BLOCK + 1, CHUNK + 1, CHUNK + BLOCK + 1, 4 * CHUNK + 1], {CHUNK + BLOCK + 1}),
)
def test_as_a_hit_in_memory_to_the_last_bit(pair: Pair, prompt: MakePrompt, length: int) -> None:
    """Whole blocks and one token: vLLM's own prefix cache has all but the last token, too."""
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
    check(answer, reference(tokens), 1100 - 600 // pair.block * pair.block)
    # Everything is in memory now: nothing is loaded, whatever the tail would add.
    again = ask(pair.consumer, tokens, kv_transfer_params=params)
    assert again.cached_tokens >= 1100 // pair.block * pair.block


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


@pytest.mark.parametrize(
    "damage",
    variants(
        ["flipped byte of the payload", "truncated", "empty"], {"flipped byte of the payload"}
    ),
)
def test_a_damaged_tail_costs_what_it_holds(
    pair: Pair, reference: Reference, prompt: MakePrompt, damage: str
) -> None:
    tokens = prompt(900)
    params = prefill(pair.producer, tokens)
    [*_, tail] = pair.promises.wait_tail(tokens)
    DAMAGE[damage](tail)
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


# ----------------------------------------------------------------------- other engines, slow tests


@pytest.fixture
def own(engines: Engines, request: pytest.FixtureRequest) -> ShelfFiles:
    """A shelf of one test."""
    return ShelfFiles(engines.places.root / "hand-overs" / request.node.name.replace("/", "-"))


def known(shelf: ShelfFiles, producer: Engine, tokens: list[int]) -> Promises:
    """Wait until a producer's first prompt is stored, and with it the namespace."""
    producer.generate(tokens)
    shelf.wait_stored(tokens)
    return Promises(shelf)


@pytest.mark.slow
@pytest.mark.named_failure
def test_a_producer_is_killed_under_load(
    engines: Engines,
    own: ShelfFiles,
    inert: Engine,
    reference: Reference,
    ask: Ask,
    prompt: MakePrompt,
) -> None:
    small = {"arguments": {"max_num_batched_tokens": 256}}
    consumer = start(engines, "left alone", own, "kv_consumer")
    doomed = start(engines, "killed producer", own, "kv_producer", **small).wait_ready()
    promises = known(own, doomed, prompt(300))
    prompts = [prompt(1500) for _ in range(12)]
    before = len(own.objects())
    with consumer:
        sent = [promises.params(tokens, kvshelf_wait_s=4) for tokens in prompts]
        requests = [
            consumer.submit(tokens, kv_transfer_params=params)
            for tokens, params in zip(prompts, sent, strict=True)
        ]
        for tokens in prompts:
            doomed.submit(tokens, max_tokens=1, kv_transfer_params=ASKED)
        until(lambda: len(own.objects()) > before + 8, "some chunks on the shelf")
        doomed.kill()
        cut_off = [
            tokens for tokens in prompts if not all(path.exists() for path in promises.tail(tokens))
        ]
        assert cut_off, "all hand-overs were over before the producer was killed"
        answers = [request.result() for request in requests]
        expected = [reference(tokens) for tokens in prompts]
        inert.reset_prefix_cache()
        assert_same_up_to_ties(answers, expected, inert.generate_all(prompts))
        own.check_all()
        # Another producer goes on with the same hand-overs.
        with start(engines, "next producer", own, "kv_producer") as producer:
            requests = [
                consumer.submit(tokens, kv_transfer_params=promises.params(tokens))
                for tokens in cut_off
            ]
            for tokens in cut_off:
                prefill(producer, tokens)
            for request in requests:
                request.result()
            consumer.reset_prefix_cache()
            for tokens in cut_off:
                params = promises.params(tokens)
                ask(consumer, tokens, 1500, kv_transfer_params=params)


@pytest.mark.slow
@pytest.mark.named_failure
def test_a_consumer_is_killed_and_restarted(
    engines: Engines, own: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    producer = start(engines, "patient producer", own, "kv_producer")
    doomed = start(engines, "killed consumer", own, "kv_consumer").wait_ready()
    with producer:
        promises = known(own, producer, prompt(300))
        waiting, loading = [prompt(1100) for _ in range(4)], [prompt(1500) for _ in range(4)]
        sent = [promises.params(tokens) for tokens in waiting]
        sent += [prefill(producer, tokens) for tokens in loading]
        requests = [
            doomed.submit(tokens, max_tokens=200, kv_transfer_params=params)
            for tokens, params in zip(waiting + loading, sent, strict=True)
        ]
        requests[-1].wait_first_token()
        doomed.kill()
        consumer = start(engines, "restarted consumer", own, "kv_consumer")
        with consumer:
            # Some were there all the time, for the others the restarted engine waits again.
            for tokens, params in zip(loading, sent[4:], strict=True):
                answer = consumer.generate(tokens, kv_transfer_params=params)
                check(answer, reference(tokens), 1500)
            requests = [
                consumer.submit(tokens, kv_transfer_params=params)
                for tokens, params in zip(waiting, sent, strict=False)
            ]
            consumer.generate(prompt(5))
            for tokens in waiting:
                prefill(producer, tokens)
            for tokens, request in zip(waiting, requests, strict=True):
                answer = request.result()
                assert answer.cached_tokens == 1100
                assert_same(answer, reference(tokens), NEAR_TIE)


#: Faults of a mount: everything fails, and only objects cannot be written.
AWAY = "getattr|open|opendir|readdir|read|create|mkdir|rename|write"


@pytest.mark.slow
def test_a_storage_that_is_away_for_a_while(
    engines: Engines, tmp_path: Path, reference: Reference, ask: Ask, prompt: MakePrompt
) -> None:
    with mounted(tmp_path) as mount:
        behind = ShelfFiles(mount.source / "kv")
        before = ShelfFiles(mount.path / "kv")
        producer = start(engines, "beside a mount", behind, "kv_producer")
        consumer = start(engines, "on a mount", before, "kv_consumer", handover_wait_s=60)
        with producer, consumer:
            promises = known(behind, producer, prompt(300))
            tokens, hopeless, after = prompt(1100), prompt(1100), prompt(1100)
            # The consumer has seen its storage work.
            check(
                consumer.generate(after, kv_transfer_params=prefill(producer, after)),
                reference(after),
                1100,
            )
            request = consumer.submit(tokens, kv_transfer_params=promises.params(tokens))
            consumer.generate(prompt(5))
            mount.add(AWAY, error=errno.EIO)
            # It does not come back for this one, whose KV is complete on the other side.
            params = {**prefill(producer, hopeless), "kvshelf_wait_s": 1.5}
            answer = ask(consumer, hopeless, kv_transfer_params=params)
            assert answer.cached_tokens == 0
            prefill(producer, tokens)
            promises.wait_tail(tokens)
            mount.clear()
            answer = request.result()
            assert_same(answer, reference(tokens))
            assert answer.cached_tokens == 1100


@pytest.mark.slow
def test_a_producer_that_cannot_store_says_so(
    engines: Engines, tmp_path: Path, reference: Reference, ask: Ask, prompt: MakePrompt
) -> None:
    with mounted(tmp_path) as mount:
        behind = ShelfFiles(mount.source / "kv")
        before = ShelfFiles(mount.path / "kv")
        producer = start(engines, "on a full disk", before, "kv_producer")
        consumer = start(engines, "beside it", behind, "kv_consumer", handover_wait_s=NEVER)
        with producer, consumer:
            promises = known(behind, producer, prompt(300))
            tokens, hopeless, later = prompt(1100), prompt(1100), prompt(1100)
            # Objects cannot be written, but a marker can: nobody waits.
            mount.add("write", "*safetensors*", error=errno.ENOSPC)
            counted = Counted(consumer)
            params = prefill(producer, tokens)
            ask(consumer, tokens, kv_transfer_params=params)
            counted.wait(handovers_gave_up=1, handovers_late=0)
            assert promises.marker(params["kvshelf_attempt"]).stat().st_size == 0
            # Nothing can be written: the deadline acts.
            mount.clear()
            mount.add("create|write|mkdir|rename", error=errno.EROFS)
            answered = producer.generate(hopeless, max_tokens=1, kv_transfer_params=ASKED)
            params = answered.kv_transfer_params or promises.params(hopeless)
            answer = consumer.generate(
                hopeless, kv_transfer_params={**params, "kvshelf_wait_s": 1.5}
            )
            assert_same(answer, reference(hopeless))
            mount.clear()

            def handed_over() -> bool:
                producer.reset_prefix_cache()
                answered = producer.generate(later, max_tokens=1, kv_transfer_params=ASKED)
                params = answered.kv_transfer_params or promises.params(later)
                consumer.reset_prefix_cache()
                answer = consumer.generate(
                    later, kv_transfer_params={**params, "kvshelf_wait_s": 2}
                )
                assert_same(answer, reference(later))
                return answer.shelf_tokens == 1100

            until(handed_over, "hand-overs again", 90)


@pytest.mark.slow
def test_clocks_that_are_wrong(
    engines: Engines, own: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    """One engine is a day ahead, one a day behind, and the storage's times are others again."""

    def start_wrong(role: str, name: str) -> Engine:
        return engines.start(
            f"{role}, {name}",
            model=engines.places.model,
            connector=(name, "tests.vllm.skewed_connector"),
            kv_role=role,
            extra_config={
                "shared_storage_path": str(own.root),
                "handover_wait_s": NEVER,
                # Files that are newer than an engine's start do not identify its weights.
                "weights": "name:those of this test",
            },
            core=int(role == "kv_consumer"),
        )

    names = ["ConnectorADayAhead", "ConnectorADayBehind"]
    for of_producer, of_consumer in (names, names[::-1]):
        producer = start_wrong("kv_producer", of_producer)
        consumer = start_wrong("kv_consumer", of_consumer)
        with producer, consumer:
            promises = known(own, producer, prompt(300))
            for offset in (-10 * DAY, 0, 10 * DAY):
                tokens, lost = prompt(1100), prompt(1100)
                params = prefill(producer, tokens)
                at = time.time() + offset
                for path in (*promises.wait_tail(tokens), *own.objects()):
                    os.utime(path, (at, at))
                answer = consumer.generate(tokens, kv_transfer_params=params)
                check(answer, reference(tokens), 1100)
                broken = promises.params(lost)
                marker = promises.marker(broken["kvshelf_attempt"])
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.touch()
                os.utime(marker, (at, at))
                check(consumer.generate(lost, kv_transfer_params=broken), reference(lost), 0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["auto", "canonical"])
def test_across_tensor_parallel_degrees(
    engines: Engines, own: ShelfFiles, prompt: MakePrompt, layout: str
) -> None:
    def start_ranks(ranks: int) -> Engine:
        return start(
            engines,
            f"{ranks} ranks, {layout}",
            own,
            layout=layout,
            handover_wait_s=NEVER,
            arguments=of_ranks(ranks),
        )

    one, two = start_ranks(1), start_ranks(2)
    with one, two:
        promises = known(own, one, prompt(300))
        for producer, consumer in ((two, one), (one, two)):
            for length in (100, 512, CHUNK + BLOCK + 1, 1000):
                tokens = prompt(length)
                consumer.reset_prefix_cache()
                request = consumer.submit(
                    tokens, kv_transfer_params=promises.params(tokens), max_tokens=16
                )
                answered = prefill(producer, tokens)
                assert answered["kvshelf_key"] == promises.params(tokens)["kvshelf_key"]
                answer = request.result()
                assert answer.cached_tokens == length
                # As it computes the prompt itself, up to what another degree's sums make of it.
                consumer.reset_prefix_cache()
                assert_same(
                    answer,
                    consumer.generate(tokens, cache_salt="of its own", max_tokens=16),
                    NEAR_TIE,
                )
        for engine in (one, two):
            assert not engine.log_lines("ERROR")


# --------------------------------------------------------------------------------- hybrid models


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunk", "arguments"),
    [
        ("gemma3", 256, {"dtype": "float32"}),
        ("qwen3-next", 128, {"mamba_ssm_cache_dtype": "float32"}),
    ],
)
def test_a_hybrid_model_is_handed_over_at_a_chunk_boundary(
    engines: Engines, prompt: MakePrompt, name: str, chunk: int, arguments: dict[str, Any]
) -> None:
    model = make_hybrid_model(engines.places.root / "models" / name, name)
    shelf = HybridFiles(engines.places.root / f"{name} handed over")

    def start_role(role: str) -> Engine:
        return engines.on_shelf(
            f"{name}, {role}",
            shelf.root,
            {"handover_wait_s": NEVER},
            model=model,
            kv_role=role,
            core=int(role == "kv_consumer"),
            **arguments,
        )

    producer, consumer = start_role("kv_producer"), start_role("kv_consumer")
    with producer, consumer:
        producer.generate(prompt(2 * chunk + 10))
        equal = 0
        # The last chunk boundary before the prompt's end.
        for length, hit in (
            (3 * chunk + 40, 3 * chunk),
            (4 * chunk, 3 * chunk),
            (chunk + 1, chunk),
            (5 * chunk + chunk - 1, 5 * chunk),
        ):
            tokens = prompt(length)
            params = prefill(producer, tokens)
            assert (params["kvshelf_tokens"], params["kvshelf_tail"]) == (hit, 0)
            counted = Counted(consumer)
            consumer.reset_prefix_cache()
            loaded = consumer.generate(tokens, kv_transfer_params=params)
            assert loaded.shelf_tokens == hit
            counted.wait(handovers_complete=1, handovers_late=0)
            # What was computed behind it is in memory as well now: a longer hit.
            for again in (consumer.generate(tokens), producer.generate(tokens)):
                assert again.shelf_tokens == 0
                assert again.cached_tokens >= hit
                assert_same(loaded, again, NEAR_TIE)
                if again.cached_tokens == hit:
                    assert (loaded.tokens, loaded.logprobs) == (again.tokens, again.logprobs)
                    equal += 1
        assert equal, "no hit of the same length in memory"
        # A consumer that is early: keys are known beforehand to any program of ours.
        tokens = prompt(3 * chunk + 40)
        early = Promises(shelf).params(tokens[: 3 * chunk])
        consumer.reset_prefix_cache()
        request = consumer.submit(tokens, kv_transfer_params=early)
        consumer.generate(prompt(5))
        params = prefill(producer, tokens)
        assert params["kvshelf_key"] == early["kvshelf_key"]
        assert request.result().cached_tokens == 3 * chunk


# ------------------------------------------------------------------ beside another connector


@pytest.mark.slow
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "ours last"])
def test_beside_vllms_example_connector(
    engines: Engines, own: ShelfFiles, reference: Reference, prompt: MakePrompt, ours_first: bool
) -> None:
    examples = own.root.with_name(f"{own.root.name}, of ExampleConnector")
    examples.mkdir(parents=True)
    several = engines.start(
        f"two connectors, {'ours first' if ours_first else 'ours last'}",
        model=engines.places.model,
        core=1,
        **beside_example(own.root, examples, ours_first=ours_first, handover_wait_s=NEVER),
    )
    plain = start(engines, f"alone, {ours_first}", own, handover_wait_s=NEVER)
    with several, plain:
        promises = known(own, plain, prompt(300))
        # As a consumer: early, and late.
        for early in (True, False):
            tokens = prompt(1000)
            params = promises.params(tokens) if early else prefill(plain, tokens)
            request = several.submit(tokens, kv_transfer_params=params)
            if early:
                prefill(plain, tokens)
            answer = request.result()
            assert answer.cached_tokens == 1000
            assert_same(answer, reference(tokens))
        # As a producer.
        tokens = prompt(1000)
        params = prefill(several, tokens)
        check(plain.generate(tokens, kv_transfer_params=params), reference(tokens), 1000)
        # The other connector has the prompt, and ours waits for a producer that never comes.
        until(lambda: any(examples.iterdir()), "what ExampleConnector stores")
        for path in (*own.objects(),):
            path.unlink()
        several.reset_prefix_cache(connector=True)
        params = promises.params(tokens, kvshelf_wait_s=1.0)
        answer = several.generate(tokens, kv_transfer_params=params)
        assert answer.cached_tokens == (1000 - 2) // BLOCK * BLOCK
        assert_same(answer, reference(tokens))
        # Neither of them has it.
        tokens = prompt(1000)
        params = promises.params(tokens, kvshelf_wait_s=1.0)
        check(several.generate(tokens, kv_transfer_params=params), reference(tokens), 0)
