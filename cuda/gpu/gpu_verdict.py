"""Joins the reports of all parts into one verdict. Needs neither a GPU nor torch.

PASS means: each part is there, complete, from the same sources and one kind of GPU; every group
succeeded, except optional ones that the machine lacks something for and tools that it refuses,
which are named; and the libraries served, with their CUDA kernels, wherever a group does not test
what replaces it. Missed goals are named, and do not fail a run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_decisions import DECISIONS
from gpu_parts import PARTS

Report = dict[str, Any]


def verdict(
    folders: Sequence[Path], parts: Sequence[str] = tuple(PARTS), *, emulated: bool = False
) -> tuple[bool, list[str]]:
    """Return whether the reports in some folders pass, and the lines that say why.

    Parameters
    ----------
    folders : sequence of Path
        Of two reports of one part the one that began last counts.
    parts : sequence of str
        The parts that have to be there.
    emulated : bool
        Accept reports of an emulated device, and nothing else.
    """
    reports: dict[str, Report] = {}
    lines: list[str] = []
    failures: list[str] = []
    for path in [folder / f"{part}.json" for folder in folders for part in parts]:
        if not path.is_file():
            continue
        try:
            report = json.loads(path.read_bytes())
            part, began = report["part"], report["began"]
        except (ValueError, KeyError, TypeError) as error:
            failures.append(f"{path} is no report: {error}")
            continue
        if part not in reports or began > reports[part]["began"]:
            reports[part] = report
    for part in parts:
        if part not in reports:
            failures.append(f"{part}: there is no report")
            continue
        try:
            found, notes = _of_part(part, reports[part], emulated=emulated)
        except (KeyError, TypeError, AttributeError) as error:
            found, notes = [f"its report is damaged: {error!r}"], []
        failures += [f"{part}: {one}" for one in found]
        lines += [f"{part}: {one}" for one in notes]
    if len({str(report.get("sources")) for report in reports.values()}) > 1:
        failures.append("the parts are of different sources")
    if len({str(report.get("machine", {}).get("gpu")) for report in reports.values()}) > 1:
        failures.append("the parts are of different GPUs")
    # First what must not be cut off.
    lines = [f"FAILED {one}" for one in failures] + lines
    decided = [(one.key, one.decide(_facts(reports))) for one in DECISIONS]
    lines += [
        f"decision {key}: {text}"
        for key, text in decided
        if len(parts) == len(PARTS) or not text.startswith("open")
    ]
    lines += _goals(reports)
    passed = not failures
    word = "PASS" if passed else "FAIL"
    if len(parts) < len(PARTS):
        word += f" of {', '.join(parts)}"
    if emulated:
        word += ", by an emulated device, which says nothing about a GPU"
    lines.append(f"verdict: {word} ({len(failures)} failures)")
    return passed, lines


def _of_part(part: str, report: Report, *, emulated: bool) -> tuple[list[str], list[str]]:
    """Return what is wrong with the report of one part, and what else should be known."""
    wrong: list[str] = []
    groups: dict[str, Report] = report["groups"]
    device = "emulated" if emulated else "cuda"
    if report["device"] != device:
        wrong.append(f"it ran on a device that is {report['device']}, not {device}")
    if report["state"] != "complete":
        wrong.append(f"not complete: {report['state']}")
    if report["planned"] != [group.name for group in PARTS[part]]:
        wrong.append("its groups are not those of this version")
    if "gpu" not in report.get("machine", {}):
        wrong.append("it names no GPU")
    for library in () if emulated else {group.library for group in PARTS[part]}:
        found = report.get("library", {}).get(library)
        if found is None or found.get("served") != "cuda":
            wrong.append(f"the kernels of the library {library} did not serve: {found}")
    not_run = []
    launches = 0
    for group in PARTS[part]:
        result = groups.get(group.name, {"state": "missing"})
        state, why = result["state"], result.get("why", "")
        launches += result.get("launches", 0) if group.serves == "cuda" else 0
        lacking = (state == "not run" and (group.tool or group.optional)) or (
            state == "needs a GPU" and emulated
        )
        if lacking:
            not_run.append(f"{group.name} ({why})")
        elif state != "ok":
            wrong.append(f"{group.name} {state}: {why}")
        elif result["served"] != group.serves:
            wrong.append(f"{group.name} was served by {result['served']}, not {group.serves}")
    if launches == 0:
        wrong.append("no kernel was launched")
    machine = report.get("machine", {})
    notes = [
        f"{machine.get('gpu')}, torch {machine.get('torch')}, {report['began']}, "
        f"{len(groups)} groups in {report.get('seconds')} s, {launches} launches, "
        f"{sum(result.get('comparisons', 0) for result in groups.values())} comparisons"
    ]
    if not_run:
        notes.append(f"not run: {'; '.join(not_run)}")
    return wrong, notes


def _goals(reports: dict[str, Report]) -> list[str]:
    rows = [
        row
        for report in reports.values()
        for result in report.get("groups", {}).values()
        for row in result.get("rows", [])
        if row["goal"] is not None
    ]
    missed = [row for row in rows if not row["met"]]
    return [
        f"goals: {len(rows) - len(missed)} of {len(rows)} met",
        *(f"  MISSED {row['name']}: {row['ratio']:.2f}, not {row['goal']:.2f}" for row in missed),
    ]


def _facts(reports: dict[str, Report]) -> dict[str, Any]:
    """All facts of all groups, by the group's name."""
    return {
        name: result.get("facts", {})
        for report in reports.values()
        for name, result in report.get("groups", {}).items()
    }
