"""Two vLLM engines and one shelf: the second engine does not compute what the first one did.

Engine 1 answers some prompts that share a long document. Each is computed from the first token to
the last ("cold"), and on the way the document's KV goes to the shelf. Then engine 1 ends. Engine 2,
a new process that has only the shelf in common with the first, gets the same prompts ("warm"); its
own prefix cache is emptied before each, so whatever it does not compute comes from the shelf.

Run it: ``make demo``, or ``python examples/demo.py`` where vLLM and kvshelf are installed. The exit
code is 0 if all answers are equal and something was loaded, 1 if not, 2 if an engine failed.

Processors without bfloat16 instructions compute with it many times slower than with float32. The
demo measures which of the two is faster here, and takes a smaller model where both are slow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from models.make_model import RECIPES, make_model
from rich.console import Console
from rich.table import Table

CHUNK = 256
DTYPES = ("bfloat16", "float32")
ANSWER = 8
DOCUMENT = {"demo": 4096, "tiny": 1024}
# With random weights two next tokens can be nearly tied, and then rounding, which differs between
# kinds of processors and sizes of batches, picks one. No answer to these questions is such a tie:
# the best token is at least 0.37 nats ahead.
QUESTIONS = {"demo": (14, 12, 1, 2), "tiny": (23, 5, 3, 17)}
#: Floating-point operations of the first token of one prompt of the larger model, about, and how
#: many seconds they may take: four prompts and two engines then end within three minutes.
DEMO_OPERATIONS = 0.7e12
DEMO_SECONDS = 20.0


def make_prompts(recipe: str) -> tuple[list[int], list[list[int]]]:
    """Return (a prompt to warm up with, prompts that share a document but are not equal)."""
    vocab = RECIPES[recipe].vocab

    def tokens(seed: int, count: int) -> list[int]:
        generator = random.Random(seed)
        return [generator.randrange(2, vocab) for _ in range(count)]

    document = tokens(0, DOCUMENT[recipe])
    questions = [tokens(seed, 20 + 4 * place) for place, seed in enumerate(QUESTIONS[recipe])]
    return tokens(-1, 200), [document + question for question in questions]


def operations_per_second(dtype: torch.dtype) -> float:
    """Measure how fast this machine multiplies matrices as the model has them."""
    left, right = torch.ones(512, 512, dtype=dtype), torch.ones(512, 1024, dtype=dtype)
    left @ right
    times = []
    for _ in range(7):
        started = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - started)
    return 2 * 512 * 512 * 1024 / min(times)


def suited_to_this_machine() -> tuple[str, str]:
    """Return the model and the dtype that answer the demo's prompts in reasonable time here."""
    speeds = {name: operations_per_second(getattr(torch, name)) for name in DTYPES}
    # Processors with bfloat16 instructions are faster with them, others several times slower.
    dtype = "float32" if speeds["float32"] > 2 * speeds["bfloat16"] else "bfloat16"
    slow = DEMO_OPERATIONS / speeds[dtype] > DEMO_SECONDS
    return "tiny" if slow else "demo", dtype


# The engine's side: a process of its own for each engine.


def run_engine(job: dict[str, Any], report: TextIO) -> None:
    """Start an engine, answer the prompts one after the other, and end.

    `report` gets a line of JSON when the engine is ready and one for each answer.
    """

    def tell(**message: Any) -> None:
        print(json.dumps(message), file=report, flush=True)

    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
        max_model_len=RECIPES[job["recipe"]].max_position,
        kv_cache_memory_bytes=512 << 20,
        gpu_memory_utilization=0.1,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVShelfConnector",
            kv_connector_module_path="kvshelf.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "shared_storage_path": job["shelf"],
                "chunk_size": CHUNK,
                # The demo counts hits, so a machine that computes fast must load them, too.
                "admission": "always",
                # For as long as the weights may take on a machine that is busy with other things.
                "identity_wait_s": 60.0,
            },
        ),
    )
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    # It waits until the engine knows what its weights are called on the shelf. Requests that must
    # not read any cache don't: a small model has answered them all before.
    llm.generate({"prompt_token_ids": job["warm_up"]}, params, use_tqdm=False)
    params.skip_reading_prefix_cache = job["compute_everything"]
    tell(ready=True)
    for prompt in job["prompts"]:
        llm.reset_prefix_cache()
        [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        tell(
            tokens=list(output.outputs[0].token_ids),
            loaded=output.num_cached_tokens,
            ttft=output.metrics.first_token_latency,
        )


# The demo's side


class EngineFailedError(RuntimeError):
    """An engine's process ended before it had answered all prompts."""


@contextmanager
def engine_process(job: dict[str, Any], log: Path) -> Iterator[TextIO]:
    """Run :func:`run_engine` in a new process; yields the file of its reports."""
    reading, writing = os.pipe()
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
    }
    with log.open("wb") as output, os.fdopen(reading) as reports:
        process = subprocess.Popen(
            [sys.executable, __file__, "--engine", str(writing)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
            env=environment,
            start_new_session=True,
        )
        os.close(writing)
        assert process.stdin is not None
        try:
            with process.stdin:
                process.stdin.write(json.dumps(job).encode())
            yield reports
            process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ask(console: Console, name: str, job: dict[str, Any], log: Path) -> list[dict[str, Any]]:
    """Have a new engine answer all prompts, and show how far it is."""
    answers: list[dict[str, Any]] = []
    total = len(job["prompts"])
    started = time.monotonic()
    with console.status(f"{name} is starting …") as status, engine_process(job, log) as reports:
        for line in reports:
            report = json.loads(line)
            if "ready" in report:
                seconds = time.monotonic() - started
                console.print(f"{name} is ready after {seconds:.0f} s", style="dim")
            else:
                answers.append(report)
            status.update(f"{name} answers prompt {min(len(answers) + 1, total)} of {total} …")
            if len(answers) == total:
                status.update(f"{name} stops …")
    if len(answers) < total:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise EngineFailedError(f"{end}\n{name} failed; all of its log is in {log}")
    return answers


def shelf_content(shelf: Path) -> tuple[int, int]:
    """Return number and bytes of the objects on a shelf."""
    sizes = [path.stat().st_size for path in shelf.rglob("*.safetensors")]
    return len(sizes), sum(sizes)


def show(
    console: Console,
    prompts: list[list[int]],
    cold: list[dict[str, Any]],
    warm: list[dict[str, Any]],
    shelf: Path,
) -> bool:
    """Print the table; returns whether everything was as it should be."""
    table = Table(title="Time to first token (TTFT)", title_justify="left")
    table.add_column("prompt", justify="right")
    table.add_column("prompt tokens", justify="right")
    table.add_column("tokens from the shelf", justify="right")
    table.add_column("TTFT cold\nengine 1", justify="right")
    table.add_column("TTFT warm\nengine 2", justify="right")
    table.add_column("faster", justify="right")
    table.add_column("output equal", justify="center")
    equal = True
    for number, (prompt, before, after) in enumerate(zip(prompts, cold, warm, strict=True), 1):
        same = before["tokens"] == after["tokens"]
        equal &= same
        table.add_row(
            str(number),
            f"{len(prompt):,}",
            f"{after['loaded']:,}",
            f"{before['ttft'] * 1000:,.0f} ms",
            f"{after['ttft'] * 1000:,.0f} ms",
            f"{before['ttft'] / after['ttft']:.0f} ×",
            "[green]yes[/]" if same else "[red]no[/]",
        )
    console.print(table)
    objects, size = shelf_content(shelf)
    console.print(f"On the shelf: {objects} objects, {size / 1e6:,.1f} MB ({shelf})")
    expected = min(len(prompt) for prompt in prompts) // CHUNK * CHUNK
    loaded = all(answer["loaded"] >= expected for answer in warm)
    if not loaded:
        console.print("[red]Less was loaded from the shelf than had been stored.[/]")
    if not equal:
        console.print("[red]The answers are not equal.[/]")
    return equal and loaded


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Two vLLM engines, one shelf.")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="for model, shelf, logs")
    parser.add_argument(
        "--recipe", choices=sorted(DOCUMENT), help="which model; default: what suits this machine"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: the one that is faster here")
    parser.add_argument("--engine", type=int, metavar="FD", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        with os.fdopen(options.engine, "w") as report:
            run_engine(json.load(sys.stdin), report)
        return 0

    console = Console(highlight=False)
    folder: Path = options.folder.absolute()
    shelf = folder / "shelf"
    # An old shelf would make the first engine warm.
    shutil.rmtree(shelf, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    suited = suited_to_this_machine()
    recipe, dtype = options.recipe or suited[0], options.dtype or suited[1]
    with console.status("making a model with random weights …"):
        model = make_model(folder / f"model-{recipe}", recipe, replace=True)
    millions = RECIPES[recipe].parameters / 1e6
    console.print(f"Model: Llama-shaped, {millions:.1f} M random parameters, {dtype}", style="dim")
    if (recipe, dtype) != ("demo", "bfloat16") and (recipe, dtype) == suited:
        console.print(
            "This processor computes slowly with bfloat16"
            + (" and float32: the model and the prompts are small." if recipe == "tiny" else ".")
            + (" The engines compute with float32." if dtype == "float32" else ""),
            style="dim",
        )
    warm_up, prompts = make_prompts(recipe)
    job = {
        "model": str(model),
        "recipe": recipe,
        "dtype": dtype,
        "shelf": str(shelf),
        "warm_up": warm_up,
        "prompts": prompts,
    }
    try:
        cold = ask(console, "Engine 1", job | {"compute_everything": True}, folder / "engine-1.log")
        warm = ask(
            console, "Engine 2", job | {"compute_everything": False}, folder / "engine-2.log"
        )
    except EngineFailedError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    return 0 if show(console, prompts, cold, warm, shelf) else 1


if __name__ == "__main__":
    sys.exit(main())
