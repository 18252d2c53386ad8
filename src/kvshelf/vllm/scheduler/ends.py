"""At which ends of hits windows and states are stored, and which states there are to store.

A hit needs windows and a state at its end only, and most chunks are never the end of one. So they
are stored at the likely ends of later hits (:meth:`Ends.is_likely`): where prompts end or part, and
at intervals between.

Contracts
---------
* Windows are stored for an end if all are there that a hit needs: an end without one of them is
  given up. vLLM keeps those within the window of the next token.
* A state is stored only at chunk boundaries at which vLLM has one: where a step happens to end, in
  that step or the next one, or where vLLM names a block for it. No step is changed for that.
* With speculative decoding the end of a step behind the prompt is not known, and states lie in
  other columns: there only blocks that vLLM names are stored, once it has judged the step's drafts.
* Runs on the engine's step thread.
"""

from __future__ import annotations

from typing import Any, Final

from kvshelf.format.kinds import STATE, WINDOW, Kind
from kvshelf.shelf.lookup import Lookup
from kvshelf.vllm.metadata import NULL_BLOCK
from kvshelf.vllm.scheduler.engine import SchedulerEngine
from kvshelf.vllm.scheduler.hits import Hits
from kvshelf.vllm.scheduler.requests import RequestState

#: Chunks between two ends of a prompt at which no hit is likely. A state takes as many bytes as
#: thousands of tokens of KV, and the windows of a chunk as many as the full KV of several.
INTERVAL: Final = 24


class Ends:
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
        found: dict[int, dict[int, list[int]]] = {}
        if not groups:
            return found
        blocks_of = output.kv_connector_block_state
        for group, block, tokens in blocks_of.boundary_state_offloads.get(state.id, ()):
            if self._is_end(tokens, complete):
                found.setdefault(tokens // size - 1, {})[group] = [block]
        ends = [
            n
            for n in (before, after)
            if self._is_end(n, complete) and not self.is_drafted(state, n)
        ]
        tables = blocks_of.get_block_ids(state.id) if ends else ()
        for tokens in ends if tables else ():
            at_end = found.setdefault(tokens // size - 1, {})
            for group in groups:
                column = tokens // group.block_size - 1
                if group.index not in at_end and column < len(tables[group.index]):
                    at_end[group.index] = [tables[group.index][column]]
        return {
            index: blocks
            for index, blocks in sorted(found.items())
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
        most = first + count + rule.reach - 1
        if not self._config.save_decode:
            most = min(most, state.request.num_prompt_tokens // self._size)
        ends = [n for n in range(first + 1, most + 1) if self.is_likely(state, lookup, WINDOW, n)]
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
        ends, known = [n // size for n in tokens], self._hits.full_chunks(lookup)
        if kind == WINDOW:
            ends += [known, -(-end // INTERVAL) * INTERVAL]
            if self._config.save_decode and end * size > last:
                return True
        else:
            states = [n for n in lookup.known.get(STATE, ()) if n < end - 1]
            if end <= known or end - 1 - max([state.stores.last_state, *states]) >= INTERVAL:
                return True
        return any(self._hits.last_end(state, one) == end for one in ends)
