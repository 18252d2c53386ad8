"""What it costs to compute tokens, and to load them, learned from the times that both took.

Owns two models of seconds. Computing the tokens from x to y of a prompt takes
p (y − x) + q (y² − x²) / 2: the linear layers, and the attention to all tokens before. Loading n
bytes takes a r + b n, where r is how often the storage's answer is waited for: once, if all chunks
are read at once. Since the first grows faster than the second, the best part of a hit to load is
all of it or nothing, see :mod:`kvshelf.admission`.

Contracts
---------
* No coefficient is negative, so more work is never cheaper.
* What is learned fades: a model follows an engine or a storage whose speed changes.
* Errors count by their share of the time, so one outlier changes little.
* Not thread-safe; the caller has one thread, or a lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

#: Of so many times the last ones count as much as all others together.
_MEMORY: Final = 16
#: The weight of what was learned before, after each new time.
_FADING: Final = 0.5 ** (1 / _MEMORY)
_ROUNDS: Final = 16
_LAST_LOADS: Final = 16
#: What was measured also says what work of up to so many times its size takes.
EXTRAPOLATED: Final = 4
#: The usual bytes and rounds of a load.
_LOAD_SCALES: Final = (1e6, 1.0)
#: Two loads in a row that take so many times as long as others, or as short, show a change, if
#: what the one takes is no more than so many times what the other does.
_CHANGED: Final = 1.5
_AGREE: Final = 3.0


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
        """Learn that something with these features took so long. Without a time it is left out."""
        if seconds <= 0:
            return
        relative = [
            feature / scale / seconds for feature, scale in zip(features, self._scales, strict=True)
        ]
        for row, own in enumerate(relative):
            self._sums[row] = _FADING * self._sums[row] + own
            products = self._products[row]
            for column, other in enumerate(relative):
                products[column] = _FADING * products[column] + own * other
        self._solved = False

    def _solve(self) -> None:
        """Minimize over one coefficient after the other, from those of before."""
        found = self._coefficients
        for _ in range(_ROUNDS):
            for row, products in enumerate(self._products):
                others = sum(map(float.__mul__, products, found)) - products[row] * found[row]
                found[row] = max(0.0, (self._sums[row] - others) / max(products[row], 1e-12))
        self._solved = True

    def seconds(self, features: Sequence[float]) -> float:
        """Return how long something with these features is expected to take."""
        if not self._solved:
            self._solve()
        return sum(
            coefficient * feature / scale
            for coefficient, feature, scale in zip(
                self._coefficients, features, self._scales, strict=True
            )
        )


def attended(start: int, end: int) -> float:
    """Return how many tokens those of ``[start, end)`` attend to, all together."""
    return (end * end - start * start) / 2


def work(start: int, end: int) -> tuple[float, float]:
    """Return how many tokens ``[start, end)`` of a prompt are, and how many they attend to."""
    return (end - start, attended(start, end)) if start < end else (0, 0.0)


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
    """

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._fit = Fit((1e3, 1e6, 16.0, 1.0))
        self.most = 0

    def knows(self, tokens: int) -> bool:
        """Whether the steps that were learned say what it takes to compute so many tokens.

        Small steps take long for their tokens: of more than that they say what it takes at most.
        """
        return min(tokens, self._step_tokens) <= EXTRAPOLATED * self.most

    def is_usual(self, tokens: int) -> bool:
        """Whether a step that computes so many tokens is not small beside those learned."""
        return EXTRAPOLATED * tokens >= self.most

    def learn(self, parts: Sequence[tuple[int, int]], decodes: int, seconds: float) -> float:
        """Learn how long a step took, and return what was expected of it.

        Parameters
        ----------
        parts : Sequence of (int, int)
            The tokens of prompts that it computed: the first, and the one behind the last, of each.
        decodes : int
            Number of requests of which it computed one more token of the answer.
        seconds : float
        """
        tokens = sum(end - start for start, end in parts)
        pairs = sum(attended(start, end) for start, end in parts)
        features = (tokens, pairs, decodes, 1.0)
        expected = self._fit.seconds(features)
        self._fit.learn(features, seconds)
        self.most = max(self.most, tokens)
        return expected

    def seconds(self, start: int, end: int) -> float:
        """Return how long tokens ``[start, end)`` of a prompt take, in steps of their own."""
        return self.seconds_of(*work(start, end))

    def seconds_of(self, tokens: float, pairs: float) -> float:
        """Return how long some :func:`work` takes; that of several prompts may be added."""
        return self._fit.seconds((tokens, pairs, 0.0, tokens / self._step_tokens))


class LoadCosts:
    """What it costs to load bytes from one storage: more than most of the last loads took.

    Parameters
    ----------
    quantile : float
        The share of the last loads that took no longer than what is expected.

    Attributes
    ----------
    most : float
        Most bytes of a load that was learned.
    """

    def __init__(self, quantile: float = 0.8) -> None:
        self._quantile = quantile
        # The first feature explains what both could: loads of one size take as long as their bytes.
        self._fit = Fit(_LOAD_SCALES)
        self._last: deque[tuple[float, float, float]] = deque(maxlen=_LAST_LOADS)
        #: The quantile of the last loads, as a multiple of what the fit says; None: not known.
        self._factor: float | None = None
        #: The time of the last load by that of the fit, if that was a surprise; else 0.
        self._surprise = 0.0
        self.most = 0.0

    def knows(self, nbytes: float) -> bool:
        """Whether the loads that were learned say what it takes to load so many bytes."""
        return nbytes <= EXTRAPOLATED * self.most

    def learn(self, nbytes: float, seconds: float, rounds: float = 1.0) -> float:
        """Learn how long a load took, and return what was expected of it.

        Parameters
        ----------
        nbytes : float
            Bytes of the load, and of the loads that ran when it began.
        seconds : float
        rounds : float
            Its chunks, as a multiple of those that are read at once.
        """
        expected = self.seconds(nbytes, rounds)
        usual = self._fit.seconds((nbytes, rounds))
        ratio = seconds / max(usual, 1e-9)
        surprises = self.knows(nbytes) and not 1 < _CHANGED * ratio < _CHANGED**2
        # The same change as the last one showed: accidents differ.
        agree = surprises and 1 < _AGREE * ratio / max(self._surprise, 1e-9) < _AGREE**2
        self._last.append((nbytes, rounds, seconds))
        # One that surprises is learned with the next, which is compared with those before it.
        if self._surprise:
            self._learn_last(-2)
        if not surprises or agree:
            self._learn_last(-1)
        if agree and not self._explains_all():
            self._begin_anew()
        self._surprise = ratio if surprises and not agree else 0.0
        self.most = max(self.most, nbytes)
        self._factor = None
        return expected

    def _explains_all(self) -> bool:
        """Whether the last two loads took what the fit says, and those before them no longer."""
        ratios = [self._ratio(*load) for load in self._last]
        fits = all(1 < _CHANGED * ratio < _CHANGED**2 for ratio in ratios[-2:])
        return fits and self._most(ratios) < _CHANGED

    def _ratio(self, nbytes: float, rounds: float, seconds: float) -> float:
        return seconds / max(self._fit.seconds((nbytes, rounds)), 1e-9)

    def _most(self, ratios: Sequence[float]) -> float:
        """Return the quantile; of three and more never the largest, which may be an accident."""
        place = min(int(self._quantile * len(ratios)), len(ratios) - (1 if len(ratios) < 3 else 2))
        return sorted(ratios)[place]

    def _learn_last(self, place: int) -> None:
        nbytes, rounds, seconds = self._last[place]
        self._fit.learn((nbytes, rounds), seconds)

    def _begin_anew(self) -> None:
        """Keep the last two loads alone: the storage has become faster or slower.

        Between loads of before and after, the fit would explain the difference by their rounds.
        """
        last = list(self._last)[-2:]
        self._last.clear()
        self._last.extend(last)
        self._fit = Fit(_LOAD_SCALES)
        for place in range(len(last)):
            self._learn_last(place)

    def seconds(self, nbytes: float, rounds: float = 1.0) -> float:
        """Return how long a load takes; arguments as for :meth:`learn`. 0 before the first."""
        if self._factor is None:
            ratios = [self._ratio(*load) for load in self._last]
            self._factor = max(1.0, self._most(ratios)) if ratios else 1.0
        return self._factor * self._fit.seconds((nbytes, rounds))

    def at_once(self, chunk_bytes: float, others: float, seconds: float, most: int) -> int:
        """Return how many chunks may be read at once, so that these are there in time.

        Chunks that are read at once arrive together, late where the storage is slow.

        Parameters
        ----------
        chunk_bytes, others : float
            Bytes of a chunk, and of the loads that run already.
        seconds : float
        most : int
        """
        each = self.seconds(chunk_bytes) - self.seconds(0)
        left = max(0.0, seconds - self.seconds(others))
        return max(1, int(left / each)) if left < each * most else most
