"""One side of an engine: the scheduler's, on a shelf of hollow objects, or a worker's.

The only place in these tests that knows where a scheduler side keeps what it knows of a request.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.sched.output import KVConnectorBlockState

    from kvshelf.vllm.connector import SharedStorageConnector
    from kvshelf.vllm.groups import CacheGroups
    from kvshelf.vllm.item_ids import CONTENT, ItemIds
    from kvshelf.vllm.metadata import (
        LoadOp,
        Orders,
        StepMetadata,
        StoreOp,
        WeightsReport,
        WorkerFacts,
        WorkerMetadata,
        WorkerReport,
    )
    from kvshelf.vllm.namespace import build_namespace
    from kvshelf.vllm.scheduler import SchedulerEngine, SchedulerSide
    from kvshelf.vllm.scheduler.drafter import DraftScheduler
    from kvshelf.vllm.scheduler.requests import Awaited
    from kvshelf.vllm.worker.side import WorkerSide

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
from tests.sim.engine_caches import (
    HEADS,
    LAYERS,
    SIZE,
    bind,
    make_caches,
    make_config,
    make_groups,
)
from tests.sim.storage import FaultyStorage, posix
from tests.support.clocks import Clock
from tests.support.prompts import prompt
from tests.support.waiting import PATIENCE, until, while_patient

BLOCK, CHUNK, BLOCKS = 4, 8, 64

PART = WorkerReport(
    layer_names=tuple(f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)),
    layer_shapes=(f"2,*,{HEADS},{SIZE}",) * LAYERS,
    layer_dtypes=("BF16",) * LAYERS,
    layouts=(f"cpu-vec-bf16-b{BLOCK}",) * LAYERS,
    attention=("full",) * LAYERS,
    head_sizes=(SIZE,) * LAYERS,
    sliding_windows=(-1,) * LAYERS,
    weights="user:test",
)


# --------------------------------------------------------------- what vLLM asks with


class Request:
    """What the connector reads of vLLM's ``Request``."""

    def __init__(self, request_id: str, prompt: Sequence[int], **options: Any) -> None:
        self.request_id = request_id
        self.prompt_token_ids: list[int] | None = list(prompt)
        self._all_token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.prompt_embeds = None
        self.prompt_is_token_ids = None
        self.resumable = False
        self.skip_reading_prefix_cache = False
        self.kv_transfer_params: Any = None
        self.cache_salt: str | None = None
        self.lora_request: Any = None
        self.mm_features: list[Any] = []
        self.num_preemptions = 0
        self.num_computed_tokens = 0
        self.__dict__.update(options)
        self.max_tokens = options.get("max_tokens", 2)

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)


@dataclass
class Blocks:
    ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(self.ids),)


def image(identifier: str, offset: int, length: int) -> SimpleNamespace:
    """A multimodal item as vLLM describes it, named by its content."""
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(
        identifier=identifier, mm_position=position, mm_hash=f"{CONTENT}{identifier}"
    )


# --------------------------------------------------------------- messages between the sides

_numbers = itertools.count(1)


def next_number() -> int:
    """A number that no load and no message has had."""
    return next(_numbers)


def tell(side: SchedulerSide, rank: int = 0, **facts: Any) -> None:
    """Bring facts to a side, as if a rank had told them between two of its messages."""
    for receive in side._receivers(rank):
        receive(WorkerFacts(**facts))


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
    return bool(side.requests or lookups.ahead or lookups.later or side.loads.planned)


def awaited_of(side: SchedulerSide, name: str) -> Awaited | None:
    """The hand-over that a request has brought, if it runs and has one."""
    state = side.requests.get(name)
    return None if state is None else state.awaited


def waits_for_objects(side: SchedulerSide) -> bool:
    """Whether any request waits for a hand-over, or anything looks for its objects."""
    service = side.handovers._service
    return bool(side.handovers.waiting or (service is not None and service._waits))


def set_clock(side: SchedulerSide, now: float = 1000.0) -> Clock:
    """Give the waits for hand-overs a clock of their own."""
    clock = side.handovers.clock = Clock(now)
    return clock


def take_lookups(side: SchedulerSide) -> LookupService | None:
    """Take a side back to the time before its namespace was known; return what looks up."""
    lookups, side.engine.lookup_service = side.engine.lookup_service, None
    side.engine.handshake._deadline = None
    return lookups


def give_lookups(side: SchedulerSide, lookups: LookupService | None) -> None:
    """Undo :func:`take_lookups`."""
    side.engine.lookup_service = lookups


def drafts_of(side: SchedulerSide) -> DraftScheduler:
    """The drafter's component."""
    return side.drafter


def namespace_of_drafts(side: SchedulerSide) -> Namespace | None:
    """The namespace of the drafter's KV, once it is known."""
    return side.drafter.namespace


def round_of(side: SchedulerSide) -> int:
    """How often weights have been compared."""
    return side.engine.handshake.round


def compares_weights(side: SchedulerSide) -> bool:
    """Whether the weights are being compared."""
    return side.engine.handshake.checking


def is_settled(side: SchedulerSide) -> bool:
    """Whether the namespace is known to all, and no weights are being compared."""
    handshake = side.engine.handshake
    known = handshake.namespace is not None and not handshake.announcing
    return known and not handshake.checking


class LoneScheduler:
    """A scheduler side without an engine, whose workers have reported.

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
            SchedulerEngine(
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
        self.side.take_output((), WorkerMetadata(heard, **fields))

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
Make: TypeAlias = Callable[..., LoneScheduler]


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


# --------------------------------------------------------------- a worker

Step = tuple[set[str], set[int], "Said | None"]


class Said(SimpleNamespace):
    """What a worker says in a step: the fields of ``WorkerMetadata``, and of its new facts."""

    @classmethod
    def of(cls, meta: WorkerMetadata, known: int) -> Said:
        """What is said after message `known`."""
        facts = WorkerFacts()
        for rank in meta.facts:
            for number, message in meta.facts[rank]:
                if number > known:
                    facts = WorkerFacts(
                        **{
                            name: (
                                [*found, *getattr(message, name)]
                                if isinstance(found, list)
                                else getattr(message, name)
                            )
                            for name, found in vars(facts).items()
                        }
                    )
        return cls(**vars(facts), **vars(meta))


def limit_stores(side: WorkerSide, chunks: int) -> None:
    """Let stores of each kind pin at most so many chunks, in a namespace that is open."""
    registration = side.registration
    assert registration.host is not None and registration.model.serves
    for shares in registration.host._users.values():
        shares.stores.limit = chunks * shares.slot_bytes


class LoneWorker:
    """A worker's connector with registered caches, without an engine.

    Parameters
    ----------
    backend : FaultyStorage
        The storage.
    kernel_block : int
        Tokens of a block as the attention kernel sees it.
    config : SimpleNamespace, optional
        The engine's configuration; one of `options` when absent.
    opened : bool
        Announce the namespace.
    model : Module, optional
        The loaded model, where vLLM shows it.
    """

    def __init__(
        self,
        backend: FaultyStorage,
        *,
        kernel_block: int = BLOCK,
        config: SimpleNamespace | None = None,
        opened: bool = True,
        model: torch.nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.backend = backend
        self.config = config or make_config(backend.url, **options)
        self.model = model
        self._ratio = self.config.cache_config.block_size // kernel_block
        self._report: WorkerReport | None = None
        #: What the worker has told of why it is disabled.
        self._disabled: list[tuple[str, bool]] = []
        #: Up to which number the scheduler's side has taken what the worker tells.
        self._heard = 0
        self.caches = make_caches(BLOCKS * self._ratio, kernel_block)
        bind(self.config, self.caches)
        self.connector = SharedStorageConnector(
            self.config, KVConnectorRole.WORKER, make_groups(self.config)
        )
        self.side: WorkerSide = self.connector._worker
        self.register()
        if opened:
            self.step(StepMetadata(namespace=self.namespace()))

    def get_model(self) -> torch.nn.Module | None:
        """As a model runner, which makes the call that registers caches."""
        return self.model

    def register(self) -> None:
        """Register the caches."""
        self.connector.register_kv_caches(self.caches)

    @property
    def counts(self) -> dict[str, float]:
        """What this worker has counted."""
        return self.side.counters.snapshot()

    def gauge(self, name: str) -> float:
        """A gauge of this worker."""
        self.side.set_gauges()
        return self.side.counters.gauges()[name]

    def drain(self) -> None:
        """Wait for all stores."""
        assert self.connector.drain(PATIENCE) == 0

    def report(self) -> WorkerReport:
        """What the worker last said of its caches."""
        if self._report is None:
            self.step(StepMetadata())
        assert self._report is not None
        return self._report

    def disabled_reason(self) -> str:
        """Why the worker loads and stores nothing; empty while it does."""
        _, _, said = self.step(StepMetadata())
        self._disabled += [] if said is None else said.disabled
        return "".join(reason for reason, _ in self._disabled)

    def reported(self, field: str) -> str:
        """Step until the worker's report has this field; return it."""
        until(lambda: bool(self.step(StepMetadata())[2] and getattr(self.report(), field)))
        return str(getattr(self.report(), field))

    def namespace(self, weights: str = "user:test") -> tuple[bytes, str]:
        """The namespace of an engine with this worker."""
        made = build_namespace(self.config, self.connector.config, [self.report()], weights)
        self.fmt = ObjectFormat(made)
        return made.encoded, made.slug

    def step(self, meta: StepMetadata) -> Step:
        """One step, in the order of vLLM's first model runner."""
        worker = self.connector
        meta.heard = {0: self._heard}
        worker.bind_connector_metadata(meta)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        finished, self.failed_requests = results.finished_recving, results.failed_recving
        bad = worker.get_block_ids_with_load_errors()
        reported = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        assert reported is None or isinstance(reported, WorkerMetadata)
        if reported is not None and reported.reports:
            (self._report,) = reported.reports.values()
        said = None if reported is None else Said.of(reported, self._heard)
        if reported is not None and reported.facts:
            self._heard = reported.facts[0][-1][0]
        return finished, bad, said

    def seconds(self, meta: StepMetadata) -> float:
        """How long a step took."""
        begin = time.monotonic()
        self.step(meta)
        return time.monotonic() - begin

    def load(self, op: LoadOp) -> Step:
        """Load, which may end in any step, the first one included; return what that step did."""
        meta = StepMetadata(loads=[op])
        for _ in while_patient():
            answer = self.step(meta)
            if answer[0]:
                return answer
            # vLLM makes empty steps while a load runs.
            meta = StepMetadata(idle=True)
        raise AssertionError("the load never ended")

    def chunks(self, count: int, seed: int = 0) -> list[Chunk]:
        """The chunks of a prompt."""
        return KeyChain(self.fmt.namespace.digest, CHUNK).extend(prompt(count * CHUNK, seed))

    def store(self, chunks: Sequence[Chunk], first_block: int = 1) -> None:
        """Fill blocks with noise and store them."""
        n = CHUNK // self.config.cache_config.block_size
        ops = []
        for i, chunk in enumerate(chunks):
            ops.append(store_op(chunk, range(first_block + i * n, first_block + (i + 1) * n)))
        for cache in self.caches.values():
            cache.view(torch.int16).random_(1, 1000)
        self.step(StepMetadata(stores=ops))
        self.drain()

    def path(self, chunk: Chunk) -> Path:
        """Where the first object of a chunk lies."""
        folder = Path(self.backend.url) / self.fmt.namespace.folder
        return folder / object_name(chunk, 0, self.fmt.shards)

    def rows(self, block: int) -> list[torch.Tensor]:
        """What a (manager) block holds in each layer."""
        first, end = block * self._ratio, (block + 1) * self._ratio
        return [cache[first:end].clone() for cache in self.caches.values()]

    def same(self, one: int, other: int) -> bool:
        """Whether two blocks hold the same."""
        return all(torch.equal(a, b) for a, b in zip(self.rows(one), self.rows(other), strict=True))

    def close(self) -> None:
        """End the engine, whose storage answers again."""
        self.backend.heal()
        self.connector.shutdown()


#: Makes a worker.
MakeWorker: TypeAlias = Callable[..., LoneWorker]


def store_op(chunk: Chunk, blocks: Sequence[int] = (1, 2), **fields: Any) -> StoreOp:
    """A store of a chunk from some blocks."""
    return StoreOp(chunk, ([*blocks],), **{"repair": False, "age": 0.0, **fields})
