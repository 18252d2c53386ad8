"""What the commands have in common: values of options, the choice of a shelf, dry runs, JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import run
from tests.support.filled import fill, namespace, prompt

FOLDER = namespace().folder


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A shelf with the two chunks of ``prompt(0, 2)`` in two shards."""
    root = tmp_path / "shelf"
    fill(root, namespace(), prompt(0, 2))
    return root


# ------------------------------------------------------------------------------ sizes and ages

AGES = [
    ["gc", "{shelf}", "--max-age"],
    ["rm", "{shelf}", "--unused-for"],
    ["copy", "{shelf}", "{shelf}-2", "--since"],
    ["copy", "{shelf}", "{shelf}-2", "--until"],
    ["pin", "a", "--shelf", "{shelf}", "--group", "_", "--until"],
]


@pytest.mark.parametrize("arguments", AGES, ids=" ".join)
def test_each_option_takes_the_same_ages(shelf: Path, arguments: list[str]) -> None:
    given = [one.format(shelf=shelf) for one in arguments]
    for age in ("300s", "9.5m", "12h", "7d", "2w", "7D"):
        result = run(*given, age, *(["--replace"] if given[0] == "pin" else []))
        assert result.exit_code == 0, result.output
    for age in ("soon", "-7d", "", "7y", "nand", "infw"):
        result = run(*given, age)
        assert result.exit_code == 2
        assert given[-1] in result.stderr
        assert "expected an age such as 90s, 30m, 12h, 7d or 2w" in result.stderr


def test_a_number_alone_is_an_age_only_where_the_configuration_has_it(shelf: Path) -> None:
    assert run("gc", shelf, "--max-age", "300").exit_code == 0
    assert "at least 120s" in run("gc", shelf, "--max-age", "30").stderr
    assert run("rm", shelf, "--unused-for", "300").exit_code == 2
    assert run("gc", shelf, env={"KVSHELF_CAPACITY": '{"max_age": "2w"}'}).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["gc", "{shelf}", "--max-bytes"],
        ["gc", "{shelf}", "--group-max-bytes"],
        ["serve", "--memory"],
        ["serve", "--max-bytes"],
        ["serve", "--min-free"],
    ],
    ids=" ".join,
)
def test_each_option_takes_the_same_sizes(shelf: Path, arguments: list[str]) -> None:
    given = [one.format(shelf=shelf) for one in arguments]
    for size in ("100000", "1M", "1.5MB", "2 TiB") if given[0] == "gc" else ():
        assert run(*given, size).exit_code == 0
    for size in ("many", "-5", "", "1YB"):
        result = run(*given, size)
        assert result.exit_code == 2
        assert f"{given[-1]}: found" in result.stderr
        assert "expected a size such as 500MB, 20GiB or 2TiB" in result.stderr
