"""Commands on the shelves of real engines: what they report, repair and delete."""

from __future__ import annotations

import json
import os
import time

import pytest

from tests.support.commands import report
from tests.support.engines import Answer, Engine, assert_same
from tests.support.fleet import Ask, Engines, MakePrompt
from tests.support.servers import BUCKET, S3Server, command
from tests.vllm.shelf_files import ShelfFiles

pytestmark = pytest.mark.slow

OLD = 1_700_000_000.0
DAY = 86400.0


def check_tools(
    engine: Engine,
    shelf: ShelfFiles,
    tokens: list[int],
    answer: Answer,
    *where: str,
    env: dict[str, str] | None = None,
) -> None:
    """Try the commands on what an engine stored, and go on with the engine after a repair."""
    chunks = shelf.wait_stored(tokens)
    folder = chunks[0][0].parents[2].name
    usage = report("ls", *where, "-n", folder, "--by", "age", env=env)
    assert [row["namespace"] for row in usage["namespaces"]] == [folder]
    assert sum(row["objects"] for row in usage["by"]["age"]) == usage["objects"]
    found = report("verify", *where, "-n", folder, env=env)
    assert (found["intact"], found["sound"]) == (usage["objects"], True)
    assert report("verify", *where, "--sample", "2", env=env)["intact"] == 2

    bad = chunks[1][0]
    data = bytearray(bad.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    os.utime(bad, (OLD, OLD))
    assert report("verify", *where, "-n", folder, code=1, env=env)["bad"] == 1
    assert report("verify", *where, "-n", folder, "--repair", "--yes", env=env)["moved"] == 1
    assert not bad.exists()

    engine.reset_prefix_cache()
    again = engine.generate(tokens)
    assert_same(again, answer)
    shelf.wait_stored(tokens)
    engine.reset_prefix_cache()
    assert_same(engine.generate(tokens), answer)
    assert report("verify", *where, "-n", folder, env=env)["sound"] is True


def check_gc(
    engine: Engine,
    shelf: ShelfFiles,
    prompt: MakePrompt,
    ask: Ask,
    *where: str,
    now: float,
    env: dict[str, str] | None = None,
) -> None:
    """Delete what an engine stored, by age and by size, and go on with the engine.

    `now` is the storage's time.
    """
    unused, used = prompts = [prompt(1100) for _ in range(2)]
    for tokens in prompts:
        engine.generate(tokens)
    stored = {id(tokens): shelf.wait_stored(tokens) for tokens in prompts}
    before = shelf.objects()
    old = {path for chunk in stored[id(unused)] for path in chunk}
    for path in before:
        then = now - (3 if path in old else 1) * DAY
        os.utime(path, (then, then))

    planned = report("gc", *where, "--max-age", "60h", env=env)
    assert planned["dry_run"] is True
    assert shelf.objects() == before
    done = report("gc", *where, "--max-age", "60h", "--yes", env=env)
    assert done["failed"] == 0
    assert done["deleted"]["age"]["files"] == len(old)
    assert not {"tail", "group", "size"} & set(done["deleted"])
    assert shelf.objects() == before - old
    for tokens in prompts:
        # What the engine remembers to be there is a miss.
        engine.reset_prefix_cache()
        answer = ask(engine, tokens)
        assert answer.shelf_tokens == (1024 if tokens is used else 0)
        shelf.wait_stored(tokens)

    most = f"{report('ls', *where, env=env)['bytes'] // 2}B"
    done = report("gc", *where, "--max-bytes", most, "--yes", env=env)
    assert 0 < report("ls", *where, env=env)["bytes"] <= done["bytes_after"] <= done["bytes"] // 2
    assert report("verify", *where, env=env)["sound"] is True
    loaded = engine.counters()["loaded_tokens"]
    for tokens in prompts:
        engine.reset_prefix_cache()
        ask(engine, tokens)
    # Of a bucket the engine remembers for a minute what was there: what it loads tells.
    engine.generate([7] * 20, max_tokens=1)
    assert engine.counters()["loaded_tokens"] - loaded < 2 * 1024
    assert not engine.log_lines("Traceback")


def test_in_a_directory(
    engine: Engine, shelf: ShelfFiles, ask: Ask, prompt: MakePrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(1000)
    answer = ask(engine, tokens)
    check_tools(engine, shelf, tokens, answer, str(shelf.root))
    # What was written within a day is in use, whatever its times say: the commands run days later.
    real = time.time
    now = real() + 4 * DAY
    # Both clocks: while they differ nothing is deleted because of its age.
    monkeypatch.setattr("kvshelf.cli.deletion.storage_time", lambda _: now)
    monkeypatch.setattr(time, "time", lambda: real() + 4 * DAY)
    check_gc(engine, shelf, prompt, ask, str(shelf.root), now=now)


@pytest.mark.slow
@pytest.mark.skipif(command("rclone") is None, reason="rclone is not installed")
def test_in_a_bucket(engines: Engines, server: S3Server, ask: Ask, prompt: MakePrompt) -> None:
    assert server.folder is not None
    tokens = prompt(1000)
    url = f"s3://{BUCKET}/kv"
    env = {"KVSHELF_STORAGE_OPTIONS": json.dumps(server.options())}
    with engines.on_shelf(
        "its shelf is inspected", url, {"storage_options": server.options()}, core=1
    ) as engine:
        answer = ask(engine, tokens)
        shelf = ShelfFiles(server.folder / BUCKET / "kv")
        check_tools(engine, shelf, tokens, answer, url, env=env)
        check_gc(engine, shelf, prompt, ask, url, now=time.time(), env=env)
