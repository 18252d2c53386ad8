"""What it costs to compute tokens, and to load them, learned from the times that both took.

Owns two models of seconds. Computing the tokens from x to y of a prompt takes
p (y − x) + q (y² − x²) / 2: the linear layers, and the attention to all tokens before. Loading n
bytes takes a + b n. Since the first grows faster than the second, the best part of a hit to load is
all of it or nothing, see :mod:`kvshelf.vllm.scheduler.admission_rule`.

Contracts
---------
* No coefficient is negative, so more work is never cheaper.
* What is learned fades: a model follows an engine or a storage whose speed changes.
* One slow step changes little. No step is fast by accident: a step that takes less than half of its
  expected time shortens all earlier times, and makes every estimate of steps a guess.
* An estimate is a guess until three steps, or loads, of at least about its size were timed.
* Not thread-safe; the caller has one thread, or a lock.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Final

#: The last so many times weigh as much as all earlier ones together.
_MEMORY: Final = 16
#: The weight of what was learned before, after each new time.
_FADING: Final = 0.5 ** (1 / _MEMORY)
_ROUNDS: Final = 16
#: A time supports estimates of work of up to so many times its size.
EXTRAPOLATED: Final = 4
#: So many steps or loads of about a size make an estimate certain.
_CERTAIN: Final = 3
#: A step of so many tokens takes about as long as one of fewer.
_SMALL_STEP: Final = 64
#: The least share of a load's time that its bytes count for, and the least of the rest.
_LEAST_SHARE: Final = 0.1
#: Large changes are divided, because each changes the shares.
_CHANGE_AT_ONCE: Final = 0.5


class Fit:
    """A sum of products of features and coefficients that are not negative.

    The coefficients are those with the least squares of relative errors.

    Parameters
    ----------
    scales : Sequence of float
        The usual size of each feature.
    """

    def __init__(self, scales: Sequence[float]) -> None:
        self._scales = scales
        size = len(scales)
        # The normal equations. A little of each feature at no time at all makes unknown
        # coefficients small.
        self._products = [[1e-6 * (row == column) for column in range(size)] for row in range(size)]
        self._sums = [0.0] * size
        self._coefficients = [0.0] * size
        self._solved = True

    def learn(self, features: Sequence[float], seconds: float) -> None:
        """Learn how long something with these features took; ignore times that are not positive."""
        if seconds <= 0:
            return
        relative = [
            feature / scale / seconds for feature, scale in zip(features, self._scales, strict=True)
        ]
        for row, weight in enumerate(relative):
            self._sums[row] = _FADING * self._sums[row] + weight
            products = self._products[row]
            for column, factor in enumerate(relative):
                products[column] = _FADING * products[column] + weight * factor
        self._solved = False

    def scale(self, factor: float) -> None:
        """Let all times that were learned count as if they had been `factor` times as long."""
        self._products = [[cell / factor**2 for cell in row] for row in self._products]
        self._sums = [total / factor for total in self._sums]
        self._coefficients = [factor * coefficient for coefficient in self._coefficients]
        self._solved = False

    def _solve(self) -> None:
        """Minimize over one coefficient after the other, from those of before."""
        coefficients = self._coefficients
        for _ in range(_ROUNDS):
            for row, products in enumerate(self._products):
                explained = sum(map(float.__mul__, products, coefficients))
                explained -= products[row] * coefficients[row]
                remaining = self._sums[row] - explained
                coefficients[row] = max(0.0, remaining / max(products[row], 1e-12))
        self._solved = True

    def rates(self) -> list[float]:
        """Return how long one unit of each feature is expected to take."""
        if not self._solved:
            self._solve()
        return list(map(operator.truediv, self._coefficients, self._scales))

    def seconds(self, features: Sequence[float]) -> float:
        """Return how long something with these features is expected to take."""
        return sum(map(float.__mul__, self.rates(), map(float, features)))


def attended(start: int, end: int) -> float:
    """Return how many tokens those of ``[start, end)`` attend to, all together."""
    return (end * end - start * start) / 2


def work(start: int, end: int) -> tuple[float, float]:
    """Return how many tokens ``[start, end)`` of a prompt are, and how many they attend to."""
    return (end - start, attended(start, end)) if start < end else (0, 0.0)


class SizeCounts:
    """How many steps or loads of each size were timed: one count for each number of digits."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, size: float) -> None:
        """Count one of a size."""
        digits = int(size).bit_length()
        self._counts[digits] = self._counts.get(digits, 0) + 1

    def has(self, size: float) -> bool:
        """Whether one of about this size was timed."""
        return int(size).bit_length() in self._counts

    def is_certain(self, size: float) -> bool:
        """Whether enough were timed of at least about a fourth of a size."""
        least = (int(size) // EXTRAPOLATED).bit_length()
        return sum(n for digits, n in self._counts.items() if digits >= least) >= _CERTAIN

    def clear(self) -> None:
        """Forget all sizes."""
        self._counts.clear()


class PrefillCosts:
    """What it costs an engine to compute tokens of prompts.

    Parameters
    ----------
    step_tokens : int
        Most tokens that one step computes.

    Attributes
    ----------
    most : int
        Most tokens of a step that was learned.
    speedups : int
        How often a step took less than half of what was known of its size.
    """

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._fit = Fit((1e3, 1e6, 16.0, 1.0))
        self._sizes = SizeCounts()
        self.most = 0
        self.speedups = 0
        #: Seconds of a token, with its share of a step, and of a pair of tokens.
        self._per_token = self._per_pair = 0.0

    def knows(self, tokens: int) -> bool:
        """Whether the steps that were learned say what it takes to compute so many tokens.

        Small steps take long for their tokens. For larger work they give only an upper bound.
        """
        return min(tokens, self._step_tokens) <= EXTRAPOLATED * self.most

    def is_certain(self, tokens: int) -> bool:
        """Whether enough steps of about this size were timed, the first step not counted."""
        return self._sizes.is_certain(min(tokens, self._step_tokens))

    def learn(
        self,
        parts: Sequence[tuple[int, int]],
        decodes: int,
        seconds: float,
        *,
        began_slowly: bool = False,
    ) -> float:
        """Learn how long a step took, and return what was expected of it.

        Parameters
        ----------
        parts : Sequence of (int, int)
            The tokens of prompts that it computed: the first, and the one behind the last, of each.
        decodes : int
            Number of requests of which it computed one more token of the answer.
        seconds : float
        began_slowly : bool
            The engine had paused, and that may be most of the time. A step that is small beside
            others is then learned only if it took less than half of the expected time.
        """
        tokens = sum(end - start for start, end in parts)
        pairs = sum(attended(start, end) for start, end in parts)
        features = (tokens, pairs, decodes, 1.0)
        expected = usual = self._fit.seconds(features)
        if not self._sizes.has(tokens):
            # A smaller step takes at least its share of the largest one.
            usual = self._largest_step(0.0) * tokens / max(tokens, self.most)
        if 0 < seconds < usual / 2:
            self._fit.scale(seconds / usual)
            self._sizes.clear()
            self.speedups += 1
        elif began_slowly and EXTRAPOLATED * tokens < self.most:
            return expected
        self._fit.learn(features, seconds)
        per_token, self._per_pair, _, per_step = self._fit.rates()
        self._per_token = per_token + per_step / self._step_tokens
        if self.most:
            self._sizes.add(tokens)
        self.most = max(self.most, tokens)
        return expected

    def _largest_step(self, behind: float) -> float:
        """Return how long a step of :attr:`most` tokens takes.

        Parameters
        ----------
        behind : float
            How many tokens there are before its own.
        """
        pairs = self.most * (behind + self.most / 2)
        return self._fit.seconds((self.most, pairs, 0.0, 1.0))

    def seconds_at_most(self, start: int, end: int) -> float:
        """Return how long tokens ``[start, end)`` of a prompt take at most, with whole steps.

        Tokens beyond the largest step that was timed are computed in steps of its size.
        """
        tokens, pairs = work(start, end)
        if min(tokens, self._step_tokens) <= self.most:
            steps = max(1.0, tokens / self._step_tokens) if tokens else 0.0
            return self._fit.seconds((tokens, pairs, 0.0, steps))
        behind = max(0.0, pairs / tokens - self.most / 2)
        return self._largest_step(behind) * max(1.0, tokens / max(self.most, _SMALL_STEP))

    def seconds(self, start: int, end: int) -> float:
        """Return how long tokens ``[start, end)`` of a prompt take, with their share of a step."""
        tokens = max(0, end - start)
        return tokens * (self._per_token + self._per_pair * (start + end) / 2)

    def seconds_of(self, tokens: float, pairs: float) -> float:
        """Return how long some :func:`work` takes; that of several prompts may be added."""
        return self._per_token * tokens + self._per_pair * pairs


class LoadCosts:
    """What it costs to load bytes from one storage: a time until it answers, and one for each byte.

    Each load changes both by their shares of the time: old and new speeds are averaged. So one load
    that is far sooner than expected changes the estimate at once, and a late one about doubles it.

    Attributes
    ----------
    latency, per_byte : float
        Seconds.
    most : float
        Most bytes of a load that was learned.
    """

    def __init__(self) -> None:
        self.latency = self.per_byte = self.most = 0.0
        self._sizes = SizeCounts()

    def is_certain(self, nbytes: float) -> bool:
        """Whether enough loads of about this size were timed."""
        return self._sizes.is_certain(nbytes)

    def knows(self, nbytes: float) -> bool:
        """Whether the loads that were learned say what it takes to load so many bytes."""
        return nbytes <= EXTRAPOLATED * self.most

    def learn(self, nbytes: float, seconds: float) -> float:
        """Learn how long a load took, and return what was expected of it.

        Parameters
        ----------
        nbytes : float
            Bytes of the load, and of the loads that ran when it began.
        seconds : float
        """
        expected = self.seconds(nbytes)
        if nbytes <= 0 or seconds <= 0:
            return expected
        if not self.most:
            self.latency = _LEAST_SHARE * seconds
            self.per_byte = (1 - _LEAST_SHARE) * seconds / nbytes
        else:
            target, change = 2 * seconds * expected / (expected + seconds), 0.0
            while change < _CHANGE_AT_ONCE:
                # What has the larger share of the time is changed more.
                usual = self.seconds(nbytes)
                share = min(max(self.latency / usual, _LEAST_SHARE), 1 - _LEAST_SHARE)
                change = target / usual
                step = max(change, _CHANGE_AT_ONCE) ** (1 / (share**2 + (1 - share) ** 2))
                self.latency *= step**share
                self.per_byte *= step ** (1 - share)
        self.most = max(self.most, nbytes)
        self._sizes.add(nbytes)
        return expected

    def seconds(self, nbytes: float) -> float:
        """Return how long a load takes, bytes as for :meth:`learn`; 0 before the first."""
        return self.latency + self.per_byte * nbytes

    def at_once(self, chunk_bytes: float, others: float, seconds: float, most: int) -> int:
        """Return how many chunks may be read at once, so that these are there in time.

        Parallel chunks arrive together, so many of them arrive late from a slow storage.

        Parameters
        ----------
        chunk_bytes, others : float
            Bytes of a chunk, and of the loads that run already.
        seconds : float
        most : int
        """
        chunk_seconds = self.per_byte * chunk_bytes
        free_seconds = max(0.0, seconds - self.seconds(others))
        if free_seconds >= chunk_seconds * most:
            return most
        return max(1, int(free_seconds / chunk_seconds))
