"""Charts as SVG.

Owns the writer of the documentation's plots: bars, dots with intervals, and lines, in the
browser's light or dark scheme. A picture is `WIDTH` units wide, and its smallest letters are 12
units high, so that they can be read on a screen of 400 pixels. The same figures give the same
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal
from xml.sax.saxutils import escape

WIDTH: Final = 480
#: Pixels of a unit where a page has room.
_SCALE: Final = 1.25
_MARGIN: Final = 12.0
_LINE: Final = 18.0
#: A letter's width, of its height: more than the average of the fonts of common systems.
_LETTER: Final = 0.56

Scheme = Literal["light", "dark", "both"]
Color = Literal["blue", "gray", "amber", "violet", "ink"]

#: Each class of elements, its CSS properties, and their color in the light and the dark scheme.
_COLORS: Final = (
    ("card", "fill", "#ffffff", "#0f172a"),
    # Letters have an edge of the card's color, so that they can be read on lines.
    ("text,.soft", "stroke", "#ffffff", "#0f172a"),
    ("text", "fill", "#1e293b", "#e2e8f0"),
    ("soft", "fill", "#526077", "#9fb0c7"),
    ("grid", "stroke", "#e2e8f0", "#334155"),
    ("mark", "stroke", "#dc2626", "#f87171"),
    ("blue", "fill stroke", "#2563eb", "#60a5fa"),
    ("gray", "fill stroke", "#94a3b8", "#64748b"),
    ("amber", "fill stroke", "#d97706", "#fbbf24"),
    ("violet", "fill stroke", "#7c3aed", "#a78bfa"),
    ("ink", "fill stroke", "#334155", "#cbd5e1"),
)
_LETTERS: Final = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;"
    "paint-order:stroke;stroke-width:3px;stroke-linejoin:round}"
)


def _rules(dark: bool) -> str:
    rules = []
    for name, properties, *colors in _COLORS:
        color = colors[dark]
        rules.append(f".{name}{{{';'.join(f'{each}:{color}' for each in properties.split())}}}")
    return "".join(rules)


def text_width(text: str, size: float = 13) -> float:
    """Return about how wide a text is, in units."""
    return _LETTER * size * len(text)


@dataclass(slots=True)
class Picture:
    """A picture that is drawn from top to bottom.

    Attributes
    ----------
    title : str
        Heading; also for those who cannot see the picture.
    height : float
        Height of what was drawn.
    """

    title: str
    height: float = _MARGIN
    _lines: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: Literal["start", "middle", "end"] = "start",
        style: Literal["text", "soft"] = "text",
        size: float = 13,
        bold: bool = False,
    ) -> None:
        """Write one line of text; `y` is its base line."""
        weight = ' font-weight="600"' if bold else ""
        self._lines.append(
            f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" font-size="{size:g}"'
            f' text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def rectangle(self, x: float, y: float, width: float, height: float, color: Color) -> None:
        """Fill a rectangle."""
        self._lines.append(
            f'<rect class="{color}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}"'
            f' height="{height:.1f}" style="stroke:none"/>'
        )

    def stroke(
        self,
        points: Sequence[tuple[float, float]],
        color: Color | Literal["grid", "mark"],
        *,
        width: float = 1,
        dashes: str = "",
    ) -> None:
        """Draw a line through points."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._lines.append(
            f'<path class="{color}" d="M{path}" stroke-width="{width:g}"{dashed}'
            ' style="fill:none"/>'
        )

    def dot(self, x: float, y: float, color: Color, radius: float = 4) -> None:
        """Draw a dot."""
        self._lines.append(f'<circle class="{color}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"/>')

    def heading(self, *notes: str) -> None:
        """Write the title, and notes below it."""
        self.height += 16
        self.text(_MARGIN, self.height, self.title, size=15, bold=True)
        for note in notes:
            self.height += _LINE
            self.text(_MARGIN, self.height, note, style="soft", size=12)
        self.height += 8

    def legend(self, entries: Mapping[str, Callable[[float, float], None]]) -> None:
        """Write names, each beside its sign; a sign is drawn into 22 units, around a middle."""
        x = _MARGIN
        self.height += _LINE
        for name, sign in entries.items():
            width = 28 + text_width(name) + 14
            if x + width - 14 > WIDTH - _MARGIN and x > _MARGIN:
                x = _MARGIN
                self.height += _LINE + 2
            sign(x, self.height - 4.5)
            self.text(x + 28, self.height, name)
            x += width
        self.height += 10

    def svg(self, scheme: Scheme = "both") -> str:
        """Return the file's text.

        Parameters
        ----------
        scheme : {"light", "dark", "both"}
            Colors; "both": those that the browser asks for.
        """
        height = math.ceil(self.height + _MARGIN)
        style = _LETTERS + _rules(scheme == "dark")
        if scheme == "both":
            style += f"@media (prefers-color-scheme:dark){{{_rules(True)}}}"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
                f' width="{_SCALE * WIDTH:g}" height="{_SCALE * height:g}" role="img"'
                ' aria-labelledby="title">',
                f'<title id="title">{escape(self.title)}</title>',
                f"<style>{style}</style>",
                f'<rect class="card" width="{WIDTH}" height="{height}" rx="8"/>',
                *self._lines,
                "</svg>",
                "",
            ]
        )


@dataclass(frozen=True, slots=True)
class Series:
    """What bars, dots or lines of one color show.

    Attributes
    ----------
    name : str
    color : str
    width : float
        Of a line.
    dashes : str
        Lengths of a line's dashes and gaps; empty: one stroke.
    """

    name: str
    color: Color
    width: float = 2
    dashes: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """A horizontal scale.

    Attributes
    ----------
    low, high : float
        The values at its ends.
    ticks : sequence of float
        Values with a line and a name.
    name : Callable
        Returns the name of a value.
    """

    low: float
    high: float
    ticks: Sequence[float]
    name: Callable[[float], str]

    def at(self, value: float, left: float, right: float) -> float:
        """Return the place of a value between the ends of the scale."""
        share = (value - self.low) / (self.high - self.low)
        return left + (right - left) * min(max(share, 0.0), 1.0)


def bars(
    picture: Picture,
    series: Sequence[Series],
    groups: Mapping[str, Sequence[float]],
    name: Callable[[int, int], str],
) -> None:
    """Draw horizontal bars from zero, with their values beside them.

    Parameters
    ----------
    picture : Picture
    series : sequence of Series
        One for each bar of a group.
    groups : mapping of str and sequence of float
        The bars' values, by the name of their group.
    name : Callable
        Returns the text beside a bar, by the numbers of its group and its series.
    """
    thick, gap = 16.0, 12.0
    left = 2 * _MARGIN + max(text_width(each) for each in groups)
    most = max(value for values in groups.values() for value in values)
    names = max(
        text_width(name(i, j), 12) * value / most
        for i, values in enumerate(groups.values())
        for j, value in enumerate(values)
    )
    # The longest bar ends where its text still has room.
    unit = (WIDTH - _MARGIN - left - 6 - names) / most
    top = picture.height + 4
    bottom = top - gap + sum(len(values) * thick + gap for values in groups.values())
    picture.stroke([(left, top - 3), (left, bottom + 1)], "grid")
    for number, (group, values) in enumerate(groups.items()):
        picture.text(left - 10, top + len(values) * thick / 2 + 3.5, group, anchor="end")
        for each, value in enumerate(values):
            length = max(unit * value, 1.5)
            picture.rectangle(left, top, length, thick - 2, series[each].color)
            picture.text(left + length + 6, top + 11, name(number, each), size=12)
            top += thick
        top += gap
    picture.height = bottom + 4


@dataclass(frozen=True, slots=True)
class Dot:
    """A value and its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class DotRow:
    """A row of dots.

    Attributes
    ----------
    name, note : str
        What is shown beside the row; the note in a line of its own.
    dots : sequence of Dot or None
        One for each series; None where there is none.
    goal : float, optional
        A value that gets a mark.
    """

    name: str
    note: str
    dots: Sequence[Dot | None]
    goal: float | None = None


def dots(picture: Picture, series: Sequence[Series], rows: Sequence[DotRow], scale: Scale) -> None:
    """Draw rows of dots with their intervals, and a line at the value 1."""
    tall = 36.0 if any(row.note for row in rows) else 30.0
    names = [text_width(row.name) for row in rows]
    widest = max(names + [text_width(row.note, 12) for row in rows])
    left, right = _MARGIN + widest + 12, WIDTH - 2 * _MARGIN
    top = picture.height + 4
    bottom = top + tall * len(rows)
    for tick in scale.ticks:
        x = scale.at(tick, left, right)
        strong = tick == 1
        picture.stroke([(x, top), (x, bottom)], "gray" if strong else "grid")
        picture.text(x, bottom + 16, scale.name(tick), anchor="middle", style="soft", size=12)
    for number, row in enumerate(rows):
        middle = top + tall * (number + 0.5)
        picture.text(_MARGIN, middle + (-2 if row.note else 4), row.name)
        if row.note:
            picture.text(_MARGIN, middle + 12, row.note, style="soft", size=12)
        if row.goal is not None:
            x = scale.at(row.goal, left, right)
            picture.stroke([(x, middle - 12), (x, middle + 12)], "mark", width=2)
        for each, dot in enumerate(row.dots):
            if dot is None:
                continue
            y = middle + 10 * (each - (len(row.dots) - 1) / 2)
            ends = [(scale.at(end, left, right), y) for end in (dot.low, dot.high)]
            picture.stroke(ends, series[each].color, width=2)
            picture.dot(scale.at(dot.value, left, right), y, series[each].color)
    picture.height = bottom + 18


def lines(
    picture: Picture,
    series: Sequence[Series],
    panels: Mapping[str, Sequence[Sequence[float]]],
    scale: Sequence[float],
    *,
    columns: int,
    step: float,
    name: Callable[[float], str] = "{:.0%}".format,
) -> None:
    """Draw panels of lines: the horizontal scale is logarithmic, the vertical one has shares.

    Parameters
    ----------
    picture : Picture
    series : sequence of Series
        One for each line of a panel.
    panels : mapping of str and sequence of sequence of float
        For each series the values at the places of `scale`, by the title of the panel.
    scale : sequence of float
        The places of the points, each with its name.
    columns : int
        Panels side by side.
    step : float
        Between lines of the vertical scale.
    name : Callable
        Returns the name of a place of `scale`.
    """
    labels, gap, tall = 36.0, 16.0, 130.0
    # The name of a panel's last place ends behind it.
    width = (WIDTH - 3 * _MARGIN - (columns - 1) * gap) / columns - labels
    top = picture.height
    for number, (title, values) in enumerate(panels.items()):
        column = number % columns
        if number and not column:
            top += tall + 62
        left = _MARGIN + column * (width + labels + gap) + labels
        low = top + 26 + tall
        picture.text(left + width / 2, top + 16, title, anchor="middle", bold=True)
        most = step * max(1, math.ceil(max(map(max, values)) / step))
        for tick in _ticks(most, step):
            y = low - tall * tick / most
            picture.stroke([(left, y), (left + width, y)], "grid")
            picture.text(left - 6, y + 4, f"{tick:.0%}", anchor="end", style="soft", size=12)
        first, last = math.log(scale[0]), math.log(scale[-1])
        places = [left + width * (math.log(each) - first) / (last - first) for each in scale]
        for x, place in zip(places, scale, strict=True):
            picture.text(x, low + 16, name(place), anchor="middle", style="soft", size=12)
        for one, shares in zip(series, values, strict=True):
            points = [
                (x, low - tall * share / most) for x, share in zip(places, shares, strict=True)
            ]
            picture.stroke(points, one.color, width=one.width, dashes=one.dashes)
    picture.height = top + 26 + tall + 20


def _ticks(most: float, step: float) -> Iterator[float]:
    for number in range(round(most / step) + 1):
        yield number * step
