"""A node server: two engines of one machine share memory, and read nothing from the storage.

Starts ``kvshelf serve``, which has the shelf and 256 MiB of memory, and two engines, which know
only its socket. The first engine stores a prompt; the second one loads it from the memory of the
server. The server's own metric says that the storage was not read at all.

    python examples/node_server.py

It needs the extra ``server``; docs/node-server.md says when such a server is of use.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from models.make_model import make_model
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def start_engine(model: Path, socket: str) -> LLM:
    """Start an engine over the server; it runs in a process of its own."""
    return LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=4096,
        kv_cache_memory_bytes=256 << 20,
        gpu_memory_utilization=0.1,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVShelfConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"server": socket},
        ),
    )


def main() -> None:
    """Start the server and two engines, and ask both the same."""
    model = make_model(Path("build/models/tiny"), "tiny", replace=True)
    generator = random.Random(0)
    prompt = [generator.randrange(2, 4096) for _ in range(2020)]
    params = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    with tempfile.TemporaryDirectory() as folder:
        socket = f"ipc://{folder}/sockets/node.sock"
        command = [sys.executable, "-m", "kvshelf", "serve", "--url", f"{folder}/shelf"]
        command += ["--memory", "256MiB", "--socket", socket, "--http", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                ready = server.stdout.readline()  # it says so when engines can connect
                print(ready, end="", flush=True)
                engines = []
                for name in ("first engine", "second engine"):
                    engines.append(start_engine(model, socket))
                    [output] = engines[-1].generate(
                        {"prompt_token_ids": prompt}, params, use_tqdm=False
                    )
                    print(
                        f"{name}: {len(prompt)} prompt tokens, {output.num_cached_tokens} of them"
                        f" from the server, answer {list(output.outputs[0].token_ids)}",
                        flush=True,
                    )
                http = ready.split(", ")[-1].strip()
                with urllib.request.urlopen(f"{http}/metrics") as metrics:
                    for line in metrics.read().decode().splitlines():
                        if line.startswith("kvshelf_server_read_bytes_total"):
                            print(line)
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
