"""``first_light.py`` on an emulated device, honest and with seeded faults; and its verdict."""

from __future__ import annotations

import atexit
import contextlib
import copy
import ctypes
import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import first_light
import gpu_box
import gpu_checks
import gpu_design
import gpu_figures
import gpu_groups
import gpu_machine
import gpu_measure
import gpu_pack
import gpu_peers
import gpu_tools
import pytest
import torch
from gpu_decisions import DECISIONS
from gpu_groups import Context, Timing
from gpu_parts import PARTS, SECONDS
from gpu_verdict import verdict

from kvshelf.kv import ops
from tests.native.bare_machine import hide_packages
from tests.native.emulation import emulation
from tests.native.fake_cudart import fake_cudart
from tests.support.variants import variants

CPU = torch.device("cpu")
SCRIPTS = Path(first_light.__file__).parent
DEVICE = Path(__file__).with_name("emulated_device.py")
Reports = dict[str, dict[str, Any]]
#: A few groups of a part, for faults.
FEW = ("kernel_attributes", "forms_dtypes_widths", "deep_models", "the_way_to_staging")

# --- runs on the emulated device ---------------------------------------------------


def command(part: str, out: Path, *options: object) -> list[str]:
    arguments = ("--part", part, "--out", out, "--work", out.parent / "work", *options)
    return [sys.executable, str(SCRIPTS / "first_light.py"), *map(str, arguments)]


@functools.cache
def bare() -> str:
    """A folder that hides from Python what a machine with a GPU does not have."""
    folder = Path(tempfile.mkdtemp(prefix="kvshelf-bare-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(hide_packages(folder, gpu_pack.PACKAGES))


def environment(fault: str = "") -> dict[str, str]:
    emulation()  # builds it, so that no time limit runs meanwhile
    paths = [bare(), str(SCRIPTS), *filter(None, sys.path)]
    return os.environ | {"SEEDED_FAULT": fault, "PYTHONPATH": os.pathsep.join(paths)}


def python(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python as on a bare machine."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment() | variables,
        check=False,
        capture_output=True,
        text=True,
    )


def run_part(part: str, out: Path, *options: object, fault: str = "") -> tuple[int, str]:
    done = subprocess.run(
        command(part, out, "--emulated", DEVICE, *options),
        env=environment(fault),
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def report_of(out: Path, part: str = "correctness") -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / f"{part}.json").read_text())
    assert {path.name for path in out.iterdir()} == {f"{part}.json", f"{part}.log"}
    return report


@contextlib.contextmanager
def begun(part: str, out: Path, group: str, *options: object, fault: str) -> Iterator[Any]:
    """A run that has come to a group, which hangs."""
    process = subprocess.Popen(
        command(part, out, "--emulated", DEVICE, *options),
        env=environment(fault),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            assert process.poll() is None
            with contextlib.suppress(OSError):
                if group in json.loads((out / f"{part}.json").read_text())["groups"]:
                    break
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def is_running(process: str) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def made_reports(device: str = "cuda") -> Reports:
    """Reports as a good run writes them."""
    row = {"name": "a row", "ratio": 0.9, "goal": 0.85, "met": True}
    reports = {}
    for part, groups in PARTS.items():
        reports[part] = {
            "kvshelf_first_light": 1,
            "part": part,
            "device": device,
            "began": "2026-01-01T00:00:00+00:00",
            "state": "complete",
            "seconds": 60.0,
            "sources": gpu_box.all_sources(),
            "planned": [group.name for group in groups],
            "machine": {"gpu": "a GPU", "torch": "2.11.0+cu130"},
            "library": {
                library: {"library": "packed", "served": "cuda"} for library in ("wheel", "nvcc")
            },
            "groups": {
                group.name: {
                    "state": "ok",
                    "serves": group.serves,
                    "served": group.serves,
                    "launches": 7,
                    "comparisons": 3,
                    "seconds": 1.0,
                    "rows": [dict(row)],
                }
                for group in groups
            },
        }
    return reports


def written(reports: Reports, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for part, report in reports.items():
        (folder / f"{part}.json").write_text(json.dumps(report))
    return folder


def judged_with(out: Path, tmp_path: Path) -> tuple[bool, str]:
    """The verdict on a report of an emulated device beside good ones of all other parts."""
    good = written(made_reports("emulated"), tmp_path / "good")
    passed, lines = verdict([good, out], emulated=True)
    return passed, "\n".join(lines)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The reports of parts that passed, each run once."""
    folder = tmp_path_factory.mktemp("honest")

    @functools.cache
    def of(part: str) -> Path:
        code, output = run_part(part, folder / part)
        assert code == 0, output
        assert len(output) <= first_light.MOST_PRINTED
        return folder / part

    return of


@pytest.mark.parametrize("part", variants(PARTS, ()))
def test_an_honest_part_passes(part: str, honest: Callable[[str], Path]) -> None:
    report = report_of(honest(part), part)
    assert report["state"] == "complete"
    states = {name: result["state"] for name, result in report["groups"].items()}
    assert set(states.values()) <= {"ok", "not run", "needs a GPU"}, states


@pytest.mark.slow
def test_an_honest_run_passes_but_not_as_one_on_a_gpu(honest: Callable[[str], Path]) -> None:
    folders = [honest(part) for part in PARTS]
    assert verdict(folders)[0] is False
    passed, lines = verdict(folders, emulated=True)
    assert passed, lines
    assert lines[-1].startswith("verdict: PASS, by an emulated device, which says nothing")
    told = "\n".join(lines)
    assert "memcheck: an emulated device has no tools" in told
    assert "decision B2" in told
    unmeasured = [line for line in lines if ": open" in line]
    assert [line.partition(":")[0] for line in unmeasured] == ["decision wake-up"]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "first_light.py"), "--verdict", *map(str, folders)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "FAILED correctness: it ran on a device that is emulated, not cuda" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("verdict: FAIL (")


def test_all_sizes_and_widths_are_compared(honest: Callable[[str], Path]) -> None:
    groups = report_of(honest("correctness"))["groups"]
    assert groups["forms_dtypes_widths"]["widths"] == [1, 4, 8, 16]
    assert groups["forms_dtypes_widths"]["comparisons"] > 500


def test_a_bare_machine_imports_all_that_runs_there() -> None:
    """Also what only runs on a GPU."""
    names = [path.stem for path in SCRIPTS.glob("*.py")]
    if importlib.util.find_spec("triton") is None:
        names.remove("triton_writer")
    for code, problem in (
        (f"import {', '.join(names)}", ""),
        ("import pydantic", "a bare machine has no module 'pydantic'"),
    ):
        done = python("-c", code)
        assert bool(done.returncode) is bool(problem), done.stderr
        assert problem in done.stderr


@pytest.mark.parametrize(
    ("fault", "group", "why"),
    variants(
        [
            ("one_byte", "deep_models", "bytes differ, first at"),
            ("illegal_address", "forms_dtypes_widths", "illegal memory access"),
            ("torch_copies", "the_way_to_staging", "not carried out by the library"),
            ("refused", "deep_models", "left"),
            ("unfenced", "loads_behind_the_engine", "blocks that were zeroed before load"),
            ("elsewhere", "overwritten_blocks", "of blocks that were overwritten"),
            ("elsewhere", "loads_behind_the_engine", "blocks that were zeroed before load"),
            ("early", "overwritten_blocks", "of blocks that were overwritten"),
            ("early", "the_way_to_staging", "staging: "),
            ("dropped", "the_way_to_staging", "staging: "),
            ("exposed", "captures_beside_copies", "during capture"),
            ("lost", "one_head", "loaded by kvshelf: "),
            ("lost", "from_files", "layer 0 from files: "),
            ("slow_link", "rates_are_learned", "out 1.0, in 1.0 GB/s, less than 10"),
            ("lost", "ways_of_loading", "loaded by chunks, all blocks: "),
            ("first_only", "ways_of_loading", "loaded by objects, all blocks: "),
            ("stale", "digests", " flipped: "),
        ],
        {
            ("one_byte", "deep_models", "bytes differ, first at"),
            ("early", "overwritten_blocks", "of blocks that were overwritten"),
            ("lost", "from_files", "layer 0 from files: "),
        },
    ),
)
def test_a_check_finds_what_it_looks_for(tmp_path: Path, fault: str, group: str, why: str) -> None:
    events = tmp_path / "events"
    (part,) = (part for part, groups in PARTS.items() if group in {one.name for one in groups})
    done = python(
        *(SCRIPTS / "gpu_groups.py", "--part", part),
        *("--groups", group, "--events", events, "--emulated", DEVICE),
        SEEDED_FAULT=fault,
        KVSHELF_OPS="cuda",
    )
    # An emulated device that is still at work may end the process in its own way.
    assert done.returncode, done.stderr
    result = json.loads(events.read_text().splitlines()[-1])["result"]
    assert result["state"] == "failed"
    assert why in result["why"]


def test_a_group_that_hangs_is_ended_and_the_others_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    limit = ("--limit", "forms_dtypes_widths=3")
    code, _ = run_part("correctness", out, "--groups", ",".join(FEW), *limit, fault="hang")
    assert code == 1
    groups = report_of(out)["groups"]
    assert "took too long" in groups["forms_dtypes_widths"]["why"]
    assert groups["deep_models"]["state"] == "ok"
    passed, told = judged_with(out, tmp_path)
    assert not passed
    assert "forms_dtypes_widths failed: it took too long" in told


@pytest.mark.slow
def test_a_part_ends_in_time_and_names_what_it_left_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, _ = run_part(
        *("correctness", out, "--groups", ",".join(FEW), "--seconds", 14), fault="hang"
    )
    assert code == 1
    report = report_of(out)
    assert report["state"] == "complete"
    assert report["groups"]["deep_models"]["why"] == "no time was left for it"
    assert not judged_with(out, tmp_path)[0]


@pytest.mark.parametrize("number", variants([signal.SIGKILL, signal.SIGTERM], {signal.SIGTERM}))
def test_a_killed_part_leaves_a_report_that_says_so(tmp_path: Path, number: int) -> None:
    out = tmp_path / "out"
    few = ("--groups", ",".join(FEW))
    with begun("correctness", out, "forms_dtypes_widths", *few, fault="hang") as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(number)
        process.wait()
    report = json.loads((out / "correctness.json").read_text())
    ended = "running" if number == signal.SIGKILL else "ended: signal 15"
    assert report["state"] == ended
    assert report["groups"]["kernel_attributes"]["state"] == "needs a GPU"
    assert report["groups"]["forms_dtypes_widths"]["state"] == "running"
    # Nothing goes on to use the device.
    assert children
    while any(map(is_running, children)):
        time.sleep(0.05)
    passed, told = judged_with(out, tmp_path)
    assert not passed
    assert f"FAILED correctness: not complete: {ended}" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_part_fails(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(command("correctness", out), check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "sees no GPU" in done.stdout
    assert report_of(out)["state"].startswith("ended: torch")
    passed, lines = verdict([written(made_reports(), tmp_path / "good"), out])
    assert not passed
    assert any("sees no GPU" in line for line in lines)


def fake_tool(folder: Path, body: str) -> str:
    tool = folder / "tool"
    tool.write_text(
        '#!/bin/sh\nfor a; do [ "$b" = --events ] && f=$a; b=$a; done\n'
        f'say() {{ echo "$1" >> "$f"; }}\n{body}\n'
    )
    tool.chmod(0o755)
    return str(tool)


def under_tool(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tool: tuple[list[str], str],
    limits: dict[str, float],
) -> tuple[bool, dict[str, Any]]:
    """Run the last group of a part, that of a tool; whether the part passed, and its result."""
    monkeypatch.setitem(PARTS, name, PARTS[name][-1:])
    monkeypatch.setattr(first_light.Part, "_prepare", lambda self: "")
    monkeypatch.setattr(gpu_tools, "command", lambda *_: tool)
    box = gpu_box.Box(sys.executable, tmp_path / "work", tmp_path / "pack")
    out = tmp_path / "out"
    part = first_light.Part(name, out, box, emulated=None, seconds=60, limits=limits)
    passed = part.run()
    (result,) = report_of(out, name)["groups"].values()
    return passed, result


BEGIN = """say '{"event": "begin", "name": "memcheck"}'\n"""
OK = """say '{"event": "end", "result": {"state": "ok", "served": "cuda", "launches": 1}}'\n"""


@pytest.mark.parametrize(
    ("body", "state", "why"),
    [
        (BEGIN + OK, "ok", ""),
        (BEGIN + OK + "exit 77", "failed", "memcheck found errors"),
        (BEGIN + OK + "exit 3", "failed", "exit status 3"),
        (BEGIN + OK + "sleep 1000", "failed", "took too long"),
        (BEGIN + "kill -9 $$", "failed", "signal 9"),
        ("exit 1", "failed", "exit status 1"),
        ("sleep 1000", "failed", "took too long"),
        (None, "not run", "memcheck: refused"),
    ],
)
def test_what_a_checking_tool_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str | None, state: str, why: str
) -> None:
    tool = ([], "refused") if body is None else ([fake_tool(tmp_path, body)], "")
    asleep = "sleep" in (body or "")
    monkeypatch.setattr(first_light, "_START_SECONDS", 0.1 if asleep and OK not in body else 30)
    monkeypatch.setattr(first_light, "_END_SECONDS", 0.1 if asleep else 30)
    limits = {"memcheck": 5.0 if asleep else 60.0}
    passed, result = under_tool(tmp_path, monkeypatch, "correctness", tool, limits)
    assert passed is (state != "failed")
    assert result["state"] == state
    assert why in result.get("why", "")


@pytest.mark.parametrize("kernels", [[], [{"kernel": "copy_kernel<uint4, 1>"}]])
def test_ncu_has_to_see_our_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: list[dict[str, str]]
) -> None:
    tool = [fake_tool(tmp_path, BEGIN.replace("memcheck", "ncu") + OK)]
    monkeypatch.setattr(gpu_tools, "ncu_figures", lambda log: kernels)
    passed, result = under_tool(tmp_path, monkeypatch, "design", (tool, ""), {})
    assert passed is bool(kernels)
    assert result["state"] == ("ok" if kernels else "failed")


def test_what_is_printed_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    screen = first_light.Screen()
    for _ in range(1000):
        screen.line("x" * 300)
    screen.verdict(["FAILED one", *["y" * 300] * 100, *["FAILED"] * 1000, "the end"])
    printed = capsys.readouterr().out
    assert len(printed) <= first_light.MOST_PRINTED
    assert "FAILED one" in printed
    assert "y" not in printed
    assert printed.endswith("the end\n")


def test_parts_fit_into_their_time() -> None:
    assert {part: (seconds + 10) // 60 for part, seconds in SECONDS.items()} == {
        "correctness": 7,
        "headline": 6,
        "design": 5,
    }
    for part, groups in PARTS.items():
        assert len({group.name for group in groups}) == len(groups)
        assert all(group.seconds < SECONDS[part] for group in groups)


# --- the verdict -------------------------------------------------------------------


def test_good_reports_of_a_gpu_pass(tmp_path: Path) -> None:
    folders = []
    for part, report in made_reports().items():
        folders.append(written({part: report}, tmp_path / part))
    passed, lines = verdict(folders)
    assert passed, lines
    assert lines[-1] == "verdict: PASS (0 failures)"


#: What is wrong: where in the report of a part (correctness, unless it is named), what is different
#: there (None: it is missing), and what the verdict says.
SPOILED: dict[str, tuple[str, dict[str, Any] | None, str]] = {
    "a part is missing": ("design", None, "design: there is no report"),
    "an emulated device": ("correctness", {"device": "emulated"}, "a device that is emulated"),
    "killed": ("headline", {"state": "running"}, "headline: not complete"),
    "other sources": ("correctness", {"sources": "x"}, "of different sources"),
    "another GPU": ("design/machine", {"gpu": "other"}, "of different GPUs"),
    "other groups": ("correctness", {"planned": ["graphs"]}, "not those of this version"),
    "a group is missing": ("groups/graphs", None, "graphs missing"),
    "a group failed": ("groups/graphs", {"state": "failed", "why": "y"}, "graphs failed: y"),
    "a group was not run": (
        "groups/registered_memory",
        {"state": "not run", "why": "y"},
        "registered_memory not run: y",
    ),
    "a group needs a GPU": ("groups/graphs", {"state": "needs a GPU"}, "graphs needs a GPU"),
    "torch served": ("groups/graphs", {"served": "torch"}, "graphs was served by torch, not cuda"),
    "torch serves a probe": ("library/wheel", {"served": "torch"}, "wheel did not serve"),
    "no kernel was launched": ("groups/*", {"launches": 0}, "no kernel was launched"),
    "no GPU": ("machine/gpu", None, "it names no GPU"),
    "half a report": ("state", None, "its report is damaged"),
}


def spoil(reports: Reports, where: str, change: dict[str, Any] | None) -> None:
    *path, last = where.split("/")
    found: Any = reports if {where, *path} & {*PARTS} else reports["correctness"]
    for name in path:
        found = found[name]
    if change is None:
        del found[last]
    else:
        for one in found.values() if last == "*" else [found[last]]:
            one.update(change)


@pytest.mark.parametrize("what", SPOILED)
def test_whatever_is_wrong_fails(tmp_path: Path, what: str) -> None:
    reports = made_reports()
    where, change, told = SPOILED[what]
    spoil(reports, where, change)
    passed, lines = verdict([written(reports, tmp_path / "out")])
    assert not passed
    assert any(line.startswith("FAILED ") and told in line for line in lines), lines
    assert lines[-1].startswith("verdict: FAIL (")


def test_a_report_cut_off_is_a_failure(tmp_path: Path) -> None:
    out = written(made_reports(), tmp_path / "out")
    (out / "correctness.json").write_text('{"part": "corr')
    passed, lines = verdict([out])
    assert not passed
    assert any("is no report" in line for line in lines)


def test_what_a_machine_lacks_is_named_and_passes(tmp_path: Path) -> None:
    reports = made_reports()
    reports["correctness"]["groups"]["memcheck"] = {"state": "not run", "why": "memcheck: refused"}
    reports["correctness"]["groups"]["far_offsets"] = {
        "state": "not run",
        "why": "too little memory",
    }
    reports["headline"]["groups"]["mla"]["rows"][0] |= {"ratio": 0.5, "met": False}
    passed, lines = verdict([written(reports, tmp_path / "out")])
    assert passed
    told = "\n".join(lines)
    assert (
        "correctness: not run: far_offsets (too little memory); memcheck (memcheck: refused)"
        in told
    )
    assert "MISSED a row: 0.50, not 0.85" in told


def test_of_two_reports_of_a_part_the_last_one_counts(tmp_path: Path) -> None:
    old = made_reports()
    old["correctness"]["state"] = "running"
    new = copy.deepcopy(made_reports()["correctness"]) | {"began": "2026-01-02T00:00:00+00:00"}
    folders = [written({"correctness": new}, tmp_path / "new"), written(old, tmp_path / "old")]
    assert verdict(folders)[0]
    assert verdict(folders[::-1])[0]
    assert not verdict(folders[1:])[0]


def loads(**gains: float) -> dict[str, Any]:
    """Seconds of direct loads that are so many times as fast, by KiB."""
    ways = {
        int(key[1:]) * 1024: {"alone": [1.0, gain], "beside products": [1.0, gain]}
        for key, gain in gains.items()
    }
    return {"direct_loads": {"loads": ways}}


def batches(**gains: float) -> dict[str, Any]:
    """Seconds of batches with other attributes, which are so many times as fast, by KiB."""
    measured, now = {}, {}
    for key, gain in gains.items():
        piece = int(key[1:]) * 1024
        now[piece] = gpu_design.attributes_now(piece)
        measured[piece] = dict.fromkeys(gpu_design.ATTRIBUTES, 9.0)
        measured[piece] |= {now[piece]: 1.0, "stream, default": 1 / gain}
    return {"copies_by_piece": {"in": measured, "attributes now": now}}


def steps(**milliseconds: float) -> dict[str, Any]:
    facts: dict[str, Any] = {f"fallback_{name}": {} for name in ("cuda", "triton")}
    for name, took in milliseconds.items():
        facts[f"fallback_{name}"] = {"seconds of a step": took / 1e3}
    return facts


def ways(**others: tuple[float, float, float]) -> dict[str, Any]:
    """Medians, 99th percentiles and rates of ways of loading; a step alone takes 1 second."""
    measured = {"default": (1.05, 1.2, 50.0)} | others
    names = ("median", "99 %", "GB/s")
    return {
        "ways_of_loading": {
            "alone": 1.0,
            "ways": {name: dict(zip(names, way, strict=True)) for name, way in measured.items()},
        }
    }


def hashes(**shares: tuple[float, float]) -> dict[str, Any]:
    """Seconds of the digests of chunks on 8 and 16 processors, as parts of their copies'."""
    return {
        "digests": {
            "cost": {
                name: {"seconds": {8: first * 3, 16: second * 3}, "seconds of its copies": 3}
                for name, (first, second) in shares.items()
            }
        }
    }


@pytest.mark.parametrize(
    ("key", "facts", "expected"),
    [
        ("B2", {}, "open"),
        ("B2", loads(), "open"),
        ("B2", loads(_32=0.5, _64=1.0, _128=1.3, _1024=1.3), "keep direct loads of pieces from 65"),
        ("B2", loads(_32=1.0, _64=1.3, _1024=1.0), "direct loads of pieces from 32768 bytes on"),
        ("B2", loads(_64=0.5, _128=1.0, _1024=1.3), "direct loads of pieces from 131072 bytes on"),
        ("B2", loads(_72=0.1, _64=1.3, _1024=1.3), "keep"),
        ("B2", loads(_4=9.0, _64=1.1, _1024=1.1), "remove direct loads: at most 1.10"),
        ("B2", loads(_64=1.3, _1024=0.5), "remove direct loads: the largest"),
        ("B3", {}, "open"),
        ("B3", batches(_4=2.0, _64=1.0, _1024=1.2), "keep them: stream, default is 1.00 times"),
        ("B3", batches(_4=0.5, _64=1.1, _1024=1.2), "change: stream, default is 1.10 times"),
        ("B8", steps(triton=1), "open"),
        ("B8", steps(cuda=1), "cuda may store (1.0 ms)"),
        ("B8", steps(cuda=1, triton=20), "cuda may store (1.0 ms), triton may store (20.0 ms)"),
        ("B8", steps(cuda=1, triton=21), "cuda may store (1.0 ms), triton stores only if it is"),
        ("wake-up", {}, "open"),
        ("wake-up", {"machine": {"seconds to wake up": 101e-6}}, "spin: a thread that sleeps is"),
        ("wake-up", {"machine": {"seconds to wake up": 100e-6}}, "sleep: a thread that sleeps is"),
        ("ring and grid", {}, "open"),
        ("ring and grid", ways(), "keep default: steps beside loads are 5.0 % longer with default"),
        ("ring and grid", ways(a=(1.041, 1.2, 50)), "keep default: "),
        ("ring and grid", ways(a=(1.039, 1.2, 50)), "change to a: "),
        ("ring and grid", ways(a=(1.02, 1.2, 48.4), b=(1.02, 1.23, 50)), "keep default: "),
        ("ring and grid", ways(a=(1.032, 1.2, 50), b=(1.03, 1.2, 50)), "change to a: "),
        ("ring and grid", ways(a=(1.035, 1.2, 50), b=(1.03, 1.2, 50)), "change to b: "),
        ("digests", {}, "open"),
        ("digests", hashes(), "open"),
        ("digests", hashes(a=(0.2, 0.1), b=(0.24, 0.2)), "verify on 8 SMs: "),
        ("digests", hashes(a=(0.2, 0.1), b=(0.25, 0.2)), "verify on 16 SMs: "),
        ("digests", hashes(a=(0.2, 0.1), b=(0.4, 0.25)), "verify on CPUs: the digests of"),
    ],
)
def test_what_figures_decide(key: str, facts: dict[str, Any], expected: str) -> None:
    (decision,) = (one for one in DECISIONS if one.key == key)
    assert decision.decide(json.loads(json.dumps(facts))).startswith(expected)


# --- groups ------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["one byte", "a byte beside", "not the last token"])
def test_checks_notice_what_is_wrong(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    gather = ops.gather_kv

    def spoiled(caches: Any, slots: Any, out: torch.Tensor, *rest: Any, **keywords: Any) -> None:
        before = out.clone()
        gather(caches, slots, out, *rest, **keywords)
        if wrong == "one byte":
            out.view(-1)[-1:] ^= 1
        elif wrong == "not the last token":
            out[..., -2:] = before[..., -2:]
        else:
            torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage())[-1] = 0

    monkeypatch.setattr(ops, "gather_kv", spoiled)
    with pytest.raises(AssertionError, match="bytes differ"):
        gpu_checks.deep_models(Context(CPU, small=True))


@pytest.mark.long
def test_layouts_are_learned_from_writers_of_their_own() -> None:
    ctx = Context(CPU)
    gpu_checks.layouts_learned_from_torch(ctx)
    assert ctx.comparisons == 5 * 2 * 2


@pytest.mark.slow
def test_the_triton_writer_writes_what_indexing_writes() -> None:
    pytest.importorskip("triton")
    code = """
import torch, gpu_checks, gpu_groups, triton_writer
ctx = gpu_groups.Context(torch.device("cpu"))
gpu_checks.learn_all(ctx, gpu_checks.one_by_one(triton_writer.write))
assert ctx.comparisons == 20
"""
    done = python("-c", code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


def test_figures_stand_beside_floors() -> None:
    said: list[dict[str, Any]] = []
    ctx = Context(CPU, emulated=True, small=True, serves="cpp", say=said.append)
    for group in (gpu_figures.store_and_load, gpu_figures.mla, gpu_design.step_of_stores):
        group(ctx)
    rows = [what["row"] for what in said if what["event"] == "row"]
    assert len(rows) == 3 + 4 + 2
    for row in rows:
        assert row["seconds"] > 0
        assert row["ratio"] == pytest.approx(row["floor_seconds"] / row["seconds"])
        assert (row["met"] is None) == (row["goal"] is None)
        assert first_light.line_of(row)
    json.dumps(said, allow_nan=False)


def test_the_kernel_of_vllm_gets_the_pages_of_each_request() -> None:
    ctx = Context(CPU, small=True, serves="cpp")
    shape = replace(gpu_measure.sized(ctx, gpu_peers.RANK), heads=1, shards=1)
    for form in ("NHD", "K in front of V"):
        caches = gpu_measure.make_caches(replace(shape, form=form), CPU)
        before = [view.clone() for view in caches.views]
        staging = [torch.zeros(shape.object_bytes, dtype=torch.uint8) for _ in range(shape.chunks)]
        pages = gpu_peers.Pages(ctx, caches, staging)
        pages.by_batch(load=False)
        for view in caches.views:
            view.zero_()
        requests = []

        def copy(
            source: torch.Tensor, to: torch.Tensor, sizes: torch.Tensor, bytes_per_chunk: int
        ) -> None:
            requests.append(len(sizes))  # noqa: B023
            table = zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True)
            for target, at, size in table:
                assert size <= bytes_per_chunk
                ctypes.memmove(target, at, size)

        pages.by_triton(copy)()
        assert requests == [shape.chunk_bytes * shape.chunks // pages.page]
        for view, old in zip(caches.views, before, strict=True):
            assert torch.equal(view.view(torch.int16), old.view(torch.int16))
    whole = gpu_peers.RANK
    assert (whole.object_bytes, whole.block * whole.row) == (4 << 20, 8 << 10)


def test_shapes_are_those_of_production() -> None:
    llama, deepseek = gpu_measure.LLAMA, gpu_measure.DEEPSEEK
    assert (llama.chunk_bytes, llama.object_bytes) == (32 << 20, 4 << 20)
    assert (deepseek.block * deepseek.row, 64 * deepseek.row) == (18 << 10, 72 << 10)
    assert {18 << 10, 72 << 10} < set(gpu_design.PIECES)


def test_times_are_medians_with_their_spread() -> None:
    assert gpu_measure.timing_of([1.0]) == Timing(1.0, 0.0)
    assert gpu_measure.timing_of([1.0, 2.0, 3.0, 100.0, 2.0]).seconds == 2.0


def test_errors_of_threads_are_raised() -> None:
    def fail(worker: int, item: int) -> None:
        raise RuntimeError(f"item {item}")

    with pytest.raises(RuntimeError, match="item"):
        gpu_measure.spread(2, range(5), fail)


# --- the machine -------------------------------------------------------------------


def test_the_engine_of_a_gpu_is_behind_and_captures_in_the_strictest_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[object] = []
    over = [False]

    class Stream:
        def __init__(self, device: torch.device | None = None) -> None:
            pass

        def record_event(self) -> Stream:
            return self

        def query(self) -> bool:
            return over[0]

    class Graph:
        def capture_begin(self, *, capture_error_mode: str) -> None:
            said.append(capture_error_mode)

        def capture_end(self) -> None:
            said.append("end")

        def replay(self) -> None:
            said.append("replay")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "_sleep", said.append)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    engine = gpu_groups.CudaEngine(CPU)
    engine.fall_behind()
    # Another attempt does not make it wait longer.
    engine.fall_behind()
    assert said == [engine.CYCLES]
    over[0] = True
    engine.fall_behind()
    assert said == [engine.CYCLES] * 2
    said.clear()
    with engine.capturing():
        said.append("captured")
    assert said == ["global", "captured", "end", "replay"]
    with pytest.raises(RuntimeError, match="capture"), engine.capturing():
        raise RuntimeError("capture")


def test_gathers_and_fences_of_checks_find_the_engine_behind() -> None:
    said: list[str] = []

    class Noting(gpu_groups.Engine):
        def fall_behind(self) -> None:
            said.append("behind")

    pages = gpu_checks.make_pages("bhnc-nhd", torch.bfloat16, CPU)
    size = len(pages.caches) * pages.layout.chunk_bytes(4, 4)
    payload = torch.zeros(size, dtype=torch.uint8)
    for lags in (True, False):
        ctx = Context(CPU, small=True, serves="torch", engine=Noting(), lags=lags)
        said.clear()
        path = ctx.device_caches(gpu_checks.calls_of(pages, 1, size))
        for memory in (path, path.of_tail(2)):
            count = 2 if memory is not path else 4
            copied = memory.gather(torch.arange(count), [payload[: size // 4 * count]])
            assert copied is not None
            copied.wait()
        path.fence()
        path.close()
        assert said == ["behind"] * (3 if lags else 0)


def test_what_the_machine_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            self.takes = 1150e-6 if blocking else 1000e-6

        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            now[0] += self.takes

    def ask(value: Any, number: int, device: int) -> int:
        value._obj.value = number
        return number == 113  # an error

    said: list[dict[str, Any]] = []
    ctx = Context(torch.device("cuda", 0), say=said.append)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(gpu_machine.time, "perf_counter", lambda: now[0])
    gpu_machine.wake_up(ctx)
    library = types.SimpleNamespace(cudaDeviceGetAttribute=ask)
    monkeypatch.setattr(gpu_machine.ctypes, "CDLL", lambda name: library)
    gpu_machine.attributes(ctx)
    wake_up, attributes = said
    assert wake_up["value"] == pytest.approx(150e-6)
    assert attributes["value"]["copies use host pointers of registered memory"] == 91
    assert attributes["value"]["registers read-only memory"] == -1


@pytest.mark.parametrize(
    ("reads_only", "says"),
    [(True, "copied from in the background"), (False, "operation not supported")],
)
def test_whether_a_gpu_copies_from_memory_for_reading_only(
    reads_only: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []
    ctx = Context(CPU, say=said.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: mock.Mock(query=lambda: False))
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    with fake_cudart() as runtime:
        runtime.reads_only = reads_only
        gpu_checks.registered_for_reading(ctx)
    assert ctx.comparisons == reads_only
    (fact,) = said
    assert says in fact["value"]


def make_wheel(path: Path, content: str = "x.py") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(content, "x = 1\n")
    return path


MACHINE = {"python": "3.12.3", "capability": [9, 0]}


@pytest.fixture
def box(tmp_path: Path) -> gpu_box.Box:
    (tmp_path / "pack").mkdir()
    return gpu_box.Box(sys.executable, tmp_path / "work", tmp_path / "pack")


def pack_library(box: gpu_box.Box, content: bytes, origin: str = "") -> None:
    for library in ("wheel", "nvcc"):
        folder = box.pack / library
        folder.mkdir()
        (folder / gpu_box.LIBRARY).write_bytes(content)
        (folder / gpu_box.BUILT_FROM).write_text(origin or gpu_box.library_sources())


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, box: gpu_box.Box) -> list[str]:
    """The architectures for which libraries were built; only a library "built" serves."""
    made: list[str] = []

    def build(python: str, folder: Path, architectures: str, *_: object) -> str:
        made.append(architectures)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / gpu_box.LIBRARY).write_bytes(b"built")
        return ""

    def served(self: gpu_box.Box, library: str, ends: float) -> dict[str, Any]:
        bytes_ = (self.site(library) / "kvshelf" / gpu_box.LIBRARY).read_bytes()
        good = bytes_ in (b"built", b"good")
        return {"served": "cuda" if good else "torch", "problem": "" if good else "cannot load"}

    monkeypatch.setattr(gpu_box, "build_library", build)
    monkeypatch.setattr(gpu_box.Box, "_served", served)
    return made


def test_wheels_of_another_python_are_left_out(box: gpu_box.Box, builds: list[str]) -> None:
    for name in ("a-1-py3-none-any", "b-1-cp312-cp312-linux_x86_64", "c-1-cp38-abi3-linux_x86_64"):
        make_wheel(box.pack / f"{name}.whl", f"{name[0]}.py")
    assert len(box.prepare("nvcc", MACHINE, 60)["wheels"]) == 3
    (box.pack / gpu_box.PEER).write_text("x = 1\n")
    assert len(box.prepare("nvcc", MACHINE, 60)["wheels"]) == 3
    site = box.site("nvcc")
    modules = {"a.py", "b.py", "c.py", gpu_box.PEER}
    assert {path.name for path in site.iterdir()} == {*modules, "kvshelf"}
    assert (site / "kvshelf" / "backends" / "base.py").is_file()
    assert len(box.prepare("nvcc", MACHINE | {"python": "3.13.0"}, 60)["wheels"]) == 2


@pytest.mark.parametrize(
    ("content", "origin", "library", "rebuilt"),
    [
        (b"good", "", "packed", False),
        (b"does not load", "", "built here", True),
        (b"good", "other sources", "built here", False),
        (None, "", "built here", False),
    ],
)
def test_which_library_is_used(
    box: gpu_box.Box,
    builds: list[str],
    content: bytes | None,
    origin: str,
    library: str,
    rebuilt: bool,
) -> None:
    if content is not None:
        pack_library(box, content, origin)
    found = box.prepare("nvcc", MACHINE, 60)
    assert (found["library"], found["served"]) == (library, "cuda")
    assert ("rebuilt_because" in found) is rebuilt
    assert builds == ([] if library == "packed" else ["90-real"])
    if builds:
        assert box.prepare("nvcc", MACHINE, 60)["library"] == "built here before"
        assert builds == ["90-real"]


def test_the_library_of_wheels_is_never_replaced(box: gpu_box.Box, builds: list[str]) -> None:
    assert box.prepare("wheel", MACHINE, 60)["problem"] == "none packed"
    pack_library(box, b"does not load")
    found = box.prepare("wheel", MACHINE, 60)
    assert (found["served"], found["problem"]) == ("torch", "cannot load")
    assert builds == []


@pytest.mark.parametrize(("content", "serving"), [(b"does not load", "nvcc"), (b"good", "wheel")])
def test_groups_run_on_another_library_where_theirs_does_not_load(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    box: gpu_box.Box,
    builds: list[str],
    content: bytes,
    serving: str,
) -> None:
    """And the verdict says so."""
    pack_library(box, content)
    machine = MACHINE | {"gpu": "a GPU", "torch": "2.11.0+cu130"}
    monkeypatch.setattr(gpu_box.Box, "machine", lambda self: machine)
    monkeypatch.setitem(PARTS, "design", PARTS["design"][:1])
    used: list[str] = []
    program = fake_tool(
        tmp_path, BEGIN.replace("memcheck", "copies_by_piece") + OK.replace("served", "served")
    )

    def environment(box: gpu_box.Box, tool: str, library: str) -> dict[str, str]:
        used.append(library)
        return dict(os.environ)

    monkeypatch.setattr(gpu_tools, "environment", environment)
    box.python = program
    part = first_light.Part("design", tmp_path / "out", box, emulated=None, seconds=60, limits={})
    assert part.run()
    assert used == [serving]
    passed, lines = verdict([tmp_path / "out"], ["design"])
    assert passed is (serving == "wheel")
    told = "\n".join(lines)
    assert ("FAILED design: the kernels of the library wheel did not serve" in told) is not passed
    assert lines[-1].startswith(f"verdict: {'PASS' if passed else 'FAIL'} of design (")


def test_a_library_that_cannot_be_built_is_no_success(
    box: gpu_box.Box, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_library(box, b"does not load")
    monkeypatch.setattr(gpu_box, "build_library", lambda *_: "no CUDA compiler")
    found = box.prepare("nvcc", MACHINE, 60)
    assert (found["served"], found["problem"]) == ("nothing", "no CUDA compiler")
    assert found["rebuilt_because"] == "cannot load"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_site_is_complete_and_says_why_no_kernels_serve(box: gpu_box.Box) -> None:
    pack_library(box, b"\x7fELF, and nothing more")
    found = box.prepare("nvcc", {"python": "3.12.3"}, 120)
    assert found["served"] == "nothing"
    assert "cannot be used" in found["rebuilt_because"]
    assert found["problem"] == "there is no GPU to build for"


def test_builds_that_fail_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cmake = tmp_path / "cmake"
    cmake.write_text("#!/bin/sh\necho no compiler; exit 1\n")
    cmake.chmod(0o755)
    told = gpu_box.build_library("python", tmp_path / "b", "90", 9, {"PATH": str(tmp_path)})
    assert told == "the library cannot be built: no compiler"
    assert "no cmake" in gpu_box.build_library("python", tmp_path, "90", 9, {"PATH": "/nowhere"})


def test_builds_use_ninja_and_the_newest_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("12.8", "9.2", "13.0"):
        nvcc = tmp_path / f"cuda-{version}" / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.touch()
    assert gpu_box.cuda_compiler({"PATH": "/nowhere"}, tmp_path) == str(nvcc)
    assert gpu_box.cuda_compiler({"PATH": "/nowhere", "CUDACXX": "mine"}, tmp_path) == "mine"
    assert gpu_box.cuda_compiler({"PATH": "/nowhere"}, tmp_path / "none") is None
    said = tmp_path / "said"
    for name in ("cmake", "ninja"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "$CUDACXX $@" >> {said}\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(gpu_box, "cuda_compiler", lambda env: "/there/nvcc")
    told = gpu_box.build_library("python", tmp_path / "b", "90", 9, {"PATH": str(tmp_path)})
    assert told == "cmake built no library"
    configured = said.read_text().splitlines()[0]
    assert configured.startswith("/there/nvcc -S ")
    assert configured.endswith("-G Ninja")
    # The group that measures digests needs their kernels.
    assert "-DKVSHELF_DESIGN=ON" in configured


def test_a_command_that_hangs_is_ended() -> None:
    code, told = gpu_box.run(["sleep", "30"], 0.1)
    assert code is None
    assert "not finished" in told


@pytest.mark.parametrize(
    ("tool", "body", "refused"),
    [
        ("memcheck", "exit 77", ""),
        ("memcheck", "exit 0", "it did not see a planted error"),
        ("memcheck", "echo Device not supported; exit 1", "Device not supported"),
        ("ncu", "exit 0", "it does not run here"),
        ("ncu", 'printf \'%s\' "$CSV" > "$f"', ""),
        ("ncu", "echo ERR_NVGPUCTRPERM; exit 1", "ERR_NVGPUCTRPERM"),
        ("ncu", None, "there is no ncu"),
    ],
)
def test_tools_are_tried_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    box: gpu_box.Box,
    tool: str,
    body: str | None,
    refused: str,
) -> None:
    log = str(tmp_path / "log")
    program = None if body is None else fake_tool(tmp_path, body.replace('"$f"', log))
    monkeypatch.setattr(gpu_tools, "_find", lambda name: program)
    monkeypatch.setenv("CSV", NCU)
    found, why = gpu_tools.command(box, tool, tmp_path / "log", 10)
    assert refused in why
    assert bool(why) is bool(refused)
    assert bool(found) is not bool(refused)
    if tool == "memcheck":
        assert gpu_tools.environment(box, tool)["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"


NCU = """==PROF== Connected
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","copy_kernel<uint4, 1>","gpu__time_duration.sum","us","15.6"
"0","7","copy_kernel<uint4, 1>","launch__registers_per_thread","register/thread","40"
"1","7","copy_kernel<uint4, 0>","gpu__time_duration.sum","us","16.1"
"""


def test_figures_of_ncu_are_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(NCU)
    first, second = gpu_tools.ncu_figures(tmp_path / "log")
    assert first["launch__registers_per_thread"] == "40 register/thread"
    assert second == {"kernel": "copy_kernel<uint4, 0>", "gpu__time_duration.sum": "16.1 us"}
    assert gpu_tools.ncu_figures(tmp_path / "none") == []


# --- what travels ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "problem", "code"), [(1000, "", 0), (33 << 20, "", 1), (0, "no CUDA compiler", 1)]
)
def test_what_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: int, problem: str, code: int
) -> None:
    folder = tmp_path / "pack"
    root = tmp_path / "root"
    (root / "src").mkdir(parents=True)
    (root / "src" / "x.py").write_bytes(bytes(tree))
    monkeypatch.setattr(gpu_pack, "ROOT", root)
    monkeypatch.setattr(gpu_pack, "tree", lambda *_: [root / "src" / "x.py"])

    def build(target: Path) -> str:
        target.write_bytes(b"library")
        return problem

    def download(to: Path, python: str, package: str) -> None:
        assert python == "3.12"
        make_wheel(to / f"{package.partition('>')[0]}.whl")

    monkeypatch.setattr(gpu_pack, "library_of_wheels", build)
    monkeypatch.setattr(gpu_pack, "library_of_nvcc", build)
    monkeypatch.setattr(gpu_pack, "triton_copy_of_vllm", lambda: "x = 1\n")
    monkeypatch.setattr(gpu_pack, "download", download)
    monkeypatch.setattr(sys, "argv", ["gpu_pack.py", "--into", str(folder)])
    assert gpu_pack.main() == code
    if not problem:
        names = {"apache-tvm-ffi.whl", "xxhash.whl", "safetensors.whl", "fsspec.whl"}
        pack = folder / "build" / "gpu-pack"
        assert {path.name for path in pack.iterdir()} == {*names, "wheel", "nvcc", gpu_box.PEER}
        for library in ("wheel", "nvcc"):
            assert (pack / library / gpu_box.LIBRARY).read_bytes() == b"library"
            origin = (pack / library / gpu_box.BUILT_FROM).read_text()
            assert origin == gpu_box.library_sources()
        assert (folder / "src" / "x.py").stat().st_size == tree


def test_what_is_copied_is_what_is_tested() -> None:
    """The reports of the copy and of the working tree are of the same sources."""
    copied = {path for path in gpu_pack.tree(*gpu_pack.COPIED) if path.suffix != ".so"}
    assert Path(first_light.__file__) in copied
    folders = [gpu_pack.ROOT / name for name in gpu_pack.COPIED]
    assert copied == set(gpu_box._files(*folders))
    assert copied < set(gpu_pack.tree())


@pytest.mark.long
def test_the_copy_of_vllm_needs_no_vllm() -> None:
    pytest.importorskip("vllm")
    text = gpu_pack.triton_copy_of_vllm()
    compile(text, "vllm_swap_blocks.py", "exec")
    assert "vllm import" not in text
    assert "from vllm" not in text
    assert "def swap_blocks_batch(" in text


def test_make_knows_the_targets() -> None:
    fragment = (SCRIPTS.parent / "gpu.mk").read_text()
    for target in ("gpu", "gpu-pack"):
        assert f"\n{target}:" in fragment
