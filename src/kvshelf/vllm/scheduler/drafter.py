"""The scheduler side of a drafter's KV: its namespace, and what may be stored in it.

Chunks of the drafter's KV are stored and loaded beside those of the model. No lookup searches for
them: a load reads those that are there.

The drafter computes KV from KV of all tokens before. So behind a token without KV of the drafter
it computes KV that belongs to no prefix, and this side keeps such KV from being stored. It may lie
in vLLM's prefix cache, where later requests find it: it is remembered by vLLM's hash of the first
block that it touches. These hashes are chains, as chunk keys are, so every request that gets such
KV has that hash among those of its own blocks.

With EAGLE and MTP, KV of the last token of a chunk depends on the next token, which the chunk's
key does not cover. So the last token of a loaded prefix may have KV that was computed for another
continuation; no answer depends on it.

Contracts
---------
* The drafter's namespace is a function of the model's: `version` holds the model's digest. Once the
  model's weights changed in place, nothing of the drafter is loaded or stored any more.
* KV is stored only if the drafter had KV of all tokens before it, and ran in the step.
* All methods run on the engine's step thread, except :meth:`DraftScheduler.chain`, which lookup
  threads call.

When a method fails, the drafter is left out from then on, and the model's KV is loaded and stored
as before.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.view import ShelfView
from kvshelf.vllm.handshake import Handshake
from kvshelf.vllm.metadata import BY_PARAMETERS, WorkerFacts, WorkerReport
from kvshelf.vllm.namespace import stage_ranks, topologies_of
from kvshelf.vllm.scheduler.engine import SchedulerEngine
from kvshelf.vllm.scheduler.requests import RequestState, scheduled
from kvshelf.vllm.speculation import WITHOUT_DRAFTS, draft_config

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")

_HASHES_REMEMBERED: Final = 1 << 18
#: Logs why the drafter is left out.
_say_left_out: Final = functools.partial(logger.warning, WITHOUT_DRAFTS)


def draft_chunks(chain: KeyChain | None) -> list[Chunk]:
    """Return a prompt's chunks in the drafter's namespace; none if its keys were made without."""
    return chain.drafts.chunks if isinstance(chain, DraftedChain) else []


class DraftedChain(KeyChain):
    """Chunk keys of one prompt in the model's namespace, and in the drafter's.

    Parameters
    ----------
    namespace_digest, draft_digest : bytes
        32 bytes each.
    chunk_size : int
    **options
        As for :class:`kvshelf.format.keys.KeyChain`.

    Attributes
    ----------
    drafts : KeyChain
        The chain in the drafter's namespace.
    """

    __slots__ = ("drafts",)

    def __init__(
        self, namespace_digest: bytes, draft_digest: bytes, chunk_size: int, **options: Any
    ) -> None:
        super().__init__(namespace_digest, chunk_size, **options)
        self.drafts = KeyChain(draft_digest, chunk_size, **options)

    def extend(self, tokens: Sequence[int]) -> list[Chunk]:
        """Append tokens to both chains; return the chunks that they complete in the model's."""
        chunks = super().extend(tokens)
        self.drafts.extend(tokens)
        return chunks


@dataclass(slots=True)
class _Progress:
    """What is known of the drafter's KV of a request.

    Attributes
    ----------
    cached : int
        Tokens that vLLM's prefix cache had when it was searched for the request.
    loaded : int
        End of the tokens that a load was planned for.
    good : int
        From this token on the drafter's KV does not belong to the prefix.
    running : bool
        A step has computed some of the request's tokens.
    """

    cached: int = 0
    loaded: int = 0
    good: int = sys.maxsize
    running: bool = False


def _contained(
    method: Callable[Concatenate[DraftScheduler, _P], _R],
) -> Callable[Concatenate[DraftScheduler, _P], _R]:
    """Leave the drafter out once a method has raised, and return what it returns then."""

    @functools.wraps(method)
    def call(self: DraftScheduler, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            logger.error("%s", self.failure, exc_info=error)
            self.end()
            return method(self, *args, **kwargs)

    return call


class DraftScheduler:
    """The drafter's side of a scheduler.

    Parameters
    ----------
    engine : SchedulerEngine

    Attributes
    ----------
    left_out : bool
        Nothing of a drafter is loaded or stored, now and later; there need not be a drafter.
    """

    #: What the log says when a method fails.
    failure: Final = "KV of the drafter is left out from now on"

    def __init__(self, engine: SchedulerEngine) -> None:
        self._engine, self._drafter = engine, engine.drafter_config
        self._block_size = engine.groups.hash_block_size
        self._handshake: Handshake | None = None
        self._view: ShelfView | None = None
        #: Digest of the model's namespace, from which the drafter's follows.
        self._target = b""
        self.left_out = self._drafter is None
        #: vLLM drafts nothing in a step that comes closer to the drafter's longest prompt (the
        #: query of DFlash has one token more than there are drafts).
        self._longest = 0
        if self._drafter is not None:
            drafts = int(self._drafter.speculative_config.num_speculative_tokens)
            self._longest = int(self._drafter.model_config.max_model_len) - drafts - 1
        self._requests: dict[str, _Progress] = {}
        #: Hashes of blocks from which on the drafter's KV does not belong to the prefix.
        self._spoiled: OrderedDict[Any, None] = OrderedDict()

    # ------------------------------------------------------------- namespace

    @property
    def namespace(self) -> Namespace | None:
        """The drafter's namespace; None while it is not known."""
        return None if self._handshake is None else self._handshake.namespace

    @property
    def view(self) -> ShelfView | None:
        """The drafter's objects, once their namespace is known."""
        namespace, shelf = self.namespace, self._engine.get_shelf()
        if self._view is None and namespace is not None and shelf is not None:
            self._view = shelf.view(ObjectFormat(namespace))
        return self._view

    @_contained
    def receive(
        self, reports: Mapping[int, WorkerReport], target: Namespace | None, *, all_spoke: bool
    ) -> None:
        """Take the workers' reports about the drafter's layers.

        None of them acknowledge the namespace, if `all_spoke`.
        """
        if target is None or self.left_out:
            return
        if self._handshake is None:
            self._target = target.digest
            config = draft_config(self._engine.vllm_config, self._engine.config, target)
            ranks = stage_ranks(self._drafter)
            self._handshake = Handshake(self._drafter, config, ranks, say_disabled=_say_left_out)
        handshake = self._handshake
        if target.digest != self._target:
            # The weights of the drafter may have changed as well.
            handshake.disable("the engine's weights were changed in place")
        handshake.receive(reports, {}, all_spoke=all_spoke)
        if any(report.weights == BY_PARAMETERS for report in reports.values()):
            handshake.disable("no file of this machine identifies its weights")
        fmt = handshake.unite() if reports else None
        if fmt is not None:
            topologies = topologies_of(self._drafter, fmt.namespace.record).values()
            if any(topology.divided for topology in topologies):
                handshake.disable("each rank holds only a part of a shard of it")
            else:
                handshake.settle(fmt.namespace)
                logger.info("namespace of the drafter: %s", fmt.namespace.folder)
        if handshake.disabled:
            self.end()

    def end(self) -> None:
        """Leave the drafter out from now on."""
        self.left_out = True
        self._requests.clear()

    # ------------------------------------------------------------- chunks

    def chain(self, namespace_digest: bytes, chunk_size: int, **options: Any) -> KeyChain:
        """Return a chain of chunk keys, with those of the drafter's namespace if it is known."""
        namespace = self.namespace
        if namespace is None or self.left_out or namespace_digest != self._target:
            return KeyChain(namespace_digest, chunk_size, **options)
        return DraftedChain(namespace_digest, namespace.digest, chunk_size, **options)

    @_contained
    def asked(self, request: Any, cached: int) -> None:
        """Note how many tokens of a waiting request vLLM's prefix cache has."""
        if not self.left_out:
            self._forget(request)
            self._requests[request.request_id] = _Progress(cached)

    @_contained
    def to_load(
        self, request_id: str, chain: KeyChain | None, first: int, end: int
    ) -> Sequence[Chunk]:
        """Return the chunks of a load that begins and ends at these tokens."""
        progress = self._requests.get(request_id)
        if progress is None or not isinstance(chain, DraftedChain):
            return ()
        progress.loaded, size = end, chain.chunk_size
        return chain.drafts.chunks[first // size : -(-end // size)]

    def take_facts(self, facts: WorkerFacts) -> None:
        """Note from which token on loads delivered no KV of the drafter, or that none will."""
        for request_id, token in facts.without_drafts:
            progress = self._requests.get(request_id)
            if progress is not None:
                progress.good = min(progress.good, token)
        for reason, already_logged in facts.drafter_disabled:
            if not (already_logged or self.left_out):
                _say_left_out(reason)
            self.end()

    def plan(self, output: Any) -> None:
        """Note what a step computes."""
        requests = self._engine.requests
        self.begin_step(
            [
                (requests[req_id].request, start, end)
                for req_id, start, end in scheduled(output)
                if req_id in requests
            ]
        )

    @property
    def announcement(self) -> tuple[bytes, str] | None:
        """Record and slug of the drafter's namespace, while workers may not have it."""
        if self._handshake is None or self.left_out:
            return None
        return self._handshake.announcement

    def begin_step(self, requests: Sequence[tuple[Any, int, int]]) -> None:
        """Note what a step computes.

        Parameters
        ----------
        requests : sequence of (Request, int, int)
            With how many tokens have KV before and after the step.
        """
        runs = max((after for _, _, after in requests), default=0) <= self._longest
        for request, computed, _ in requests:
            progress = self._requests.setdefault(request.request_id, _Progress())
            if not progress.running:
                progress.running = True
                self._admit(request, progress, computed)
            if not runs:
                progress.good = min(progress.good, computed)
            self._remember(request, progress)

    def _admit(self, request: Any, progress: _Progress, computed: int) -> None:
        """Find the first known token without KV of the drafter that belongs to the prefix."""
        hashes, cached = request.block_hashes, min(progress.cached, computed)
        first = cached // self._block_size
        if computed > max(cached, progress.loaded):
            # Another connector has loaded the model's KV.
            progress.good = min(progress.good, cached)
        for index, block in enumerate(hashes[:first]):
            if block in self._spoiled:
                progress.good = min(progress.good, index * self._block_size)
                break
        if progress.good >= computed:
            # Tokens that a load did not deliver are computed.
            progress.good = sys.maxsize
        # vLLM's prefix cache does not have these blocks: they are loaded or computed anew.
        for block in hashes[first : progress.good // self._block_size] if self._spoiled else ():
            self._spoiled.pop(block, None)

    def _remember(self, request: Any, progress: _Progress) -> None:
        """Remember the first invalid block by its hash, if vLLM has computed it by now."""
        first = progress.good // self._block_size
        if first < len(request.block_hashes):
            self._spoiled[request.block_hashes[first]] = None
            if len(self._spoiled) > _HASHES_REMEMBERED:
                self._spoiled.popitem(last=False)

    def to_store(self, request_id: str, chain: KeyChain, index: int) -> Chunk | None:
        """Return the drafter's chunk that may be stored with a chunk of the model's."""
        progress = self._requests.get(request_id)
        if not isinstance(chain, DraftedChain) or progress is None:
            return None
        if (index + 1) * chain.chunk_size > progress.good:
            return None
        return chain.drafts.chunks[index]

    def finished(self, state: RequestState) -> None:
        """Forget a request."""
        self._forget(state.request)

    def _forget(self, request: Any) -> None:
        progress = self._requests.pop(request.request_id, None)
        if progress is not None and progress.running:
            self._remember(request, progress)
