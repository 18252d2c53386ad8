"""Count the concepts of the code that moves and stores objects, and print them as a table.

Run by ``make concepts``. The numbers are for people who unify code: how many ideas a reader meets,
not how many characters. Everything is read from the syntax of the files, and nothing is imported.

What is counted, and how
------------------------
The *rooms* are the folders of ``src/kvshelf`` named in :data:`ROOMS`, ``backends/``, and the
modules named in :data:`MODULES`.

Ways in which a load gets an object
    Different pairs of who is asked (a view, which may be a shelf's or one with tiers, or a tier)
    and the method that is called, among the calls in the modules of :data:`LOAD_PATH` that bring an
    object's bytes or make room for them (:data:`OBTAIN`). Calls of a class to itself do not count.
    Those of ``transfer/loads.py`` alone, which are what a load has to know, have their own row.
Methods of ``Backend``
    Public functions in the body of the class; properties apart.
What maps host memory
    Classes, and functions outside of classes, with a call of ``map_pages`` or ``mmap.mmap``; but
    ``map_pages`` itself and ``buffers.py``, which is ``BufferPool``.
Words for *pinned*
    Words of :data:`PINNED` that are part of a public name of the rooms: of a class, a function, a
    parameter, or an attribute. ``holds``, which asks whether something is there, is none of them.
Class names that are defined twice
    Also private ones, in different modules of the rooms.
Classes with many attributes
    More than :data:`MOST_ATTRIBUTES` of: what methods assign to ``self``, slots, fields of
    dataclasses; and those of base classes that the rooms define, so that a class does not get
    smaller by being divided among its bases.
Long files
    More than :data:`MOST_LINES` lines.
What deletes, walks through and records uses of a storage
    Classes, and functions outside of classes, with a call of a backend's :data:`DELETE`,
    :data:`LIST` or :data:`RECORD`. Not counted is what knows the names that it asks for: backends
    themselves, calls passed on, the names of :data:`BY_NAME`, and files of its own
    (:data:`OWN_FILES`).
Lines
    All lines, and code: lines that are neither blank nor only comment nor part of a docstring.
    Those of tests are with ``tests/support``, which other tests use as well. Those of what bounds a
    shelf and deletes (:data:`HOUSEKEEPING`) have rows of their own.

The rooms that a load enters, one after the other, are not counted: which method of a class is
called, and how often, is not in the syntax.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, TypeAlias

#: Folders of ``src/kvshelf``; one that is not there yet, or no more, has no lines.
ROOMS: Final = ("memory", "server", "shelf", "tiers", "transfer")
#: Modules of ``src/kvshelf``.
MODULES: Final = ("buffers.py", "pages.py", "numa.py")
#: Where a load asks for an object: the loads, and what joins tiers and a shelf.
LOAD_PATH: Final = ("transfer/loads.py", "tiers/tiered.py")
OBTAIN: Final = frozenset({"borrow", "fetch", "lend", "load", "load_all", "pin", "read", "reserve"})
#: Forms of each word.
PINNED: Final = {
    "borrowed": {"borrow", "borrows", "borrowed", "borrower"},
    "held": {"held"},
    "leased": {"lease", "leases", "leased"},
    "lent": {"lend", "lends", "lent", "lender", "loan", "loans"},
    "pinned": {"pin", "pins", "pinned", "unpin"},
    "resident": {"resident", "residents"},
}
#: Methods of a backend that delete what they are told or find, that list, and that record a use.
DELETE: Final = frozenset({"delete", "delete_all", "sweep", "trim"})
LIST: Final = frozenset({"list", "sweep", "trim"})
RECORD: Final = frozenset({"touch"})
#: Names of variables and attributes that hold a backend.
BACKENDS: Final = frozenset({"backend", "storage", "guard", "inner", "through", "source"})
#: What deletes or lists single objects, for whoever asks by name.
BY_NAME: Final = frozenset({"shelf/shelf.py", "shelf/view.py", "server/calls.py", "testing.py"})
#: What keeps files of its own on a shelf.
OWN_FILES: Final = frozenset({"capacity/pins.py", "capacity/marks.py", "cli/doctor.py"})
#: Files of ``src/kvshelf`` that bound a shelf and delete, and their tests, wherever they lie.
HOUSEKEEPING: Final = (
    "capacity/[!h]*.py",
    "shelf/leftovers.py",
    "tiers/*ledger.py",
    "tiers/bounded.py",
    "tiers/disk_tier.py",
    "tools/remove.py",
    "tools/verify.py",
)
HOUSEKEEPING_TESTS: Final = (
    "capacity/[!_]*.py",
    "cli/test_gc.py",
    "cli/test_rm.py",
    "shelf/test_leftovers.py",
    "tiers/test_*ledger.py",
    "tiers/test_bounded.py",
    "tools/test_verify.py",
)
MOST_ATTRIBUTES: Final = 20
MOST_LINES: Final = 900

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
#: A line of the table: what is counted, the number, and what it consists of.
Row: TypeAlias = tuple[str, str, Sequence[str]]


@dataclass(frozen=True)
class Module:
    """One file.

    Attributes
    ----------
    room : str
        The folder or module that it belongs to.
    name : str
        Path below ``src/kvshelf``, or from ``backends`` on.
    source : str
    tree : ast.Module
    """

    room: str
    name: str
    source: str
    tree: ast.Module

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """All classes, also those inside of others."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]

    @property
    def lines(self) -> int:
        """Number of lines."""
        return len(self.source.splitlines())

    @cached_property
    def code(self) -> int:
        """Number of lines with code: not blank, no comment alone, no docstring."""
        return _code_lines(self)


def read(paths: Iterable[Path], room: str, base: Path) -> list[Module]:
    """Read files, in order of their names."""
    found = []
    for path in sorted(paths):
        source = path.read_text(encoding="utf-8")
        found.append(Module(room, str(path.relative_to(base)), source, ast.parse(source)))
    return found


def rooms(root: Path) -> list[Module]:
    """Return the modules of all rooms of a working tree."""
    package = root / "src" / "kvshelf"
    found = [
        module for room in ROOMS for module in read((package / room).rglob("*.py"), room, package)
    ]
    found += read((root / "backends").rglob("*.py"), "backends", root)
    for name in MODULES:
        found += read(package.glob(name), name.removesuffix(".py"), package)
    return found


def tests(root: Path) -> list[Module]:
    """Return the tests of the rooms, with what else is in their folders, and what all share."""
    folder = root / "tests"
    found = [
        module
        for room in (*ROOMS, "backends")
        for module in read((folder / room).rglob("*.py"), room, folder)
    ]
    for name in MODULES:
        found += read(folder.glob(f"test_{name}"), name.removesuffix(".py"), folder)
    return found + read((folder / "support").rglob("*.py"), "support", folder)


def housekeeping(root: Path) -> list[Module]:
    """Return the modules that bound a shelf and delete."""
    package = root / "src" / "kvshelf"
    return [
        module
        for pattern in HOUSEKEEPING
        for module in read(package.glob(pattern), pattern.partition("/")[0], package)
    ]


def housekeeping_tests(root: Path) -> list[Module]:
    """Return their tests."""
    folder = root / "tests"
    return [
        module
        for pattern in HOUSEKEEPING_TESTS
        for module in read(folder.glob(pattern), pattern.partition("/")[0], folder)
        if module.name != "capacity/test_history.py"
    ]


# ------------------------------------------------------------------------------------ single counts


def ways_of_a_load(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Return who is asked for what, ``view.borrow`` for instance, and the modules that ask."""
    ways: dict[str, set[str]] = {}
    for module in modules:
        if not any(f"{module.name}/".startswith(f"{place}/") for place in LOAD_PATH):
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                asked, method = _role(node.func.value), node.func.attr
                if asked is not None and method in OBTAIN:
                    ways.setdefault(f"{asked}.{method}", set()).add(module.name)
    return ways


def _role(receiver: ast.expr) -> str | None:
    """Return what an expression stands for, by its last name: a view, a tier, or neither."""
    name = ""
    if isinstance(receiver, ast.Name):
        name = receiver.id
    elif isinstance(receiver, ast.Attribute):
        name = receiver.attr
    words = _words(name)
    if {"tier", "tiers", "memory"} & words:
        return "tier"
    return "view" if {"shelf", "view", "storage"} & words else None


def methods_of_backend(modules: Iterable[Module]) -> list[str]:
    """Return the public methods of ``Backend``."""
    for module in modules:
        if module.name != "backends/base.py":
            continue
        for node in module.classes:
            if node.name == "Backend":
                return [
                    one.name
                    for one in node.body
                    if isinstance(one, Function)
                    and not one.name.startswith("_")
                    and not _is_property(one)
                ]
    return []


def _is_property(function: Function) -> bool:
    named = [_last_name(decorator) for decorator in function.decorator_list]
    return bool({"property", "cached_property", "setter"} & set(named))


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def what_maps(modules: Iterable[Module]) -> list[str]:
    """Return the classes and functions that map memory of the host, beside ``BufferPool``."""
    found = []
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, Function | ast.ClassDef):
                calls = {_last_name(one) for one in ast.walk(node) if isinstance(one, ast.Call)}
                if {"map_pages", "mmap"} & calls:
                    found.append((module.name, node.name))
    return [
        f"{name} ({place})"
        for place, name in found
        if place != "buffers.py" and name != "map_pages"
    ]


def what_calls(modules: Iterable[Module], methods: frozenset[str]) -> list[str]:
    """Return the classes and functions that call one of these methods of a backend."""
    return [
        f"{node.name} ({module.name})"
        for module in modules
        if module.room != "backends" and module.name not in BY_NAME | OWN_FILES
        for node in module.tree.body
        if isinstance(node, Function | ast.ClassDef) and _calls(node, methods)
    ]


def _calls(node: ast.AST, methods: frozenset[str]) -> bool:
    return any(
        isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr in methods
        and _last_name(one.func.value).lstrip("_") in BACKENDS
        for one in ast.walk(node)
    )


def words_for_pinned(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Return the words, and the public names that they are part of."""
    names = sorted({name for module in modules for name in public_names(module)})
    found = {
        word: [name for name in names if _words(name) & forms] for word, forms in PINNED.items()
    }
    return {word: used for word, used in found.items() if used}


def public_names(module: Module) -> Iterator[str]:
    """Yield the public names of a module: classes, functions, parameters, attributes."""
    yield from _public_names(module.tree.body)


def _public_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef) and _is_public(node.name):
            yield node.name
            yield from _public_names(node.body)
            yield from filter(_is_public, _attributes(node))
        elif isinstance(node, Function) and (_is_public(node.name) or node.name == "__init__"):
            if node.name != "__init__":
                yield node.name
            given = node.args
            for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                if _is_public(argument.arg):
                    yield argument.arg


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _words(name: str) -> set[str]:
    """Return the words of a name, in small letters: those of ``BorrowedRoom`` or ``max_bytes``."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def names_defined_twice(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Return the names of classes of which several modules have one."""
    places: dict[str, list[str]] = {}
    for module in modules:
        for node in module.classes:
            places.setdefault(node.name, []).append(module.name)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def attributes_of_classes(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Return the attributes of each class, with those of its bases."""
    known: dict[str, list[tuple[Module, ast.ClassDef]]] = {}
    for module in modules:
        for node in module.classes:
            known.setdefault(node.name, []).append((module, node))

    def all_of(module: Module, node: ast.ClassDef, seen: frozenset[str]) -> set[str]:
        found = set(_attributes(node))
        for base in node.bases:
            name = _last_name(base.value if isinstance(base, ast.Subscript) else base)
            # Of several classes of that name, the one of the same module.
            several = known.get(name, [])
            several = [one for one in several if one[0] is module] or several
            if several and name not in seen:
                found |= all_of(*several[0], seen | {name})
        return found

    return {
        f"{name} ({module.name})": all_of(module, node, frozenset({name}))
        for name, places in known.items()
        for module, node in places
    }


def _attributes(node: ast.ClassDef) -> set[str]:
    """Return the attributes that a class itself has."""
    found: set[str] = set()
    is_record = any(_last_name(one) == "dataclass" for one in node.decorator_list) or any(
        _last_name(base) == "NamedTuple" for base in node.bases
    )
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if is_record and _last_name_of_type(statement.annotation) != "ClassVar":
                found.add(statement.target.id)
        elif isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__slots__"
            for target in statement.targets
        ):
            found |= {
                one.value
                for one in ast.walk(statement.value)
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
        elif isinstance(statement, Function):
            found |= _assigned_to_self(statement)
    return found


def _last_name_of_type(annotation: ast.expr) -> str:
    return _last_name(annotation.value if isinstance(annotation, ast.Subscript) else annotation)


def _assigned_to_self(function: Function) -> set[str]:
    return {
        one.attr
        for one in ast.walk(function)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    }


def _code_lines(module: Module) -> int:
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


# ---------------------------------------------------------------------------------------- the table


def count(root: Path) -> list[Row]:
    """Count everything in a working tree."""
    modules = rooms(root)
    ways = ways_of_a_load(modules)
    asked = sorted(way for way, places in ways.items() if "transfer/loads.py" in places)
    methods = methods_of_backend(modules)
    mapping = what_maps(modules)
    words = words_for_pinned(modules)
    twice = names_defined_twice(modules)
    large = {
        name: len(found)
        for name, found in attributes_of_classes(modules).items()
        if len(found) > MOST_ATTRIBUTES
    }
    long = {module.name: module.lines for module in modules if module.lines > MOST_LINES}
    package = root / "src" / "kvshelf"
    everything = read(package.rglob("*.py"), "", package)
    ours = {module.name for module in housekeeping(root)}
    again = {
        name: places
        for name, places in names_defined_twice(everything).items()
        if ours & set(places)
    }
    calls = {
        "what deletes from a storage": what_calls(everything, DELETE),
        "what walks through a storage": what_calls(everything, LIST),
        "what records uses": what_calls(everything, RECORD),
    }
    return [
        ("ways in which a load gets an object", str(len(ways)), sorted(ways)),
        ("  asked for by transfer/loads.py", str(len(asked)), asked),
        ("methods of Backend", str(len(methods)), methods),
        ("what maps host memory beside BufferPool", str(len(mapping)), mapping),
        (
            "words for pinned",
            str(len(words)),
            [f"{word}: {', '.join(names)}" for word, names in words.items()],
        ),
        (
            "class names defined twice",
            str(len(twice)),
            [f"{name}: {', '.join(places)}" for name, places in twice.items()],
        ),
        (
            f"classes with more than {MOST_ATTRIBUTES} attributes",
            str(len(large)),
            [f"{name}: {number}" for name, number in sorted(large.items())],
        ),
        (
            f"files of more than {MOST_LINES} lines",
            str(len(long)),
            [f"{name}: {number}" for name, number in sorted(long.items())],
        ),
        ("rooms that a load enters", "not counted", []),
        *((what, str(len(found)), found) for what, found in calls.items()),
        (
            "class names defined twice, of what bounds and deletes",
            str(len(again)),
            [f"{name}: {', '.join(places)}" for name, places in again.items()],
        ),
        *_sizes("lines", modules),
        *_sizes("lines of tests", tests(root)),
        *_sizes("lines that bound and delete", housekeeping(root)),
        *_sizes("lines of their tests", housekeeping_tests(root)),
    ]


def _sizes(what: str, modules: Sequence[Module]) -> list[Row]:
    """Return the rows with the lines of all modules, and of each room."""

    def sizes(some: Sequence[Module]) -> str:
        return f"{sum(one.lines for one in some)} / {sum(one.code for one in some)}"

    each = dict.fromkeys(module.room for module in modules)
    parts = [f"{room}: {sizes([one for one in modules if one.room == room])}" for room in each]
    return [(f"{what}: all / code", sizes(modules), parts)]


def render(rows: Iterable[Row]) -> str:
    """Return the table as text: what each number consists of is below it."""
    rows = list(rows)
    wide = max(len(what) for what, _, _ in rows)
    lines = []
    for what, number, parts in rows:
        lines.append(f"{what:{wide}}  {number:>15}")
        lines += [f"    {part}" for part in parts]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    here = Path(__file__).resolve().parent.parent
    sys.stdout.write(render(count(Path(sys.argv[1]) if len(sys.argv) > 1 else here)))
