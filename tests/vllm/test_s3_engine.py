"""Real engines that share a bucket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.sim.s3 import Answer, Request, ScriptedS3
from tests.support.engines import Engine, EngineError, assert_same, eventually_hits
from tests.support.fleet import Ask, Engines, MakePrompt, Reference
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
    pytest.importorskip("obstore", reason="obstore is missing: pip install '.[s3]'")
    with rclone_s3(tmp_path / "bucket") as server:
        yield server


def start(engines: Engines, name: str, path: str, **options: Any) -> Engine:
    return engines.on_shelf(name, path, options, core=len(name) % 2)


def test_engines_share_a_bucket_and_its_copy(
    engines: Engines, server: S3Server, ask: Ask, prompt: MakePrompt
) -> None:
    options = {"storage_options": server.options()}
    tokens = prompt(1000)
    assert server.folder is not None
    shelf = ShelfFiles(server.folder / BUCKET / "kv")
    with start(engines, "to a bucket", f"s3://{BUCKET}/kv", **options) as writer:
        assert writer.generate(tokens).shelf_tokens == 0
        shelf.wait_stored(tokens)
    with start(engines, "from a bucket", f"s3://{BUCKET}/kv", **options) as reader:
        ask(reader, tokens, 768)
        # The server dies in the middle: requests are computed, and the engine goes on.
        server.process.kill()
        reader.reset_prefix_cache()
        ask(reader, tokens)
    # What the server kept is a shelf itself.
    with start(engines, "from its folder", str(Path(shelf.root))) as local:
        ask(local, tokens, 768)


def test_a_disk_tier_serves_while_the_bucket_is_away(
    engines: Engines, tmp_path: Path, ask: Ask, prompt: MakePrompt
) -> None:
    pytest.importorskip("obstore", reason="obstore is missing: pip install '.[s3]'")
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
        ask(reader, tokens, 768)
        # A prompt that is not near is computed.
        other = prompt(900)
        ask(reader, other)
    assert tier.check_all() > 0


def test_a_server_that_is_killed_in_the_middle_of_a_load(
    engines: Engines, reference: Reference, ask: Ask, prompt: MakePrompt
) -> None:
    tokens, later = prompt(1000), prompt(1000)
    gate, stalled = threading.Event(), list[Request]()

    def stall(request: Request) -> Answer | None:
        if request.kind != "read" or not request.path.endswith(".safetensors") or stalled:
            return None
        stalled.append(request)
        return replace(store.answer(request), ends_after=1000, gate=gate)

    with ScriptedS3() as store:
        options = {"storage_options": store.options()}
        with start(engines, "when a server dies", f"s3://{BUCKET}/kv", **options) as engine:
            assert engine.generate(tokens).shelf_tokens == 0
            # Once the last of its three chunks is there, a look-up may still remember that nothing
            # was, a moment ago.
            eventually_hits(engine, tokens, reference(tokens), 768, BACK_SECONDS)
            engine.reset_prefix_cache()
            store.script = stall
            request = engine.submit(tokens)
            until(lambda: bool(stalled), "a part of an object has come")
            store.close()
            gate.set()
            assert_same(request.result(), reference(tokens))
            # Nothing can be stored either.
            ask(engine, later)
            store.script = lambda _: None
            store.reopen()
            eventually_hits(engine, tokens, reference(tokens), 768, BACK_SECONDS)


def test_an_endpoint_that_answers_later(
    engines: Engines, tmp_path: Path, reference: Reference, ask: Ask, prompt: MakePrompt
) -> None:
    tokens = prompt(1000)
    port = free_port()
    with rclone_s3(tmp_path, port) as server:
        options = {"storage_options": server.options()}
    with start(engines, "without an endpoint", f"s3://{BUCKET}/kv", **options) as engine:
        for _ in range(2):
            ask(engine, tokens, 0)
            engine.reset_prefix_cache()
        log = engine.log_path.read_text()
        assert f"is {server.endpoint} up and reachable?" in log
        assert "until then the engine runs without it" in log
        assert SECRET not in log
        with rclone_s3(tmp_path, urlsplit(server.endpoint).port or 0):
            eventually_hits(engine, tokens, reference(tokens), 768, BACK_SECONDS)


def test_an_engine_with_a_wrong_secret_does_not_start(engines: Engines, server: S3Server) -> None:
    wrong = server.options(secret="wrong wrong wrong")
    engine = start(engines, "wrong secret", f"s3://{BUCKET}/kv", storage_options=wrong)
    with pytest.raises(EngineError):
        engine.wait_ready()
    log = engine.log_path.read_text()
    assert "the access key, its secret or its token is not accepted" in log
    assert "wrong wrong wrong" not in log
