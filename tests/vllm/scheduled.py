"""vLLM's own scheduler and cache manager, with the connector, over a model of all blocks' bytes.

A :class:`ScheduledEngine` has a real ``Scheduler`` for any KV cache groups, with the scheduler's
instance of the connector inside. Its worker is a model: KV of a token is a digest of the prefix and
the group, states likewise, and they lie in pages that vLLM's tables name. Before each step it
checks the bytes of everything that the step would read: all tokens of full attention, those within
windows, and the state that the step begins with. It stores and loads as the step's metadata says,
and compares what is stored with what the chunk's key stands for.

With drafts it guesses tokens, of which some are wrong: what a step computes of these is random. A
state has a part that each token rolls through, as a convolution, and one that each draft has in a
block of its own; between steps they move as in ``vllm/v1/worker/mamba_utils.py``. A drafter with KV
has a group of its own: where it reads anything wrong, what it writes is random.

Contents lie in a :class:`World`, which engines share; its shelf has hollow objects for lookups.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.sim import engine as engine_model
from tests.sim import engine_sides as sides
from tests.sim.engine import ScheduledRequests, resolve_sizes
from tests.sim.engine_caches import drafter, model_config, scheduler_config, transfer_config
from tests.vllm.hybrid_specs import COMPRESSED, cache_config

with warnings.catch_warnings():
    # Importing vLLM warns of what torch and others deprecate.
    warnings.simplefilter("ignore")
    from vllm.v1.core.kv_cache_utils import (
        generate_scheduler_kv_cache_config,
    )
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheSpec,
        MambaSpec,
        iter_layer_specs,
    )
    from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

    from kvshelf.vllm import handshake
    from kvshelf.vllm.groups import CacheGroup, CacheGroups
    from kvshelf.vllm.messages import Inbox, Outbox
    from kvshelf.vllm.metadata import (
        NULL_BLOCK,
        Facts,
        LoadOp,
        Orders,
        StepMetadata,
        StoreOp,
        WeightsReport,
        WorkerMetadata,
        WorkerReport,
    )
    from kvshelf.vllm.scheduler import drafts as draft_scheduler

from kvshelf.costs import work
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import DRAFT, FULL, SHARDS_FIELDS, STATE, WINDOW, Kind, kind_key
from kvshelf.format.names import object_name
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from tests.sim.storage import posix
from tests.support.formats import make_record
from tests.support.waiting import PATIENCE, while_patient

#: Bytes of a token in a group, and of a state: of each of its last tokens, and of the rest.
TOKEN, STATE_BYTES, ROW, ROWS = 8, 32, 4, 3
DAMAGED = b"damaged"


class Text(engine_model.Text):
    """The tokens of a request, and what a model computes of them in each group, as bytes."""

    def __init__(self, prompt: Sequence[int], answer: int, identity: str = "") -> None:
        super().__init__(prompt, answer)
        self._contents: dict[tuple[int, int], bytes] = {}

    def next_token(self, length: int) -> int:
        """What a model says after so many tokens; whatever its weights, to keep this simple."""
        return self.tokens[length] if length < len(self.tokens) else 0

    def content(self, group: int, start: int, end: int, weights: int) -> bytes:
        """KV of tokens in a group."""
        if (group, weights) not in self._contents:
            name = b"%d %d" % (group, weights)
            self._contents[group, weights] = b"".join(
                hashlib.sha256(name + digest).digest()[:TOKEN] for digest in self.digests[1:]
            )
        return self._contents[group, weights][start * TOKEN : end * TOKEN]

    def state(self, group: int, length: int, weights: int) -> bytes:
        """The state of a group after so many tokens."""
        rows = [self.row(group, position, weights) for position in range(length - ROWS, length)]
        return b"".join(rows) + self.rest(group, length, weights)

    def row(self, group: int, position: int, weights: int) -> bytes:
        """What a token leaves in the part of a state that the last tokens have."""
        if position < 0:
            return bytes(ROW)
        name = b"row %d %d" % (group, weights)
        return hashlib.sha256(name + self.digests[position + 1]).digest()[:ROW]

    def rest(self, group: int, length: int, weights: int) -> bytes:
        """The part of a state that all tokens have."""
        name = b"state %d %d" % (group, weights)
        digest = hashlib.sha256(name + self.digests[length]).digest()
        return digest[: STATE_BYTES - ROWS * ROW]


class World:
    """A shelf that engines share, and the contents of its objects."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.backend = posix(root)
        self.contents: dict[bytes, bytes] = {}
        #: The contents of a drafter's objects.
        self.drafts: dict[bytes, bytes] = {}
        #: The text and the weights that each chunk key stands for.
        self.texts: dict[bytes, tuple[Text, int]] = {}

    def _names(self, fmt: ObjectFormat, chunk: Chunk, kind: Kind) -> list[tuple[str, int]]:
        of_kind, folder = fmt.of(kind), fmt.namespace.folder
        return [
            (
                f"{folder}/{object_name(chunk, shard, of_kind.shards, kind)}",
                of_kind.object_size(shard, chunk.tokens if chunk.tail else None),
            )
            for shard in range(of_kind.shards)
        ]

    def put(self, fmt: ObjectFormat, chunk: Chunk, kind: Kind, content: bytes) -> None:
        self.contents[kind_key(chunk.key, kind)] = content
        for name, size in self._names(fmt, chunk, kind):
            self.backend.write(name, [bytes(size)])

    def remove(self, fmt: ObjectFormat, chunk: Chunk, kind: Kind) -> None:
        del self.contents[kind_key(chunk.key, kind)]
        for name, _ in self._names(fmt, chunk, kind):
            self.backend.delete([name])

    def of(self, kind: Kind) -> list[bytes]:
        """The chunk keys of which there is an object of a kind."""
        return [key for key in self.texts if kind_key(key, kind) in self.contents]


def namespace_of(groups: CacheGroups, chunk_size: int, weights: str) -> Namespace:
    """A namespace with one layer for each group of the model."""
    others = groups.scratch.union(group.index for group in groups.drafts)
    own = [group for group in groups if group.index not in others]
    layers = [
        ("state", f"ssm:{STATE_BYTES // 2}/")
        if group.kind == STATE
        else ("canonical", f"*,{TOKEN // 2}")
        for group in own
    ]
    record = make_record(
        len(own),
        weights=weights,
        chunk_size=chunk_size,
        shards=1,
        kv_heads=1,
        kinds=[group.kind for group in own] if groups.mixed else None,
        layouts=[layout for layout, _ in layers],
        layer_names=[group.layer_names[0] for group in own],
        layer_shapes=[shape for _, shape in layers],
        attention=[group.kind for group in own],
        **{SHARDS_FIELDS[kind]: 1 for kind in groups.kinds if kind != FULL},
    )
    return Namespace(record, "scheduled")


def make_namespace(vllm_config: Any, config: Any, stages: Any, weights: str) -> Namespace:
    """Stand for kvshelf.vllm.namespace.build_namespace, which needs layers."""
    if not (config.version or "").startswith("drafter of"):
        made: Namespace = vllm_config.make_namespace(config.chunk_size, weights)
        return made
    record = make_record(
        1,
        f"*,{TOKEN // 2}",
        weights=weights,
        version=config.version,
        chunk_size=config.chunk_size,
        shards=1,
        kv_heads=1,
        layer_names=["drafter"],
        attention=["full"],
    )
    return Namespace(record, "drafter")


def patch_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make namespaces without layers."""
    monkeypatch.setattr(handshake, "build_namespace", make_namespace)
    monkeypatch.setattr(draft_scheduler, "topologies_of", lambda engine, record: {})


REPORT = WorkerReport(("layers.0",), ("",), ("",), ("",), ("",), (0,), (-1,), weights="user:test")


def make_vllm_config(
    specs: Sequence[KVCacheSpec],
    root: Path,
    *,
    blocks: int,
    budget: int,
    seqs: int,
    has_kv: bool = False,
    ranks: int = 1,
    **options: Any,
) -> Any:
    """What vLLM's scheduler and the connector read of a ``VllmConfig``.

    The drafter's KV counts if it `has_kv`.
    """
    model = model_config(
        is_mm_prefix_lm=bool(options.pop("whole_items", False)),
        get_total_num_kv_heads=lambda: 1,
        model="scheduled",
        max_model_len=16384,
    )
    drafts, data_parallel = options.pop("drafts", 0), int(options.pop("data_parallel", 1))
    config = scheduler_config(
        model,
        block_size=min(spec.block_size for spec in specs if spec.prefix_cacheable),
        blocks=blocks,
        budget=budget,
        requests=seqs,
        asynchronous=bool(options.pop("asynchronous", False)),
        prefix_caching=options.pop("prefix_caching", True),
        second_runner=False,
        kv_transfer_config=transfer_config(
            str(root), str(options.pop("role", "kv_both")), **{"admission": "auto"} | options
        ),
    )
    if drafts:
        # Without its model's configuration nothing of the drafter's KV is stored.
        config.speculative_config = drafter(drafts, draft_model_config=model if has_kv else None)
    config.parallel_config.data_parallel_size = data_parallel
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = ranks
    return config


class ScheduledEngine(ScheduledRequests):
    """One engine, of which all ranks do the same.

    Parameters
    ----------
    world : World
    specs : sequence of KVCacheSpec
        One for each cache group.
    blocks : int
        Blocks of the cache, the null block included.
    budget : int
        Most tokens of a step.
    seqs : int
        Most requests of a step.
    seed : int
        Decides how long loads take.
    drafter : KVCacheSpec, optional
        The group of a drafter with KV.
    ranks : int
    **options
        kvshelf's configuration; `asynchronous` for vLLM's scheduling ahead of results; `drafts`
        for so many drafts of each step; `retention` is vLLM's ``prefix_cache_retention_interval``.
    """

    text = Text

    def __init__(
        self,
        world: World,
        specs: Sequence[KVCacheSpec],
        *,
        blocks: int = 400,
        budget: int = 64,
        seqs: int = 8,
        seed: int = 0,
        drafter: KVCacheSpec | None = None,
        ranks: int = 1,
        **options: Any,
    ) -> None:
        self.world = world
        self.specs = list(specs)
        if drafter is not None:
            self.specs.append(drafter)
        specs = self.specs
        self.has_kv = drafter is not None
        #: Lookups remember what a node server did not have, so stores are reported.
        self.drafts = int(options.get("drafts", 0))
        if self.drafts:
            self.specs = [
                replace(spec, num_speculative_blocks=self.drafts)
                if isinstance(spec, MambaSpec)
                else spec
                for spec in self.specs
            ]
        retention = options.pop("retention", 0)
        config: Any = make_vllm_config(
            specs,
            world.root,
            blocks=blocks,
            budget=budget,
            seqs=seqs,
            has_kv=self.has_kv,
            ranks=ranks,
            **options,
        )
        # As the engine core: of layers that differ, the scheduler sees one.
        caches = generate_scheduler_kv_cache_config([cache_config(self.specs, blocks)])
        resolve_sizes(config, caches)
        caches.prefix_cache_retention_interval = retention
        if self.drafts:
            for group in caches.kv_cache_groups:
                # The drafter's layer is among those of full attention.
                group.is_eagle_group = isinstance(group.kv_cache_spec, FullAttentionSpec)
        self.groups = CacheGroups(config, caches)
        if self.has_kv:
            own = caches.kv_cache_groups[:-1]
            self.groups.narrow(name for group in own for name in group.layer_names)
        object.__setattr__(config, "make_namespace", self._make_namespace)
        super().__init__(config, caches)
        self.ranks = range(ranks)
        #: Where the rest of a state begins in its block.
        self.rows_bytes = (ROWS + self.drafts) * ROW
        self.page = max(
            STATE_BYTES + self.drafts * ROW, *(spec.block_size * TOKEN for spec in specs)
        )
        self.memory = bytearray(blocks * self.page)
        self.random = random.Random(seed)
        self.state_columns: dict[str, int] = {}
        #: By request, tokens that the last step has added, how many it has in all, and its drafts.
        self.accepted: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.proposed: dict[str, list[int]] = {}
        self.loading: list[LoadOp] = []
        #: The number of the last load that has begun, and those that were given up.
        self._begun = 0
        self._cancelled: set[int] = set()
        self._released: set[str] = set()
        self._orders = Inbox([self._take_orders])
        self._facts = Outbox(Facts)
        self._told = self._told_of_drafts = False
        #: Requests of which a load brought no KV of the drafter, from which token on.
        self.without_drafts: list[tuple[str, int]] = []
        #: Chunks of the drafter's KV that were stored, and loaded.
        self.stored_drafts: list[int] = []
        self.loaded_drafts: list[int] = []
        #: Number of the weights, of the round in which they were compared, and what of a change the
        #: scheduler does not know yet.
        self.weights = 0
        self.round = 0
        self._settled = False
        self._changed = False
        #: vLLM's own cache may have KV of other weights.
        self._stale = False
        #: What was loaded and stored, and what a test may look at.
        self.loads: list[LoadOp] = []
        self.stored: list[tuple[Kind, int]] = []
        self.preempted: set[str] = set()
        #: Tokens that each request has had computed.
        self.computed: Counter[str] = Counter()
        #: So many loads fail, whatever the shelf has, and none ends.
        self.failing_loads, self.holds_loads = 0, False
        self.chunk_size = self.connector.config.chunk_size
        self.step()
        self.step()
        assert self.connector.namespace is not None
        if self.has_kv:
            self.step()
            assert sides.namespace_of_drafts(self.connector._scheduler) is not None

    def _make_namespace(self, chunk_size: int, weights: str) -> Namespace:
        namespace = namespace_of(self.groups, chunk_size, weights)
        self.fmt = ObjectFormat(namespace)
        self._named = self.weights
        for text in self.texts.values():
            self._name_chunks(text)
        return namespace

    @property
    def format(self) -> ObjectFormat:
        # A namespace that has just been made is not the connector's yet.
        return self.fmt

    def _name_chunks(self, text: Text) -> None:
        chunks = self.chunks_of(text.tokens)
        tail = self.tail_of(text.tokens[: text.prompt])
        for chunk in chunks if tail is None else [*chunks, tail]:
            self.world.texts[chunk.key] = text, self._named

    # What users do

    def add(self, name: str, prompt: Sequence[int], answer: int = 2, **options: Any) -> None:
        """Add a request, see :class:`ScheduledRequests`."""
        super().add(name, prompt, answer, **options)
        self._name_chunks(self.texts[name])

    def wait_for_lookup(self, name: str) -> None:
        """Wait until the lookup of a request is done."""
        lookup = sides.lookup_of(self.connector._scheduler, name)
        assert lookup is not None and lookup.wait(PATIENCE)

    def change_weights(self) -> None:
        """Change the weights in place, as a trainer does; vLLM's own cache stays."""
        self.weights += 1
        self._settled = False
        self._changed = True
        self._stale = True

    def reset(self, *, connector: bool = True) -> None:
        """Forget vLLM's cached prefixes, of running requests too, and what the connector knows."""
        # vLLM fails where requests that wait have blocks, or steps are in flight.
        running = not self.scheduler.kv_holding_waiting and not self.results
        if self.scheduler.reset_prefix_cache(running, reset_connector=connector):
            self._stale = False

    def settle(self) -> None:
        """Step until the weights were compared, so that there are hits again."""
        for _ in while_patient():
            if not sides.compares_weights(self.connector._scheduler) and self._settled:
                return
            self.step()
        raise AssertionError("the weights are not compared")

    def run(self, *prompts: Sequence[int], answer: int = 2) -> list[int]:
        """Compute prompts together; return how many tokens each got from the shelf."""
        names = [f"{len(self.texts) + i}" for i in range(len(prompts))]
        before = len(self.loads)
        for name, tokens in zip(names, prompts, strict=True):
            self.add(name, tokens, answer)
        self.finish()
        loads = self.loads[before:]
        return [sum(op.end - op.start for op in loads if op.request_id == name) for name in names]

    def end(self) -> None:
        """Abort what is left, and step until every block has been given back."""
        self.holds_loads = False
        super().end()

    def close(self) -> None:
        self.connector.shutdown()

    # A step

    def step(self) -> StepMetadata:
        output = self.scheduler.schedule()
        meta = output.kv_connector_metadata
        assert isinstance(meta, StepMetadata)
        self.metas.append(meta)
        manager = self.scheduler.kv_cache_manager
        tables = {name: manager.get_block_ids(name) for name in output.num_scheduled_tokens}
        for copy in output.kv_cache_block_copies or ():
            self._write(copy.dst_block_id, 0, self._read(copy.src_block_id, 0, self.page))
        for block in output.new_block_ids_to_zero or ():
            self._write(block, 0, bytes(self.page))
        if meta.weights_round > self.round:
            self.round = meta.weights_round
            self._settled = self._changed = False
        if meta.namespace is not None and not self._changed:
            self._settled = True
        self._orders.take(meta.orders)
        self._facts.heard(meta.heard.get(0, 0))
        told = self._facts.next
        new = [op for op in meta.loads if op.number > self._begun]
        self.loading += new
        if new:
            self._begun = told.begun = new[-1].number
        names = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests.values()
        self.preempted |= {one.request_id for one in requests if one.num_preemptions}
        sampled, judge = self._forward(output, tables)
        stores = [op for op in meta.stores if not op.late]
        told.repaired += [key for op in stores if (key := self._store(op))]
        judge()
        told.repaired += [key for op in meta.stores if op.late and (key := self._store(op))]
        assert not any(self.memory[: self.page]), "the null block was written"
        received, failed = self._finish_loads()
        # Reports end when the namespace is announced.
        self._told = self._told or meta.namespace is not None
        reports = {} if self._told else dict.fromkeys(self.ranks, REPORT)
        weights: dict[int, WeightsReport] = {}
        if not self._settled:
            first, now = f"{0:064x}", f"{self.weights:064x}"
            report = WeightsReport(self.round, first, now, changed=self._changed)
            weights = dict.fromkeys(self.ranks, report)
        self._told_of_drafts = self._told_of_drafts or meta.draft_namespace is not None
        draft_reports = {0: REPORT} if self.has_kv and not self._told_of_drafts else {}
        told.without_drafts, self.without_drafts = self.without_drafts, []
        released, self._released = self._released, set()
        result = KVConnectorOutput(
            finished_sending=released or None,
            finished_recving=received or None,
            failed_recving=failed,
            kv_connector_worker_meta=WorkerMetadata(
                dict.fromkeys(self.ranks, self._orders.heard),
                dict.fromkeys(self.ranks, self._facts.messages()),
                reports,
                weights,
                draft_reports,
            ),
        )
        self.results.append(
            (
                output,
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: i for i, name in enumerate(names)},
                    sampled_token_ids=sampled,
                    kv_connector_output=result,
                ),
            )
        )
        while len(self.results) > (self.asynchronous and output.total_num_scheduled_tokens > 0):
            answer = self.take_result()
            if self.drafts and not self.asynchronous:
                self.scheduler.update_draft_token_ids(
                    DraftTokenIds(
                        [name for name in answer.req_ids if name in self.proposed],
                        [self.proposed[name] for name in answer.req_ids if name in self.proposed],
                    )
                )
        self._check_sums()
        return meta

    def _check_sums(self) -> None:
        """Compare what the admission counts as running with what vLLM knows of all requests."""
        side = self.connector._scheduler
        states = side.requests.values()
        lengths = [
            (state.request.num_computed_tokens, state.request.num_prompt_tokens)
            for state in states
            if not state.loading
        ]
        left = [work(start, end) for start, end in lengths if 0 < start < end]
        computing, running = side.admission._computing.totals, side.admission._running
        assert computing == tuple(map(sum, zip((0, 0), *left, strict=True)))
        assert len(running) == sum(state.loading for state in states)
        assert len(running) > 0 or not any(running.totals)

    def _read(self, block: int, offset: int, count: int) -> bytes:
        begin = block * self.page + offset
        return bytes(self.memory[begin : begin + count])

    def _write(self, block: int, offset: int, content: bytes) -> None:
        assert block != NULL_BLOCK
        begin = block * self.page + offset
        self.memory[begin : begin + len(content)] = content

    def _read_state(self, table: Sequence[int], column: int, ahead: int = 0) -> bytes:
        """The state in a column, or so many tokens ahead of it."""
        rows = self._read(table[column], ahead * ROW, ROWS * ROW)
        rest = self._read(table[column + ahead], self.rows_bytes, STATE_BYTES - ROWS * ROW)
        return rows + rest

    def _write_state(self, block: int, content: bytes) -> None:
        self._write(block, 0, content[: ROWS * ROW])
        self._write(block, self.rows_bytes, content[ROWS * ROW :])

    def _copy_states(
        self, tables: Sequence[list[int]], source: int, target: int, ahead: int
    ) -> None:
        """Copy the states of a request from one column of its tables to another."""
        for group in self.groups.of(STATE):
            table = tables[group.index]
            assert NULL_BLOCK not in (table[source], table[source + ahead])
            rows = self._read(table[source], ahead * ROW, self.rows_bytes - ahead * ROW)
            rest = self._read(table[source + ahead], self.rows_bytes, STATE_BYTES - ROWS * ROW)
            self._write(table[target], 0, rows)
            self._write(table[target], self.rows_bytes, rest)

    def _forward(
        self, output: Any, tables: dict[str, tuple[list[int], ...]]
    ) -> tuple[list[list[int]], Callable[[], None]]:
        """Compute a step; return what it says, and what vLLM does when it has judged the drafts."""
        cached = output.scheduled_cached_reqs
        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for name in [*begins, *cached.resumed_req_ids, *(output.preempted_req_ids or ())]:
            for known in (self.state_columns, self.accepted, self.done, self.proposed):
                known.pop(name, None)
        begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled, judged = [], []
        self.computed.update(output.num_scheduled_tokens)
        for name, count in output.num_scheduled_tokens.items():
            text, start = self.texts[name], begins[name]
            if self.drafts and name in self.done:
                # vLLM may not know yet which drafts were wrong.
                assert self.asynchronous or start == self.done[name]
                start = self.done[name]
            drafts = list(output.scheduled_spec_decode_tokens.get(name, ()))
            if self.asynchronous and drafts:
                drafts = self.proposed[name][: len(drafts)]
            end = start + count
            running = end - len(drafts)
            says = running >= self.known(name)
            right = 0
            while right < len(drafts) and text.tokens[running + right :][:1] == [drafts[right]]:
                right += 1
            added = 1 + right if says else 1
            self._enter(name, tables[name], start, end)
            wrong = [
                f"{name}: {group.kind} of group {group.index}, tokens {start} to {end}"
                for group, table in zip(self.groups, tables[name], strict=True)
                if group not in self.groups.drafts and not self._reads(name, group, table, start)
            ]
            # Behind KV of other weights nothing is right.
            assert self._stale or not wrong, wrong
            # What comes behind the answer is no token of the text.
            last = min(running + right, len(text.tokens))
            for group, table in zip(self.groups, tables[name], strict=True):
                if group.index in self.groups.scratch:
                    size = group.block_size
                    for token in range(max(start, end - size), end):
                        content = text.content(group.index, token, token + 1, self.weights)
                        if token >= last or wrong:
                            content = self.random.randbytes(TOKEN)
                        self._scatter(table, size, token % size, content)
                    continue
                if group in self.groups.drafts:
                    self._draft(text, group, table, start, last)
                elif group.kind == STATE:
                    self._write_states(text, group, table, (running, end), last, wrong)
                else:
                    content = text.content(group.index, start, last, self.weights)
                    content = bytes(len(content)) if wrong else content
                    content += self.random.randbytes((end - last) * TOKEN)
                    self._scatter(table, group.block_size, start, content)
            judged.append((name, tables[name], running, added))
            tokens = range(running, running + added) if says else ()
            sampled.append([text.next_token(length) for length in tokens])
            self._propose(name, text, running + added, says=says)
        return sampled, lambda: [self._judge(*one) for one in judged] and None

    def _propose(self, name: str, text: Text, known: int, *, says: bool) -> None:
        """Guess the next tokens, some of them wrong."""
        self.proposed.pop(name, None)
        if says and self.drafts:
            right = self.random.randint(0, self.drafts)
            guessed = (text.tokens[known:] + [0] * self.drafts)[: self.drafts]
            self.proposed[name] = [
                token if number < right else (token + 1) % 900
                for number, token in enumerate(guessed)
            ]

    def _enter(self, name: str, tables: Sequence[list[int]], start: int, end: int) -> None:
        """Move the states to the column that a step goes on in."""
        if not self.groups.of(STATE):
            return
        size = self.groups.of(STATE)[0].block_size
        before = self.state_columns.get(name, (start - 1) // size)
        now = self.state_columns[name] = -(-end // size) - 1
        if before not in (-1, now):
            self._copy_states(tables, before, now, self.accepted.get(name, 1) - 1)
            self.accepted[name] = 1

    def _write_states(
        self,
        text: Text,
        group: CacheGroup,
        table: list[int],
        bounds: tuple[int, int],
        last: int,
        wrong: list[str],
    ) -> None:
        """Write what a step leaves of the states of a group, which reads right up to `last`."""
        running, end = bounds
        column, index = -(-end // group.block_size) - 1, group.index
        if wrong:
            self._write_state(table[column], bytes(STATE_BYTES))
            return
        rows = b""
        for position in range(running - ROWS, end):
            row = self.random.randbytes(ROW)
            rows += text.row(index, position, self.weights) if position < last else row
        self._write(table[column], 0, rows)
        for ahead, length in enumerate(range(running, end + 1)):
            rest = self.random.randbytes(STATE_BYTES - ROWS * ROW)
            if length <= last:
                rest = text.rest(index, length, self.weights)
            self._write(table[column + ahead], self.rows_bytes, rest)

    def _draft(
        self, text: Text, group: CacheGroup, table: list[int], start: int, last: int
    ) -> None:
        """Write the drafter's KV of some tokens."""
        content = text.content(group.index, start, last, self.weights)
        found = self._gather(table, group.block_size, 0, start)
        if found != text.content(group.index, 0, start, self.weights):
            content = self.random.randbytes(len(content))
        self._scatter(table, group.block_size, start, content)

    def _judge(self, name: str, tables: Sequence[list[int]], running: int, added: int) -> None:
        """Move the states to the last block boundary that is certain now."""
        after = self.done[name] = running + added - 1
        self.accepted[name] = added
        if not self.drafts or not self.groups.of(STATE):
            return
        size, column = self.groups.of(STATE)[0].block_size, self.state_columns[name]
        aligned = after // size * size
        if aligned >= running:
            target = aligned // size - 1
            if target == column:
                self.accepted[name] = 1
            if target != column or aligned != running:
                self._copy_states(tables, column, target, aligned - running)

    def _reads(self, name: str, group: CacheGroup, table: list[int], start: int) -> bool:
        """Whether what a step reads in a group is right."""
        text, index = self.texts[name], group.index
        if index in self.groups.scratch:
            # The tokens of which a part was not computed yet.
            tokens = range(start - start % COMPRESSED, start)
            return all(
                self._read(table[0], token % group.block_size * TOKEN, TOKEN)
                == text.content(index, token, token + 1, self.weights)
                for token in tokens
            )
        if group.kind != STATE:
            first = self._first_read(group, start)
            found = self._gather(table, group.block_size, first, start)
            return found == text.content(index, first, start, self.weights)
        if not start:
            return True
        ahead = self.accepted.get(name, 1) - 1
        found = self._read_state(table, self.state_columns[name], ahead)
        return found == text.state(index, start, self.weights)

    def _first_read(self, group: CacheGroup, start: int) -> int:
        """The first token that a token at `start` attends to."""
        if group.kind == FULL:
            return 0
        spec: Any = next(iter(iter_layer_specs(self.specs[group.index])))
        if isinstance(spec, ChunkedLocalAttentionSpec):
            return start // spec.attention_chunk_size * spec.attention_chunk_size
        return max(0, start - spec.sliding_window + 1)

    def _gather(self, table: Sequence[int], size: int, start: int, end: int) -> bytes:
        parts = []
        for token in range(start, end):
            assert table[token // size] != NULL_BLOCK, "a block that is read is not there"
            parts.append(self._read(table[token // size], token % size * TOKEN, TOKEN))
        return b"".join(parts)

    def _scatter(self, table: Sequence[int], size: int, start: int, content: bytes) -> None:
        for i in range(len(content) // TOKEN):
            block, slot = divmod(start + i, size)
            self._write(table[block], slot * TOKEN, content[i * TOKEN : (i + 1) * TOKEN])

    # Stores

    def _store(self, op: StoreOp) -> bytes | None:
        """Store a chunk; return its kind key if a damaged object was replaced."""
        if op.round != self.round or not self._settled:
            return None
        if op.kind == DRAFT:
            return self._store_drafts(op)
        size, index = self.chunk_size, op.chunk.index
        text, weights = self.world.texts[op.chunk.key]
        assert weights == self.weights
        assert len(op.block_ids) == len(self.groups)
        content, right = b"", b""
        end = index * size + op.chunk.tokens
        for group, blocks in zip(self.groups, op.block_ids, strict=True):
            others = self.groups.scratch.union(one.index for one in self.groups.drafts)
            if group in self.groups.drafts and op.kind == FULL:
                continue
            if group.kind != op.kind or group.index in others:
                assert blocks == []
            elif group.kind == STATE:
                (block,) = blocks
                assert block != NULL_BLOCK
                content += self._read_state([block], 0)
                right += text.state(group.index, (index + 1) * size, weights)
            else:
                begin = index * size % group.block_size
                content += self._gather(blocks, group.block_size, begin, begin + op.chunk.tokens)
                right += text.content(group.index, index * size, end, weights)
        assert content == right, f"{op.kind} of chunk {index} is stored wrongly"
        self.stored.append((op.kind, index))
        key = kind_key(op.chunk.key, op.kind)
        known = self.world.contents.get(key)
        if known is None or op.repair:
            self.world.put(self.fmt, op.chunk, op.kind, content)
        return key if op.repair else None

    def _store_drafts(self, op: StoreOp) -> None:
        """Store the drafter's KV of a chunk, which must be right."""
        [group] = self.groups.drafts
        first = op.chunk.index * self.chunk_size
        begin, end = first % group.block_size, first + self.chunk_size
        blocks, text = op.block_ids[group.index], self.texts[op.owner[0]]
        content = self._gather(blocks, group.block_size, begin, begin + self.chunk_size)
        assert content == text.content(group.index, first, end, self.weights)
        self.world.drafts[op.chunk.key] = content
        self.stored_drafts.append(op.chunk.index)

    def _load_drafts(self, op: LoadOp) -> None:
        """Fill in what there is of the drafter's KV."""
        [group] = self.groups.drafts
        for chunk in op.drafts:
            first = max(op.start, chunk.index * self.chunk_size)
            content = self.world.drafts.get(chunk.key)
            if content is None:
                self.without_drafts.append((op.request_id, first))
                return
            content = content[(first - chunk.index * self.chunk_size) * TOKEN :]
            self._scatter(op.block_ids[group.index], group.block_size, first, content)
            self.loaded_drafts.append(chunk.index)
        if not op.drafts:
            self.without_drafts.append((op.request_id, op.start))

    # Loads

    def _take_orders(self, orders: Orders) -> None:
        self._cancelled.update(orders.cancelled)
        self._released |= {name for name, _ in orders.held}

    def _finish_loads(self) -> tuple[set[str], set[str]]:
        received, failed = set(), set()
        for op in list(self.loading):
            cancelled = op.number in self._cancelled
            if not cancelled and (self.holds_loads or self.random.random() < 0.3):
                continue
            self.loading.remove(op)
            received.add(op.request_id)
            if cancelled:
                continue
            if not self._load(op):
                failed.add(op.request_id)
                continue
            self.loads.append(op)
            if self.has_kv:
                self._load_drafts(op)
        return received, failed

    def _load(self, op: LoadOp) -> bool:
        """Fill the blocks of a load; return whether that succeeded."""
        chunks = {FULL: op.chunks, WINDOW: op.windows, STATE: op.states}
        pieces = [(kind, chunk) for kind, some in chunks.items() for chunk in some]
        if op.round != self.round or not self._settled:
            return False
        assert pieces, "nothing is known of a load"
        assert all(self.world.texts[chunk.key][1] == self.weights for _, chunk in pieces)
        if self.failing_loads:
            self.failing_loads -= 1
            kind, chunk = pieces[-1]
            self._facts.next.failures.append((kind_key(chunk.key, kind), False))
            return False
        failures: list[tuple[bytes, bool]] = []
        for kind, chunk in pieces:
            content = self.world.contents.get(kind_key(chunk.key, kind))
            if content is None or content == DAMAGED:
                failures.append((kind_key(chunk.key, kind), content is not None))
            else:
                self._fill(op, kind, chunk, content)
        self._facts.next.failures += failures
        return not failures

    def _fill(self, op: LoadOp, kind: Kind, chunk: Chunk, content: bytes) -> None:
        size = self.chunk_size
        begin = max(op.start, chunk.index * size)
        end = min(op.end, chunk.index * size + chunk.tokens)
        assert begin < end
        for group in self.groups.of(kind):
            table = op.block_ids[group.index]
            if kind == STATE:
                own, content = content[:STATE_BYTES], content[STATE_BYTES:]
                assert end == op.end == (chunk.index + 1) * size
                assert not any(table[: end // group.block_size - 1])
                self._write_state(table[end // group.block_size - 1], own)
                continue
            own, content = content[: chunk.tokens * TOKEN], content[chunk.tokens * TOKEN :]
            for token in range(begin, end):
                block = table[token // group.block_size]
                if kind == WINDOW and block == NULL_BLOCK:
                    continue
                at = (token - chunk.index * size) * TOKEN
                offset = token % group.block_size * TOKEN
                self._write(block, offset, own[at : at + TOKEN])


#: Starts an engine with a model, by name.
Start: TypeAlias = Callable[..., ScheduledEngine]


def start_engines(
    world: World,
    models: Mapping[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Start]:
    """Yield a function that starts an engine with one of `models`, by name; close all at the end.

    No engine may have contained an error.
    """
    patch_namespaces(monkeypatch)
    engines: list[ScheduledEngine] = []

    def start(model: str = "plain", **options: Any) -> ScheduledEngine:
        options.setdefault("chunk_size", 32)
        engines.append(ScheduledEngine(world, models[model], **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.end()
        engine.close()
    # Of an error that was contained there would be such a line.
    assert not [line for line in caplog.messages if "the engine goes on" in line]
