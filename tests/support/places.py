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

#: Commands whose argument is the shelf; others have an option for it.
_WITH_ARGUMENT = ("gc", "rm")


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

    def run(self, *args: object) -> Result:
        """Run a command on the shelf."""
        env = {"KVSHELF_STORAGE_OPTIONS": json.dumps(self._options)} if self._options else {}
        where = [self.url] if args[0] in _WITH_ARGUMENT else ["--shelf", self.url]
        return run(*args, *where, env=env)

    def rows(self, *args: object, code: int = 0) -> list[dict[str, Any]]:
        """Run it with --json; return the lines that it writes."""
        result = self.run(*args, "--json")
        assert result.exit_code == code, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]
