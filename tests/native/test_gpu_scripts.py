"""``first_light.py`` on an emulated device, honest and with seeded faults; and its verdict."""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import first_light
import gpu_box
import gpu_measure
import gpu_pack
import gpu_peers
import pytest
import torch
from gpu_groups import Context
from gpu_parts import PARTS
from gpu_verdict import verdict

from tests.native.bare_machine import hide_packages
from tests.native.emulation import emulation

pytestmark = pytest.mark.real

CPU = torch.device("cpu")
SCRIPTS = Path(first_light.__file__).parent
DEVICE = Path(__file__).with_name("emulated_device.py")
Reports = dict[str, dict[str, Any]]


@functools.cache
def bare() -> str:
    """A folder that hides from Python what a machine with a GPU does not have."""
    folder = Path(tempfile.mkdtemp(prefix="kvshelf-bare-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(hide_packages(folder, gpu_pack.PACKAGES))


def python(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python as on a bare machine."""
    emulation()  # builds it, so that no time limit runs meanwhile
    paths = [bare(), str(SCRIPTS), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables,
        check=False,
        capture_output=True,
        text=True,
    )


def run_part(part: str, out: Path, *options: object, fault: str = "") -> dict[str, Any]:
    """Run a part on the emulated device; return its report."""
    arguments = ("--part", part, "--out", out, "--work", out.parent / "work", *options)
    done = python(SCRIPTS / "first_light.py", *arguments, "--emulated", DEVICE, SEEDED_FAULT=fault)
    assert done.returncode == bool(fault), done.stdout + done.stderr
    report: dict[str, Any] = json.loads((out / f"{part}.json").read_text())
    assert report["state"] == "complete"
    return report


def made_reports() -> Reports:
    """Reports as a good run writes them."""
    row = {"name": "a row", "ratio": 0.9, "goal": 0.85, "met": True}
    reports = {}
    for part, groups in PARTS.items():
        reports[part] = {
            "kvshelf_first_light": 1,
            "part": part,
            "device": "cuda",
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


@pytest.mark.slow
def test_an_honest_run_passes_but_not_as_one_on_a_gpu(tmp_path: Path) -> None:
    reports = {part: run_part(part, tmp_path / part) for part in PARTS}
    for report in reports.values():
        states = {name: result["state"] for name, result in report["groups"].items()}
        assert set(states.values()) <= {"ok", "not run", "needs a GPU"}, states
    compared = reports["correctness"]["groups"]["forms_dtypes_widths"]
    assert compared["widths"] == [1, 4, 8, 16]
    assert compared["comparisons"] > 500
    folders = [tmp_path / part for part in PARTS]
    passed, lines = verdict(folders, emulated=True)
    assert passed, lines
    passed, lines = verdict(folders)
    assert not passed
    assert "FAILED correctness: it ran on a device that is emulated, not cuda" in lines


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "group", "why"),
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


@pytest.mark.slow
def test_a_group_that_hangs_is_ended_and_the_others_run(tmp_path: Path) -> None:
    options = ("--groups", "forms_dtypes_widths,deep_models", "--limit", "forms_dtypes_widths=3")
    groups = run_part("correctness", tmp_path / "out", *options, fault="hang")["groups"]
    assert "took too long" in groups["forms_dtypes_widths"]["why"]
    assert groups["deep_models"]["state"] == "ok"


def test_good_reports_of_a_gpu_pass(tmp_path: Path) -> None:
    passed, lines = verdict([written(made_reports(), tmp_path / "out")])
    assert passed, lines


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


def test_what_is_copied_is_what_is_tested() -> None:
    """The reports of the copy and of the working tree are of the same sources."""
    copied = {path for path in gpu_pack.tree(*gpu_pack.COPIED) if path.suffix != ".so"}
    assert Path(first_light.__file__) in copied
    folders = [gpu_pack.ROOT / name for name in gpu_pack.COPIED]
    assert copied == set(gpu_box._files(*folders))
    assert copied < set(gpu_pack.tree())
