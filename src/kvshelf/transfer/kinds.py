"""The transfers of one worker, one for each kind of KV (:mod:`kvshelf.format.kinds`).

Owns what holds between them: a :class:`JointLoad` brings all kinds that a hit needs, and fails as
a whole; and the host memory of a worker is shared out among the kinds (:func:`share_out`).

With one kind everything is as with that kind's :class:`~kvshelf.transfer.transfer.Transfer` alone:
a load that fails keeps what lies before the failure.

Contracts
---------
* No method but ``drain`` and ``close`` waits for the storage. Any thread may call all methods.
* A joint load is reported finished once no thread writes to the cache for any of its parts.
* The lock is held for bookkeeping only; no transfer is called with it.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvshelf.errors import ConfigError
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import KINDS, STATE, Kind
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.topology import ShardPlan
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Failure, Load
from kvshelf.transfer.staging import bytes_for_stores, least_bytes
from kvshelf.transfer.stores import StoreOutcome
from kvshelf.transfer.transfer import Transfer

logger = logging.getLogger(__name__)

_STATE_SHARE: Final = 0.25


@dataclass(eq=False, slots=True)
class JointLoad:
    """The loads of one request, one for each kind of KV, and their outcome once ``finished``.

    Attributes
    ----------
    request_id : str
    parts : Mapping[Kind, Load]
        All of them once the load has begun.
    cancelled : bool
        The caller gave it up. Its parts may be cancelled without that, see `failed`.
    finished : bool
        All parts are finished.
    """

    request_id: str
    parts: dict[Kind, Load] = field(default_factory=dict)
    cancelled: bool = False
    finished: bool = False
    #: Number of parts that are not finished.
    _left: int = 0
    #: The other parts were cancelled after one had failed.
    _stopped: bool = False

    @property
    def failed(self) -> bool:
        """Whether a part failed. The other parts are then cancelled."""
        # A copy: another thread may still be starting parts.
        return any(part.failed_at is not None for part in tuple(self.parts.values()))

    @property
    def failures(self) -> list[tuple[Kind, Chunk, Failure]]:
        """The chunks that failed, with the kind and the reason; see :attr:`Load.failures`."""
        return [
            (kind, chunk, failure)
            for kind, part in tuple(self.parts.items())
            for chunk, failure in part.failures
        ]


class KindTransfers:
    """The transfers of the kinds of one namespace.

    Parameters
    ----------
    transfers : Mapping[Kind, Transfer]
        At least one. They are closed together.

    Attributes
    ----------
    transfers : Mapping[Kind, Transfer]
        In the order of :data:`~kvshelf.format.kinds.KINDS`.
    """

    def __init__(self, transfers: Mapping[Kind, Transfer]) -> None:
        self.transfers = {kind: transfers[kind] for kind in KINDS if kind in transfers}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: All loads that are not yet polled, by request.
        self._active: dict[str, JointLoad] = {}
        self._finished: list[JointLoad] = []

    # ------------------------------------------------------------- loads

    def load(self, request_id: str, items: Mapping[Kind, Sequence[ChunkSlots]]) -> JointLoad:
        """Start to load chunks into the paged cache; returns at once.

        Parameters
        ----------
        request_id : str
            Different from those of all loads that are not yet finished.
        items : Mapping[Kind, Sequence[ChunkSlots]]
            The chunks of each kind, in the order of the prompt. At least one kind.
        """
        load = JointLoad(request_id, _left=len(items))
        wanted = [(kind, self.transfers[kind]) for kind in KINDS if kind in items]
        with self._lock:
            self._active[request_id] = load
        # All share the bandwidth of the storage.
        sizes = {kind: len(items[kind]) * transfer.chunk_bytes for kind, transfer in wanted}
        total = sum(transfer.loading_bytes for transfer in self.transfers.values())
        total += sum(sizes.values())
        for kind, transfer in wanted:
            done = functools.partial(self._part_done, load, kind)
            others = max(0, total - transfer.loading_bytes - sizes[kind])
            try:
                load.parts[kind] = transfer.load(
                    request_id, items[kind], bytes_ahead=others, on_done=done
                )
            except Exception as error:
                # Other parts may write to the cache already: the load ends with them.
                logger.error("a part of a load was not started", exc_info=error)
                done(Load(request_id, items[kind], failed_at=0, finished=True))
        return load

    def cancel(self, request_id: str) -> None:
        """Give a load up; see :meth:`kvshelf.transfer.loads.Loads.cancel`."""
        load = self._active.get(request_id)
        if load is not None and not load.finished:
            load.cancelled = True
            self._cancel_parts(load, count=True)

    def _cancel_parts(self, load: JointLoad, *, count: bool) -> None:
        for kind in tuple(load.parts):
            self.transfers[kind].cancel(load.request_id, count=count)
            # One load counts once.
            count = False

    def poll(self, wait: float = 0.0) -> list[JointLoad]:
        """Return the loads that finished since the last call; stop those of which a part failed.

        Parameters
        ----------
        wait : float
            Seconds to wait for the first one while any load is running.
        """
        deadline = time.monotonic() + wait
        while True:
            self._stop_failed()
            with self._lock:
                left = deadline - time.monotonic()
                if self._finished or not self._active or left <= 0:
                    finished, self._finished = self._finished, []
                    for load in finished:
                        if self._active.get(load.request_id) is load:
                            del self._active[load.request_id]
                    return finished
                self._changed.wait(left)

    @property
    def loading(self) -> bool:
        """Whether any load is running or not yet polled."""
        return bool(self._active)

    def _stop_failed(self) -> None:
        """Give up late parts, and those that are useless because another one failed."""
        with self._lock:
            active = [load for load in self._active.values() if not load.finished]
        if not active:
            return
        for transfer in self.transfers.values():
            transfer.check()
        for load in active:
            if len(load.parts) > 1 and load.failed and not load._stopped:
                load._stopped = True
                self._cancel_parts(load, count=False)

    def _part_done(self, load: JointLoad, kind: Kind, part: Load) -> None:
        """Note that a part is finished. Runs with a lock of its transfer held."""
        with self._lock:
            load.parts[kind] = part
            load._left -= 1
            if not load._left:
                load.finished = True
                self._finished.append(load)
            self._changed.notify_all()

    # ------------------------------------------------------------- stores

    def store(self, kind: Kind, item: ChunkSlots, **options: Any) -> StoreOutcome:
        """Gather one chunk of a kind and queue it, see :meth:`Stores.store` for the options."""
        return self.transfers[kind].store(item, **options)

    def take_repaired(self) -> list[bytes]:
        """Return the kind keys whose bad objects were replaced since the last call."""
        return [key for transfer in self.transfers.values() for key in transfer.take_repaired()]

    def take_published(self) -> list[bytes]:
        """Return the kind keys that stores since the last call left on the shelf.

        Empty on low-latency storage.
        """
        return [key for transfer in self.transfers.values() for key in transfer.take_published()]

    def forget_stored(self) -> None:
        """Forget what was published here, so that it is stored again if it is missing."""
        for transfer in self.transfers.values():
            transfer.forget_stored()

    # ------------------------------------------------------------- the end

    def drain(self, seconds: float) -> int:
        """Wait until all stores are published; return how many were not in time."""
        deadline = time.monotonic() + seconds
        return sum(
            transfer.drain(max(0.0, deadline - time.monotonic()))
            for transfer in self.transfers.values()
        )

    def retire(self) -> None:
        """Fail what is being loaded, and publish what is queued, in the background."""
        for transfer in self.transfers.values():
            transfer.retire()

    def end(self, join_seconds: float = 0.0) -> None:
        """End the threads of transfers that were retired; drop what is queued."""
        deadline = time.monotonic() + join_seconds
        for transfer in self.transfers.values():
            transfer.end(max(0.0, deadline - time.monotonic()))

    def close(self, drain_seconds: float = 0.0) -> int:
        """Drain, stop the threads, and return how many chunks were lost."""
        self.drain(drain_seconds)
        return sum(transfer.close() for transfer in self.transfers.values())


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
    option: str,
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
    option : str
        What `total` is called in the configuration.
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
            f"{option} is {total}, but {chunks} chunks of each kind of this model's KV need"
            f" {needed} bytes ({each}): set {option} to {needed} or more, or make chunk_size"
            " smaller"
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
