"""How far the requests of an engine model are: their drafts, and where their states lie.

Drafts are guesses of the next tokens, of which some are wrong: what a step computes of these is
noise. A state has two parts: a row for each of the last tokens, as a convolution has, and a rest
that stands for all tokens. The rest of each draft has a block of its own. The rows of all drafts
are in the first of these blocks. Between steps states move as in
``vllm/v1/worker/mamba_utils.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.sim.engine_caches import Layers, PagedCaches


class Move(NamedTuple):
    """States move from one column of a request's tables to another.

    What moves is the state behind `ahead` accepted drafts.
    """

    source: int
    target: int
    ahead: int


@dataclass(frozen=True)
class Work:
    """The tokens of a request that a step computes.

    Attributes
    ----------
    name : str
    start, running, end : int
        The first token, the first draft, and the token behind the last draft.
    right_end : int
        The token behind the last one that is the request's.
    sampled : list of int
        What the step says of the request.
    enters : Move, optional
        Where its states move before the step.
    column, ahead : int
        Where they lie when the step begins: the column, and the accepted drafts since they moved.
    leaves : Move, optional
        Where its states move when the drafts have been judged.
    """

    name: str
    start: int
    running: int
    end: int
    right_end: int
    sampled: list[int]
    enters: Move | None
    column: int
    ahead: int
    leaves: Move | None


class Progress:
    """What the next step computes of each request.

    Parameters
    ----------
    groups : sequence of Layers
    drafts : int
        The guesses of each step.
    asynchronous : bool
        vLLM may not know yet which drafts were wrong.
    seed : int
        Decides which guesses are wrong.
    """

    def __init__(
        self, groups: Sequence[Layers], drafts: int, *, asynchronous: bool, seed: int
    ) -> None:
        self.drafts, self._asynchronous = drafts, asynchronous
        self._random = random.Random(seed)
        self._size = next((group.block_size for group in groups if group.is_state), 0)
        #: By request, the column of its states.
        self._columns: dict[str, int] = {}
        #: By request, the tokens that its last step has added, the sampled one included.
        self._added: dict[str, int] = {}
        #: By request, the tokens that were computed.
        self._computed: dict[str, int] = {}
        #: By request, the drafts of its next step.
        self.guesses: dict[str, list[int]] = {}

    def plan(
        self, output: Any, texts: Mapping[str, Any], known: Callable[[str], int]
    ) -> list[Work]:
        """Return what a step computes; `known` counts the tokens of a request."""
        cached = output.scheduled_cached_reqs
        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for name in (*begins, *cached.resumed_req_ids, *(output.preempted_req_ids or ())):
            for facts in (self._columns, self._added, self._computed, self.guesses):
                facts.pop(name, None)
        begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = output.scheduled_spec_decode_tokens
        return [
            self._plan(name, texts[name], begins[name], count, drafts.get(name, ()), known(name))
            for name, count in output.num_scheduled_tokens.items()
        ]

    def _plan(
        self, name: str, text: Any, start: int, count: int, drafts: Sequence[int], known: int
    ) -> Work:
        if self.drafts and name in self._computed:
            assert self._asynchronous or start == self._computed[name]
            start = self._computed[name]
        if self._asynchronous and drafts:
            # The first step behind a hit of all but one token is padded with wrong drafts.
            drafts = self.guesses.get(name, drafts)[: len(drafts)]
        if not self.drafts:
            # vLLM lists drafts as padding also where the engine makes none.
            count, drafts = count - len(drafts), ()
        end = start + count
        running = end - len(drafts)
        is_sampled = running >= known
        accepted = [*map(eq, drafts, text.tokens[running:]), False].index(False)
        # The move into a column takes what was added into account, and forgets it.
        enters = self._move_before(name, start, end)
        column, ahead = self._columns.get(name, 0), self._added.get(name, 1) - 1
        added = 1 + accepted if is_sampled else 1
        sampled = (text.tokens[running:] + [0] * added)[:added] if is_sampled else []
        self._guess(name, text.tokens[running + added :], is_sampled=is_sampled)
        return Work(
            name=name,
            start=start,
            running=running,
            end=end,
            # No draft behind the end of the text is right.
            right_end=min(running + accepted, len(text.tokens)),
            sampled=sampled,
            enters=enters,
            column=column,
            ahead=ahead,
            leaves=self._move_behind(name, running, added),
        )

    def _guess(self, name: str, tokens: list[int], *, is_sampled: bool) -> None:
        self.guesses.pop(name, None)
        if is_sampled and self.drafts:
            right = self._random.randint(0, self.drafts)
            guesses = (tokens + [0] * self.drafts)[: self.drafts]
            wrong = [(token + 1) % 900 for token in guesses[right:]]
            self.guesses[name] = guesses[:right] + wrong

    def _move_before(self, name: str, start: int, end: int) -> Move | None:
        """Note the column that a step uses; return the move of the states into it, if they move."""
        if not self._size:
            return None
        source = self._columns.get(name, (start - 1) // self._size)
        target = self._columns[name] = -(-end // self._size) - 1
        if source in (-1, target):
            return None
        return Move(source, target, self._added.pop(name, 1) - 1)

    def _move_behind(self, name: str, running: int, added: int) -> Move | None:
        """Note what a step has added; return the move to the last block boundary that is certain.

        Without drafts there is none: the states move when the next step begins.
        """
        end = self._computed[name] = running + added - 1
        self._added[name] = added
        if not self.drafts or not self._size:
            return None
        boundary, column = end // self._size * self._size, self._columns[name]
        if boundary < running:
            return None
        target = boundary // self._size - 1
        if target == column:
            self._added[name] = 1
            if boundary == running:
                return None
        return Move(column, target, boundary - running)


class StateCaches:
    """The states in the caches of one rank.

    Parameters
    ----------
    caches : PagedCaches
    enqueue : Callable
        Has the engine's device do something.
    """

    def __init__(self, caches: PagedCaches, enqueue: Callable[..., None]) -> None:
        self._paged, self._enqueue = caches, enqueue

    def _layers(self, group: int) -> Iterator[tuple[str, Tensor | None, list[Tensor]]]:
        """The name, the rows, if it has any, and the other parts of each layer of a group."""
        for name in self._paged.names[group]:
            parts = list(self._paged.layers[name].kv_cache)
            rows = parts.pop(0) if self._paged.groups[group].rows else None
            yield name, rows, parts

    def move(self, group: int, table: Sequence[int], move: Move) -> None:
        """Move the states of a group."""
        source, target, ahead = move
        for _, rows, parts in self._layers(group):
            if rows is not None:
                self._enqueue(_move_rows, rows, table[source], table[target], ahead)
            for part in parts:
                self._enqueue(part[table[target]].copy_, part[table[source + ahead]])

    def write(
        self, group: int, table: Sequence[int], work: Work, text: Any, origin: object
    ) -> None:
        """Write the states that a step leaves: that of its tokens, and that of each draft."""
        count = self._paged.groups[group].rows
        column = table[work.column]
        for name, rows, parts in self._layers(group):
            if rows is not None:
                values = [
                    text.row(origin, position, name, rows[0, 0].nbytes, right_end=work.right_end)
                    for position in range(work.running - count, work.end)
                ]
                self._enqueue(_put, rows[column, : len(values)], b"".join(values))
            for number, part in enumerate(parts):
                for ahead, length in enumerate(range(work.running, work.end + 1)):
                    rest = text.rest(
                        origin, length, f"{name} {number}", part[0].nbytes, right_end=work.right_end
                    )
                    self._enqueue(_put, part[table[work.column + ahead]], rest)

    def compare(
        self,
        group: int,
        table: Sequence[int],
        place: tuple[int, int],
        text: Any,
        origin: object,
        length: int,
        what: str,
    ) -> None:
        """Fail unless a group has the states of so many tokens; `place` is column and drafts."""
        column, ahead = place
        count = self._paged.groups[group].rows
        for name, rows, parts in self._layers(group):
            if rows is not None:
                size = rows[0, 0].nbytes
                right = [text.row(origin, at, name, size) for at in range(length - count, length)]
                held = rows[table[column], ahead : ahead + count]
                self._enqueue(_compare, held, b"".join(right), f"rows of {what}, {name}")
            for number, part in enumerate(parts):
                rest = text.rest(origin, length, f"{name} {number}", part[0].nbytes)
                self._enqueue(_compare, part[table[column + ahead]], rest, f"{what}, {name}")


def _move_rows(rows: Tensor, source: int, target: int, ahead: int) -> None:
    rows[target, : rows.shape[1] - ahead] = rows[source, ahead:].clone()


def _put(place: Tensor, content: bytes) -> None:
    place.copy_(torch.frombuffer(bytearray(content), dtype=place.dtype).view(place.shape))


def _compare(held: Tensor, right: bytes, what: str) -> None:
    assert held.contiguous().view(torch.uint8).numpy().tobytes() == right, what
