"""The tests to run after each edit: ``pytest -p tests.fast``, which is ``make test-fast``.

A test is left out for what it is, never by its name:

- It starts a process, such as an engine, a server or a mount, itself or by a fixture. It is skipped
  at that moment, so a variant of the same test that needs no server runs.
- It has a mark of :data:`MARKS`, or runs a state machine: hypothesis then searches at random.
- It lies in one of :data:`FOLDERS`. Its file is not even read.
"""

from __future__ import annotations

import gc
import multiprocessing.process
import os
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

import pytest

#: Hypothesis marks its own tests.
MARKS = frozenset({"alone", "hypothesis", "long", "slow", "vllm"})
#: Folders whose subject is what runs beside an engine or in its place, or a storage in trouble; the
#: last one imports vLLM.
FOLDERS = frozenset({"benchmarks", "faults", "proxy", "server", "soak", "vllm"})
REASON = "it starts a process"


def pytest_configure(config: pytest.Config) -> None:
    """Let tests that are skipped halfway leave files open."""
    config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnraisableExceptionWarning")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out :data:`FOLDERS`."""
    inside = collection_path.parent == Path(__file__).parent
    return True if inside and collection_path.name in FOLDERS else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests by their marks, when others have set them."""
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        code = getattr(getattr(item, "obj", None), "__code__", None)
        searches = code is not None and "run_state_machine_as_test" in code.co_names
        marked = any(mark.name in MARKS for mark in item.iter_markers())
        (left_out if searches or marked else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_collection_finish() -> None:
    """Take what is there from now on out of each collection of garbage, which is then quick."""
    _collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Skip the test as soon as it, or a fixture of it, starts a process."""
    skipped = False

    def skip(*_: Any, **__: Any) -> NoReturn:
        nonlocal skipped
        skipped = True
        pytest.skip(REASON)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", skip)
        patch.setattr(multiprocessing.process.BaseProcess, "start", skip)
        patch.setattr(os, "fork", skip)
        result = yield
    if skipped:
        _collect()  # Files that it left open are closed now, not during another test.
    return result


def _collect() -> None:
    """Collect garbage, and let later collections pass over what is there: modules, above all."""
    gc.collect()
    gc.freeze()
