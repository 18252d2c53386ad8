"""All checks and measurements that need a GPU, in one command: ``make gpu``.

Needs a GPU, a Python with torch 2.11 or newer built for it, and the folder filled by ``make
gpu-pack`` (or a CUDA compiler, cmake and the packages themselves); no network, no vLLM. If
something is missing, it is reported, and the exit status is 0. Runs within a time budget: checks
first, then compute-sanitizer, then measurements; stages that do not fit are skipped and named.

The output ends with a table and, on the last line, JSON of all results. The exit status is 1 if a
check failed. A missed goal is marked in the table and does not fail the run.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIBRARY = "libkvshelf_ops.so"
LEAST_TORCH = (2, 11)
#: Exit status of compute-sanitizer when it found something.
FOUND_BY_TOOL = 77

PROBE = """
import json, sys
found = {"python": sys.version.split()[0]}
try:
    import torch
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda
    found["available"] = torch.cuda.is_available()
    if found["available"]:
        p = torch.cuda.get_device_properties(0)
        found.update(gpu=p.name, capability=[p.major, p.minor], memory=p.total_memory,
                     processors=p.multi_processor_count)
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@dataclass
class Run:
    """One run: the machine, the paths and the results."""

    python: str
    work: Path
    device: str
    ends: float
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds left in the time budget."""
        return self.ends - time.monotonic()

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the stages: kvshelf and its packages first, no packages of the user."""
        kept = {name: value for name, value in os.environ.items() if "KVSHELF" not in name}
        folders = [str(self.work / "site"), kept.get("PYTHONPATH", "")]
        return kept | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}

    def stage(
        self, name: str, command: Sequence[object], seconds: float, *, json_file: Path | None = None
    ) -> dict[str, Any]:
        """Run a stage for at most `seconds`; it writes to our output."""
        began = time.monotonic()
        print(f"\n{name}", flush=True)
        if json_file is not None:
            json_file.unlink(missing_ok=True)
        result: dict[str, Any] = {}
        try:
            done = subprocess.run(
                [str(part) for part in command],
                env=self.environment,
                timeout=max(1.0, seconds),
                check=False,
            )
            result["exit"] = done.returncode
        except subprocess.TimeoutExpired:
            result["exit"] = None
            result["failed"] = f"not finished after {seconds:.0f} s"
            print(f"  {result['failed']}")
        except OSError as error:
            result["exit"] = None
            result["failed"] = str(error)
        result["seconds"] = round(time.monotonic() - began, 1)
        if json_file is not None and json_file.exists():
            result |= json.loads(json_file.read_text())
        return result


def reason_to_skip(found: dict[str, Any]) -> str | None:
    """Return why this Python cannot run the checks, or None."""
    if "torch" not in found:
        return f"this Python has no torch that works: {found.get('error', 'unknown')}"
    version = tuple(int(part) for part in found["torch"].split("+")[0].split(".")[:2])
    if version < LEAST_TORCH:
        return f"torch {found['torch']} is older than {'.'.join(map(str, LEAST_TORCH))}"
    if not found.get("available"):
        return f"torch {found['torch']} sees no GPU"
    if found["capability"][0] < 8:
        return f"{found['gpu']} has compute capability {found['capability']}, 8.0 is needed"
    return None


def unpack(pack: Path, site: Path, python: str) -> list[str]:
    """Unpack the wheels of a pack that fit this Python; return their names."""
    names = []
    tag = "cp" + "".join(python.split(".")[:2])
    for wheel in sorted(pack.glob("*.whl")):
        interpreter, abi = wheel.stem.split("-")[-3:-1]
        if interpreter.startswith("cp") and tag not in interpreter and abi != "abi3":
            print(f"  {wheel.name} is not for Python {python}")
            continue
        with zipfile.ZipFile(wheel) as content:
            content.extractall(site)
        names.append(wheel.name)
    return names


def take_sources(site: Path) -> None:
    """Replace the wheel's Python files by those of the working tree, if there is one."""
    package = site / "kvshelf"
    shutil.copytree(ROOT / "src" / "kvshelf", package, dirs_exist_ok=True)
    shutil.copytree(ROOT / "backends", package / "backends", dirs_exist_ok=True)


def build_library(run: Run) -> dict[str, Any]:
    """Compile the library on this machine, for its GPU only."""
    cmake = shutil.which("cmake")
    if cmake is None:
        return {"failed": "there is no library in the pack and no cmake to build one"}
    folder = run.work / "library"
    major, minor = run.report["machine"]["capability"]
    configured = run.stage(
        "building the library",
        [
            *(cmake, "-S", ROOT / "cuda", "-B", folder, f"-DPython_EXECUTABLE={run.python}"),
            *("-DKVSHELF_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={major}{minor}-real"),
        ],
        min(60, run.left),
    )
    if configured["exit"] != 0:
        return configured
    built = run.stage("", [cmake, "--build", folder, "--parallel"], min(120, run.left))
    if built["exit"] == 0:
        shutil.copy(folder / LIBRARY, run.work / "site" / "kvshelf" / LIBRARY)
    return built


def prepare(run: Run, pack: Path | None) -> str | None:
    """Make kvshelf importable; return why that failed, or None."""
    site = run.work / "site"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    run.report["pack"] = []
    if pack is not None and pack.is_dir():
        run.report["pack"] = unpack(pack, site, run.report["machine"]["python"])
    take_sources(site)
    if not (site / "kvshelf" / LIBRARY).exists() and run.device.startswith("cuda"):
        run.report["build"] = build_library(run)
    tried = subprocess.run(
        [
            *(run.python, "-c"),
            "from kvshelf.kv import ops, device; from kvshelf.shelf import shelf; import sys;"
            "print(ops.implementation(sys.argv[1]), ops.kernel_problem(sys.argv[1]))",
            run.device,
        ],
        env=run.environment,
        check=False,
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        return f"kvshelf cannot be imported:\n{tried.stderr.strip()}"
    run.report["implementation"] = tried.stdout.strip()
    print(f"gather and scatter: {run.report['implementation']}", flush=True)
    return None


def find_sanitizer(site: Path) -> str | None:
    """Return the path of compute-sanitizer, or None."""
    found = shutil.which("compute-sanitizer")
    if found is not None:
        return found
    places = [
        *Path("/usr/local").glob("cuda*/bin/compute-sanitizer"),
        *Path("/usr/local").glob("cuda*/compute-sanitizer/compute-sanitizer"),
        *Path("/opt/nvidia").glob("**/compute-sanitizer"),
        *site.glob("nvidia/**/compute-sanitizer"),
    ]
    for place in places:
        if place.is_file():
            if not os.access(place, os.X_OK):  # out of a wheel
                for file in place.parent.iterdir():
                    file.chmod(file.stat().st_mode | 0o111)
            return str(place)
    return None


def sanitize(run: Run) -> dict[str, Any]:
    """Run the small checks under memcheck and racecheck."""
    tool = find_sanitizer(run.work / "site")
    if tool is None:
        return {"skipped": "no compute-sanitizer on this machine and none in the pack"}
    results: dict[str, Any] = {"tool": tool}
    options = subprocess.run([tool, "--help"], check=False, capture_output=True, text=True).stdout
    # Only our kernels: torch's own would take most of the time.
    only = ["--kernel-name", "kns=copy_kernel"] if "--kernel-name" in options else []
    for check in ("memcheck", "racecheck"):
        if run.left < 100:
            results[check] = {"skipped": "no time left"}
            continue
        found = run.work / f"{check}.json"
        command = [
            *(tool, "--tool", check, "--error-exitcode", FOUND_BY_TOOL, *only),
            *(run.python, HERE / "gpu_checks.py", "--device", run.device, "--small"),
            *("--seconds", "40", "--json", found),
        ]
        result = run.stage(
            f"compute-sanitizer {check}", command, min(90, run.left - 70), json_file=found
        )
        result.pop("groups", None)
        if result["exit"] == FOUND_BY_TOOL:
            result["failed"] = "the tool reported errors"
        elif result.get("failed") is True:
            result["failed"] = "bytes differed"
        elif result.get("failed") is False:
            del result["failed"]
        elif "failed" not in result:
            # It ended before the checks did: some virtual machines do not let it at the device.
            result["skipped"] = f"the tool does not run here (exit status {result['exit']})"
        results[check] = result
    return results


def table(report: dict[str, Any]) -> list[str]:
    """Return the lines of the table of figures."""
    rows = report.get("bench", {}).get("rows", [])
    if not rows:
        return ["nothing was measured"]
    lines = [f"{'':44} {'time':>12} {'GB/s':>8} {'ratio':>6}   floor, goal"]
    for row in rows:
        goal = ""
        if row["goal"] is not None:
            goal = f"≥ {row['goal']:.2f} {'ok' if row['met'] else 'MISSED'}"
        lines.append(
            f"{row['name']:44} {row['seconds'] * 1e3:9.3f} ms {row['gb_per_s']:8.1f} "
            f"{row['ratio']:6.2f}   {row['floor']} {goal} {row['note']}".rstrip()
        )
    return lines


def failures(report: dict[str, Any]) -> list[str]:
    """Return a description of the failures."""
    found = []
    checks = report.get("checks", {})
    if checks.get("failed") is True or isinstance(checks.get("failed"), str):
        found += [
            f"{group['name']}: {group['failed']}"
            for group in checks.get("groups", [])
            if "failed" in group
        ]
        if isinstance(checks["failed"], str):
            found.append(f"checks: {checks['failed']}")
    elif checks and checks.get("exit") != 0:
        found.append(f"checks: exit status {checks.get('exit')}")
    for name, result in report.get("sanitizer", {}).items():
        if isinstance(result, dict) and "failed" in result:
            found.append(f"compute-sanitizer {name}: {result['failed']}")
    bench = report.get("bench", {})
    if bench and bench.get("exit") != 0:
        found.append(f"figures: {bench.get('failed', bench.get('exit'))}")
    return found


def finish(run: Run, path: Path) -> int:
    """Print the end of the output; return the exit status."""
    report = run.report
    wrong = failures(report)
    if "skipped" in report:
        print(f"skipped: {report['skipped']}")
    else:
        machine = report["machine"]
        print(f"\n{machine.get('gpu', run.device)}, torch {machine['torch']}, {report['date']}")
        print("\n".join(table(report)))
        if wrong:
            print("\nfailed:\n  " + "\n  ".join(wrong))
        else:
            print(f"\n{report['checks'].get('comparisons', 0)} comparisons, all equal")
    text = json.dumps(report, separators=(",", ":"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(text)
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="a Python with torch")
    parser.add_argument("--pack", type=Path, default=ROOT / "build" / "gpu-pack")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--report", type=Path, help="default: report.json in --work")
    parser.add_argument("--budget", type=float, default=460, help="seconds; default: 460")
    parser.add_argument("--device", default="cuda:0", help="cpu tries this program out")
    parser.add_argument("--tiny", action="store_true", help="figures of tiny sizes")
    options = parser.parse_args(arguments)
    python = shutil.which(options.python) or options.python
    run = Run(python, options.work, options.device, time.monotonic() + options.budget)
    run.work.mkdir(parents=True, exist_ok=True)
    report_path = options.report or run.work / "report.json"
    run.report = {
        "kvshelf_gpu": 1,
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "host": {"machine": platform.machine(), "cpus": os.cpu_count()},
    }
    probed = subprocess.run(
        [python, "-c", PROBE], check=False, capture_output=True, text=True, cwd=run.work
    )
    lines = probed.stdout.splitlines()
    found = json.loads(lines[-1]) if lines else {"error": probed.stderr.strip()[-300:]}
    run.report["machine"] = found
    reason = reason_to_skip(found) if options.device.startswith("cuda") else None
    if reason is not None:
        run.report["skipped"] = reason
        return finish(run, report_path)

    problem = prepare(run, options.pack)
    if problem is not None:
        run.report["skipped"] = problem
        return finish(run, report_path)
    checks, bench = run.work / "checks.json", run.work / "bench.json"
    run.report["checks"] = run.stage(
        "checks",
        [
            *(python, HERE / "gpu_checks.py", "--device", run.device, "--json", checks),
            *("--seconds", "120", *(["--small"] if options.tiny else [])),
        ],
        min(200, run.left - 60),
        json_file=checks,
    )
    if run.device.startswith("cuda"):
        run.report["sanitizer"] = sanitize(run)
    run.report["bench"] = run.stage(
        "figures",
        [
            *(python, HERE / "gpu_bench.py", "--device", run.device, "--json", bench),
            *("--seconds", max(10, int(run.left - 60)), *(["--tiny"] if options.tiny else [])),
            *("--threads", min(8, os.cpu_count() or 1)),
        ],
        run.left - 5,
        json_file=bench,
    )
    return finish(run, report_path)


if __name__ == "__main__":
    sys.exit(main())
