"""A worker's connector without a model, driven step by step as vLLM does."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvshelf.vllm.connector import SharedStorageConnector
    from kvshelf.vllm.metadata import (
        Facts,
        LoadOp,
        StepMetadata,
        StoreOp,
        WorkerMetadata,
        WorkerReport,
    )
    from kvshelf.vllm.namespace import build_namespace
    from kvshelf.vllm.worker.side import WorkerSide
    from tests.vllm.replay import bind, make_caches, make_config, make_groups

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from tests.sim.storage import FaultyStorage
from tests.support.prompts import prompt
from tests.support.waiting import PATIENCE, until, while_patient

BLOCK, CHUNK, BLOCKS = 4, 8, 64

Step = tuple[set[str], set[int], "Said | None"]


class Said(SimpleNamespace):
    """What a worker says in a step: the fields of ``WorkerMetadata``, and of its new facts."""

    @classmethod
    def of(cls, meta: WorkerMetadata, known: int) -> Said:
        """What is said after message `known`."""
        facts = Facts()
        for rank in meta.facts:
            for number, message in meta.facts[rank]:
                if number > known:
                    facts = Facts(
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


class WorkerRig:
    """A worker's connector with registered caches, and its engine's place in the world.

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
        assert self.connector._worker is not None
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


def store_op(chunk: Chunk, blocks: Sequence[int] = (1, 2), **fields: Any) -> StoreOp:
    """A store of a chunk from some blocks."""
    return StoreOp(chunk, ([*blocks],), **{"repair": False, "age": 0.0, **fields})
