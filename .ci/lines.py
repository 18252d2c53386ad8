"""Count lines of code by rooms, and fail where there are more than ``.ci/lines.json`` says.

Run by ``make lint``. A *room* is a folder of ``src/kvshelf``, the modules beside those folders
(``src top``), or a folder of the repository. Lines of code are neither blank nor only comment nor
part of a docstring. Markdown counts in ``docs`` alone, with all lines. A limit is a multiple of 50.
A commit that deletes lowers its limits; a commit that raises one does only that, and says why.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
C = (".c", ".cc", ".cpp", ".cu", ".h", ".map")
CODE = (".py", *C, ".yaml", ".yml", ".sh", ".cmake")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def room_of(path: Path) -> str | None:
    """Return the room of a file by its path in the repository, or None where it has none."""
    top, *rest = path.parts
    if top == "docs":
        return top if path.suffix == ".md" else None
    if top == "src" and path.suffix != ".md":
        return f"src {rest[1] if len(rest) > 2 else 'top'}"
    code = path.suffix in CODE or path.name in ("run", "CMakeLists.txt")
    return top if code and rest and (not top.startswith(".") or top == ".ci") else None


def lines_of(path: Path) -> int:
    """Count the lines of a file."""
    text = (ROOT / path).read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".md":
        return len(text.splitlines())
    if path.suffix in C:
        text = re.sub(
            r"/\*.*?\*/|//[^\n]*", lambda old: "\n" * old[0].count("\n"), text, flags=re.S
        )
    lines = text.split("\n")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                first, last = node.body[0].lineno, node.body[0].end_lineno or 0
                lines[first - 1 : last] = [""] * (last - first + 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in lines)


def main() -> str | None:
    """Print the lines of each room; return an error where a room has too many."""
    limits: dict[str, int] = json.loads((ROOT / ".ci" / "lines.json").read_text())
    listed = subprocess.check_output(("git", "-C", ROOT, "ls-files"), text=True)  # noqa: S607
    rooms = Counter[str]()
    for path in map(Path, listed.splitlines()):
        if (room := room_of(path)) is not None and (ROOT / path).is_file():
            rooms[room] += lines_of(path)
    problems = []
    for room, lines in sorted(rooms.items()):
        limit = limits.get(room, 0)
        print(f"  {room:13s}{lines:>7,} lines, at most {limit:>7,}")
        if lines > limit:
            problems.append(f"{room} has {lines:,}, {limit:,} are allowed")
    if not problems:
        return None
    return (
        f"too many lines: {'; '.join(problems)}. Delete what is not needed, or raise the limit in"
        " .ci/lines.json by 50, in a commit of its own that says why (CONTRIBUTING.md)"
    )


if __name__ == "__main__":
    sys.exit(main())
