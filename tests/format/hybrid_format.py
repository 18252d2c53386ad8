"""A small hybrid namespace with layers of all kinds, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshelf.format.kinds import FULL, STATE, WINDOW, Kind
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat


def hybrid_record(**fields: Any) -> dict[str, Any]:
    """Return the record of six layers in two stages; only the first stage has states."""
    record: dict[str, Any] = {
        "format": "kvshelf/1",
        "chunk_size": 8,
        "stages": [4, 2],
        "shards": 4,
        "window_shards": 8,
        "state_shards": 2,
        "kinds": ["state", "full", "window", "state", "full", "window"],
        "layouts": ["state", "canonical", "canonical", "state", "canonical", "cpu-vec-bf16-b4"],
        "layer_names": [f"layers.{i}" for i in range(6)],
        "layer_shapes": [
            "conv_q:3,8/;conv_k:3,8/;conv_v:3,16/;ssm:4/,4,4",
            "2,*,2,8",
            "2,*,4,8",
            "conv:2,16/",
            "2,*,2,8",
            "2,*,4,8",
        ],
        "layer_dtypes": ["BF16;BF16;BF16;F32", "BF16", "BF16", "F16", "BF16", "BF16"],
        **fields,
    }
    record = {name: value for name, value in record.items() if value is not None}
    if "data_offset" not in record:
        record["data_offset"] = ObjectFormat.required_data_offset(record)
    return record


def hybrid_format(**fields: Any) -> ObjectFormat:
    """Return its format, of kind full unless it has no such layers."""
    return ObjectFormat(Namespace(hybrid_record(**fields), "hybrid"))


def format_of_kinds(shards: Mapping[Kind, int], chunk_size: int = 8) -> ObjectFormat:
    """Return the format of a namespace with one layer of each of some kinds, of the first kind.

    Parameters
    ----------
    shards : Mapping[Kind, int]
        Shards of each kind, in the order of kinds: 1 or 2.
    chunk_size : int
    """
    fields: dict[Kind, tuple[str, str, str]] = {
        FULL: ("canonical", "2,*,2,8", "BF16"),
        WINDOW: ("canonical", "2,*,2,8", "BF16"),
        STATE: ("state", "conv:2,16/;ssm:4/,4", "BF16;F32"),
    }
    first = next(iter(shards))
    return hybrid_format(
        chunk_size=chunk_size,
        stages=[len(shards)],
        shards=shards.get(FULL, shards[first]),
        window_shards=shards.get(WINDOW),
        state_shards=shards.get(STATE),
        kinds=list(shards),
        layouts=[fields[kind][0] for kind in shards],
        layer_names=[f"layers.{i}" for i in range(len(shards))],
        layer_shapes=[fields[kind][1] for kind in shards],
        layer_dtypes=[fields[kind][2] for kind in shards],
    )
