"""``kvshelf seed`` with a real vLLM, and another engine that finds what it stored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.models.make_model import make_model
from tests.support.engines import assert_same
from tests.support.fleet import Engines, MakePrompt, Reference
from tests.vllm.shelf_files import ShelfFiles

pytestmark = pytest.mark.slow

ENGINE = {
    "enforce_eager": True,
    "max-model-len": 4096,
    "kv_cache_memory_bytes": 128 << 20,
    "gpu_memory_utilization": 0.1,
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def seed(*arguments: object, code: int = 0) -> tuple[dict[str, Any], str]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvshelf", "seed", "--json"),
            *(f"--engine-arg={name}={json.dumps(value)}" for name, value in ENGINE.items()),
            "--engine-arg=seed=0",
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout or "{}"), done.stderr


def test_what_was_seeded_is_found_by_another_engine(
    engines: Engines, reference: Reference, prompt: MakePrompt, tmp_path: Path
) -> None:
    # The same weights as the model of the other engine, and a tokenizer.
    model = make_model(tmp_path / "model", "tiny", tokenizer=True)
    shelf = ShelfFiles(tmp_path / "shelf")
    shared, other = prompt(600), prompt(300)
    text, said = "A long text. " * 30, "Tell me. " * 40
    file = tmp_path / "prompts.jsonl"
    lines: list[Any] = [
        shared,
        {"tokens": shared + other, "cache_salt": ""},
        {"tokens": other, "cache_salt": "tenant"},
        text,
        {"messages": [{"role": "user", "content": said}], "chat_template": TEMPLATE},
        [5] * 20,
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    first, _ = seed(shelf.root, file, "--model", model)
    assert (first["prompts"], first["stored"], first["short"]) == (6, 5, 1)
    assert first["chunks"] == 3 + 1 + len(text) // 256 + len(said) // 256
    assert shelf.check_all() == len(shelf.objects()) > 0
    shelf.wait_stored(other, salt="tenant", timeout=0)

    again, _ = seed(shelf.root, file, "--model", model)
    assert (again["existed"], again["short"], again["stored"]) == (5, 1, 0)

    # Without an engine, the same texts and chats have the same chunks.
    pinned = subprocess.run(
        [
            *(sys.executable, "-m", "kvshelf", "pin", str(shelf.root), "seeded"),
            *(str(file), "--model", str(model), "--json"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert pinned.returncode == 0, pinned.stderr
    row = json.loads(pinned.stdout)
    assert row["chunks"] == row["stored"] == first["chunks"]

    # A line that only the model can tell is bad ends all before anything is computed.
    file.write_text("\n".join([json.dumps(prompt(600)), json.dumps([1] * 5000), "[999999999]"]))
    objects = shelf.objects()
    _, errors = seed(shelf.root, file, "--model", model, code=2)
    assert "2 bad lines" in errors
    assert "line 2: 5000 tokens, expected less than max_model_len, 4096" in errors
    assert "line 3: token 999999999" in errors
    assert shelf.objects() == objects

    with engines.on_shelf("after seeding", shelf.root, core=1) as engine:
        for tokens, salt, hit in ((shared + other, None, 768), (other, "tenant", 256)):
            answer = engine.generate(tokens, cache_salt=salt)
            assert answer.shelf_tokens == hit
            if salt is None:
                assert_same(answer, reference(tokens))
