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
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvshelf.config import Config
from kvshelf.errors import KVShelfError
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.namespace import Namespace
from kvshelf.vllm.metadata import BY_PARAMETERS, WorkerReport
from kvshelf.vllm.namespace import build_namespace, stage_ranks, topologies_of, unite_ranks
from kvshelf.vllm.speculation import WITHOUT_DRAFTS, draft_config, draft_engine

logger = logging.getLogger(__name__)

_HASHES_REMEMBERED = 1 << 18


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
    at_hand : int
        Tokens that vLLM's prefix cache had when it was searched for the request.
    searched : int
        The step before which it was searched; −1 if it was not.
    loaded : int
        End of the tokens that a load was planned for.
    fresh : int
        Behind the known tokens, the end up to which marks of invalid blocks were removed.
    good : int
        From this token on the drafter's KV does not belong to the prefix.
    running : bool
        A step has computed some of the request's tokens.
    unnamed : int
        Index of a block whose hash is to be remembered, once vLLM has computed it; −1 without.
    """

    at_hand: int = 0
    searched: int = -1
    loaded: int = 0
    fresh: int = 0
    good: int = sys.maxsize
    running: bool = False
    unnamed: int = -1


class DraftScheduler:
    """The drafter's side of a scheduler.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
        The engine's options.
    block_size : int
        Tokens for each of vLLM's block hashes of a request.

    Attributes
    ----------
    namespace : Namespace or None
        The drafter's; None while it is not known.
    """

    def __init__(self, vllm_config: Any, config: Config, block_size: int) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._block_size = block_size
        self._engine = draft_engine(vllm_config)
        self._ranks = stage_ranks(self._engine)
        speculative_config = vllm_config.speculative_config
        # vLLM drafts nothing in a step that comes closer to the drafter's longest prompt (the
        # query of DFlash has one token more than there are drafts).
        self._longest = (
            int(self._engine.model_config.max_model_len)
            - int(speculative_config.num_speculative_tokens)
            - 1
        )
        self.namespace: Namespace | None = None
        #: Digest of the model's namespace, from which the drafter's follows.
        self._target = b""
        self._reports: dict[int, WorkerReport] = {}
        self._announcing = False
        self._disabled = False
        self._requests: dict[str, _Progress] = {}
        self._step = 0
        #: Hashes of blocks from which on the drafter's KV does not belong to the prefix, and the
        #: step in which that was found.
        self._spoiled: OrderedDict[Any, int] = OrderedDict()

    # ------------------------------------------------------------- namespace

    def receive(self, reports: Mapping[int, WorkerReport], target: Namespace | None) -> None:
        """Take the workers' reports about the drafter's layers; none acknowledge the namespace."""
        self._announcing = bool(reports) and self.namespace is not None and not self._disabled
        self._reports.update(reports)
        for report in reports.values():
            if report.disabled_reason:
                self._disable(report.disabled_reason, quiet=report.already_logged)
        if self._target and target is not None and target.digest != self._target:
            # The weights of the drafter may have changed as well.
            self._disable("the engine's weights were changed in place")
        known = self._reports.get(0)
        if (
            self._disabled
            or target is None
            or self.namespace is not None
            or len(self._reports) < self._ranks
            or known is None
            or known.weights is None
        ):
            return
        if known.weights == BY_PARAMETERS:
            self._disable("no file of this machine identifies its weights")
            return
        config = draft_config(self._vllm_config, self._config, target)
        of_ranks = [self._reports[rank] for rank in sorted(self._reports)]
        try:
            report = unite_ranks(self._engine, of_ranks)
            namespace = build_namespace(self._engine, config, [report], known.weights)
            topologies = topologies_of(self._engine, namespace.record).values()
            divided = any(topology.divided for topology in topologies)
        except KVShelfError as error:
            self._disable(str(error))
            return
        if divided:
            self._disable("each rank holds only a part of a shard of it")
            return
        self.namespace = namespace
        self._target = target.digest
        self._announcing = True
        logger.info("namespace of the drafter: %s", namespace.folder)

    def _disable(self, reason: str, *, quiet: bool = False) -> None:
        if not self._disabled and not quiet:
            logger.warning(WITHOUT_DRAFTS, reason)
        self._disabled = True
        self._announcing = False

    @property
    def announcement(self) -> tuple[bytes, str] | None:
        """Record and slug of the namespace, while workers may not have it."""
        if self.namespace is None or not self._announcing:
            return None
        return self.namespace.encoded, self.namespace.slug

    # ------------------------------------------------------------- chunks

    def chain(self, namespace_digest: bytes, chunk_size: int, **options: Any) -> KeyChain:
        """Return a chain of chunk keys, with those of the drafter's namespace if it is known."""
        if self.namespace is None or self._disabled or namespace_digest != self._target:
            return KeyChain(namespace_digest, chunk_size, **options)
        return DraftedChain(namespace_digest, self.namespace.digest, chunk_size, **options)

    def asked(self, request: Any, at_hand: int) -> None:
        """Note how many tokens of a waiting request vLLM's prefix cache has."""
        self.finished(request)
        searched = -1 if getattr(request, "skip_reading_prefix_cache", False) else self._step
        self._requests[request.request_id] = _Progress(at_hand, searched)

    def to_load(self, request_id: str, chain: KeyChain | None, first: int, end: int) -> list[Chunk]:
        """Return the chunks of a load that begins and ends at these tokens."""
        self._requests.setdefault(request_id, _Progress()).loaded = end
        if not isinstance(chain, DraftedChain):
            return []
        size = chain.chunk_size
        return chain.drafts.chunks[first // size : -(-end // size)]

    def missing(self, request_id: str, token: int) -> None:
        """Note that a load delivered no KV of the drafter from a token on."""
        progress = self._requests.get(request_id)
        if progress is not None:
            progress.good = min(progress.good, token)

    def begin_step(self, requests: Sequence[tuple[Any, int, int]]) -> None:
        """Note what a step computes.

        Parameters
        ----------
        requests : sequence of (Request, int, int)
            With how many tokens have KV before and after the step.
        """
        self._step += 1
        runs = max((after for _, _, after in requests), default=0) <= self._longest
        for request, before, _ in requests:
            progress = self._requests.setdefault(request.request_id, _Progress())
            if not progress.running:
                progress.running = True
                self._admit(request, progress, before)
            if not runs:
                self._spoil(request, progress, min(progress.good, before))
            self._name(request, progress)
            if self._spoiled and progress.good == sys.maxsize:
                self._clear(request, progress, before)

    def _admit(self, request: Any, progress: _Progress, computed: int) -> None:
        """Find the first known token without KV of the drafter that belongs to the prefix."""
        at_hand = min(progress.at_hand, computed)
        if computed > max(at_hand, progress.loaded):
            # Another connector has loaded the model's KV.
            progress.good = min(progress.good, at_hand)
        if self._spoiled:
            hashes = request.block_hashes[: at_hand // self._block_size]
            for index, block in enumerate(hashes):
                if block in self._spoiled:
                    progress.good = min(progress.good, index * self._block_size)
                    break
        if progress.good < computed:
            self._spoil(request, progress, progress.good)
        else:
            # Tokens that a load did not deliver are computed.
            progress.good = sys.maxsize
        progress.fresh = at_hand

    def _clear(self, request: Any, progress: _Progress, computed: int) -> None:
        """Remove the marks of invalid blocks that were loaded or computed anew.

        vLLM's prefix cache did not have them when it was searched. Blocks of the same hash that
        were found spoiled since then may be in it.
        """
        first = progress.fresh // self._block_size
        for block in request.block_hashes[first : computed // self._block_size]:
            if self._spoiled.get(block, sys.maxsize) <= progress.searched:
                del self._spoiled[block]
        progress.fresh = max(progress.fresh, computed)

    def _spoil(self, request: Any, progress: _Progress, token: int) -> None:
        """Remember that the drafter's KV of a request is invalid from a token on."""
        if token < progress.good or progress.unnamed < 0:
            progress.unnamed = token // self._block_size
        progress.good = min(progress.good, token)
        self._name(request, progress)

    def _name(self, request: Any, progress: _Progress) -> None:
        """Remember an invalid block by its hash, if vLLM has computed it by now."""
        if 0 <= progress.unnamed < len(request.block_hashes):
            self._spoiled[request.block_hashes[progress.unnamed]] = self._step
            progress.unnamed = -1
            if len(self._spoiled) > _HASHES_REMEMBERED:
                self._spoiled.popitem(last=False)

    def to_store(self, request_id: str, chain: KeyChain, index: int) -> Chunk | None:
        """Return the drafter's chunk that may be stored with a chunk of the model's."""
        progress = self._requests.get(request_id)
        if not isinstance(chain, DraftedChain) or progress is None or self._disabled:
            return None
        if (index + 1) * chain.chunk_size > progress.good:
            return None
        return chain.drafts.chunks[index]

    def finished(self, request: Any) -> None:
        """Forget a request."""
        progress = self._requests.pop(request.request_id, None)
        if progress is not None:
            self._name(request, progress)
