"""Hooks of mkdocs, which builds the site: the Markdown of each page lies beside its HTML."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def on_post_build(config: dict[str, Any]) -> None:
    """Copy the pages' Markdown into the site, where the links of ``llms.txt`` lead to it."""
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    for page in docs.rglob("*.md"):
        target = site / page.relative_to(docs)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, target)
