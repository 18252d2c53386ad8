"""A process that waits for its storage for ever ends all the same, and soon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

#: What a storage that never answers is asked, in system calls that never return.
PROGRAM = """
import gc, os, sys, threading, time
from dataclasses import replace
import torch
from kvshelf import ChunkCache, ModelFacts, Shelf
from kvshelf.backends import Deadlines, open_backend
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.shelf.view import NamespaceView

root, operation, end = sys.argv[1:]
patient = Deadlines(probe=60.0, read=60.0, write=60.0)
deadline = {"stat": "probe", "folders": "read", "open": "read", "write": "write"}[operation]
os.mkfifo(root + ".fifo")
frozen = threading.Event()
waiting = []


def wait(name):
    if frozen.is_set() and operation == name:
        waiting.append(name)
        os.read(os.open(root + ".fifo", os.O_RDWR), 1)


class Frozen(WrappedBackend):
    reads_whole = False

    def stat(self, names):
        wait("stat")
        return super().stat(names)

    def open(self, name):
        wait("open")
        return super().open(name)

    def write(self, name, buffers, mode="create"):
        wait("write")
        return super().write(name, buffers, mode)

    def folders(self, prefix=""):
        wait("folders")
        return super().folders(prefix)


facts = ModelFacts(layers=2, kv_heads=2, head_size=16, weights="name:test", dtype="bfloat16")
shelf = Shelf(Frozen(open_backend(root)), deadlines=patient)
cache = ChunkCache(shelf, facts.namespace(chunk_size=8), memory_bytes=1 << 20, drain_s=0.5)
kv = torch.ones(2, 2, 24, 32, dtype=torch.bfloat16)
tokens = list(range(24))
assert cache.store(tokens, kv=kv).complete
assert cache.lookup(tokens) == 24
if operation == "folders":
    for view in (one for one in gc.get_objects() if isinstance(one, NamespaceView)):
        view._folders_until = 0.0
shelf.backend.deadlines = replace(patient, **{deadline: 0.3})
frozen.set()
if operation == "write":
    handle = cache.submit_store(tokens[::-1], kv=kv)
else:
    handle = cache.submit_retrieve(tokens, kv=kv)
# The storage does not answer before the process ends.
found = handle.result(60)
end_at = time.monotonic() + 60
while not waiting and time.monotonic() < end_at:
    time.sleep(0.01)
print(found.failed if operation == "write" else int(found.sum()), len(waiting) > 0, flush=True)
if end == "close":
    cache.close()
    shelf.close()
elif end == "exception":
    raise RuntimeError("a bug")
"""


@pytest.mark.parametrize(
    ("operation", "end"),
    [
        ("open", "close"),
        ("write", "just end"),
        *(
            pytest.param(*how, marks=pytest.mark.slow)
            for how in (("stat", "close"), ("folders", "close"), ("write", "exception"))
        ),
    ],
)
def test_process_whose_storage_never_answers_ends(tmp_path: Path, operation: str, end: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "shelf"), operation, end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    # Nothing is retrieved. Of the store the chunk that hangs fails, and those behind it drop.
    assert line.split() == (["1", "True"] if operation == "write" else ["0", "True"]), errors
    assert process.returncode == (1 if end == "exception" else 0), errors
