"""The configuration of a model as published: what its files say beside its weights.

Owns canonical JSON (:func:`canonical_json`), the keys that shape no KV, the choice of files, and
the lines that stand for them in a namespace record (:func:`published_lines`,
:func:`code_lines`).

Contracts
---------
* Lines are a pure function of the files' names and content, as published: no library that parses
  a configuration adds its defaults, so its version decides nothing.
* A key counts unless it is known to shape no KV, in any model that vLLM runs.
* No torch, no transformers, no vLLM. Only local files are read.

Threads
-------
Everything is safe to call from any thread.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from kvshelf.errors import ConfigError

#: Where Hugging Face's format and Mistral's have a model's configuration.
CONFIG: Final = "config.json"
MISTRAL: Final = "params.json"
#: How the names of files end that hold the quantization of a configuration without it (the methods
#: ``get_config_filenames`` below vllm/model_executor/layers/quantization).
_QUANTIZATION: Final = (
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
)
_SPARSE_ATTENTION: Final = "sparse_attention_config.json"

#: The RoPE parameters of the decoder. A namespace record has them as parsed, in its field `rope`.
ROPE_FIELDS: Final = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "rotary_pct",
    "rotary_dim",
    "partial_rotary_factor",
    "rotary_emb_base",
    "rotary_base",
    "mrope_section",
)
#: Keys that shape no KV at any depth: where a file came from, what a program returns, labels, and
#: defaults of sampling.
_NO_EFFECT: Final = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "_commit_hash",
        "auto_map",
        "_attn_implementation",
        "_attn_implementation_internal",
        "_attn_implementation_autoset",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "return_dict",
        "return_dict_in_generate",
        "id2label",
        "label2id",
        "problem_type",
        "task_specific_params",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "top_p",
        "typical_p",
        "min_length",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
    }
)
#: Keys of the whole and of the decoder that the record has in fields of their own.
_ELSEWHERE: Final = frozenset({"dtype", "torch_dtype"})
#: Where a configuration with several parts has that of the decoder.
_DECODERS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_TOKEN_IDS: Final = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})
#: Models whose classes in vLLM read none of these token ids.
READ_NO_TOKEN_IDS: Final = frozenset(
    {
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "MistralForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
    }
)
_REMOTE_CODE: Final = "transformers_modules."


def canonical_json(value: object) -> bytes:
    """Return a value that was parsed from JSON as canonical JSON (``docs/format.md``).

    Raises
    ------
    ConfigError
        If the value has parts that JSON has not.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"a configuration holds what JSON cannot: {error}") from error
    return text.encode("ascii")


def published_digest(published: Mapping[str, Any], *, token_ids: bool = True) -> str:
    """Return the SHA-256 of a parsed file without the keys that shape no KV, 64 hex digits.

    Parameters
    ----------
    published : Mapping
        As :func:`json.loads` returns it: of keys that appear twice the last counts.
    token_ids : bool
        Whether the ids of the tokens that begin, end and pad a text count.
    """
    return hashlib.sha256(canonical_json(_that_counts(published, token_ids))).hexdigest()


def _that_counts(published: Mapping[str, Any], token_ids: bool) -> dict[str, Any]:
    """Return a parsed file without the keys that shape no KV or stand elsewhere in the record."""
    fields: dict[str, Any] = _without(dict(published), _NO_EFFECT)
    decoders = list(_decoders(fields))
    for part in (fields, *decoders):
        for key in _ELSEWHERE | (frozenset() if token_ids else _TOKEN_IDS):
            part.pop(key, None)
    for part in decoders or [fields]:
        for key in ROPE_FIELDS:
            part.pop(key, None)
    return fields


def _without(value: Any, dropped: Collection[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _without(item, dropped) for key, item in value.items() if key not in dropped}
    if isinstance(value, (list, tuple)):
        return [_without(item, dropped) for item in value]
    return value


def _decoders(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a configuration that are about its decoder."""
    for name in _DECODERS:
        if isinstance(part := config.get(name), dict):
            inner = list(_decoders(part))
            yield from inner or [part]


def config_files(folder: Path, *, config_format: str = "auto") -> list[Path]:
    """Return the files of a folder from which vLLM makes a model's configuration.

    Parameters
    ----------
    folder : Path
    config_format : str
        vLLM's ``--config-format``: ``auto``, ``hf`` or ``mistral``; others are read as ``hf``.

    Raises
    ------
    ConfigError
        If there are none, or a file is no JSON object.
    """
    main = folder / CONFIG
    mistral = config_format == "mistral" or (
        config_format == "auto"
        and (folder / MISTRAL).is_file()
        and any(folder.glob("consolidated*.safetensors"))
    )
    # Mistral's format takes what it lacks from the other one.
    paths = [path for path in (folder / MISTRAL, main) if path.is_file()] if mistral else [main]
    if not paths or not paths[0].is_file():
        raise ConfigError(
            f"{folder} has no {MISTRAL if mistral else CONFIG}: it is not known which"
            " configuration the model has"
        )
    if not any("quantization_config" in read_json(path) for path in paths):
        paths += sorted(path for path in folder.glob("*.json") if path.name.endswith(_QUANTIZATION))
    if (sparse := folder / _SPARSE_ATTENTION).is_file():
        paths.append(sparse)
    return paths


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object in a file.

    Raises
    ------
    ConfigError
        If the file holds anything else.
    OSError
        If it cannot be read.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}; expected a JSON object")
    return value


def published_lines(
    published: os.PathLike[str] | Mapping[str, Any],
    *,
    config_format: str = "auto",
    token_ids: bool | None = None,
) -> tuple[str, ...]:
    """Return the field `config` of a namespace record: ``<file> <digest>`` for each file, sorted.

    Parameters
    ----------
    published : path or Mapping
        A model's folder, one file, or the parsed content of ``config.json``.
    config_format : str
        As for :func:`config_files`.
    token_ids : bool, optional
        As for :func:`published_digest`. When absent it follows from the architecture that the
        configuration names: whether vLLM's class of that name reads them.

    Raises
    ------
    ConfigError
        If a folder has no configuration, or a file is no JSON object.
    OSError
        If a file cannot be read.
    """
    if isinstance(published, Mapping):
        parsed = {CONFIG: dict(published)}
    else:
        parsed = _parsed(Path(published), config_format)
    if token_ids is None:
        token_ids = _reads_token_ids(parsed)
    return tuple(
        sorted(
            f"{name} {published_digest(content, token_ids=token_ids)}"
            for name, content in parsed.items()
        )
    )


def _parsed(path: Path, config_format: str) -> dict[str, dict[str, Any]]:
    files = config_files(path, config_format=config_format) if path.is_dir() else [path]
    return {file.name: read_json(file) for file in files}


def _reads_token_ids(parsed: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the class that a configuration names may read the ids of special tokens."""
    return not any(
        name in READ_NO_TOKEN_IDS
        for content in parsed.values()
        if isinstance(names := content.get("architectures"), list)
        for name in names[:1]
    )


def code_lines(classes: Iterable[type]) -> tuple[str, ...]:
    """Return the field `code` of a namespace record: the remote code that classes come from.

    Parameters
    ----------
    classes : Iterable of type
        Those that were loaded from a model's repository are looked for, with the files that they
        import from it (transformers ``dynamic_module_utils.py``).

    Returns
    -------
    tuple of str
        ``<file> <SHA-256>`` for each file, sorted; empty without remote code.

    Raises
    ------
    ConfigError
        If the source of such a class is not available.
    """
    pending = {
        module_class.__module__
        for module_class in classes
        if module_class.__module__.startswith(_REMOTE_CODE)
    }
    files: dict[str, bytes] = {}
    while pending:
        name = pending.pop()
        module = sys.modules.get(name)
        path = getattr(module, "__file__", None)
        if module is None or path is None or name in files:
            if name in files:
                continue
            raise ConfigError(f"the remote code {name} is loaded, but not its file: set version")
        try:
            files[name] = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"the remote code {path} cannot be read: {error}") from error
        pending |= set(_imported(module, files[name])) - files.keys()
    return tuple(
        sorted(
            f"{name.rpartition('.')[2]}.py {hashlib.sha256(source).hexdigest()}"
            for name, source in files.items()
        )
    )


def _imported(module: ModuleType, source: bytes) -> Iterator[str]:
    """Yield the names of loaded modules that a module imports relative to itself."""
    package = (module.__name__ if hasattr(module, "__path__") else module.__package__) or ""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
        inside = f"{base}.{node.module}" if node.module else base
        for name in (inside, *(f"{inside}.{alias.name}" for alias in node.names)):
            if getattr(sys.modules.get(name), "__file__", None) and name != package:
                yield name
