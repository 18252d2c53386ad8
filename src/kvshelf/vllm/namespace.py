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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
from kvshelf.vllm.metadata import WorkerPart

logger = logging.getLogger(__name__)

_MAX_SHARDS = 8
_DTYPES = {
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.float32": "F32",
}
_FP8 = {"fp8": "F8_E4M3", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}
# RoPE kinds whose factors depend on the engine's maximal length, so that KV does too.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope", "su"}


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


def default_shards(kv_heads: int, stages: int = 1) -> int:
    """Return the number of shards of a model: DESIGN's rule, a function of the model only."""
    per_stage = max(d for d in range(1, _MAX_SHARDS + 1) if kv_heads % d == 0)
    return per_stage * stages


def build_namespace(vllm_config: Any, config: Config, part: WorkerPart) -> Namespace:
    """Return the namespace of an engine.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    part : WorkerPart
        With ``weights`` known.

    Raises
    ------
    ConfigError
        If `config` does not fit the model.
    """
    assert part.weights is not None
    model = vllm_config.model_config
    kv_heads = int(model.get_total_num_kv_heads())
    shards = config.shards or default_shards(kv_heads)
    if kv_heads % shards:
        raise ConfigError(
            f"shards={shards} does not divide the model's {kv_heads} KV heads:"
            f" leave it out or set one of"
            f" {[d for d in range(1, kv_heads + 1) if kv_heads % d == 0]}"
        )
    record: dict[str, FieldValue] = {
        "format": FORMAT,
        "weights": part.weights,
        "layers": len(part.layer_names),
        "kv_heads": kv_heads,
        "head_sizes": list(part.head_sizes),
        "rope": rope_record(model),
        "sliding_windows": list(part.sliding_windows),
        "attention": list(part.attention),
        "compute_dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": _kv_dtype(vllm_config),
        "chunk_size": config.chunk_size,
        "shards": shards,
        "stages": [len(part.layer_names)],
        "layouts": list(part.layouts),
        "layer_names": list(part.layer_names),
        "layer_shapes": list(part.layer_shapes),
        "layer_dtypes": list(part.layer_dtypes),
    }
    if model.quantization:
        record["quantization"] = str(model.quantization)
    if part.kv_scales:
        record["kv_scales"] = part.kv_scales
    if config.version:
        record["version"] = config.version
    record["data_offset"] = ObjectFormat.required_data_offset(record)
    return Namespace(record, slugify(str(model.served_model_name or model.model)))


def _kv_dtype(vllm_config: Any) -> str:
    dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype == "auto":
        return str(vllm_config.model_config.dtype).removeprefix("torch.")
    return "fp8_e4m3" if dtype == "fp8" else dtype


def rope_record(model: Any) -> str:
    """Return everything about RoPE that KV depends on, as compact JSON with sorted keys."""
    hf = model.hf_text_config
    found: dict[str, Any] = {}
    for name in (
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
    ):
        value = getattr(hf, name, None)
        if value is not None:
            found[name] = value
    text = json.dumps(found, sort_keys=True, default=str)
    if any(f'"{kind}"' in text for kind in _LENGTH_DEPENDENT_ROPE):
        found["max_model_len"] = int(model.max_model_len)
        found["original_max_position_embeddings"] = getattr(
            hf, "original_max_position_embeddings", None
        )
    return json.dumps(found, sort_keys=True, separators=(",", ":"), default=str)


def kv_scales_digest(layers: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the SHA-256 of every layer's k and v scale as little-endian float32."""
    digest = hashlib.sha256()
    for name in names:
        layer = layers[name]
        digest.update(struct.pack("<2f", float(layer._k_scale), float(layer._v_scale)))
    return digest.hexdigest()


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
    cpus : set of int, optional
        Processors to hash on, so that the engine's start is not delayed.
    """

    def __init__(
        self,
        vllm_config: Any,
        config: Config,
        *,
        on_known: Callable[[str], None],
        on_problem: Callable[[str], None],
        cpus: set[int] | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._on_known = on_known
        self._on_problem = on_problem
        self._cpus = cpus
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
        model_dir = local_model_dir(self._vllm_config)
        files = weight_files(model_dir, load_format)
        if changed_since is not None:
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
            background=True,
            cancel=self._cancel,
            cpus=self._cpus,
        )
