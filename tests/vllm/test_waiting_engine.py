"""A real engine with room for one request: what the next one needs is read while it waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.delaying_proxy import DelayingProxy
from tests.support.engines import assert_same
from tests.support.fleet import Engines, MakePrompt, Reference
from tests.support.servers import BUCKET, S3Server, command
from tests.support.waiting import until
from tests.vllm.shelf_files import ShelfFiles

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(command("rclone") is None, reason="rclone is not installed"),
]


def test_a_request_that_waits_finds_its_objects_in_memory(
    engines: Engines, server: S3Server, reference: Reference, prompt: MakePrompt
) -> None:
    assert server.folder is not None
    shelf = ShelfFiles(Path(server.folder) / BUCKET / "kv")
    host, _, port = server.endpoint.rpartition("/")[2].partition(":")
    first, second, dropped = prompt(300), prompt(1000), prompt(800)
    with DelayingProxy(host, int(port), 0.02) as proxy:
        far = {**server.options(), "endpoint_url": f"http://127.0.0.1:{proxy.port}"}
        with engines.on_shelf(
            "one at a time",
            f"s3://{BUCKET}/kv",
            {"storage_options": far},
            # On one core: threads that wait for each other would keep all cores from the reads.
            core=1,
            max_num_seqs=1,
            max_model_len=8192,
        ) as engine:
            stored = 0
            for tokens in (second, dropped):
                engine.generate(tokens)
                stored += sum(len(chunk) for chunk in shelf.wait_stored(tokens))
            engine.reset_prefix_cache(connector=True)
            before = engine.counters()
            # Longer than all reads take on a busy machine; nothing is read ahead behind its end.
            running = engine.submit(first, max_tokens=7800)
            running.wait_first_token()
            waiting, leaving = engine.submit(second), engine.submit(dropped)

            def grown(name: str) -> float:
                return engine.counters().get(name, 0) - before.get(name, 0)

            until(lambda: grown("prefetched_objects") == stored, "all that waits in memory")
            assert grown("loaded_bytes") == 0
            leaving.abort()
            requests = proxy.requests()
            running.abort()
            assert_same(waiting.result(), reference(second))
            # The look-ups were done and the objects read: nothing was asked for any more, ...
            assert proxy.requests()["GET"] == requests["GET"]
            objects = sum(len(chunk) for chunk in shelf.wait_stored(second))
            engine.generate(prompt(5))
            assert grown("memory_tier_loaded_objects") == objects
            # ... and what the request that left was to find there is given back.
            assert grown("prefetched_unused_objects") == stored - objects
