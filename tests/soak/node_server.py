"""A node server under load for minutes: its memory stays bounded, and nobody gets wrong bytes.

``python tests/soak/node_server.py [--seconds 600] [--memory 64MiB] [--clients 4] [--seed 0]``

Clients in processes of their own store and fetch chunks of one prompt that is several times as
large as the server's memory, and verify every byte. Now and then one of them is killed while it
holds memory, or stopped beyond its leases, and once in a while the server. At the end all clients
go, and the server must hold nothing for anybody. Its resident memory is read from /proc.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvshelf.values import parse_size
from tests.server.client_child import SIZE
from tests.server.serve_process import ClientProcess, ServeProcess
from tests.support.waiting import until

LEASE_SECONDS = 2.0
SPAN = 48


def resident_bytes(pid: int) -> int:
    """Memory of a process, shared memory included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"process {pid} has no memory")


class Load:
    """The clients and what they are told to do."""

    def __init__(self, server: ServeProcess, clients: int, chunks: int, seed: int) -> None:
        self.server = server
        self.chunks = chunks
        self.random = random.Random(seed)
        self.clients = [ClientProcess(server.url) for _ in range(clients)]
        self.checked = self.lapsed = self.failed = self.killed = self.stopped = self.restarted = 0

    def span(self) -> str:
        # Beginnings are used more than ends.
        first = int(self.random.betavariate(1, 3) * (self.chunks - SPAN))
        return f"{first} {first + self.random.randint(1, SPAN)}"

    def round(self) -> None:
        """Let all clients work at once, and one of them suffer."""
        tasks = [
            f"store {self.span()}" if self.random.random() < 0.4 else f"fetch {self.span()}"
            for _ in self.clients
        ]
        for client, task in zip(self.clients, tasks, strict=True):
            client.send(task)
        for client in self.clients:
            client.answer()
        victim = self.random.randrange(len(self.clients))
        fate = self.random.random()
        if fate < 0.03:
            self.clients[victim].signal(signal.SIGKILL)
            self.clients[victim].__exit__()
            self.clients[victim] = ClientProcess(self.server.url)
            self.killed += 1
        elif fate < 0.06:
            self.clients[victim].signal(signal.SIGSTOP)
            time.sleep(2 * LEASE_SECONDS)
            self.clients[victim].signal(signal.SIGCONT)
            self.stopped += 1
        for client in self.clients:
            verdict = client.ask("check")
            assert verdict != "wrong", "a client was lent wrong bytes"
            self.checked += verdict == "good"
            self.lapsed += verdict == "lapsed"
            client.ask("release")

    def restart_server(self) -> None:
        self.server.kill()
        self.server.start()
        self.restarted += 1

    def close(self) -> None:
        for client in self.clients:
            client.__exit__()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--memory", default="4MiB")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    memory = parse_size(args.memory)
    chunks = min(4096, 3 * memory // SIZE)
    begin = time.monotonic()
    most_resident = most_bytes = first_resident = 0
    with tempfile.TemporaryDirectory() as folder:
        shelf = Path(folder) / "shelf"
        more = ("--lease", str(LEASE_SECONDS))
        with ServeProcess(shelf, Path(folder) / "s" / "node.sock", args.memory, *more) as server:
            load = Load(server, args.clients, chunks, args.seed)
            restart_at = begin + args.seconds / 2
            while time.monotonic() < begin + args.seconds:
                load.round()
                if time.monotonic() > restart_at and not load.restarted:
                    load.restart_server()
                metrics = server.metrics()
                assert metrics["bytes"] + metrics["wasted_bytes"] <= metrics["capacity_bytes"]
                most_bytes = max(most_bytes, int(metrics["bytes"]))
                resident = resident_bytes(server.process.pid)
                first_resident = first_resident or resident
                most_resident = max(most_resident, resident)
            load.close()
            left = ("leases", "pinned_bytes", "reads", "stores", "waiting")
            until(lambda: not any(server.metrics()[name] for name in left))
            metrics = server.metrics()
    report = {
        "seconds": round(time.monotonic() - begin),
        "memory": memory,
        "most_bytes_of_objects": most_bytes,
        "resident_at_first": first_resident,
        "most_resident": most_resident,
        **{
            name: getattr(load, name)
            for name in ("checked", "lapsed", "killed", "stopped", "restarted")
        },
        **{name: int(metrics[name]) for name in ("read_objects", "evicted_objects", "requests")},
    }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
