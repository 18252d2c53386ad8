"""Documentation: generated pages are up to date, links lead somewhere, the site builds."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from config_page import render_page

from kvshelf.cli.common import EXIT_CODES
from kvshelf.config import Config

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_the_configuration_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == render_page(), "run `make docs`"


def test_every_option_is_explained() -> None:
    page = render_page()
    for name, field in Config.model_fields.items():
        assert field.description
        assert f"### `{name}`" in page


def test_the_exit_codes_are_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for code in EXIT_CODES:
        assert re.search(rf"^\| {code} \| \w", page, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_modules_and_files_that_the_documentation_names_exist() -> None:
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    text = "\n".join(page.read_text() for page in pages)
    for path in set(re.findall(r"\b((?:src/|kvshelf/|backends/|benchmarks/)[\w/]+\.py)\b", text)):
        folder = ROOT / "src" if path.startswith("kvshelf/") else ROOT
        assert (folder / path).is_file(), path
    names = set(re.findall(r"\bkvshelf(?:\.[A-Za-z_]\w*)+", text))
    assert "kvshelf.backends" in names
    for name in names:
        place, (_, *rest) = ROOT / "src" / "kvshelf", name.split(".")
        if rest[0] == "backends":
            place = ROOT
        while rest and (place / rest[0]).is_dir():
            place /= rest.pop(0)
        if rest and (place / f"{rest[0]}.py").is_file():
            place /= f"{rest.pop(0)}.py"
        source = (place if place.suffix else place / "__init__.py").read_text()
        for part in rest:
            defined = rf'^\s*((async )?def |class ){part}\b|^\s*"?{part}"?(,$|:| =)'
            assert re.search(defined, source, re.MULTILINE), f"{name}: no {part} in {place}"


@pytest.mark.parametrize("image", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=str)
def test_images_are_well_formed(image: Path) -> None:
    root = ET.parse(image).getroot()
    assert root.tag.endswith("svg")
    assert root.find("{*}title") is not None, "a picture needs a title for those who cannot see it"


def test_the_examples_of_the_python_api_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    assert "cache.close()" in code
    code = code.replace("/tmp/kv-example", str(tmp_path / "shelf"))
    exec(compile(code, "docs/api.md", "exec"), {})


def test_every_row_about_lmcache_has_a_verdict() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text()
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    verdicts = {row[1].strip() for row in rows}
    assert verdicts == {"verdict", "equal", "different", "refused"}
    assert all(len(row) == 3 for row in rows)


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the documentation tools are not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "format" / "index.html").exists()
