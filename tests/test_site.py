"""The site: what its index for programs and its menu list."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ITEM = re.compile(r"- \[(?P<name>[^]]+)\]\((?P<target>[^)]+)\): (?P<note>.+)")


def pages(entries: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield title and file of each page of a part of the menu, and of the parts in it."""
    for title, value in (item for entry in entries for item in entry.items()):
        if isinstance(value, list):
            yield from pages(value)
        else:
            yield title, value


def sections() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the sections of the menu, each with titles and files of its pages."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    found = [item for entry in nav for item in entry.items()]
    assert all(isinstance(value, list) for _, value in found), "a page is in no section"
    return [(title, list(pages(value))) for title, value in found]


def test_the_index_for_programs_lists_the_pages_of_the_menu() -> None:
    head, *parts = re.split(r"^## ", (DOCS / "llms.txt").read_text(), flags=re.MULTILINE)
    assert re.match(r"# kvshelf\n\n> \S", head), "a title and a summary come first"
    listed = []
    for part in parts:
        title, *lines = [line for line in part.splitlines() if line]
        items = [ITEM.fullmatch(line) for line in lines]
        assert all(items), f"## {title}: expected lines `- [name](page.md): note`"
        listed.append((title, [(item["name"], item["target"]) for item in items if item]))
    assert listed == sections(), "docs/llms.txt has not the sections of mkdocs.yml"


def test_links_of_the_index_lead_to_pages() -> None:
    text = (DOCS / "llms.txt").read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert "://" in target or (DOCS / target).is_file(), target


def test_every_page_is_in_the_menu() -> None:
    menu = [page for _, section in sections() for _, page in section]
    assert sorted(menu) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
