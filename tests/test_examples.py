"""The programs in ``examples/`` that start engines run, and do what they say."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.models.make_model import make_model, recipe_of

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 900
#: What examples wait for. Machines are busy: what is late is waited for.
PATIENT = (
    *("IDENTITY_WAIT", "LOOKUP_WAIT", "SHUTDOWN_DRAIN", "HANDOVER_WAIT"),
    *("PROBE_DEADLINE", "READ_DEADLINE", "WRITE_DEADLINE"),
)
ENVIRONMENT = os.environ | {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "COLUMNS": "120",
    **{f"KVSHELF_{name}_S": "60" for name in PATIENT},
}
DEMO = ["examples/demo.py", "--recipe", "tiny", "--dtype", "float32", "--folder", "demo"]


def output_of(folder: Path, program: str, *arguments: object, **variables: str) -> str:
    """Run a program to its end; return what it printed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / program), *map(str, arguments)],
        cwd=folder,
        env=ENVIRONMENT | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def loaded_tokens(output: str) -> list[int]:
    return [int(count) for count in re.findall(r"(\d+) of them from the shelf", output)]


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    output = output_of(tmp_path, *DEMO)
    assert len(re.findall(r"│\s+1,0\d\d │\s+1,024 │.* × │\s+yes", output)) == 4, output
    objects, megabytes = re.findall(r"On the shelf: (\d+) objects, ([\d.]+) MB", output)[0]
    assert (int(objects), float(megabytes)) == (8, pytest.approx(2.1, abs=0.2))


@pytest.mark.slow
def test_a_demo_that_is_ended_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / DEMO[0]), *DEMO[1:]]
    log = tmp_path / "demo" / "engine-1.log"
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT) as running:
        deadline = time.monotonic() + TIMEOUT
        while "EngineCore" not in (log.read_text() if log.exists() else ""):
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        running.send_signal(signal.SIGTERM)
    assert running.returncode == 143
    left = []
    for place in Path("/proc").glob("[0-9]*"):
        # A process may have ended meanwhile, or be another user's.
        with contextlib.suppress(OSError):
            if place.joinpath("cwd").readlink() == tmp_path:
                left.append(place.joinpath("cmdline").read_bytes().decode(errors="replace"))
    assert not list(filter(None, left))


@pytest.mark.slow
@pytest.mark.parametrize("program", ["offline", "openai_server"])
def test_prompts_that_share_a_document(tmp_path: Path, program: str) -> None:
    """About 2000 shared tokens are seven whole chunks."""
    arguments = (f"examples/{program}.py", "--shelf", "shelf")
    first, *others = loaded_tokens(output_of(tmp_path, *arguments))
    assert first == 0 and others
    # Chunks are published in the background, which may be late for the next request or two on a
    # busy machine; the last one finds them all, or else the first of another run.
    if others[-1] != 1792:
        others = loaded_tokens(output_of(tmp_path, *arguments))
    assert others[-1] == 1792
    shown = output_of(tmp_path, "examples/read_a_chunk.py", "shelf")
    assert "format: kvshelf/1" in shown
    assert [float(norm) > 0 for norm in re.findall(r"norm ([\d.]+)", shown)] == [True] * 2


@pytest.mark.slow
def test_disaggregated(tmp_path: Path) -> None:
    output = output_of(tmp_path, "examples/disaggregated/run.py")
    handed, own = output.split("on its own:")
    # Whole prompts are handed over; another request finds whole chunks.
    assert loaded_tokens(handed) == [1973, 1977]
    assert loaded_tokens(own) == [1792, 1792]
    assert "the answers are equal: True" in output


@pytest.mark.slow
def test_the_recipes_of_right_answers(tmp_path: Path) -> None:
    """Hits are those on the page; answers are equal where the page's are."""
    page = (ROOT / "docs" / "right-answers.md").read_text()
    recipes = re.findall(r"^\$ python (\S+) (.*)\n(.*)$", page, re.MULTILINE)
    assert len(recipes) == 5
    cores = sorted(os.sched_getaffinity(0))
    answers: dict[str, str] = {}
    for program, line, promised in recipes:
        arguments = line.replace("/tmp/kv", "kv").split()
        ranks = int(arguments[-1]) if "--tensor-parallel-size" in arguments else 1
        bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        output = output_of(tmp_path, program, *arguments, VLLM_CPU_OMP_THREADS_BIND=bound)
        assert loaded_tokens(output) == loaded_tokens(promised), line
        [answer] = re.findall(r"answer (\[.*\])", output)
        assert answers.setdefault(promised.partition("answer ")[2], answer) == answer, line
    assert len(set(answers.values())) == len(answers)


def test_make_model(tmp_path: Path) -> None:
    first = make_model(tmp_path / "model", "tiny")
    assert recipe_of(first) == "tiny"
    weights = (first / "model.safetensors").read_bytes()
    assert make_model(tmp_path / "model", "tiny") == first
    with pytest.raises(FileExistsError, match="seed 1"):
        make_model(tmp_path / "model", "tiny", seed=1)
    make_model(tmp_path / "model", "tiny", seed=1, replace=True)
    assert (first / "model.safetensors").read_bytes() != weights
    make_model(tmp_path / "model", "tiny", replace=True)
    assert (first / "model.safetensors").read_bytes() == weights
    with pytest.raises(ValueError, match="not made by a recipe"):
        recipe_of(tmp_path)
