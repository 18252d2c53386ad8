"""What a model's repository publishes beside its weights, and what vLLM has made of it.

Owns the way from vLLM's configuration to the fields ``config`` and ``code`` of a namespace record:
which local folder vLLM has read the configuration from, whether its files are still those that
were read, and which remote code the loaded model comes from. :mod:`kvshelf.weights.configuration`
says what the files mean.

Contracts
---------
* Rank 0 reads for all ranks, on the thread that fingerprints the weights, and only local files: of
  a hub's repository the snapshot of the commit that vLLM has parsed.
* A file that was written after vLLM began to make its configuration may be another than the one
  that vLLM parsed: the configuration is unknown then. Files of hub snapshots name their content,
  and what vLLM pulled from an object storage it wrote itself.

vLLM: ``engine/arg_utils.py`` (``EngineArgs.create_engine_config``),
``transformers_utils/config.py`` (``get_config``), ``config/model.py``
(``maybe_pull_model_tokenizer_for_runai``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvshelf.errors import ConfigError
from kvshelf.vllm.options import check_options
from kvshelf.weights.configuration import (
    READ_NO_TOKEN_IDS,
    code_lines,
    config_files,
    published_lines,
)

#: Variable with the time at which vLLM began to make its configuration, for the engine's processes.
_BEGAN: Final = "_KVSHELF_ENGINE_BEGAN"
_OWN_MODELS: Final = "vllm.model_executor.models."


@dataclass(frozen=True, slots=True)
class Published:
    """The fields `config` and `code` of a namespace record."""

    config: tuple[str, ...] = ()
    code: tuple[str, ...] = ()


@functools.cache
def note_begins() -> None:
    """Record for an engine's processes when vLLM began to make its configuration. Idempotent.

    Options are checked first: this is the process that the user started, and there is no worker.
    """
    from vllm.engine.arg_utils import EngineArgs

    create: Any = EngineArgs.create_engine_config

    @functools.wraps(create)
    def create_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_options(self.kv_transfer_config)
        # Processes that are started for the engine inherit it.
        os.environ[_BEGAN] = repr(time.time())
        return create(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_and_note


def read_published(vllm_config: Any, classes: Iterable[type], process_began: float) -> Published:
    """Return what the model publishes. Blocks while files are read.

    Parameters
    ----------
    vllm_config : VllmConfig
    classes : Iterable of type
        The classes of the loaded model's modules.
    process_began : float
        When this process began, in seconds since the epoch, for processes that do not know when
        vLLM began to make the configuration.

    Raises
    ------
    ConfigError
        If the configuration that vLLM has parsed is not available.
    OSError
        If a file cannot be read.
    """
    model = vllm_config.model_config
    parsed = (getattr(model, name, None) for name in ("hf_config", "hf_text_config"))
    code = code_lines([*classes, *map(type, parsed)])
    folder = config_folder(vllm_config)
    if folder is None:
        return Published((), code)
    config_format = str(getattr(model, "config_format", "auto"))
    lines = published_lines(folder, config_format=config_format, token_ids=_reads_token_ids(model))
    if not getattr(model, "model_weights", ""):
        began = float(os.environ.get(_BEGAN, process_began))
        files = config_files(folder, config_format=config_format)
        unknown = "it is not known which configuration the engine has: restart it"
        check_unchanged([folder], files, began, unknown)
    return Published(lines, code)


def attention_temperature(modules: Iterable[object]) -> tuple[str, ...]:
    """Return the field `attention_temperature` of a namespace record for a rank's layers.

    vLLM decides on it when it builds Llama 4, by ``--max-model-len`` and the generation's
    configuration, and only the modules show it (vllm/model_executor/models/llama4.py).
    """
    return tuple(
        sorted(
            {
                f"{float(module.floor_scale)!r} {float(module.attn_scale)!r}"
                for module in modules
                if getattr(module, "attn_temperature_tuning", False)
                and hasattr(module, "floor_scale")
                and hasattr(module, "attn_scale")
            }
        )
    )


def config_folder(vllm_config: Any) -> Path | None:
    """Return the folder that has the configuration; None where the weights' file holds it.

    Raises
    ------
    ConfigError
        If this machine has no such folder.
    """
    model = vllm_config.model_config
    source = str(getattr(model, "hf_config_path", None) or model.model)
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return None
    commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    for cache in dict.fromkeys((None, getattr(vllm_config.load_config, "download_dir", None))):
        with contextlib.suppress(ConfigError):
            return hub_snapshot(source, commit or getattr(model, "revision", None), cache)
    if (folder := _modelscope_folder(model, vllm_config.load_config)) is not None:
        return folder
    raise ConfigError(
        f"the model's configuration is not on this machine: {source} is neither a folder nor a"
        " snapshot in its cache of Hugging Face. Set --hf-config-path to a folder with it"
    )


def _modelscope_folder(model: Any, load_config: Any) -> Path | None:
    """Return where ModelScope's cache has a model; None without one (``VLLM_USE_MODELSCOPE``)."""
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() not in ("1", "true"):
        return None
    try:
        from modelscope.hub.snapshot_download import snapshot_download

        folder = snapshot_download(
            model_id=str(model.model),
            revision=model.revision,
            cache_dir=load_config.download_dir,
            local_files_only=True,
        )
    except (ImportError, OSError, ValueError):
        return None
    return Path(folder)


def check_unchanged(
    folders: Iterable[Path], files: Iterable[Path], began: float, unknown: str
) -> None:
    """Refuse files that may be others than those that vLLM has read.

    Parameters
    ----------
    folders, files : Iterable of Path
        The folders that were read, by any links, and the files. Links of a hub's snapshot name
        their content, so the engine may have made them.
    began : float
        When vLLM began to read, at the earliest; in seconds since the epoch.
    unknown : str
        What is not known then, for the message.

    Raises
    ------
    ConfigError
        If a link was made or a file was written after that time.
    """
    links = {link for folder in folders for link in links_along(folder)}
    changed = [f"the link {link} was made" for link in links if link.lstat().st_ctime > began]
    changed += [f"{file} was written" for file in files if written_after(file, began)]
    if changed:
        raise ConfigError(f"{changed[0]} after the engine began to start, so {unknown}")


def written_after(file: Path, when: float) -> bool:
    """Whether a file was written after a time, in seconds since the epoch; no link of a hub is."""
    status = file.stat()
    return not is_hub_link(file) and max(status.st_mtime, status.st_ctime) > when


def hub_snapshot(name: str, revision: str | None, cache: str | None = None) -> Path:
    """Return the folder of a repository in this machine's cache of Hugging Face.

    Raises
    ------
    ConfigError
        If the cache, by default that of this user, does not have it.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name} is neither a folder nor a snapshot in this machine's cache of Hugging Face"
        ) from error


def _reads_token_ids(model: Any) -> bool:
    """Whether the model's class may read the ids of tokens that begin, end and pad a text."""
    name = getattr(model, "architecture", None)
    if name not in READ_NO_TOKEN_IDS or model.using_transformers_backend():
        return True
    module_name = getattr(model.registry.models.get(name), "module_name", "")
    return not str(module_name).startswith(_OWN_MODELS)


def is_hub_link(file: Path) -> bool:
    """Whether a file is a link of a hub's snapshot, whose target is named by its content."""
    return file.is_symlink() and Path(os.readlink(file)).parent.name == "blobs"


def links_along(path: Path) -> Iterator[Path]:
    """Yield the symbolic links that resolving a path follows; the path must exist."""
    path = Path(os.path.abspath(path))
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            yield part
            yield from links_along(part.parent / os.readlink(part))
