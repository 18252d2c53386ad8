"""A vLLM in miniature: the calls that a connector gets, in the order in which they come.

:class:`MiniVllm` drives the two halves of a real ``SharedStorageConnector`` as vLLM 0.32's
scheduler and its two model runners do (order of calls, formats of new, cached and resumed
requests, deferred saves of speculative decoding), with chunked prefill, a local prefix
cache, preemption, aborts and recomputation of failed loads, and with a forward pass that
writes bytes which depend on the whole prefix. Before every step it checks that each block
that a request counts as computed holds exactly these bytes.
"""

from __future__ import annotations

import hashlib
import pickle  # noqa: TID251 - as vLLM does between its processes
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

from tests.native.simulated_device import SimulatedEvent, SimulatedStreams
from tests.sim.runtime import Simulation
from tests.support import constants
from tests.support.waiting import while_patient
from tests.vllm.configs import HEADS, vllm_config

with warnings.catch_warnings():
    # Importing vLLM warns of what torch and others deprecate.
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.attention.backend import AttentionImpl
    from vllm.v1.core.sched.output import KVConnectorBlockState
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
    from vllm.v1.outputs import KVConnectorOutput

    from kvshelf.vllm.connector import SharedStorageConnector
    from kvshelf.vllm.item_ids import CONTENT
    from kvshelf.vllm.worker.side import WorkerSide

#: The second runner as vLLM 0.33 has it: with drafts it collects results before it saves.
DRAFTING = "V2 speculative on a device"
#: The order of a runner's calls, and whether its caches are on a device that runs behind.
RUNNERS = ["V1", "V1 speculative", "V2", "V1 on a device", DRAFTING]

LAYERS, HEAD_SIZE = 2, 16
NULL = 0
#: Simulated time that a step takes.
STEP_SECONDS = 0.002


class CPUAttentionBackendImpl(AttentionImpl):  # type: ignore[type-arg]
    """Stands for vLLM's class of this name: it writes K transposed, then V, in each block."""

    sliding_window: int | tuple[int, int]

    def __init__(self, window: int = -1, attn_type: str = "decoder") -> None:
        self.sliding_window = window
        self.attn_type = attn_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        blocks, heads, size, _ = kv_cache.shape
        halves = kv_cache.view(blocks, heads, 2, -1)
        block, token = slot_mapping // size, slot_mapping % size
        halves[:, :, 0].view(blocks, heads, HEAD_SIZE, size)[block, :, :, token] = key
        halves[:, :, 1].view(blocks, heads, size, HEAD_SIZE)[block, :, token] = value


class StridedAttentionImpl(CPUAttentionBackendImpl):
    """Stands for those of GPUs: K and V of a token and head beside each other."""

    def __init__(self, window: int = -1, attn_type: str = "decoder") -> None:
        super().__init__(window, attn_type)
        # Tokens to the left and to the right.
        self.sliding_window = (-1, -1) if window < 0 else (window - 1, 0)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        block, token = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
        kv_cache[block, :, token, :HEAD_SIZE] = key
        kv_cache[block, :, token, HEAD_SIZE:] = value


class ConnectorOnADevice(SharedStorageConnector):
    """The connector, told that the caches are on a simulated device."""

    device: SimulatedStreams | None = None

    def _streams_of(self, device: torch.device) -> SimulatedStreams | None:
        return self.device


def make_caches(blocks: int, block_size: int) -> dict[str, torch.Tensor]:
    shape = (blocks, HEADS, block_size, 2 * HEAD_SIZE)
    return {
        f"model.layers.{i}.self_attn.attn": torch.zeros(shape, dtype=torch.bfloat16)
        for i in range(LAYERS)
    }


def make_config(
    shelf: str,
    *,
    block_size: int = 4,
    blocks: int = 64,
    role: str = "kv_both",
    window: int = -1,
    **extra: Any,
) -> SimpleNamespace:
    """What the connector reads of a ``VllmConfig``; a `server` has the shelf itself."""
    options = {
        **({} if "server" in extra else {"shared_storage_path": shelf}),
        "chunk_size": 8,
        "weights": "name:test",
        **constants.taken({"staging_bytes": 1 << 20, **extra}),
    }
    layers = {
        f"model.layers.{i}.self_attn.attn": SimpleNamespace(
            impl=CPUAttentionBackendImpl(window),
            sliding_window=None if window < 0 else window,
            num_kv_heads=HEADS,
            head_size=HEAD_SIZE,
            attn_backend=SimpleNamespace(forward_includes_kv_cache_update=False),
            kv_cache=torch.tensor([]),
        )
        for i in range(LAYERS)
    }
    transfer = SimpleNamespace(
        engine_id=uuid.uuid4().hex,
        kv_connector_extra_config=options,
        kv_load_failure_policy="recompute",
        is_kv_producer=role in ("kv_both", "kv_producer"),
        is_kv_consumer=role in ("kv_both", "kv_consumer"),
    )
    return vllm_config(layers, block_size=block_size, blocks=blocks, kv_transfer_config=transfer)


def speculation(method: str, **fields: Any) -> SimpleNamespace:
    """What the connector reads of a ``SpeculativeConfig``."""
    known = {
        "method": method,
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": None,
        "draft_model_config": None,
        "draft_parallel_config": None,
        "draft_load_config": None,
        "kv_cache_dtype": None,
    }
    return SimpleNamespace(**known | fields)


def bind(config: SimpleNamespace, caches: Mapping[str, torch.Tensor]) -> None:
    """Give each layer its cache, as vLLM does before it registers them."""
    for name, cache in caches.items():
        config.compilation_config.static_forward_context[name].kv_cache = cache


def make_groups(
    config: SimpleNamespace, count: int = 1, blocks: int | None = None
) -> SimpleNamespace:
    """What the connector reads of a ``KVCacheConfig``."""
    layers = config.compilation_config.static_forward_context
    sizes = {
        "block_size": config.cache_config.block_size,
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.bfloat16,
    }
    windows = {getattr(layer, "sliding_window", None) for layer in layers.values()} - {None}
    spec: Any = (
        SlidingWindowSpec(**sizes, sliding_window=max(windows))
        if windows
        else FullAttentionSpec(**sizes)
    )
    names = list(layers)
    group = SimpleNamespace(layer_names=names, kv_cache_spec=spec)
    return SimpleNamespace(
        kv_cache_groups=[group] * count,
        num_blocks=blocks or config.cache_config.num_gpu_blocks,
        prefix_cacheable_group_ids=tuple(range(count)),
    )


def pickled(record: object) -> bytes:
    """What vLLM sends from one of its processes to another."""
    return pickle.dumps(record)


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


class Model(torch.nn.Module):
    """Weights that can be told apart, and vLLM's way to load others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(300), requires_grad=False)
        self.register_buffer("scale", torch.ones(3))

    def load_weights(self, weights: float) -> None:
        self.weight.data.fill_(weights)


@dataclass
class State:
    """What the miniature scheduler and runner know of a request."""

    request: Request
    blocks: list[int] = field(default_factory=list)
    status: str = "waiting"
    load_failed: bool = False
    in_worker: bool = False
    loaded: int = 0
    loads: int = 0
    #: For each token, the weights that its KV was computed with.
    history: list[float] = field(default_factory=list)
    #: Blocks that the connector was told of.
    told: int = 0


class Adapters:
    """Stands for vLLM's ``WorkerLoRAManager``: what was loaded for each id of an adapter."""

    def __init__(self) -> None:
        self.loaded: dict[int, str] = {}
        self._seen: dict[object, set[str]] = {}

    def _load_adapter(self, adapter: Any) -> str:
        file = Path(adapter.lora_path) / "adapter_model.safetensors"
        return file.read_text() if file.exists() else str(file)

    def use(self, adapter: Any) -> None:
        """Load an adapter as a step does that computes with it, or as an API server says."""
        if adapter is None:
            return
        number = adapter.lora_int_id
        if number not in self.loaded or adapter.load_inplace:
            self.loaded[number] = self._load_adapter(adapter)
        for name in (number, (adapter.lora_name, adapter.lora_path)):
            self._seen.setdefault(name, set()).add(self.loaded[number])

    def content(self, adapter: Any) -> str:
        """What KV is computed with."""
        if adapter is None:
            return ""
        return self.loaded.get(adapter.lora_int_id) or Adapters._load_adapter(self, adapter)

    def unsure(self, adapter: Any) -> bool:
        """Whether vLLM itself may use KV of other content for it."""
        if adapter is None:
            return False
        names = (adapter.lora_int_id, (adapter.lora_name, adapter.lora_path))
        return any(len(self._seen.get(name, ())) > 1 for name in names)


@dataclass
class Blocks:
    ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(self.ids),)


class MiniVllm:
    """An engine of one worker.

    Parameters
    ----------
    config
        From :func:`make_config`.
    runner : str
        One of :data:`RUNNERS`.
    blocks : int
        Blocks of the cache, the null block included.
    budget : int
        Most tokens of a step.
    prefix_caching : bool
        Keep blocks of finished requests for others.
    seed : int
        Decides in which order a device does its work.
    room : int
        Tokens for whose chunks a device has buffers: this engine does not wait for its device
        after a step, as others do.
    lora : dict
        What the connector reads of a ``LoRAConfig``.
    """

    def __init__(
        self,
        config: SimpleNamespace,
        *,
        runner: str = "V1",
        blocks: int = 64,
        budget: int = 1000,
        prefix_caching: bool = True,
        window: int = 0,
        seed: int = 0,
        room: int = 1000,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        config.lora_config = None if lora is None else SimpleNamespace(**lora)
        self.runner = runner.partition(" on ")[0]
        #: The device that runs what the engine enqueues, if it is apart from the host.
        self.device = SimulatedStreams(seed) if runner.endswith("on a device") else None
        if self.device is not None:
            for layer in config.compilation_config.static_forward_context.values():
                window_of_all = layer.sliding_window
                layer.impl = StridedAttentionImpl(-1 if window_of_all is None else window_of_all)
        self.budget = budget
        self.window = window
        self.prefix_caching = prefix_caching and not window
        config.cache_config.enable_prefix_caching = self.prefix_caching
        self.block_size: int = config.cache_config.block_size
        config.scheduler_config.max_num_batched_tokens = room
        groups = make_groups(config, blocks=blocks)
        kind = type("OfThisEngine", (ConnectorOnADevice,), {"device": self.device})
        self.model = Model()
        #: For each block, the weights of all tokens up to its last one.
        self.made: dict[int, list[float]] = {}
        self.worker = kind(config, KVConnectorRole.WORKER, groups)
        self.caches = make_caches(blocks, self.block_size)
        bind(config, self.caches)
        self.worker.register_kv_caches(self.caches)
        self.adapters: Adapters = type("OfThisEngine", (Adapters,), {})()
        self.worker._worker.adapters.watch(type(self.adapters))
        self.scheduler = SharedStorageConnector(config, KVConnectorRole.SCHEDULER, groups)
        self.states: dict[str, State] = {}
        self.params: dict[str, Any] = {}
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.free = list(range(1, blocks))
        self.users: dict[int, int] = {}
        self.cached: dict[bytes, int] = {}
        self.finished_ids: set[str] = set()
        self.preempted_ids: set[str] = set()
        self.steps = 0
        self.forward_error: Exception | None = None
        #: Reached when vLLM has the output of the last step.
        self.output: SimulatedEvent | None = None
        self.written: list[tuple[str, int, int]] = []
        #: New blocks, which the runner zeroes before it binds the step, and those into which it
        #: copies others: a load's.
        self.zeroed: list[int] = []
        self.copied: list[int] = []
        #: What the worker said in the last step, and what of it the scheduler gets in this one.
        self.reported: Any = None
        self.deliver: Callable[[Any], Sequence[Any]] = lambda report: [report]

    # What users do

    def add(self, request: Request) -> Request:
        self.states[request.request_id] = State(request)
        self.waiting.append(request.request_id)
        self.scheduler.on_new_request(request)
        return request

    def abort(self, request_id: str) -> None:
        state = self.states.get(request_id)
        if state is not None and state.status != "finished":
            self._finish(state, blocks_stay=state.status == "loading")

    def preempt(self, request_id: str) -> None:
        if request_id in self.running:
            self.running.remove(request_id)
            state = self.states[request_id]
            self._give_back(state)
            state.status = "preempted"
            state.request.num_computed_tokens = 0
            state.request.num_preemptions += 1
            self.waiting.insert(0, request_id)
            self.preempted_ids.add(request_id)

    def get_model(self) -> Model:
        """As vLLM's model runners have it."""
        return self.model

    @property
    def weights(self) -> float:
        return float(self.model.weight[0])

    @property
    def loading(self) -> bool:
        """Whether any request waits for its load: vLLM then refuses to reset running ones."""
        return any(state.status == "loading" for state in self.states.values())

    def reset_prefix_cache(self, *, running: bool = False, connector: bool = True) -> bool:
        """Reset as vLLM's scheduler does, which resets the connector whatever else failed."""
        if running:
            for request_id in reversed(self.running.copy()):
                self.preempt(request_id)
        done = not any(self.users.values())
        if done:
            self.cached.clear()
        if connector:
            done = self.scheduler.reset_cache() is not False and done
        return done

    def drop_prefix_cache(self) -> None:
        assert not self.running
        self.cached.clear()

    def run(self) -> None:
        """Step until no request is left."""
        for _ in while_patient():
            if not self.states:
                return
            self.step()
        raise AssertionError(f"not done: {self.states}")

    def end(self) -> None:
        """Abort what is left, and step until every block has been given back."""
        for request_id in list(self.states):
            self.abort(request_id)
        for _ in while_patient():
            if not self.states:
                break
            self.step()
        assert not any(self.users.values()), "blocks are not given back"
        assert sorted(self.free) == sorted(set(self.free)), "a block is given back twice"

    def close(self) -> None:
        self.end()
        self.shut_down()

    def shut_down(self) -> None:
        """Stop the threads, whatever is left."""
        self.worker.shutdown()
        self.scheduler.shutdown()
        if self.device is not None:
            self.device.close()

    def enqueue(self, work: Callable[..., object], *arguments: Any) -> None:
        """Have the engine's device do something, when it comes to it."""
        if self.device is None:
            work(*arguments)
        else:
            self.device.do(work, *arguments)

    def __enter__(self) -> MiniVllm:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.end()
        self.shut_down()

    # One step

    def step(self) -> Any:
        self.steps += 1
        output = self._schedule()
        meta = self.scheduler.build_connector_meta(output)
        output.kv_connector_block_state = None
        result = self._execute(output, pickle.loads(pickled(meta)))
        if Simulation.current is not None:
            # As long as a model computes, other threads run.
            time.sleep(STEP_SECONDS)
        self._update(output, pickle.loads(pickled(result)))
        return meta

    def _schedule(self) -> SimpleNamespace:
        scheduled: dict[str, int] = {}
        new: list[State] = []
        resumed: list[State] = []
        continued: list[State] = []
        budget = self.budget
        for request_id in list(self.running):
            if request_id not in self.running or budget <= 0:
                continue
            state = self.states[request_id]
            count = min(budget, state.request.num_tokens - state.request.num_computed_tokens)
            self._leave_window(state)
            while not self._extend(state, state.request.num_computed_tokens + count):
                victim = self.running[-1]
                if victim in scheduled:
                    budget += scheduled.pop(victim)
                    continued = [s for s in continued if s.request.request_id != victim]
                self.preempt(victim)
                if victim == request_id:
                    break
            if request_id not in self.running:
                break
            scheduled[request_id] = count
            continued.append(state)
            budget -= count
        if not self.preempted_ids or not scheduled:
            # Those that hold blocks come first, so that they cannot starve each other.
            for request_id in sorted(self.waiting, key=lambda r: not self.states[r].blocks):
                if budget <= 0 or not self._admit(request_id, budget, scheduled, new, resumed):
                    break
                budget = self.budget - sum(scheduled.values())
        return self._output(scheduled, new, resumed, continued)

    def _admit(
        self,
        request_id: str,
        budget: int,
        scheduled: dict[str, int],
        new: list[State],
        resumed: list[State],
    ) -> bool:
        """Try to schedule one waiting request; False when none behind it may be."""
        state = self.states[request_id]
        request = state.request
        if state.status == "loading":
            return True
        external = 0
        if request.num_computed_tokens == 0:
            local = self._local_hit(request)
            answer = self.scheduler.get_num_new_matched_tokens(
                request, len(local) * self.block_size
            )
            assert isinstance(answer, tuple)
            found, asynchronous = answer
            if found is None:
                return True
            assert asynchronous == (found > 0)
            external = found
            computed = len(local) * self.block_size + external
            assert computed < request.num_tokens, "one token must be left to compute"
            assert computed % self.block_size == 0
        else:
            local, computed = [], request.num_computed_tokens
        count = 0 if external else min(budget, request.num_tokens - computed)
        if not state.blocks:
            for block in local:
                self.users[block] = self.users.get(block, 0) + 1
                if block in self.free:
                    self.free.remove(block)
            state.blocks = list(local)
            state.history = list(self.made[local[-1]]) if local else []
        if external and len(self.free) < self._still_needed() + self._needs(state):
            self._give_back(state)
            return False
        if not self._extend(state, computed + count, loaded=computed if external else 0):
            if request.num_computed_tokens == 0:
                self._give_back(state)
            return False
        self.scheduler.update_state_after_alloc(request, Blocks(state.blocks), external)
        request.num_computed_tokens = computed
        if external:
            state.loads += 1
            state.loaded = external
            state.status = "loading"
            if self.device is not None and not self.window:
                self.copied += state.blocks[len(local) : computed // self.block_size]
            self._note_made(state, computed - external, computed)
            return True
        self.waiting.remove(request_id)
        self.running.append(request_id)
        (resumed if state.in_worker else new).append(state)
        state.status = "running"
        state.in_worker = True
        scheduled[request_id] = count
        return True

    def _output(
        self,
        scheduled: dict[str, int],
        new: list[State],
        resumed: list[State],
        continued: list[State],
    ) -> SimpleNamespace:
        if self.runner.startswith("V2"):
            # The second model runner is given resumed requests as if they were new.
            new, resumed = new + resumed, []
        cached = [*continued, *resumed]
        told = [None if s.told == len(s.blocks) else (s.blocks[s.told :],) for s in continued]
        told += [(list(s.blocks),) for s in resumed]
        for state in (*new, *cached):
            state.told = len(state.blocks)
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=s.request.request_id,
                    num_computed_tokens=s.request.num_computed_tokens,
                    block_ids=(list(s.blocks),),
                )
                for s in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[s.request.request_id for s in cached],
                resumed_req_ids={s.request.request_id for s in resumed},
                new_block_ids=told,
                num_computed_tokens=[s.request.num_computed_tokens for s in cached],
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=self.preempted_ids,
            finished_req_ids=self.finished_ids,
            has_sync_kv_loads=False,
            kv_connector_block_state=KVConnectorBlockState(
                req_ids=set(scheduled),
                resolve_block_ids=lambda request_id: (self.states[request_id].blocks,),
                boundary_state_offloads={},
            ),
        )
        self.preempted_ids, self.finished_ids = set(), set()
        return output

    def _execute(self, output: SimpleNamespace, meta: Any) -> KVConnectorOutput:
        worker = self.worker
        result = KVConnectorOutput()
        for cache in self.caches.values():
            for block in self.zeroed:
                self.enqueue(cache[block].zero_)
            for block in self.copied:
                self.enqueue(cache[block].fill_, 9.0)
        self.zeroed.clear()
        self.copied.clear()
        worker.bind_connector_metadata(meta)

        def results() -> None:
            moved = worker.get_transfer_results(output.finished_req_ids)
            result.finished_recving = moved.finished_recving
            result.finished_sending = moved.finished_sending
            result.failed_recving = moved.failed_recving
            result.invalid_block_ids = worker.get_block_ids_with_load_errors()
            result.kv_connector_stats = worker.get_kv_connector_stats()
            result.kv_connector_worker_meta = worker.build_connector_worker_meta()

        @contextmanager
        def lifecycle() -> Any:
            try:
                yield
            finally:
                worker.start_load_kv(None)
                if self.runner == "V1":
                    worker.wait_for_save()
                results()

        def forward() -> None:
            self._forward(output)
            for name, cache in self.caches.items():
                worker.wait_for_layer_load(name)
                worker.save_kv_layer(name, cache, None)

        if self.runner.startswith("V2"):
            forward()
            worker.finish_forward()
            self._note_output()
            worker.start_load_kv(None)
            if self.runner == "V2":
                worker.wait_for_save()
                results()
            else:
                results()
                worker.wait_for_save()
        else:
            with lifecycle():
                forward()
            if self.runner == "V1 speculative":
                worker.wait_for_save()
            self._note_output()
        worker.clear_connector_metadata()
        return result

    def _note_output(self) -> None:
        """Record the event at which vLLM has the step's output, and may free its blocks."""
        if self.device is not None:
            self.output = SimulatedEvent(self.device)
            self.output.recorded = 1
            self.device.put(self.device.engine, ("record", (self.output, 1)))

    def _forward(self, output: SimpleNamespace) -> None:
        for request_id in output.num_scheduled_tokens:
            self.adapters.use(self.states[request_id].request.lora_request)
        for request_id, count in output.num_scheduled_tokens.items():
            state = self.states[request_id]
            computed = state.request.num_computed_tokens
            self.check(state, computed)
            if self.forward_error is not None:
                raise self.forward_error
            self.written.append((request_id, computed, computed + count))
            self._note_made(state, computed, computed + count)
            first, last = computed // self.block_size, -(-(computed + count) // self.block_size)
            for i in range(first, last):
                end = min(computed + count, (i + 1) * self.block_size)
                assert self.users[state.blocks[i]] == 1, "a shared block is written"
                for layer, cache in enumerate(self.caches.values()):
                    content = self.content(state.request, layer, end, state.history)
                    self.enqueue(cache[state.blocks[i]].copy_, content)

    def _update(self, output: SimpleNamespace, result: KVConnectorOutput) -> None:
        bad = result.invalid_block_ids
        assert NULL not in bad
        for request_id in result.failed_recving or ():
            state = self.states.get(request_id)
            if state is not None and state.status == "loading":
                state.request.num_computed_tokens = 0
                state.load_failed = True
        for state in self.states.values():
            # Only blocks of running loads can be bad: nothing else may be touched.
            if state.status == "loading":
                for i, block in enumerate(state.blocks):
                    if block in bad and i * self.block_size < state.request.num_computed_tokens:
                        state.request.num_computed_tokens = i * self.block_size
                        state.load_failed = True
                        break
            elif state.status != "finished":
                assert not bad.intersection(state.blocks)
        for request_id, count in output.num_scheduled_tokens.items():
            state = self.states.get(request_id)
            if state is None or state.status != "running":
                continue
            request = state.request
            request.num_computed_tokens += count
            if self.prefix_caching:
                self._cache(state)
            if request.num_computed_tokens == request.num_tokens:
                request._all_token_ids.append(sum(request._all_token_ids) % 997)
                if request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
                    self._finish(state)
        self.reported = result.kv_connector_worker_meta
        first, *others = [*self.deliver(self.reported), None]
        result.kv_connector_worker_meta = first
        self.scheduler.update_connector_output(result)
        for other in others:
            self.scheduler.update_connector_output(
                KVConnectorOutput(kv_connector_worker_meta=other)
            )
        for request_id in result.finished_recving or ():
            state = self.states[request_id]
            if state.status == "loading":
                self._loaded(state)
            else:
                assert state.status == "finished"
                self._give_back(state)
                del self.states[request_id]
        for request_id in result.finished_sending or ():
            state = self.states.pop(request_id)
            assert state.status == "finished"
            self._give_back(state)

    def _loaded(self, state: State) -> None:
        request = state.request
        state.status = "preempted" if request.num_preemptions else "waiting"
        if request.num_computed_tokens:
            self.check(state, request.num_computed_tokens)
            if self.prefix_caching:
                self._cache(state)
        else:
            self._give_back(state)

    def _finish(self, state: State, blocks_stay: bool = False) -> None:
        request_id = state.request.request_id
        delay, parameters = self.scheduler.request_finished(state.request, list(state.blocks))
        assert delay is False or not blocks_stay
        self.params[request_id] = parameters
        blocks_stay = blocks_stay or delay
        self.finished_ids.add(request_id)
        for queue in (self.waiting, self.running):
            if request_id in queue:
                queue.remove(request_id)
        state.status = "finished"
        if not blocks_stay:
            self._give_back(state)
            del self.states[request_id]

    # Blocks

    def _note_made(self, state: State, start: int, end: int) -> None:
        """Note that a request's tokens from `start` on get the KV of the weights of now."""
        state.history = state.history[:start] + [self.weights] * (end - start)
        for i in range(start // self.block_size, -(-end // self.block_size)):
            if state.blocks[i] != NULL:
                self.made[state.blocks[i]] = state.history[: (i + 1) * self.block_size]

    def content(
        self, request: Request, layer: int, end: int, history: Sequence[float]
    ) -> torch.Tensor:
        """What the block that ends at token `end` holds: for each token a function of its prefix.

        Packed as the layers' implementation does it.
        """
        size = self.block_size
        first = (end - 1) // size * size
        # What decides the KV of a token: all up to it.
        identity = _identity(request, self.adapters.content(request.lora_request))
        made = zip_longest(request._all_token_ids[:end], history[:end])
        prefix = [f"{token} {weights}," for token, weights in made]
        running = hashlib.shake_128((identity + "".join(prefix[:first])).encode())
        data = bytearray()
        for token in prefix[first:]:
            running.update(token.encode())
            digest = running.copy()
            digest.update(bytes([layer]))
            data += digest.digest(4 * HEADS * HEAD_SIZE)
        rows = torch.frombuffer(data, dtype=torch.int16).view(-1, 2, HEADS, HEAD_SIZE)
        if self.device is not None:
            strided = torch.zeros(HEADS, size, 2, HEAD_SIZE, dtype=torch.int16)
            strided[:, : len(rows)] = rows.permute(2, 0, 1, 3)
            return strided.view(torch.bfloat16).view(HEADS, size, 2 * HEAD_SIZE)
        block = torch.zeros(HEADS, 2, HEAD_SIZE * size, dtype=torch.int16)
        block[:, 0].view(HEADS, HEAD_SIZE, size)[:, :, : len(rows)] = rows[:, 0].permute(1, 2, 0)
        block[:, 1].view(HEADS, size, HEAD_SIZE)[:, : len(rows)] = rows[:, 1].transpose(0, 1)
        return block.view(torch.bfloat16).view(HEADS, size, 2 * HEAD_SIZE)

    def check(self, state: State, computed: int) -> None:
        """Fail unless the first `computed` tokens of a request have exactly their KV."""
        if self.adapters.unsure(state.request.lora_request):
            return
        for i in range(-(-computed // self.block_size)):
            if state.blocks[i] == NULL:
                continue
            end = min(computed, (i + 1) * self.block_size)
            for layer, cache in enumerate(self.caches.values()):
                history = self.made[state.blocks[i]]
                right = self.content(state.request, layer, end, history).view(torch.int16)
                what = f"block {i} of {state.request.request_id}, layer {layer}"
                self.enqueue(self._holds, cache[state.blocks[i]].view(torch.int16), right, what)
        self.enqueue(self._null_is_empty)

    @staticmethod
    def _holds(found: torch.Tensor, right: torch.Tensor, what: str) -> None:
        assert torch.equal(found, right), what

    def _null_is_empty(self) -> None:
        assert not any(cache[NULL].any() for cache in self.caches.values()), "the null block"

    def _local_hit(self, request: Request) -> list[int]:
        blocks: list[int] = []
        while (len(blocks) + 1) * self.block_size < request.num_tokens:
            key = _local_key(request, (len(blocks) + 1) * self.block_size)
            if key not in self.cached:
                break
            blocks.append(self.cached[key])
        return blocks

    def _cache(self, state: State) -> None:
        for i in range(state.request.num_computed_tokens // self.block_size):
            key = _local_key(state.request, (i + 1) * self.block_size)
            self.cached.setdefault(key, state.blocks[i])

    def _extend(self, state: State, tokens: int, loaded: int = 0) -> bool:
        """Give a request the blocks for so many tokens, of which `loaded` come from outside."""
        needed = -(-tokens // self.block_size) - len(state.blocks)
        skipped = 0
        if loaded and self.window:
            skipped = max(0, loaded - self.window + 1) // self.block_size
        if needed - skipped > len(self.free):
            return False
        for _ in range(needed):
            if len(state.blocks) < skipped:
                state.blocks.append(NULL)
                continue
            block = self.free.pop(0)
            for key in [key for key, value in self.cached.items() if value == block]:
                del self.cached[key]
            self.users[block] = 1
            state.blocks.append(block)
            if self.device is not None:
                self.zeroed.append(block)
        return True

    def _needs(self, state: State) -> int:
        return -(-(state.request.num_tokens + 1) // self.block_size) - len(state.blocks)

    def _still_needed(self) -> int:
        """Blocks that requests with a load will need to go on."""
        return sum(
            self._needs(state)
            for state in self.states.values()
            if state.blocks and state.status in ("loading", "waiting", "preempted")
        )

    def _leave_window(self, state: State) -> None:
        if self.window:
            skipped = max(0, state.request.num_computed_tokens - self.window + 1)
            for i in range(skipped // self.block_size):
                if state.blocks[i] != NULL:
                    self._give_back_block(state.blocks[i])
                    state.blocks[i] = NULL

    def _give_back(self, state: State) -> None:
        for block in reversed(state.blocks):
            if block != NULL:
                self._give_back_block(block)
        state.blocks = []

    def _give_back_block(self, block: int) -> None:
        self.users[block] -= 1
        if self.users[block] == 0:
            self.free.append(block)


#: Starts an engine.
Start: TypeAlias = Callable[..., MiniVllm]


def _identity(request: Request, adapter: object) -> str:
    return repr((request.cache_salt, adapter, _items(request)))


def _digest(request: Request, end: int, adapter: object) -> bytes:
    identity = _identity(request, adapter)
    return hashlib.sha256((identity + repr(request._all_token_ids[:end])).encode()).digest()


def _local_key(request: Request, end: int) -> bytes:
    """What vLLM's own prefix cache knows a token's KV by."""
    adapter = request.lora_request
    name = None if adapter is None else (adapter.lora_name, adapter.lora_path)
    return _digest(request, end, name)


def _items(request: Request) -> list[object]:
    return [(f.identifier, f.mm_position.offset, f.mm_position.length) for f in request.mm_features]


def image(identifier: str, offset: int, length: int) -> SimpleNamespace:
    """A multimodal item as vLLM describes it, named by its content."""
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(
        identifier=identifier, mm_position=position, mm_hash=f"{CONTENT}{identifier}"
    )


def make_adapter(folder: Path, text: str) -> Path:
    """Write the files of a LoRA adapter; return their folder."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(text)
    return folder


def adapter(path: object, number: int = 1, **options: Any) -> SimpleNamespace:
    """A LoRA request."""
    values: Mapping[str, Any] = {"load_inplace": False, **options}
    return SimpleNamespace(
        **{"lora_name": f"adapter {number}", **values}, lora_int_id=number, lora_path=str(path)
    )


def side_of(engine: MiniVllm) -> WorkerSide:
    """Return the worker's side, once there is one."""
    side = engine.worker._worker
    assert side is not None
    return side
