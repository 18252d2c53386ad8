"""How many calls a request makes: bounds that grow only on purpose, see ``make follow``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

#: Most calls of each thread; of the engine's, in each step.
MOST = {"lookup": 90, "load": 140, "store": 205, "guard": 20, "step": 180}
#: Most calls of a store and of a load together, and modules that have them.
CALLS, MODULES = {"store": 650, "load": 620}, 66


@pytest.mark.real
@pytest.mark.slow
def test_calls_of_a_store_and_a_load_stay_below_their_bounds() -> None:
    root = Path(__file__).resolve().parents[1]
    shown = subprocess.check_output([sys.executable, "-m", "tests.follow"], cwd=root, text=True)
    steps, work = 0, ""
    for line in shown.splitlines():
        if title := re.search(r"^(\w+): .*, (\d+) steps$", line):
            work, steps = title[1], int(title[2])
        elif row := re.match(r" +(\d+) calls .* (\d+) modules +all$", line):
            assert int(row[1]) <= CALLS[work] and int(row[2]) <= MODULES, shown
        elif row := re.match(
            r" +(\d+) calls .* (?:kvshelf-)?(lookup|load|store|guard|step)$", line
        ):
            of = steps if row[2] == "step" else 1
            assert int(row[1]) <= MOST[row[2]] * of, shown
    assert shown.count(" step\n") == 2
