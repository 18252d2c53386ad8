"""The kinds of KV that objects hold.

Owns the names of the kinds, their order, and the keys by which programs remember something
about one kind of a chunk.

* ``full``: all tokens, which a hit needs of every chunk.
* ``window``: the tensors of sliding-window layers, which a hit needs only of the chunks that
  the windows reach back to.
* ``state``: the state of recurrent layers after the chunk's last token, which a hit needs only
  of its last chunk.

No torch, no storage, no vLLM. Safe to call from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

Kind: TypeAlias = Literal["full", "window", "state", "draft"]

FULL: Final[Kind] = "full"
WINDOW: Final[Kind] = "window"
STATE: Final[Kind] = "state"

#: What an engine moves beside its model's KV: its drafter's, whose objects are of kind full in a
#: namespace of their own.
DRAFT: Final[Kind] = "draft"

#: All kinds of objects, in the order in which lists of kinds are given. New ones come last: their
#: places are bits and columns of inventories.
KINDS: Final[tuple[Kind, ...]] = (FULL, WINDOW, STATE)

#: The bit of each kind where several are one number.
KIND_BITS: Final[dict[Kind, int]] = {kind: 1 << number for number, kind in enumerate(KINDS)}

#: The field of a namespace record with the number of shards of each kind; without layers of kind
#: full, ``shards`` repeats that of the namespace's first kind.
SHARDS_FIELDS: Final[dict[Kind, str]] = {
    FULL: "shards",
    WINDOW: "window_shards",
    STATE: "state_shards",
}


def layers_by_kind(stages: Sequence[int], kinds: Sequence[str]) -> dict[Kind, dict[int, list[int]]]:
    """Return the numbers of the layers of each kind, for each pipeline stage that has some.

    Parameters
    ----------
    stages : Sequence of int
        Layers of each pipeline stage.
    kinds : Sequence of str
        The kind of each layer; empty: all are of kind full.
    """
    stage_of = [stage for stage, count in enumerate(stages) for _ in range(count)]
    of_layer = kinds or [FULL] * len(stage_of)
    layers: dict[Kind, dict[int, list[int]]] = {}
    for kind in KINDS:
        for number, stage in enumerate(stage_of):
            if of_layer[number] == kind:
                layers.setdefault(kind, {}).setdefault(stage, []).append(number)
    return layers


def kind_key(key: bytes, kind: Kind) -> bytes:
    """Return the name of one kind of a chunk, for what a program keeps in memory by key.

    Parameters
    ----------
    key : bytes
        The chunk key.
    kind : Kind

    Returns
    -------
    bytes
        `key` itself for kind full; different for each chunk and kind. No part of the format.
    """
    return key if kind == FULL else key + b"/" + kind.encode()


def kind_of_key(key: bytes) -> Kind:
    """Return the kind that a name made by :func:`kind_key` is of."""
    return next(kind for kind in KINDS if key[32:] == kind_key(b"", kind))
