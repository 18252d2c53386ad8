"""How many tokens of a request can be loaded, which chunks that takes, where later hits may end.

Owns where a hit may end, given what a lookup and a wait have seen and which loads have failed
(:class:`Hits`). :class:`~kvshelf.shelf.lookup.LookupService` searches, and asks for the ends that
are possible.

Owns also at which ends windows and states are worth their bytes (:class:`LikelyEnds`). A hit needs
them at its end only, and most chunks are never the end of one. So they are stored where prompts end
or part, and at intervals between.

Contracts of hits
-----------------
* A hit ends at a block boundary and leaves at least one token to compute. Of a hybrid engine
  (:mod:`kvshelf.vllm.groups`) it ends at a chunk boundary. A hand-over may end anywhere and have
  all tokens, of which vLLM then computes the last one once more; but of a hybrid engine, and of one
  with a drafter, it ends as other hits do.
* Where the tokens of an image attend to each other in both directions, the KV of an image depends
  on which of its tokens one step computes. So no hit ends within an image, because a later step
  would have to continue it.
* A drafter never changes what is a hit.
* A hit ends before the first chunk that a load of any request has failed for. Where objects have
  kinds a shorter hit needs others, so a lookup must search anew (:meth:`Hits.is_refuted`). What a
  wait for a hand-over has looked for is offered all the same.
* Everything but :meth:`Hits.ranges` runs on the engine's step thread.

Contracts of likely ends
------------------------
* Windows are stored for an end if all are there that a hit needs: an end without one of them is
  given up. vLLM keeps those within the window of the next token.
* A state is stored only at chunk boundaries at which vLLM has one: where a step happens to end, in
  that step or the next one, or where vLLM names a block for it. No step is changed for that.
* With speculative decoding the end of a step behind the prompt is not known, and states lie in
  other columns: there only blocks that vLLM names are stored, once it has judged the step's drafts.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, STATE, WINDOW, Kind, kind_key
from kvshelf.shelf.lookup import Lookup
from kvshelf.vllm.groups import CacheGroup
from kvshelf.vllm.metadata import NULL_BLOCK
from kvshelf.vllm.scheduler.engine import SchedulerEngine
from kvshelf.vllm.scheduler.requests import RequestState, items_of
from kvshelf.vllm.speculation import drops_last_block

#: Chunks between two ends of a prompt at which no hit is likely. A state takes as many bytes as
#: thousands of tokens of KV, and the windows of a chunk as many as the full KV of several.
INTERVAL: Final = 24


@dataclass(frozen=True, slots=True)
class Loadable:
    """What a load of a waiting request would bring now.

    Attributes
    ----------
    chunks : Sequence of Chunk
        The request's chunks, from the first one on.
    ranges : Mapping[Kind, range]
        For each kind, the indices of the chunks that would be loaded.
    grows : bool
        The request waits for more.
    """

    chunks: Sequence[Chunk] = ()
    ranges: Mapping[Kind, range] = field(default_factory=dict)
    grows: bool = False


class Hits:
    """The rules of one engine.

    Parameters
    ----------
    engine : SchedulerEngine

    Attributes
    ----------
    whole_items : bool
        Whether no multimodal item may be divided.
    dropped : int
        Tokens that vLLM leaves out at the end of each hit in its own cache, for the drafter's sake.
    """

    def __init__(self, engine: SchedulerEngine) -> None:
        self._size = engine.config.chunk_size
        self._groups = engine.groups
        self._failed = engine.failed
        self._has_drafter = engine.drafter_config is not None
        self.whole_items = bool(getattr(engine.vllm_config.model_config, "is_mm_prefix_lm", False))
        config = engine.vllm_config
        speculative_config = getattr(config, "speculative_config", None)
        self.dropped = self._groups.alignment if drops_last_block(speculative_config) else 0
        drafts = config.num_speculative_tokens
        tokens = 1 + drafts + config.num_lookahead_tokens if drafts else 0
        #: Blocks that vLLM keeps free for drafts beside a load, of which most groups have some.
        self._kept_free = sum(
            -(-tokens // group.block_size) for group in self._groups if group.kind != STATE
        )
        #: The size of each group's blocks, and the most of them that a request has behind a hit.
        self._blocks = [
            (group.block_size, self._most_blocks(group, drafts)) for group in self._groups
        ]
        self._cache = config.cache_config

    def _most_blocks(self, group: CacheGroup, drafts: int) -> int:
        if group.kind == WINDOW:
            return -(-(group.window - 1) // group.block_size)
        scratch = group.index in self._groups.scratch
        return 1 if scratch else 1 + drafts if group.kind == STATE else sys.maxsize

    def tokens(self, state: RequestState, lookup: Lookup, computed: int) -> int:
        """Return the leading tokens that can be loaded; vLLM has `computed` of them already."""
        chunks, size = lookup.hit_chunks, self._size
        if not self._groups.mixed:
            places = range(min(computed // size, chunks), chunks)
            chunks = self._unfailed(state, lookup, FULL, places).stop
            if self._groups.hybrid:
                # A search for full chunks alone has no ends.
                ends = self.ends(state) or ()
                chunks = ([0, *ends])[bisect_right(ends, chunks)]
        if self._groups.hybrid:
            return chunks * size
        last, handed_over = state.request.num_tokens - 1, 0
        if state.awaited is not None and not self._has_drafter:
            # A drafter has KV of whole chunks only.
            handed_over = state.awaited.hit_tokens
        # One token must be left: the model has to compute an output to sample from.
        hit: int = min(chunks * size, last)
        hit -= hit % self._groups.alignment
        # Behind a hand-over vLLM computes the last token once more.
        hit = max(hit, handed_over)
        if self.whole_items:
            for start, end in reversed(items_of(state.request)):
                if start < min(hit, last) < end:
                    hit = start - start % self._groups.alignment
        return hit

    def has_room(self, tokens: int) -> bool:
        """Whether vLLM has the blocks for a load of so many tokens when nothing else has any."""
        # Without drafts it has: they are blocks that the request takes in any case.
        needed = self._kept_free + sum(min(-(-tokens // size), cap) for size, cap in self._blocks)
        # One block is never used.
        return not self._kept_free or bool(needed < self._cache.num_gpu_blocks)

    def longest_hit(self, state: RequestState) -> int:
        """Return the most leading tokens that a hit without a tail or a hand-over may have."""
        tokens: int = state.request.num_tokens
        tokens = min(tokens - tokens % self._size, tokens - 1)
        return tokens - tokens % self._groups.alignment

    def is_refuted(self, state: RequestState, lookup: Lookup, computed: int) -> bool:
        """Whether a hit needs what a load has failed for, and only a search knows a shorter one."""
        if not self._groups.mixed:
            return False
        needed = self.ranges(computed, lookup.hit_chunks * self._size).items()
        return any(self._unfailed(state, lookup, kind, n) != n for kind, n in needed)

    def _unfailed(self, state: RequestState, lookup: Lookup, kind: Kind, places: range) -> range:
        """Return those of some chunks that lie before the first that a load has failed for."""
        is_waited_for = state.awaited is not None and state.awaited.wait is not None
        if lookup.chain is None or is_waited_for or not self._failed.any:
            return places
        chunks = lookup.chain.chunks[places.start : places.stop]
        return places[: self._failed.leading([kind_key(chunk.key, kind) for chunk in chunks])]

    def ends(self, state: RequestState) -> Sequence[int] | None:
        """Return the numbers of chunks at which a hit of a hybrid engine may end, ascending."""
        if not self._groups.hybrid:
            return None
        # One token must be left: vLLM would compute the last one anew, over a state behind it.
        last = (state.request.num_tokens - 1) // self._size
        ends: Sequence[int] = range(1, last + 1)
        if self.whole_items:
            ends = [n for n in ends if not self.divides_item(state, n * self._size)]
        return ends

    def last_end(self, state: RequestState, chunks: int) -> int:
        """Return the last place, up to so many chunks, where a hit divides no item."""
        while self.divides_item(state, chunks * self._size):
            chunks -= 1
        return chunks

    def divides_item(self, state: RequestState, tokens: int) -> bool:
        """Whether a hit of so many tokens would end within an item that must not be divided."""
        items = items_of(state.request) if self.whole_items else ()
        return any(start < tokens < end for start, end in items)

    def is_stored(self, lookup: Lookup, chunk: Chunk, kind: Kind) -> bool:
        """Whether the lookup saw a kind of a chunk on the shelf, and no load of it failed since."""
        if self._failed.refutes(kind_key(chunk.key, kind), lookup.as_of):
            return False
        if kind == FULL:
            return chunk.index < self.full_chunks(lookup)
        return chunk.index in lookup.known.get(kind, ())

    def full_chunks(self, lookup: Lookup) -> int:
        """Return how many leading full chunks were seen on the shelf; 0 without kind full."""
        return lookup.full_chunks if FULL in self._groups.kinds else 0

    def must_repair(self, chunk: Chunk, kind: Kind) -> bool:
        """Whether a load found a kind of a chunk damaged, so that a store must replace it."""
        return self._failed.is_bad(kind_key(chunk.key, kind))

    def ranges(self, start: int, end: int) -> dict[Kind, range]:
        """Return the chunks of each kind that a load of tokens ``[start, end)`` needs."""
        size = self._size
        if not self._groups.hybrid:
            return {FULL: range(start // size, -(-end // size))}
        if end % size:
            # Not a hit that was offered: no load for it is known.
            return {}
        return self._groups.hit_rule(size).needs(end // size, start // size)

    def to_load(self, state: RequestState, start: int, end: int) -> dict[Kind, list[Chunk]]:
        """Return what a load of tokens ``[start, end)`` of a request reads of each kind."""
        lookup = state.lookup
        if lookup is None or lookup.chain is None:
            return {}
        chunks, ranges = self._chunks_before(state, lookup.chain, end), self.ranges(start, end)
        return {kind: chunks[places.start : places.stop] for kind, places in ranges.items()}

    def _chunks_before(self, state: RequestState, chain: KeyChain, end: int) -> list[Chunk]:
        """Return the chunks of a prompt of which a load of tokens before `end` takes the first."""
        awaited = state.awaited
        tail = awaited.tail if awaited is not None and awaited.hit_tokens else None
        first = 0 if tail is None else tail.index * self._size
        if tail is not None and first < end <= first + tail.tokens:
            return [*chain.chunks[: tail.index], tail]
        return chain.chunks

    def loadable(self, state: RequestState) -> Loadable | None:
        """Return what a load of a request would bring now; None while that is not known."""
        lookup, awaited = state.lookup, state.awaited
        if lookup is None or not lookup.done or lookup.given_up or lookup.chain is None:
            return None
        first = state.offered_from
        if self.is_refuted(state, lookup, first):
            return None
        if awaited is not None and awaited.outcome is None:
            # Windows and states are useful at the end of the wait only.
            full = range(first // self._size, self.full_chunks(lookup))
            full = self._unfailed(state, lookup, FULL, full)
            return Loadable(lookup.chain.chunks, {FULL: full} if full else {}, grows=True)
        hit = self.tokens(state, lookup, first)
        if state.gave_up or hit <= first:
            return Loadable()
        chunks = self._chunks_before(state, lookup.chain, hit)
        if chunks[-1].tail:
            # It is small, and appears last.
            chunks = chunks[:-1]
            hit = min(hit, len(chunks) * self._size)
        return Loadable(chunks, self.ranges(first, hit) if hit > first else {})


class LikelyEnds:
    """The ends of one engine's prompts.

    Parameters
    ----------
    engine : SchedulerEngine
    hits : Hits
    """

    def __init__(self, engine: SchedulerEngine, hits: Hits) -> None:
        self._config, self._groups, self._hits = engine.config, engine.groups, hits
        self._size = engine.config.chunk_size
        self._drafting = getattr(engine.vllm_config, "speculative_config", None) is not None

    def states_in_cache(
        self, state: RequestState, before: int, after: int, complete: int, output: Any
    ) -> dict[int, dict[int, list[int]]]:
        """Return the chunks whose states of a request are in the cache at the end of a step.

        Parameters
        ----------
        state : RequestState
        before, after : int
            Tokens with KV before and after the step. The state of before the step is still there:
            behind a block boundary a step goes on with a copy. It is stored then if it could not be
            at its own step, as where vLLM schedules ahead of the tokens that it samples.
        complete : int
            Number of chunks whose tokens can no longer change.
        output : SchedulerOutput

        Returns
        -------
        dict
            For each index of such a chunk, the block of each state group, by the group's index.
        """
        groups, size = self._groups.of(STATE), self._size
        states: dict[int, dict[int, list[int]]] = {}
        if not groups:
            return states
        blocks_of = output.kv_connector_block_state
        for group, block, tokens in blocks_of.boundary_state_offloads.get(state.id, ()):
            if self._is_end(tokens, complete):
                states.setdefault(tokens // size - 1, {})[group] = [block]
        ends = [
            n
            for n in (before, after)
            if self._is_end(n, complete) and not self.is_drafted(state, n)
        ]
        tables = blocks_of.get_block_ids(state.id) if ends else ()
        for tokens in ends if tables else ():
            at_end = states.setdefault(tokens // size - 1, {})
            for group in groups:
                column = tokens // group.block_size - 1
                if group.index not in at_end and column < len(tables[group.index]):
                    at_end[group.index] = [tables[group.index][column]]
        return {
            index: blocks
            for index, blocks in sorted(states.items())
            if len(blocks) == len(groups) and [NULL_BLOCK] not in blocks.values()
        }

    def _is_end(self, tokens: int, complete: int) -> bool:
        """Whether so many tokens are whole chunks, of which `complete` can no longer change."""
        return tokens % self._size == 0 and 0 < tokens <= complete * self._size

    def is_drafted(self, state: RequestState, tokens: int) -> bool:
        """Whether drafts may have been computed with the token before so many tokens."""
        return self._drafting and tokens > state.request.num_prompt_tokens

    def windows(self, state: RequestState, lookup: Lookup, first: int, count: int) -> list[range]:
        """Return, for each likely end of a hit, the chunks whose windows the hit needs.

        As far as `count` chunks from `first` on are among them.
        """
        rule = self._groups.hit_rule(self._size)
        if WINDOW not in rule.kinds:
            return []
        last_end = first + count + rule.reach - 1
        if not self._config.save_decode:
            last_end = min(last_end, state.request.num_prompt_tokens // self._size)
        ends = [
            n for n in range(first + 1, last_end + 1) if self.is_likely(state, lookup, WINDOW, n)
        ]
        return [rule.needs(end)[WINDOW] for end in ends]

    def is_likely(self, state: RequestState, lookup: Lookup, kind: Kind, end: int) -> bool:
        """Whether later hits are likely to end behind the first `end` chunks of a request.

        These are the last whole chunk of the prompt (with some drafters a block before it, since
        vLLM drops the last block of its own hits); where vLLM's own hit ended, and where it has
        seen prompts part; and the end of a prefix that another prompt has had, since its full
        chunks are on the shelf. Between them there is one where prompts would otherwise have to
        compute too many chunks anew. Where a hit would divide an item, it ends before that.

        Windows can be stored at each of these. A state exists only where a step ended, so it is
        stored inside such a prefix too, and intervals begin at states. Of an answer all windows are
        stored: vLLM has freed them when it is known where the answer ends.
        """
        request, size = state.request, self._size
        last, parting = request.num_prompt_tokens - 1, request.shared_prefix_boundary
        tokens = [last, last - self._hits.dropped, state.offered_from, parting]
        ends, full_chunks = [n // size for n in tokens], self._hits.full_chunks(lookup)
        if kind == WINDOW:
            ends += [full_chunks, -(-end // INTERVAL) * INTERVAL]
            if self._config.save_decode and end * size > last:
                return True
        else:
            states = [n for n in lookup.known.get(STATE, ()) if n < end - 1]
            if end <= full_chunks or end - 1 - max([state.stores.last_state, *states]) >= INTERVAL:
                return True
        return any(self._hits.last_end(state, chunks) == end for chunks in ends)
