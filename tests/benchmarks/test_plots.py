"""The documentation's plots show the figures of its tables, and of the measurements it keeps."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plots import DATA, FIXED, IMAGES, PLOTS, first_token_texts, main, make
from benchmarks.svg import Picture
from benchmarks.traces import FAMILIES, Result, table

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REGION = re.compile(r"<!-- first-token:start -->(.*?)<!-- first-token:end -->", re.DOTALL)
#: Milliseconds of a hit, by the length of the prompt; computing takes 25 times as long.
HITS = {1056: 10.0, 2080: 20.0, 4128: 50.0, 7968: 100.0}


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


def report() -> dict[str, Any]:
    """Figures of first tokens, as the benchmark writes them."""
    rows = []
    for tokens, hit in HITS.items():
        for floor, times in (("computed", 25.0), ("memory", 0.8)):
            rows.append(
                {
                    "name": f"lengths/{tokens}/{floor}",
                    "pairs": 9,
                    "skipped": None,
                    "ours_seconds": {"median": 1e-3 * hit},
                    "floor_seconds": {"median": 1e-3 * hit * times},
                    "ratio": {"median": 1 / times},
                    "extra": {"tokens": tokens, "stored_tokens": tokens - 32, "model": "demo"},
                }
            )
    machine = {"processor": "a processor", "usable_processors": 2}
    return {"date": "2030-01-02T03:04:05+00:00", "machine": machine, "rows": rows}


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


def write(folder: Path) -> dict[str, str]:
    (folder / "first-token.json").write_text(json.dumps(report()))
    assert main(["--data", str(folder), "--images", str(folder), "first-token"]) == 0
    return {file.name: file.read_text() for file in folder.glob("*.svg")}


def test_bars_are_as_long_as_what_they_show(tmp_path: Path) -> None:
    picture = ET.fromstring(write(tmp_path)["first-token.svg"])
    drawn = [part for part in picture.iterfind(".//{*}rect") if part.get("height") == "14.0"]
    lengths = [float(part.attrib["width"]) for part in drawn]
    expected = [hit * times for hit in HITS.values() for times in (25.0, 1.0, 0.8)]
    unit = lengths[-3] / expected[-3]
    assert unit > 0
    for length, value in zip(lengths, expected, strict=True):
        # What is too short to be seen gets a minimum.
        assert length == pytest.approx(max(unit * value, 1.5), abs=0.1)
    texts = [part.text or "" for part in picture.iterfind(".//{*}text")]
    assert {"1,056 tokens", "2,500 ms", "100 ms, 25 times as fast", "80 ms"} <= set(texts)
    assert "2030-01-02" in " ".join(texts)
    for part in picture.iterfind(".//{*}text"):
        assert float(part.attrib["font-size"]) >= 12


def test_what_was_not_measured_is_not_plotted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = report()
    missing["rows"][3] |= {"skipped": "no vLLM", "floor_seconds": None}
    for figures, message in ((missing, "no vLLM"), ({**missing, "rows": []}, "no row lengths")):
        (tmp_path / "first-token.json").write_text(json.dumps(figures))
        assert main(["--data", str(tmp_path), "--images", str(tmp_path), "first-token"]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert "python -m benchmarks lengths" in error
    assert not list(tmp_path.glob("*.svg"))


def test_pictures_follow_the_browser_or_have_one_scheme(tmp_path: Path) -> None:
    pictures = write(tmp_path)
    assert set(pictures) == {f"first-token{end}.svg" for end in ("", "-light", "-dark")}
    assert "first-token" in FIXED
    for name, text in pictures.items():
        assert ("prefers-color-scheme:dark" in text) == (name == "first-token.svg")
    assert ".card{fill:#ffffff}" in pictures["first-token-light.svg"]
    assert ".card{fill:#0f172a}" in pictures["first-token-dark.svg"]


def test_figures_as_texts_write_them() -> None:
    texts = first_token_texts(report())
    assert {"4,128 tokens", "4,096 tokens", "1,250 ms", "50 ms", "40 ms", "25 times"} <= texts


def test_text_of_a_picture_is_escaped() -> None:
    picture = Picture("a < b & c")
    picture.heading("d > e")
    assert ET.fromstring(picture.svg()).findtext("{*}title") == "a < b & c"


def test_wrong_names_and_missing_figures_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["nonsense"])
    assert caught.value.code == 2
    assert "first-token" in capsys.readouterr().err
    assert main(["--data", str(tmp_path), "--images", str(tmp_path)]) == 0
    assert f"no {tmp_path / 'floors'}.json" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
