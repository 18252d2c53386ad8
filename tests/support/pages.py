"""The pages of the documentation, taken apart for tests of what they say."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
#: What was true once stands in the changelog, and stays.
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)

_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)


class Block(NamedTuple):
    """A block of code."""

    page: Path
    language: str
    text: str


class Span(NamedTuple):
    """A piece of code in a line, and the line from its beginning up to there."""

    page: Path
    text: str
    before: str


def name(page: Path) -> str:
    """The page as a person calls it."""
    return str(page.relative_to(ROOT))


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


def spans() -> list[Span]:
    """The pieces of code in the lines of all pages."""
    found = []
    for page in PAGES:
        for paragraph in re.split(r"\n\s*\n|\n(?=\|)", prose(page)):
            found += [
                Span(page, " ".join(span[2].split()), " ".join(paragraph[: span.start()].split()))
                for span in _SPAN.finditer(paragraph)
            ]
    return found


def command_lines(text: str) -> Iterator[list[str]]:
    """The commands of a block, in words: without prompts, comments, outputs and redirections."""
    text = re.sub(r"\\\n\s*", " ", text)
    if re.search(r"^\$ ", text, re.MULTILINE):
        text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
    text = re.sub(r"(^|\s)#.*$", "", text, flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";|&<>\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if word.strip("\n;|&<>") == "":
            if words:
                yield words
            words = []
        else:
            words.append(word)


def commands() -> list[tuple[Path, list[str]]]:
    """The commands of all pages, in blocks and in lines."""
    found = [
        (block.page, words)
        for block in blocks("bash", "console", "shell", "sh", "")
        for words in command_lines(block.text)
    ]
    for span in spans():
        if re.match(r"(kvshelf|make|python|pip|vllm) ", span.text):
            found += [(span.page, words) for words in command_lines(span.text)]
    return found


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
