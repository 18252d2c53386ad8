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
import timeit
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from models.make_model import RECIPES, make_model
from rich.console import Console
from rich.table import Table

CHUNK = 256
#: As long as the weights may take on a machine that is busy with other things.
WARM_UP_SECONDS = 60.0
DOCUMENT = {"demo": 4096, "tiny": 1024}
# With random weights two next tokens can be nearly tied, and then rounding, which differs between
# kinds of processors and sizes of batches, picks one. No answer to these questions is such a tie:
# the best token is at least 0.37 nats ahead.
QUESTIONS = {"demo": (14, 12, 1, 2), "tiny": (23, 5, 3, 17)}
#: With the larger model four prompts and two engines end within three minutes where a processor
#: multiplies two matrices of 1024 × 1024 in this time.
FAST_SECONDS = 0.06


def make_prompts(recipe: str) -> tuple[list[int], list[list[int]]]:
    """Return (a prompt to warm up with, prompts that share a document but are not equal)."""

    def tokens(seed: int, count: int) -> list[int]:
        generator = random.Random(seed)
        return [generator.randrange(2, RECIPES[recipe].vocab) for _ in range(count)]

    document = tokens(0, DOCUMENT[recipe])
    questions = [tokens(seed, 20 + 4 * place) for place, seed in enumerate(QUESTIONS[recipe])]
    return tokens(-1, CHUNK + 44), [document + question for question in questions]


def suited_to_this_machine() -> tuple[str, str]:
    """Return the model and the dtype that answer the demo's prompts in reasonable time here."""

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(1024, 1024, dtype=dtype)
        return min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=5))

    half, single = seconds(torch.bfloat16), seconds(torch.float32)
    recipe = "demo" if min(half, single) < FAST_SECONDS else "tiny"
    # Processors with bfloat16 instructions are faster with them, others several times slower.
    return recipe, "float32" if half > 2 * single else "bfloat16"


def run_engine(job: dict[str, Any]) -> None:
    """Be an engine: answer the prompts one after the other, and write the answers to a file."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
        max_model_len=8192,
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
            },
        ),
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    warm_up, prompts = make_prompts(job["recipe"])
    # The shelf is used once the weights have been read, in the background: until then every prompt
    # is computed. This one is found on the shelf then.
    loaded, deadline = 0, time.monotonic() + WARM_UP_SECONDS
    while not loaded and time.monotonic() < deadline:
        [output] = llm.generate({"prompt_token_ids": warm_up}, params, use_tqdm=False)
        loaded = output.num_cached_tokens
        llm.reset_prefix_cache()
    params.skip_reading_prefix_cache = job["compute_everything"]
    answers = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        answers.append(
            {
                "tokens": list(output.outputs[0].token_ids),
                "loaded": output.num_cached_tokens,
                "ttft": output.metrics.first_token_latency,
            }
        )
    Path(job["answers"]).write_text(json.dumps(answers))


def ask(name: str, job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Have a new engine, a process of its own, answer all prompts."""
    log, answers = folder / f"{name}.log", folder / f"{name}.json"
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0"}
    with log.open("wb") as output:
        engine = subprocess.Popen(
            [sys.executable, __file__, "--engine", json.dumps(job | {"answers": str(answers)})],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | quiet,
            start_new_session=True,
        )
        try:
            code = engine.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)
    if code:
        print("\n".join(log.read_text(errors="replace").splitlines()[-15:]))
        print(f"{name} failed; all of its log is in {log}")
        sys.exit(2)
    return json.loads(answers.read_text())


def show(console: Console, recipe: str, cold: list[Any], warm: list[Any]) -> bool:
    """Print the table; returns whether everything was as it should be."""
    prompts = make_prompts(recipe)[1]
    table = Table(title="Time to first token (TTFT)", title_justify="left")
    for title in ("prompt", "prompt tokens", "tokens from the shelf"):
        table.add_column(title, justify="right")
    for title in ("TTFT cold\nengine 1", "TTFT warm\nengine 2", "faster", "output equal"):
        table.add_column(title, justify="right")
    for number, (prompt, before, after) in enumerate(zip(prompts, cold, warm, strict=True), 1):
        table.add_row(
            str(number),
            f"{len(prompt):,}",
            f"{after['loaded']:,}",
            f"{before['ttft'] * 1000:,.0f} ms",
            f"{after['ttft'] * 1000:,.0f} ms",
            f"{before['ttft'] / after['ttft']:.0f} ×",
            "[green]yes[/]" if before["tokens"] == after["tokens"] else "[red]no[/]",
        )
    console.print(table)
    equal = all(one["tokens"] == other["tokens"] for one, other in zip(cold, warm, strict=True))
    if not equal:
        console.print("[red]The answers are not equal.[/]")
    loaded = all(answer["loaded"] >= DOCUMENT[recipe] for answer in warm)
    if not loaded:
        console.print("[red]Less was loaded from the shelf than had been stored.[/]")
    return equal and loaded


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Two vLLM engines, one shelf.")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="for model, shelf, logs")
    parser.add_argument("--recipe", choices=DOCUMENT, help="default: what suits this machine")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: the faster one")
    parser.add_argument("--engine", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        run_engine(options.engine)
        return 0
    # So that engines end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    console = Console(highlight=False)
    folder: Path = options.folder.absolute()
    shelf = folder / "shelf"
    # An old shelf would make the first engine warm.
    shutil.rmtree(shelf, ignore_errors=True)
    suited = suited_to_this_machine()
    recipe, dtype = options.recipe or suited[0], options.dtype or suited[1]
    model = make_model(folder / f"model-{recipe}", recipe)
    console.print(f"Model: Llama-shaped, random weights, recipe {recipe}, {dtype}", style="dim")
    job = {"model": str(model), "recipe": recipe, "dtype": dtype, "shelf": str(shelf)}
    with console.status("Engine 1 starts, and computes 4 prompts …"):
        cold = ask("engine-1", job | {"compute_everything": True}, folder)
    with console.status("Engine 2 starts, and answers the same prompts …"):
        warm = ask("engine-2", job | {"compute_everything": False}, folder)
    good = show(console, recipe, cold, warm)
    objects = [path.stat().st_size for path in shelf.rglob("*.safetensors")]
    console.print(f"On the shelf: {len(objects)} objects, {sum(objects) / 1e6:,.1f} MB ({shelf})")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
