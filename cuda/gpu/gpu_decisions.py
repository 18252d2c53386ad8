"""What the figures of the part ``design`` decide, written down before they are measured.

Defaults change by these rules only. Sizes are bytes, times seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

Facts = Mapping[str, Mapping[str, Any]]

#: Direct loads: smallest piece now, and what they have to gain to be kept at all.
DIRECT_BYTES: Final = 64 << 10
DIRECT_GAIN: Final = 1.2
DIRECT_LOSS: Final = 1.05
#: Another combination of attributes has to be faster by this factor.
ATTRIBUTES_GAIN: Final = 1.05
#: A step of 8192 tokens may spend this long on the gathers of its chunks: 10 % of a prefill
#: of 200 ms.
FALLBACK_SECONDS: Final = 0.020
#: A thread that sleeps until an event may be awake so much later than one that spins.
WAKE_UP_SECONDS: Final = 100e-6
#: Another way of loading has to shorten steps beside loads by this part of a step alone; ways that
#: differ less than the second number count as alike. It may cost so much of the rate of loads, and
#: the slowest steps may get so much slower.
STEP_GAIN: Final = 0.01
STEP_ALIKE: Final = 0.003
RATE_KEPT: Final = 0.97
TAIL_KEPT: Final = 1.02
#: Digests of a chunk on the GPU may take this much of the time of its copies.
DIGESTS_SHARE: Final = 0.25


@dataclass(frozen=True)
class Decision:
    """One default, the rule, and the function that applies it to the facts of all groups."""

    key: str
    rule: str
    apply: Callable[[Facts], str]

    def decide(self, facts: Facts) -> str:
        """Return what follows from the facts."""
        try:
            return self.apply(facts)
        except (KeyError, ValueError, TypeError) as error:
            return f"open, the figures are missing ({type(error).__name__}: {error})"


def _direct(facts: Facts) -> str:
    # {piece: {"alone": [direct, over buffers], "beside products": [direct, over buffers]}}
    measured = {int(piece): ways for piece, ways in facts["direct_loads"]["loads"].items()}
    if not measured:
        raise ValueError("no piece was measured")
    gains = {
        piece: [buffers / direct for direct, buffers in ways.values()]
        for piece, ways in measured.items()
        if piece & (piece - 1) == 0
    }
    best = max((max(gain) for piece, gain in gains.items() if piece >= DIRECT_BYTES), default=0.0)
    if best < DIRECT_GAIN:
        return f"remove direct loads: at most {best:.2f} times as fast as over device buffers"
    least = None
    for piece in sorted(gains, reverse=True):
        if min(gains[piece]) < 1 / DIRECT_LOSS:
            break
        least = piece
    if least is None:
        return "remove direct loads: the largest pieces are slower than over device buffers"
    if least == DIRECT_BYTES:
        return f"keep direct loads of pieces from {DIRECT_BYTES} bytes on"
    return f"direct loads of pieces from {least} bytes on, instead of {DIRECT_BYTES}"


def _attributes(facts: Facts) -> str:
    # {piece: {attributes: seconds of the same bytes}}, {piece: the library's attributes}
    measured = facts["copies_by_piece"]["in"]
    now = facts["copies_by_piece"]["attributes now"]
    large = [piece for piece in measured if int(piece) >= DIRECT_BYTES]
    if not large:
        raise ValueError("no large piece was measured")
    gains = {
        name: min(measured[piece][now[piece]] / measured[piece][name] for piece in large)
        for name in measured[large[0]]
    }
    best = max(gains, key=lambda name: gains[name])
    told = f"{best} is {gains[best]:.2f} times as fast as those of now, in the worst case"
    return f"change: {told}" if gains[best] >= ATTRIBUTES_GAIN else f"keep them: {told}"


def _fallback(facts: Facts) -> str:
    took = {
        name: facts[f"fallback_{name}"]["seconds of a step"]
        for name in ("cuda", "triton")
        if facts[f"fallback_{name}"] or name != "triton"
    }
    return ", ".join(
        f"{name} {'may store' if seconds <= FALLBACK_SECONDS else 'stores only if it is told to'}"
        f" ({seconds * 1e3:.1f} ms)"
        for name, seconds in took.items()
    )


def _wake_up(facts: Facts) -> str:
    seconds = facts["machine"]["seconds to wake up"]
    told = f"a thread that sleeps is awake {seconds * 1e6:.0f} µs after the event"
    return f"spin: {told}" if seconds > WAKE_UP_SECONDS else f"sleep: {told}"


def _ways(facts: Facts) -> str:
    # {way: {"median": seconds, "99 %": seconds, "GB/s": rate}}, the default first, then by how
    # much they differ from it.
    measured, alone = facts["ways_of_loading"]["ways"], facts["ways_of_loading"]["alone"]
    default, now = next(iter(measured.items()))
    gains = {
        name: (now["median"] - way["median"]) / alone
        for name, way in measured.items()
        if way["GB/s"] >= RATE_KEPT * now["GB/s"] and way["99 %"] <= TAIL_KEPT * now["99 %"]
    }
    best = max(gains.values())
    told = f"steps beside loads are {100 * (now['median'] / alone - 1):.1f} % longer with {default}"
    if best < STEP_GAIN:
        return f"keep {default}: {told}, and at most {100 * best:.1f} % of a step would be gained"
    name = next(name for name in gains if gains[name] >= max(STEP_GAIN, best - STEP_ALIKE))
    return f"change to {name}: {told}, {100 * gains[name]:.1f} % of a step less with these"


def _digests(facts: Facts) -> str:
    # {chunk: {"seconds": {blocks: seconds}, "seconds of its copies": seconds}}
    measured = facts["digests"]["cost"]
    shares: dict[int, float] = {}
    for cost in measured.values():
        for blocks, seconds in cost["seconds"].items():
            share = seconds / cost["seconds of its copies"]
            shares[int(blocks)] = max(share, shares.get(int(blocks), 0.0))
    if not shares:
        raise ValueError("nothing was measured")
    enough = min((blocks for blocks in shares if shares[blocks] < DIGESTS_SHARE), default=None)
    told = ", ".join(f"{share:.2f} on {blocks} SMs" for blocks, share in sorted(shares.items()))
    if enough is None:
        return f"verify on CPUs: the digests of a chunk take {told} of the time of its copies"
    return f"verify on {enough} SMs: the digests of a chunk take {told} of the time of its copies"


DECISIONS: Final = (
    Decision(
        "B2",
        "Loads go from page-locked staging directly into blocks if, for a piece of 64 KiB or more, "
        "that is at least 1.2 times as fast as over device buffers, alone or beside matrix "
        "products; then from the smallest power of two on from which it is nowhere slower "
        "by more than 5 %. Otherwise that path is removed.",
        _direct,
    ),
    Decision(
        "B3",
        "The attributes of batched copies to the device change to those that are at least 5 % "
        "faster for every measured piece of 64 KiB or more.",
        _attributes,
    ),
    Decision(
        "B8",
        "Triton on a GPU stores by default if the gathers of a step of 8192 tokens, 31 chunks of "
        "32 MiB in 8 shards, take the step thread at most 20 ms.",
        _fallback,
    ),
    Decision(
        "wake-up",
        "Threads that pace copies spin for the last 20 µs of a piece, instead of sleeping until "
        "its event, if a thread that sleeps is awake more than 100 µs after it: the queue holds "
        "150 µs beyond the oldest piece.",
        _wake_up,
    ),
    Decision(
        "ring and grid",
        "Loads get 4 device buffers of one object instead of 3 of a chunk, their kernels at most "
        "32, 16 or 8 blocks of threads, or both, if decode steps beside loads at full rate are so "
        "shorter (median) by at least 1 % of a step alone, loads keep 97 % of the rate, and the "
        "99th percentile of the steps is not more than 2 % longer. Of ways whose gains differ by "
        "less than 0.3 % of a step, the one that changes least.",
        _ways,
    ),
    Decision(
        "digests",
        "Loads are verified on the GPU (what the kernel has not verified is not scattered, and "
        "no load is reported before its verdict is known) if the digests of a chunk on 8 SMs, "
        "or else on 16, take less than a quarter of the time of its copies to the device, beside "
        "such copies, for 8 objects of 4 MiB and for MLA.",
        _digests,
    ),
)
