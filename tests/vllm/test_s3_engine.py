"""Real engines that share a bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.backends.copy_tools import Aws
from tests.faults.s3proxy import STALLED, S3Proxy
from tests.support.engines import Answer, Engine, EngineError, assert_same
from tests.support.filled import contents
from tests.support.fleet import Engines
from tests.support.servers import BUCKET, SECRET, S3Server, command, free_port, rclone_s3
from tests.support.waiting import until
from tests.vllm.shelf_files import ShelfFiles

#: How long a storage that is back may take to be used again: a rest, or the pause between attempts.
BACK_SECONDS = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(command("rclone") is None, reason="rclone is not installed"),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    # One for each test: tests kill it.
    pytest.importorskip("obstore", reason="obstore is missing: pip install 'kvshelf[s3]'")
    with rclone_s3(tmp_path / "bucket") as server:
        yield server


def start(engines: Engines, name: str, path: str, **options: Any) -> Engine:
    return engines.on_shelf(name, path, options, core=len(name) % 2)


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
    prompt: Callable[[int], list[int]],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tokens, more = prompt(1000), prompt(600)
    here = ShelfFiles(tmp_path / "here")
    with rclone_s3(tmp_path_factory.mktemp("synced")) as server:
        aws = Aws(server)
        assert server.folder is not None
        there = ShelfFiles(server.folder / BUCKET / "kv")
        options = {"storage_options": server.options()}
        local = start(engines, "to a directory", str(here.root))
        remote = start(engines, "from what is synced", f"s3://{BUCKET}/kv", **options)
        with local as writer, remote as reader:
            computed = writer.generate(tokens)
            assert computed.shelf_tokens == 0
            here.wait_stored(tokens)
            before = contents(here.root)
            assert len(aws.copy(here.root, "s3:kv")) == len(before)
            loaded = reader.generate(tokens)
            assert loaded.shelf_tokens == 768
            assert_same(loaded, computed)
            computed = reader.generate(more)
            assert computed.shelf_tokens == 0
            there.wait_stored(more)
            # Back comes only what the second engine stored; nothing goes up again.
            brought = aws.copy("s3:kv", here.root)
            assert len(brought) == len(here.objects()) - (len(before) - 1) > 0
            assert aws.copy(here.root, "s3:kv") == []
            assert contents(here.root).items() >= before.items()
            assert contents(here.root) == contents(there.root)
            loaded = writer.generate(more)
            assert loaded.shelf_tokens == 512
            assert_same(loaded, computed)


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


def eventually_shared(
    engine: Engine, tokens: list[int], expected: Answer, shelf_tokens: int = 768
) -> None:
    """Ask until a prompt comes from the shelf; every answer must be right."""
    deadline = time.monotonic() + BACK_SECONDS
    while True:
        engine.reset_prefix_cache()
        answer = engine.generate(tokens)
        assert_same(answer, expected)
        if answer.shelf_tokens == shelf_tokens:
            return
        assert time.monotonic() < deadline, "sharing does not come back"


def test_a_server_that_is_killed_in_the_middle_of_a_load(
    engines: Engines,
    tmp_path: Path,
    reference: Callable[..., Answer],
    prompt: Callable[[int], list[int]],
) -> None:
    tokens, later = prompt(1000), prompt(1000)
    port = free_port()
    with rclone_s3(tmp_path, port) as server, S3Proxy(server.endpoint) as proxy:
        assert server.folder is not None
        shelf = ShelfFiles(server.folder / BUCKET / "kv")
        options = {"storage_options": server.options(endpoint_url=proxy.endpoint)}
        with start(engines, "when a server dies", f"s3://{BUCKET}/kv", **options) as engine:
            assert engine.generate(tokens).shelf_tokens == 0
            shelf.wait_stored(tokens)
            # A look-up may still remember that nothing was there a moment ago.
            eventually_shared(engine, tokens, reference(tokens))
            engine.reset_prefix_cache()
            proxy.add(STALLED, "read", "*safetensors*", times=1)
            request = engine.submit(tokens)
            until(lambda: proxy.met > 0, "half of an object has come")
            server.process.kill()
            server.process.wait()
            proxy.clear()
            assert_same(request.result(), reference(tokens))
            # Nothing can be stored either.
            assert_same(engine.generate(later), reference(later))
            with rclone_s3(tmp_path, port):
                eventually_shared(engine, tokens, reference(tokens))


def test_an_endpoint_that_answers_later(
    engines: Engines,
    tmp_path: Path,
    reference: Callable[..., Answer],
    prompt: Callable[[int], list[int]],
) -> None:
    tokens = prompt(1000)
    port = free_port()
    with rclone_s3(tmp_path, port) as server:
        options = {"storage_options": server.options()}
    with start(engines, "without an endpoint", f"s3://{BUCKET}/kv", **options) as engine:
        for _ in range(2):
            answer = engine.generate(tokens)
            assert answer.shelf_tokens == 0
            assert_same(answer, reference(tokens))
            engine.reset_prefix_cache()
        log = engine.log_path.read_text()
        assert f"is {server.endpoint} up and reachable?" in log
        assert "until then the engine runs without it" in log
        assert SECRET not in log
        with rclone_s3(tmp_path, urlsplit(server.endpoint).port or 0):
            eventually_shared(engine, tokens, reference(tokens))


def test_an_engine_with_a_wrong_secret_does_not_start(engines: Engines, server: S3Server) -> None:
    wrong = server.options(secret="wrong wrong wrong")
    engine = start(engines, "wrong secret", f"s3://{BUCKET}/kv", storage_options=wrong)
    with pytest.raises(EngineError):
        engine.wait_ready()
    log = engine.log_path.read_text()
    assert "the access key, its secret or its token is not accepted" in log
    assert "wrong wrong wrong" not in log
