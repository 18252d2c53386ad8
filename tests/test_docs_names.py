"""The documentation names what exists: commands, options, metrics, names, files, headings."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kvshelf.cli.app import app
from kvshelf.cli.codes import EXIT_CODES
from kvshelf.config import Config
from kvshelf.errors import ConfigError
from kvshelf.metrics import COUNTERS, FAMILIES, GAUGES, METRIC_PREFIX, OPERATIONS, TIMES
from tests.support import pages
from tests.support.commands import all_commands
from tests.support.pages import PAGES, ROOT, Span, anchors, blocks, commands, name, prose, spans

SPANS = spans()
COMMANDS = commands()
GROUP: Any = typer.main.get_command(app)
BY_NAME = all_commands()
#: Pages about others' programs, whose names they list in the first column of tables.
OTHERS = ("migrating.md", "multiprocess.md")


def of_others(span: Span) -> bool:
    """Whether a span is in the first column of a table that lists names of another program."""
    return span.page.name in OTHERS and bool(re.fullmatch(r"\|[^|]*", span.before))


# ------------------------------------------------------------------------------------ commands


def options_of(command: Any) -> set[str]:
    return {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("-")
    }


ALL_OPTIONS = {one for command in BY_NAME.values() for one in options_of(command)}
ALL_OPTIONS |= {"--help", *options_of(GROUP)}
#: `kvshelf gather` is a range that NVTX shows.
RANGES = {"lookup", "gather", "store", "load", "scatter"}


def test_commands_and_their_options_exist() -> None:
    ours = [(page, words[1:]) for page, words in COMMANDS if words[0] == "kvshelf"]
    assert len(ours) > 50
    wrong = []
    for page, (first, *rest) in (one for one in ours if one[1]):
        if first.startswith("-"):
            known = first in options_of(GROUP)
        elif first in BY_NAME:
            given = {word.split("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
            known = given <= options_of(BY_NAME[first]) | {"--help"}
        else:
            known = first in RANGES
        if not known:
            wrong.append(f"{name(page)}: kvshelf {' '.join([first, *rest])}")
    assert wrong == []


def test_commands_in_blocks_have_the_arguments_that_they_need() -> None:
    tried = 0
    for block in blocks("bash", "console", "shell", "sh", ""):
        for words in pages.command_lines(block.text):
            if words[0] == "kvshelf" and words[1] in BY_NAME:
                command = BY_NAME[words[1]]
                try:
                    command.make_context(words[1], words[2:])
                except Exception as error:  # noqa: BLE001
                    pytest.fail(f"{name(block.page)}: {' '.join(words)}: {error}")
                tried += 1
    assert tried > 15


def test_tables_of_options_are_of_their_command() -> None:
    sections = re.split(r"^## ", (ROOT / "docs" / "cli.md").read_text(), flags=re.MULTILINE)
    for section in sections:
        title = re.match(r"`kvshelf (\w+)", section)
        if title is None:
            continue
        known = options_of(BY_NAME[title[1]])
        for row in re.findall(r"^\| (`-.*?) \|", section, re.MULTILINE):
            named = set(re.findall(r"`(--?[a-z][\w-]*)", row))
            assert named <= known, f"kvshelf {title[1]} has no {named - known}"


@functools.cache
def vllm_options() -> frozenset[str]:
    """The names of arguments of `vllm serve`, and many more, without importing vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    files = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
    texts = ((Path(spec.origin).parent / file).read_text() for file in files)
    return frozenset(word for text in texts for word in re.findall(r"[\w-]+", text))


#: Of programs that the pages name beside such options: copying tools, pip, git, nsys, routers.
OPTIONS_OF_OTHERS = frozenset(
    (
        *("--delete", "--dir-cache-time", "--exclude", "--files-from", "--preserve"),
        *("--config-settings", "--no-deps", "--extra-index-url", "--wheel-dir"),
        *("--short", "--trace-fork-before-exec", "--cuda-graph-trace"),
        *("--kv-connector", "--health-check-interval-secs", "--health-failure-threshold"),
    )
)


@functools.cache
def options_in_scripts() -> frozenset[str]:
    """The options of this repository's own programs."""
    found: set[str] = set()
    for folder in ("benchmarks", "cuda", "examples", ".ci", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", file.read_text()))
    return frozenset(found)


def test_options_are_those_of_some_program() -> None:
    """An option that stands alone: of a command of kvshelf, of vLLM, or of a program named here."""
    wrong = []
    for span in SPANS:
        if span.text.startswith("--") and not of_others(span):
            for option in re.findall(r"(?:^|\s)(--[a-z][\w-]*)", span.text):
                ours = option in ALL_OPTIONS | OPTIONS_OF_OTHERS | options_in_scripts()
                plain = option[2:].replace("-", "_").removeprefix("no_")
                if not (ours or {option, plain} & vllm_options()):
                    wrong.append(f"{name(span.page)}: {option}")
    assert wrong == []


def test_scripts_and_their_options_exist() -> None:
    tried = 0
    for page, words in COMMANDS:
        scripts = [word for word in words if re.fullmatch(r"(?!build/)[\w./-]+\.(py|sh)", word)]
        if words[0] != "kvshelf" and scripts and "/" in scripts[0]:
            script = ROOT / scripts[0]
            assert script.is_file(), f"{name(page)}: {scripts[0]}"
            text = script.read_text()
            behind = words[words.index(scripts[0]) + 1 :]
            for option in (word.split("=")[0] for word in behind if word.startswith("--")):
                assert f'"{option}"' in text or option in text, f"{name(page)}: {' '.join(words)}"
            tried += 1
    assert tried > 3


def test_targets_of_make_exist() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))
    assert "test-all" in targets
    for page, words in COMMANDS:
        if words[0] == "make":
            named = {word for word in words[1:] if re.fullmatch(r"[a-z][a-z-]*", word)}
            assert named - {"TARGET"} <= targets, f"{name(page)}: {' '.join(words)}"


# ------------------------------------------------------------------------------- configuration


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """The options of each configuration in a block, and where it stands."""

    def inside(value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict):
            if value.get("kv_connector") in ("SharedStorageConnector", "KVShelfConnector"):
                yield value.get("kv_connector_extra_config", {})
            elif "shared_storage_path" in value:
                yield value
            else:
                yield from (one for part in value.values() for one in inside(part))
        elif isinstance(value, list):
            yield from (one for part in value for one in inside(part))

    for block in blocks("json"):
        if block.text.lstrip().startswith("{") and "…" not in block.text:
            for options in inside(json.loads(block.text)):
                yield name(block.page), options
    for page, words in COMMANDS:
        for word in words:
            if word.startswith("{") and "kv_connector" in word:
                for options in inside(json.loads(word)):
                    yield name(page), options
    for block in blocks("yaml"):
        if "shared_storage_path" in block.text and "kind:" not in block.text:
            loaded = yaml.safe_load(block.text)
            yield name(block.page), loaded


def test_configurations_in_blocks_are_valid() -> None:
    tried = list(configurations())
    assert len(tried) > 10
    for page, options in tried:
        try:
            Config.load(options, {})
        except ConfigError as error:
            pytest.fail(f"{page}: {options}: {error}")


# --------------------------------------------------------------------- metrics, codes, words


@functools.cache
def metrics() -> frozenset[str]:
    """The names of all metrics, as Prometheus has them."""
    grouped = {one for _, reasons in FAMILIES.values() for one in reasons.values()}
    ours = {f"{one}_total" for one in (*FAMILIES, *(set(COUNTERS) - grouped))} | {*GAUGES, TIMES}
    found = {f"kvshelf_{one}" for one in ours} | {METRIC_PREFIX + one for one in ours}
    page = (ROOT / "docs" / "metrics.md").read_text()  # A server is asked in tests/server.
    found |= set(re.findall(r"^\| `(kvshelf_server_\w+)`", page, re.MULTILINE))
    histograms = {one for one in found if one.endswith("_seconds")}
    return frozenset(
        found | {one + end for one in histograms for end in ("_bucket", "_sum", "_count")}
    )


def test_metrics_exist() -> None:
    short = {one.split("kvshelf_", 1)[1] for one in metrics()} | {"server"}
    wrong = set()
    for page in PAGES:
        text = page.read_text()
        for metric in re.findall(r"(?<![\w.])(?:vllm:)?kvshelf_[a-z_]+\b(?!\.)", text):
            if metric not in metrics() | words_of_the_code() and metric[-1] != "_":
                wrong.add(f"{name(page)}: {metric}")
    for span in SPANS:
        if not of_others(span):
            for metric in re.findall(r"^([a-z]+(?:_[a-z]+)+_total)\b", span.text):
                if metric not in short and metric not in metrics() | METRICS_OF_VLLM:
                    wrong.add(f"{name(span.page)}: {metric}")
    assert wrong == set()


METRICS_OF_VLLM = {"prompt_tokens_cached_by_source_total"}


def test_reasons_and_operations_in_queries_exist() -> None:
    reasons = {one for _, named in FAMILIES.values() for one in named}
    for page in PAGES:
        text = page.read_text()
        for reason in re.findall(r"reason=\"([a-z_]+)\"", text):
            assert reason in reasons, f"{name(page)}: {reason}"
        for operation in re.findall(r"operation=\"([a-z_]+)\"", text):
            assert operation in OPERATIONS, f"{name(page)}: {operation}"


def test_exit_codes_exist() -> None:
    for page in PAGES:
        for code in re.findall(r"[Ee]xit codes? (?:is )?(\d+)", page.read_text()):
            assert int(code) in {*EXIT_CODES, 130}, f"{name(page)}: exit code {code}"


@functools.cache
def words_of_the_code() -> frozenset[str]:
    """Every word that the repository's programs and recorded data use."""
    found: set[str] = set()
    places = ("src", "backends", "benchmarks", "examples", "cuda", ".ci", "tests/golden")
    files = [path for place in places for path in (ROOT / place).rglob("*") if path.is_file()]
    for file in (*files, *(ROOT / "tests").rglob("*.py"), ROOT / "Makefile"):
        if file.suffix in (".py", ".json", ".yaml", ".yml", ".cpp", ".cu", ".h", ".sh", ".mk", ""):
            found |= set(re.findall(r"[A-Za-z]\w+", file.read_text(errors="ignore")))
            found.add(file.stem)
    return frozenset(found)


#: Names of vLLM, PyTorch, Hugging Face, SSH and compilers, which nothing here uses.
WORDS_OF_OTHERS = frozenset(
    (
        *("extract_hidden_states", "pause_generation", "resume_generation", "fp8_ds_mla"),
        *("reset_running_requests", "toy_proxy_server", "external_unspecified", "commit_hash"),
        *("attn_implementation", "attn_implementation_autoset", "attn_implementation_internal"),
        *("modeling_x", "use_fast", "f8_e4m3", "f8_e5m2", "sm_80", "known_hosts", "safe_open"),
        "max_load_tokens",
    )
)


def test_words_of_code_are_in_the_code() -> None:
    """Options, fields, functions, counters: what is written with underscores is somewhere."""
    short = {one.split("kvshelf_", 1)[-1] for one in metrics()}
    reasons = {one for _, named in FAMILIES.values() for one in named}
    known = words_of_the_code() | WORDS_OF_OTHERS | metrics() | short | reasons
    wrong = set()
    for span in SPANS:
        if span.page.name not in OTHERS:
            for word in re.findall(r"(?<![\w.:/-])[a-z]\w*_[a-z]\w*(?![\w-])", span.text):
                if word not in known:
                    wrong.add(f"{name(span.page)}: {word}")
    assert wrong == set()


# ------------------------------------------------------------------------------ names in Python


@functools.cache
def members(file: Path) -> dict[str, ast.AST]:
    """What a module has at its top: definitions, assignments and imports, by name."""
    return dict(_named(ast.parse(file.read_text()).body))


def _named(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id, node
        elif isinstance(node, ast.If | ast.Try):
            yield from _named(node.body)
            yield from _named(node.orelse)


def module_of(parts: list[str]) -> tuple[Path, list[str]]:
    """The file of the module that a name begins with, and what is left of the name."""
    place, rest = ROOT / "src", list(parts)
    while rest and (place / rest[0]).is_dir():
        place /= rest.pop(0)
    if rest and (place / f"{rest[0]}.py").is_file():
        return place / f"{rest.pop(0)}.py", rest
    return place / "__init__.py", rest


def exists(dotted: str) -> bool:
    """Whether a dotted name of kvshelf leads to a module, or to something in it."""
    file, rest = module_of(dotted.split("."))
    if not file.is_file():
        return False
    if not rest:
        return True
    node = members(file).get(rest[0])
    if isinstance(node, ast.ImportFrom):
        if (node.module or "").split(".")[0] != "kvshelf":
            return len(rest) == 1
        target = next(one.name for one in node.names if rest[0] in (one.asname, one.name))
        return exists(".".join([node.module or "", target, *rest[1:]]))
    if node is None or len(rest) == 1:
        return node is not None
    return isinstance(node, ast.ClassDef) and len(rest) == 2 and rest[1] in of_class(file, node)


def of_class(file: Path, node: ast.ClassDef) -> set[str]:
    """The attributes and methods of a class, those of its bases included."""
    found = {one for one, _ in _named(node.body)}
    for inner in ast.walk(node):
        is_set = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
        if is_set and ast.unparse(inner.value) == "self":
            found.add(inner.attr)
    for base in node.bases:
        above = members(file).get(ast.unparse(base).split("[")[0])
        if isinstance(above, ast.ClassDef):
            found |= of_class(file, above)
        elif isinstance(above, ast.ImportFrom) and (above.module or "").startswith("kvshelf"):
            place, rest = module_of([*(above.module or "").split("."), ast.unparse(base)])
            inherited = members(place).get(rest[0]) if rest else None
            if isinstance(inherited, ast.ClassDef):
                found |= of_class(place, inherited)
    return found


def test_names_of_python_exist() -> None:
    found = {
        (name(page), dotted)
        for page in PAGES
        for dotted in re.findall(
            r"(?<![\w./:-])kvshelf(?:\.[A-Za-z_]\w*)+(?![\w/-])",
            re.sub(r"torch\.ops\.kvshelf[\w.]*", "", page.read_text()),
        )
    }
    assert len(found) > 200
    files = re.compile(r"\.(json|yaml|service|socket|container|py|md|io|sock|whl)$")
    assert {
        f"{page}: {dotted}"
        for page, dotted in found
        if not (files.search(dotted) or exists(dotted))
    } == set()


def test_code_in_python_imports_what_exists() -> None:
    imported = 0
    for block in blocks("python"):
        try:
            tree = ast.parse(block.text)
        except SyntaxError as error:
            pytest.fail(f"{name(block.page)}: {error}: {block.text}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvshelf"):
                for alias in node.names:
                    dotted = f"{node.module}.{alias.name}"
                    assert exists(dotted), f"{name(block.page)}: {dotted}"
                    imported += 1
    assert imported > 5


# -------------------------------------------------------------------- files, tests and links


def test_files_exist() -> None:
    folders = "src|backends|benchmarks|examples|tests|docs|cuda|\\.ci|\\.github|deploy"
    wrong = set()
    for span in SPANS:
        for path in re.findall(rf"(?<![\w/])(?:{folders})/[\w./*<>-]+", span.text):
            path = path.rstrip("./")
            if "<" not in path and not list(ROOT.glob(path)):
                wrong.add(f"{name(span.page)}: {path}")
    assert wrong == set()


def test_tests_exist() -> None:
    defined: set[str] = set()
    for file in (ROOT / "tests").rglob("*.py"):
        defined |= {file.stem, file.name, *re.findall(r"def (test_\w+)", file.read_text())}
    wrong = {
        f"{name(span.page)}: {test}"
        for span in SPANS
        for test in re.findall(r"\b(test_\w+(?:\.py)?)", span.text)
        if test not in defined
    }
    assert wrong == set()


def test_links_lead_to_headings_that_exist() -> None:
    links = 0
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", prose(page)):
            other = page.parent / target if target else page
            if other.suffix == ".md":
                found = anchors(other)
                assert anchor in found, f"{name(page)}: {target}#{anchor}"
                links += 1
    assert links > 200
