"""A scheduler side in tests: how it is made, stepped and asked, on a shelf of hollow objects.

The only place in these tests that knows where a scheduler side keeps what it knows of a request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import KVConnectorBlockState

from kvshelf.backends import Deadlines
from kvshelf.config import Config
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.names import object_name
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.lookup import Lookup, LookupService
from kvshelf.shelf.shelf import Shelf
from kvshelf.tiers.tiered import AnyShelf
from kvshelf.vllm.connector import SharedStorageConnector
from kvshelf.vllm.groups import CacheGroups
from kvshelf.vllm.item_ids import ItemIds
from kvshelf.vllm.metadata import (
    Facts,
    Orders,
    StepMetadata,
    WeightsReport,
    WorkerMetadata,
    WorkerReport,
)
from kvshelf.vllm.namespace import build_namespace
from kvshelf.vllm.scheduler import Engine, SchedulerSide
from kvshelf.vllm.scheduler.drafts import DraftScheduler
from kvshelf.vllm.scheduler.requests import Awaited
from tests.sim.storage import FaultyStorage, posix
from tests.support.clocks import Clock
from tests.support.waiting import PATIENCE, until, while_patient
from tests.vllm.replay import HEAD_SIZE, HEADS, LAYERS, Request, make_config, make_groups

BLOCK, CHUNK = 4, 8

PART = WorkerReport(
    layer_names=tuple(f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)),
    layer_shapes=(f"2,*,{HEADS},{HEAD_SIZE}",) * LAYERS,
    layer_dtypes=("BF16",) * LAYERS,
    layouts=(f"cpu-vec-bf16-b{BLOCK}",) * LAYERS,
    attention=("full",) * LAYERS,
    head_sizes=(HEAD_SIZE,) * LAYERS,
    sliding_windows=(-1,) * LAYERS,
    weights="user:test",
)


# --------------------------------------------------------------- messages between the sides

_numbers = itertools.count(1)


def next_number() -> int:
    """A number that no load and no message has had."""
    return next(_numbers)


def tell(side: SchedulerSide, rank: int = 0, **facts: Any) -> None:
    """Bring facts to a side, as if a rank had told them between two of its messages."""
    for receive in side._receivers(rank):
        receive(Facts(**facts))


def ordered(**orders: Any) -> StepMetadata:
    """A step that brings orders."""
    return StepMetadata(orders=[(next_number(), Orders(**orders))])


def orders_of(meta: StepMetadata) -> Orders:
    """The orders that a step brings, which are none or one message."""
    (orders,) = [orders for _, orders in meta.orders] or [Orders()]
    return orders


# --------------------------------------------------------------- what a side knows of requests


def lookup_of(side: SchedulerSide, name: str) -> Lookup | None:
    """The lookup of a request, if it has one."""
    return side.requests[name].lookup


def with_lookups(side: SchedulerSide) -> list[str]:
    """The requests that have a lookup."""
    return [name for name, one in side.requests.items() if one.lookup is not None]


def remembers(side: SchedulerSide) -> bool:
    """Whether a side knows anything of any request."""
    lookups = side.lookups
    return bool(side.requests or lookups._ahead or lookups._later or side.loads.planned)


def awaited_of(side: SchedulerSide, name: str) -> Awaited | None:
    """The hand-over that a request has brought, if it runs and has one."""
    state = side.requests.get(name)
    return None if state is None else state.awaited


def waits_for_objects(side: SchedulerSide) -> bool:
    """Whether any request waits for a hand-over, or anything looks for its objects."""
    service = side.handovers._service
    return bool(side.handovers._waiting or (service is not None and service._waits))


def set_clock(side: SchedulerSide, now: float = 1000.0) -> Clock:
    """Give the waits for hand-overs a clock of their own."""
    clock = side.handovers.clock = Clock(now)
    return clock


def take_lookups(side: SchedulerSide) -> LookupService | None:
    """Take a side back to the time before its namespace was known; return what looks up."""
    lookups, side.opening.lookups = side.opening.lookups, None
    side.opening.handshake._deadline = None
    return lookups


def give_lookups(side: SchedulerSide, lookups: LookupService | None) -> None:
    """Undo :func:`take_lookups`."""
    side.opening.lookups = lookups


def drafts_of(side: SchedulerSide) -> DraftScheduler:
    """The drafter's part."""
    return side.drafts


def namespace_of_drafts(side: SchedulerSide) -> Namespace | None:
    """The namespace of the drafter's KV, once it is known."""
    return side.drafts.namespace


def round_of(side: SchedulerSide) -> int:
    """How often weights have been compared."""
    return side.opening.handshake.round


def compares_weights(side: SchedulerSide) -> bool:
    """Whether the weights are being compared."""
    return side.opening.handshake.checking


class Side:
    """A scheduler side whose workers have reported.

    Parameters
    ----------
    root : Path
        Of the shelf.
    known : bool
        Whether the workers have reported.
    change : Callable
        Changes vLLM's configuration.
    ranks, uses, others_transfer
        As for :class:`SchedulerSide`.
    **options
        kvshelf's configuration.
    """

    def __init__(
        self,
        root: Path,
        *,
        known: bool = True,
        change: Callable[[SimpleNamespace], None] = lambda config: None,
        ranks: int = 1,
        uses: Any = None,
        others_transfer: bool = False,
        **options: Any,
    ) -> None:
        self.faults = FaultyStorage(posix(root))
        deadlines = options.pop("deadlines", {})
        self.config = make_config(str(root), **options)
        change(self.config)
        found = Config.load(self.config.kv_transfer_config.kv_connector_extra_config)
        self.shelf: AnyShelf = Shelf(self.faults, deadlines=replace(Deadlines(), **deadlines))
        self.opened = True
        self.uses = uses
        self.side = SchedulerSide(
            Engine(
                self.config,
                found,
                lambda: self.shelf if self.opened else None,
                CacheGroups(self.config, None),
                ranks=ranks,
                uses=uses,
                others_transfer=others_transfer,
            )
        )
        self.fmt = ObjectFormat(build_namespace(self.config, found, [PART], "user:test"))
        #: What images are called in keys.
        self.item_ids = ItemIds(self.config, found.trust_uuids, Counters())
        if known:
            self.report(reports={0: PART})
            self.report()

    def chunks(self, tokens: list[int], **options: Any) -> list[Chunk]:
        """The chunks of a prompt."""
        return KeyChain(self.fmt.namespace.digest, CHUNK, **options).extend(tokens)

    def keys(self, request: Request) -> set[bytes]:
        """The keys of a request's chunks."""
        return {chunk.key for chunk in self.chunks(request.prompt_token_ids)}

    def put(self, tokens: list[int], count: int | None = None, **options: Any) -> None:
        """Put the first chunks of a prompt on the shelf."""
        for chunk in self.chunks(tokens, **options)[:count]:
            self.put_chunk(chunk)

    def put_chunk(self, chunk: Chunk) -> None:
        """Put a chunk or a tail on the shelf."""
        for shard in range(self.fmt.shards):
            name = f"{self.fmt.namespace.folder}/{object_name(chunk, shard, self.fmt.shards)}"
            size = self.fmt.object_size(shard, chunk.tokens if chunk.tail else None)
            self.faults.write(name, [bytes(size)])

    def lookup(self, name: str) -> Lookup:
        """The lookup of a request."""
        lookup = lookup_of(self.side, name)
        assert lookup is not None
        return lookup

    def looked_up(self, name: str) -> Lookup:
        """The lookup of a request, once it is done."""
        lookup = self.lookup(name)
        assert lookup.wait(PATIENCE)
        return lookup

    def known(self, name: str, tokens: list[int], **options: Any) -> Request:
        """A request whose lookup is done and which no step has admitted yet."""
        request = Request(name, tokens, **options)
        self.side.new_request(request)
        until(lambda: (lookup := lookup_of(self.side, name)) is not None and lookup.done)
        return request

    def with_lookups(self) -> list[str]:
        """The requests that have a lookup."""
        return with_lookups(self.side)

    def remembers(self) -> bool:
        """Whether anything is known of any request."""
        return remembers(self.side)

    def report(self, **fields: Any) -> None:
        """Bring what all workers say, as the fields of ``WorkerMetadata`` say."""
        heard = dict.fromkeys(range(self.side.engine.ranks), 0)
        self.side.worker_output(WorkerMetadata(heard, **fields))

    def reset(self) -> None:
        """Reset the cache as vLLM does; the workers find the weights of the start."""
        self.side.reset()
        found = WeightsReport(round_of(self.side), "aa", "aa")
        self.report(weights=dict.fromkeys(range(self.side.engine.ranks), found))
        self.report()

    def tell(self, rank: int = 0, **facts: Any) -> None:
        """Bring facts that a rank tells."""
        tell(self.side, rank, **facts)

    def took(self, name: str, seconds: float) -> None:
        """Tell how long the load of a request took."""
        self.tell(load_seconds=[(self.side.requests[name].load, name, seconds)])

    def fail(self, key: bytes, *, bad: bool = False) -> None:
        """Report that a chunk could not be loaded."""
        self.tell(failures=[(key, bad)])

    def load(self, request: Request, tokens: int) -> None:
        """Give a request blocks, and have it load so many tokens."""
        blocks = -(-request.num_tokens // BLOCK)
        self.side.allocated(request, ([*range(1, blocks + 1)],), tokens)

    def ask(self, request: Request, computed: int = 0) -> int:
        """Ask as vLLM does, step by step, until there is an answer."""
        for _ in while_patient():
            found = self.side.matched_tokens(request, computed)
            if found is not None:
                return found
            self.step()
        raise AssertionError("no answer")

    def step(
        self,
        scheduled: dict[str, tuple[int, int]] | None = None,
        *,
        new: tuple[str, ...] = (),
        preempted: tuple[str, ...] = (),
        blocks: Callable[[str], tuple[list[int], ...]] = lambda _: (list(range(1, 100)),),
        sync_loads: bool = False,
        silent: frozenset[int] = frozenset(),
    ) -> StepMetadata:
        """Build a step in which requests compute ``(computed before, scheduled)`` tokens.

        All ranks answer it at once, but for those that are `silent`.
        """
        scheduled = scheduled or {}
        cached = [r for r in scheduled if r not in new]
        meta = self.side.step_metadata(
            SimpleNamespace(
                scheduled_new_reqs=[
                    SimpleNamespace(
                        req_id=r, num_computed_tokens=scheduled[r][0], block_ids=blocks(r)
                    )
                    for r in new
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=cached,
                    num_computed_tokens=[scheduled[r][0] for r in cached],
                    new_block_ids=[None for _ in cached],
                    resumed_req_ids=set(),
                ),
                num_scheduled_tokens={r: n for r, (_, n) in scheduled.items()},
                total_num_scheduled_tokens=sum(n for _, n in scheduled.values()),
                preempted_req_ids={*preempted},
                has_sync_kv_loads=sync_loads,
                kv_connector_block_state=KVConnectorBlockState(set(scheduled), blocks, {}),
            )
        )
        if meta.namespace is not None:
            self.report()
        for rank in sorted({*range(self.side.engine.ranks)} - silent):
            for op in meta.loads:
                self.tell(rank, begun=op.number)
            for number, _ in meta.orders:
                self.side.worker_output(WorkerMetadata(heard={rank: number}))
        return meta

    def close(self) -> None:
        self.faults.heal()
        self.side.close()


#: Makes a side.
Make: TypeAlias = Callable[..., Side]


def stored_chunks(meta: StepMetadata) -> list[int]:
    """The chunks that a step has workers store."""
    return [op.chunk.index for op in meta.stores]


def named_chunks(meta: StepMetadata) -> dict[str, list[int]]:
    """The chunks that a step has workers read ahead, by request."""
    return {op.request_id: [chunk.index for chunk in op.chunks] for op in meta.prefetches}


def make_connector(root: Path, **options: Any) -> SharedStorageConnector:
    """The scheduler's half of a connector."""
    config = make_config(str(root), **options)
    return SharedStorageConnector(config, KVConnectorRole.SCHEDULER, make_groups(config))
