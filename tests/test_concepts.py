"""What `make concepts` counts, on a small tree; and that it reads the whole library."""

from __future__ import annotations

import textwrap
from pathlib import Path

import concepts
import pytest

ROOT = Path(__file__).parent.parent

FILES = {
    "backends/base.py": '''
        class Backend:
            """A storage."""

            def __init__(self, url): self.url = url

            @property
            def properties(self): ...

            def stat(self, names): ...

            def borrow(self, name): ...

            def _private(self): ...
        ''',
    "src/kvshelf/buffers.py": """
        class BufferPool:
            def grow(self):
                return map_pages(10)
        """,
    "src/kvshelf/pages.py": """
        def map_pages(nbytes):
            return mmap.mmap(-1, nbytes)
        """,
    "src/kvshelf/memory/arena.py": """
        class Arena(_Mapped):
            __slots__ = ("one", "two")


        class _Mapped:
            def __init__(self):
                self.three = map_pages(1)
        """,
    "src/kvshelf/tiers/tiered.py": """
        class View:
            def load_all(self):
                self._memory_tier.pin(1)
                self._shelf.load_all(2)
                self.load_all()
        """,
    "src/kvshelf/transfer/loads.py": '''
        """Several lines
        of a docstring."""

        # A comment.
        class View:
            def run(self, *, lent_bytes=0):
                self.view.load_all("""two
                    lines""")
                self.pool.pin(3)

            def held_until(self): ...
        ''',
    "src/kvshelf/capacity/collect.py": """
        class Cleaner:
            def clean(self):
                for row in self._backend.list(""):
                    self._backend.delete(row.name)
                self.known.delete("x")


        def note(view):
            view.backend.touch("x")
        """,
    "src/kvshelf/capacity/pins.py": """
        class Pins:
            def remove(self, backend):
                backend.delete("x")
        """,
    "src/kvshelf/shelf/leftovers.py": """
        class Cleaner:
            pass
        """,
    "tests/shelf/test_view.py": "x = 1\n",
    "tests/capacity/test_collect.py": "x = 1\n",
}


@pytest.fixture
def table(tmp_path: Path) -> dict[str, tuple[str, list[str]]]:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
    return {what.strip(): (number, list(parts)) for what, number, parts in concepts.count(tmp_path)}


@pytest.mark.parametrize(
    ("what", "number", "parts"),
    [
        ("ways in which a load gets an object", "2", ["tier.pin", "view.load_all"]),
        ("asked for by transfer/loads.py", "1", ["view.load_all"]),
        ("methods of Backend", "2", ["stat", "borrow"]),
        ("what maps host memory beside BufferPool", "1", ["_Mapped (memory/arena.py)"]),
        (
            "words for pinned",
            "3",
            ["borrowed: borrow", "held: held_until", "lent: lent_bytes"],
        ),
        ("class names defined twice", "1", ["View: tiers/tiered.py, transfer/loads.py"]),
        ("what deletes from a storage", "1", ["Cleaner (capacity/collect.py)"]),
        ("what walks through a storage", "1", ["Cleaner (capacity/collect.py)"]),
        ("what records uses", "1", ["note (capacity/collect.py)"]),
        (
            "class names defined twice, of what bounds and deletes",
            "1",
            ["Cleaner: capacity/collect.py, shelf/leftovers.py"],
        ),
        (
            "lines that bound and delete: all / code",
            "14 / 12",
            ["capacity: 12 / 10", "shelf: 2 / 2"],
        ),
        ("lines of their tests: all / code", "1 / 1", ["capacity: 1 / 1"]),
        ("lines of tests: all / code", "1 / 1", ["shelf: 1 / 1"]),
    ],
)
def test_what_is_counted(
    table: dict[str, tuple[str, list[str]]], what: str, number: str, parts: list[str]
) -> None:
    assert table[what] == (number, parts)


def test_only_lines_of_code_are_code(table: dict[str, tuple[str, list[str]]]) -> None:
    _, parts = table["lines: all / code"]
    assert "transfer: 11 / 6" in parts
    assert "memory: 7 / 5" in parts


def test_attributes_of_bases_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concepts, "MOST_ATTRIBUTES", 2)
    path = tmp_path / "src" / "kvshelf" / "memory" / "arena.py"
    path.parent.mkdir(parents=True)
    path.write_text(textwrap.dedent(FILES["src/kvshelf/memory/arena.py"]))
    rows = {what: parts for what, _, parts in concepts.count(tmp_path)}
    assert rows["classes with more than 2 attributes"] == ["Arena (memory/arena.py): 3"]


@pytest.mark.long
def test_the_whole_library_is_read(tmp_path: Path) -> None:
    for folder in ("src", "backends"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    rows = concepts.count(tmp_path)
    numbers = {what: number for what, number, _ in rows}
    assert int(numbers["methods of Backend"]) > 10
    assert int(numbers["ways in which a load gets an object"]) > 0
    assert concepts.render(rows).startswith("ways in which a load gets an object")
