"""Writes the options into ``docs/configuration.md``, made from their types and descriptions."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize

from kvshelf.config import PROCESS_VARIABLES, Config, variable_of


def _type_text(annotation: Any) -> str:
    """Return the name of a field's type for the page."""
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_text(a) for a in arguments if a is not types.NoneType)
    if origin is Annotated:
        return _type_text(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    names = {str: "string", bool: "boolean", int: "integer", float: "number", ByteSize: "size"}
    return names.get(origin or annotation, "mapping")


def _default_text(default: object) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, dict | BaseModel):
        return "`{}`"
    return f"`{default}`"


#: The options in the order of the page, in groups, each with its purpose in a few words.
GROUPS: dict[str, dict[str, str]] = {
    "The six that people need first": {
        "shared_storage_path": "where the KV cache is stored",
        "storage_options": "credentials and endpoint of the storage",
        "capacity": "how large and old it may get",
        "memory": "host memory in front of it",
        "save_decode": "also store answers, for conversations",
        "read_only": "load only, never write",
    },
    "Faster copies on one machine": {
        "disk_tier": "copies on a local disk",
        "server": "share memory between engines here",
    },
    "Which engines share": {
        "chunk_size": "tokens per stored chunk",
        "layout": "mix CPU types, or CPUs with GPUs",
        "weights": "how the model is recognised",
        "version": "keep engines apart",
    },
    "Tenants and clients": {
        "group_by_salt": "a folder for each tenant",
        "trust_uuids": "share images that clients name",
    },
    "When KV is loaded": {
        "admission": "skip loads that would be slower",
        "handover_wait_s": "how long to wait for a prefill",
    },
}

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
#: Between two such lines the page is written here, elsewhere by hand.
_MARK = "<!-- {} by .ci/config_page.py from src/kvshelf/config.py: run `make docs` -->\n"


def descriptions() -> dict[str, str]:
    """Return the text below each option in the source.

    pydantic can read it too, but then each process that imports the options does.
    """
    [model] = ast.parse(inspect.getsource(Config)).body
    assert isinstance(model, ast.ClassDef)
    texts = {}
    for option, below in zip(model.body, model.body[1:], strict=False):
        match option, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split())
    return texts


def render_page() -> str:
    """Return the text of the page, with what the options' types and descriptions say."""
    texts, fields = descriptions(), Config.model_fields
    tables, sections = "", "## All options\n"
    for title, group in GROUPS.items():
        tables += f"**{title}**\n\n| option | what for | default |\n|---|---|---|\n"
        for name, purpose in group.items():
            kind = _type_text(fields[name].annotation)
            default = _default_text(fields[name].get_default(call_default_factory=True))
            text = textwrap.fill(texts[name], 120, break_long_words=False, break_on_hyphens=False)
            tables += f"| [`{name}`](#{name}) | {purpose} | {default} |\n"
            sections += (
                f"\n### `{name}` {{ #{name} }}\n\n{text}\n\n"
                f"Type: {kind}. Default: {default}. Variable: `{variable_of(name)}`.\n"
            )
        tables += "\n"
    processes = "| variable | meaning |\n|---|---|\n"
    processes += "".join(f"| `{name}` | {text} |\n" for name, text in PROCESS_VARIABLES.items())
    page = PAGE.read_text()
    for part, text in {"options": tables + sections, "variables": processes}.items():
        begin, end = _MARK.format(f"{part} begin"), _MARK.format(f"{part} end")
        before, after = page.split(begin)[0], page.split(end)[1]
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(render_page())
