"""The programs of ``make gpu`` and ``make gpu-pack``, as far as they go without a GPU."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_bench
import gpu_checks
import gpu_pack
import gpu_run
import library_writers
import pytest
import torch
from emulation import emulation

from kvshelf.kv import ops

CPU = torch.device("cpu")
SCRIPTS = Path(gpu_run.__file__).parent


def states(report: gpu_checks.Report) -> dict[str, str]:
    return {
        str(group["name"]): next((key for key in ("failed", "skipped") if key in group), "ok")
        for group in report.groups
    }


# --- checks ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [False, True], ids=["cpu", "emulated"])
def test_all_checks_pass_or_say_why_they_were_not_made(kernels: bool) -> None:
    if kernels:
        with emulation().in_use():
            report = gpu_checks.run_checks(CPU, small=True)
        assert report.widths >= {16, 8, 4, 2, 1}
    else:
        report = gpu_checks.run_checks(CPU, small=True)
    found = states(report)
    assert not report.failed, report.groups
    skipped = {name for name, state in found.items() if state == "skipped"}
    assert skipped <= {
        *("kernel_attributes", "far_offsets", "operators", "graphs", "streams_and_threads"),
        *(
            "buffers_in_host_memory",
            "registered_memory",
            "the_same_as_torch",
            "layouts_learned_from_triton",
        ),
        *("layouts_learned_from_flashinfer", "layouts_learned_from_flash_attn"),
    }
    assert report.comparisons > 500
    for name in ("forms_dtypes_widths", "bad_slots_are_refused", "the_way_to_staging"):
        assert found[name] == "ok"


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
    monkeypatch.setattr(gpu_checks, "GROUPS", (gpu_checks.deep_models,))
    report = gpu_checks.run_checks(CPU, small=True)
    assert report.failed
    assert "bytes differ" in str(report.groups[0]["failed"])


def test_checks_that_would_begin_too_late_are_skipped() -> None:
    report = gpu_checks.run_checks(CPU, small=True, seconds=-1)
    assert set(states(report).values()) == {"skipped"}
    assert not report.failed


def test_layouts_are_learned_from_writers_of_their_own() -> None:
    report = gpu_checks.Report(CPU)
    gpu_checks.layouts_learned_from_torch(report)
    assert report.comparisons == 5 * 2 * 2


class PagedLibrary:
    """What the writers use of FlashInfer and flash-attn, as their documentation has it."""

    @staticmethod
    def append_paged_kv_cache(
        append_key: torch.Tensor,
        append_value: torch.Tensor,
        batch_indices: torch.Tensor,
        positions: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_last_page_len: torch.Tensor,
        kv_layout: str = "NHD",
    ) -> None:
        assert kv_layout == "NHD"
        size = paged_kv_cache[0].shape[1]
        for i, (batch, position) in enumerate(
            zip(batch_indices.tolist(), positions.tolist(), strict=True)
        ):
            first, end = kv_indptr[batch : batch + 2].tolist()
            pages = kv_indices[first:end].tolist()
            assert position < (len(pages) - 1) * size + int(kv_last_page_len[batch])
            page, offset = pages[position // size], position % size
            paged_kv_cache[0][page, offset] = append_key[i]
            paged_kv_cache[1][page, offset] = append_value[i]

    @staticmethod
    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> None:
        size = k_cache.shape[1]
        assert size % 256 == 0
        assert q.shape[0] == len(cache_seqlens) == len(block_table)
        for i, length in enumerate(cache_seqlens.tolist()):
            for j in range(k.shape[1]):
                page = int(block_table[i, (length + j) // size])
                k_cache[page, (length + j) % size] = k[i, j]
                v_cache[page, (length + j) % size] = v[i, j]


@pytest.mark.parametrize(
    ("module", "make", "block_size"),
    [
        ("flashinfer", library_writers.flashinfer_writer, 16),
        ("flash_attn", library_writers.flash_attn_writer, 256),
    ],
)
def test_libraries_are_called_as_their_documentation_has_it(
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    make: Callable[[], library_writers.Writer],
    block_size: int,
) -> None:
    monkeypatch.setitem(sys.modules, module, PagedLibrary)
    report = gpu_checks.Report(CPU)
    gpu_checks.learn_all(
        report,
        make(),
        forms=("2bnhd", "bhnc-hnd"),
        dtypes=[torch.bfloat16],
        block_size=block_size,
        head_size=8,
        padding=16,
    )
    assert report.comparisons == 4


@pytest.mark.parametrize(
    ("check", "module"),
    [
        (gpu_checks.layouts_learned_from_flashinfer, "flashinfer"),
        (gpu_checks.layouts_learned_from_flash_attn, "flash_attn"),
    ],
)
def test_libraries_that_cannot_be_used_are_named(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[gpu_checks.Report], None], module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(gpu_checks.Skipped, match=r"^no Flash|^no flash-attn"):
        check(gpu_checks.Report(CPU))
    monkeypatch.setitem(sys.modules, module, PagedLibrary)
    with pytest.raises(gpu_checks.Skipped, match="need a GPU"):
        check(gpu_checks.Report(CPU))


@pytest.mark.slow
def test_the_triton_writer_writes_what_indexing_writes() -> None:
    pytest.importorskip("triton")
    code = """
import torch, gpu_checks, triton_writer
report = gpu_checks.Report(torch.device("cpu"))
gpu_checks.learn_all(report, gpu_checks.one_by_one(triton_writer.write))
assert report.comparisons == 20
"""
    paths = os.pathsep.join([str(SCRIPTS), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        check=False,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr


# --- figures -----------------------------------------------------------------------


def test_figures_stand_beside_floors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = gpu_bench.run_bench(CPU, gpu_bench.TINY, seconds=60, folder=tmp_path, threads=2)
    names = " ".join(row.name for row in results.rows)
    for what in ("gather, NHD", "scatter, HND", "MLA", "8 chunks", "2 shards", "store, paged"):
        assert what in names
    for what in ("load, page-locked", "store and load at once", "matmul loop", "files → paged"):
        assert what in names
    for row in results.rows:
        assert row.seconds > 0
        assert row.ratio == pytest.approx(row.floor_seconds / row.seconds)
        assert (row.met is None) == (row.goal is None)
    assert {"device copy, one chunk", "large copies", "tokens of a thread"} <= set(results.facts)
    assert results.skipped == {"block-outermost": "needs a device that is apart from the host"}
    json.dumps(results.facts)
    assert "files → paged" in capsys.readouterr().out


def test_figures_that_would_begin_too_late_are_skipped(tmp_path: Path) -> None:
    results = gpu_bench.run_bench(CPU, gpu_bench.TINY, seconds=-1, folder=tmp_path)
    assert set(results.skipped) == {"on the device", "between device and host", "from files"}


def test_a_chunk_of_the_measured_model_is_32_mib() -> None:
    assert gpu_bench.Sizes().chunk_bytes == 32 << 20


# --- one command -------------------------------------------------------------------


GPU = {"torch": "2.11.0+cu130", "available": True, "gpu": "a GPU", "capability": [9, 0]}


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (GPU, None),
        (GPU | {"torch": "3.0"}, None),
        ({"error": "No module named 'torch'"}, "no torch that works: No module named"),
        (GPU | {"torch": "2.10.1"}, r"torch 2.10.1 is older than 2.11"),
        ({"torch": "2.13.0+cpu", "available": False}, "torch 2.13.0.cpu sees no GPU"),
        (GPU | {"capability": [7, 5]}, "compute capability"),
    ],
)
def test_why_nothing_is_run(found: dict[str, Any], reason: str | None) -> None:
    answer = gpu_run.reason_to_skip(found)
    if reason is None:
        assert answer is None
    else:
        assert answer is not None
        assert reason.replace(".cpu", "+cpu") in answer


def run(*arguments: object) -> tuple[int, str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "gpu_run.py"), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    assert lines, done.stderr
    return done.returncode, done.stdout + done.stderr, json.loads(lines[-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_well(tmp_path: Path) -> None:
    code, output, report = run("--work", tmp_path)
    assert code == 0, output
    assert "skipped: " in output
    assert report["skipped"].endswith("sees no GPU") or "older than" in report["skipped"]
    assert json.loads((tmp_path / "report.json").read_text()) == report


def test_a_python_without_torch_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"python": "3.12.1", "error": "no torch"}\'\n')
    python.chmod(0o755)
    code, output, report = run("--work", tmp_path / "work", "--python", python)
    assert code == 0, output
    assert report["skipped"] == "this Python has no torch that works: no torch"


@pytest.mark.slow
def test_the_whole_run_on_a_cpu(tmp_path: Path) -> None:
    code, output, report = run("--work", tmp_path, "--device", "cpu", "--tiny", "--budget", 300)
    assert code == 0, output
    assert report["checks"]["failed"] is False
    assert report["checks"]["exit"] == 0
    assert len(report["bench"]["rows"]) > 10
    assert "files → paged, verified" in output
    assert "comparisons, all equal" in output


def make_run(tmp_path: Path, seconds: float = 1000) -> gpu_run.Run:
    return gpu_run.Run(sys.executable, tmp_path, "cpu", time.monotonic() + seconds)


def make_tool(folder: Path, body: str) -> None:
    tool = folder / "compute-sanitizer"
    tool.write_text(
        f"#!/bin/sh\n[ $1 = --help ] && echo 'options: --kernel-name' && exit\n{body}\n"
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("exit 77", {"failed": "the tool reported errors"}),
        ("exit 1", {"skipped": "the tool does not run here (exit status 1)"}),
        # Ran the program, which found nothing.
        ('for last; do :; done; echo \'{"failed": false}\' > "$last"', {}),
        ('for last; do :; done; echo \'{"failed": true}\' > "$last"', {"failed": "bytes differed"}),
    ],
)
def test_what_compute_sanitizer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, expected: dict[str, str]
) -> None:
    make_tool(tmp_path, body)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    results = gpu_run.sanitize(make_run(tmp_path))
    assert set(results) == {"tool", "memcheck", "racecheck"}
    for check in ("memcheck", "racecheck"):
        found = {key: results[check].get(key) for key in ("failed", "skipped")}
        assert {key: value for key, value in found.items() if value is not None} == expected
    failed = gpu_run.failures({"sanitizer": results})
    assert len(failed) == (2 if "failed" in expected else 0)


def test_without_compute_sanitizer_or_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "find_sanitizer", lambda site: None)
    assert "no compute-sanitizer" in gpu_run.sanitize(make_run(tmp_path))["skipped"]
    make_tool(tmp_path, "exit 77")
    monkeypatch.setattr(gpu_run, "find_sanitizer", lambda site: str(tmp_path / "compute-sanitizer"))
    results = gpu_run.sanitize(make_run(tmp_path, seconds=20))
    assert results["memcheck"] == results["racecheck"] == {"skipped": "no time left"}


def test_a_stage_that_hangs_is_ended(tmp_path: Path) -> None:
    result = make_run(tmp_path).stage("hangs", [sys.executable, "-c", "input()"], 0.1)
    # Without a terminal input() may end by itself, but not with success.
    assert result["exit"] != 0
    result = make_run(tmp_path).stage("sleeps", ["sleep", "30"], 0.1)
    assert result["exit"] is None
    assert "not finished" in result["failed"]
    assert "figures: not finished" in gpu_run.failures({"bench": result})[0]


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ({"checks": {"failed": False, "exit": 0}, "bench": {"exit": 0}}, []),
        (
            {
                "checks": {
                    "failed": True,
                    "exit": 1,
                    "groups": [{"name": "a"}, {"name": "b", "failed": "x"}],
                }
            },
            ["b: x"],
        ),
        ({"checks": {"exit": -11}}, ["checks: exit status -11"]),
        ({"checks": {"exit": None, "failed": "not finished after 9 s"}}, ["checks: not finished"]),
        ({"bench": {"exit": 1}}, ["figures: 1"]),
    ],
)
def test_what_counts_as_failed(report: dict[str, Any], expected: list[str]) -> None:
    found = gpu_run.failures(report)
    assert len(found) == len(expected)
    for one, start in zip(found, expected, strict=True):
        assert one.startswith(start)


def test_goals_are_marked_in_the_table() -> None:
    row = {"name": "gather", "floor": "device copy", "seconds": 2e-5, "gb_per_s": 1677.0}
    row |= {"ratio": 0.8, "goal": 0.85, "met": False, "note": ""}
    lines = gpu_run.table({"bench": {"rows": [row, row | {"met": True, "goal": 0.7}]}})
    assert "MISSED" in lines[1]
    assert lines[2].endswith("≥ 0.70 ok")
    assert gpu_run.table({}) == ["nothing was measured"]


def make_wheel(path: Path, content: str = "kvshelf/x.py") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(content, "x = 1\n")
    return path


def test_wheels_of_another_python_are_left_out(tmp_path: Path) -> None:
    pack, site = tmp_path / "pack", tmp_path / "site"
    pack.mkdir()
    for name in ("a-1-py3-none-any", "b-1-cp312-cp312-linux_x86_64", "c-1-cp38-abi3-linux_x86_64"):
        make_wheel(pack / f"{name}.whl", f"{name[0]}.py")
    assert len(gpu_run.unpack(pack, site, "3.12.3")) == 3
    assert sorted(path.name for path in site.iterdir()) == ["a.py", "b.py", "c.py"]
    assert len(gpu_run.unpack(pack, tmp_path / "other", "3.13.0")) == 2


# --- what travels ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sanitizer", "program", "tree", "code", "kept"),
    [
        (1000, True, 1000, 0, True),
        (1000, False, 1000, 0, False),
        (60 << 20, True, 10 << 20, 0, False),
        (None, True, 0, 0, False),
        (9, True, 65 << 20, 1, False),
    ],
)
def test_what_is_packed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sanitizer: int | None,
    program: bool,
    tree: int,
    code: int,
    kept: bool,
) -> None:
    folder = tmp_path / "pack"

    def pip(command: str, *arguments: object) -> None:
        assert command == "wheel"
        make_wheel(folder / "kvshelf-0.1.0-py3-none-linux_x86_64.whl")

    def download(to: Path, python: str, package: str) -> None:
        assert python == "3.12"
        if package in gpu_pack.SANITIZERS:
            if sanitizer is None:
                raise subprocess.CalledProcessError(1, "pip")
            to.mkdir()
            with zipfile.ZipFile(to / "sanitizer.whl", "w") as archive:
                archive.writestr("nvidia/libsanitizer.so", bytes(sanitizer))
                if program:
                    archive.writestr("nvidia/bin/compute-sanitizer", b"")
        else:
            make_wheel(to / f"{package.partition('>')[0]}.whl")

    monkeypatch.setattr(gpu_pack, "pip", pip)
    monkeypatch.setattr(gpu_pack, "download", download)
    monkeypatch.setattr(gpu_pack, "tree_bytes", lambda: tree)
    monkeypatch.setattr(sys, "argv", ["gpu_pack.py", str(folder)])
    assert gpu_pack.main() == code
    names = {path.name for path in folder.iterdir()}
    assert names - {"sanitizer.whl"} == {
        *("kvshelf-0.1.0-py3-none-linux_x86_64.whl", "apache-tvm-ffi.whl", "xxhash.whl"),
        *("safetensors.whl", "fsspec.whl"),
    }
    assert ("sanitizer.whl" in names) is kept
    assert ("left out" in capsys.readouterr().out) is not kept


def test_the_working_tree_is_counted() -> None:
    assert gpu_pack.tree_bytes() > 100_000


def test_make_knows_the_targets() -> None:
    fragment = (SCRIPTS.parent / "gpu.mk").read_text()
    for target in ("gpu", "gpu-pack"):
        assert f"\n{target}:" in fragment
