"""Propose faults of one line for a room, and run the tests of the room with each.

usage: plant.py ROOM [--seed N] [--count N]
       plant.py ROOM --run FILE [TEST ...]

The first form prints proposals as entries of ``faults.toml``, three for each 350 lines of a room. A
person deletes those that change nothing a user sees. The second form plants the entries
of a file, and prints each with the test that fails, or says that it survives.
"""

from __future__ import annotations

import argparse
import ast
import gc
import itertools
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run import ROOT, around, plant, prepare, run

_LEAST_LINES = 8
_TURNED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_WORDS = re.compile(r"\b(log|logger|_log|message|warnings|typer)\b")
_LOCKS = re.compile(r"lock|changed|condition", re.IGNORECASE)


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield the kind of each fault of a node, the node that is replaced, and its replacement."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _TURNED:
            turned = ast.Compare(node.left, [_TURNED[type(operator)]()], node.comparators)
            yield "comparison turned", node, ast.unparse(turned)
        case ast.Expr(value=ast.Call(func=func)) if not _WORDS.search(ast.unparse(func)):
            yield "call dropped", node, "pass"
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield "constant + 1", node, str(value + 1)
            yield "constant - 1", node, str(value - 1) if value else "(-1)"
        case ast.If() | ast.While() | ast.IfExp():
            yield "branch forced", node.test, "False"
            if not isinstance(node, ast.While):
                yield "branch forced", node.test, "True"
        case ast.With(items=[ast.withitem(context, None)]) if _LOCKS.search(ast.unparse(context)):
            yield "lock removed", context, "__import__('contextlib').nullcontext()"
        case ast.ExceptHandler(type=ast.expr() as kind, body=[first, *_]):
            yield "except widened", kind, "Exception"
            if not isinstance(first, ast.Pass):
                yield "except emptied", first, "pass"
        case ast.Try(finalbody=[dropped]):
            yield "finally dropped", dropped, "pass"
        case ast.Call(args=[first, second, *_]) if not _WORDS.search(ast.unparse(node.func)):
            if not any(isinstance(one, ast.Starred | ast.Constant) for one in (first, second)):
                swapped = [second, first, *node.args[2:]]
                yield (
                    "arguments exchanged",
                    node,
                    ast.unparse(ast.Call(node.func, swapped, node.keywords)),
                )


def nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield what a function computes: neither the functions in it, nor texts of errors."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Raise | ast.JoinedStr):
            yield node
            yield from nodes(node)


def proposals(path: Path) -> Iterator[list[dict[str, str]]]:
    """Yield the faults of one line of each function above eight lines of a module."""
    source = path.read_text(encoding="utf-8")
    lines, tree = source.split("\n"), ast.parse(source)
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (function.end_lineno or 0) - function.lineno < _LEAST_LINES:
            continue
        faults = []
        for kind, node, text in itertools.chain.from_iterable(map(changes, nodes(function))):
            if node.lineno != node.end_lineno:
                continue
            line = lines[node.lineno - 1].encode()
            changed = line[: node.col_offset] + text.encode() + line[node.end_col_offset :]
            fault = {"file": str(path.relative_to(ROOT)), "kind": kind}
            fault |= {"line": line.decode().strip(), "fault": changed.decode().strip()}
            if isinstance(plant(fault), str):
                fault["inside"] = around(tree, node.lineno)
            if not isinstance(plant(fault), str):
                faults.append(fault)
        yield faults


def propose(room: list[Path], seed: int, count: int | None) -> None:
    """Print faults of a room, at most one of each function."""
    chance = random.Random(seed)
    if count is None:
        count = max(1, sum(len(path.read_text().split("\n")) for path in room) * 3 // 350)
    chosen = [chance.choice(faults) for path in room for faults in proposals(path) if faults]
    for fault in sorted(chance.sample(chosen, min(count, len(chosen))), key=chosen.index):
        show(fault)


def show(fault: dict[str, Any]) -> None:
    """Print an entry of the table, behind its kind or its verdict."""
    if "kind" in fault:
        print(f"# {fault.pop('kind')}")
    print("[[fault]]")
    for key, value in fault.items():
        texts = [json.dumps(text, ensure_ascii=False) if "'" in text else f"'{text}'"
                 for text in ([value] if isinstance(value, str) else value)]  # fmt: skip
        print(key, "=", texts[0] if isinstance(value, str) else f"[{', '.join(texts)}]")
    print(flush=True)


class Callers:
    """Notes which tests call which functions."""

    def __init__(self, log: Path) -> None:
        self.log, self.test = log, ""
        self.tests: dict[str, set[str]] = {}
        self.seconds: dict[str, float] = {}

    def note(self, frame: Any, event: str, argument: object) -> None:
        """Note a call: the function that traces."""
        code = frame.f_code
        if "kvshelf" in code.co_filename:
            name = code.co_qualname.replace(".<locals>", "")
            self.tests.setdefault(f"{code.co_filename}:{name}", set()).add(self.test)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Trace all threads from the first test on."""
        self.test, self.began = nodeid, time.process_time()
        sys.settrace(self.note)
        threading.settrace(self.note)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Note the time of a test."""
        self.seconds[nodeid] = time.process_time() - self.began

    def pytest_sessionfinish(self) -> None:
        """Write the tests that call each function, the quickest first."""
        tests = {
            os.path.realpath(name): sorted(tests, key=lambda test: (self.seconds[test], test))
            for name, tests in self.tests.items()
        }
        self.log.write_text(json.dumps(tests))


def catch(file: Path, tests: list[str], marks: str) -> int:
    """Plant the faults of a file and print each with its verdict; return how many survive."""
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        status, text = run([f"-m{marks}", *tests], plugins=[Callers(log)], seconds=3600)
        if status != pytest.ExitCode.OK:
            sys.exit(f"{text}\nThe tests must pass without a fault.")
        callers = json.loads(log.read_text())
    survivors = 0
    for fault in tomllib.loads(file.read_text(encoding="utf-8"))["fault"]:
        planted = plant(fault)
        verdict = planted if isinstance(planted, str) else "SURVIVES: no test calls it"
        if not isinstance(planted, str):
            called = callers.get(f"{os.path.realpath(planted.path)}:{planted.inside}")
            if called or not planted.inside:
                status, text = run(called or tests, planted)
                failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", text, re.MULTILINE)
                fault["tests"] = failed
                verdict = f"status {status}" if status else "SURVIVES"
        survivors += verdict != "status 1"
        show({"kind": verdict, **fault})
    gc.unfreeze()
    return survivors


def main() -> int:
    """Propose faults, or plant those of a file; 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("room", help="a folder or module of the library, such as cli")
    parser.add_argument("tests", nargs="*", help="default: the folder of the room's tests")
    parser.add_argument("--run", type=Path, metavar="FILE", help="faults to plant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int)
    given = parser.parse_intermixed_args()
    if given.run:
        tests = given.tests or [f"tests/{given.room}"]
        marks = "not slow" if given.tests else "not slow and not real"
        return int(catch(given.run.resolve(), tests, marks) > 0)
    place = ROOT / ("" if given.room == "backends" else "src/kvshelf") / given.room
    room = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    propose(room, given.seed, given.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
