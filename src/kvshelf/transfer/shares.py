"""How the kinds of KV of one worker share its host memory: staging, and the memory tier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from kvshelf.errors import ConfigError
from kvshelf.format.kinds import STATE, Kind
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.topology import ShardPlan
from kvshelf.transfer.staging import bytes_for_stores, least_bytes

_STATE_SHARE: Final = 0.25


def bytes_for_steps(
    formats: Sequence[ObjectFormat], plans: Mapping[Kind, ShardPlan], chunks: int
) -> int:
    """Return how many bytes hold `chunks` chunks of all kinds at once, beside the part of loads.

    Of the states a quarter, as in :func:`share_out`.

    Parameters
    ----------
    formats : Sequence of ObjectFormat
        One for each kind.
    plans : Mapping[Kind, ShardPlan]
        The shards of each kind that this worker reads and writes.
    chunks : int
    """
    total = 0
    for fmt in formats:
        sizes = [fmt.object_size(shard) for shard in plans[fmt.kind].shards]
        count = math.ceil(chunks * _STATE_SHARE) if fmt.kind == STATE else chunks
        # Objects are of different sizes, and each takes the buffer of the largest.
        total += bytes_for_stores(max(sizes), len(sizes), count)
    return total


def share_out(
    total: int,
    formats: Sequence[ObjectFormat],
    plans: Mapping[Kind, ShardPlan],
    *,
    chunks: int = 2,
) -> dict[Kind, int]:
    """Share bytes out among the kinds of a namespace, in proportion to the sizes of a chunk.

    A state counts a quarter of its bytes: of most chunks no state is stored, and a hit loads one.

    Parameters
    ----------
    total : int
    formats : Sequence of ObjectFormat
        One for each kind.
    plans : Mapping[Kind, ShardPlan]
        The shards of each kind that this worker reads and writes.
    chunks : int
        Each kind gets enough for a :class:`~kvshelf.transfer.staging.StagingPool` that holds so
        many chunks; 0: no kind has a minimum. A single kind gets all in any case.

    Raises
    ------
    ConfigError
        If `total` is too little.
    """
    sizes = {
        fmt.kind: [fmt.object_size(shard) for shard in plans[fmt.kind].shards] for fmt in formats
    }
    least = dict.fromkeys(sizes, 0)
    if chunks and len(sizes) > 1:
        least = {kind: least_bytes(max(of), len(of), chunks) for kind, of in sizes.items()}
    needed = sum(least.values())
    if total < needed:
        each = ", ".join(f"{size} for {kind}" for kind, size in least.items())
        raise ConfigError(
            f"staging has {total} bytes, but {chunks} chunks of each kind of this model's KV need"
            f" {needed} bytes ({each}): make chunk_size smaller, or give a ChunkCache"
            f" staging_bytes={needed} or more"
        )
    weights = {
        kind: sum(of) * (_STATE_SHARE if kind == STATE else 1.0) for kind, of in sizes.items()
    }
    shares: dict[Kind, int] = {}
    while len(shares) < len(sizes):
        rest = total - sum(shares.values())
        weight = sum(weights[kind] for kind in sizes if kind not in shares)
        parts = {kind: int(rest * weights[kind] / weight) for kind in sizes if kind not in shares}
        # Kinds whose part would be too small get their minimum; the others share the rest.
        short = {kind: least[kind] for kind, part in parts.items() if part < least[kind]}
        shares |= short or parts
    return {kind: shares[kind] for kind in sizes}
