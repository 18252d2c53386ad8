"""The list of what was not tested here, over the two runs of ``make test``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

def test_copies(): pytest.skip("needs a GPU")

@pytest.mark.alone
def test_mounts(): pytest.skip("no FUSE")
"""


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "not_tested", "-p", "no:cacheprovider"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "NOT_TESTED": str(folder / "not-tested.json"),
    }
    done = subprocess.run(
        [*command, *arguments, str(folder)],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_last_run_lists_each_skipped_test_of_both_runs_once(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone: runs by itself\n")
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(TESTS)
    assert "not tested here" not in run(tmp_path, "-n", "2", "-m", "not alone")
    printed = run(tmp_path, "-m", "alone")
    assert "2 copies on a GPU; to test it: make gpu" in printed
    assert "2 mounted storage in trouble; to test it: apt install fuse3" in printed
