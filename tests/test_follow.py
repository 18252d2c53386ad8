"""How many calls a request makes: a bound that grows only on purpose, see ``make follow``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

#: Calls in a life of so many steps. In a further step, in which the engine waits, there are 80.
MOST = {"store": (2, 640), "load": (3, 620)}


@pytest.mark.real
def test_calls_of_a_store_and_a_load_stay_below_their_bounds() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "tests.follow"],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    rows = re.findall(
        r"^(store|load): .*?, (\d+) steps\n.*?(\d+) calls[^\n]*all$", shown, re.M | re.S
    )
    assert [what for what, *_ in rows] == ["store", "load"]
    for what, steps, calls in rows:
        usual, most = MOST[what]
        assert int(calls) <= most + 80 * max(0, int(steps) - usual), shown
