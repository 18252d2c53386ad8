"""A connector of your own over a node server: the adapters of an engine's scheduler and worker.

Starts ``kvshelf serve``, and runs two engines after each other, without vLLM: what matters of an
engine here is its scheduler, which asks how much of a prompt the server has, and its worker, which
loads that into its blocks and stores the rest. The first engine stores the prompt, the second one
loads it into other blocks. The KV is random numbers.

    python examples/adapters.py

It needs the extra ``server``. docs/multiprocess.md compares the adapters with those of vLLM.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

import torch

from kvshelf import ModelFacts
from kvshelf.kv.layout import PagedLayout
from kvshelf.server.client import LoadStoreOp, SchedulerAdapter, WorkerAdapter

FACTS = ModelFacts(layers=2, kv_heads=2, head_size=64, dtype="bfloat16", weights="random-v1")
LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(2)]
BLOCK_SIZE = 16  # the server's chunk size, 256, is a multiple of it
PROMPT = list(range(512))


def run_engine(url: str, name: str, blocks: list[int], caches: dict[str, torch.Tensor]) -> None:
    """Load what the server has of the prompt into some blocks, and store what it does not have."""
    scheduler = SchedulerAdapter(url, FACTS, BLOCK_SIZE)
    worker = WorkerAdapter(url, FACTS, BLOCK_SIZE)
    worker.register_kv_caches(caches, PagedLayout.from_bhnc(caches[LAYERS[0]], FACTS.head_size))

    scheduler.maybe_submit_lookup_request(name, token_ids=PROMPT)
    while (hit := scheduler.check_lookup_result(name)) is None:
        time.sleep(0.001)  # no answer yet: an engine runs the steps of other requests
    print(f"{name}: the server has {hit} of {len(PROMPT)} tokens")
    first = hit // BLOCK_SIZE
    if hit:
        load = LoadStoreOp(blocks[:first], token_ids=PROMPT, start=0, end=hit)
        worker.submit_retrieve_request(name, load)
        while name not in worker.get_finished(set())[1]:
            time.sleep(0.001)
        print(f"{name}: loaded; blocks to compute: {worker.get_block_ids_with_load_errors()}")
    if hit < len(PROMPT):
        store = LoadStoreOp(blocks[first:], token_ids=PROMPT, start=hit, end=len(PROMPT))
        worker.submit_store_request(name, store)
        while name not in worker.get_finished({name})[0]:
            time.sleep(0.001)
        print(f"{name}: stored {len(PROMPT) - hit} tokens")
    worker.shutdown()
    scheduler.shutdown()


def main() -> None:
    """Start a node server, and both engines."""
    shape = (100, 2, BLOCK_SIZE, 128)  # [blocks, heads, slots of a block, K and V of a head]
    ours = {layer: torch.randn(shape).bfloat16() for layer in LAYERS}
    theirs = {layer: torch.zeros_like(cache) for layer, cache in ours.items()}
    blocks, others = torch.randperm(100)[:32], torch.randperm(100)[:32]
    with tempfile.TemporaryDirectory() as folder:
        url = f"ipc://{folder}/sockets/node.sock"
        command = [sys.executable, "-m", "kvshelf", "serve", "--url", f"{folder}/shelf"]
        command += ["--memory", "64MiB", "--socket", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            print(server.stdout.readline(), end="")  # it says so when engines can connect
            try:
                run_engine(url, "first engine", blocks.tolist(), ours)
                run_engine(url, "second engine", others.tolist(), theirs)
            finally:
                server.terminate()
    equal = all(torch.equal(ours[layer][blocks], theirs[layer][others]) for layer in LAYERS)
    print(f"the blocks of both engines are equal: {equal}")


if __name__ == "__main__":
    main()
