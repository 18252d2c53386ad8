"""What the documentation says of defaults, constants, threads and messages is what the code has."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvshelf.backends import Deadlines, base, breaker, s3
from kvshelf.capacity import keeper, keepers, visit
from kvshelf.cli import deletion
from kvshelf.config import LEAST_MAX_AGE, Config
from kvshelf.server import answers, messages, service
from kvshelf.shelf import failed_keys, waits
from kvshelf.shelf.presence import PresenceCache
from kvshelf.tools import copying
from tests.support.commands import all_commands, run
from tests.support.filled import fill, namespace, prompt
from tests.support.pages import PAGES, ROOT, blocks, name, prose, spans

#: Each page in one line of words, so that a sentence may be broken anywhere.
TEXTS = {page: " ".join(prose(page).split()) for page in PAGES}

UNITS = {"ms": 1e-3, "s": 1.0, "seconds": 1.0, "second": 1.0, "minutes": 60.0, "min": 60.0}
UNITS |= {"hour": 3600.0, "hours": 3600.0, "h": 3600.0, "days": 86400.0, "week": 7 * 86400.0}
UNITS |= {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "%": 0.01, "": 1}
NUMBER = r"(\d[\d,]*(?:\.\d+)?|a|one|two|three|four|half an)"
WORDS = {"a": 1, "one": 1, "two": 2, "three": 3, "four": 4, "half an": 0.5}
#: A value as pages write it.
VALUE = rf"{NUMBER} ?((?:{'|'.join(filter(None, sorted(UNITS, key=len, reverse=True)))})\b|%|)"


def value_of(number: str, unit: str) -> float:
    count = WORDS.get(number) or float(number.replace(",", ""))
    return count * UNITS[unit]


# ------------------------------------------------------------------------------------ defaults


def test_defaults_of_options_are_those_of_the_configuration() -> None:
    """Of `` `option` (2 s)``."""
    said = 0
    for page, text in TEXTS.items():
        for option, number, unit in re.findall(rf"`(\w+)`(?:\]\([^)]*\))? \({VALUE}[;,)]", text):
            if option in Config.model_fields:
                default = Config.model_fields[option].get_default(call_default_factory=True)
                assert value_of(number, unit) == pytest.approx(float(default)), (
                    f"{name(page)}: `{option}` ({number} {unit})"
                )
                said += 1
    assert said


def test_defaults_in_the_manual_are_those_of_the_commands() -> None:
    """Of a table's row: an option, and its default as the only number in brackets."""
    commands = all_commands()
    text = (ROOT / "docs" / "cli.md").read_text()
    said = 0
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        title = re.match(r"`kvshelf (\w+)", section)
        if title is None:
            continue
        parameters = {
            option: one
            for one in commands[title[1]].params
            for option in (*one.opts, *one.secondary_opts)
        }
        rows = re.findall(r"^\| (`--.*?) \| (.*) \|$", section, re.MULTILINE)
        for options, meaning in rows:
            named = [parameters[one] for one in re.findall(r"`(--[\w-]+)", options)]
            numbers = re.findall(r"\((\d+)\)", meaning)
            if len(numbers) == len(named) or len(named) == 1:
                for parameter, number in zip(named, numbers, strict=False):
                    default = str(parameter.default).rsplit(":", 1)[-1]
                    assert float(default) == float(number), f"{title[1]}: {options}"
                    said += 1
    assert said


def default_of(function: Any, parameter: str) -> float:
    return float(inspect.signature(function).parameters[parameter].default)


#: What is said, with the values in it, and the values in the code.
SAID: list[tuple[str, list[float]]] = [
    (rf"probe a batch of objects \| {VALUE} \|", [Deadlines().probe]),
    (rf"read an object \| {VALUE} \+", [Deadlines().read]),
    (rf"write an object \| {VALUE} \+", [Deadlines().write]),
    (
        rf"first failure within the last {VALUE}, there were at least {VALUE} failures",
        [breaker.WINDOW_SECONDS, breaker.LEAST_FAILURES],
    ),
    (
        rf"counts as missing for some time, for all requests: for {VALUE}, or for {VALUE} if",
        [
            default_of(failed_keys.FailedKeys, "other_seconds"),
            default_of(failed_keys.FailedKeys, "bad_seconds"),
        ],
    ),
    (
        rf"of the storage \| none \| {VALUE}, at most {VALUE}; {VALUE} of a filesystem in memory",
        [keeper._FREE_PART, keeper._FREE_BYTES, keeper._FREE_PART_IN_MEMORY],
    ),
    (rf"It is at least {VALUE}\.", [LEAST_MAX_AGE]),
    (
        rf"Above {VALUE} of `max_bytes` a visit deletes down to {VALUE}, on average over slices,"
        rf" and to {VALUE} in any case",
        [keeper.LOW, keeper.LOW, keeper.HIGH],
    ),
    (rf"a slice of {VALUE} chunks or more", [keeper.SLICE]),
    (rf"salt group of at most {VALUE} files is listed whole", [visit.PAGE]),
    (
        rf"Those of the last {VALUE} count, {VALUE} at most",
        [keepers.ALIVE_SECONDS, keepers.MOST_KEEPERS],
    ),
    (
        rf"before such a chunk of a search \| {VALUE} \| until a load",
        [default_of(PresenceCache, "seconds")],
    ),
    (rf"The cache holds at most {VALUE} chunks", [default_of(PresenceCache, "limit")]),
    (
        rf"of low latency \| every {VALUE}, and less often when many wait, but every {VALUE} \|",
        [waits._SHORTEST, waits._LONGEST],
    ),
    (
        rf"of high latency \| every {VALUE}, and less often when many wait \|",
        [waits._LONGEST],
    ),
    (
        rf"a producer that gave up every {VALUE}, on high-latency storage every {VALUE}\.",
        [waits._MARKER_SECONDS, waits._MARKER_SECONDS_HIGH_LATENCY],
    ),
    (
        rf"is bounded: {VALUE} for a request, {VALUE} for all requests that wait for answers,"
        rf" {VALUE} answers",
        [messages.MAX_REQUEST, answers.MAX_OPEN_BYTES, answers.MAX_OPEN],
    ),
    (rf"is a \*lease\* \({VALUE} unless configured\)", [service.LEASE_SECONDS]),
    (
        rf"Objects over {VALUE} are copied one after another, and objects over {VALUE},",
        [copying._LARGE_BYTES, copying._MOST_BYTES],
    ),
    (
        rf"An object of {VALUE} or more is fetched in parallel parts of {VALUE}",
        [s3._LARGE_BYTES, s3._PART_BYTES],
    ),
]


@pytest.mark.parametrize(("pattern", "values"), SAID, ids=[row[0][:40] for row in SAID])
def test_numbers_are_those_of_the_code(pattern: str, values: list[float]) -> None:
    for page, text in TEXTS.items():
        for found in re.finditer(pattern, text):
            pairs = zip(found.groups()[::2], found.groups()[1::2], strict=True)
            said = [value_of(number, unit) for number, unit in pairs]
            assert said == pytest.approx(values), f"{name(page)}: {found[0]}"


def test_the_sentences_with_numbers_are_still_there() -> None:
    """Where many of them are written in another way, the test above tests nothing."""
    gone = [
        pattern for pattern, _ in SAID if not any(map(re.compile(pattern).search, TEXTS.values()))
    ]
    assert len(gone) < len(SAID) / 4, gone


# ------------------------------------------------------------------------------------- threads


def pieces(node: ast.AST | None) -> str | None:
    """A text in the code, with `*` for what is put into it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(pieces(one) or "*" for one in node.values)
    return None


SOURCES = sorted(
    file for place in ("src/kvshelf", "backends") for file in (ROOT / place).rglob("*.py")
)


@functools.cache
def syntax(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def threads() -> Iterator[tuple[str, str, ast.Call]]:
    """Where threads begin: the module, what follows `kvshelf-` in their names, and the call."""
    for file in (file for file in SOURCES if "kvshelf-" in file.read_text()):
        base = ROOT / "src" if "src" in file.parts else ROOT
        module = ".".join(file.relative_to(base).with_suffix("").parts)
        module = module if module.startswith("kvshelf") else f"kvshelf.{module}"
        for node in ast.walk(syntax(file)):
            if isinstance(node, ast.Call):
                for value in (*node.args, *(keyword.value for keyword in node.keywords)):
                    text = pieces(value)
                    if text and re.fullmatch(r"kvshelf-([a-z]+(-\*)?|\*)", text):
                        yield module, re.sub(r"(?<=[a-z])-\*$", "", text[8:]), node


#: Families of threads whose names the code puts together.
FAMILIES = {
    "kvshelf.transfer.context": {"load", "store"},
    "kvshelf.server.service": {"fetch", "publish", "probe", "call"},
}


def test_the_map_has_the_threads_of_the_code() -> None:
    [page] = [page for page, text in TEXTS.items() if "| thread | started by |" in text]
    listed = set(re.findall(r"`kvshelf-([a-z]+)`", page.read_text()))
    started: dict[str, set[str]] = {}
    for module, thread, _ in threads():
        for one in FAMILIES[module] if thread == "*" else {thread}:
            started.setdefault(one, set()).add(module)
    assert listed - set(started) == set(), "no code starts them"
    assert set(started) - listed == set(), "not on the map"
    for row in re.findall(r"^\| (`kvshelf-.*?) \| (.*?) \|", page.read_text(), re.MULTILINE):
        by = re.findall(r"`(kvshelf[\w.]+)`", row[1])
        for thread in re.findall(r"`kvshelf-([a-z]+)`", row[0]):
            # A class that starts threads for others is given the name elsewhere.
            starts = any(module in started[thread] for module in by)
            assert starts or "Threads" in row[1] or "workers" in row[1], (thread, by)


def test_threads_that_are_no_daemons_are_named() -> None:
    [others] = {
        frozenset(re.findall(r"`(?:kvshelf-)?(\w+)`", found))
        for text in TEXTS.values()
        for found in re.findall(r"All but (.{,80}?) are daemon threads", text)
    }
    for _, thread, call in threads():
        if ast.unparse(call.func).endswith("Thread"):
            [daemon] = [ast.unparse(one.value) for one in call.keywords if one.arg == "daemon"] or [
                "False"
            ]
            assert (daemon == "True") == (thread not in others), thread


# ------------------------------------------------------------------------------------- messages


@functools.cache
def texts_of(*files: Path) -> str:
    """All texts in the code, each in one line of words."""
    found = [
        re.sub(r"%[-\d.]*[a-z]", "*", text)
        for file in files
        for node in ast.walk(syntax(file))
        if (text := pieces(node))
    ]
    return "\n".join(" ".join(text.split()) for text in found)


def phrases(line: str) -> list[str]:
    """The runs of at least three words of a message: what is between has other origins."""
    value = r"\b\d[\d.]*(?: [KMGT]?i?B|[smhdw])?\b"
    runs = re.split(rf"\s{{2,}}|[:;()\[\]…*\"'`,]|\.\s|{value}|/\S+", line)
    return [run.strip() for run in runs if len(run.split()) >= 3]


def unknown(line: str, *files: Path) -> list[str]:
    """The phrases of a message that no text in these files has; a word may be put in first."""
    texts = texts_of(*files)
    return [
        phrase
        for phrase in phrases(line)
        if phrase not in texts
        and phrase.split(" ", 1)[1] not in texts
        and phrase not in OF_THE_SYSTEM
    ]


OF_THE_SYSTEM = {"No space left on device"}


def test_lines_of_the_log_are_written_by_the_code() -> None:
    lines = [
        (name(block.page), " ".join(line.split()).split(" ", 1)[1])
        for block in blocks("text")
        for line in re.split(r"^(?=\S)", block.text, flags=re.MULTILINE)
        if re.match(r"(WARNING|ERROR|INFO) ", line)
    ]
    assert len(lines) > 3
    assert [(page, wrong) for page, line in lines if (wrong := unknown(line, *SOURCES))] == []


def test_messages_that_pages_quote_are_written_by_the_code() -> None:
    said = r"\b(warns?|warnings?|errors?|messages?|lines?|says?|logs?)(?: that|:)?$"
    quoted = [
        (name(span.page), span.text)
        for span in spans()
        if re.search(said, span.before)
        and re.match(r"[A-Za-z]", span.text)
        and not re.search(r"[-=_|{}]", span.text)
        and span.page.name != "migrating.md"
    ]
    assert len(quoted) > 3
    assert [(page, wrong) for page, text in quoted if (wrong := unknown(text, *SOURCES))] == []


# -------------------------------------------------------------------------------------- outputs


def shape(line: str) -> str:
    """A line of an output without its numbers, sizes, paths and columns."""
    line = re.sub(r"(?<!\S)/\S*(?=[:\s])", "/", line.rstrip())
    line = re.sub(r"-?\d[\d.,]*(?:e[+-]?\d+)?", "#", line)
    return " ".join(re.sub(r"# ([KMGT]i)?B\b", "# B", line).split())


def test_what_gc_shows_is_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shelf that has all that the page shows: leftovers, old chunks and too many chunks."""
    fill(tmp_path, namespace(), prompt(0, 4))
    old = sorted(tmp_path.rglob("*.safetensors"))
    (old[0].parent / f".{old[0].name}.0123456789abcdef.tmp").write_bytes(b"half")
    fill(tmp_path, namespace(), prompt(1, 4), prompt(2, 4))
    # The time of a file's last change cannot be set.
    ahead = SimpleNamespace(time=lambda: time.time() + 40 * 86400)
    for module in (base, deletion):
        monkeypatch.setattr(module, "time", ahead)
    files = sorted(tmp_path.rglob("*.safetensors"))
    for file in set(files) - set(old):
        os.utime(file, (ahead.time() - 86400,) * 2)
    half = sum(file.stat().st_size for file in files) // 2
    shown = [block.text for block in blocks("console") if block.text.startswith("$ kvshelf gc ")]
    assert shown
    for text in shown:
        command, *expected = text.splitlines()
        words = re.sub(r"\d+[KMGT]iB", f"{half}B", command).split()
        result = run("gc", tmp_path, *words[4:])
        assert list(map(shape, result.stdout.splitlines())) == list(map(shape, expected))


def test_outputs_of_commands_and_scripts_are_made_of_their_texts() -> None:
    """Whatever the numbers are, the words of an output come from the program that writes it."""
    tried = 0
    for block in blocks("console"):
        files: tuple[Path, ...] = ()
        for line in block.text.splitlines():
            if line.startswith("$ "):
                script = re.search(r"python (\S+\.py)", line)
                ours = line.startswith("$ kvshelf ")
                files = (ROOT / script[1],) if script else tuple(SOURCES) if ours else ()
            elif files:
                assert unknown(line, *files) == [], f"{name(block.page)}: {line}"
                tried += bool(phrases(line))
    assert tried > 3
