"""Small namespaces, and the formats of their objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, STATE, WINDOW, Kind
from kvshelf.format.namespace import FORMAT, Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.view import Presence, ShelfView, find_pieces

#: Layers, heads and head size of :func:`make_format`, and tokens in a block of its native layout.
LAYERS, HEADS, HEAD_SIZE, BLOCK = 3, 2, 8, 4


def make_record(
    layers: int = LAYERS,
    shape: str = f"2,*,{HEADS},{HEAD_SIZE}",
    dtype: str = "BF16",
    layout: str = "canonical",
    **fields: Any,
) -> dict[str, Any]:
    """Return the record of a namespace whose layers are alike.

    `fields` come in addition, or in place of those that the layers have in common; a field that is
    None is left out.
    """
    record: dict[str, Any] = {
        "format": FORMAT,
        "weights": "user:test",
        "chunk_size": 8,
        "shards": 2,
        "stages": [layers],
        "layouts": [layout] * layers,
        "layer_names": [f"layers.{i}.attn" for i in range(layers)],
        "layer_shapes": [shape] * layers,
        "layer_dtypes": [dtype] * layers,
        **fields,
    }
    record = {name: value for name, value in record.items() if value is not None}
    record.setdefault("data_offset", ObjectFormat.required_data_offset(record))
    return record


def present(view: ShelfView, chunks: Sequence[Chunk]) -> list[bool]:
    """Return for each of some chunks whether all its objects are found."""
    pieces = [(view.fmt.kind, chunk, range(view.fmt.shards)) for chunk in chunks]
    found = find_pieces({view.fmt.kind: view}, pieces)
    return [set(answers) == {Presence.PRESENT} for answers in found]


def make_format(
    layers: int = LAYERS,
    shape: str = f"2,*,{HEADS},{HEAD_SIZE}",
    dtype: str = "BF16",
    layout: str = "",
    *,
    native: bool = True,
    slug: str = "test",
    **fields: Any,
) -> ObjectFormat:
    """Return the format of such a namespace, by default of blocks as vLLM packs them on CPUs."""
    layout = layout or (f"cpu-vec-bf16-b{BLOCK}" if native else "canonical")
    return ObjectFormat(Namespace(make_record(layers, shape, dtype, layout, **fields), slug))


def hold_buffer() -> Callable[[], None]:
    """Keep a buffer as it is: a ``Hold`` of memory that nobody else uses."""
    return lambda: None


def sealed(fmt: ObjectFormat, chunk: Chunk, shard: int = 0, fill: int | None = None) -> bytearray:
    """Return a whole object.

    Its payload is full of `fill`, or else follows from the chunk and the shard, as if every writer
    had computed it.
    """
    data = bytearray(fmt.object_size(shard, chunk.tokens))
    pattern = chunk.key + bytes([shard]) if fill is None else bytes([fill])
    payload = len(data) - fmt.data_offset
    data[fmt.data_offset :] = (pattern * (payload // len(pattern) + 1))[:payload]
    fmt.seal(memoryview(data), chunk, shard)
    return data


def encode(fmt: ObjectFormat, chunk: Chunk, shard: int, payload: bytes) -> bytearray:
    """Return the object with this payload."""
    data = bytearray(fmt.data_offset) + payload
    fmt.seal(memoryview(data), chunk, shard)
    return data


def hybrid_record(**fields: Any) -> dict[str, Any]:
    """Return the record of six layers in two stages; only the first stage has states."""
    hybrid: dict[str, Any] = {
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
    }
    return make_record(6, **(hybrid | fields))


def hybrid_format(**fields: Any) -> ObjectFormat:
    """Return its format, of kind full unless it has no such layers."""
    return ObjectFormat(Namespace(hybrid_record(**fields), "hybrid"))


def format_of_kinds(shards: Mapping[Kind, int], chunk_size: int = 8, **more: Any) -> ObjectFormat:
    """Return the format of a namespace with one layer of each of some kinds, of the first kind.

    Parameters
    ----------
    shards : Mapping[Kind, int]
        Shards of each kind, in the order of kinds: 1 or 2.
    chunk_size : int
    **more
        Further fields of its record.
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
        kinds=None if list(shards) == [FULL] else list(shards),
        layouts=[fields[kind][0] for kind in shards],
        layer_names=[f"layers.{i}" for i in range(len(shards))],
        layer_shapes=[fields[kind][1] for kind in shards],
        layer_dtypes=[fields[kind][2] for kind in shards],
        **more,
    )
