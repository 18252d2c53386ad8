"""compute-sanitizer and ncu: whether this machine lets them at its GPU, and what they found.

Each is tried on a small program first. Some virtual machines refuse them, and a checker that
does not see a planted error would find nothing in ours either.
"""

from __future__ import annotations

import csv
import os
import shutil
from pathlib import Path
from typing import Final

from gpu_box import SHIPPED, Box, last_lines, run

#: Exit status of compute-sanitizer when it found something.
FOUND: Final = 77

# A kernel of Triton writes 4 MiB behind a tensor. memcheck knows the bounds of what cudaMalloc
# returned; torch's caching allocator would hide them, see environment().
_PLANTED: Final = """
import torch, triton_writer
rows = torch.zeros(4, 16, 2, 32, dtype=torch.int16, device="cuda")
triton_writer.write(rows, torch.tensor([1 << 15], device="cuda"), rows[0, :1].clone())
torch.cuda.synchronize()
"""
_HARMLESS: Final = """
import torch
torch.zeros(1 << 20, device="cuda").add_(1)
torch.cuda.synchronize()
"""
_METRICS: Final = (
    "gpu__time_duration.sum",
    "dram__bytes.sum.per_second",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
)


def environment(box: Box, tool: str, library: str = SHIPPED) -> dict[str, str]:
    """Return the environment of a group under a tool, or under none."""
    # Inside the allocator's large pieces every access is legal for memcheck.
    more = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}
    return box.environment(library) | more


def _find(name: str) -> str | None:
    places = Path("/usr/local").glob(f"cuda*/bin/{name}")
    found = shutil.which(name) or next(map(str, places), None)
    return found if found and os.access(found, os.X_OK) else None


def command(box: Box, tool: str, log: Path, seconds: float) -> tuple[list[str], str]:
    """Return the command that runs a program under a tool, or why there is none.

    Parameters
    ----------
    box : Box
    tool : str
        ``memcheck`` or ``ncu``.
    log : Path
        Where ncu writes its figures.
    seconds : float
        What the trial may take.
    """
    program = {"memcheck": "compute-sanitizer", "ncu": "ncu"}[tool]
    found = _find(program)
    if found is None:
        return [], f"there is no {program}"
    env = environment(box, tool)
    if tool == "memcheck":
        options = ["--tool", "memcheck", "--error-exitcode", str(FOUND), "--kernel-name"]
        trial = [found, *options, "kns=_write", box.python, "-c", _PLANTED]
        code, told = run(trial, seconds, env)
        if code != FOUND:
            return [], f"it did not see a planted error (exit status {code}): {last_lines(told)}"
        # Only our kernels: torch's own would take most of the time.
        return [found, *options, "kns=copy_kernel"], ""
    options = ["--clock-control", "none", "--csv", "--metrics", ",".join(_METRICS)]
    options += ["--log-file", str(log)]
    code, told = run([found, *options, "-c", "1", box.python, "-c", _HARMLESS], seconds, env)
    if code != 0 or not ncu_figures(log):
        told += log.read_text(errors="replace") if log.is_file() else ""
        return [], f"it does not run here (exit status {code}): {last_lines(told)}"
    return [found, *options, "-k", "regex:copy_kernel", "-c", "8"], ""


def ncu_figures(log: Path) -> list[dict[str, str]]:
    """Return, for each kernel that ncu saw, its name and metrics."""
    if not log.is_file():
        return []
    lines = [line for line in log.read_text(errors="replace").splitlines() if line[:1] == '"']
    kernels: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(lines):
        name, metric = row.get("Kernel Name"), row.get("Metric Name")
        if name and metric:
            of_kernel = kernels.setdefault(str(row.get("ID")), {"kernel": name[:80]})
            of_kernel[metric] = f"{row.get('Metric Value')} {row.get('Metric Unit')}".strip()
    return list(kernels.values())
