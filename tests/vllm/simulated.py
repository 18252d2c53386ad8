"""Engines without a model: both sides of the connector over paged caches of any layout.

A :class:`SimulatedEngine` has the caches, layers and cache updates of an engine and calls
:class:`~kvshelf.vllm.scheduler.SchedulerSide` and :class:`~kvshelf.vllm.worker.WorkerSide` in the
order in which vLLM does. Instead of a forward pass it writes KV that is a function of the tokens so
far, through the layer's own cache update.
"""

from __future__ import annotations

import hashlib
import random
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    from vllm.v1.attention.backend import AttentionImpl

    from kvshelf.vllm.metadata import StepMetadata
    from kvshelf.vllm.scheduler import SchedulerSide
    from kvshelf.vllm.worker import WorkerSide

from kvshelf.config import Config
from kvshelf.layout import packed_positions
from kvshelf.shelf import open_shelf

LAYERS, HEADS, SIZE = 2, 2, 16
PATIENCE = 20.0
#: Layouts by which engines differ. Of "odd" nothing can be learned.
FORMS = ("NHD", "HND", "2BNHD", "vec", "amx")


class Writing(AttentionImpl):  # type: ignore[type-arg]
    """An attention implementation that knows how to write to one kind of cache."""

    sliding_window = None

    def __init__(self, form: str, block_size: int) -> None:
        self.form = form
        self.block_size = block_size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.form != "odd":
            self.put(kv_cache, slot_mapping, torch.stack((key, value)))

    def _places(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Any]:
        """Return a view of the cache and the index of ``[tokens, kvs, heads, size]`` in it."""
        block, token = slots // self.block_size, slots % self.block_size
        if self.form in ("vec", "amx"):
            order = packed_positions(self.form, self.block_size, SIZE, cache.element_size())
            assert order is not None
            flat = cache.view(cache.shape[0], HEADS, -1)
            inner = order.long()[:, token].movedim(0, 1).unsqueeze(2)
            return flat, (block.view(-1, 1, 1, 1), torch.arange(HEADS).view(1, 1, -1, 1), inner)
        if self.form == "2BNHD":
            return cache.permute(1, 2, 0, 3, 4), (block, token)
        return cache.unflatten(-1, (2, SIZE)).permute(0, 2, 3, 1, 4), (block, token)

    def put(self, cache: Tensor, slots: Tensor, values: Tensor) -> None:
        """Write ``[kvs, tokens, heads, size]``."""
        view, index = self._places(cache, slots)
        view[index] = values.movedim(1, 0).to(cache.dtype)

    def get(self, cache: Tensor, slots: Tensor) -> Tensor:
        """Read ``[kvs, tokens, heads, size]``."""
        view, index = self._places(cache, slots)
        return view[index].movedim(0, 1)


def make_cache(form: str, blocks: int, block_size: int) -> Tensor:
    """A cache as it is registered, full of what was there before."""
    shape = {
        "NHD": (blocks, block_size, HEADS, 2 * SIZE),
        "2BNHD": (2, blocks, block_size, HEADS, SIZE),
    }.get(form, (blocks, HEADS, block_size, 2 * SIZE))
    cache = torch.randn(shape).bfloat16()
    return cache.transpose(1, 2) if form == "NHD" else cache


def kv_of(tokens: Sequence[int]) -> Tensor:
    """KV of a prompt: bfloat16 ``[layers, kvs, tokens, heads, size]``, a function of prefixes."""
    digest = hashlib.sha256()
    rows = []
    for token in tokens:
        digest.update(token.to_bytes(4, "little"))
        seed = int.from_bytes(digest.digest()[:7], "little")
        rows.append(torch.Generator().manual_seed(seed))
    values = [torch.randn(LAYERS, 2, HEADS, SIZE, generator=row) for row in rows]
    return torch.stack(values, 2).bfloat16()


class SimulatedEngine:
    """One engine on a shelf.

    Parameters
    ----------
    shelf : Path
    form : str
        One of :data:`FORMS`, or ``odd``.
    block_size, blocks : int
    seed : int
        Decides which blocks a request gets.
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
        **options: Any,
    ) -> None:
        self.form, self.block_size = form, block_size
        self.random = random.Random(seed)
        self.free = list(range(1, blocks))
        self.random.shuffle(self.free)
        self.impl = Writing(form, block_size)
        names = [f"model.layers.{i}.attn" for i in range(LAYERS)]
        self.caches = {name: make_cache(form, blocks, block_size) for name in names}
        self.layers = {
            name: SimpleNamespace(
                impl=self.impl,
                kv_cache=cache,
                num_kv_heads=HEADS,
                head_size=SIZE,
                head_size_v=SIZE,
                kv_sharing_target_layer_name=None,
                kv_cache_dtype="auto",
                attn_backend=SimpleNamespace(forward_includes_kv_cache_update=False),
                _k_scale_float=1.0,
                _v_scale_float=1.0,
            )
            for name, cache in self.caches.items()
        }
        config = Config(
            shared_storage_path=str(shelf), weights="simulated", staging_bytes=8 << 20, **options
        )
        vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=self.layers),
            cache_config=SimpleNamespace(
                block_size=block_size, cache_dtype="auto", num_gpu_blocks=blocks
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
            model_config=SimpleNamespace(
                dtype=torch.bfloat16,
                quantization=None,
                hf_text_config=SimpleNamespace(),
                served_model_name="simulated",
                model="simulated",
                max_model_len=4096,
                get_total_num_kv_heads=lambda: HEADS,
            ),
        )
        self.shelf = open_shelf(str(shelf))
        self.scheduler = SchedulerSide(
            vllm_config, config, lambda: self.shelf, block_size=block_size
        )
        self.worker = WorkerSide(vllm_config, config, lambda: self.shelf)
        self.worker.register(self.caches)
        self.requests = 0
        #: Blocks that the last load left without KV.
        self.bad_blocks: set[int] = set()
        # The worker's part of the namespace to the scheduler and back.
        self.step([])
        self.step([])

    def close(self) -> None:
        """Stop all threads."""
        self.scheduler.close()
        self.worker.close()
        self.shelf.close()

    @property
    def namespace(self) -> bytes:
        """The namespace's record."""
        assert self.worker._namespace is not None
        return self.worker._namespace.encoded

    def step(
        self,
        scheduled: Sequence[tuple[str, int, int]],
        block_ids: Sequence[int] = (),
    ) -> set[str]:
        """One step of the engine.

        Parameters
        ----------
        scheduled : sequence of tuple
            Request id, tokens computed before the step, tokens computed in it.
        block_ids : sequence of int
            Blocks of these requests.

        Returns
        -------
        set of str
            Requests whose loads are over.
        """
        output = SimpleNamespace(
            total_num_scheduled_tokens=sum(count for _, _, count in scheduled),
            num_scheduled_tokens={name: count for name, _, count in scheduled},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _, _ in scheduled],
                num_computed_tokens=[computed for _, computed, _ in scheduled],
            ),
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (list(block_ids),)),
        )
        meta = self.scheduler.step_metadata(output)
        assert isinstance(meta, StepMetadata)
        self.worker.bind(meta)
        self.worker.start_loads()
        self.worker.save()
        done = self.worker.finished_loads()
        self.bad_blocks |= self.worker.take_bad_blocks()
        answer = self.worker.worker_metadata()
        self.worker.clear()
        if answer is not None:
            self.scheduler.worker_output(answer)
        self.scheduler.loads_done(done)
        return done

    def request(self, tokens: list[int]) -> Any:
        """A request of vLLM, as far as the scheduler side looks at it."""
        self.requests += 1
        request = SimpleNamespace(
            request_id=f"request-{self.requests}",
            _all_token_ids=tokens,
            num_tokens=len(tokens),
            num_prompt_tokens=len(tokens),
            prompt_token_ids=tokens,
            prompt_embeds=None,
            prompt_is_token_ids=None,
            resumable=False,
            cache_salt=None,
            lora_request=None,
            mm_features=[],
            num_preemptions=0,
        )
        self.scheduler.new_request(request)
        return request

    def blocks_for(self, tokens: int) -> list[int]:
        """Take blocks for so many tokens, in no order."""
        count = -(-tokens // self.block_size)
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "the simulated cache is too small"
        return taken

    def slots(self, block_ids: Sequence[int], start: int, end: int) -> Tensor:
        """Slots of tokens ``[start, end)``, worked out one by one."""
        size = self.block_size
        return torch.tensor(
            [block_ids[at // size] * size + at % size for at in range(start, end)],
            dtype=torch.int64,
        )

    def put(self, tokens: Sequence[int], block_ids: Sequence[int], start: int, end: int) -> None:
        """Compute tokens ``[start, end)``."""
        values = kv_of(tokens[:end])[:, :, start:]
        slots = self.slots(block_ids, start, end)
        for layer, cache in enumerate(self.caches.values()):
            self.impl.put(cache, slots, values[layer])

    def get(self, block_ids: Sequence[int], start: int, end: int) -> Tensor:
        """Read tokens ``[start, end)``: ``[layers, kvs, tokens, heads, size]``."""
        slots = self.slots(block_ids, start, end)
        return torch.stack([self.impl.get(cache, slots) for cache in self.caches.values()])

    def matched(self, request: Any, computed: int) -> int:
        """Ask how many tokens the shelf has, until the answer is there."""
        deadline = time.monotonic() + PATIENCE
        while True:
            found, _ = self.scheduler.matched_tokens(request, computed)
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
        assert self.worker.drain(PATIENCE) == 0
        self.scheduler.finished(request.request_id)
        return block_ids

    def load(self, tokens: list[int], computed: int = 0) -> tuple[int, list[int]]:
        """Load a prompt's stored prefix beyond `computed` tokens; return (tokens, blocks)."""
        request = self.request(tokens)
        found = self.matched(request, computed)
        block_ids = self.blocks_for(len(tokens))
        self.bad_blocks = set()
        if found:
            self.scheduler.allocated(request, block_ids, found)
            deadline = time.monotonic() + PATIENCE
            while request.request_id not in self.step([]):
                assert time.monotonic() < deadline
        self.scheduler.finished(request.request_id)
        return found, block_ids
