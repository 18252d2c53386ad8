"""Checks and measures kvshelf on a machine with a GPU: ``first_light.py --part PART``.

Needs a Python with torch 2.11 or newer for the GPU, and the folder that ``gpu_pack.py`` made, or a
copy of this repository, a CUDA compiler and cmake. No make, no network, no vLLM. The
parts are correctness, headline and design. Each stands by itself, ends within seven, six and five
minutes, says at its end whether it passed, and writes two files: ``PART.json``, the report, and
``PART.log``, what its processes printed.

The groups of a part run in processes of their own, with time limits. After each result the report
is replaced as a whole, so it is valid, and says how far the part came, after whatever ended it.

``first_light.py --verdict FOLDER ...`` reads reports, on any machine, and says PASS only if every
part is there, complete and without a failure, and nothing but the CUDA kernels copied.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import gpu_tools
from gpu_box import BUILT, COLD_SECONDS, HERE, LEAST_TORCH, ROOT, SHIPPED, Box, all_sources
from gpu_parts import PARTS, SECONDS, Group
from gpu_verdict import verdict

SCHEMA: Final = 1
#: Characters that one call prints at most.
MOST_PRINTED: Final = 11_000
_KEPT_FOR_THE_END: Final = 1200
#: A process has this long to import torch and find the device, and afterwards to end.
_START_SECONDS: Final = COLD_SECONDS
_END_SECONDS: Final = 15
_MOST_LOG_BYTES: Final = 4 << 20


class Ended(BaseException):
    """A signal asked this process to end."""


class Screen:
    """Prints at most :data:`MOST_PRINTED` characters."""

    def __init__(self) -> None:
        self._left = MOST_PRINTED

    def line(self, text: str, *, keep: int = _KEPT_FOR_THE_END) -> None:
        """Print a line, or nothing if less than `keep` characters would be left for others."""
        text = text.rstrip()[:400] + "\n"
        if len(text) <= self._left - keep:
            self._left -= len(text)
            sys.stdout.write(text)
            sys.stdout.flush()

    def verdict(self, lines: Sequence[str]) -> None:
        """Print a verdict: its last line in any case, and failures as long as there is room."""
        for line in lines[:-1]:
            self.line(line, keep=300 if line.startswith("FAILED") else _KEPT_FOR_THE_END)
        self.line(lines[-1], keep=0)


class Report:
    """The report of a part: one file that is whole at every moment."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content
        self.write()

    def write(self) -> None:
        """Replace the file."""
        temporary = self.path.with_name(f"{self.path.name}.new")
        with temporary.open("w") as file:
            json.dump(self.content, file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)


def patience(emulated: Path | None) -> int:
    """How many times its usual time a run may take: machines of tests may be slow and busy."""
    return 10 if emulated else 1


def _limit(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    return name, float(seconds)


class Part:
    """One run of one part.

    Parameters
    ----------
    name : str
    out : Path
        Folder of the report.
    box : Box
    emulated : Path or None
        Python file that makes an emulated device, see :mod:`gpu_groups`.
    seconds : float
        What the part may take at most.
    limits : dict
        Seconds that some groups may take, by name, in place of their own limits.
    only : collection of str
        The groups to run; all when empty. The verdict on some of them is no PASS.
    """

    def __init__(
        self,
        name: str,
        out: Path,
        box: Box,
        *,
        emulated: Path | None,
        seconds: float,
        limits: dict[str, float],
        only: Collection[str] = (),
    ) -> None:
        self.groups = [group for group in PARTS[name] if not only or group.name in only]
        self.out = out
        self.name = name
        self.box = box
        self.emulated = emulated
        self.limits = {group.name: group.seconds * patience(emulated) for group in self.groups}
        self.limits |= limits
        self.began = time.monotonic()
        self.ends = self.began + seconds
        self.screen = Screen()
        out.mkdir(parents=True, exist_ok=True)
        box.work.mkdir(parents=True, exist_ok=True)
        self.log = out / f"{name}.log"
        self.log.write_bytes(b"")
        self.results: dict[str, dict[str, Any]] = {}
        #: The libraries that are used in place of those that groups want.
        self.serving: dict[str, str] = {}
        self.report = Report(
            out / f"{name}.json",
            {
                "kvshelf_first_light": SCHEMA,
                "part": name,
                "device": "cuda" if emulated is None else "emulated",
                "began": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
                "state": "running",
                "sources": all_sources(),
                "planned": [group.name for group in self.groups],
                "groups": self.results,
            },
        )

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.ends - time.monotonic()

    def run(self) -> bool:
        """Run everything; return whether all groups that could run succeeded."""
        state = "complete"
        try:
            problem = self._prepare()
            if problem:
                state = f"ended: {problem}"
            else:
                self._run_all()
        except Ended as reason:
            state = f"ended: {reason}"
        finally:
            self._say(state=state, seconds=round(time.monotonic() - self.began, 1))
        states = [result["state"] for result in self.results.values()]
        wrong = states.count("failed") + states.count("running")
        missing = len(self.groups) - len(states)
        self.screen.line(
            f"{self.name}: {state}, {time.monotonic() - self.began:.0f} s, "
            f"{len(states)} groups, {wrong} failed, {missing} missing; {self.report.path}",
            keep=600,
        )
        return state == "complete" and not wrong and not missing

    def _say(self, **facts: Any) -> None:
        self.report.content |= facts
        self.report.write()

    def _prepare(self) -> str:
        """Find out what the machine is, and make kvshelf usable; return why that failed."""
        if self.emulated is not None:
            self._say(machine={"gpu": "emulated"}, library={"library": "emulated"})
            return ""
        machine = self.box.machine()
        self._say(machine=machine)
        told = {key: machine.get(key) for key in ("gpu", "torch", "python", "cpus", "error")}
        self.screen.line(f"machine: {json.dumps(told)}")
        if "gpu" not in machine:
            return f"torch {machine.get('torch')} sees no GPU {machine.get('error', '')}".strip()
        version = tuple(int(part) for part in machine["torch"].split("+")[0].split(".")[:2])
        if version < LEAST_TORCH or machine["capability"][0] < 8:
            return f"torch {machine['torch']} or {machine['gpu']} is too old"
        return self._prepare_libraries(machine)

    def _prepare_libraries(self, machine: dict[str, Any]) -> str:
        found: dict[str, dict[str, Any]] = {}
        wanted = list(dict.fromkeys(group.library for group in self.groups))
        while wanted:
            name = wanted.pop(0)
            found[name] = self.box.prepare(name, machine, min(300.0, self.left - 20))
            self._say(library=found)
            self.screen.line(f"library {name}: {json.dumps(found[name])}")
            if found[name]["served"] == "cuda":
                self.serving[name] = name
            elif name == SHIPPED and BUILT not in [*wanted, *found]:
                wanted.append(BUILT)
        if not self.serving:
            return f"no library serves: {[one['problem'] for one in found.values()]}"
        # The part fails, but says what it can.
        for name in found:
            self.serving.setdefault(name, next(iter(self.serving.values())))
        return ""

    def _run_all(self) -> None:
        waiting = list(self.groups)
        while waiting:
            kinds = [(group.tool, group.serves, group.library) for group in waiting]
            others = (i for i, kind in enumerate(kinds) if kind != kinds[0])
            together = waiting[: next(others, None)]
            before = len(self.results)
            self._run_process(together)
            del waiting[: len(self.results) - before]

    def _command(self, group: Group) -> tuple[list[str], str]:
        if not group.tool:
            return [], ""
        if self.emulated is not None:
            return [], "an emulated device has no tools"
        log = self.box.work / f"{group.tool}.csv"
        log.unlink(missing_ok=True)
        return gpu_tools.command(self.box, group.tool, log, min(90.0, self.left))

    def _run_process(self, groups: list[Group]) -> None:
        """Run groups in one process until one of them fails; at least one gets a result."""
        first = groups[0]
        if self.left < 2:
            for group in groups:
                self._end(group, {"state": "failed", "why": "no time was left for it"})
            return
        under, refused = self._command(first)
        if refused:
            self._end(first, {"state": "not run", "why": f"{first.tool}: {refused}"})
            return
        events = self.box.work / f"{self.name}.events"
        events.write_bytes(b"")
        command = [*under, self.box.python, str(HERE / "gpu_groups.py"), "--part", self.name]
        command += ["--groups", ",".join(group.name for group in groups), "--events", str(events)]
        if self.emulated is not None:
            command += ["--emulated", str(self.emulated)]
        library = self.serving.get(first.library, first.library)
        env = gpu_tools.environment(self.box, first.tool, library) | {"KVSHELF_OPS": first.serves}
        with self.log.open("ab") as log, events.open() as lines:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                slow = (3.0 if first.tool else 1.0) * patience(self.emulated)
                why = self._follow(process, lines, groups, slow=slow)
            finally:
                _kill(process)
        self._trim_log()
        self._judge(process, groups, why)

    def _judge(self, process: subprocess.Popen[bytes], groups: list[Group], why: str) -> None:
        """Blame a process that did not end well on the group that ran, or that ran last."""
        begun = [group for group in groups if group.name in self.results]
        last = begun[-1] if begun else groups[0]
        result = self.results.get(last.name, {"state": "running"})
        if result["state"] == "running" or (process.returncode and result["state"] != "failed"):
            if last.tool and process.returncode == gpu_tools.FOUND:
                why = f"{last.tool} found errors"
            why = why or f"its process ended with {_status(process)}"
            self._end(last, {"state": "failed", "why": f"{why}; see {self.log.name}"})
        elif last.tool == "ncu":
            kernels = gpu_tools.ncu_figures(self.box.work / "ncu.csv")
            missed = {"state": "failed", "why": "ncu saw none of the library's kernels"}
            self._end(last, {"facts": {"kernels": kernels}} if kernels else missed)

    def _follow(
        self, process: subprocess.Popen[bytes], lines: Any, groups: list[Group], *, slow: float
    ) -> str:
        """Take in what a process reports until it ends; return why it was ended, or nothing."""
        limits = {group.name: group for group in groups}
        running: Group | None = None
        ends = min(self.ends, time.monotonic() + _START_SECONDS * slow)
        partial = ""
        while True:
            over = process.poll() is not None
            text = partial + lines.read()
            *whole, partial = text.split("\n")
            for line in whole:
                event = json.loads(line)
                if event["event"] == "begin":
                    running = limits[event["name"]]
                    self.results[running.name] = {"state": "running"}
                    self.report.write()
                    ends = min(self.ends, time.monotonic() + self.limits[running.name])
                elif running is not None:
                    self._take(running, event)
                    if event["event"] == "end":
                        ends = min(self.ends, time.monotonic() + _END_SECONDS * slow)
            if over:
                return ""
            if time.monotonic() > ends:
                return "it took too long, and its process was ended"
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                pass

    def _take(self, group: Group, event: dict[str, Any]) -> None:
        result = self.results[group.name]
        if event["event"] == "row":
            row = event["row"]
            result.setdefault("rows", []).append(row)
            self.screen.line(line_of(row))
            self.report.write()
        elif event["event"] == "fact":
            result.setdefault("facts", {})[event["name"]] = event["value"]
            if event["line"]:
                self.screen.line(f"  {event['line']}")
            self.report.write()
        else:
            self._end(group, event["result"])

    def _end(self, group: Group, result: dict[str, Any]) -> None:
        kept = self.results.get(group.name, {})
        self.results[group.name] = kept | {"serves": group.serves} | result
        self.report.write()
        result = self.results[group.name]
        self.screen.line(
            f"{group.name}: {result['state']} {result.get('seconds', '')} "
            f"{str(result.get('why', '')).strip()[:300]}"
        )

    def _trim_log(self) -> None:
        if self.log.stat().st_size > _MOST_LOG_BYTES:
            with self.log.open("rb") as log:
                log.seek(-_MOST_LOG_BYTES // 2, os.SEEK_END)
                kept = log.read()
            self.log.write_bytes(b"[the beginning was too long]\n" + kept)


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        # A process inside a driver call that hangs may never end.
        process.wait(10)
    except subprocess.TimeoutExpired:
        pass


def _status(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"


def line_of(row: dict[str, Any]) -> str:
    """Return the line of a figure."""
    goal = ""
    if row["goal"] is not None:
        goal = f"(goal {row['goal']:.2f}{'' if row['met'] else ', MISSED'})"
    return (
        f"  {row['name']}: {row['seconds'] * 1e3:.3f} ms ±{row['spread'] * 100:.0f}%, "
        f"{row['gb_per_s']:.1f} GB/s, {row['ratio']:.2f} of {row['floor']} {goal} {row['note']}"
    )


def _end_by_signal(number: int, _: FrameType | None) -> None:
    # Only the first: the report is written in peace.
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(name, signal.SIG_IGN)
    raise Ended(f"signal {number}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--part", choices=PARTS)
    task.add_argument("--verdict", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--out", type=Path, help="where the report goes; default: $OUT, else build/gpu"
    )
    parser.add_argument("--python", default=sys.executable, help="a Python with torch")
    parser.add_argument("--pack", type=Path, default=ROOT / "build" / "gpu-pack")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu-work")
    parser.add_argument("--seconds", type=float, help="for the part, in place of its own limit")
    parser.add_argument(
        "--limit",
        action="append",
        type=_limit,
        default=[],
        metavar="GROUP=SECONDS",
        help="what a group may take, in place of its own limit",
    )
    parser.add_argument("--groups", default="", help="only these of the part, with commas")
    parser.add_argument("--emulated", type=Path, help="for tests: a file that makes a device")
    parser.add_argument(
        "--accept-emulated", action="store_true", help="for tests: reports of no GPU can pass"
    )
    options = parser.parse_args(arguments)
    if options.verdict:
        passed, lines = verdict(options.verdict, emulated=options.accept_emulated)
        Screen().verdict(lines)
        return 0 if passed else 1
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(name, _end_by_signal)
    seconds = options.seconds or SECONDS[options.part] * patience(options.emulated)
    signal.alarm(int(seconds) + 10)
    out = options.out or Path(os.environ.get("OUT") or ROOT / "build" / "gpu")
    python = shutil.which(options.python) or options.python
    part = Part(
        options.part,
        out,
        Box(python, options.work, options.pack),
        emulated=options.emulated,
        seconds=seconds,
        limits=dict(options.limit),
        only=list(filter(None, options.groups.split(","))),
    )
    part.run()
    passed, lines = verdict([out], [options.part], emulated=options.emulated is not None)
    part.screen.verdict(lines)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
