"""Prints the text of ``docs/modules.md``: the first sentence of each module, by rooms."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PAGE_HEAD = """\
<!-- Generated from the modules of src/kvshelf and backends by `make docs`; do not edit. -->
# Modules

What each module holds, by its own first sentence. The rooms stand in the order of the picture of
[Architecture](architecture.md), what imports above what is imported; the modules of a room in
alphabetical order.
"""


def _layers() -> list[str]:
    """Return the names of the contract that orders the rooms and the modules beside them."""
    contracts = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layers] = [one["layers"] for one in contracts["contracts"] if one.get("id") == "layers"]
    return [name.strip(" ()") for layer in layers for name in layer.replace(":", "|").split("|")]


def _modules(name: str) -> Iterator[Path]:
    """Yield the files of a room, or of a module beside the rooms."""
    place = _ROOT / "backends" if name == "backends" else _ROOT / "src" / "kvshelf" / name
    if place.is_dir():
        yield from sorted(place.rglob("*.py"), key=lambda path: path.relative_to(place).parts)
    else:
        yield place.with_suffix(".py")


def _row(name: str, file: Path) -> str:
    place = _ROOT / ("backends" if name == "backends" else "src/kvshelf")
    parts = ["kvshelf", *([name] if name == "backends" else [])]
    parts += [part for part in file.relative_to(place).with_suffix("").parts if part != "__init__"]
    sentence = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0]
    for role in (":mod:", ":class:", ":func:"):
        sentence = sentence.replace(role, "")
    text = " ".join(sentence.split()).replace("``", "`").replace("|", "\\|")
    return f"| `{'.'.join(parts)}` | {text} |"


def render_page() -> str:
    """Return the page."""
    lines = [_PAGE_HEAD.rstrip("\n"), "", "| module | holds |", "|---|---|"]
    for name in _layers():
        lines += [_row(name, file) for file in _modules(name)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_page(), end="")
