"""The ledger of everything in vLLM that could shape KV: its names, and what becomes of each.

``record_signatures.py`` writes the names of a version to ``tests/golden/vllm-inputs.json``, new
ones without a group. There each name is to be given a group, which has a verdict and a reason:

* ``namespace``, ``key``: engines, or requests, that differ in it share nothing that depends on it;
* ``no effect``: KV does not depend on it, but for rounding;
* ``refused``: such engines do not start, or such requests are not stored or not loaded;
* ``duty``: nothing tells it apart. Users must give such engines another `version`.

``test_inputs.py`` holds the ledger against the installed vLLM.

A name has one of the prefixes

* ``config``: a field of a configuration class, ``config CacheConfig.block_size``;
* ``env``: an environment variable that vLLM reads, wherever it does;
* ``request``: a field of a request or of its sampling parameters;
* ``file``: a file that vLLM may open in the folder of a model or an adapter.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

LEDGER: Final = Path(__file__).parents[1] / "golden" / "vllm-inputs.json"
VERDICTS: Final = ("namespace", "key", "refused", "duty", "no effect")
_REQUESTS: Final = {
    "vllm.sampling_params": ("SamplingParams",),
    "vllm.v1.engine": ("EngineCoreRequest",),
}
#: Functions of vLLM whose first argument is the name of a variable.
_READERS: Final = re.compile(r"^(maybe_)?(env_\w+|get_env\w*|\w*_from_env|\w*_env_or_\w+)$")
_VARIABLE: Final = re.compile(r"^[A-Z_][A-Z0-9_]+$")
_ENVIRON: Final = ("os.environ", "_os.environ", "environ")
_SUFFIXES: Final = (
    "bin",
    "gguf",
    "jinja",
    "json",
    "jsonl",
    "model",
    "msgpack",
    "npy",
    "npz",
    "pkl",
    "pt",
    "pth",
    "py",
    "safetensors",
    "tensors",
    "tiktoken",
    "txt",
    "yaml",
)
_FILE: Final = re.compile(rf"(?!vllm\.)[\w*\[][\w.*/\[\]-]*\.({'|'.join(_SUFFIXES)})")
#: Files that vLLM opens through Hugging Face's libraries, which name them.
OF_TRANSFORMERS: Final = (
    "added_tokens.json",
    "additional_chat_templates/*.jinja",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
)
#: Packages that open files of a model.
_READING: Final = tuple(
    f"vllm/{name}/"
    for name in (
        "config",
        "engine",
        "lora",
        "model_executor",
        "models",
        "multimodal",
        "parser",
        "platforms",
        "renderers",
        "tokenizers",
        "transformers_utils",
        "v1",
    )
)


class Files(Protocol):
    """The Python files of a package, as ``record_signatures.Source`` has them."""

    def with_words(self, *words: str) -> Iterator[str]:
        """Yield the files in which one of these words occurs."""

    def module(self, name: str) -> ast.Module | None:
        """Return a module; None if there is none of this name."""

    def tree(self, file: str) -> ast.Module:
        """Return a file's syntax tree."""


def names(source: Files) -> set[str]:
    """Return all names of a version."""
    found = {f"config {name}" for name in _config_fields(source)}
    found |= {f"env {name}" for name in _variables(source)}
    found |= {f"request {name}" for name in _request_fields(source)}
    return found | {f"file {name}" for name in _files(source)}


def _fields(tree: ast.Module | None, wanted: Iterable[str] | None = None) -> Iterator[str]:
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.ClassDef) and (wanted is None or node.name in wanted):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    yield f"{node.name}.{item.target.id}"


def _config_fields(source: Files) -> Iterator[str]:
    for file in source.with_words("class "):
        if re.fullmatch(r"vllm/config/\w+\.py", file):
            yield from _fields(source.tree(file))


def _request_fields(source: Files) -> Iterator[str]:
    for module, classes in _REQUESTS.items():
        yield from _fields(source.module(module), classes)


def _variables(source: Files) -> Iterator[str]:
    for file in source.with_words("environ", "getenv", "env_"):
        tree = source.tree(file)
        texts = None
        for node in ast.walk(tree):
            name = _read_name(node)
            if isinstance(name, ast.Constant):
                yield str(name.value)
            elif name is not None:
                texts = _texts(tree) if texts is None else texts
                called = ast.unparse(name)
                # A name that only the running program knows stands for itself.
                yield from texts.get(called, (f"{called} in {file}",))
    # vLLM's own list, whose readers are functions.
    for node in getattr(source.module("vllm.envs"), "body", ()):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "environment_variables":
            yield from map(ast.literal_eval, getattr(node.value, "keys", ()))


def _texts(tree: ast.Module) -> dict[str, set[str]]:
    """Return the strings that a module gives to each name, one by one or in a loop."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                pass
            case ast.For(target=ast.Name(id=name), iter=value):
                pass
            case ast.comprehension(target=ast.Name(id=name), iter=value):
                pass
            case _:
                continue
        parts = value.elts if isinstance(value, ast.List | ast.Tuple | ast.Set) else [value]
        if all(isinstance(one, ast.Constant) and _VARIABLE.match(str(one.value)) for one in parts):
            found.setdefault(name, set()).update(map(ast.literal_eval, parts))
        elif isinstance(value, ast.Name):
            found.setdefault(name, set()).update(found.get(value.id, ()))
    return {name: texts for name, texts in found.items() if texts}


def _read_name(node: ast.AST) -> ast.expr | None:
    """Return the expression for a variable's name where `node` reads or sets a variable."""
    match node:
        case ast.Subscript(value=place, slice=name) if ast.unparse(place) in _ENVIRON:
            return name
        case ast.Compare(left=name, ops=[ast.In() | ast.NotIn()], comparators=[place]) if (
            ast.unparse(place) in _ENVIRON
        ):
            return name
        case ast.Call(
            func=ast.Attribute(value=place, attr="get" | "pop" | "setdefault"), args=[name, *_]
        ) if ast.unparse(place) in _ENVIRON:
            return name
        case ast.Call(func=called, args=[name, *_]) if ast.unparse(called).endswith("getenv"):
            return name
        case ast.Call(func=ast.Name(id=called), args=[name, *_]) if _READERS.match(called):
            return name
    return None


def _files(source: Files) -> Iterator[str]:
    quoted = [f".{suffix}{quote}" for suffix in _SUFFIXES for quote in "\"'"]
    for file in source.with_words(*quoted):
        for node in ast.walk(source.tree(file)) if file.startswith(_READING) else ():
            if isinstance(node, ast.Constant | ast.JoinedStr):
                text = _pattern(node)
                if _FILE.fullmatch(text):
                    yield text
    yield from OF_TRANSFORMERS


def _pattern(node: ast.Constant | ast.JoinedStr) -> str:
    """Return a string, with a star for each part that is only known when it runs."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(str(one.value) if isinstance(one, ast.Constant) else "*" for one in node.values)


def write(found: Iterable[str], ledger: Path = LEDGER) -> None:
    """Add names to the ledger: new ones without a group, others stay as they are."""
    content = json.loads(ledger.read_text())
    rows = dict.fromkeys(found) | content["names"]
    ledger.write_text(text(content | {"names": dict(sorted(rows.items()))}))


def text(content: Mapping[str, Mapping[str, object]]) -> str:
    """Return the ledger as it is written: one line for each group and each name."""
    parts = []
    for part, entries in content.items():
        lines = (f"  {json.dumps(key)}: {json.dumps(entries[key])}" for key in entries)
        parts.append(f' "{part}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"
