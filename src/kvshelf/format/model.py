"""From facts about a model to its namespace, without an engine.

Owns :class:`ModelFacts`, and the rules by which facts that an engine would read from a
model's configuration become fields of the namespace record.

Contracts
---------
* The record is a pure function of the facts and of chunk size, shards and version. Equal
  facts give equal bytes: a program that states the facts that an engine found shares chunks
  with that engine.
* Nothing is guessed. A fact that is not stated is absent from the record, so the record
  differs from one that states it.
* Only :meth:`ModelFacts.namespace` reads files, those of the weights and of the configuration. It
  blocks while they are hashed, so it must not run on an engine's step thread.
* No torch, no vLLM, no transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, Final

from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.format.kinds import FULL, KINDS, SHARDS_FIELDS, STATE, Kind, layers_by_kind
from kvshelf.format.namespace import FORMAT, FieldValue, Namespace, slugify
from kvshelf.format.objects import ObjectFormat
from kvshelf.urls import cache_dir, names_a_path, weights_name
from kvshelf.weights.configuration import CONFIG, ROPE_FIELDS, published_lines
from kvshelf.weights.fingerprints import (
    FingerprintCache,
    sampled_fingerprint,
    weight_files,
    weights_fingerprint,
)

#: Shards of one stage are the largest divisor of the model's KV heads up to this number.
MAX_SHARDS: Final = 8

#: safetensors dtype of each dtype that a KV cache may have.
STORED_DTYPES: Final[Mapping[str, str]] = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "fp8_e4m3": "F8_E4M3",
    "fp8_e5m2": "F8_E5M2",
}

#: Facts that are fields of the record as they are, if they are stated.
_OPTIONAL_FIELDS: Final = (
    "rope",
    "mla_rank",
    "quantization",
    "kv_scales",
    "attention_temperature",
    "precision",
    "code",
    "config_overrides",
)
#: Facts of which each layer may have its own.
_FIELDS_BY_LAYER: Final = (
    "kv_heads",
    "head_size",
    "sliding_windows",
    "attention",
    "kinds",
    "layer_names",
    "layer_shapes",
    "layer_dtypes",
    "layouts",
)

# Kinds of RoPE whose factors, and so KV, depend on the longest prompt that is served.
_LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope", "su")
# Types of models of whose LongRoPE it is known that only one thing matters: whether that prompt may
# be longer than the original length.
_TWO_SETS_OF_FACTORS: Final = ("minicpm", "minicpm3", "phi3", "phi3_v", "phi4mm", "phimoe")


def default_shards(kv_heads: int, stages: int = 1) -> int:
    """Return the number of shards of a model: a function of the model and its stages only.

    `kv_heads` is the greatest common divisor of the numbers of KV heads of the model's layers.
    """
    per_stage = max(d for d in range(1, MAX_SHARDS + 1) if kv_heads % d == 0)
    return per_stage * stages


def rope_text(config: Any, max_model_len: int | None = None) -> str:
    """Return the RoPE parameters that KV depends on, as compact JSON with sorted keys.

    Parameters
    ----------
    config : object
        Configuration of the decoder, with the attributes that Hugging Face gives it.
    max_model_len : int, optional
        Tokens of the longest prompt that is served, for the kinds of RoPE whose factors
        depend on it. For LongRoPE it decides only whether it exceeds the original length.

    Raises
    ------
    ConfigError
        If the kind of RoPE needs `max_model_len` and it is absent.
    """
    stated = {name: getattr(config, name, None) for name in ROPE_FIELDS}
    parameters = {name: value for name, value in stated.items() if value is not None}
    text = json.dumps(parameters, sort_keys=True, default=str)
    if any(f'"{kind}"' in text for kind in _LENGTH_DEPENDENT_ROPE):
        if max_model_len is None:
            raise ConfigError(
                "the model's RoPE depends on the longest prompt that is served: pass max_model_len"
            )
        parameters["max_model_len"] = _deciding_length(config, text, int(max_model_len))
        parameters["original_max_position_embeddings"] = getattr(
            config, "original_max_position_embeddings", None
        )
    return json.dumps(parameters, sort_keys=True, separators=(",", ":"), default=str)


def _deciding_length(config: Any, text: str, length: int) -> int:
    """Return one length for all with which the factors of RoPE are the same.

    LongRoPE has short factors for prompts up to the original length, and long ones. The lengths
    that stand for them are those with which most engines start: the original one, which vLLM takes
    if it is given none, and the model's longest.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    name = "original_max_position_embeddings"
    original = rope.get(name) if isinstance(rope, Mapping) else None
    original = original or getattr(config, name, None)
    longest = getattr(config, "max_position_embeddings", None)
    is_known = getattr(config, "model_type", None) in _TWO_SETS_OF_FACTORS
    if not is_known or not original or not longest or '"dynamic"' in text:
        return length
    return int(original if length <= original else max(longest, original + 1))


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts about a model, besides tokens, that determine its KV.

    State every fact that determines KV values. Two programs that state the same facts share
    KV, so a fact that is left out, or stated wrongly, can make one load KV of another model.

    Attributes
    ----------
    layers : int
        Layers that have KV of their own.
    kv_heads : int or tuple of int
        KV heads of the whole model: one number for all layers, or one for each (0 for states).
    head_size : int or tuple of int
        Elements of one K, and of one V: one number for all layers, or one for each.
    dtype : str
        Dtype of the KV cache: ``bfloat16``, ``float16``, ``float32``, ``fp8_e4m3``,
        ``fp8_e5m2``. Any other name needs `layer_dtypes`.
    weights : str or path or tuple of paths, optional
        Identifies the weights. A string such as ``name:my-model-v1`` is their name: you promise
        that equal names mean equal weights, as with the option ``weights``. A ``pathlib.Path`` (a
        model's folder or a weight file) or a tuple of paths (the weight files) is fingerprinted.
        Any other string is refused.
    fingerprint : str, optional
        In place of `weights`: the field ``weights`` of a namespace record.
    name : str
        Readable prefix of the namespace's folder; not part of its identity.
    compute_dtype : str, optional
        Dtype in which the model computes; `dtype` when absent.
    rope : str, optional
        RoPE parameters as :func:`rope_text` returns them.
    sliding_windows : tuple of int, optional
        Window of each layer in tokens, −1 for none; no windows when absent.
    attention : tuple of str, optional
        Attention of each layer; ``full`` or ``sliding`` by the windows when absent.
    kinds : tuple of Kind, optional
        Kind of each layer; when absent, all are ``full``, also those with a window. An engine with
        vLLM's hybrid allocator has layers of kind ``window`` and ``state``, any other engine
        has not. Layers of kind ``state`` need `attention`, `layer_names`, `layer_shapes`,
        `layer_dtypes` and `state_shards`.
    window_shards : int, optional
        Shards of windows, over all stages with such layers; by the KV heads of their layers when
        absent.
    state_shards : int, optional
        Shards of states, over all stages with such layers.
    layer_names : tuple of str, optional
        Names of the layers, and so of the stored tensors;
        ``model.layers.<i>.self_attn.attn`` when absent, vLLM's names for most models.
    layer_shapes : tuple of str, optional
        Needed unless all layers hold K and V of `kv_heads` heads: the shape of each, as in
        the namespace record (``*,<content>`` for MLA).
    layer_dtypes : tuple of str, optional
        safetensors dtype in which each layer is stored; that of `dtype` when absent.
    layouts : tuple of str, optional
        Layout id of each layer; ``canonical``, or ``state``, when absent.
    stages : tuple of int, optional
        Layers of each pipeline stage; one stage when absent.
    mla_rank : int, optional
        Rank of the latent KV of MLA, ``kv_lora_rank`` of its configuration.
    quantization : str, optional
        Quantization of the weights.
    kv_scales : str, optional
        SHA-256, 64 hex, of the scales of an fp8 cache.
    attention_temperature : tuple of str, optional
        How layers scale queries by their position, where an engine decides that at its start, as
        the field of this name of a namespace record.
    precision : tuple of str, optional
        In which precision a quantized model computes, as the field of this name of a namespace
        record.
    config : path or Mapping or tuple of str, optional
        The model's configuration as published: its folder, its ``config.json``, the parsed content
        of that, or the field ``config`` of a namespace record. When absent, that in the folder that
        `weights` is, if it has one. A string is refused.
    code : tuple of str, optional
        Remote code of the model, as the field ``code`` of a namespace record; see
        :func:`kvshelf.weights.configuration.code_lines`.
    config_overrides : str, optional
        Text that identifies changes to the model's published configuration.
    """

    layers: int
    kv_heads: int | tuple[int, ...]
    head_size: int | tuple[int, ...]
    dtype: str
    weights: str | os.PathLike[str] | tuple[str | os.PathLike[str], ...] | None = None
    fingerprint: str | None = None
    name: str = "model"
    compute_dtype: str | None = None
    rope: str | None = None
    sliding_windows: tuple[int, ...] | None = None
    attention: tuple[str, ...] | None = None
    kinds: tuple[Kind, ...] | None = None
    window_shards: int | None = None
    state_shards: int | None = None
    layer_names: tuple[str, ...] | None = None
    layer_shapes: tuple[str, ...] | None = None
    layer_dtypes: tuple[str, ...] | None = None
    layouts: tuple[str, ...] | None = None
    stages: tuple[int, ...] | None = None
    mla_rank: int | None = None
    quantization: str | None = None
    kv_scales: str | None = None
    attention_temperature: tuple[str, ...] | None = None
    precision: tuple[str, ...] | None = None
    config: os.PathLike[str] | Mapping[str, Any] | tuple[str, ...] | None = None
    code: tuple[str, ...] | None = None
    config_overrides: str | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and self.fingerprint is not None:
            raise ConfigError("weights and fingerprint are both given: leave one out")
        if isinstance(self.weights, str):
            _named("weights", self.weights)
        if self.fingerprint is not None and names_a_path(self.fingerprint):
            raise _not_identified("fingerprint", self.fingerprint, "it names a path")
        if isinstance(self.config, str):
            raise ConfigError(
                f"config is the text {self.config!r}; expected a pathlib.Path of the model's folder"
                " or config.json, or its parsed content"
            )
        if self.layer_dtypes is None and self.dtype not in STORED_DTYPES:
            dtypes = ", ".join(STORED_DTYPES)
            raise ConfigError(f"dtype is {self.dtype!r}; expected one of {dtypes}")
        if self.layers < 1:
            raise ConfigError(f"layers is {self.layers}; expected at least 1")
        for field in _FIELDS_BY_LAYER:
            value = getattr(self, field)
            if isinstance(value, tuple) and len(value) != self.layers:
                raise ConfigError(f"{field} has {len(value)} entries for {self.layers} layers")
        for kind in self._kinds:
            if kind not in KINDS:
                raise ConfigError(f"kind {kind!r}; expected one of {', '.join(KINDS)}")
        with_heads = zip(self._heads, self._kinds, strict=True)
        if any(heads < 1 and kind != STATE for heads, kind in with_heads):
            raise ConfigError(f"kv_heads is {self.kv_heads}; expected at least 1")
        if self.stages is not None and sum(self.stages) != self.layers:
            raise ConfigError(f"stages are {self.stages}; expected {self.layers} layers in sum")
        if STATE in self._kinds:
            for field in ("attention", "layer_names", "layer_shapes", "layer_dtypes"):
                if getattr(self, field) is None:
                    raise ConfigError(f"{field} is missing: a layer of kind state has no default")
            if self.state_shards is None:
                raise ConfigError("state_shards is missing: it does not follow from other facts")

    @property
    def _heads(self) -> tuple[int, ...]:
        """KV heads of each layer."""
        heads = self.kv_heads
        return heads if isinstance(heads, tuple) else (heads,) * self.layers

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        """Kind of each layer."""
        return self.kinds or (FULL,) * self.layers

    @classmethod
    def from_transformers(
        cls,
        config: Any,
        *,
        weights: str | os.PathLike[str] | None = None,
        fingerprint: str | None = None,
        dtype: str | None = None,
        name: str | None = None,
        max_model_len: int | None = None,
        published: os.PathLike[str] | Mapping[str, Any] | None = None,
    ) -> ModelFacts:
        """Read the facts from a Hugging Face configuration.

        Parameters
        ----------
        config : transformers.PretrainedConfig
            Configuration of a decoder whose layers all keep K and V.
        weights, fingerprint
            As for the class.
        dtype : str, optional
            Dtype of the KV cache; the configuration's when absent.
        name : str, optional
            The configuration's ``name_or_path`` when absent.
        max_model_len : int, optional
            See :func:`rope_text`.
        published : path or Mapping, optional
            The configuration as published, see `config` of the class: `config` here is a parsed
            one, which differs from it.

        Raises
        ------
        UnsupportedError
            If a layer keeps anything other than K and V of each token.
        ConfigError
            If a fact is missing.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        if getattr(text, "kv_lora_rank", None):
            advice = "state its facts with ModelFacts(…)"
            raise UnsupportedError(f"this model keeps latent KV (MLA): {advice}")
        layers = int(text.num_hidden_layers)
        windows = _windows(text, layers)
        dtype_name = dtype or str(getattr(text, "dtype", None) or getattr(config, "dtype", None))
        kv_dtype = dtype_name.removeprefix("torch.")
        if kv_dtype == "None":
            raise ConfigError("the configuration names no dtype: pass dtype")
        # Reading a field that differs by layer from the whole configuration is an error.
        configs = [text]
        if getattr(text, "is_heterogeneous", False):
            configs = list(text.per_layer_config)
        head_sizes, kv_heads = list[int](), list[int]()
        for of in configs:
            heads = of.num_attention_heads
            head_sizes.append(int(getattr(of, "head_dim", None) or of.hidden_size // heads))
            kv_heads.append(int(getattr(of, "num_key_value_heads", None) or heads))
        quantization = getattr(config, "quantization_config", None) or {}
        if isinstance(quantization, Mapping):
            method = quantization.get("quant_method") or ""
        else:
            method = getattr(quantization, "quant_method", "") or ""
        return cls(
            layers=layers,
            kv_heads=tuple(kv_heads) if len(configs) > 1 else kv_heads[0],
            head_size=tuple(head_sizes) if len(configs) > 1 else head_sizes[0],
            dtype=kv_dtype,
            weights=weights,
            fingerprint=fingerprint,
            name=slugify(name or str(getattr(config, "name_or_path", "") or "model")),
            rope=rope_text(text, max_model_len),
            sliding_windows=windows,
            quantization=str(getattr(method, "value", method)) or None,
            config=published,
        )

    def namespace(
        self,
        *,
        chunk_size: int = 256,
        shards: int | None = None,
        version: str | None = None,
        weights: str = "content",
    ) -> Namespace:
        """Return the namespace of this model's KV. Blocks while weight files are hashed.

        Parameters
        ----------
        chunk_size : int
            Tokens in a chunk: the option of this name.
        shards : int, optional
            The option of this name, for full layers; where there are none, for those of the first
            kind that the model has.
        version : str, optional
            The option of this name.
        weights : str
            The option of this name: ``content`` or ``sampled`` selects how weight files are
            fingerprinted; any other string replaces the facts' name of the weights.

        Raises
        ------
        ConfigError
            If facts are missing or contradict each other, or the files cannot be used.
        OSError
            If a weight file cannot be read.
        """
        stages, kinds, size = self.stages or (self.layers,), self._kinds, self.head_size
        sizes = (
            size if isinstance(size, tuple) else [0 if kind == STATE else size for kind in kinds]
        )
        windows = self.sliding_windows or (-1,) * self.layers
        attention = ["full" if window < 0 else "sliding" for window in windows]
        layouts = ["state" if kind == STATE else "canonical" for kind in kinds]
        names = [f"model.layers.{i}.self_attn.attn" for i in range(self.layers)]
        shapes = [f"2,*,{h},{s}" for h, s in zip(self._heads, sizes, strict=True)]
        record: dict[str, FieldValue] = {
            "format": FORMAT,
            "weights": self._weights_field(weights),
            "layers": self.layers,
            "kv_heads": max(self._heads),
            "head_sizes": list(sizes),
            "sliding_windows": list(windows),
            "attention": list(self.attention or attention),
            "compute_dtype": self.compute_dtype or self.dtype,
            "kv_dtype": self.dtype,
            "chunk_size": chunk_size,
            "stages": list(stages),
            "layouts": list(self.layouts or layouts),
            "layer_names": list(self.layer_names or names),
            "layer_shapes": list(self.layer_shapes or shapes),
            "layer_dtypes": list(self.layer_dtypes or [STORED_DTYPES[self.dtype]] * self.layers),
        }
        record |= self._shards_fields(stages, shards)
        if set(kinds) != {FULL}:
            record["kinds"] = list(kinds)
        optional = {field: getattr(self, field) for field in _OPTIONAL_FIELDS}
        optional |= {"config": self._config_field(), "version": version}
        record |= {field: value for field, value in optional.items() if value not in (None, (), [])}
        record["data_offset"] = ObjectFormat.required_data_offset(record)
        return Namespace(record, slugify(self.name))

    def _shards_fields(self, stages: Sequence[int], shards: int | None) -> dict[str, int]:
        """Return the fields of the shards of each kind; `shards` is that of the first kind."""
        layers = layers_by_kind(stages, self._kinds)
        fields = [SHARDS_FIELDS[kind] for kind in layers]
        stated = {"window_shards": self.window_shards, "state_shards": self.state_shards}
        if stated.get(fields[0]) is None:
            stated[fields[0]] = shards
        counts = {field: count for field, count in stated.items() if count is not None}
        for field, members in zip(fields, layers.values(), strict=True):
            if field not in counts:
                common = gcd(*(self._heads[n] for numbers in members.values() for n in numbers))
                model_layers = len(members)
                heads = self.layer_shapes is None
                counts[field] = default_shards(common, model_layers) if heads else model_layers
        return {"shards": shards or counts[fields[0]], **counts}

    def _config_field(self) -> tuple[str, ...] | None:
        if isinstance(self.config, tuple):
            return self.config
        source, folder = self.config, self.weights
        if source is None and isinstance(folder, os.PathLike) and (Path(folder) / CONFIG).exists():
            source = folder
        return None if source is None else published_lines(source)

    def _weights_field(self, option: str) -> str:
        if option not in ("content", "sampled"):
            return f"user:{_named('weights', option)}"
        if self.fingerprint is not None:
            return self.fingerprint
        if isinstance(self.weights, str):
            return f"user:{_named('weights', self.weights)}"
        if self.weights is None:
            advice = "name the weights, or give the model's folder as a Path"
            raise ConfigError(f"weights is missing: {advice}")
        if isinstance(self.weights, os.PathLike):
            files = weight_files(Path(self.weights))
        else:
            files = [Path(file) for file in self.weights]
        if option == "sampled":
            return sampled_fingerprint(files)
        return weights_fingerprint(files, cache=FingerprintCache(cache_dir() / "fingerprints.json"))


def _named(field: str, text: str) -> str:
    """Return the name of weights in a text such as ``name:my-model-v1``."""
    try:
        name = weights_name(text)
    except ValueError as error:
        raise _not_identified(field, text, str(error)) from None
    if name is None:
        raise _not_identified(field, text, "a name of weights begins with name:")
    return name


def _not_identified(field: str, text: str, problem: str) -> ConfigError:
    return ConfigError(
        f"{field} is the text {text!r}: {problem}. Pass weights=pathlib.Path(folder) to identify"
        " files by their content, or a name such as 'name:my-model-v1'"
    )


def _windows(text: Any, layers: int) -> tuple[int, ...]:
    """Return the sliding window of each layer of a Hugging Face configuration, −1 for none."""
    window = int(getattr(text, "sliding_window", None) or 0)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        used = window and getattr(text, "use_sliding_window", True)
        return (window if used else -1,) * layers
    for kind in kinds:
        if kind != "full_attention" and not (kind == "sliding_attention" and window):
            raise UnsupportedError(
                f"the model has layers of kind {kind!r}; only full and sliding attention keep K "
                "and V of each token: state the facts with ModelFacts(…)"
            )
    return tuple(-1 if kind == "full_attention" else window for kind in kinds)
