"""The public API: what the documentation shows is what the lists in the code promise."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import kvshelf

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "api.md").read_text()


def promised(module: str) -> list[str]:
    """The ``__all__`` of a module, read without importing it: one of them needs vLLM."""
    if module == "kvshelf":
        return kvshelf.__all__
    place = ROOT / "src" / module.replace(".", "/")
    source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{module} has no __all__")


def test_page_shows_the_public_modules() -> None:
    shown = re.findall(r"^::: (kvshelf[\w.]*)$", PAGE, re.MULTILINE)
    assert [module for module in shown if module in kvshelf.PUBLIC_MODULES] == [
        *kvshelf.PUBLIC_MODULES
    ]


#: Has tests of its own.
WITH_VLLM = {"kvshelf.vllm.multiprocess"}


@pytest.mark.parametrize("module", sorted({*kvshelf.PUBLIC_MODULES} - WITH_VLLM))
def test_what_is_promised_can_be_imported(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in promised(module) if not hasattr(found, name)] == []


def test_page_imports_nothing_else() -> None:
    names = {f"{module}.{name}" for module in kvshelf.PUBLIC_MODULES for name in promised(module)}
    imports = re.findall(r"^from (kvshelf[\w.]*) import (.*)$", PAGE, re.MULTILINE)
    used = {f"{module}.{name.strip()}" for module, list_ in imports for name in list_.split(",")}
    assert used - names == set()


def test_package_has_its_public_names_and_no_others() -> None:
    assert set(kvshelf.__all__) <= set(dir(kvshelf))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = kvshelf.no_such_name  # type: ignore[attr-defined]
