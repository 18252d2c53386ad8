"""Real engines whose steps complete more chunks than their staging holds, on a slow storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.faultfs import FaultMount, mounted
from tests.support.engines import NEAR_TIE, SHELF_CONNECTOR, Answer, Engine, assert_same
from tests.support.fleet import Engines
from tests.vllm.handing_over import Counted, prefill
from tests.vllm.shelf_files import CHUNK, ShelfFiles

#: The chunks of a prompt that vLLM computes in one step.
CHUNKS = 12
LENGTH = CHUNKS * CHUNK + 40
#: Staging for at most three of the model's chunks.
STAGING = 6 * 140_000
#: Longer than a test may take.
NEVER = 600.0
MULTI_CONNECTOR = ("MultiConnector", "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")
MakePrompt = Callable[..., list[int]]
Reference = Callable[..., Answer]


def start(
    engines: Engines, name: str, folder: Path, role: str = "kv_both", **arguments: Any
) -> Engine:
    return engines.start(
        name,
        model=engines.places.model,
        connector=SHELF_CONNECTOR,
        kv_role=role,
        extra_config=config(folder),
        max_num_batched_tokens=4096,
        max_model_len=8192,
        **{"core": 1 if role == "kv_consumer" else 0, **arguments},
    )


def config(folder: Path) -> dict[str, Any]:
    return {
        "shared_storage_path": str(folder),
        "staging_bytes": STAGING,
        "handover_wait_s": NEVER,
        # A busy disk may take seconds for anything.
        "probe_deadline_s": NEVER,
        "read_deadline_s": NEVER,
        "write_deadline_s": NEVER,
    }


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


def test_a_prompt_that_one_step_computes_is_stored_in_one_pass(
    producer: Engine,
    reader: Engine,
    mount: FaultMount,
    shelf: ShelfFiles,
    reference: Reference,
    prompt: MakePrompt,
) -> None:
    first = prompt(CHUNK + 1)
    producer.generate(first)
    shelf.wait_stored(first)
    # Twice what staging holds. What is not stored when the answer ends is dropped: it takes
    # longer than a busy disk does.
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
    shelf.wait_stored(tokens)
    request.abort()
    counted.wait(dropped_chunks_staging_full=0, dropped_chunks_parent_dropped=0)
    answer = reader.generate(tokens)
    assert answer.shelf_tokens == 6 * CHUNK
    assert_same(answer, reference(tokens))
    shelf.check_all()


def test_a_prompt_larger_than_staging_is_handed_over_whole(
    producer: Engine, reader: Engine, mount: FaultMount, reference: Reference, prompt: MakePrompt
) -> None:
    producer.generate(prompt(CHUNK + 1))
    for _ in range(2):
        tokens = prompt(LENGTH)
        hand_over(producer, reader, mount, tokens)
        reader.reset_prefix_cache()
        assert_same(reader.generate(tokens), reference(tokens))


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
    arguments = {
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
    }
    with start(engines, "two slow ranks", mount.path / "kv", **arguments) as producer:
        producer.generate(prompt(CHUNK + 1))
        for _ in range(2):
            tokens = prompt(LENGTH)
            hand_over(producer, reader, mount, tokens)
            reader.reset_prefix_cache()
            assert_same(
                reader.generate(tokens), reader.generate(tokens, cache_salt="own"), NEAR_TIE
            )
        assert not producer.log_lines("ERROR")


@pytest.mark.slow
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "ours last"])
def test_beside_another_connector(
    engines: Engines,
    reader: Engine,
    mount: FaultMount,
    tmp_path: Path,
    reference: Reference,
    prompt: MakePrompt,
    ours_first: bool,
) -> None:
    ours = {
        "kv_connector": SHELF_CONNECTOR[0],
        "kv_connector_module_path": SHELF_CONNECTOR[1],
        "kv_role": "kv_both",
        "kv_connector_extra_config": config(mount.path / "kv"),
    }
    theirs = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    engine = engines.start(
        f"slow beside another, {ours_first}",
        model=engines.places.model,
        connector=MULTI_CONNECTOR,
        extra_config={"connectors": [ours, theirs] if ours_first else [theirs, ours]},
        transfer={"kv_load_failure_policy": "recompute"},
        max_num_batched_tokens=4096,
        core=0,
    )
    with engine as producer:
        producer.generate(prompt(CHUNK + 1))
        for _ in range(2):
            tokens = prompt(LENGTH)
            hand_over(producer, reader, mount, tokens)
            reader.reset_prefix_cache()
            assert_same(reader.generate(tokens), reference(tokens))
        assert not producer.log_lines("ERROR")
