"""The list, at the end of a run of all tests, of what was not tested on this machine."""

from __future__ import annotations

import re
from collections import Counter

import pytest

#: What a reason to skip means, by a pattern in it: what is missing, and how to get it.
MISSING = (
    (r"FUSE|fusermount3|mfusepy", "mounted storage in trouble", "apt install fuse3"),
    (r"torchvision", "engines that see images", "delete .venv/packages.stamp, make test"),
    (r"rsync", "copies by rsync", "apt install rsync"),
    (r"kubectl", "manifests, as kustomize makes them", "install kubectl"),
    (r"systemd-analyze", "units, by systemd", "apt install systemd"),
    (r"GPU", "copies on a GPU", "make gpu, on a machine with an NVIDIA GPU"),
    (r"C\+\+ compiler|cmake", "builds of the native library", "apt install g++ cmake"),
    (r"vLLM refuses it", "kernels of other processors", "nothing: recordings of them were tested"),
    (r"prometheus is not|promtool", "dashboard and alerts", "apt install prometheus"),
    (r"vllm", "real engines", "make test with Python 3.11 or newer"),
    (r"packs KV differently", "shelves stored on other processors", "nothing: see the reason"),
    (r"pip install|not installed|is missing", "an optional package", "make test"),
)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print a line for each thing that is missing, and the reasons below it."""
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", ()))
    found: dict[tuple[str, str], Counter[str]] = {}
    for reason, count in reasons.items():
        fitting = (rest for pattern, *rest in MISSING if re.search(pattern, reason))
        what, remedy = next(fitting, ("other", "see the reason"))
        found.setdefault((what, remedy), Counter())[reason] = count
    slow_left_out = "not slow" in str(config.getoption("markexpr"))
    if not found and not slow_left_out:
        return
    terminalreporter.section("not tested here")
    for (what, remedy), counts in sorted(found.items()):
        terminalreporter.write_line(f"{counts.total():5} {what}; to test it: {remedy}")
        for reason, count in counts.most_common():
            terminalreporter.write_line(f"            {count} × {reason}")
    if slow_left_out:
        terminalreporter.write_line("      slow tests; to test it: make test-all")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")
