"""The public API: the list in the documentation is the list in the code, and nothing else."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import kvshelf

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "api.md").read_text()
GUIDE, LIST = PAGE.split("## What is public")


def promised(module: str) -> list[str]:
    """The ``__all__`` of a module, read without importing it: one of them needs vLLM."""
    place = ROOT / "src" / module.replace(".", "/")
    source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{module} has no __all__")


def test_the_documentation_lists_what_is_promised() -> None:
    rows = re.findall(r"^\| `(kvshelf[\w.]*)` \| .* \| (.*) \|$", LIST, re.MULTILINE)
    listed = {module: re.findall(r"`(\w+)`", names) for module, names in rows}
    assert listed == {module: promised(module) for module in kvshelf.PUBLIC_MODULES}


#: Has tests of its own.
WITH_VLLM = {"kvshelf.vllm.multiprocess"}


@pytest.mark.parametrize("module", sorted({*kvshelf.PUBLIC_MODULES} - WITH_VLLM))
def test_what_is_promised_can_be_imported(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in promised(module) if not hasattr(found, name)] == []


def test_the_documentation_imports_and_names_nothing_else() -> None:
    names = set(kvshelf.PUBLIC_MODULES)
    names |= {f"{module}.{name}" for module in kvshelf.PUBLIC_MODULES for name in promised(module)}
    imports = re.findall(r"^from (kvshelf[\w.]*) import (.*)$", GUIDE, re.MULTILINE)
    used = {f"{module}.{name.strip()}" for module, list_ in imports for name in list_.split(",")}
    used |= set(re.findall(r"(?<!torch\.ops\.)\bkvshelf(?:\.[A-Za-z_]\w*)+", GUIDE))
    assert used - names == set()


def test_the_reference_has_each_public_name_once() -> None:
    shown = [
        line.removeprefix("::: ").split(".", 1)[1]
        for page in sorted((ROOT / "docs" / "reference").glob("*.md"))
        for line in page.read_text().splitlines()
        if line.startswith("::: ")
    ]
    assert len(shown) == len(set(shown))
    text = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    elsewhere = {}
    for module in kvshelf.PUBLIC_MODULES:
        section = text.split(f"## `{module}`\n")[1].split("\n## ")[0]
        for name in promised(module):
            path = f"{module}.{name}".removeprefix("kvshelf.")
            if path not in shown:
                assert re.search(rf"`({module}\.)?{name}`", section), f"{module}.{name}"
                elsewhere[path] = name
    # What has another place there is another name of what is shown, or the version.
    last = {path.rsplit(".", 1)[-1] for path in shown}
    assert {name.removeprefix("LMCache") for name in elsewhere.values()} - last == {"__version__"}


def test_the_package_has_its_public_names_and_no_others() -> None:
    assert set(kvshelf.__all__) <= set(dir(kvshelf))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = kvshelf.no_such_name  # type: ignore[attr-defined]
