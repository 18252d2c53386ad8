"""What the parts of the scheduler side share: the state of the engine and of its requests."""

from __future__ import annotations

from dataclasses import dataclass

from kvshelf.vllm.messages import Outbox
from kvshelf.vllm.metadata import Orders
from kvshelf.vllm.scheduler.drafts import DraftScheduler
from kvshelf.vllm.scheduler.engine import Engine
from kvshelf.vllm.scheduler.hits import Hits
from kvshelf.vllm.scheduler.keys import ChunkKeys
from kvshelf.vllm.scheduler.opening import Opening
from kvshelf.vllm.scheduler.part import Part
from kvshelf.vllm.scheduler.requests import Requests
from kvshelf.vllm.scheduler.steps import Steps


@dataclass(frozen=True, slots=True)
class Shared:
    """What each part is given.

    `orders` is what the workers must learn.
    """

    engine: Engine
    requests: Requests
    steps: Steps
    drafts: DraftScheduler
    opening: Opening
    hits: Hits
    keys: ChunkKeys
    orders: Outbox[Orders]


class SharingPart(Part):
    """A part that reads what the parts share.

    Parameters
    ----------
    shared : Shared
    """

    def __init__(self, shared: Shared) -> None:
        self._engine = engine = shared.engine
        self._config, self._groups, self._counters = engine.config, engine.groups, engine.counters
        self._size = engine.config.chunk_size
        self._requests, self._steps = shared.requests, shared.steps
        self._drafts, self._opening = shared.drafts, shared.opening
        self._hits, self._keys, self._orders = shared.hits, shared.keys, shared.orders
