"""Commands of kvshelf, run in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import typer
from typer.testing import CliRunner, Result

from kvshelf.cli.app import app


def all_commands() -> dict[str, Any]:
    """Return the commands by name, in the order of the help."""
    group: Any = typer.main.get_command(app)
    return {name: group.get_command(None, name) for name in group.list_commands(None)}


def run(*args: object, env: Mapping[str, str] | None = None) -> Result:
    """Run a command to its end, whatever that is."""
    return CliRunner().invoke(app, [str(arg) for arg in args], env=env)


def done(*args: object, code: int = 0, env: Mapping[str, str] | None = None) -> Result:
    """Run a command that must end with an exit code."""
    result = run(*args, env=env)
    assert result.exit_code == code, result.output
    return result


def report(*args: object, code: int = 0, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a command with --json; return the one object that it writes."""
    found: dict[str, Any] = json.loads(done(*args, "--json", code=code, env=env).stdout)
    return found
