"""Documentation: parts that are generated are up to date, links lead somewhere, code runs."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pages
import pytest
import torch

from kvshelf.cli.common import EXIT_CODES
from kvshelf.config import Config
from tests.support.pages import PAGES, ROOT, anchors, blocks, prose

pytestmark = pytest.mark.real

SHELL = ("bash", "console", "shell", "sh", "")


@pytest.mark.parametrize("name", pages.PAGES)
def test_generated_parts_of_pages_are_up_to_date(name: str) -> None:
    page = (pages.DOCS / name).read_text()
    assert page == pages.PAGES[name](page), (
        f"docs/{name} is not what the code says: run `make docs`"
    )


def test_every_option_is_explained() -> None:
    listed = [name for group in pages.GROUPS.values() for name in group]
    assert sorted(listed) == sorted(Config.model_fields)
    assert all(pages.descriptions()[name] for name in listed)


def test_exit_codes_are_documented() -> None:
    page = (pages.DOCS / "cli.md").read_text()
    listed = re.findall(r"^\| (\d+) \| \w", page, re.MULTILINE)
    assert {*map(int, listed)} == {*EXIT_CODES, 130}


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / ".github").glob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)(?:#([^)\s]+))?\)", prose(page)):
        # From a pull request, files of the repository lie below blob/.
        other = page.parent / target.replace("../blob/HEAD/", "../") if target else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor and other.suffix == ".md":
            assert anchor in anchors(other), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("image", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=str)
def test_images_are_well_formed(image: Path) -> None:
    root = ET.parse(image).getroot()
    assert root.tag.endswith("svg")
    assert root.find("{*}title") is not None, "a picture needs a title for those who cannot see it"


def test_examples_of_the_python_api_run_twice() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    assert "cache.close()" in code
    for _ in range(2):
        exec(compile(code, "docs/api.md", "exec"), {})


def test_schemas_of_the_operators_are_those_of_torch() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    importlib.import_module("kvshelf.kv.ops")
    for name in ("gather_kv", "scatter_kv"):
        assert f"{getattr(torch.ops.kvshelf, name).default._schema}\n" in page


def test_no_page_installs_a_package_of_an_index_that_is_not_ours() -> None:
    """kvshelf is on no index: anybody could take the name there."""
    install = re.compile(r"\b(pip3?|pipx|uvx?|poetry) (?!uninstall).*[ '\"]kvshelf\b(?!-)")
    shown = [(block.page, line) for block in blocks(*SHELL) for line in block.text.split("\n")]
    assert [(page.name, line) for page, line in shown if install.search(line)] == []


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    for tool in ("material", "mkdocstrings_handlers.python", "griffe_sphinx"):
        pytest.importorskip(tool, reason="the documentation tools are not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "format" / "index.html").exists()
