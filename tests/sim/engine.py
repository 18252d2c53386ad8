"""An engine without a model: vLLM's scheduler and cache manager, and workers over paged caches.

An :class:`EngineModel` has vLLM's own ``Scheduler``, with the scheduler's half of the connector
inside, and a worker's half for each rank, over caches of any layout. Each step makes the calls of
one of vLLM's runners, in an order that is data (:data:`_ORDERS`). Its forward pass writes KV that
is a function of all tokens so far, of the salt, of the weights and of the adapter that each was
computed with.

The forward pass compares all KV that the step reads, in every rank and layer. When a load has
ended, the engine compares what its next token reads of it. When the engine ends, every block has
been given back. So "it ran" means "no wrong KV was loaded, and none was used". A group of kind
"ring" has one block a request, which tokens overwrite in turn. What drafts and states are is told
in :mod:`tests.sim.engine_states`.

A drafter's layer has KV of its own. Where the drafter reads wrong KV, what it writes is wrong too,
and the engine goes on: no answer depends on it. What a load says to have brought of it is compared.
"""

from __future__ import annotations

import hashlib
import pickle  # noqa: TID251 - as vLLM does between its processes
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import DRAFT, FULL, Kind
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.vllm.scheduler import costs
from tests.sim.device import SimulatedEvent, SimulatedStreams
from tests.sim.engine_caches import (
    PLAIN,
    SIZE,
    Layers,
    PagedCaches,
    attention_layers,
    held_slots,
    model_config,
    scheduler_config,
    transfer_config,
)
from tests.sim.engine_sides import is_settled, lookup_of
from tests.sim.engine_states import Move, Progress, StateCaches, Work
from tests.sim.runtime import Simulation
from tests.sim.storage import posix
from tests.support.waiting import PATIENCE, while_patient

with warnings.catch_warnings():
    # Importing vLLM warns of what torch and others deprecate.
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import (
        generate_scheduler_kv_cache_config,
        get_request_block_hasher,
        init_none_hash,
        resolve_cache_hit_alignment_tokens,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    from kvshelf.vllm.connector import SharedStorageConnector
    from kvshelf.vllm.metadata import NULL_BLOCK, LoadOp, StepMetadata, WorkerFacts
    from kvshelf.vllm.scheduler import SchedulerSide
    from kvshelf.vllm.worker.side import WorkerSide


class Runner(NamedTuple):
    """A model runner of vLLM: its calls in a step, and those it makes after a call has raised."""

    calls: tuple[str, ...]
    after_error: tuple[str, ...] = ()


#: vLLM's second runner (V2) with drafts, on a device: it collects results before it saves.
DRAFTING = "V2 speculative on a device"
_ORDERS = {
    "V1": Runner(("forward", "loads", "save", "results", "output"), ("loads", "save", "results")),
    "V1 speculative": Runner(
        ("forward", "loads", "results", "draft", "save", "output"), ("loads", "results")
    ),
    "V2": Runner(("forward", "finish", "output", "loads", "save", "results")),
    "V2 speculative": Runner(("forward", "finish", "output", "draft", "loads", "results", "save")),
}
#: What tests run: a key of `_ORDERS`, with " on a device" where the caches are on one that runs
#: behind the host.
RUNNERS = ["V1", "V1 speculative", "V2", "V1 on a device", DRAFTING]
#: The layer of a drafter, which has a number behind those of the model.
DRAFT_LAYER = "model.layers.9.attn"
#: Simulated time that a step takes.
STEP_SECONDS = 0.002
#: Layers with rings compress so many tokens into one.
COMPRESSED = 4

#: The weights and the content of the adapter with which KV is computed.
Variant: TypeAlias = tuple[float, str]
#: The variants with which a token's KV and the tokens before it were computed, the first one first.
Origin: TypeAlias = tuple[Variant, ...]
#: What a drafter's layer has that belongs to no prefix.
NO_DRAFTS: Origin = ((0.0, "no drafts"),)


class Text:
    """The tokens of one request from its prompt to its end, and what a model computes of them.

    Parameters
    ----------
    prompt : sequence of int
    answer : int
        Tokens of the answer.
    identity : str
        What KV depends on besides.
    """

    def __init__(self, prompt: Sequence[int], answer: int, identity: str = "") -> None:
        self.tokens = list(prompt)
        self.prompt = len(prompt)
        digests = [identity.encode()]
        for position in range(len(prompt) + answer):
            if position >= len(prompt):
                self.tokens.append(int.from_bytes(digests[-1][:4], "little") % 900)
            token = self.tokens[position].to_bytes(4, "little")
            digests.append(hashlib.sha256(digests[-1] + token).digest())
        #: At place i the digest of the identity and the first i tokens.
        self.digests = digests
        self._streams: dict[tuple[str, Origin, int], Tensor] = {}

    def kv(
        self,
        origin: Origin,
        start: int,
        end: int,
        layer: str,
        heads: int,
        right_end: int = sys.maxsize,
    ) -> Tensor:
        """KV of tokens in a layer: bfloat16 ``[kv_planes, tokens, heads, size]``.

        From the token `right_end` on it is noise.
        """
        key = layer, origin, heads
        if key not in self._streams:
            name = f"{layer} {origin}".encode()
            count = 4 * SIZE * heads
            stream = b"".join(
                hashlib.shake_128(name + digest).digest(count) for digest in self.digests[1:]
            )
            # Without this bit no value is infinite or NaN.
            values = np.frombuffer(stream, np.uint16) & 0xBFFF
            rows = torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
            self._streams[key] = rows.view(-1, 2, heads, SIZE).movedim(1, 0)
        values = self._streams[key][:, start : min(end, right_end)]
        if values.shape[1] == end - start:
            return values
        noise = values.new_full((2, end - start - values.shape[1], heads, SIZE), 9.0)
        return torch.cat((values, noise), 1)

    def row(
        self, origin: Origin, position: int, layer: str, count: int, right_end: int = sys.maxsize
    ) -> bytes:
        """What a token leaves in the part of a state that the last tokens have."""
        if position < 0:
            return bytes(count)
        if position >= right_end:
            return bytes([9]) * count
        name = f"row of {layer} {origin}".encode()
        return hashlib.shake_128(name + self.digests[position + 1]).digest(count)

    def rest(
        self, origin: Origin, length: int, part: str, count: int, right_end: int = sys.maxsize
    ) -> bytes:
        """The part of a state that so many tokens have."""
        if length > right_end:
            return bytes([9]) * count
        name = f"state of {part} {origin}".encode()
        return hashlib.shake_128(name + self.digests[length]).digest(count)


class Weights(torch.nn.Module):
    """Weights that can be told apart, and vLLM's way to load others."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(300), requires_grad=False)
        self.register_buffer("scale", torch.full((3,), 1.0 + rank))

    def load_weights(self, weights: float) -> None:
        self.weight.data.fill_(weights)


class Adapters:
    """Stands for vLLM's ``WorkerLoRAManager``: what was loaded for each id of an adapter."""

    def __init__(self) -> None:
        self.loaded: dict[int, str] = {}

    def _load_adapter(self, adapter: Any) -> str:
        file = Path(adapter.lora_path) / "adapter_model.safetensors"
        return file.read_text() if file.exists() else str(file)

    def use(self, adapter: Any) -> None:
        """Load an adapter, unless it is loaded: vLLM does so before a step computes with it."""
        if adapter is None:
            return
        number = adapter.lora_int_id
        if number not in self.loaded or adapter.load_inplace:
            self.loaded[number] = self._load_adapter(adapter)

    def content(self, adapter: Any) -> str:
        """What KV is computed with."""
        if adapter is None:
            return ""
        return self.loaded.get(adapter.lora_int_id) or Adapters._load_adapter(self, adapter)


def counted_by(counters: Counters) -> Counter[str]:
    """Return the sums of all counts from now on; vLLM resets `counters` when it reads them."""
    counted: Counter[str] = Counter()
    count = counters.add

    def add(name: str, amount: float = 1) -> None:
        counted[name] += amount  # type: ignore[assignment]
        count(name, amount)

    counters.add = add  # type: ignore[method-assign]
    return counted


class Rank:
    """One worker: its caches, its weights, and its half of the connector.

    Parameters
    ----------
    config
        The engine's configuration, for this rank.
    caches : PagedCaches
    number : int
    device : SimulatedStreams, optional
        The device that has the caches.
    place : tuple of int
        Decode context parallelism: the place of this rank among those that share the tokens of each
        block, their number, and how many tokens each has in turn.
    """

    def __init__(
        self,
        config: Any,
        caches: PagedCaches,
        number: int = 0,
        device: SimulatedStreams | None = None,
        place: tuple[int, int, int] = (0, 1, 1),
    ) -> None:
        self.config, self.paged, self.number, self.device = config, caches, number, device
        self.place = place
        self.states = StateCaches(caches, self.enqueue)
        self.model = Weights(number)
        kind: Any = type("OnADevice", (SharedStorageConnector,), {"_streams_of": lambda *_: device})
        self.connector = kind(config, KVConnectorRole.WORKER, caches.config)
        self.side: WorkerSide = self.connector._worker
        self.counted = counted_by(self.side.counters)
        self.adapters: Adapters = type("OfThisEngine", (Adapters,), {})()
        self.side.adapters.watch(type(self.adapters))
        self.register()

    def register(self) -> None:
        """Register the caches."""
        self.connector.register_kv_caches(self.paged.caches)

    def get_model(self) -> Weights:
        """As vLLM's model runners have it."""
        return self.model

    @property
    def layers(self) -> dict[str, Any]:
        """vLLM's layers by name."""
        return self.paged.layers

    @property
    def caches(self) -> dict[str, Tensor]:
        """The caches by the names of their layers."""
        return self.paged.caches

    def enqueue(self, work: Callable[..., object], *arguments: Any) -> None:
        """Have the engine's device do something, when it comes to it."""
        if self.device is None:
            work(*arguments)
        else:
            self.device.do(work, *arguments)

    def slots(
        self, group: int, table: Sequence[int], start: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """The places in ``[start, end)`` of the tokens that this rank holds, and their slots."""
        layers = self.paged.groups[group]
        if layers.kind == "ring":
            positions = torch.arange(start, end)
            return positions - start, table[0] * layers.block_size + positions % layers.block_size
        return held_slots(table, start, end, layers.block_size, self.place)

    def places(
        self,
        table: Sequence[int],
        group: int,
        start: int,
        kv: Callable[..., Tensor],
        *,
        drafts: bool = False,
    ) -> Iterator[tuple[str, Any, Tensor, Tensor, Tensor]]:
        """Where the layers of a group have some tokens, and what this rank has of their KV.

        `kv` is by layer and heads. The layers are the model's, or the drafter's.
        """
        for index, name, impl, cache in attention_layers(self.paged):
            if index == group and drafts is (name in self.paged.groups[group].drafts):
                values = kv(name, self.heads_of(name))
                held, slots = self.slots(group, table, start, start + values.shape[1])
                yield name, impl, cache, slots, values[:, held][:, :, self.paged.heads[name]]

    def write(
        self,
        table: Sequence[int],
        group: int,
        start: int,
        kv: Callable[..., Tensor],
        *,
        drafts: bool = False,
    ) -> None:
        """Write what the layers of a group compute of some tokens."""
        for _, impl, cache, slots, values in self.places(table, group, start, kv, drafts=drafts):
            self.enqueue(impl.put, cache, slots, values)

    def compare(
        self,
        table: Sequence[int],
        group: int,
        start: int,
        kv: Callable[..., Tensor],
        what: str,
        *,
        drafts: bool = False,
    ) -> None:
        """Fail unless the layers of a group have this KV."""
        for name, *place in self.places(table, group, start, kv, drafts=drafts):
            self.enqueue(_compare, *place, f"{what}, {name}")

    def heads_of(self, name: str) -> int:
        """The KV heads of a layer on all ranks."""
        group = self.paged.groups[self.paged.group_of[name]]
        return group.heads_of((*group.names, *group.drafts).index(name))

    def check_null_block(self) -> None:
        """Fail if anything but zeros was written to the null block."""
        for name in self.caches:
            self.enqueue(_is_empty, self.paged.block(name, NULL_BLOCK))

    def gather_results(self, finished: set[str]) -> KVConnectorOutput:
        """What vLLM collects of the connector in a step."""
        connector = self.connector
        moved = connector.get_transfer_results(finished)
        return KVConnectorOutput(
            finished_recving=moved.finished_recving,
            finished_sending=moved.finished_sending,
            failed_recving=moved.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )

    def drain(self) -> None:
        """Wait for all stores."""
        assert self.side.drain(PATIENCE) == 0

    def close(self) -> None:
        self.connector.shutdown()


def _compare(impl: Any, cache: Tensor, slots: Tensor, right: Tensor, what: str) -> None:
    assert _has(impl, cache, slots, right), what


def _has(impl: Any, cache: Tensor, slots: Tensor, right: Tensor) -> bool:
    held = impl.get(cache, slots).contiguous().view(torch.int16)
    return torch.equal(held, right.contiguous().view(torch.int16))


def _is_empty(block: Tensor) -> None:
    assert not block.any(), "the null block was written"


def resolve_sizes(config: Any, caches: Any) -> tuple[int, int]:
    """Return the tokens of a block and of a hash, and set what vLLM derives of them in `caches`."""
    size, hash_size = resolve_kv_cache_block_sizes(caches, config)
    caches.hash_block_size = hash_size
    caches.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
        caches, config, size, hash_size
    )
    return size, hash_size


def make_scheduler(config: Any, caches: Any) -> tuple[Any, Any]:
    """Return vLLM's scheduler of an engine, and what hashes the blocks of its requests."""
    size, hash_size = resolve_sizes(config, caches)
    init_none_hash(sha256)
    kind: Any = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=caches,
        structured_output_manager=_UNSTRUCTURED,
        block_size=size,
        hash_block_size=hash_size,
    )
    return scheduler, get_request_block_hasher(hash_size, sha256)


#: Stands for vLLM's manager of structured outputs, of which there are none.
_UNSTRUCTURED: Any = SimpleNamespace(
    should_advance=lambda request: False,
    accept_tokens=lambda request, tokens: True,
    validate_tokens=lambda request, tokens: tokens,
)


class ScheduledRequests:
    """What users of an engine do with vLLM's scheduler, and what it answers.

    Parameters
    ----------
    config
        From :func:`scheduler_config`.
    caches : KVCacheConfig
        That of the scheduler.
    """

    def __init__(self, config: Any, caches: Any) -> None:
        self.scheduler, self._hasher = make_scheduler(config, caches)
        self.asynchronous = bool(config.scheduler_config.async_scheduling)
        self.connector: Any = self.scheduler.connector
        self.side: SchedulerSide = self.connector._scheduler
        #: What the scheduler side has counted, also what vLLM has taken since.
        self.counted = counted_by(self.side.counters)
        #: Steps whose results vLLM does not have yet.
        self.results: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.texts: dict[str, Text] = {}
        self.adapters: dict[str, Any] = {}
        self.metas: list[StepMetadata] = []
        self.answers: dict[str, list[int]] = {}
        #: The connector's params of requests that ended.
        self.params: dict[str, Any] = {}

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        answer: int = 2,
        *,
        transfer: object = None,
        skips: bool = False,
        **options: Any,
    ) -> None:
        """Add a request; `transfer` is its kv_transfer_params, `options` are vLLM's.

        With `skips` it does not read vLLM's prefix cache.
        """
        self.answers.pop(name, None)
        self.adapters[name] = options.get("lora_request")
        self.texts[name] = Text(prompt, answer, repr(options.get("cache_salt")))
        params = SamplingParams(
            max_tokens=answer,
            temperature=0.0,
            ignore_eos=True,
            extra_args=None if transfer is None else {"kv_transfer_params": transfer},
            skip_reading_prefix_cache=skips,
        )
        request = Request(name, list(prompt), params, None, block_hasher=self._hasher, **options)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def wait_for_lookup(self, name: str) -> None:
        """Wait until the lookup of a request is done."""
        lookup = lookup_of(self.side, name)
        assert lookup is not None and lookup.wait(PATIENCE)

    @property
    def names(self) -> list[str]:
        """The requests that have not ended, or keep blocks."""
        return list(self.scheduler.requests)

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def format(self) -> ObjectFormat:
        return ObjectFormat(self.connector.namespace)

    def chunks_of(self, tokens: Sequence[int]) -> list[Chunk]:
        """The chunks of a prompt."""
        fmt = self.format
        return KeyChain(fmt.namespace.digest, fmt.chunk_size).extend(tokens)

    def tail_of(self, tokens: Sequence[int]) -> Chunk | None:
        """The tail of a prompt."""
        chain = KeyChain(self.format.namespace.digest, self.format.chunk_size)
        chain.extend(tokens)
        return chain.tail()

    step: Callable[[], StepMetadata]

    def finish(self) -> None:
        """Step until all requests have ended, and compare their answers."""
        for _ in while_patient():
            if not self.scheduler.requests and not self.results:
                break
            self.step()
        else:
            raise AssertionError(f"requests do not end: {self.names}")
        for name, tokens in self.answers.items():
            text = self.texts[name]
            assert tokens == text.tokens[text.prompt :][: len(tokens)]

    def settle(self) -> None:
        """Step until there can be hits: the namespace is known, and the weights were compared."""
        for _ in while_patient():
            if is_settled(self.side):
                return
            self.step()
        raise AssertionError("the workers do not agree")

    def end(self) -> None:
        """Abort what is left, and step until every block has been given back."""
        for name in self.names:
            self.abort(name)
        for _ in while_patient():
            if not self.scheduler.requests and not self.results:
                break
            self.step()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert self.free_blocks == pool.num_gpu_blocks - 1, "blocks are not given back"

    def known(self, name: str) -> int:
        """Tokens of a request, with those that the scheduler has not been told of."""
        known: int = self.scheduler.requests[name].num_tokens
        for _, answer in self.results:
            if name in answer.req_id_to_index:
                known += len(answer.sampled_token_ids[answer.req_id_to_index[name]])
        return known

    def take_result(self) -> ModelRunnerOutput:
        """Give vLLM the results of the oldest step of which it has none."""
        output, result = self.results.popleft()
        for outputs in self.scheduler.update_from_output(output, result).values():
            for request in outputs.outputs:
                name = request.request_id
                self.answers.setdefault(name, []).extend(request.new_token_ids)
                if request.finish_reason is not None:
                    self.params[name] = request.kv_transfer_params
        return result


class EngineModel(ScheduledRequests):
    """An engine.

    Parameters
    ----------
    shelf : str
        The URL of the shelf.
    groups : sequence of Layers
        The KV cache groups of the model.
    runner : str
        One of :data:`RUNNERS`.
    form : str
        The layout of the caches, one of :data:`FORMS`; "HND" whatever it is on a device.
    blocks : int
        Blocks of the cache, the null block included.
    budget, requests : int
        Most tokens and most requests of a step.
    asynchronous : bool
        vLLM schedules a step before it has the results of the last.
    prefix_caching : bool
        Keep blocks of finished requests for others.
    tensor_parallel, prefill_context, decode_context, interleave : int
        The engine's parallelism, as vLLM's options.
    lora : dict
        What the connector reads of a ``LoRAConfig``.
    drafter : SpeculativeConfig, optional
        The engine has a drafter with one layer, which is in the last group of full attention.
    drafts : int
        What it proposes in each step; some of it is wrong.
    data_parallel : int
        vLLM's option.
    retention : int, optional
        vLLM's ``prefix_cache_retention_interval``.
    room : int, optional
        The most tokens of a step as workers see it, by which they size their buffers on a device;
        default: `budget`.
    seed : int
        Decides in which order a device does its work.
    role : str
        vLLM's ``kv_role``.
    on : str
        The kind of device that vLLM has been told of.
    model : dict
        What the connector reads of a ``ModelConfig``, where it differs.
    **options
        kvshelf's configuration.
    """

    def __init__(
        self,
        shelf: str,
        groups: Sequence[Layers] = PLAIN,
        *,
        runner: str = "V1",
        form: str = "vec",
        blocks: int = 64,
        budget: int = 1000,
        requests: int = 100,
        asynchronous: bool = False,
        prefix_caching: bool = True,
        tensor_parallel: int = 1,
        prefill_context: int = 1,
        decode_context: int = 1,
        interleave: int = 1,
        lora: Mapping[str, Any] | None = None,
        drafter: Any = None,
        drafts: int = 0,
        data_parallel: int = 1,
        retention: int | None = None,
        room: int | None = None,
        seed: int = 0,
        role: str = "kv_both",
        on: str = "cpu",
        model: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        groups = [replace(one, drafted=drafts) if one.is_state else one for one in groups]
        self._state_groups = [number for number, one in enumerate(groups) if one.is_state]
        self._draft_group = 0
        if drafter is not None and drafter.method == "mtp":
            full = [n for n, one in enumerate(groups) if one.kind in ("full", "latent")]
            self._draft_group = full[-1]
            groups[full[-1]] = replace(groups[full[-1]], drafts=(DRAFT_LAYER,))
        self.groups, self.folder = groups, Path(shelf)
        self.drafter, self.drafts = drafter, drafts
        self.runner = _ORDERS[runner.partition(" on ")[0]]
        assert drafter is None or "draft" in self.runner.calls
        #: The device that runs what the engine enqueues, if it is apart from the host.
        self.device = SimulatedStreams(seed) if runner.endswith("on a device") else None
        if self.device is not None:
            form = "HND"
        self.unit = [group.block_size * decode_context for group in groups]
        ranks = tensor_parallel * prefill_context
        most = max(heads for group in groups for heads in group.heads)
        block_size = min(group.block_size for group in groups if group.kind != "ring")
        # vLLM ends the steps of a prompt at these blocks, and takes them for those of states.
        assert all(group.block_size == block_size for group in groups if group.is_state)
        self.config = scheduler_config(
            model_config(
                **{"get_total_num_kv_heads": lambda: most, "max_model_len": 16384, **(model or {})}
            ),
            block_size=block_size,
            blocks=blocks,
            budget=budget,
            requests=requests,
            asynchronous=asynchronous,
            prefix_caching=prefix_caching,
            second_runner=runner.startswith("V2"),
            kv_transfer_config=transfer_config(shelf, role, **options),
            speculative_config=drafter,
            lora_config=None if lora is None else SimpleNamespace(**{"max_loras": 9} | lora),
        )
        self.config.device_config = SimpleNamespace(device_type=on)
        for name, value in {
            "world_size": ranks,
            "tensor_parallel_size": tensor_parallel,
            "prefill_context_parallel_size": prefill_context,
            "decode_context_parallel_size": decode_context,
            "cp_kv_cache_interleave_size": interleave,
            "data_parallel_size": data_parallel,
        }.items():
            setattr(self.config.parallel_config, name, value)
        self.ranks = []
        for number in range(ranks):
            copy, rank = divmod(number, tensor_parallel)
            caches = PagedCaches(
                groups, blocks, form, rank=rank, ranks=tensor_parallel, seed=seed + number
            )
            config = caches.rank_config(self.config, rank=number)
            if room is not None:
                config.scheduler_config = SimpleNamespace(max_num_batched_tokens=room)
            place = (rank * prefill_context + copy) % decode_context
            shared = place, decode_context, interleave
            self.ranks.append(Rank(config, caches, number, self.device, shared))
        # As vLLM's engine core does: where layers of a group differ, the scheduler sees one spec.
        merged = generate_scheduler_kv_cache_config([self.ranks[0].paged.config])
        merged.prefix_cache_retention_interval = retention
        super().__init__(self.config, merged)
        self._progress = Progress(groups, drafts, asynchronous=asynchronous, seed=seed)
        self._aggregator = KVOutputAggregator(ranks)
        #: For each block, how the KV of each of its tokens came about.
        self._origins: dict[int, list[Origin]] = {}
        #: The loads that were planned, by number.
        self.loads: dict[int, LoadOp] = {}
        self._begun: list[LoadOp] = []
        #: Requests of which a load failed.
        self.failed: set[str] = set()
        #: Up to which token a load has brought KV of the drafter, by request.
        self.loaded_drafts: dict[str, int] = {}
        #: Requests of which the drafter has read KV that does not belong to their prefix.
        self.misled: set[str] = set()
        #: Tokens that each step computed of each request.
        self.written: list[tuple[str, int, int]] = []
        self.steps = 0
        self.forward_error: Exception | None = None
        #: On a device: an event that it reaches when vLLM has the output of the newest step.
        self.output: SimulatedEvent | None = None
        #: What the workers reported in the newest step, and which reports the scheduler gets for
        #: it: a test may drop, delay, split or repeat them.
        self.reported: Any = None
        self.deliver: Callable[[Any], Sequence[Any]] = lambda report: [report]

    # What users do

    def preempt(self, name: str) -> None:
        """Preempt a request as vLLM does where another one needs its blocks, if that is possible.

        It is not while the request does not run, or the results of a step are missing.
        """
        request = self.scheduler.requests[name]
        if request.status == RequestStatus.RUNNING and not self.results:
            self.scheduler.running.remove(request)
            self.scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
            self.scheduler.prev_step_scheduled_req_ids.discard(name)

    def load_weights(self, weights: float) -> None:
        """Load other weights in all ranks."""
        for rank in self.ranks:
            rank.model.load_weights(weights)

    def write_weights(self, weights: float) -> None:
        """Change weights where no hook sees it."""
        for rank in self.ranks:
            rank.model.weight.data.fill_(weights)

    def reset(self, *, running: bool = False, connector: bool = True) -> bool:
        """Reset vLLM's prefix cache, and what the connector knows."""
        # vLLM fails where requests that do not run have blocks, or steps are in flight.
        get_blocks = self.scheduler.kv_cache_manager.get_block_ids
        others = self.scheduler.requests.keys() - {one.request_id for one in self.scheduler.running}
        held = self.results or any(any(get_blocks(name)) for name in others)
        reset = self.scheduler.reset_prefix_cache(running and not held, reset_connector=connector)
        return bool(reset)

    def forget(self) -> None:
        """Forget vLLM's cached prefixes. No request may have blocks. kvshelf learns nothing."""
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()

    # The shelf

    def objects_of(self, chunk: Chunk, kind: Kind = FULL) -> list[Path]:
        """The paths of the objects of a chunk."""
        of_kind, folder = self.format.of(kind), self.folder / self.format.namespace.folder
        shards = range(of_kind.shards)
        return [folder / object_name(chunk, shard, of_kind.shards, kind) for shard in shards]

    def has_stored(self, chunk: Chunk, kind: Kind = FULL) -> bool:
        return all(path.exists() for path in self.objects_of(chunk, kind))

    def take(self, chunk: Chunk, kind: Kind = FULL) -> dict[Path, bytes]:
        """Take a chunk off the shelf; return its objects."""
        objects = {path: path.read_bytes() for path in self.objects_of(chunk, kind)}
        for path in objects:
            path.unlink()
        return objects

    def put(self, objects: Mapping[Path, bytes]) -> None:
        """Put objects on the shelf."""
        for path, content in objects.items():
            posix(self.folder).write(str(path.relative_to(self.folder)), [content])

    @property
    def stored(self) -> list[tuple[Kind, int]]:
        """The kind and the index of all chunks that steps had workers store."""
        return [(op.kind, op.chunk.index) for meta in self.metas for op in meta.stores]

    # What tests ask

    @property
    def worker(self) -> Rank:
        """The first rank."""
        return self.ranks[0]

    def is_loading(self, name: str) -> bool:
        """Whether a request waits for its load."""
        request = self.scheduler.requests.get(name)
        return request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS

    def loads_of(self, name: str) -> list[LoadOp]:
        """The loads of a request."""
        return [op for op in self.loads.values() if op.request_id == name]

    def loaded(self, name: str) -> int:
        """The tokens of the newest load of a request, whether it failed or not."""
        return sum(op.end - op.start for op in self.loads_of(name)[-1:])

    def computed(self, name: str) -> int:
        """The tokens that were computed of a request; those computed twice count twice."""
        return sum(end - start for request, start, end in self.written if request == name)

    def drain(self) -> None:
        """Wait for all stores."""
        for rank in self.ranks:
            rank.drain()

    # Steps

    def run(self, *prompts: Sequence[int], answer: int = 2, **options: Any) -> list[int]:
        """Run requests to their ends; return the tokens that the shelf had for each."""
        names = [f"{self.steps}-{number}" for number in range(len(prompts))]
        for name, tokens in zip(names, prompts, strict=True):
            self.add(name, tokens, answer, **options)
        self.finish()
        self.drain()
        return [self.loaded(name) for name in names]

    def close(self) -> None:
        """End the engine."""
        self.end()
        self.shut_down()

    def shut_down(self) -> None:
        """Stop the threads, whatever is left."""
        for rank in self.ranks:
            rank.close()
        self.connector.shutdown()
        if self.device is not None:
            self.device.close()

    def __enter__(self) -> EngineModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.end()
        self.shut_down()

    def step(self) -> StepMetadata:
        """One step of the engine."""
        self.steps += 1
        output = self.scheduler.schedule()
        meta = output.kv_connector_metadata
        assert isinstance(meta, StepMetadata)
        self.metas.append(meta)
        self._note_loads(meta)
        get_blocks = self.scheduler.kv_cache_manager.get_block_ids
        tables = {name: get_blocks(name) for name in output.num_scheduled_tokens}
        works = self._progress.plan(output, self.texts, self.known)
        for copy in output.kv_cache_block_copies or ():
            self._origins[copy.dst_block_id] = list(self._origins[copy.src_block_id])
        for name in output.num_scheduled_tokens:
            for rank in self.ranks:
                rank.adapters.use(self.adapters[name])
        states: dict[str, Mapping[int, Origin]] = {}
        origins: dict[str, Origin] = {}
        for work in works:
            # A request may read what one before it computes in the same step.
            table, name = tables[work.name], work.name
            self._move_origins(table, work.enters)
            states[name] = self._state_origins(table, work)
            origins[name] = self._new_origin(table, work, states[name])
            self._set_origins(table, work.start, work.right_end, origins[name])
            columns = range(work.column, work.column + work.end - work.running + 1)
            self._set_state_origins(table, columns, origins[name])

        def forward(rank: Rank) -> None:
            if self.forward_error is not None and works:
                raise self.forward_error
            for work in works:
                name = work.name
                self._compute(rank, work, tables[name], origins[name], states[name])
            for work in works:
                self._compare(rank, work.name, tables[work.name], 0, work.start)
            self._check_stored(rank, meta, late=False)
            rank.check_null_block()

        def draft(rank: Rank) -> None:
            for work in works:
                self._move_states(rank, tables[work.name], work.leaves)
            self._check_stored(rank, meta, late=True)
            for work in works if self._drafts(works) else ():
                self._draft(rank, work, tables[work.name], origins[work.name])

        results = []
        for rank in self.ranks:
            self._fill_new_blocks(rank, output, works, tables)
            compute = partial(forward, rank), partial(draft, rank)
            results.append(self._execute(rank, output, meta, *compute))
        for work in works:
            self._move_origins(tables[work.name], work.leaves)
            self.written.append((work.name, work.start, work.end))
        if Simulation.current is not None:
            # Other threads run in the time that a model needs.
            time.sleep(STEP_SECONDS)
        self._collect(output, works, results)
        self._check_sums()
        return meta

    def _check_sums(self) -> None:
        """Compare what the admission counts as running with what vLLM knows of all requests."""
        states, admission = self.side.requests.values(), self.side.admission
        if admission.always:
            return
        lengths = [
            (state.request.num_computed_tokens, state.request.num_prompt_tokens)
            for state in states
            if not state.loading
        ]
        remaining = [costs.work(start, end) for start, end in lengths if 0 < start < end]
        assert admission._computing.totals == tuple(map(sum, zip((0, 0), *remaining, strict=True)))
        assert len(admission._running) == sum(state.loading for state in states)
        assert len(admission._running) > 0 or not any(admission._running.totals)

    def _execute(
        self,
        rank: Rank,
        output: Any,
        meta: StepMetadata,
        compute: Callable[[], None],
        draft: Callable[[], None],
    ) -> KVConnectorOutput:
        """Make the calls of a step in one rank."""
        connector, result = rank.connector, KVConnectorOutput()
        connector.bind_connector_metadata(pickle.loads(pickle.dumps(meta)))

        def forward() -> None:
            compute()
            for name, cache in rank.caches.items():
                connector.wait_for_layer_load(name)
                connector.save_kv_layer(name, cache, None)

        def gather() -> None:
            nonlocal result
            result = rank.gather_results(output.finished_req_ids)

        calls: Mapping[str, Callable[[], object]] = {
            "forward": forward,
            "finish": connector.finish_forward,
            "output": self._note_output,
            "draft": draft,
            "loads": lambda: connector.start_load_kv(None),
            "save": connector.wait_for_save,
            "results": gather,
        }
        try:
            for call in self.runner.calls:
                calls[call]()
        except Exception:
            for call in self.runner.after_error:
                calls[call]()
            raise
        connector.clear_connector_metadata()
        result = pickle.loads(pickle.dumps(result))
        self._check_loaded(rank, result)
        return result

    def _note_output(self) -> None:
        """Record the event at which vLLM has the step's output, and may free its blocks."""
        if self.device is not None:
            self.output = SimulatedEvent(self.device)
            self.output.recorded = 1
            self.device.put(self.device.engine, ("record", (self.output, 1)))

    def _collect(
        self, output: Any, works: Sequence[Work], results: Sequence[KVConnectorOutput]
    ) -> None:
        """Give vLLM's scheduler the results of a step, or of the one before it."""
        names = [work.name for work in works]
        outputs: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[work.sampled for work in works],
                kv_connector_output=result,
            )
            for result in results
        ]
        answer = self._aggregator.aggregate(outputs)
        assert answer is not None
        connector_output = answer.kv_connector_output
        assert connector_output is not None
        assert NULL_BLOCK not in connector_output.invalid_block_ids
        self.reported = connector_output.kv_connector_worker_meta
        first, *others = [*self.deliver(self.reported), None]
        connector_output.kv_connector_worker_meta = first
        self.results.append((output, answer))
        while len(self.results) > (self.asynchronous and output.total_num_scheduled_tokens > 0):
            answer = self.take_result()
            if self.drafts and not self.asynchronous:
                guesses = self._progress.guesses
                names = [name for name in answer.req_ids if name in guesses]
                drafts = DraftTokenIds(names, [guesses[name] for name in names])
                self.scheduler.update_draft_token_ids(drafts)
        for other in others:
            self.connector.update_connector_output(
                KVConnectorOutput(kv_connector_worker_meta=other)
            )

    # Contents

    def _variant(self, name: str) -> Variant:
        """What the KV of a request is computed with now."""
        rank = self.ranks[0]
        return float(rank.model.weight[0]), rank.adapters.content(self.adapters[name])

    def _note_loads(self, meta: StepMetadata) -> None:
        """Note the loads that begin with this step: they must bring KV of the present weights."""
        self._begun = [op for op in meta.loads if op.number not in self.loads]
        for op in self._begun:
            self.loads[op.number] = op
            origin = (self._variant(op.request_id),)
            self._set_origins(op.block_ids, op.start, op.end, origin)
            self._set_state_origins(op.block_ids, self._last_column(op), origin)

    def _set_origins(
        self, tables: Sequence[list[int]], start: int, end: int, origin: Origin
    ) -> None:
        for group, table in enumerate(tables):
            layers, unit = self.groups[group], self.unit[group]
            if layers.kind == "ring":
                origins = self._origins_of(table[0], unit)
                for token in range(max(start, end - unit), end):
                    origins[token % unit] = origin
                continue
            for number in () if layers.is_state else range(start // unit, -(-end // unit)):
                # An error may have kept the connector from learning of blocks.
                if not table[number : number + 1]:
                    continue
                origins = self._origins_of(table[number], unit)
                first, last = max(0, start - number * unit), min(unit, end - number * unit)
                origins[first:last] = [origin] * (last - first)

    def _origins_of(self, block: int, unit: int) -> list[Origin]:
        """The origins of the tokens of a block, which may be new or another group's."""
        if len(self._origins.get(block, ())) != unit:
            self._origins[block] = [()] * unit
        return self._origins[block]

    def _set_state_origins(
        self, tables: Sequence[list[int]], columns: Sequence[int], origin: Origin
    ) -> None:
        for group in self._state_groups:
            for column in columns:
                self._origins[tables[group][column]] = [origin]

    def _move_origins(self, tables: Sequence[list[int]], move: Move | None) -> None:
        for group in self._state_groups if move else ():
            table = tables[group]
            self._origins[table[move.target]] = self._origins[table[move.source + move.ahead]]

    def _state_origins(self, tables: Sequence[list[int]], work: Work) -> dict[int, Origin]:
        """Return the origins of the states with which a step begins, by group."""
        groups = self._state_groups if work.start else ()
        return {
            group: self._origins[tables[group][work.column + work.ahead]][0] for group in groups
        }

    def _last_column(self, op: LoadOp) -> list[int]:
        """The column of the states of a load, if there are states."""
        return [op.end // self.unit[group] - 1 for group in self._state_groups[:1]]

    def _new_origin(
        self, tables: Sequence[list[int]], work: Work, states: Mapping[int, Origin]
    ) -> Origin:
        """Return the origin of what a step computes."""
        history = dict.fromkeys(states.values())
        for group, table in enumerate(tables):
            if not self.groups[group].is_state:
                history |= dict.fromkeys(self._history(group, table, work.start))
        origin: Origin = max(history, key=len, default=())
        if any(before != origin[: len(before)] for before in history):
            # Tuples of all that was read would grow with each token.
            origin = ((0.0, hashlib.sha256(repr([*history]).encode()).hexdigest()),)
        variant = self._variant(work.name)
        return origin if origin[-1:] == (variant,) else (*origin, variant)

    def _history(self, group: int, table: Sequence[int], end: int) -> list[Origin]:
        """Return the origin of the KV of each token before `end` in a group."""
        unit, history = self.unit[group], list[Origin]()
        if self.groups[group].kind == "ring":
            first = self._first_read(group, end)
            origins = [self._origins[table[0]][token % unit] for token in range(first, end)]
            return [()] * first + origins
        for block in table[: -(-end // unit)]:
            history += [()] * unit if block == NULL_BLOCK else self._origins[block]
        return history[:end]

    def _first_read(self, group: int, start: int) -> int:
        """The first token that a token at `start` attends to."""
        layers = self.groups[group]
        if layers.kind == "ring":
            return start - start % COMPRESSED
        if layers.kind == "local":
            return start - start % layers.part
        if layers.kind == "window":
            return max(0, start - layers.window + 1)
        return 0

    def _compute(
        self,
        rank: Rank,
        work: Work,
        tables: Sequence[list[int]],
        origin: Origin,
        states: Mapping[int, Origin],
    ) -> None:
        """Have a rank compute tokens of a request, whose states and rings must be right."""
        text, start, end = self.texts[work.name], work.start, work.end
        self._move_states(rank, tables, work.enters)
        for group, origin_of_state in states.items():
            place = tables[group], (work.column, work.ahead)
            what = f"state of {start} tokens of {work.name}, group {group}, rank {rank.number}"
            rank.states.compare(group, *place, text, origin_of_state, start, what)
        for group, table in enumerate(tables):
            if self.groups[group].is_state:
                rank.states.write(group, table, work, text, origin)
                continue
            first = start
            if self.groups[group].kind == "ring":
                read = self._first_read(group, start)
                self._compare_group(rank, work.name, group, table, read, start)
                first = max(start, end - self.unit[group])
            tokens = {"right_end": work.right_end}
            rank.write(table, group, first, partial(text.kv, origin, first, end, **tokens))
            wrong = partial(text.kv, NO_DRAFTS, first, end, **tokens)
            rank.write(table, group, first, wrong, drafts=True)

    def _move_states(self, rank: Rank, tables: Sequence[list[int]], move: Move | None) -> None:
        for group in self._state_groups if move else ():
            rank.states.move(group, tables[group], move)

    def _compare(
        self, rank: Rank, name: str, tables: Sequence[list[int]], start: int, end: int
    ) -> None:
        """Fail unless a rank has the KV of the tokens before `end` that one at `end` reads."""
        for group, table in enumerate(tables):
            layers = self.groups[group]
            if layers.kind != "ring" and not layers.is_state:
                unit, first = self.unit[group], max(start, self._first_read(group, end))
                assert all(table[first // unit : -(-end // unit)]), "a block is not there"
                self._compare_group(rank, name, group, table, first, end)

    def _check_stored(self, rank: Rank, meta: StepMetadata, *, late: bool) -> None:
        """Fail unless a rank has what the chunks stand for that a step has it store."""
        for op in meta.stores:
            text = self.texts[op.request_id]
            start = op.chunk.index * self.format.chunk_size
            end = start + op.chunk.tokens
            for group, blocks in enumerate(op.block_ids if op.late is late else ()):
                if not blocks or op.kind == DRAFT:
                    continue
                if group in self._state_groups:
                    origin = self._origins[blocks[0]][0]
                    rank.states.compare(group, blocks, (0, 0), text, origin, end, "a stored state")
                else:
                    table = [NULL_BLOCK] * (start // self.unit[group]) + blocks
                    self._compare_group(rank, op.request_id, group, table, start, end)

    def _compare_group(
        self, rank: Rank, name: str, group: int, table: Sequence[int], start: int, end: int
    ) -> None:
        text = self.texts[name]
        for origin, token, last in self._origin_runs(group, table, start, end):
            what = f"tokens {token} to {last} of {name}, group {group}, rank {rank.number}"
            rank.compare(table, group, token, partial(text.kv, origin, token, last), what)

    def _origin_runs(
        self, group: int, table: Sequence[int], start: int, end: int
    ) -> Iterator[tuple[Origin, int, int]]:
        """The origins of the KV of tokens in a group, each with its first token and its end."""
        last = start
        for origin, run in groupby(self._history(group, table, end)[start:]):
            token, last = last, last + len(list(run))
            yield origin, token, last

    def _drafts(self, works: Sequence[Work]) -> bool:
        """Whether the drafter runs in a step: not where drafts would exceed its longest prompt."""
        if self.drafter is None or self.drafter.draft_model_config is None:
            return False
        longest = (
            self.drafter.draft_model_config.max_model_len - self.drafter.num_speculative_tokens
        )
        return max((work.running for work in works), default=0) <= longest

    def _draft(self, rank: Rank, work: Work, tables: Sequence[list[int]], origin: Origin) -> None:
        """Have the drafter compute some tokens: of no use where it has not right KV before them."""
        group, table, text = self._draft_group, tables[self._draft_group], self.texts[work.name]
        tokens = {"right_end": work.right_end}
        wrong = partial(text.kv, NO_DRAFTS, work.start, work.end, **tokens)

        def check(*place: Any) -> None:
            if not _has(*place):
                self.misled.add(work.name)
                places = rank.places(table, group, work.start, wrong, drafts=True)
                for _, impl, cache, *content in places:
                    impl.put(cache, *content)

        right = partial(text.kv, origin, work.start, work.end, **tokens)
        rank.write(table, group, work.start, right, drafts=True)
        for before, token, last in self._origin_runs(group, table, 0, work.start):
            kv = partial(text.kv, before, token, last)
            for _, *place in rank.places(table, group, token, kv, drafts=True):
                rank.enqueue(check, *place)

    def _check_loaded_drafts(self, rank: Rank, op: LoadOp, facts: Sequence[WorkerFacts]) -> None:
        """Compare what a load has brought of the drafter's KV: all that it does not deny."""
        if self.drafter is None:
            return
        denied = [
            token for told in facts for name, token in told.without_drafts if name == op.request_id
        ]
        group, text = self._draft_group, self.texts[op.request_id]
        table, end = op.block_ids[group], min([op.end if op.drafts else op.start, *denied])
        self.loaded_drafts[op.request_id] = end
        for origin, token, last in self._origin_runs(group, table, op.start, end):
            kv, what = partial(text.kv, origin, token, last), f"drafts of {op.request_id}"
            rank.compare(table, group, token, kv, what, drafts=True)

    def _fill_new_blocks(
        self,
        rank: Rank,
        output: Any,
        works: Sequence[Work],
        tables: Mapping[str, tuple[list[int], ...]],
    ) -> None:
        """Copy blocks before the step begins, as runners do.

        On a device also zero the blocks that the step computes first, and fill those of loads with
        a value that no KV has.
        """
        for copy in output.kv_cache_block_copies or ():
            for layer in rank.caches:
                source = rank.paged.block(layer, copy.src_block_id)
                rank.enqueue(rank.paged.block(layer, copy.dst_block_id).copy_, source)
        if rank.device is None:
            return
        for work in works:
            for group, (table, unit) in enumerate(zip(tables[work.name], self.unit, strict=True)):
                blocks = table[-(-work.start // unit) : -(-work.end // unit)]
                for block in () if group in self._state_groups else blocks:
                    for layer in rank.caches:
                        rank.enqueue(rank.paged.block(layer, block).zero_)
        for op in self._begun:
            for table, unit in zip(op.block_ids, self.unit, strict=True):
                for block in {*table[-(-op.start // unit) : op.end // unit]} - {NULL_BLOCK}:
                    for layer in rank.caches:
                        rank.enqueue(rank.paged.block(layer, block).fill_, 9.0)

    def _check_loaded(self, rank: Rank, result: KVConnectorOutput) -> None:
        """Compare what loads have brought that ended in this step."""
        bad = result.invalid_block_ids
        for op in list(self.loads.values()):
            name = op.request_id
            if name not in (result.finished_recving or ()) or op is not self.loads_of(name)[-1]:
                continue
            if name in result.failed_recving or bad.intersection(*op.block_ids):
                self.failed.add(name)
                continue
            if self.is_loading(name):
                self._compare(rank, name, op.block_ids, op.start, op.end)
                for group, column in product(self._state_groups, self._last_column(op)):
                    table, what = op.block_ids[group], f"loaded state of {name}, group {group}"
                    origin = self._origins[table[column]][0]
                    place = table, (column, 0)
                    text = self.texts[name]
                    rank.states.compare(group, *place, text, origin, op.end, what)
                meta = result.kv_connector_worker_meta
                facts = () if meta is None else meta.facts.get(rank.number, ())
                self._check_loaded_drafts(rank, op, [told for _, told in facts])


#: Starts an engine.
Start: TypeAlias = Callable[..., EngineModel]


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
