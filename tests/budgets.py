"""What tests may cost, in seconds of a processor, which are the same on a busy machine.

A layer, or a test of a simulated layer, above its budget fails the run. So do more engines of vLLM
than may be started, and a process that a test has started and that runs when all tests are over.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.engines import Engine

#: Seconds of each layer in `make test`, with those of its processes that have ended. They allow for
#: processors a third as fast as those that were measured.
LAYERS = {"simulated": 1200.0, "engine model": 900.0, "real seams": 1500.0, "engines": 2000.0}
#: The most that one test of a simulated layer may take, and one with the mark ``long``.
_TEST, _LONG = 20.0, 120.0
#: The most engines of vLLM that `make test` starts.
ENGINES = 12

_spent: Counter[str] = Counter()
_above: list[str] = []


def layer_of(item: pytest.Item) -> str:
    """Return the layer to which a test belongs."""
    if item.get_closest_marker("vllm"):
        return "engines"
    if item.get_closest_marker("real"):
        return "real seams"
    folder = Path(__file__).parent / "vllm"
    return "engine model" if folder in item.path.parents else "simulated"


def _seconds() -> tuple[float, float]:
    """Return what this process has taken, and its processes that have ended."""
    times = os.times()
    return times.user + times.system, times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Measure a test with its fixtures."""
    before, ended_before = _seconds()
    result = yield
    now, ended = _seconds()
    layer, spent = layer_of(item), now - before
    # A process of an earlier test may end now. A test of a simulated layer starts none.
    _spent[layer] += spent + ended - ended_before
    longest = _LONG if item.get_closest_marker("long") else _TEST
    if spent > longest and layer in ("simulated", "engine model"):
        _above.append(f"{item.nodeid} took {spent:.1f} s, of {longest:g}")
    return result


def _children() -> list[str]:
    """Return the command lines of processes that this one has started and that still run."""
    found = []
    for thread in Path("/proc/self/task").glob("*/children"):
        for child in thread.read_text().split():
            command = Path("/proc", child, "cmdline").read_bytes().replace(b"\0", b" ").decode()
            # A process of the library itself, which ends with this one.
            if command and "resource_tracker" not in command:
                found.append(f"{child}: {command[:200]}")
    return found


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of `make test` that cost too much, and any after which something runs."""
    if "not slow" in str(session.config.getoption("markexpr")):
        for layer, spent in _spent.items():
            if spent > LAYERS[layer]:
                _above.append(f"the tests of the layer {layer!r} took {spent:.0f} s")
        if len(Engine.names) > ENGINES:
            _above.append(f"more than {ENGINES} engines were started: {', '.join(Engine.names)}")
    _above.extend(f"a process runs on: {child}" for child in _children())
    if _above and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what each layer took, and what was too much."""
    if _spent:
        layers = ", ".join(f"{layer} {spent:.0f}" for layer, spent in sorted(_spent.items()))
        terminalreporter.section("seconds of a processor")
        terminalreporter.write_line(layers)
    if Engine.names:
        terminalreporter.write_line(f"{len(Engine.names)} engines were started")
    for line in _above:
        terminalreporter.write_line(line, red=True)
