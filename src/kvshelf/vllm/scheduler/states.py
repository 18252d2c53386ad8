"""Which states of hybrid models there are to store, and which are worth their bytes.

Contracts
---------
* A state is stored only at chunk boundaries at which vLLM has one: where a step happens to end, in
  that step or the next one, or where vLLM names a block for it. No step is changed for that.
* With speculative decoding the end of a step behind the prompt is not known, and states lie in
  other columns: there only blocks that vLLM names are stored, once it has judged the step's drafts.
* Runs on the engine's step thread.
"""

from __future__ import annotations

from typing import Any, Final

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, STATE
from kvshelf.shelf.lookup import Lookup
from kvshelf.vllm.metadata import NULL_BLOCK
from kvshelf.vllm.scheduler.requests import RequestState
from kvshelf.vllm.scheduler.shared import Shared, SharingPart
from kvshelf.vllm.speculation import drops_last_block

#: Chunks between two stored states of a prompt, of which each takes as many bytes as thousands of
#: tokens of KV. The other states that are stored are those that hits are likely to begin with.
STATE_INTERVAL: Final = 24


class States(SharingPart):
    """The states of one engine.

    Parameters
    ----------
    shared : Shared
    """

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        speculative_config = getattr(self._engine.vllm_config, "speculative_config", None)
        self._drafting = speculative_config is not None
        #: Tokens between the last state in vLLM's cache and a prompt's last block boundary.
        self._held_back = self._groups.alignment if drops_last_block(speculative_config) else 0

    def in_cache(
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

    def is_worth_storing(self, state: RequestState, lookup: Lookup, chunk: Chunk) -> bool:
        """Whether to store the state after a chunk.

        Stored are those at which later prompts are likely to begin: the last one of the prompt
        (with some drafters a block before it, since vLLM drops the last block of its own hits),
        those where vLLM has seen prompts part, and those inside a prefix that another prompt has
        had, since its full chunks are on the shelf. Of the others one is stored where prompts would
        otherwise have to compute too many chunks anew.
        """
        last_state, is_stored = state.stores.last_state, self._hits.is_stored
        if chunk.index == last_state or is_stored(state, lookup, chunk, STATE):
            return False
        if FULL in self._groups.kinds and is_stored(state, lookup, chunk, FULL):
            return True
        request, end = state.request, (chunk.index + 1) * self._size
        last = request.num_prompt_tokens - 1
        first = max(0, last - self._held_back) // self._size
        parting = request.shared_prefix_boundary
        if first <= chunk.index + 1 <= last // self._size:
            return True
        if end == parting - parting % self._groups.alignment:
            return True
        known = lookup.known.get(STATE, frozenset())
        before = max([last_state, *(index for index in known if index < chunk.index)])
        return chunk.index - before >= STATE_INTERVAL
