"""Real engines whose steps complete more chunks than their staging holds, on a slow storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.faultfs import FaultMount, mounted
from tests.support.engines import NEAR_TIE, Engine, Request, assert_same
from tests.support.fleet import Ask, Engines, MakePrompt, Reference, of_ranks
from tests.support.waiting import until
from tests.vllm.handing_over import Counted, prefill
from tests.vllm.shelf_files import CHUNK, ShelfFiles

pytestmark = pytest.mark.slow

#: The chunks of a prompt that vLLM computes in one step; the engine without a shelf takes no more.
CHUNKS = 10
LENGTH = CHUNKS * CHUNK + 40
#: Staging for at most three of the model's chunks.
STAGING = 6 * 140_000
#: Longer than a test may take.
NEVER = 600.0
OPTIONS = {
    "staging_bytes": STAGING,
    "handover_wait_s": NEVER,
    # A busy disk may take seconds for anything.
    "deadlines": {"probe": NEVER, "read": NEVER, "write": NEVER},
}


def start(
    engines: Engines, name: str, folder: Path, role: str = "kv_both", **arguments: Any
) -> Engine:
    return engines.on_shelf(
        name,
        folder,
        OPTIONS,
        kv_role=role,
        max_num_batched_tokens=4096,
        max_model_len=8192,
        **{"core": 1 if role == "kv_consumer" else 0, **arguments},
    )


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultMount]:
    with mounted(tmp_path_factory.mktemp("mount")) as mount:
        yield mount


@pytest.fixture(scope="module")
def shelf(mount: FaultMount) -> ShelfFiles:
    return ShelfFiles(mount.source / "kv")


@pytest.fixture(scope="module")
def producer(engines: Engines, mount: FaultMount) -> Iterator[Engine]:
    with start(engines, "on a slow storage", mount.path / "kv") as engine:
        yield engine.wait_ready()


@pytest.fixture(scope="module")
def reader(engines: Engines, shelf: ShelfFiles) -> Iterator[Engine]:
    """An engine whose storage is fast."""
    with start(engines, "beside it, fast", shelf.root, "kv_consumer") as engine:
        yield engine.wait_ready()


@pytest.fixture(autouse=True)
def cleared(mount: FaultMount) -> Iterator[None]:
    yield
    mount.clear()


def hand_over(
    producer: Engine, consumer: Engine, mount: FaultMount, tokens: list[int], **options: Any
) -> None:
    """Assert that a prompt larger than staging arrives whole, from a slow storage."""
    counted = Counted(producer)
    for operation in ("link", "rename"):
        mount.add(operation, "*.safetensors*", seconds=0.1)
    params = prefill(producer, tokens)
    assert params["kvshelf_tokens"] == len(tokens)
    answer = consumer.generate(tokens, kv_transfer_params=params, **options)
    assert answer.cached_tokens == len(tokens)
    mount.clear()
    # The blocks are given back: vLLM resets its cache only if no request has any.
    counted.wait(dropped_chunks_staging_full=0, promises_broken=0)
    producer.reset_prefix_cache()


def stored_before_the_end(request: Request, tokens: list[int], shelf: ShelfFiles) -> bool:
    """Wait until a prompt is stored or its answer has ended; return whether it is stored."""
    until(lambda: shelf.stores(tokens) or request.ended, "all chunks, or the answer's end")
    return shelf.stores(tokens)


def test_a_prompt_that_one_step_computes_is_stored_in_one_pass(
    producer: Engine,
    reader: Engine,
    mount: FaultMount,
    shelf: ShelfFiles,
    ask: Ask,
    prompt: MakePrompt,
) -> None:
    first = prompt(CHUNK + 1)
    producer.generate(first)
    shelf.wait_stored(first)
    for _ in range(5):
        # Twice what staging holds.
        tokens = prompt(6 * CHUNK + 40)
        before = len(shelf.objects())
        counted = Counted(producer)
        # Either one publishes an object.
        for operation in ("link", "rename"):
            mount.add(operation, "*.safetensors*", block=True)
        request = producer.submit(tokens, max_tokens=6000, ignore_eos=True)
        request.wait_first_token()
        assert len(shelf.objects()) == before
        mount.clear()
        if stored_before_the_end(request, tokens, shelf):
            break
        # What is not stored when the answer ends is dropped: the disk stalled for longer.
    request.abort()
    counted.wait(dropped_chunks_staging_full=0, dropped_chunks_parent_dropped=0)
    ask(reader, tokens, 6 * CHUNK)
    shelf.check_all()


def test_a_prompt_larger_than_staging_is_handed_over_whole(
    producer: Engine, reader: Engine, mount: FaultMount, ask: Ask, prompt: MakePrompt
) -> None:
    producer.generate(prompt(CHUNK + 1))
    tokens = prompt(LENGTH)
    hand_over(producer, reader, mount, tokens)
    reader.reset_prefix_cache()
    ask(reader, tokens)


def test_many_are_handed_over_at_once(
    producer: Engine, reader: Engine, mount: FaultMount, reference: Reference, prompt: MakePrompt
) -> None:
    """Together they need more blocks than vLLM has: those that are kept delay others."""
    prompts = [prompt(LENGTH) for _ in range(8)]
    mount.add("rename", "*.safetensors*", seconds=0.02)
    asked = [
        producer.submit(tokens, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        for tokens in prompts
    ]
    for tokens, request in zip(prompts, asked, strict=True):
        params = request.result().kv_transfer_params
        answer = reader.generate(tokens, kv_transfer_params=params)
        assert answer.cached_tokens == LENGTH
        assert_same(answer, reference(tokens))


@pytest.mark.slow
def test_of_two_ranks(
    engines: Engines, reader: Engine, mount: FaultMount, prompt: MakePrompt
) -> None:
    with start(engines, "two slow ranks", mount.path / "kv", **of_ranks(2)) as producer:
        producer.generate(prompt(CHUNK + 1))
        for _ in range(2):
            tokens = prompt(LENGTH)
            hand_over(producer, reader, mount, tokens)
            reader.reset_prefix_cache()
            assert_same(
                reader.generate(tokens), reader.generate(tokens, cache_salt="own"), NEAR_TIE
            )
        assert not producer.log_lines("ERROR")
