"""The ledger of everything in vLLM that could shape KV is complete.

Each name of the installed vLLM, and of the recorded versions, has a row. What opens in a
model's folder is watched while a real engine starts.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm import record_inputs
from tests.vllm.record_inputs import LEDGER, VERDICTS
from tests.vllm.record_signatures import RECORDS

RECORDED = ("0.32.0", "0.33.0")

#: Starts an engine, and prints which files Python opened below the model's folder.
OPENING = """
import json, os, sys
folder, opened = sys.argv[1], set()

def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        path = os.path.abspath(os.fsdecode(arguments[0]))
        if path.startswith(folder + os.sep) and not os.path.isdir(path):
            opened.add(os.path.relpath(path, folder))

sys.addaudithook(watch)
from vllm import LLM, SamplingParams, TokensPrompt
llm = LLM(folder, enforce_eager=True, max_model_len=128, gpu_memory_utilization=0.2)
llm.generate(TokensPrompt(prompt_token_ids=[1, 2, 3]), SamplingParams(max_tokens=1))
print("opened", json.dumps(sorted(opened)), flush=True)
llm.llm_engine.engine_core.shutdown()
"""


@pytest.fixture(scope="module")
def ledger() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(LEDGER.read_text())
    return found


def recorded(version: str) -> set[str]:
    return set(json.loads((RECORDS / f"{version}.json").read_text())["inputs"])


@pytest.mark.parametrize("version", RECORDED)
def test_every_name_has_a_row(ledger: dict[str, Any], version: str) -> None:
    """That the record has all names of the installed version, ``test_signatures.py`` tests."""
    names = recorded(version)
    assert len(names) > 1150
    missing = names - ledger["names"].keys()
    assert not missing, "run record_signatures.py, and give these names a group"


def test_rows_are_about_names_that_exist(ledger: dict[str, Any]) -> None:
    assert ledger["names"].keys() == set.union(*map(recorded, RECORDED))
    kinds = Counter(name.partition(" ")[0] for name in ledger["names"])
    assert kinds.keys() == {"config", "env", "request", "file"}
    assert kinds["config"] >= 595
    assert kinds["env"] > 306
    assert kinds["request"] >= 65


def test_every_row_has_a_verdict_and_a_reason(ledger: dict[str, Any]) -> None:
    groups = ledger["groups"]
    assert set(ledger["names"].values()) == groups.keys()
    assert {group["verdict"] for group in groups.values()} == set(VERDICTS)
    for name, group in groups.items():
        assert group.keys() == {"verdict", "reason"}
        assert group["reason"].endswith("."), name


def test_new_names_are_written_without_a_group(tmp_path: Path, ledger: dict[str, Any]) -> None:
    file = tmp_path / "ledger.json"
    file.write_text(LEDGER.read_text())
    record_inputs.write(ledger["names"], file)
    assert file.read_text() == LEDGER.read_text()
    record_inputs.write(["config Fresh.field"], file)
    written = json.loads(file.read_text())
    assert written["names"].pop("config Fresh.field") is None
    assert written == ledger


def test_names_are_found_however_they_are_read(tmp_path: Path) -> None:
    from tests.vllm.record_signatures import Source

    for file, content in {
        "_version.py": "version = '9.8.7'",
        "config/cache.py": "class CacheConfig:\n    a: int = 1\n    b = 2\n    def c(self): ...",
        "sampling_params.py": "class SamplingParams:\n    n: int\nclass Other:\n    m: int",
        "envs.py": "environment_variables: dict = {'LISTED': 1}",
        "v1/a.py": (
            "import os\nNAMED = 'BY_NAME'\n"
            "os.environ['INDEX'], os.environ.get('GET'), os.getenv('GETENV', '1')\n"
            "env_flag('FLAG')\n"
            "'ASKED' in os.environ, os.environ[NAMED], os.environ[unknown()]\n"
            "for each in ('ONE', 'TWO'): os.environ.pop(each)\n"
            "'a.json', f'{x}/b.bin', 'no file.json', 'vllm.a.py', '.pt'\n"
        ),
        "benchmarks/b.py": "'unseen.json'",
    }.items():
        path = tmp_path / "vllm" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    found = record_inputs.names(Source(tmp_path))
    variables = {"INDEX", "GET", "GETENV", "FLAG", "ASKED", "BY_NAME", "ONE", "TWO", "LISTED"}
    assert found == {
        "config CacheConfig.a",
        "request SamplingParams.n",
        *(f"env {name}" for name in variables),
        "env unknown() in vllm/v1/a.py",
        *(f"file {name}" for name in ("a.json", "*/b.bin", *record_inputs.OF_TRANSFORMERS)),
    }


@pytest.mark.slow
@pytest.mark.real
def test_every_file_that_an_engine_opens_has_a_row(tmp_path: Path, ledger: dict[str, Any]) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from examples.models.make_model import make_model

    model = make_model(tmp_path / "model", "tiny")
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(model)
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    done = subprocess.run(
        [sys.executable, "-c", OPENING, str(model)],
        check=False,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("opened ")]
    opened = json.loads(line.removeprefix("opened "))
    assert {"config.json", "generation_config.json", "tokenizer_config.json"} <= set(opened)
    rows = [name.partition(" ")[2] for name in ledger["names"] if name.startswith("file ")]
    # Patterns such as *.json are no names.
    named = [row for row in rows if not row.startswith("*")]
    for file in opened:
        assert any(fnmatch.fnmatch(file, row) for row in named), file
