"""The documentation's plots show the figures of its tables, and of the measurements it keeps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plots import DATA, IMAGES, PLOTS, first_token_texts, make
from benchmarks.traces import FAMILIES, Result, table

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REGION = re.compile(r"<!-- first-token:start -->(.*?)<!-- first-token:end -->", re.DOTALL)


def measured(name: str) -> Any:
    file = DATA / f"{name}.json"
    if not file.exists():
        pytest.skip(f"nothing is kept in {file.relative_to(ROOT)}")
    return json.loads(file.read_text())


def page_rows() -> set[tuple[str, ...]]:
    """The rows of all tables of the documentation."""
    lines = [line for page in PAGES for line in page.read_text().splitlines()]
    return {cells(line) for line in lines if line.startswith("| ")}


def cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


@pytest.mark.parametrize("name", PLOTS)
def test_pictures_are_those_of_the_figures(name: str) -> None:
    measured(name)
    for file, text in make(name).items():
        assert (IMAGES / file).read_text() == text, f"run python -m benchmarks.plots {name}"


@pytest.mark.parametrize("name", PLOTS)
def test_pages_show_each_picture_with_a_text_for_those_who_cannot_see_it(name: str) -> None:
    measured(name)
    text = "\n".join(page.read_text() for page in PAGES)
    [*shown] = re.findall(rf"!\[([^]]*)\]\([\w/]*images/{name}\.svg\)|{name}-light\.svg", text)
    assert shown
    assert all(len(alt) > 40 for alt in shown if alt)


@pytest.mark.parametrize("name", ["canonical", "floors", "notices"])
def test_tables_behind_pictures_are_those_of_the_pages(name: str) -> None:
    rows = page_rows()
    for each in measured(name)["tables"]:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", each["date"])
        for row in [each["columns"], *each["rows"]]:
            assert tuple(row) in rows, row


def test_hit_rates_behind_the_picture_are_those_of_the_page() -> None:
    data = measured("eviction")
    rows = page_rows()
    families = {family.title: family for family in FAMILIES}
    for title, result in data["results"].items():
        trace, family = title.split(", ")
        shown = Result(result["most"], result["bytes"], result["rates"])
        for line in table(trace, families[family], shown, data["shares"]):
            assert line.startswith("|---") or cells(line) in rows, line


def test_figures_beside_the_first_tokens_are_those_of_the_measurement() -> None:
    texts = first_token_texts(measured("first-token"))
    regions = [region for page in PAGES for region in REGION.findall(page.read_text())]
    figures = re.findall(r"\d[\d,.]* (?:ms|s|tokens|times)\b", " ".join(regions))
    assert figures, "no page has figures between <!-- first-token:start --> and its end"
    for figure in figures:
        assert figure in texts, f"{figure} is not in docs/data/first-token.json"
