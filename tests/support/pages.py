"""The pages of the documentation, taken apart for tests of what they say."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = (".", ".github", "benchmarks", "cuda", "docs", "examples", "src/kvshelf/adapters")
PAGES = sorted(page for folder in _FOLDERS for page in (ROOT / folder).glob("*.md"))

_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A block of code."""

    page: Path
    language: str
    text: str


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return _BLOCK.sub("", page.read_text())


def blocks(*languages: str) -> list[Block]:
    """The blocks of code of all pages, in these languages."""
    return [
        Block(page, found[2], textwrap.dedent(found[3]))
        for page in PAGES
        for found in _BLOCK.finditer(page.read_text())
        if found[2] in languages
    ]


def anchors(page: Path) -> set[str]:
    """The anchors of a page of the site."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE):
        given = re.search(r"\{ *#([\w-]+) *\}$", heading)
        text = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading)
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())
        anchor = given[1] if given else slug.encode("ascii", "ignore").decode()
        number = 1
        unique = anchor
        while unique in found:
            unique = f"{anchor}_{number}"
            number += 1
        found.add(unique)
    return found | set(re.findall(r'<a id="([\w-]+)"', page.read_text()))
