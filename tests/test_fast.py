"""What ``make test-fast`` runs and leaves out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

TESTS = """
import subprocess, sys
import pytest

@pytest.fixture
def serving(): subprocess.run([sys.executable, "-c", "pass"])

@pytest.fixture(params=["local", "served"])
def storage(request): return request.param == "served" and request.getfixturevalue("serving")

@pytest.mark.vllm
def test_engine(): raise AssertionError("started")

@pytest.mark.long
def test_long(): pass

def test_storage(storage): assert not storage
"""


def test_tests_without_processes_run_and_no_engine_starts(tmp_path: Path) -> None:
    file = tmp_path / "test_made.py"
    file.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.fast", "-p", "no:cacheprovider", "-vv"]
    command += ["-c", "pyproject.toml", str(file), "tests/test_urls.py", "tests/test_examples.py"]
    done = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "NOT_TESTED"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any("tests/test_urls.py::" in line and "PASSED" in line for line in lines)
    assert not any("test_examples.py::" in line for line in lines)
    made = re.findall(r"::test_storage\[(\w+)\].* (PASSED|SKIPPED)", done.stdout)
    assert made == [("local", "PASSED"), ("served", "SKIPPED")]
    assert "::test_engine" not in done.stdout and "::test_long" not in done.stdout
    assert "1 engines, servers, mounts, processes; to test it: make test" in done.stdout
