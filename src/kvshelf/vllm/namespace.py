"""Builds the namespace record of a vLLM engine.

Owns the mapping from vLLM's configuration and the workers' reports to the facts of which
:mod:`kvshelf.format.model` makes the namespace record, and the background thread that
fingerprints the weights that vLLM loaded. The record is a pure function of model, weights and
layout: nothing that differs between machines that run the same model may enter.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvshelf.background import try_to_start
from kvshelf.config import Config
from kvshelf.errors import ConfigError, TransientStorageError, UnsupportedError
from kvshelf.format.kinds import STATE, WINDOW, Kind
from kvshelf.format.model import ModelFacts, rope_text
from kvshelf.format.namespace import Namespace
from kvshelf.format.tensors import shape_heads
from kvshelf.kv.topology import Topology, head_groups
from kvshelf.urls import cache_dir, shown_url, weights_name
from kvshelf.vllm.affinity import widen_cpu_affinity
from kvshelf.vllm.metadata import BY_PARAMETERS, LayerScales, WorkerReport
from kvshelf.vllm.published import Published, check_unchanged, hub_snapshot, read_published
from kvshelf.weights.fingerprints import (
    FingerprintCache,
    sampled_fingerprint,
    weight_files,
    weights_fingerprint,
)

logger = logging.getLogger(__name__)

_DTYPES = {
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.float32": "F32",
}
#: How long the start of an engine waits for small files.
_JOIN_SECONDS = 1.0
_NOT_IDENTIFIED = {
    "configuration": "{}; nothing is stored or loaded",
    "weights": (
        "the weights could not be fingerprinted ({}); nothing is stored or loaded. Set `weights` to"
        " `name:` and a text that identifies them"
    ),
}
_FP8 = {"fp8": "F8_E4M3", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}


def check_environment() -> None:
    """Refuse an environment in which vLLM computes KV that the model would not compute.

    Raises
    ------
    UnsupportedError
    """
    name = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
    if os.environ.get(name):
        raise UnsupportedError(
            f"{name} gives each token to experts that the model did not choose, so no other"
            " engine can use its KV: unset it, or remove --kv-transfer-config"
        )


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
        For packed caches and caches that hold scales among the data.
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
    vllm_config: Any, config: Config, stages: Sequence[WorkerReport], weights: str
) -> Namespace:
    """Return the namespace of an engine.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    stages : Sequence of WorkerReport
        Of each pipeline stage, in order, see :func:`unite_ranks`; the first one says what the
        model publishes beside its weights.
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
    kinds = joined("kinds")
    topologies = make_topologies(vllm_config, stages)
    shards = {kind: topology.shards for kind, topology in topologies.items()}
    rank = getattr(model.hf_text_config, "kv_lora_rank", None)
    facts = ModelFacts(
        layers=len(layouts),
        kv_heads=total_kv_heads(vllm_config, attention),
        head_size=tuple(joined("head_sizes")),
        dtype=_kv_dtype(vllm_config),
        fingerprint=weights,
        name=str(model.served_model_name or model.model),
        compute_dtype=str(model.dtype).removeprefix("torch."),
        rope=rope_text(model.hf_text_config, int(model.max_model_len)),
        sliding_windows=tuple(joined("sliding_windows")),
        attention=tuple(attention),
        layer_names=tuple(joined("layer_names")),
        layer_shapes=tuple(joined("layer_shapes")),
        layer_dtypes=tuple(joined("layer_dtypes")),
        layouts=tuple(layouts),
        stages=tuple(len(part.layer_names) for part in stages),
        mla_rank=int(rank) if "mla" in attention and rank else None,
        quantization=str(model.quantization) if model.quantization else None,
        kv_scales=_scales_digest(joined("kv_scales")),
        attention_temperature=tuple(sorted(set(joined("attention_temperature")))),
        precision=tuple(sorted(set(joined("precision")))),
        config=stages[0].config,
        code=stages[0].code,
        config_overrides=config_overrides(model, config),
        kinds=tuple(kinds) or None,
        window_shards=shards.get(WINDOW) if kinds else None,
        state_shards=shards.get(STATE) if kinds else None,
    )
    return facts.namespace(
        chunk_size=config.chunk_size,
        # The shards of full where the namespace has layers of this kind.
        shards=next(iter(shards.values())),
        version=config.version or None,
    )


def _scales_digest(layers: Sequence[LayerScales]) -> str | None:
    """Return the SHA-256 of k and v scales as little-endian float32, None without any."""
    scales = [
        value
        for layer in layers
        for scale in layer
        for value in (scale if isinstance(scale, tuple) else (scale,))
    ]
    if not scales:
        return None
    return hashlib.sha256(struct.pack(f"<{len(scales)}f", *scales)).hexdigest()


def unite_ranks(
    vllm_config: Any, reports: Sequence[WorkerReport], first_rank: int = 0
) -> WorkerReport:
    """Return what one rank that holds all heads would report, without the weights.

    What the model publishes only the first rank knows.

    Parameters
    ----------
    vllm_config : VllmConfig
    reports : Sequence of WorkerReport
        Of all ranks of one pipeline stage, in order.
    first_rank : int
        Number of the first of them.

    Raises
    ------
    ConfigError
        If the ranks differ in more than in the scales of the heads that they hold.
    """
    config, code = reports[0].config, reports[0].code
    plain = [replace(report, weights=None, kv_scales=(), config=(), code=()) for report in reports]
    scales = [report.kv_scales for report in reports]
    for rank in range(len(reports)):
        alike = len(scales[rank]) == len(scales[0]) and all(
            list(map(_heads_with_scales, ours)) == list(map(_heads_with_scales, theirs))
            for ours, theirs in zip(scales[rank], scales[0], strict=True)
        )
        if plain[rank] != plain[0] or not alike:
            raise _ranks_differ(first_rank + rank, first_rank)
    if not scales[0]:
        return replace(plain[0], config=config, code=code)
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    united: list[LayerScales] = []
    for shape, *layers in zip(plain[0].layer_shapes, *scales, strict=True):
        together: list[float | tuple[float, ...]] = []
        for scales_of_ranks in zip(*layers, strict=True):
            parts = [scale if isinstance(scale, tuple) else (scale,) for scale in scales_of_ranks]
            copies = 1
            if isinstance(scales_of_ranks[0], float):
                copies = ranks
            elif len(parts[0]) == 1 and (heads := shape_heads(shape)):
                copies = ranks // head_groups(heads, ranks)
            for rank, part in enumerate(parts):
                # Neighbours hold the same head, and ranks of prefill context the same heads.
                if part != parts[rank % ranks // copies * copies]:
                    raise _ranks_differ(first_rank + rank, first_rank)
            if isinstance(scales_of_ranks[0], float):
                together.append(scales_of_ranks[0])
            else:
                together.append(tuple(itertools.chain.from_iterable(parts[:ranks:copies])))
        united.append(tuple(together))
    return replace(plain[0], kv_scales=tuple(united), config=config, code=code)


def _heads_with_scales(scale: float | tuple[float, ...]) -> int:
    """Return how many heads have a scale of their own on a rank; 0 where all have the same."""
    return len(scale) if isinstance(scale, tuple) else 0


def _ranks_differ(rank: int, first: int) -> ConfigError:
    return ConfigError(
        f"the KV caches of rank {rank} differ from those of rank {first} of the same stage in"
        " layers, shapes, layout or scales, or in the precision in which they are computed: run all"
        " ranks on machines of one kind, with one version of vLLM and the same environment"
    )


def config_overrides(
    model: Any, config: Config, media: Mapping[str, Any] | None = None
) -> str | None:
    """Return a digest of what changes the model's published configuration; None without changes.

    Parameters
    ----------
    model : ModelConfig
    config : Config
    media : Mapping, optional
        Options for images, audio and video, where no name of an item holds them.

    Raises
    ------
    ConfigError
        If a function changes the configuration and no `version` stands for that change.
    """
    changes: dict[str, Any] = {}
    for name in ("hf_overrides", "model_class_overrides", "quantization_config"):
        value = getattr(model, name, None)
        if not callable(value):
            if value:
                changes[name] = _with_file(value)
        elif not config.version:
            raise ConfigError(
                f"{name} is a function, so its KV does not follow from the model's files:"
                " set the option version to a string that stands for the change"
            )
    changes |= media or {}
    if not changes:
        return None
    # Values that JSON cannot encode enter by their repr: at worst, nothing is shared.
    return hashlib.sha256(json.dumps(changes, sort_keys=True, default=repr).encode()).hexdigest()


def _with_file(overrides: Any) -> Any:
    """Return overrides with the content of the quantization's file in place of its path."""
    name = "quantization_config_file"
    if not isinstance(overrides, Mapping) or name not in overrides:
        return overrides
    content = Path(overrides[name]).expanduser().read_bytes()
    return {**overrides, name: hashlib.sha256(content).hexdigest()}


def context_ranks(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return over how many ranks the tokens of a block are spread.

    Only decode context parallelism spreads them; with prefill context parallelism alone every rank
    holds all tokens.
    """
    groups = getattr(kv_cache_config, "kv_cache_groups", None)
    if groups and not getattr(groups[0].kv_cache_spec, "dcp_sharded", True):
        return 1
    return int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1))


def manager_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the number of tokens in a block of vLLM's cache manager."""
    groups = getattr(kv_cache_config, "kv_cache_groups", None)
    cache = groups[0].kv_cache_spec if groups else vllm_config.cache_config
    return int(cache.block_size) * context_ranks(vllm_config, kv_cache_config)


def stage_ranks(vllm_config: Any) -> int:
    """Return the number of ranks of each pipeline stage."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size) * _prefill_context(parallel)


def local_ranks(vllm_config: Any) -> int:
    """Return the number of the engine's ranks on this machine."""
    parallel = vllm_config.parallel_config
    ranks = int(getattr(parallel, "local_world_size", parallel.tensor_parallel_size))
    return ranks * max(1, int(getattr(parallel, "data_parallel_size_local", 1)))


def _prefill_context(parallel: Any) -> int:
    return int(getattr(parallel, "prefill_context_parallel_size", 1))


def make_topologies(
    vllm_config: Any,
    stages: Sequence[WorkerReport],
    *,
    decode_context: int = 1,
) -> dict[Kind, Topology]:
    """Return how heads and layers of each kind are divided over an engine's workers.

    Parameters
    ----------
    vllm_config : VllmConfig
    stages : Sequence of WorkerReport
        The report of one rank of each pipeline stage, in order.
    decode_context : int
        Ranks over which the tokens of a block are spread, see :func:`context_ranks`.

    Returns
    -------
    dict
        In the order of kinds. The stages of a topology are those that have layers of its kind.

    Raises
    ------
    ConfigError
        If the heads cannot be spread over the ranks.
    """
    fields = ("layouts", "layer_shapes", "layer_dtypes", "kinds")
    record: dict[str, Any] = {
        name: [item for part in stages for item in getattr(part, name)] for name in fields
    }
    attention = [item for part in stages for item in part.attention]
    record |= {
        "stages": [len(part.layer_names) for part in stages],
        "kv_heads": total_kv_heads(vllm_config, attention),
    }
    if not record["kinds"]:
        del record["kinds"]
    return topologies_of(vllm_config, record, decode_context=decode_context)


def topologies_of(
    vllm_config: Any, record: Mapping[str, Any], *, decode_context: int = 1
) -> dict[Kind, Topology]:
    """Return how heads and layers of a namespace are divided over an engine's workers.

    Parameters
    ----------
    vllm_config : VllmConfig
    record : Mapping
        The namespace record.
    decode_context : int
        As for :func:`make_topologies`.

    Returns
    -------
    dict
        As :func:`make_topologies`.

    Raises
    ------
    ConfigError
        If the namespace is of another engine.
    """
    parallel = vllm_config.parallel_config
    stated = _stated_kv_heads(vllm_config.model_config) if record["kv_heads"] > 1 else ()
    return Topology.of(
        record,
        int(parallel.tensor_parallel_size),
        prefill_context=_prefill_context(parallel),
        decode_context=decode_context,
        more_heads=stated,
    )


def _stated_kv_heads(model: Any) -> set[int]:
    """Return the numbers of KV heads that vLLM's configuration states for single layers."""
    arch = getattr(model, "model_arch_config", None)
    overrides = getattr(arch, "per_layer_overrides", None) or ()
    return {
        int(override["total_num_kv_heads"])
        for override in overrides
        if override.get("total_num_kv_heads")
    }


def layer_kv_heads(vllm_config: Any, name: str, heads: int) -> int | None:
    """Return the KV heads of one layer in the whole model.

    Parameters
    ----------
    vllm_config : VllmConfig
    name : str
        The layer's name.
    heads : int
        The layer's heads on one rank.

    Returns
    -------
    int or None
        None if vLLM's configuration does not say of which head ranks hold a copy.
    """
    model = vllm_config.model_config
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    stated = int(model.get_total_num_kv_heads())
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    arch = getattr(model, "model_arch_config", None)
    if len(numbers) == 1 and numbers[0] < len(getattr(arch, "per_layer_overrides", None) or ()):
        stated = int(arch[numbers[0]].total_num_kv_heads)  # type: ignore[index]
    if heads == max(1, stated // ranks):
        return heads * head_groups(stated, ranks)
    # Only a rank's single head can be a copy (vllm/model_executor/layers/linear.py).
    return None if heads == 1 and ranks > 1 else heads * ranks


def total_kv_heads(vllm_config: Any, attention: Sequence[str]) -> int:
    """Return the number of KV heads of the whole model; MLA stores one content for all heads."""
    if "mla" in attention:
        return 1
    return int(vllm_config.model_config.get_total_num_kv_heads())


def _kv_dtype(vllm_config: Any) -> str:
    dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype == "auto":
        return str(vllm_config.model_config.dtype).removeprefix("torch.")
    return "fp8_e4m3" if dtype == "fp8" else dtype


def kv_scales(layers: Mapping[str, Any], names: Iterable[str]) -> tuple[LayerScales, ...]:
    """Return the k and v scale of each layer, or those of each head that this rank holds.

    Layers that store something other than KV, such as an indexer's keys, have no scales.
    """
    return tuple(
        tuple(
            _scale_of(layers[name], torch.as_tensor(getattr(layers[name], scale)))
            for scale in ("_k_scale", "_v_scale")
            if hasattr(layers[name], scale)
        )
        for name in names
    )


def _scale_of(layer: Any, scale: torch.Tensor) -> float | tuple[float, ...]:
    values = tuple(map(float, scale.flatten().tolist()))
    # The scale of a rank's only head looks like that of a layer.
    config = getattr(getattr(layer, "quant_method", None), "quant_config", None)
    scheme = getattr(config, "kv_cache_scheme", None) or {}
    return values if len(values) > 1 or scheme.get("strategy") == "attn_head" else values[0]


def local_model_dir(vllm_config: Any) -> Path:
    """Return the directory from which vLLM loaded the weights.

    Raises
    ------
    ConfigError
        If this machine has no such directory.
    """
    model = vllm_config.model_config
    source = str(getattr(model, "model_weights", "") or model.model)
    if "://" in source:
        raise ConfigError(f"they come from {shown_url(source)}, not from files of this machine")
    path = Path(source).expanduser()
    if path.exists():
        return path
    return hub_snapshot(source, model.revision, vllm_config.load_config.download_dir)


@dataclass(frozen=True, slots=True)
class _WeightSource:
    """Weights that a model reads beside those at the top of its folder, or in their place."""

    repository: str
    #: Empty for the folder of the repository itself.
    subfolder: str
    #: None for what the load format reads.
    patterns: tuple[str, ...] | None


def _own_patterns(modules: Sequence[object]) -> tuple[str, ...] | None:
    """Return by which patterns a model names its own files; None where the load format decides.

    vLLM: ``DefaultModelLoader.get_all_weights``; Cosmos3.
    """
    patterns = getattr(modules[0], "allow_patterns_overrides", None) if modules else None
    return None if patterns is None else tuple(patterns)


def _secondary_weights(modules: Sequence[object], repository: str) -> list[_WeightSource]:
    """Return which weights a loaded model has read beside its own files.

    vLLM: ``DefaultModelLoader.get_all_weights``; Kimi-Audio, Ultravox. MiMo-Audio reads a folder
    when it is built (``_load_audio_tokenizer`` in vllm/model_executor/models/mimo_audio.py).
    """
    sources = []
    for source in getattr(modules[0], "secondary_weights", ()) if modules else ():
        patterns = source.allow_patterns_overrides
        sources.append(
            _WeightSource(
                str(source.model_or_path),
                source.subfolder or "",
                None if patterns is None else tuple(patterns),
            )
        )
    if any(type(source).__name__ == "MiMoAudioTokenizer" for source in modules):
        names = ("model.safetensors", "pytorch_model.bin")
        sources.append(_WeightSource(repository, "audio_tokenizer", names))
    return sources


def process_start_time(pid: int | None = None) -> float:
    """Return when a process started, this one by default, in seconds since the epoch."""
    try:
        fields = Path(f"/proc/{pid or 'self'}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED_AT


_IMPORTED_AT = time.time()


class WeightsIdentity:
    """Finds the weights fingerprint, and what the model publishes, on a worker's background thread.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    on_known : Callable[[str, Published], None]
        Called on that thread with the fingerprint and with what the model publishes
        beside its weights. The fingerprint is :data:`~kvshelf.vllm.metadata.BY_PARAMETERS` where no
        file identifies what vLLM loaded.
    on_problem : Callable[[str], None]
        Called on that thread when there can be no fingerprint, with the reason and what to do.
    modules : Sequence of Module
        Of the loaded model, itself first.
    """

    def __init__(
        self,
        vllm_config: Any,
        config: Config,
        *,
        on_known: Callable[[str, Published], None],
        on_problem: Callable[[str], None],
        modules: Sequence[object] = (),
    ) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._on_known = on_known
        self._on_problem = on_problem
        self._classes = {type(module) for module in modules}
        self._patterns = _own_patterns(modules)
        self._secondary = _secondary_weights(modules, str(vllm_config.model_config.model))
        self._cancel = threading.Event()

    def start(self) -> None:
        """Start; wait a moment where only small files are read.

        Where the system allows no more threads, wait for all.
        """
        given = self._config.weights
        if given == "sampled":
            logger.warning(
                "weights: sampled: only samples of the weight files are hashed; two models"
                " that differ elsewhere would share KV. Use it for files that never change."
            )
        thread = threading.Thread(target=self._run, name="kvshelf-weights", daemon=True)
        if not try_to_start(thread):
            self._run()
        elif weights_name(given) is not None:
            thread.join(_JOIN_SECONDS)

    def cancel(self) -> None:
        """Stop hashing; no problem is reported any more."""
        self._cancel.set()

    def _run(self) -> None:
        part = "configuration"
        try:
            published = read_published(self._vllm_config, self._classes, process_start_time())
            part = "weights"
            weights = self._find()
        except Exception as error:  # noqa: BLE001 - reported to on_problem
            if not self._cancel.is_set():
                self._on_problem(_NOT_IDENTIFIED[part].format(error))
            return
        self._on_known(weights, published)

    def _find(self) -> str:
        if (name := weights_name(self._config.weights)) is not None:
            return f"user:{name}"
        load_format = str(getattr(self._vllm_config.load_config, "load_format", "auto"))
        if load_format == "dummy":
            # Objects of such weights would fill the shelf, and no later engine could load them.
            raise ConfigError(
                "load_format is dummy: no other engine can use KV of these random weights"
            )
        try:
            return self._fingerprint(load_format, process_start_time())
        except (ConfigError, TransientStorageError, OSError) as error:
            logger.info("the weights are named by the loaded parameters, not by files: %s", error)
            return BY_PARAMETERS

    def _fingerprint(self, load_format: str, changed_since: float) -> str:
        model = self._vllm_config.model_config
        other_models = [
            getattr(getattr(model, "hf_config", None), name, None)
            for name in ("audio_model_id", "text_model_id")
        ]
        other_models += [
            source.repository for source in self._secondary if source.repository != str(model.model)
        ]
        if other_model := next(filter(None, other_models), None):
            raise ConfigError(f"a part of the weights comes from another model, {other_model}")
        model_dir = local_model_dir(self._vllm_config)
        files = weight_files(model_dir, load_format, patterns=self._patterns)
        for source in self._secondary:
            folder = model_dir / source.subfolder
            files += weight_files(folder, load_format, patterns=source.patterns)
            if source.subfolder and (configuration := folder / "config.json").is_file():
                # It decides what is computed with these weights, and no other field holds it.
                files.append(configuration)
        files = sorted(set(files))
        folders = {model_dir, *(file.parent for file in files)}
        unknown = "it is not known which weights the engine loaded"
        check_unchanged(folders, files, changed_since, unknown)
        root = model_dir if model_dir.is_dir() else model_dir.parent
        if self._config.weights == "sampled":
            fingerprint = sampled_fingerprint(files, root=root)
        else:
            fingerprint = weights_fingerprint(
                files,
                root=root,
                cache=FingerprintCache(cache_dir() / "fingerprints.json"),
                cancel=self._cancel,
                on_thread_start=widen_cpu_affinity,
            )
        # Once more: what was read may be newer than what the engine loaded.
        check_unchanged(folders, files, changed_since, unknown)
        return fingerprint
