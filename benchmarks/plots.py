"""``python -m benchmarks.plots``: the documentation's plots, made of the figures in ``docs/data``.

Owns which figures a plot shows, and how. A plot is a function of one JSON file: the same file
gives the same picture. Three sorts of files are plotted:

* what ``python -m benchmarks … --json`` and ``python -m benchmarks.traces --json`` write;
* tables of the documentation, cell by cell, where the samples behind them were not kept. These
  name the processor, the date and the commands as far as the page does, and no commit.

Pictures follow the browser's scheme; those in `FIXED` are also made for each scheme alone, for
pages that choose themselves. A file that is not there is not plotted.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.admission import half_interval, speed
from benchmarks.lengths import COMPUTED, IN_MEMORY
from benchmarks.stepped import ALWAYS, AUTO
from benchmarks.svg import Color, Dot, DotRow, Picture, Scale, Scheme, Series, bars, dots, lines
from benchmarks.traces import ORDERS, OURS

_DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
DATA: Final = _DOCS / "data"
IMAGES: Final = _DOCS / "images"
#: Pictures that are also made for each scheme alone.
FIXED: Final = frozenset({"first-token"})
_SCHEMES: Final[Mapping[str, Scheme]] = {"": "both", "-light": "light", "-dark": "dark"}

# ------------------------------------------------------------------------------- first tokens

_WAYS: Final = (
    Series("computed", "gray"),
    Series("from the shelf, new process", "blue"),
    Series("in memory", "amber"),
)


_AGAIN: Final = "run python -m benchmarks lengths --json docs/data/first-token.json"
_MODELS: Final = {"demo": "Demo model of 88 M parameters"}


def first_tokens(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what rows ``lengths/*`` of a report say, by length.

    Returns
    -------
    list of dict
        ``tokens`` of the prompt, and ``stored_tokens`` of them; ``seconds`` for each way;
        ``times``: how many times as fast as computing a hit from the shelf is.

    Raises
    ------
    ValueError
        If a row was not measured, or there is none.
    """
    rows = {row["name"]: row for row in report["rows"]}
    found = []
    for name, row in rows.items():
        match = re.fullmatch(rf"lengths/(\d+)/{COMPUTED}", name)
        if match is None:
            continue
        memory = rows[f"lengths/{match[1]}/{IN_MEMORY}"]
        for each in (row, memory):
            if each["skipped"]:
                raise ValueError(f"{each['name']} was not measured ({each['skipped']}); {_AGAIN}")
        sides = (row["floor_seconds"], row["ours_seconds"], memory["floor_seconds"])
        found.append(
            {
                "tokens": row["extra"]["tokens"],
                "stored_tokens": row["extra"]["stored_tokens"],
                "seconds": [side["median"] for side in sides],
                "times": 1 / row["ratio"]["median"],
            }
        )
    if not found:
        raise ValueError(f"found no row lengths/*; {_AGAIN}")
    return found


def first_token_texts(report: Mapping[str, Any]) -> set[str]:
    """Return all figures of the plot, as texts that speak of it write them."""
    texts = set()
    for one in first_tokens(report):
        texts |= {f"{one['tokens']:,} tokens", f"{one['stored_tokens']:,}"}
        texts |= {f"{one['stored_tokens']:,} tokens", f"{one['times']:.0f} times"}
        texts |= {_milliseconds(seconds) for seconds in one["seconds"]}
    return texts


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def plot_first_token(report: Mapping[str, Any]) -> Picture:
    """Plot rows ``lengths/*``."""
    found = first_tokens(report)
    machine = report["machine"]
    picture = Picture("Time to the first token, by the length of the prompt")
    row = report["rows"][0]
    pairs, model = row["pairs"], row["extra"]["model"]
    picture.heading(
        f"{_MODELS.get(model, model)}; {machine['processor']}, {machine['usable_processors']}"
        f" processors; {report['date'][:10]}.",
        f"Medians of {pairs}. All but the last 32 tokens are on the shelf, or in memory.",
    )
    picture.legend({one.name: _block(picture, one.color) for one in _WAYS})

    def name(group: int, way: int) -> str:
        text = _milliseconds(found[group]["seconds"][way])
        return f"{text}, {found[group]['times']:.0f} times as fast" if way == 1 else text

    bars(picture, _WAYS, {f"{one['tokens']:,} tokens": one["seconds"] for one in found}, name)
    return picture


# --------------------------------------------------------------------------- orders of eviction

_LINES: Final = {
    "FIFO": Series("FIFO", "gray", 1.5),
    "exact LRU": Series("exact LRU", "ink", 1.5, "5 3"),
    "S3-FIFO": Series("S3-FIFO", "amber", 1.5),
    "Belady": Series("Belady, knows the future", "violet", 1.5, "2 3"),
    OURS: Series("kvshelf", "blue", 3),
}


def plot_evictions(report: Mapping[str, Any]) -> Picture:
    """Plot what ``python -m benchmarks.traces`` writes."""
    picture = Picture("Hit rates of orders of eviction, by the size of the shelf")
    picture.heading(
        "Share of the prompts' chunks that were hit; the size is a share of the bytes",
        "of a shelf without bound. Two traces; three sorts of models.",
    )
    picture.legend({one.name: _stroke(picture, one) for one in _LINES.values()})
    panels = {
        title: [result["rates"][order] for order in ORDERS]
        for title, result in _by_family(report["results"])
    }
    lines(
        picture, [_LINES[order] for order in ORDERS], panels, report["shares"], columns=2, step=0.2
    )
    return picture


def _by_family(results: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Put the traces side by side, and the sorts of models below each other."""
    families = list(dict.fromkeys(title.split(", ")[1] for title in results))
    yield from sorted(results.items(), key=lambda each: families.index(each[0].split(", ")[1]))


# ------------------------------------------------------------------------------ what is loaded

_POLICIES: Final = {
    COMPUTED: Series("computed", "gray", 1.5),
    ALWAYS: Series("every hit loaded", "amber", 2, "5 3"),
    AUTO: Series("admission: auto", "blue", 3),
}


def plot_simulated(report: Mapping[str, Any]) -> Picture:
    """Plot what ``python -m benchmarks.simulated --json`` writes."""
    picture = Picture("Simulated time to the first token, as a share of computing the prompt")
    picture.heading(
        f"{report['engine']}; by the length of the prompt, of which"
        f" all but {report['new_tokens']:,} tokens are stored.",
    )
    picture.legend({one.name: _stroke(picture, one) for one in _POLICIES.values()})
    panels = {}
    for storage, seconds in report["storages"].items():
        panels[storage] = [
            [taken / whole for taken, whole in zip(seconds[policy], seconds[COMPUTED], strict=True)]
            for policy in _POLICIES
        ]
    lines(
        picture,
        list(_POLICIES.values()),
        panels,
        report["lengths"],
        columns=2,
        step=0.5,
        name=lambda tokens: f"{tokens / 1024:.0f}K",
    )
    return picture


def plot_admission(report: Mapping[str, Any]) -> Picture:
    """Plot rows ``admission/*``: each policy as a multiple of the better of the first two."""
    machine = report["machine"]
    picture = Picture("First tokens over a storage of limited speed, by what is loaded")
    picture.heading(
        f"{machine['processor']}, {machine['usable_processors']} processors;"
        f" {report['date'][:10]}. Means, as multiples of the better of computing and",
        "loading every hit; 95 % intervals of admission: auto.",
    )
    picture.legend({one.name: _interval(picture, one.color) for one in _POLICIES.values()})
    rows = []
    for row in report["rows"]:
        if not row["name"].startswith("admission/"):
            continue
        means = {policy: row["extra"]["means"][policy] for policy in _POLICIES}
        best = min(statistics.fmean(means[policy]) for policy in (COMPUTED, ALWAYS))
        found = []
        for policy in _POLICIES:
            mean = statistics.fmean(means[policy])
            half = half_interval(means[policy]) if policy == AUTO else 0.0
            times = (mean, max(mean - half, 0.1 * best), mean + half)
            found.append(Dot(*(math.log2(each / best) for each in times)))
        tokens, count = row["extra"]["tokens"], len(row["extra"]["requests"][AUTO])
        at_once = count // len(means[AUTO])
        rows.append(
            DotRow(
                f"{tokens:,} tokens" + (f" × {at_once}" if at_once > 1 else ""),
                speed(row["extra"]["rate"]),
                found,
            )
        )
    scale = Scale(-1.0, 4.75, range(-1, 5), lambda value: f"{2**value:g}×")
    dots(picture, list(_POLICIES.values()), rows, scale)
    return picture


# -------------------------------------------------------------------------- tables of the pages

_CHECKED: Final = "open, preadv, close, one-shot xxh3"
_COPIED: Final = "memcpy"
_INERT: Final = "inert connector"
#: Names of the rows of the tables, and what each is compared with.
_FLOORS: Final = {
    ("verified load, 4 MiB, page cache → buffer", _CHECKED): (
        "load and verify, 4 MiB",
        "preadv + xxh3",
    ),
    ("verified load, 32 MiB, page cache → buffer", _CHECKED): (
        "load and verify, 32 MiB",
        "preadv + xxh3",
    ),
    ("publish of a sealed object, 4 MiB", "writev + rename"): (
        "publish, 4 MiB",
        "writev + rename",
    ),
    ("publish of a sealed object, 32 MiB", "writev + rename"): (
        "publish, 32 MiB",
        "writev + rename",
    ),
    ("gather, native, all heads, 32 MiB", _COPIED): ("gather, 32 MiB", _COPIED),
    ("scatter, native, all heads, 32 MiB", _COPIED): ("scatter, 32 MiB", _COPIED),
    ("cold TTFT, 4128 tokens, request by request", _INERT): ("first token, cold", _INERT),
    ("3 cold prompts back to back, each waits for the one before", _INERT): (
        "three cold prompts",
        _INERT,
    ),
    (
        "warm TTFT, 4096 of 4128 tokens from the shelf, fresh process",
        "vLLM's in-memory prefix cache",
    ): ("first token, warm", "vLLM's prefix cache"),
    ("start of an engine, checkpoint of 2.5 GiB not seen before", _INERT): (
        "start of an engine",
        _INERT,
    ),
}


def plot_floors(data: Mapping[str, Any]) -> Picture:
    """Plot ratios of machines, with their intervals."""
    tables = data["tables"]
    colors: tuple[Color, ...] = ("blue", "amber")
    series = [
        Series(f"machine {table['machine']}", color)
        for table, color in zip(tables, colors, strict=True)
    ]
    picture = Picture("kvshelf's time, as a multiple of its floor")
    picture.heading("Medians and 95 % intervals; below each row's name its floor.")
    picture.legend(
        {
            **{one.name: _interval(picture, one.color) for one in series},
            "goal: at most": _goal(picture),
        }
    )
    found = [{(row[0], row[1]): row for row in table["rows"]} for table in tables]
    rows = []
    for key, (name, floor) in _FLOORS.items():
        cells = [each[key] for each in found]
        goal = _numbers(cells[0][6])
        rows.append(
            DotRow(
                name,
                floor,
                [_interval_of(row[4], row[5]) for row in cells],
                goal[0] if goal else None,
            )
        )
    ticks = (0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
    dots(picture, series, rows, Scale(0.75, 2.0, ticks, lambda value: f"{value:g}×"))
    return picture


def plot_canonical(data: Mapping[str, Any]) -> Picture:
    """Plot what the canonical layout costs."""
    table = data["tables"][0]
    series = [Series("from vec", "blue"), Series("from amx", "amber")]
    picture = Picture("Copies into and out of the canonical layout")
    picture.heading(
        "Time as a multiple of that of native's copies of whole blocks;",
        f"medians and 95 % intervals, {table['date']}.",
    )
    picture.legend({one.name: _interval(picture, one.color) for one in series})
    cells: dict[str, list[Dot | None]] = {}
    for row in table["rows"]:
        # gather, canonical from vec, all heads, 3 MiB
        copy, packing, heads, size = row[0].split(", ")
        both = cells.setdefault(f"{copy}, {heads}, {size}", [None, None])
        both[[f"canonical {one.name}" for one in series].index(packing)] = _interval_of(
            row[3], row[4]
        )
    rows = [DotRow(name, "", both) for name, both in cells.items()]
    dots(picture, series, rows, Scale(1, 4.1, (1, 2, 3, 4), lambda value: f"{value:g}×"))
    return picture


_NOTICES: Final = (
    Series("kvshelf's own reader of inotify", "blue"),
    Series("watchdog, 32 folders", "amber"),
    Series("watchdog, all folders", "violet"),
    Series("polling alone", "gray"),
)


def plot_notices(data: Mapping[str, Any]) -> Picture:
    """Plot how soon, and at what cost, objects of another process are noticed."""
    table = data["tables"][0]
    picture = Picture("Requests that wait for objects of another process")
    picture.heading(f"Medians; {table['processor']}, {table['date']}.")
    picture.legend({one.name: _block(picture, one.color) for one in _NOTICES})
    rows = {row[0]: row for row in table["rows"]}
    delays = {
        name.split(", ")[-2] if ", " in name else name: row
        for name, row in rows.items()
        if row[5] == "≤ 2 ms"
    }
    cost = "100 waiting, 300 to 380 objects of others a second, processor time"
    parts = {
        "From an object's write to its notice": delays,
        "Processor time, 300 to 380 objects of others a second": {"100 waiting": rows[cost]},
    }
    for heading, groups in parts.items():
        [goal] = {row[5] for row in groups.values()}
        picture.height += 18
        picture.text(12, picture.height, f"{heading} (goal: {goal})", bold=True)
        picture.height += 4
        texts = [[cell.split(" (")[0] for cell in row[1:5]] for row in groups.values()]
        values = [[_numbers(text)[0] for text in row] for row in texts]

        def name(group: int, way: int, texts: Sequence[Sequence[str]] = texts) -> str:
            return texts[group][way]

        bars(picture, _NOTICES, dict(zip(groups, values, strict=True)), name)
        picture.height += 6
    return picture


def _numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)]


def _interval_of(median: str, interval: str) -> Dot:
    [value], [low, high] = _numbers(median), _numbers(interval)
    return Dot(value, low, high)


# -------------------------------------------------------------------------------------- signs


def _block(picture: Picture, color: Color) -> Callable[[float, float], None]:
    return lambda x, y: picture.rectangle(x, y - 6, 22, 12, color)


def _stroke(picture: Picture, one: Series) -> Callable[[float, float], None]:
    return lambda x, y: picture.stroke(
        [(x, y), (x + 22, y)], one.color, width=one.width, dashes=one.dashes
    )


def _interval(picture: Picture, color: Color) -> Callable[[float, float], None]:
    def sign(x: float, y: float) -> None:
        picture.stroke([(x, y), (x + 22, y)], color, width=2)
        picture.dot(x + 11, y, color)

    return sign


def _goal(picture: Picture) -> Callable[[float, float], None]:
    return lambda x, y: picture.stroke([(x + 11, y - 8), (x + 11, y + 8)], "mark", width=2)


# ------------------------------------------------------------------------------- command line

#: What makes a picture, by the name of its file in ``docs/data``.
PLOTS: Final[Mapping[str, Callable[[Mapping[str, Any]], Picture]]] = {
    "first-token": plot_first_token,
    "eviction": plot_evictions,
    "floors": plot_floors,
    "canonical": plot_canonical,
    "notices": plot_notices,
    "simulated": plot_simulated,
    "admission": plot_admission,
}


def make(name: str, data: Path = DATA) -> dict[str, str]:
    """Return the pictures of one file of figures: their texts, by the names of their files."""
    picture = PLOTS[name](json.loads((data / f"{name}.json").read_text()))
    endings = _SCHEMES if name in FIXED else {"": _SCHEMES[""]}
    return {f"{name}{ending}.svg": picture.svg(scheme) for ending, scheme in endings.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the pictures; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots",
        description="Make the documentation's plots of the figures in docs/data.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"some of {', '.join(PLOTS)}; default: all"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", default=DATA, help="default: docs/data")
    parser.add_argument(
        "--images", type=Path, metavar="DIR", default=IMAGES, help="default: docs/images"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in PLOTS]
    if unknown:
        parser.error(f"unknown plot: {', '.join(unknown)}; expected some of {', '.join(PLOTS)}")
    for name in options.names or PLOTS:
        if not (options.data / f"{name}.json").exists():
            sys.stdout.write(f"{name}: no {options.data / name}.json\n")
            continue
        try:
            pictures = make(name, options.data)
        except ValueError as error:
            sys.stderr.write(f"{options.data / name}.json: {error}\n")
            return 1
        for file, text in pictures.items():
            (options.images / file).write_text(text)
            sys.stdout.write(f"{options.images / file}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
