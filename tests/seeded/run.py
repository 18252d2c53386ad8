"""Plant each fault of ``faults.toml`` in turn, and run the tests that catch it.

usage: run.py [PART OF A FILE'S NAME ...]

A fault is one line of the product and what stands in its place; ``inside`` names the class and the
function where the line is in its file more than once. The tests pass without it and fail with it. A
fault whose mechanism is gone leaves the table; a line that only moved is brought up to date.

This process imports pytest, torch and vLLM, and nothing of kvshelf. It forks one for each fault, in
which the import of the one module finds the fault: no file is touched.
"""

from __future__ import annotations

import ast
import gc
import importlib
import os
import signal
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300
# What is imported before pytest starts cannot be rewritten, and need not be.
OPTIONS = ("-xq", "-pno:cacheprovider", "-Wignore::pytest.PytestAssertRewriteWarning")


class Planted(SourceFileLoader):
    """Finds one module, with a source of its own; `inside` is where that differs."""

    def __init__(self, path: Path, source: str, inside: str) -> None:
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[1:] if parts[0] == "src" else ("kvshelf", *parts)
        super().__init__(".".join(parts).removesuffix(".__init__"), str(path))
        self.source = source
        self.inside = inside

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return where the module is, if it is this one."""
        return spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source; no bytecode is read or written."""
        return compile(self.source, self.path, "exec", dont_inherit=True)


def plant(fault: Mapping[str, str]) -> Planted | str:
    """Return the module with the fault, or what has become of its line."""
    path = ROOT / fault["file"]
    source = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = source.split("\n")
    tree = ast.parse(source)
    found = [
        number
        for number, line in enumerate(lines)
        if line.strip() == fault["line"]
        and fault.get("inside", "") in ("", around(tree, number + 1))
    ]
    if len(found) != 1:
        return "ambiguous" if found else "no longer there: bring the line up to date, or delete it"
    indent = lines[found[0]].removesuffix(lines[found[0]].lstrip())
    lines[found[0]] = indent + fault["fault"]
    return Planted(path, "\n".join(lines), around(tree, found[0] + 1))


def around(tree: ast.Module, number: int) -> str:
    """Return the names of the classes and functions that a line is in, joined by dots."""
    named = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, named) and node.lineno <= number <= (node.end_lineno or 0)
    ]
    return ".".join(node.name for node in sorted(around, key=lambda node: node.lineno))


def run(
    tests: Sequence[str],
    planted: Planted | None = None,
    plugins: Sequence[object] = (),
    seconds: int = SECONDS,
) -> tuple[int, str]:
    """Run tests in a process of their own: the exit status of pytest, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        child = os.fork()
        if child == 0:
            signal.alarm(seconds)
            os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 1)
            os.dup2(1, 2)
            if planted is not None:
                sys.meta_path.insert(0, planted)
            status: int = pytest.ExitCode.INTERNAL_ERROR
            try:
                status = pytest.main([*OPTIONS, f"--basetemp={folder}/tests", *tests], plugins)
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status, log.read_text(errors="replace")


def prepare() -> None:
    """Import what the forked processes share."""
    os.chdir(ROOT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch and others deprecate
        for name in ("torch", "vllm.v1.core.sched.async_scheduler"):
            importlib.import_module(name)
    gc.freeze()  # forked processes share what is there, as long as no collection writes to it


def main(parts: Sequence[str]) -> int:
    """Plant all faults of the files that are named so; 1 if one is missed or was not planted."""
    prepare()
    table = tomllib.loads((Path(__file__).parent / "faults.toml").read_text())["fault"]
    faults = [one for one in table if not parts or any(part in one["file"] for part in parts)]
    tests = dict.fromkeys(test for one in faults for test in one["tests"])
    status, text = run(list(tests), seconds=SECONDS + 10 * len(tests))
    if status != pytest.ExitCode.OK:
        print(text, "The tests must pass without a fault.", sep="\n")
        return 1
    bad = 0
    for fault in faults:
        planted = plant(fault)
        verdict = planted if isinstance(planted, str) else "caught"
        if isinstance(planted, Planted):
            status, text = run(fault["tests"], planted)
            if status != pytest.ExitCode.TESTS_FAILED:
                verdict = f"MISSED (status {status} of {', '.join(fault['tests'])})"
        bad += verdict != "caught"
        print(f"{fault['file']}: {fault['line']} -> {fault['fault']}: {verdict}", flush=True)
    gc.unfreeze()  # else libraries report at the end that their objects leak
    print(f"{len(faults)} faults, {bad} not caught")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
