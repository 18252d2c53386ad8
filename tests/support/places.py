"""Shelves on which commands are run: in a directory, and on an S3 server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from typer.testing import Result

from kvshelf.format.namespace import Namespace
from kvshelf.shelf.shelf import Shelf, open_shelf
from tests.support.commands import run
from tests.support.filled import store


class Place:
    """A shelf, and the environment in which commands reach it."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = url
        self._options = dict(options or {})

    def open(self) -> Shelf:
        return open_shelf(self.url, storage_options=self._options)

    def fill(self, of: Namespace, tokens: Sequence[int], salt: str = "") -> None:
        with self.open() as shelf:
            store(shelf, of, tokens, salt)

    def names(self) -> set[str]:
        with self.open() as shelf:
            return {row.name for row in shelf.objects()}

    def run(self, *args: object, **environment: str) -> Result:
        """Run a command on the shelf."""
        if self._options:
            environment["KVSHELF_STORAGE_OPTIONS"] = json.dumps(self._options)
        return run(args[0], self.url, *args[1:], env=environment)

    def rows(self, *args: object, code: int = 0, **environment: str) -> list[dict[str, Any]]:
        """Run it with --json; return the lines that it writes."""
        result = self.run(*args, "--json", **environment)
        assert result.exit_code == code, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]
