"""NVTX ranges: which there are, and that they import nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvshelf.traces import trace_range


def test_ranges_are_made_in_processes_that_use_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        yield
        ended.append(name)

    monkeypatch.setattr(torch.cuda.nvtx, "range", noted)
    for uses, expected in ((False, []), (True, ["inner", "outer"])):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda uses=uses: uses)
        with trace_range("outer"), trace_range("inner"):
            pass
        assert ended == expected


@pytest.mark.real
def test_process_without_torch_stays_so() -> None:
    script = """
import sys
from kvshelf.traces import trace_range
with trace_range("a"):
    pass
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
