"""Builds the namespace record of a vLLM engine.

Owns the mapping from vLLM's configuration and a worker's registered caches to the
fields of the namespace, and the fingerprint of the weights that vLLM loaded. The
record is a pure function of model, weights and layout: nothing that differs between
machines that run the same model may enter.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvshelf.chunkfile import ObjectFormat
from kvshelf.config import Config, cache_dir
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.identity import (
    FORMAT,
    FieldValue,
    FingerprintCache,
    Namespace,
    sampled_fingerprint,
    slugify,
    weight_files,
    weights_fingerprint,
)
from kvshelf.model import default_shards, rope_text
from kvshelf.topology import Topology
from kvshelf.vllm.metadata import WorkerPart

logger = logging.getLogger(__name__)

_DTYPES = {
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.float32": "F32",
}
_FP8 = {"fp8": "F8_E4M3", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}


def stored_dtype(cache_dtype: str, tensor_dtype: str) -> str:
    """Return the safetensors dtype of a KV cache's elements.

    Parameters
    ----------
    cache_dtype : str
        vLLM's ``--kv-cache-dtype``.
    tensor_dtype : str
        ``str(tensor.dtype)`` of the registered cache.

    Raises
    ------
    UnsupportedError
        For packed caches and caches with scales among the data.
    """
    if cache_dtype in _FP8:
        return _FP8[cache_dtype]
    if tensor_dtype in _DTYPES:
        return _DTYPES[tensor_dtype]
    raise UnsupportedError(
        f"KV cache dtype {cache_dtype!r} ({tensor_dtype}) is not supported;"
        " use auto, bfloat16, float16, float32, fp8_e4m3 or fp8_e5m2"
    )


def build_namespace(
    vllm_config: Any, config: Config, stages: Sequence[WorkerPart], weights: str
) -> Namespace:
    """Return the namespace of an engine.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    stages : Sequence of WorkerPart
        The part of one rank of each pipeline stage, in order.
    weights : str
        The weights fingerprint.

    Raises
    ------
    ConfigError
        If `config` does not fit the model or the engine's parallelism.
    """
    model = vllm_config.model_config

    def joined(field: str) -> list[Any]:
        return [value for part in stages for value in getattr(part, field)]

    layouts = joined("layouts")
    attention = joined("attention")
    topology = make_topology(vllm_config, config, len(stages), layouts, attention)
    record: dict[str, FieldValue] = {
        "format": FORMAT,
        "weights": weights,
        "layers": len(layouts),
        "kv_heads": topology.kv_heads,
        "head_sizes": joined("head_sizes"),
        "rope": rope_text(model.hf_text_config, int(model.max_model_len)),
        "sliding_windows": joined("sliding_windows"),
        "attention": attention,
        "compute_dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": _kv_dtype(vllm_config),
        "chunk_size": config.chunk_size,
        "shards": topology.shards,
        "stages": [len(part.layer_names) for part in stages],
        "layouts": layouts,
        "layer_names": joined("layer_names"),
        "layer_shapes": joined("layer_shapes"),
        "layer_dtypes": joined("layer_dtypes"),
    }
    rank = getattr(model.hf_text_config, "kv_lora_rank", None)
    if "mla" in attention and rank:
        record["mla_rank"] = int(rank)
    if model.quantization:
        record["quantization"] = str(model.quantization)
    if scales := joined("kv_scales"):
        # k and v of each layer, as little-endian float32.
        record["kv_scales"] = hashlib.sha256(struct.pack(f"<{len(scales)}f", *scales)).hexdigest()
    if overrides := config_overrides(model, config):
        record["config_overrides"] = overrides
    if config.version:
        record["version"] = config.version
    record["data_offset"] = ObjectFormat.required_data_offset(record)
    return Namespace(record, slugify(str(model.served_model_name or model.model)))


def config_overrides(model: Any, config: Config) -> str | None:
    """Return what stands for changes to the model's configuration, None when there are none.

    Parameters
    ----------
    model : ModelConfig
    config : Config

    Raises
    ------
    ConfigError
        If a function changes the configuration, and no `version` stands for it.
    """
    changes: dict[str, Any] = {}
    for name in ("hf_overrides", "model_class_overrides", "quantization_config"):
        value = getattr(model, name, None)
        if not callable(value):
            if value:
                changes[name] = value
        elif not config.version:
            raise ConfigError(
                f"{name} is a function, so what KV the model computes cannot be told from its"
                " files: set the option version to a string that stands for what it changes"
            )
    if path := getattr(model, "hf_config_path", None):
        changes["hf_config"] = _files_that_say_how(str(path))
    changes |= _multimodal_changes(getattr(model, "multimodal_config", None))
    if not changes:
        return None
    # What JSON does not know is named by its repr: at worst nothing is shared.
    return hashlib.sha256(json.dumps(changes, sort_keys=True, default=repr).encode()).hexdigest()


def _multimodal_changes(settings: Any) -> dict[str, Any]:
    """Return what decides the KV of an item beside the item: its identifier does not tell.

    See ``get_mm_hashes`` in vllm/multimodal/processing/inputs.py: it knows what a request says,
    not what the engine was started with.
    """
    processor = dict(getattr(settings, "mm_processor_kwargs", None) or {})
    # Where it runs, not what it does.
    processor.pop("device", None)
    changes = {
        "mm_processor_kwargs": processor,
        "media_io_kwargs": getattr(settings, "media_io_kwargs", None),
        "mm_encoder_attn_dtype": getattr(settings, "mm_encoder_attn_dtype", None),
    }
    if rate := getattr(settings, "video_pruning_rate", None):
        changes["video_pruning"] = [getattr(settings, "video_pruning_method", None), rate]
    return {name: value for name, value in changes.items() if value}


def _files_that_say_how(path: str) -> dict[str, str] | str:
    """Return digests of the files that configure a model, by name, or a hub's name for them."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return path
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.iterdir())
        if file.suffix in (".json", ".py") and file.is_file()
    }


def manager_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the number of tokens in a block of vLLM's cache manager."""
    groups = getattr(kv_cache_config, "kv_cache_groups", None)
    if groups:
        return int(groups[0].kv_cache_spec.block_size)
    return int(vllm_config.cache_config.block_size)


def make_topology(
    vllm_config: Any,
    config: Config,
    stages: int,
    layouts: Sequence[str],
    attention: Sequence[str],
) -> Topology:
    """Return how an engine's workers divide heads and layers.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    stages : int
        Pipeline stages.
    layouts, attention : Sequence of str
        As in the namespace record, of all layers that are known.

    Raises
    ------
    ConfigError
        If the option `shards` does not fit.
    """
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    kv_heads = total_kv_heads(vllm_config, attention)
    unknown = any(layout.startswith("opaque-") for layout in layouts)
    shards = config.shards or (ranks * stages if unknown else default_shards(kv_heads, stages))
    return Topology(kv_heads, shards, ranks, stages, whole_ranks=unknown)


def total_kv_heads(vllm_config: Any, attention: Sequence[str]) -> int:
    """Return the KV heads of the whole model; MLA keeps one content for all heads."""
    if "mla" in attention:
        return 1
    return int(vllm_config.model_config.get_total_num_kv_heads())


def _kv_dtype(vllm_config: Any) -> str:
    dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype == "auto":
        return str(vllm_config.model_config.dtype).removeprefix("torch.")
    return "fp8_e4m3" if dtype == "fp8" else dtype


def kv_scales(layers: Mapping[str, Any], names: Iterable[str]) -> tuple[float, ...]:
    """Return the scales of k and those of v of each layer: one each, or one for each head.

    Layers that keep something beside KV, such as an indexer's keys, have none.
    """
    return tuple(
        float(value)
        for name in names
        for scale in ("_k_scale", "_v_scale")
        if hasattr(layers[name], scale)
        for value in torch.as_tensor(getattr(layers[name], scale)).flatten().tolist()
    )


def local_model_dir(vllm_config: Any) -> Path:
    """Return the directory that vLLM loaded the weights from.

    Raises
    ------
    FileNotFoundError
        If there is none on this machine.
    """
    model = vllm_config.model_config
    path = Path(str(getattr(model, "model_weights", "") or model.model)).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            str(path),
            revision=model.revision,
            cache_dir=vllm_config.load_config.download_dir,
            local_files_only=True,
        )
    )


def process_start_time() -> float:
    """Return when this process started, in seconds since the epoch."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED_AT


_IMPORTED_AT = time.time()


def _is_hub_link(file: Path) -> bool:
    return file.is_symlink() and Path(os.readlink(file)).parent.name == "blobs"


def _links_on_the_way(path: Path) -> Iterator[Path]:
    """Yield the symbolic links that a path leads through; it must lead somewhere."""
    path = Path(os.path.abspath(path))
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            yield part
            yield from _links_on_the_way(part.parent / os.readlink(part))


class WeightsIdentity:
    """Finds the weights fingerprint in the background of a worker.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    on_known : Callable[[str], None]
        Called on the background thread with the fingerprint.
    on_problem : Callable[[str], None]
        Called on the background thread when there can be none, with what to do.
    on_thread_start : Callable, optional
        Called first on each thread that hashes.
    """

    def __init__(
        self,
        vllm_config: Any,
        config: Config,
        *,
        on_known: Callable[[str], None],
        on_problem: Callable[[str], None],
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._on_known = on_known
        self._on_problem = on_problem
        self._on_thread_start = on_thread_start
        self._cancel = threading.Event()
        self._known: str | None = None

    def start(self) -> None:
        """Begin; a string given by the user is known at once."""
        given = self._config.weights
        if given not in ("content", "sampled"):
            self._known = f"user:{given}"
            self._on_known(self._known)
            return
        if given == "sampled":
            logger.warning(
                "weights: sampled: only samples of the weight files are hashed; two models"
                " that differ elsewhere would share KV. Use it for files that never change."
            )
        self._spawn(self._find)

    def recheck(self) -> None:
        """Look in the background whether the files are still those of the fingerprint."""
        if self._known is not None and not self._known.startswith("user:"):
            self._spawn(self._compare)

    def cancel(self) -> None:
        """Give up."""
        self._cancel.set()

    def _spawn(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - there is nobody else to tell
                if not self._cancel.is_set():
                    self._on_problem(
                        f"the weights could not be fingerprinted ({error}); nothing is stored"
                        " or loaded. Set `weights` to a string that names them"
                    )

        threading.Thread(target=run, name="kvshelf-weights", daemon=True).start()

    def _find(self) -> None:
        self._known = self._fingerprint(changed_since=process_start_time())
        self._on_known(self._known)

    def _compare(self) -> None:
        found = self._fingerprint(changed_since=None)
        if found != self._known:
            self._on_problem(
                "the weight files changed since the engine loaded them; nothing is stored or"
                " loaded until the engine is restarted"
            )

    def _fingerprint(self, changed_since: float | None) -> str:
        load_format = str(getattr(self._vllm_config.load_config, "load_format", "auto"))
        if load_format == "dummy":
            raise ConfigError("load_format=dummy makes random weights, which no file names")
        model = getattr(self._vllm_config.model_config, "hf_config", None)
        for name in ("audio_model_id", "text_model_id"):
            if other := getattr(model, name, None):
                raise ConfigError(f"a part of the weights is those of another model, {other}")
        model_dir = local_model_dir(self._vllm_config)
        files = weight_files(model_dir, load_format)
        if changed_since is not None:
            for link in _links_on_the_way(model_dir):
                if link.lstat().st_ctime > changed_since:
                    raise ConfigError(
                        f"the link {link} was made after the engine began to start, so what"
                        " the engine loaded is not known"
                    )
            for file in files:
                # A hub snapshot's links may be made by the engine itself; they name content.
                status = file.stat()
                changed = max(status.st_mtime, status.st_ctime)
                if not _is_hub_link(file) and changed > changed_since:
                    raise ConfigError(
                        f"{file.name} was written after the engine began to start, so what"
                        " the engine loaded is not known"
                    )
        if self._config.weights == "sampled":
            return sampled_fingerprint(files)
        return weights_fingerprint(
            files,
            cache=FingerprintCache(cache_dir() / "fingerprints.json"),
            cancel=self._cancel,
            on_thread_start=self._on_thread_start,
        )
