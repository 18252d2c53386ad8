"""What the API's reference, which is Markdown, needs of docstrings: an extension of griffe.

Docstrings write names as Sphinx does, ``:class:`kvshelf.Config```. Each becomes a link where the
reference has the name, and code elsewhere. Names that share a description, as numpydoc writes them
(``read, write : float``), become entries of their own.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(~?)([\w.]+)`")
#: The names of an entry, its type, and its description.
_ENTRY = re.compile(
    r"^(\w+(?:, \w+)*)(?: : (.+?))?(, optional)?\n((?: +.*\n|\n(?= ))*)", re.MULTILINE
)
#: What says of an entry's type, in a section of this heading, that it may be left out.
_OPTIONAL = {"Parameters": ", optional", "Attributes": " or None", "Raises": ""}
_HEADING = re.compile(r"^(?=[A-Z]\w+\n---)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites the docstring of each module, class, function and attribute that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring:
            text, *sections = _HEADING.split(obj.docstring.value + "\n")
            text += "".join(map(_section, sections))
            obj.docstring.value = _ROLE.sub(lambda role: _link(obj, *role.groups()), text).rstrip()


def _section(text: str) -> str:
    """Return a section with an entry for each name, as griffe wants it."""
    heading, line, entries = text.split("\n", 2)
    if heading in _OPTIONAL:
        entries = _ENTRY.sub(lambda entry: _one_by_one(entry, _OPTIONAL[heading]), entries)
    return f"{heading}\n{line}\n{entries}"


def _one_by_one(entry: re.Match[str], optional: str) -> str:
    names, kinds, may_miss, description = entry.groups(default="")
    each, types = names.split(", "), kinds.split(", ")
    if len(types) != len(each):
        types = [kinds] * len(each)
    return "".join(
        f"{name}{kind and f' : {kind}{may_miss and optional}'}\n{description}"
        for name, kind in zip(each, types, strict=True)
    )


def _link(obj: griffe.Object, short: str, name: str) -> str:
    first, _, rest = name.partition(".")
    path = name
    with contextlib.suppress(griffe.NameResolutionError):
        path = f"{obj.resolve(first)}.{rest}".rstrip(".")
    shown = name.rsplit(".", 1)[-1] if short else name
    return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'
