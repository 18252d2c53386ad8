"""What turns images, audio and video into KV, beside the weights and the item itself.

Two things do. The **processor** turns an item into the encoder's input, and is made of files beside
the model: another mean of an image processor gives other KV. And the **engine** was started with
options for media and encoders. Both enter the name of an item in the key
(:mod:`kvshelf.vllm.item_ids`) and nothing of the namespace, so engines that differ in them share
the chunks of text.

The processor's files are read as JSON, so the same settings in another order or by another path are
the same. What is left out shapes no encoder input: chat templates and names of classes.

The files are read once. One that was written after the process began to prepare requests, or the
engine to start, may or may not be what the processor was made of. Nothing of media is shared then,
and the log says so once. The same holds from the time on at which a request has settings for its
processor and a file is no longer what it was: vLLM may make a processor from the files for it.

Threads
-------
:func:`processor_of` is used on the threads that prepare requests, :class:`EngineMedia` on the
engine's step thread and a thread of its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvshelf.background import try_to_start
from kvshelf.errors import ConfigError
from kvshelf.vllm.namespace import process_start_time
from kvshelf.vllm.published import hub_snapshot, written_after
from kvshelf.weights.fingerprints import Stamp, stamp_of

logger = logging.getLogger(__name__)

#: Settings of processors, in the model's folder and in the folders in it.
_SETTINGS: Final = ("*processor_config.json", "audio_tokenizer_config.json")
#: Files that name code for a processor, and the names under which they do.
_NAME_CODE: Final = ("config.json", "tokenizer_config.json")
_CODE_OF: Final = re.compile("Auto(Image|Video)?Processor|AutoFeatureExtractor")
#: Settings that do not reach any encoder, anywhere in a file.
_LEFT_OUT: Final = frozenset({"chat_template", "processor_class", "auto_map"})
#: The parts of Mistral's tokenizer files that are about images and audio.
_TEKKEN: Final = ("multimodal", "image", "audio")

#: Architectures whose processor fits images into the longest prompt (``nano_nemotron_vl.py``).
_FIT_INTO_PROMPT: Final = (
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2",
    "NemotronH_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3",
)

_NOT_KNOWN: Final = (
    "KV of images, audio and video is neither loaded nor stored: it is not known what the processor"
    " was made of (%s). Restart the engine"
)


class ProcessorFiles:
    """The files that make a model's processor.

    Parameters
    ----------
    model : ModelConfig

    Raises
    ------
    ConfigError
        If they are not on this machine.
    """

    def __init__(self, model: Any) -> None:
        commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
        #: Object storage: vLLM copied the files while it started.
        self._copied = bool(getattr(model, "model_weights", ""))
        self.folder = _folder(str(model.model), commit or model.revision)
        self._settings = sorted(
            file
            for folder in _places(self.folder)
            for pattern in _SETTINGS
            for file in folder.glob(pattern)
        )
        self._code = sorted(self._code_files(model)) if model.trust_remote_code else []
        self._tokenizers = sorted(self._tokenizer_files(model))

    def stamps(self) -> list[tuple[Path, Stamp]]:
        """Return what changes when a file does, or when there is another one."""
        files = (*self._settings, *self._code, *self._tokenizers)
        return [(file, stamp_of(file.stat())) for file in files]

    def digest(self, since: float) -> str:
        """Return the digest of all files.

        Raises
        ------
        ConfigError
            If one changed after that time.
        ValueError
            If one is not JSON.
        """
        lines = [
            *(
                f"{file.relative_to(self.folder)} {_digest_of(_read(file))}"
                for file in self._settings
            ),
            *(
                f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}"
                for file in self._code
            ),
        ]
        for file in self._tokenizers:
            if file.suffix != ".json":
                lines.append(file.name)
            elif parts := {
                name: content for name, content in _read(file).items() if name in _TEKKEN
            }:
                lines.append(f"{file.name} {_digest_of(parts)}")
        # Last, so that what was read is older.
        for file in (*self._settings, *self._code, *self._tokenizers):
            if not self._copied and written_after(file, since):
                raise ConfigError(f"{file} was written after the process began to start")
        return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()

    def _code_files(self, model: Any) -> Iterator[Path]:
        """Yield the modules among which the processor's are, where it has code of its own."""
        other_repositories = set()
        named = False
        for file in (*self._settings, *(self.folder / name for name in _NAME_CODE)):
            content = _read(file) if file.is_file() else {}
            for name, places in (content.get("auto_map") or {}).items():
                if _CODE_OF.fullmatch(name):
                    named = True
                    for reference in [places] if isinstance(places, str) else places:
                        repository, separator, _ = str(reference).rpartition("--")
                        other_repositories |= {repository} if separator else set()
        if named:
            yield from self.folder.glob("*.py")
        for repository in other_repositories:
            yield from _folder(repository, getattr(model, "code_revision", None)).glob("*.py")

    def _tokenizer_files(self, model: Any) -> Iterator[Path]:
        """Yield Mistral's tokenizer files, which also hold the settings for images and audio."""
        name, revision = model.tokenizer, model.tokenizer_revision
        if name is None or (name, revision) == (model.model, model.revision):
            folder = self.folder
        else:
            try:
                folder = _folder(str(name), revision)
            except ConfigError:
                if model.skip_tokenizer_init:
                    return
                raise
        yield from folder.glob("tekken*.json")
        yield from (
            file for file in folder.glob("*.model.v*") if re.fullmatch(r".*\.v\d+m\d+", file.name)
        )


def _places(folder: Path) -> Iterator[Path]:
    yield folder
    yield from (
        entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )


def _folder(name: str, revision: str | None) -> Path:
    """Return the folder on this machine with a model of this name; never contacts a hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    from vllm.transformers_utils.utils import convert_model_repo_to_path

    path = Path(convert_model_repo_to_path(name))
    if path.is_dir():
        return path
    return hub_snapshot(name, revision)


def _read(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content


def _digest_of(content: Any) -> str:
    text = json.dumps(_kept(content), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _kept(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _kept(value) for name, value in content.items() if name not in _LEFT_OUT}
    return [_kept(value) for value in content] if isinstance(content, list) else content


def engine_start_time() -> float:
    """Return when the engine's first process that is known here started, in seconds since 1970."""
    parent = multiprocessing.parent_process()
    started = process_start_time()
    return started if parent is None else min(started, process_start_time(parent.pid))


def processor_digest(model: Any, since: float) -> str | None:
    """Return the digest of a model's processor; None where it is not known what it was made of.

    Parameters
    ----------
    model : ModelConfig
    since : float
        When the process that uses the processor began to make it, at the earliest; in seconds
        since 1970.
    """
    try:
        return ProcessorFiles(model).digest(since)
    except Exception as error:  # noqa: BLE001 - logged; no request fails
        logger.warning(_NOT_KNOWN, error)
        return None


#: By model: the digest, and the files' stamps from before they were read.
_digests: dict[tuple[str, ...], tuple[str | None, object]] = {}
_digests_lock = threading.Lock()


def processor_of(model: Any, since: float, *, made_anew: bool = False) -> str | None:
    """Return this process's digest of a model's processor, as :func:`processor_digest` does.

    Parameters
    ----------
    model : ModelConfig
    since : float
    made_anew : bool
        vLLM may make a processor now. From then on the digest is None if the files have changed.
    """
    names = ("model", "revision", "tokenizer", "tokenizer_revision", "code_revision")
    key = tuple(str(getattr(model, name, None)) for name in (*names, "trust_remote_code"))
    with _digests_lock:
        if key not in _digests:
            stamps_before = _stamps(model)
            _digests[key] = processor_digest(model, since), stamps_before
        digest, stamps_before = _digests[key]
        if (
            made_anew
            and digest is not None
            and (stamps_before is None or stamps_before != _stamps(model))
        ):
            logger.warning(_NOT_KNOWN, "its files have changed")
            _digests[key] = digest, stamps_before = None, None
        return digest


def _stamps(model: Any) -> object:
    """Return the stamps of a processor's files; None if they cannot be read."""
    try:
        return ProcessorFiles(model).stamps()
    except Exception:  # noqa: BLE001 - `processor_of` logs that nothing is known
        return None


def media_options(vllm_config: Any) -> dict[str, Any]:
    """Return what an engine was started with that changes KV of images, audio and video.

    vLLM's identifier of an item covers the settings in its request only (``get_mm_hashes`` in
    vllm/multimodal/processing/inputs.py).
    """
    model = vllm_config.model_config
    settings = getattr(model, "multimodal_config", None)
    processor = dict(getattr(settings, "mm_processor_kwargs", None) or {})
    # This option says where the processor runs, not what it computes.
    processor.pop("device", None)
    options = {
        "mm_processor_kwargs": processor,
        "media_io_kwargs": getattr(settings, "media_io_kwargs", None),
        "mm_encoder_attn_dtype": getattr(settings, "mm_encoder_attn_dtype", None),
    }
    if rate := getattr(settings, "video_pruning_rate", None):
        options["video_pruning"] = [getattr(settings, "video_pruning_method", None), rate]
    if settings is not None and getattr(model, "is_mm_prefix_lm", False) and _is_causal_in_media():
        options["attention_in_media"] = "causal"
    if getattr(model, "architecture", None) in _FIT_INTO_PROMPT:
        options["max_model_len"] = model.max_model_len
    return {name: value for name, value in options.items() if value}


def _is_causal_in_media() -> bool:
    """Whether tokens of an image attend to earlier ones only, whatever the model asks for.

    Other platforms take a backend that attends both ways where a model does (``use_mm_prefix`` in
    vllm/platforms/); CPUs have none.
    """
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def options_digest(options: dict[str, Any]) -> str:
    """Return the digest of :func:`media_options`; empty without any."""
    if not options:
        return ""
    # Values that JSON cannot encode enter by their repr: at worst, nothing is shared.
    return hashlib.sha256(json.dumps(options, sort_keys=True, default=repr).encode()).hexdigest()


class EngineMedia:
    """What an engine does with media, as its scheduler side knows it; found in the background.

    Parameters
    ----------
    vllm_config : VllmConfig

    Attributes
    ----------
    processor : str or None
        The digest of the processor's files; None until it is known, or if it cannot be.
    options : str or None
        The digest of the engine's options, empty for those of vLLM; None until it is known, or if
        outputs of the encoder depend on what it has seen before.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.processor: str | None = None
        self.options: str | None = ""
        settings = getattr(vllm_config.model_config, "multimodal_config", None)
        if settings is None:
            self.processor = ""
            return
        options = media_options(vllm_config)
        scales = None
        if getattr(settings, "mm_encoder_attn_dtype", None) == "fp8":
            scales = getattr(settings, "mm_encoder_fp8_scale_path", None)
            self.options = None
            if scales is None:
                logger.warning(
                    "the encoder scales FP8 by what it has seen (mm_encoder_attn_dtype: fp8"
                    " without mm_encoder_fp8_scale_path), so KV of images, audio and video"
                    " depends on earlier ones and is neither loaded nor stored"
                )
        else:
            self.options = options_digest(options)

        def find() -> None:
            self.processor = processor_digest(vllm_config.model_config, engine_start_time())
            if scales is not None:
                self.options = _with_scales(options, Path(scales))

        if not try_to_start(threading.Thread(target=find, name="kvshelf-media", daemon=True)):
            find()


def _with_scales(options: dict[str, Any], file: Path) -> str | None:
    try:
        content = file.read_bytes()
        if file.stat().st_mtime > engine_start_time():
            raise ConfigError("it was written after the engine began to start")
    except (ConfigError, OSError) as error:
        logger.warning(
            "KV of images, audio and video is neither loaded nor stored: the content of %s is not"
            " known: %s",
            file,
            error,
        )
        return None
    scales = hashlib.sha256(content).hexdigest()
    return options_digest(options | {"mm_encoder_fp8_scales": scales})
