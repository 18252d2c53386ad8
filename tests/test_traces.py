"""NVTX ranges: which there are, and that they are free of what a machine lacks."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from kvshelf import traces
from kvshelf.traces import trace_range


class Noted:
    """The NVTX of a torch: notes each range with its thread when it ends."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, str]] = []
        self._open = threading.local()

    def range_push(self, name: str) -> None:
        self._open.names = [*getattr(self._open, "names", []), name]

    def range_pop(self) -> None:
        self.ended.append((self._open.names.pop(), threading.current_thread().name))


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    noted = Noted()
    monkeypatch.setattr(torch.cuda, "nvtx", noted)
    traces._nvtx_of.cache_clear()
    yield noted
    traces._nvtx_of.cache_clear()


def test_a_range_ends_with_an_error_and_on_its_thread(nvtx: Noted) -> None:
    with pytest.raises(ValueError, match="wrong"), trace_range("outer"), trace_range("inner"):
        raise ValueError("wrong")
    assert [name for name, _ in nvtx.ended] == ["kvshelf", "inner", "outer"]


@pytest.mark.parametrize("cuda", [SimpleNamespace(), torch.cuda], ids=["none", "built without"])
def test_without_nvtx_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch, cuda: object) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda, "nvtx", SimpleNamespace(range_push=refuse))
    monkeypatch.setattr(torch, "cuda", cuda)
    traces._nvtx_of.cache_clear()
    with trace_range("a"):
        pass
    assert trace_range("a") is trace_range("b")
    traces._nvtx_of.cache_clear()


@pytest.mark.real
def test_a_process_without_torch_stays_so() -> None:
    script = """
import sys
from kvshelf.traces import trace_range
with trace_range("a"):
    pass
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
