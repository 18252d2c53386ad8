"""The rule of admission: a hit is loaded if loading is expected to be faster than computing.

Let a prompt have n tokens, the first x in vLLM's prefix cache and the first h on the shelf.
Computing takes C(x→n) seconds, loading a + b (bytes) + C(h→n), see
:mod:`~kvshelf.vllm.scheduler.costs`. The storage and the tiers in front of it each have their own a
and b. The difference is the
largest for all of the hit or none of it, because C grows faster than the bytes. Both ways wait for
the prompts before the request. A load overlaps that wait: only its time beyond the wait counts. A
prompt that is computed delays each request whose load runs, by half of its time on average.

An admitted load is cut as soon as computing the rest would be sooner: at t seconds since kvshelf
began to make the request wait, with s tokens loaded, if t + C(s→h) > W + (1 + ε) C(x→h). W is what
the prompts before the request take if nothing of them is loaded. So a first token comes at most
one step and ε C(x→h) later than if it had been computed. A hit of which no part can be kept is
cut after W + C(x→h). The first chunks must come early: the load reads only so many at once that
they take 3/4 of the delay that a steady load may have.

Both ways must be known before one is trusted.

* The time of a way is a *guess* until three steps, or loads, of about the prompt's size were timed:
  the first are slow. A step that takes half of the expected time makes all before it a guess.
* A hit is loaded while no load of its size is known. If no other load runs, it reads ∛n of its n
  chunks at once: chunks that have come in part when a load is cut are lost.
* While no step is known that computed as much, a load is cut after a second, and one more for each
  load before it, or after 1 + ε times the usual time of a load.
* One request tries the way that seems slower if that way's time is a guess, or if no request took
  it for a minute. Trials of a way are a 25th of all time at most, but for the first ones.
* A load that is tried is cut as others are. A trial of computing leaves the end of a hit to be
  computed, as much as makes the request 1.5 times as long at most. A hit that cannot be divided is
  computed as a trial while a guess says that this takes less than five times as long as the load.
* Steps behind a hit are timed too, however small: they show that a slow start is over.

That all of a hit or none is best, and that a bound makes it safe, is ski rental (Karlin, Manasse,
Rudolph, Sleator, 1988); ε is small since few admitted loads are slow.

Contracts
---------
* Pure but for what it learns. Not thread-safe; the caller has one thread, or a lock.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from kvshelf.vllm.scheduler.costs import LoadCosts, PrefillCosts, attended

#: ε: share of the time of computing a hit by which its load may delay the first token.
MOST_DELAY: Final = 0.25
#: Chunks that are read at once are to arrive within this share of the time until a cut.
_SLACK_SHARE: Final = 0.75
#: Share of a computed prompt's time that each request waits whose load runs.
_DELAYED: Final = 0.5
#: Seconds that a load may take while it is not known how long computing takes.
_UNKNOWN_SECONDS: Final = 1.0
#: The time between two trials, as a multiple of what a trial costs. After the first trial of
#: computing it is less, and grows by this factor.
_TRIAL_PAUSE: Final = 25.0
_PAUSE_GROWTH: Final = 4
#: Seconds after which a way is tried that was not taken, though what is known of it is certain.
_FRESH_SECONDS: Final = 60.0
#: What a trial of computing may cost more than the load, as a share of it: of a hit that can be
#: divided, and of one that cannot, while the time of computing is a guess.
_PART_COST: Final = 0.5
_WHOLE_COST: Final = 4.0
#: What a trial of computing counts for at least, as a share of the request's time.
_LEAST_COST: Final = 0.25


class Hit(NamedTuple):
    """What a shelf has of a prompt: tokens ``[start, end)`` of its `tokens`.

    Attributes
    ----------
    start, end, tokens : int
    chunk_tokens : int
    nbytes : int
        Of all ranks.
    divisible : bool
        A part of it, from its start, can be kept when its load is cut.
    is_near : bool
        Most of it lies in tiers: then it counts as if all of it did.
    unit : int
        Tokens: a shorter hit ends at a multiple of it.
    """

    start: int
    end: int
    tokens: int
    chunk_tokens: int
    nbytes: int
    divisible: bool = True
    is_near: bool = False
    unit: int = 1

    @property
    def chunks(self) -> int:
        """The number of chunks that overlap it."""
        return -(-self.end // self.chunk_tokens) - self.start // self.chunk_tokens


class Before(NamedTuple):
    """What runs when a request is asked for, and comes before it.

    Attributes
    ----------
    computing : float
        Seconds that the prompts take which are being computed.
    unloaded : float
        The same, with the prompts that are being loaded, as if nothing of them was.
    on_storage, in_tiers : int
        Bytes of the loads that run: of those from the storage, and of those from tiers.
    loads : int
        The number of both.
    """

    computing: float = 0.0
    unloaded: float = 0.0
    on_storage: int = 0
    in_tiers: int = 0
    loads: int = 0

    def beside(self, hit: Hit) -> int:
        """Return the bytes of the loads that a load of `hit` shares its source with."""
        return self.in_tiers if hit.is_near else self.on_storage


class AdmissionRule:
    """Decides by the times that steps and loads have taken.

    Parameters
    ----------
    step_tokens : int
        Most tokens that one step computes.

    Attributes
    ----------
    prefill : PrefillCosts
    loads : dict
        :class:`~kvshelf.vllm.scheduler.costs.LoadCosts` of hits on the storage (False), and in
        tiers (True).
    """

    def __init__(self, step_tokens: int) -> None:
        self.prefill = PrefillCosts(step_tokens)
        self.loads = {False: LoadCosts(), True: LoadCosts()}
        #: When a load last began: of hits on the storage, and of those in tiers.
        self._loaded_at = {False: -math.inf, True: -math.inf}
        #: When a prompt was last computed though it had a hit, and trials since the last speedup.
        self._computed_at = -math.inf
        self._trials = self._speedups = 0

    def end_of_load(self, hit: Hit, before: Before, now: float) -> int:
        """Return up to which token a hit is to be loaded: its start if nothing of it is.

        Parameters
        ----------
        hit : Hit
        before : Before
        now : float
            Seconds, by the caller's clock.
        """
        if self.is_unknown(hit):
            return hit.end
        if self._is_sooner(hit, before):
            return self._end_beside_trial(hit, now)
        # A load that is tried is cut.
        cost = self.prefill.seconds(hit.start, hit.end) * (MOST_DELAY if hit.divisible else 1)
        pause = _TRIAL_PAUSE * cost
        if self.loads[hit.is_near].is_certain(hit.nbytes):
            pause = max(pause, _FRESH_SECONDS)
        return hit.end if now - self._loaded_at[hit.is_near] >= pause else hit.start

    def begin_load(self, hit: Hit, now: float) -> None:
        """Note that a load begins."""
        self._loaded_at[hit.is_near] = now

    def begin_computing(self, tokens: int, now: float) -> None:
        """Note that tokens of a prompt are computed, of which nothing is loaded."""
        if self.prefill.is_certain(tokens):
            self._computed_at = now

    def is_unknown(self, hit: Hit) -> bool:
        """Whether no load of a hit's size is known, or no step."""
        return not (self.loads[hit.is_near].knows(hit.nbytes) and self.prefill.most)

    def admits(self, hit: Hit, before: Before) -> bool:
        """Whether a hit is loaded, but for trials: it is sooner, or of unknown costs."""
        return self.is_unknown(hit) or self._is_sooner(hit, before)

    def _is_sooner(self, hit: Hit, before: Before) -> bool:
        """Whether a hit is expected to be loaded sooner than it is computed."""
        costs, others_load = self.loads[hit.is_near], before.beside(hit)
        is_known = self.prefill.knows(hit.end - hit.start)
        seconds = self.prefill.seconds if is_known else self.prefill.seconds_at_most
        load = costs.seconds(others_load + hit.nbytes)
        rest_seconds, prefill_seconds = seconds(hit.end, hit.tokens), seconds(hit.start, hit.tokens)
        computed = (
            before.computing
            + prefill_seconds
            + _DELAYED * before.loads * (prefill_seconds - rest_seconds)
        )
        loaded = max(before.computing, load) + rest_seconds
        if not is_known:
            return loaded < computed
        if not hit.divisible:
            # A load that would be cut brings nothing.
            return loaded < computed and load < before.unloaded + prefill_seconds - rest_seconds
        if loaded >= computed:
            return False
        slack = self._slack(hit, before)
        chunk_bytes = hit.nbytes / hit.chunks
        first = costs.at_once(chunk_bytes, others_load, _SLACK_SHARE * slack, hit.chunks)
        return costs.seconds(others_load + first * chunk_bytes) < slack

    def _end_beside_trial(self, hit: Hit, now: float) -> int:
        """Return the end of a hit that is loaded, less what of it is computed as a trial now.

        A trial computes all of it, a half, a fourth, and so on: the most that costs little more. It
        is noted here, so the caller asks once for each request that vLLM may schedule.
        """
        if self._speedups != self.prefill.speedups:
            self._speedups, self._trials, self._computed_at = self.prefill.speedups, 0, -math.inf
        is_certain = self.prefill.is_certain(hit.tokens - hit.start)
        passed = now - self._computed_at
        if is_certain and passed < _FRESH_SECONDS:
            return hit.end
        seconds, load = self.prefill.seconds_at_most, self.loads[hit.is_near].seconds(hit.nbytes)
        rest_seconds, length = seconds(hit.end, hit.tokens), hit.end - hit.start
        dearest = _PART_COST * (load + rest_seconds)
        if not (hit.divisible or is_certain):
            dearest = _WHOLE_COST * load
        growth = min(_TRIAL_PAUSE, _PAUSE_GROWTH**self._trials)
        # A small step may cost more than is known of small steps.
        part = length if passed >= growth * _LEAST_COST * (load + rest_seconds) else 0
        while part >= hit.unit:
            cost = seconds(hit.end - part, hit.tokens) - rest_seconds - load * part / length
            if cost <= dearest:
                if passed < growth * cost:
                    return hit.end
                self._computed_at = now
                self._trials += 1
                return hit.end - part
            part = part // 2 // hit.unit * hit.unit if hit.divisible else 0
        return hit.end

    def bytes_on_way(self, hit: Hit, before: Before) -> int:
        """Return the bytes that predict a load's time: its own, and those of loads beside it."""
        return hit.nbytes + before.beside(hit)

    def at_once(self, hit: Hit, before: Before) -> int:
        """Return how many chunks are read at once, so that the first are there before a cut."""
        costs = self.loads[hit.is_near]
        if not (costs.knows(hit.nbytes) or before.loads):
            return int(0.5 + hit.chunks ** (1 / 3))
        is_known = costs.knows(hit.nbytes) and self.prefill.knows(hit.end - hit.start)
        if not (hit.divisible and is_known):
            return hit.chunks
        seconds, others_load = _SLACK_SHARE * self._slack(hit, before), before.beside(hit)
        return costs.at_once(hit.nbytes / hit.chunks, others_load, seconds, hit.chunks)

    def patience(self, hit: Hit, before: Before, passed: float = 0.0) -> tuple[float, ...]:
        """Return when the load of an admitted hit is cut.

        Parameters
        ----------
        hit : Hit
        before : Before
        passed : float
            Seconds for which the request has waited for an answer.

        Returns
        -------
        tuple of float
            Seconds from now: at place i, when a load is cut of which i chunks are there. The last
            one also holds for all that follow.
        """
        if not self.prefill.knows(hit.end - hit.start):
            costs, longest = self.loads[hit.is_near], (1 + before.loads) * _UNKNOWN_SECONDS
            if costs.knows(hit.nbytes):
                usual = costs.seconds(self.bytes_on_way(hit, before))
                longest = max(longest, (1 + MOST_DELAY) * usual)
            if not self.admits(hit, before):
                longest = min(longest, self.prefill.seconds_at_most(hit.start, hit.end))
            return (longest,)
        start, end, size = hit.start, hit.end, hit.chunk_tokens
        seconds, waits = self.prefill.seconds, before.unloaded - passed
        prefill_seconds = seconds(start, end)
        if not hit.divisible:
            return (waits + prefill_seconds,)
        return tuple(
            waits + (1 + MOST_DELAY) * prefill_seconds - seconds(max(start, chunk * size), end)
            for chunk in range(start // size, start // size + hit.chunks)
        )

    def _slack(self, hit: Hit, before: Before) -> float:
        """Return how many seconds later the chunks of a steady load may come before it is cut.

        The hit can be divided. Its chunks arrive evenly, but early tokens are computed faster than
        late ones. So a steady load is behind in its midst: with a share s of it there, by
        s·slope − s²·curve, where the curve is what attention inside the hit takes.
        """
        prefill_seconds = self.prefill.seconds(hit.start, hit.end)
        curve = self.prefill.seconds_of(0.0, attended(0, hit.end - hit.start))
        slope = self.loads[hit.is_near].seconds(hit.nbytes) - prefill_seconds + curve
        share = 0.0
        if slope > 0:
            share = slope / (2 * curve) if slope < 2 * curve else 1.0
        latest = share * slope - share**2 * curve
        return before.unloaded + MOST_DELAY * prefill_seconds - latest
