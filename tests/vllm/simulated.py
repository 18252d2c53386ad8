"""Engines without a model: both sides of the connector over paged caches of any layout.

A :class:`SimulatedEngine` has the caches, layers and cache updates of an engine and calls
:class:`~kvshelf.vllm.scheduler.SchedulerSide` and :class:`~kvshelf.vllm.worker.side.WorkerSide`
in the order in which vLLM does. Instead of a forward pass it writes KV that is a function of the
tokens so far, through the layer's own cache update.

An engine may have several ranks: tensor-parallel ones, and those of prefill and decode context
parallelism. Which tokens a rank holds, and where, is worked out here token by token.
"""

from __future__ import annotations

import hashlib
import pickle  # noqa: TID251 - as vLLM does between its processes
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    from kvshelf.vllm.groups import CacheGroups
    from kvshelf.vllm.metadata import StepMetadata, WorkerMetadata
    from kvshelf.vllm.scheduler import Engine, SchedulerSide
    from kvshelf.vllm.worker.engine import WorkerEngine
    from kvshelf.vllm.worker.side import WorkerSide

from kvshelf.assembly import Assembly
from kvshelf.capacity.uses import Uses
from kvshelf.config import Config
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import open_shelf
from tests.sim import engine_caches as configs
from tests.sim.engine_caches import (
    HEADS,
    LAYERS,
    SIZE,
    Layers,
    PagedCaches,
    Writing,
    held_slots,
    names,
    parallel_config,
    stated_heads,
    vllm_config,
)
from tests.sim.engine_sides import Request
from tests.support import constants
from tests.support.waiting import PATIENCE, while_patient

#: An EAGLE drafter numbers its layers behind those of the model.
DRAFT_LAYER = f"model.layers.{LAYERS}.attn"


def model_config(name: str = "simulated", **fields: Any) -> SimpleNamespace:
    """What the connector reads of a ``ModelConfig``."""
    known = {
        "hf_text_config": SimpleNamespace(),
        "served_model_name": name,
        "model": f"s3://a-bucket/{name}",
    }
    return configs.model_config(**known | fields)


def kv_of(tokens: Sequence[int], heads: Sequence[int] = (HEADS,) * LAYERS) -> Tensor:
    """KV of a prompt: bfloat16 ``[layers, kv_planes, tokens, heads, size]``, by prefix.

    Layers with fewer heads than others have zeros in place of those that they lack.
    """
    digest = hashlib.sha256()
    rows = []
    for token in tokens:
        digest.update(token.to_bytes(4, "little"))
        seed = int.from_bytes(digest.digest()[:7], "little")
        rows.append(torch.Generator().manual_seed(seed))
    values = [torch.randn(len(heads), 2, max(heads), SIZE, generator=row) for row in rows]
    kv = torch.stack(values, 2).bfloat16()
    for layer, count in enumerate(heads):
        kv[layer, :, :, count:] = 0
    return kv


def block_hashes(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """vLLM's hashes of the blocks of a request."""
    digest = hashlib.sha256()
    hashes = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        digest.update(repr(tokens[start : start + block_size]).encode())
        hashes.append(digest.digest())
    return hashes


class Rank(PagedCaches):
    """The caches of one worker, and its side of the connector.

    Parameters
    ----------
    engine : SimulatedEngine
    number : int
        (prefill-context rank) × tensor-parallel degree + tensor-parallel rank.
    """

    def __init__(self, engine: SimulatedEngine, number: int, config: Config, blocks: int) -> None:
        copy, rank = divmod(number, engine.tensor_parallel)
        #: Its place among the ranks that share the tokens of each block.
        self.place = (rank * engine.prefill_context + copy) % engine.decode_context
        self.engine = engine
        self.model = torch.nn.Linear(4, 4)
        self.model.requires_grad_(False).weight.fill_(number)
        drafts = () if engine.speculative_config is None else (DRAFT_LAYER,)
        group = Layers(
            "latent" if engine.latent else "full",
            names("attn", len(engine.heads)),
            engine.block_size,
            engine.heads,
            drafts,
        )
        super().__init__(
            [group], blocks, engine.form, rank=rank, ranks=engine.tensor_parallel, seed=number
        )
        self.vllm_config = vllm_config(
            self.layers,
            block_size=engine.block_size,
            blocks=blocks,
            parallel_config=parallel_config(
                world_size=engine.tensor_parallel * engine.prefill_context,
                tensor_parallel_size=engine.tensor_parallel,
                prefill_context_parallel_size=engine.prefill_context,
                decode_context_parallel_size=engine.decode_context,
                cp_kv_cache_interleave_size=engine.interleave,
            ),
            # No file of this machine.
            load_config=SimpleNamespace(load_format="auto"),
            model_config=model_config(
                get_total_num_kv_heads=lambda: max(engine.heads), model_arch_config=engine.arch
            ),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=4096),
            speculative_config=engine.speculative_config,
        )
        self.worker = WorkerSide(
            WorkerEngine(self.vllm_config, config, self.config if engine.latent else None, number),
            Assembly(config, Counters(), lambda: engine.shelf),
            others_fill=engine.others_fill,
        )
        self.worker.register(self.caches)

    def get_model(self) -> torch.nn.Module:
        """As vLLM's model runners have it."""
        return self.model

    def model_layers(self) -> Iterator[tuple[Writing, Tensor, slice]]:
        """The implementation, cache and heads of each layer of the model."""
        for name in self.groups[0].names:
            yield self.layers[name].impl, self.caches[name], self.heads[name]

    def draft_layers(self) -> Iterator[tuple[Writing, Tensor, slice]]:
        """The implementation, cache and heads of each layer of the drafter."""
        for name in self.groups[0].drafts:
            yield self.layers[name].impl, self.caches[name], self.heads[name]

    def held(self, block_ids: Sequence[int], start: int, end: int) -> tuple[Tensor, Tensor]:
        """The tokens of ``[start, end)`` that this rank holds, from 0, and their slots."""
        engine = self.engine
        shared = self.place, engine.decode_context, engine.interleave
        return held_slots(block_ids, start, end, engine.block_size, shared)


class SimulatedEngine:
    """One engine on a shelf.

    Parameters
    ----------
    shelf : Path
    form : str
        One of :data:`FORMS`, or ``odd``.
    block_size, blocks : int
        Slots of a block in the cache of one rank; number of blocks.
    seed : int
        Decides which blocks a request gets.
    heads : tuple of int
        KV heads of each layer.
    stated : bool
        vLLM's configuration states the heads of each layer, not only the most of them.
    latent : bool
        vLLM states that all ranks hold the same KV, as it does of MLA and of sparse indexers.
    tensor_parallel, prefill_context, decode_context, interleave : int
        The engine's parallelism, as vLLM's options.
    speculative_config : SpeculativeConfig, optional
        The engine has a drafter with one attention layer.
    others_fill : bool
        Another connector fills free blocks without waiting for the engine's stream.
    uses : Uses, optional
        Records what hits use.
    **options
        kvshelf's configuration.
    """

    def __init__(
        self,
        shelf: Path,
        form: str,
        block_size: int,
        *,
        blocks: int = 24,
        seed: int = 0,
        heads: tuple[int, ...] = (HEADS,) * LAYERS,
        stated: bool = True,
        latent: bool = False,
        tensor_parallel: int = 1,
        prefill_context: int = 1,
        decode_context: int = 1,
        interleave: int = 1,
        speculative_config: Any = None,
        others_fill: bool = False,
        uses: Uses | None = None,
        **options: Any,
    ) -> None:
        self.speculative_config = speculative_config
        self.others_fill = others_fill
        self.form, self.block_size = form, block_size
        self.heads = heads
        self.latent = latent
        self.arch = stated_heads(heads) if stated else None
        self.tensor_parallel, self.prefill_context = tensor_parallel, prefill_context
        self.decode_context, self.interleave = decode_context, interleave
        self.random = random.Random(seed)
        self.free = list(range(1, blocks))
        self.random.shuffle(self.free)
        config = Config(
            **{
                "shared_storage_path": str(shelf),
                "weights": "name:simulated",
                "admission": "always",
                **constants.taken({"staging_bytes": 8 << 20, **options}),
            }
        )
        self.shelf = open_shelf(str(shelf))
        ranks = tensor_parallel * prefill_context
        self.ranks = [Rank(self, number, config, blocks) for number in range(ranks)]
        vllm_config = self.ranks[0].vllm_config
        self.scheduler = SchedulerSide(
            Engine(
                vllm_config,
                config,
                lambda: self.shelf,
                CacheGroups(vllm_config, None),
                ranks=ranks,
                may_store=decode_context == 1,
                uses=uses,
            )
        )
        self.requests = 0
        #: Blocks that the last load left without KV.
        self.bad_blocks: set[int] = set()
        #: Ranks that reported a request's load.
        self.reported: Counter[str] = Counter()
        # The workers' part of the namespace to the scheduler and back.
        self.step([])
        self.step([])
        registration = self.worker.model.registration
        for _ in while_patient():
            if registration.namespace or registration.disabled_reason or self.scheduler.disabled:
                break
            self.step([])
        else:
            raise AssertionError(f"no namespace within {PATIENCE:g} s")

    @property
    def block_tokens(self) -> int:
        """Tokens in a block of the cache manager."""
        return self.block_size * self.decode_context

    @property
    def worker(self) -> WorkerSide:
        """The side of rank 0."""
        return self.ranks[0].worker

    def close(self) -> None:
        """Stop all threads."""
        self.scheduler.close()
        for rank in self.ranks:
            rank.worker.close()
        self.shelf.close()

    @property
    def namespace(self) -> bytes:
        """The namespace's record."""
        namespace = self.worker.model.registration.namespace
        assert namespace is not None
        return namespace.encoded

    def step(
        self,
        scheduled: Sequence[tuple[str, int, int]],
        block_ids: Sequence[int] = (),
        draft: Callable[[], object] | None = None,
    ) -> set[str]:
        """One step of the engine.

        Parameters
        ----------
        scheduled : sequence of tuple
            Request id, tokens computed before the step, tokens computed in it.
        block_ids : sequence of int
            Blocks of these requests.
        draft : Callable, optional
            What the drafter writes, in the order of vLLM's second model runner: behind the model's
            forward pass, when vLLM may know already that the step is over.

        Returns
        -------
        set of str
            Requests whose loads are over.
        """
        output = SimpleNamespace(
            total_num_scheduled_tokens=sum(count for _, _, count in scheduled),
            preempted_req_ids=None,
            num_scheduled_tokens={name: count for name, _, count in scheduled},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _, _ in scheduled],
                num_computed_tokens=[computed for _, computed, _ in scheduled],
                new_block_ids=[(list(block_ids),) for _ in scheduled],
                resumed_req_ids={name for name, computed, _ in scheduled if not computed},
            ),
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (list(block_ids),)),
        )
        meta = self.scheduler.step_metadata(output)
        assert isinstance(meta, StepMetadata)
        done: set[str] = set()
        answers = []
        for worker in (rank.worker for rank in self.ranks):
            # As vLLM does between its processes.
            bound = pickle.loads(pickle.dumps(meta))
            worker.bind(bound)
            if draft is not None:
                worker.stores.finish_forward()
                draft()
            worker.loads.start()
            worker.stores.save()
            ended = worker.loads.take_ended()
            self.reported.update(ended.finished)
            self.bad_blocks |= ended.bad_blocks
            answers.append(worker.worker_metadata())
            worker.clear(bound)
        done = {name for name, count in self.reported.items() if count == len(self.ranks)}
        for name in done:
            del self.reported[name]
        reports = [answer for answer in answers if answer is not None]
        merged = reduce(WorkerMetadata.aggregate, reports) if reports else None
        self.scheduler.take_output(done, (), merged)
        return done

    def request(self, tokens: list[int]) -> Any:
        """A request of vLLM, as far as the scheduler side looks at it."""
        self.requests += 1
        hashes = block_hashes(tokens, self.block_tokens)
        request = Request(f"request-{self.requests}", tokens, block_hashes=hashes)
        self.scheduler.new_request(request)
        return request

    def blocks_for(self, tokens: int) -> list[int]:
        """Take blocks for so many tokens, in no order."""
        count = -(-tokens // self.block_tokens)
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "the simulated cache is too small"
        return taken

    def put(self, tokens: Sequence[int], block_ids: Sequence[int], start: int, end: int) -> None:
        """Compute tokens ``[start, end)``."""
        values = kv_of(tokens[:end], self.heads)[:, :, start:]
        for rank in self.ranks:
            held, slots = rank.held(block_ids, start, end)
            for layer, (impl, cache, heads) in enumerate(rank.model_layers()):
                impl.put(cache, slots, values[layer][:, held, heads])
            for impl, cache, heads in rank.draft_layers():
                impl.put(cache, slots, -values[0][:, held, heads])

    def get(self, block_ids: Sequence[int], start: int, end: int) -> Tensor:
        """Read tokens ``[start, end)``: ``[layers, kv_planes, tokens, heads, size]``.

        Ranks that hold the same must agree.
        """
        found = torch.zeros_like(kv_of([0], self.heads).expand(-1, -1, end - start, -1, -1))
        for layer, heads in enumerate(self.heads):
            found[layer, :, :, :heads] = torch.nan
        for rank in self.ranks:
            held, slots = rank.held(block_ids, start, end)
            for layer, (impl, cache, heads) in enumerate(rank.model_layers()):
                values = impl.get(cache, slots)
                others = found[layer][:, held, heads]
                known = ~others.isnan()
                assert torch.equal(values[known], others[known]), "replicas differ"
                found[layer][:, held, heads] = values
        assert not found.isnan().any(), "no rank holds a token"
        return found

    def has_drafts(self, tokens: Sequence[int], block_ids: Sequence[int]) -> list[bool]:
        """Whether the drafter's KV of each token is that of the prompt."""
        expected = -kv_of(tokens)[0]
        found = torch.ones(len(tokens), dtype=torch.bool)
        for rank in self.ranks:
            held, slots = rank.held(block_ids, 0, len(tokens))
            for impl, cache, heads in rank.draft_layers():
                same = impl.get(cache, slots) == expected[:, held, heads]
                found[held] &= same.all(dim=(0, 2, 3))
        return found.tolist()

    def matched(self, request: Any, computed: int) -> int:
        """Ask how many tokens the shelf has, until the answer is there."""
        deadline = time.monotonic() + PATIENCE
        while True:
            found = self.scheduler.matched_tokens(request, computed)
            if found is not None:
                return found
            assert time.monotonic() < deadline
            self.step([])

    def prefill(self, tokens: list[int], pieces: Sequence[int] = ()) -> list[int]:
        """Compute a whole prompt in pieces, store what gets complete, return its blocks."""
        request = self.request(tokens)
        self.matched(request, 0)
        block_ids = self.blocks_for(len(tokens))
        ends = sorted({*(end for end in pieces if end < len(tokens)), len(tokens)})
        start = 0
        for end in ends:
            self.put(tokens, block_ids, start, end)
            self.step([(request.request_id, start, end - start)], block_ids)
            start = end
        for rank in self.ranks:
            assert rank.worker.drain(PATIENCE) == 0
        self.scheduler.finished(request.request_id)
        return block_ids

    def load(self, tokens: list[int], computed: int = 0) -> tuple[int, list[int]]:
        """Load a prompt's stored prefix beyond `computed` tokens; return (tokens, blocks)."""
        request = self.request(tokens)
        found = self.matched(request, computed)
        block_ids = self.blocks_for(len(tokens))
        self.bad_blocks = set()
        if found:
            self.scheduler.allocated(request, (block_ids,), found)
            deadline = time.monotonic() + PATIENCE
            while request.request_id not in self.step([]):
                assert time.monotonic() < deadline
        self.scheduler.finished(request.request_id)
        return found, block_ids


@contextmanager
def engines_on(shelf: Path, **defaults: Any) -> Iterator[Callable[..., SimulatedEngine]]:
    """Start engines on one shelf, which are closed at the end."""
    with ExitStack() as stack:

        def start(form: str = "NHD", block_size: int = 16, **options: Any) -> SimulatedEngine:
            engine = SimulatedEngine(shelf, form, block_size, **(defaults | options))
            return stack.enter_context(closing(engine))

        yield start
