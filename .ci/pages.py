"""Writes the parts of the pages on options, commands and metrics that are made from the code."""

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
from kvshelf.metrics import COPIERS, COUNTERS, FAMILIES, GAUGES, METRIC_PREFIX, OPERATIONS, TIMES
from kvshelf.server import health, node


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
#: Arguments and options that the page of commands describes once for all of them.
_COMMON = r"^SHELF|--(namespace|yes|dry-run|json|verbose|quiet|config|storage-options)\b"
#: Between two such lines a page is written here, elsewhere by hand.
_MARK = "<!-- {} by .ci/pages.py: run `make docs` -->\n"


def descriptions() -> dict[str, str]:
    """Return the text below each option in the source.

    pydantic can read it too, but then each process that imports the options does.
    """
    found = re.findall(
        r'^    (\w+): .*\n    """((?s:.*?))"""', inspect.getsource(Config), re.MULTILINE
    )
    return {name: " ".join(text.split()) for name, text in found}


def options_page(page: str) -> str:
    """Return the page on options, with what their types and descriptions say."""
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
    variables = "| variable | meaning |\n|---|---|\n"
    variables += "".join(f"| `{name}` | {text} |\n" for name, text in PROCESS_VARIABLES.items())
    return _filled(_filled(page, "options", tables + sections), "variables", variables)


def _filled(page: str, part: str, text: str) -> str:
    """Return a page with another text in one of its generated parts."""
    begin, end = _MARK.format(f"{part} begin"), _MARK.format(f"{part} end")
    return f"{page.split(begin, maxsplit=1)[0]}{begin}\n{text}\n{end}{page.split(end)[1]}"


def commands_page(page: str) -> str:
    """Return the page of commands, of which each section begins with its help."""
    group: Any = typer.main.get_command(app)
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join([name, *command.collect_usage_pieces(context)[1:]])
        text = f"{command.help} {command.epilog.replace(': ', ': `')}`"
        text += "\n\n| argument or option | |\n|---|---|\n"
        for option, meaning in (param.get_help_record(context) for param in command.params):
            if not re.search(_COMMON, option):
                text += f"| `{option.replace('|', '/')}` | {' '.join(meaning.split())} |\n"
        begin = rf"^## `kvshelf {name}\b(?s:.*?)\n\|(?s:.*?)\n\n"
        section = f"## `kvshelf {usage}`\n\n{text}\n"
        page = re.sub(begin, lambda _: section, page, count=1, flags=re.MULTILINE)  # noqa: B023
    return page


def _table(rows: dict[str, str], second: str = "metric") -> str:
    lines = (f"| {meaning} | `{name}` |\n" for name, meaning in rows.items())
    return f"\n| meaning | {second} |\n|---|---|\n" + "".join(lines)


def metrics_page(page: str) -> str:
    """Return the page on metrics, with the complete list at its end."""
    grouped = {name for _, reasons in FAMILIES.values() for name in reasons.values()}
    reasons = {
        f"{family}_total`, `{reason}": COUNTERS[name]
        for family, (_, named) in FAMILIES.items()
        for reason, name in named.items()
    }
    rows = {f"{METRIC_PREFIX}{family}_total": text for family, (text, _) in FAMILIES.items()}
    operations = "; ".join(f"`{name}`: {text}" for name, text in OPERATIONS.items())
    rows[METRIC_PREFIX + TIMES] = f"histogram of seconds. Label `operation`: {operations}"
    counters = {name: text for name, text in COUNTERS.items() if name not in grouped}
    rows |= {f"{METRIC_PREFIX}{name}_total": text for name, text in counters.items()}
    copiers = dict(COPIERS.values())
    rows |= {METRIC_PREFIX + n: text for n, (text, _) in GAUGES.items() if n not in copiers}
    texts = "; ".join(f"`{copier}`: {text}" for copier, (_, text) in COPIERS.items())
    rows[f"{METRIC_PREFIX}copier"] = f"label `copier`: {texts}"
    server = {f"{name}_total": text for name, text in {**node.COUNTERS, **health.LOOP}.items()}
    server |= dict(node.GAUGES)
    shared = [f"{name}_total" for name in health.OF_THE_SHELF]
    shared += [*health.GAUGES_OF_THE_SHELF, "read_breaker_state", "write_breaker_state", TIMES]
    text = (
        _table(rows)
        + "\n### Reasons\n\nThe label `reason` says of failures and drops:\n"
        + _table(reasons, "metric, reason")
        + "\n### Metrics of the node server\n"
        + _table({health.PREFIX + name: text for name, text in server.items()})
        + "\nWith the same meaning as of an engine: "
        + ", ".join(f"`{health.PREFIX}{name}`" for name in shared)
        + ".\n"
    )
    return _filled(page, "metrics", text.strip("\n") + "\n")


#: The pages with generated parts.
PAGES = {"configuration.md": options_page, "cli.md": commands_page, "metrics.md": metrics_page}

if __name__ == "__main__":
    for name, render in PAGES.items():
        (DOCS / name).write_text(render((DOCS / name).read_text()))
