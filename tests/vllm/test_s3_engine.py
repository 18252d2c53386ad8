"""Real engines that share a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from copy_tools import Aws
from filled import contents
from fleet import Engines
from harness import SHELF_CONNECTOR, Answer, Engine, assert_same
from servers import BUCKET, S3Server, command, rclone_s3
from shelf_files import ShelfFiles

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(command("rclone") is None, reason="rclone is not installed"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    pytest.importorskip("obstore", reason="obstore is missing: pip install 'kvshelf[s3]'")
    with rclone_s3(tmp_path_factory.mktemp("bucket")) as server:
        yield server


def start(engines: Engines, name: str, path: str, **options: Any) -> Engine:
    return engines.start(
        name,
        model=engines.places.model,
        connector=SHELF_CONNECTOR,
        extra_config={"shared_storage_path": path, **options},
        core=len(name) % 2,
    )


def test_engines_share_a_bucket_and_its_copy(
    engines: Engines,
    server: S3Server,
    reference: Callable[..., Answer],
    prompt: Callable[[int], list[int]],
) -> None:
    options = {"storage_options": server.options()}
    tokens = prompt(1000)
    assert server.folder is not None
    shelf = ShelfFiles(server.folder / BUCKET / "kv")
    with start(engines, "to a bucket", f"s3://{BUCKET}/kv", **options) as writer:
        assert writer.generate(tokens).shelf_tokens == 0
        shelf.wait_stored(tokens)
    with start(engines, "from a bucket", f"s3://{BUCKET}/kv", **options) as reader:
        answer = reader.generate(tokens)
        assert answer.shelf_tokens == 768
        assert_same(answer, reference(tokens))
        # The server dies in the middle: requests are computed, and the engine goes on.
        server.process.kill()
        reader.reset_prefix_cache()
        assert_same(reader.generate(tokens), reference(tokens))
    # What the server kept is a shelf itself.
    with start(engines, "from its folder", str(Path(shelf.root))) as local:
        answer = local.generate(tokens)
        assert answer.shelf_tokens == 768
        assert_same(answer, reference(tokens))


def test_a_directory_is_synced_to_a_bucket_and_back(
    engines: Engines,
    reference: Callable[..., Answer],
    prompt: Callable[[int], list[int]],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tokens, more = prompt(1000), prompt(600)
    here = ShelfFiles(tmp_path / "here")
    with rclone_s3(tmp_path_factory.mktemp("synced")) as server:
        aws = Aws(server)
        with start(engines, "to a directory", str(here.root)) as writer:
            assert writer.generate(tokens).shelf_tokens == 0
            here.wait_stored(tokens)
        before = contents(here.root)
        assert len(aws.copy(here.root, "s3:kv")) == len(before)
        assert server.folder is not None
        there = ShelfFiles(server.folder / BUCKET / "kv")
        options = {"storage_options": server.options()}
        with start(engines, "from what was synced", f"s3://{BUCKET}/kv", **options) as reader:
            answer = reader.generate(tokens)
            assert answer.shelf_tokens == 768
            assert_same(answer, reference(tokens))
            assert reader.generate(more).shelf_tokens == 0
            there.wait_stored(more)
        # Back comes only what the second engine stored; nothing goes up again.
        brought = aws.copy("s3:kv", here.root)
        assert len(brought) == len(here.objects()) - (len(before) - 1) > 0
        assert aws.copy(here.root, "s3:kv") == []
    assert contents(here.root).items() >= before.items()
    assert contents(here.root) == contents(there.root)
    with start(engines, "synced back", str(here.root)) as third:
        for one, hit in ((tokens, 768), (more, 512)):
            answer = third.generate(one)
            assert answer.shelf_tokens == hit
            assert_same(answer, reference(one))


def test_a_disk_tier_serves_while_the_bucket_is_away(
    engines: Engines,
    tmp_path: Path,
    reference: Callable[..., Answer],
    prompt: Callable[[int], list[int]],
) -> None:
    pytest.importorskip("obstore", reason="obstore is missing: pip install 'kvshelf[s3]'")
    near = tmp_path / "near"
    tokens = prompt(1000)
    with rclone_s3(tmp_path) as server:
        options = {
            "storage_options": server.options(),
            "disk_tier": {"path": str(near), "max_bytes": "1GiB"},
        }
        with start(engines, "through a tier", f"s3://{BUCKET}/kv", **options) as writer:
            assert writer.generate(tokens).shelf_tokens == 0
            assert server.folder is not None
            ShelfFiles(server.folder / BUCKET / "kv").wait_stored(tokens)
            tier = ShelfFiles(near)
            tier.wait_stored(tokens)
    # The server is gone when the second engine starts.
    with start(engines, "from a tier", f"s3://{BUCKET}/kv", **options) as reader:
        answer = reader.generate(tokens)
        assert answer.shelf_tokens == 768
        assert_same(answer, reference(tokens))
        # A prompt that is not near is computed.
        other = prompt(900)
        assert_same(reader.generate(other), reference(other))
    assert tier.check_all() > 0
