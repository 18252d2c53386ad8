"""Writes the parts of ``docs/configuration.md`` and ``docs/cli.md`` that are made from the code."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from kvshelf.cli.app import app
from kvshelf.config import PROCESS_VARIABLES, Config, variable_of


def _default_text(default: object) -> str:
    if default is None or isinstance(default, dict | BaseModel):
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
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

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, CLI = DOCS / "configuration.md", DOCS / "cli.md"
#: What the page says once for all commands.
_SAID_ONCE = r"^SHELF|--(namespace|yes|dry-run|json|verbose|quiet|config|storage-options)\b"
#: Between two such lines the page is written here, elsewhere by hand.
_MARK = "<!-- {} by .ci/config_page.py from src/kvshelf/config.py: run `make docs` -->\n"


def descriptions() -> dict[str, str]:
    """Return the text below each option in the source.

    pydantic can read it too, but then each process that imports the options does.
    """
    found = re.findall(
        r'^    (\w+): .*\n    """((?s:.*?))"""', inspect.getsource(Config), re.MULTILINE
    )
    return {name: " ".join(text.split()) for name, text in found}


def render_page() -> str:
    """Return the text of the page, with what the options' types and descriptions say."""
    texts, fields = descriptions(), Config.model_fields
    tables, sections = "", "## All options\n"
    for title, group in GROUPS.items():
        tables += f"**{title}**\n\n| option | what for | default |\n|---|---|---|\n"
        for name, purpose in group.items():
            default = _default_text(fields[name].get_default(call_default_factory=True))
            text = textwrap.fill(texts[name], 120, break_long_words=False, break_on_hyphens=False)
            tables += f"| [`{name}`](#{name}) | {purpose} | {default} |\n"
            sections += (
                f"\n### `{name}` {{ #{name} }}\n\n{text}\n\n"
                f"Variable: `{variable_of(name)}`. Default: {default}.\n"
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


def render_commands() -> str:
    """Return the text of the page of commands, of which each section begins with its help."""
    group: Any = typer.main.get_command(app)
    page = CLI.read_text()
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join([name, *command.collect_usage_pieces(context)[1:]])
        text = f"{command.help} {command.epilog.replace(': ', ': `')}`"
        text += "\n\n| argument or option | |\n|---|---|\n"
        for option, meaning in (one.get_help_record(context) for one in command.params):
            if not re.search(_SAID_ONCE, option):
                text += f"| `{option.replace('|', '/')}` | {' '.join(meaning.split())} |\n"
        begin = rf"^## `kvshelf {name}\b(?s:.*?)\n\|(?s:.*?)\n\n"
        section = f"## `kvshelf {usage}`\n\n{text}\n"
        page = re.sub(begin, lambda _: section, page, count=1, flags=re.MULTILINE)  # noqa: B023
    return page


if __name__ == "__main__":
    PAGE.write_text(render_page())
    CLI.write_text(render_commands())
