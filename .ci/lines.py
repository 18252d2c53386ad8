"""Count lines of code by rooms, and fail where there are more than ``.ci/lines.json`` says.

Run by ``make lint``. A *room* is a folder of ``src/kvshelf``, the modules beside those folders
(``src top``), or a folder of the repository. Rooms are the product, also folders not named here
that hold code, except :data:`APART`. Lines of code are neither blank nor only comment nor part of a
docstring. Of ``src``, ``backends`` and ``cuda`` each file counts, whatever its suffix, so that no
code lies in data. Markdown counts in ``docs`` alone, with all lines.

The file holds *figures*: the lines of each room, and how often product and tests suppress a message
of ruff (``noqa``) or of mypy (``type: ignore``). ``python .ci/lines.py --record`` lowers them to
what is there. To raise one edit the file, in a commit of its own that says why. A room above its
*goal* does not fail. Statements and lines for each show whether there is less code, or only denser.
"""

from __future__ import annotations

import ast
import gc
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final, TypeAlias

ROOT: Final = Path(__file__).resolve().parent.parent
FIGURES: Final = ROOT / ".ci" / "lines.json"
#: Rooms that are no part of the product.
APART: Final = ("tests", "benchmarks", "examples", "docs", ".ci")
C: Final = (".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".cuh", ".inc")
CODE: Final = (".py", *C, ".yaml", ".yml", ".sh", ".cmake", ".mk")
DOCUMENTED: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SUPPRESSED: Final = {
    "noqa": re.compile(r"#\s*(?:ruff:\s*)?noqa\b"),
    "type: ignore": re.compile(r"#\s*(?:type:\s*ignore|mypy:)"),
}
REMEDY: Final = (
    "Write it with less, or take out as much elsewhere in the room. Where neither can be, raise"
    " the figure in .ci/lines.json, in a commit of its own that says why."
)

Counts: TypeAlias = Counter[str]


def room_of(name: str) -> str | None:
    """Return the room of a file by its path in the repository, or None where it has none."""
    top, *rest = name.split("/")
    suffix = Path(name).suffix
    if (suffix == ".md") != (top == "docs"):
        return None
    if top == "src":
        return f"src {rest[1] if len(rest) > 2 else 'top'}"
    if top in ("backends", "cuda", "docs"):
        return top
    if top in APART:
        return top if suffix in CODE or name == ".ci/run" else None
    return f"other {top}" if suffix in (".py", *C) else None


def count(name: str) -> Counts:
    """Count what is in a file."""
    gc.disable()  # which would walk through each tree, again and again
    text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
    suffix = Path(name).suffix
    if suffix == ".py":
        return count_python(text)
    if suffix == ".md":
        return Counter(lines=len(text.splitlines()))
    if suffix in C:
        text = re.sub(
            r"/\*.*?\*/|//[^\n]*", lambda old: "\n" * old[0].count("\n"), text, flags=re.S
        )
        return Counter(lines=sum(bool(line.strip()) for line in text.split("\n")))
    return Counter(lines=sum(map(_is_code, text.split("\n"))))


def count_python(text: str) -> Counts:
    """Count a module's lines and statements, and what it suppresses."""
    code = {number for number, line in enumerate(text.split("\n"), 1) if _is_code(line)}
    tree = ast.parse(text)
    statements = list(_statements(tree.body))
    docstrings = [
        node.body[0]
        for node in (tree, *statements)
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
    ]
    if "'''" in text or text.count('"""') > 2 * len(docstrings):
        # Inside a string a line that is blank, or begins as a comment does, is code.
        strings = [
            node for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)
        ]
        code.update(*map(_lines_of, strings))
    code.difference_update(*map(_lines_of, docstrings))
    done = sum(not _is_constant(node) for node in statements)
    suppressed = {what: len(sign.findall(text)) for what, sign in SUPPRESSED.items()}
    return Counter(lines=len(code), python=len(code), statements=done, **suppressed)


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            for inner in getattr(node, part, ()):
                yield from _statements([inner] if isinstance(inner, ast.stmt) else inner.body)


def _lines_of(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def count_rooms() -> dict[str, Counts]:
    """Count all tracked files, by rooms, with the sums ``product`` and ``tests``."""
    listed = subprocess.check_output(("git", "-C", ROOT, "ls-files"), text=True)  # noqa: S607
    rooms = {name: room for name in listed.splitlines() if (room := room_of(name)) is not None}
    names = [name for name in rooms if (ROOT / name).is_file()]
    found: dict[str, Counts] = defaultdict(Counter)
    with ProcessPoolExecutor() as processes:
        for name, counts in zip(names, processes.map(count, names, chunksize=16), strict=True):
            found[rooms[name]].update(counts)
            if rooms[name] not in APART:
                found["product"].update(counts)
    return dict(sorted(found.items()))


def bounded(rooms: Mapping[str, Counts]) -> dict[str, int]:
    """Return what figures bound."""
    found = {room: counts["lines"] for room, counts in rooms.items() if room != "product"}
    for what in SUPPRESSED:
        found |= {f"{room} {what}": rooms[room][what] for room in ("product", "tests")}
    return found


def report(rooms: Mapping[str, Counts], goals: Mapping[str, int]) -> None:
    """Print a line for each room."""
    for room, counts in rooms.items():
        text = f"  {room:13s}{counts['lines']:>7,} lines, goal {goals.get(room, 0):>6,}"
        if room in ("product", "tests"):
            text += "; " + ", ".join(f"{counts[what]} {what}" for what in SUPPRESSED)
            each = counts["python"] / max(1, counts["statements"])
            text += f"; Python {counts['statements']:,} statements, {each:.2f} lines each"
        print(text)


def main(record: bool) -> str | None:
    """Print what is there, and return what is wrong with it."""
    kept = json.loads(FIGURES.read_text())
    figures: dict[str, int] = kept["figures"]
    rooms = count_rooms()
    report(rooms, kept["goals"])
    now = bounded(rooms)
    if record:
        lowered = {what: min(now[what], figure) for what, figure in figures.items() if what in now}
        FIGURES.write_text(json.dumps({**kept, "figures": lowered}, indent=2) + "\n")
    above = [
        f"{what}: {number:,}, where its figure is {figures.get(what, 0):,}"
        for what, number in now.items()
        if number > figures.get(what, 0)
    ]
    return "\n".join([*above, REMEDY]) if above else None


if __name__ == "__main__":
    sys.exit(main(record=sys.argv[1:] == ["--record"]))
