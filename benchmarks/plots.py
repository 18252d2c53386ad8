"""``python -m benchmarks.plots``: the documentation's plots, made of the figures in ``docs/data``.

Owns which figures a plot shows, and how. A plot is a function of one JSON file that
``python -m benchmarks … --json`` wrote: the same file gives the same bytes. It needs matplotlib,
which the extra ``docs`` brings.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.admission import speed
from benchmarks.engines import ALWAYS, AUTO, COMPUTED

_DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
_BLUE, _AMBER, _GRAY = "#2563eb", "#d97706", "#94a3b8"
_PAPER, _INK, _GRID = "#ffffff", "#1e293b", "#e2e8f0"
#: What the colors become where the reader's system, or the page around the picture, is dark.
_DARK: Final = {_PAPER: "#1e2129", _INK: "#e2e8f0", _GRID: "#3b4252", _BLUE: "#60a5fa"}


def _heading(figure: Figure, title: str, *more: str) -> None:
    figure.suptitle("\n".join([title, *more]), x=0.02, ha="left", fontsize=10)


def _styles() -> str:
    rules = "".join(
        f"[style*='{side}: {color}'] {{ {side}: {dark} !important }}"
        for color, dark in _DARK.items()
        for side in ("fill", "stroke")
    )
    return f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>"


def _machine(report: Any) -> str:
    machine, date = report["machine"], report["date"][:10]
    return f"{machine['processor']}, {machine['usable_processors']} processors, {date}"


def first_token(figure: Figure, report: Any) -> None:
    """Draw bars: first tokens that are computed, loaded and found in memory, by length."""
    rows = {row["name"].partition("/")[2]: row for row in report["rows"] if not row["skipped"]}
    lengths = sorted(int(name.partition("/")[0]) for name in rows if name.endswith("/memory"))
    axes = figure.subplots()
    ways = {
        "computed": (_GRAY, "computed", "floor_seconds"),
        "from the shelf, new process": (_BLUE, "memory", "ours_seconds"),
        "in memory": (_AMBER, "memory", "floor_seconds"),
    }
    for place, (label, (color, name, side)) in enumerate(ways.items()):
        found = [1e3 * rows[f"{tokens}/{name}"][side]["median"] for tokens in lengths]
        at = [number + 0.27 * (place - 1) for number in range(len(lengths))]
        bars = axes.barh(at, found, 0.25, color=color, label=label)
        axes.bar_label(bars, [f"{each:,.0f} ms" for each in found], padding=3, fontsize=8)
    axes.set_yticks(range(len(lengths)), [f"{tokens:,} tokens" for tokens in lengths])
    axes.set_xlim(0, 1.2 * axes.get_xlim()[1])
    axes.set_xlabel("milliseconds, median")
    axes.invert_yaxis()
    figure.legend(loc="outside lower left", ncols=3, fontsize=8)
    _heading(figure, "Time to the first token, by length of the prompt", _machine(report))


def admission(figure: Figure, report: Any) -> None:
    """Draw dots: each policy as a multiple of the better of computing and loading."""
    styles = {COMPUTED: (_GRAY, "computed"), ALWAYS: (_AMBER, "every hit loaded")}
    styles[AUTO] = (_BLUE, "admission: auto")
    rows = [row for row in report["rows"] if row["name"].startswith("admission/")]
    axes, names = figure.subplots(), []
    for place, row in enumerate(rows):
        extra = row["extra"]
        means = {policy: statistics.fmean(extra["means"][policy]) for policy in styles}
        best = min(means[COMPUTED], means[ALWAYS])
        for policy, (color, label) in styles.items():
            label_once = None if place else label
            axes.plot(means[policy] / best, place, "o", color=color, label=label_once)
        at_once = row["name"].rpartition("x")[2]
        many = f" × {at_once}" if at_once != "1" else ""
        names.append(f"{extra['stored_tokens']:,}{many}, {speed(extra['rate'])}")
    axes.set_yticks(range(len(rows)), names)
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.5, 26)
    ticks = (0.5, 1, 2, 4, 8, 16)
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.grid(axis="x", color=_GRID)
    axes.axvline(1, color=_INK, linewidth=1.5, zorder=0)
    axes.set_ylabel("stored tokens × prompts, speed of the storage")
    axes.invert_yaxis()
    figure.legend(loc="outside lower left", ncols=3, fontsize=8)
    _heading(
        figure,
        "First tokens on a storage of limited speed, in",
        "multiples of the better of computing and loading;",
        _machine(report),
    )


#: What draws a picture of the file of that name in ``docs/data``, and its size in inches.
_PLOTS: Final[dict[str, tuple[Callable[[Figure, Any], None], tuple[float, float]]]] = {
    "first-token": (first_token, (4.6, 3.6)),
    "admission": (admission, (4.6, 4.8)),
}


def main() -> None:
    """Draw all pictures."""
    mpl.rcParams.update({"svg.hashsalt": "kvshelf", "svg.fonttype": "none", "font.size": 9})
    mpl.rcParams["legend.frameon"] = False
    for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        mpl.rcParams[name] = _INK
    for name, (draw, size) in _PLOTS.items():
        figure = Figure(size, layout="constrained")
        draw(figure, json.loads((_DOCS / "data" / f"{name}.json").read_text()))
        path = _DOCS / "images" / f"{name}.svg"
        title = figure.get_suptitle().replace("\n", " ")
        figure.savefig(path, metadata={"Title": title, "Date": None, "Creator": None})
        path.write_text(path.read_text().replace("</title>", f"</title>\n {_styles()}"))
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
