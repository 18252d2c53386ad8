"""How the records of two namespaces differ, and what to set so that engines share one.

No torch, no storage, no vLLM. Safe to call from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvshelf.format.namespace import Namespace

_SHOWN: Final = 60

#: What to set where a field differs, the likeliest cause first.
_ADVICE: Final[Mapping[str, str]] = {
    "weights": "serve the same weights, or set weights to the same name:<text>",
    "config": "serve the same configuration files",
    "code": "serve the same remote code",
    "attention_temperature": (
        "set attn_temperature_tuning by --override-generation-config, or --max-model-len on the"
        " same side of 32768,"
    ),
    "version": "set version to the same string",
    "chunk_size": "set chunk_size to the same number",
    "kinds": "turn vLLM's hybrid KV cache manager on or off alike",
    "kv_dtype": "set --kv-cache-dtype to the same type",
    "kv_scales": "load the same scales of the KV cache",
    "compute_dtype": "set --dtype to the same type",
    "quantization": "set --quantization to the same method",
    "precision": (
        "choose kernels of one precision by --linear-backend and --moe-backend, with the same"
        " environment variables,"
    ),
    "stages": "set --pipeline-parallel-size to the same number",
    "layouts": "set layout: canonical",
    "shards": "set --tensor-parallel-size to the same number",
}
_OPAQUE: Final = (
    "the layout of the KV cache is unknown: run the same release of vLLM with the same"
    " --tensor-parallel-size, --block-size and attention backend"
)


def differing_fields(own: Namespace, other: Namespace) -> list[str]:
    """Return the names of the fields that differ, the likeliest cause first."""
    ours, theirs = own.record, other.record
    fields = {name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)}
    return [name for name in _ADVICE if name in fields] + sorted(fields - _ADVICE.keys())


def how_to_unite(own: Namespace, other: Namespace) -> str:
    """Return how two namespaces differ, and what to set so that engines share one.

    Parameters
    ----------
    own, other : Namespace
        "Here" and "there". They must differ.
    """
    ours, theirs = own.record, other.record
    field = differing_fields(own, other)[0]
    advice = _ADVICE.get(field, "serve the model with the same configuration")
    if field == "layouts" and _is_opaque(ours) | _is_opaque(theirs):
        advice = _OPAQUE
    return (
        f"{field} is {_shown(theirs.get(field))} there and {_shown(ours.get(field))} here: {advice}"
        " in both engines"
    )


def _is_opaque(record: Mapping[str, Any]) -> bool:
    return any(layout.startswith(("opaque-", "replicated-")) for layout in record["layouts"])


def _shown(value: object) -> str:
    """Return a value of a record: short, and printable even in a forged record."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    text = "absent" if value is None else ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
