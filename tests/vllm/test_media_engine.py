"""Real engines that see images: what they share, and what they must not.

The prompts are of 1,712 tokens, six whole chunks. Text fills the first, the first image lies in the
second and third, the second image in the fourth and fifth.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import (
    NEAR_TIE,
    SHELF_CONNECTOR,
    Answer,
    Engine,
    assert_same,
    assert_same_up_to_ties,
)
from tests.support.fleet import PATIENT, Engines, Places
from tests.support.servers import BUCKET, KEY, SECRET, command, moto_s3
from tests.support.waiting import until
from tests.vllm.adapter_files import RANK, attention_shapes, make_adapter
from tests.vllm.shelf_files import ShelfFiles
from tests.vllm.tiny_llava import PROJECTOR, engine_arguments, make_llava, prompt_with_images

pytestmark = pytest.mark.slow

PROMPT = prompt_with_images(1)
#: Tokens of the whole prompt, up to the second image, and up to the first one, in whole chunks.
ALL, FIRST_IMAGE, TEXT = 1536, 768, 256


@pytest.fixture(scope="module")
def model(places: Places) -> Path:
    return make_llava(places.root / "models" / "llava")


@pytest.fixture(scope="module")
def start(engines: Engines, places: Places) -> Iterator[Callable[..., Engine]]:
    """Start engines that see images, all on one shelf."""
    started: list[Engine] = []

    def make(
        model: Path | str,
        *,
        core: int = 0,
        shelf: Path | None = places.root / "images",
        weights: str = "content",
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> Engine:
        arguments = engine_arguments() | more
        arguments["env"] |= env or {}
        if shelf is not None:
            config = {"shared_storage_path": str(shelf), "weights": weights, **PATIENT}
            arguments |= {"connector": SHELF_CONNECTOR, "extra_config": config}
        name = f"images {len(started)}"
        started.append(engines.start(name, model=model, core=core, **arguments))
        return started[-1]

    yield make
    for engine in started:
        engine.stop(at_once=True)


def check(found: Answer, expected: Answer, shelf_tokens: int, tolerance: float = 0.0) -> None:
    """Assert what is answered, and how many of the prompt's tokens came from the shelf."""
    assert found.shelf_tokens == shelf_tokens
    assert_same(found, expected, tolerance)


@pytest.mark.slow
def test_engines_share_images_whatever_their_model_s_path(
    start: Callable[..., Engine], model: Path, places: Places
) -> None:
    shelf = ShelfFiles(places.root / "images")
    copied = shutil.copytree(model, model.with_name("a copy of llava"))
    one, two = start(model), start(copied, core=1)
    stored = one.generate(PROMPT, images=[1, 2])
    assert stored.cached_tokens == 0
    wait_chunks(shelf, 6)
    check(two.generate(PROMPT, images=[1, 2]), stored, ALL)
    # Another image at one place: the chunks before it.
    for images, hit, chunks in (([1, 3], FIRST_IMAGE, 9), ([4, 2], TEXT, 14)):
        computed = one.generate(PROMPT, images=images)
        wait_chunks(shelf, chunks)
        assert computed.cached_tokens == hit
        assert computed.tokens != stored.tokens
        two.reset_prefix_cache()
        check(two.generate(PROMPT, images=images), computed, ALL)
    # Names that a client chose: nothing, or with a salt all of the same names.
    two.reset_prefix_cache()
    named = one.generate(PROMPT, images=[1, 2], uuids=["cat", "dog"])
    assert_same(named, stored)
    assert two.generate(PROMPT, images=[1, 2], uuids=["cat", "dog"]).shelf_tokens == 0
    salted = {"cache_salt": "ours"}
    named = one.generate(PROMPT, images=[1, 2], uuids=["cat", "dog"], **salted)
    assert named.cached_tokens == 0
    wait_chunks(shelf, 20)
    check(two.generate(PROMPT, images=[1, 2], uuids=["cat", "dog"], **salted), stored, ALL)
    two.reset_prefix_cache()
    assert two.generate(PROMPT, images=[1, 2], uuids=["cat", "cow"], **salted).shelf_tokens == (
        FIRST_IMAGE
    )


def make_snapshot(model: Path, cache: Path) -> str:
    """Lay a model out as a hub's repository in a cache; return its name."""
    repository = cache / "models--org--llava"
    commit = "c" * 40
    folder = repository / "snapshots" / commit
    for made in (repository / "blobs", repository / "refs", folder):
        made.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for file in model.iterdir():
        content = file.read_bytes()
        # Large files are named by their SHA-256, others as git names them.
        large = file.suffix == ".safetensors"
        blob = (hashlib.sha256 if large else hashlib.sha1)(content).hexdigest()
        (repository / "blobs" / blob).write_bytes(content)
        (folder / file.name).symlink_to(f"../../blobs/{blob}")
    return "org/llava"


@pytest.fixture
def bucket(model: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The URL of the model in a bucket, and the environment of an engine that reads it."""
    if command("moto_server") is None:
        pytest.skip("moto_server is missing: pip install 'moto[server]'")
    with moto_s3() as server:
        client = server.client()
        for file in model.iterdir():
            client.put_object(Bucket=BUCKET, Key=f"llava/{file.name}", Body=file.read_bytes())
        environment = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": server.endpoint,
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        }
        yield f"s3://{BUCKET}/llava", environment


@pytest.mark.slow
def test_a_hub_s_snapshot_and_a_copy_share_images_under_one_name(
    start: Callable[..., Engine], model: Path, tmp_path: Path
) -> None:
    named = {"weights": "name:our llava", "shelf": tmp_path / "shelf"}
    with start(model, **named) as one:
        stored = one.generate(PROMPT, images=[1, 2])
    name = make_snapshot(model, tmp_path / "hub")
    hub = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    loaded = start(name, env=hub, **named).generate(PROMPT, images=[1, 2])
    assert loaded.shelf_tokens == ALL
    assert_same(loaded, stored)


@pytest.mark.slow
def test_an_object_storage_and_a_copy_share_images_under_one_name(
    start: Callable[..., Engine], model: Path, tmp_path: Path, bucket: tuple[str, dict[str, str]]
) -> None:
    pytest.importorskip("runai_model_streamer", reason="pip install 'runai-model-streamer[s3]'")
    named = {"weights": "name:our llava", "shelf": tmp_path / "shelf"}
    with start(model, **named) as one:
        stored = one.generate(PROMPT, images=[1, 2])
    url, environment = bucket
    streamed = start(url, env=environment, load_format="runai_streamer", **named)
    check(streamed.generate(PROMPT, images=[1, 2]), stored, ALL)


@pytest.mark.slow
def test_engines_whose_processors_differ_share_text_only(
    start: Callable[..., Engine], model: Path, tmp_path: Path
) -> None:
    """The file is changed in place: the path and the weights stay what they were."""
    there = shutil.copytree(model, tmp_path / "llava")
    uuids = {"uuids": ["cat", "dog"], "cache_salt": "theirs"}
    with start(there) as before:
        stored = before.generate(PROMPT, images=[5, 6])
        before.generate(PROMPT, images=[5, 6], **uuids)
    file = there / "preprocessor_config.json"
    settings = json.loads(file.read_text()) | {"image_mean": [0.1] * 3, "image_std": [0.9] * 3}
    file.write_text(json.dumps(settings))
    after, without = start(there), start(there, core=1, shelf=None)
    expected = without.generate(PROMPT, images=[5, 6])
    assert expected.tokens != stored.tokens
    check(after.generate(PROMPT, images=[5, 6]), expected, TEXT)
    check(after.generate(PROMPT, images=[5, 6], **uuids), expected, TEXT)


@pytest.mark.slow
def test_what_the_encoder_made_with_earlier_weights_is_not_stored(
    start: Callable[..., Engine], model: Path, tmp_path: Path
) -> None:
    """vLLM keeps the outputs of its encoder when weights are loaded into a running engine."""
    trainer = {"worker_extension_cls": "tests.vllm.trainer_extension.TrainerExtension"}
    shelf = ShelfFiles(tmp_path / "shelf")
    trained = start(model, shelf=shelf.root, **trainer)
    without = start(model, shelf=None, core=1, **trainer)

    def both(op: str, **arguments: Any) -> None:
        for engine in (trained, without):
            engine.call(op, **arguments)
            engine.reset_prefix_cache()

    stored = trained.generate(PROMPT, images=[1, 2])
    both("worker", method="load_projector", seed=3)
    # Its steps are enough to compare the weights.
    trained.generate([7] * 20, max_tokens=24)
    stale = trained.generate(PROMPT, images=[1, 2])
    assert stale.shelf_tokens == 0
    before = shelf.objects()
    count = 6 * int(min(before).stem.rpartition("of")[2])
    both("reset_encoder_cache")
    expected = without.generate(PROMPT, images=[1, 2])
    assert stored.tokens != expected.tokens
    for hit in (0, ALL):
        trained.reset_prefix_cache()
        check(trained.generate(PROMPT, images=[1, 2]), expected, hit, NEAR_TIE)
        until(lambda: len(shelf.objects() - before) == count, "all chunks")


def wait_chunks(shelf: ShelfFiles, count: int) -> None:
    """Wait until so many chunks are on a shelf, and no more."""

    def are_there() -> bool:
        found = shelf.objects()
        return bool(found) and len(found) == count * int(min(found).stem.rpartition("of")[2])

    until(are_there, f"{count} chunks")


@pytest.mark.slow
@pytest.mark.parametrize("of_encoder", [False, True])
def test_adapters_beside_images(
    start: Callable[..., Engine], tmp_path: Path, of_encoder: bool
) -> None:
    """Also where another adapter is loaded under the name of one that saw these images."""
    model = make_llava(tmp_path / "llava", "full")
    shapes = attention_shapes("language_model.model.") | (PROJECTOR if of_encoder else {})
    one = make_adapter(tmp_path / "one", 1, shapes)
    two = make_adapter(tmp_path / "two", 2, shapes)
    copied = shutil.copytree(one, tmp_path / "a copy")
    options = {
        "enable_lora": True,
        "max_lora_rank": RANK,
        "enable_tower_connector_lora": of_encoder,
    }
    shelf = ShelfFiles(tmp_path / "shelf")
    with_shelf = start(model, shelf=shelf.root, **options)
    without = start(model, shelf=None, core=1, **options)

    def see(
        engine: Engine, number: int, path: Path, name: str, images: tuple[int, ...] = (1, 2)
    ) -> Answer:
        lora = {"lora_name": name, "lora_int_id": number, "lora_path": str(path)}
        engine.reset_prefix_cache()
        return engine.generate(PROMPT, images=images, lora=lora)

    expected = see(without, 1, one, "one"), see(without, 2, two, "two")
    assert expected[0].tokens != expected[1].tokens
    for number, (path, answer) in enumerate(zip((one, two), expected, strict=True), 1):
        # Loads the adapter, so that the worker knows its digest when there is something to store.
        lora = {"lora_name": "an adapter", "lora_int_id": number, "lora_path": str(path)}
        with_shelf.generate([7] * 20, lora=lora)
        check(see(with_shelf, number, path, "an adapter"), answer, 0, NEAR_TIE)
        wait_chunks(shelf, 6 * number)
        assert see(with_shelf, number, path, "an adapter").shelf_tokens == ALL
    check(see(with_shelf, 3, copied, "another name"), expected[0], ALL, NEAR_TIE)
    assert see(with_shelf, 3, copied, "another name", (1, 3)).shelf_tokens == FIRST_IMAGE
    with_shelf.reset_prefix_cache()
    assert with_shelf.generate(PROMPT, images=[1, 2]).shelf_tokens == 0
    for engine in (with_shelf, without):
        engine.stop(at_once=True)


@pytest.mark.slow
def test_images_in_a_cache_that_is_too_small(
    start: Callable[..., Engine], model: Path, tmp_path: Path
) -> None:
    """Requests are preempted, and their images encoded again: the encoder's cache holds one."""
    # 29 blocks of 128 tokens: two prompts of 14 blocks, but not their answers.
    small = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 384, "max_model_len": 2048}
    shelf = ShelfFiles(tmp_path / "shelf")
    with_shelf = start(model, shelf=shelf.root, **small)
    without = start(model, shelf=None, core=1, **small)
    requests = [
        {"prompt": prompt_with_images(10 + index), "images": [index, 20 + index], "max_tokens": 110}
        for index in range(6)
    ]

    def all_at_once(engine: Engine) -> list[Answer]:
        engine.reset_prefix_cache()
        before = engine.metrics()["vllm:num_preemptions_total"]
        answers = [one.result(300) for one in [engine.submit(**request) for request in requests]]
        assert engine.metrics()["vllm:num_preemptions_total"] > before
        return answers

    alone = [without.generate(**request) for request in requests]
    control = all_at_once(without)
    for request, answer in zip(requests[:2], alone, strict=False):
        assert_same(with_shelf.generate(**request), answer, NEAR_TIE)
    wait_chunks(shelf, 12)
    assert_same_up_to_ties(all_at_once(with_shelf), alone, control)
    wait_chunks(shelf, 36)
    assert_same_up_to_ties(all_at_once(with_shelf), alone, control)
    for request, answer in zip(requests, alone, strict=True):
        with_shelf.reset_prefix_cache()
        found = with_shelf.generate(**request)
        assert found.shelf_tokens == ALL
        assert_same(found, answer, NEAR_TIE)
    shelf.check_all()
    for engine in (with_shelf, without):
        engine.stop(at_once=True)
