"""What the histories of a machine say of prompts, as texts; and of bad objects.

Owns the texts of events, and which objects that engines have found bad still are. No content of a
history (:mod:`kvshelf.history`) is an error here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvshelf.errors import BadObjectError, ConfigError, ObjectMissingError, ObjectNameError
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, KINDS, Kind
from kvshelf.format.names import parse_path
from kvshelf.format.objects import ObjectFormat
from kvshelf.history import KEY_BYTES, Event, Past, Reason
from kvshelf.shelf.shelf import Shelf, read_namespace

#: Events of a prompt that are returned.
_MOST_EVENTS: Final = 50

_EVENTS: Final = {
    Event.MISSED: "did not find it",
    Event.NOT_LOADED: "did not load it",
    Event.FAILED_LOAD: "could not load it",
    Event.REFUSED_STORE: "did not store it",
    Event.DROPPED_STORE: "computed it and dropped it",
    Event.EVICTED: "deleted it",
}
_REASONS: Final = {
    Reason.UNKNOWN: "",
    Reason.ABSENT: "there was no such object",
    Reason.FAILED_BEFORE: "an earlier load of it had failed, and lookups leave it out for a while",
    Reason.TIMED_OUT: "the storage took too long",
    Reason.UNAVAILABLE: "a circuit breaker was open, or the storage took no writes",
    Reason.BAD: "the object was bad",
    Reason.ERROR: "the storage, or the transfer, failed",
    Reason.STAGING_FULL: "staging was full",
    Reason.PARENT_DROPPED: "a chunk before it had been dropped",
    Reason.ADAPTER_UNKNOWN: "the LoRA adapter's files were not known yet, or had changed",
    Reason.WEIGHTS_CHANGED: "the engine's weights had changed or were being compared",
    Reason.SHUTDOWN: "the engine stopped before it was written",
    Reason.NO_ROOM: "the shelf was full",
    Reason.BLOCKS_FREED: "vLLM had freed its blocks",
    Reason.BOUNDS: "to keep the shelf within max_bytes and max_age",
    Reason.NOT_ASKED: "such requests do not read the prefix cache",
    Reason.STARTING: "the engine had just started and did not know its namespace yet",
    Reason.NOT_WORTH: "a state here was not worth its bytes (state_interval)",
    Reason.SLOWER: "computing it was expected to be sooner, or the load was cut (admission)",
}
#: What to do about a reason.
ADVICE: Final = {
    Reason.TIMED_OUT: "the metrics lookup_timeouts and late_calls tell how often; lookup_wait_s",
    Reason.UNAVAILABLE: "kvshelf doctor SHELF tries the storage",
    Reason.ERROR: "the engine's log names the error",
    Reason.STAGING_FULL: "give the engine more staging_bytes, or a faster storage",
    Reason.PARENT_DROPPED: "see the chunk before it",
    Reason.NO_ROOM: "give the shelf more space: capacity.max_bytes and min_free, kvshelf du, gc",
    Reason.BOUNDS: "raise capacity.max_bytes or max_age, or pin the prompt: kvshelf pin",
    Reason.SHUTDOWN: "raise shutdown_drain_s",
    Reason.NOT_WORTH: "a smaller state_interval stores more states",
    Reason.SLOWER: "a faster storage is loaded from; admission: always loads in any case",
    Reason.FAILED_BEFORE: "reset_prefix_cache with reset_connector ends it",
    Reason.BAD: "an engine that stores replaces it; kvshelf verify --repair moves it aside",
}


@dataclass(frozen=True, slots=True)
class Noted:
    """An event in a history of this machine.

    Attributes
    ----------
    time : float
        Seconds since the epoch.
    event, reason : str
        Names of :class:`~kvshelf.history.Event` and
        :class:`~kvshelf.history.Reason`, in lower case.
    chunk : int
    kind : Kind
    process : str
        The process that noted it.
    text : str
        The event as a sentence without a subject.
    """

    time: float
    event: str
    reason: str
    chunk: int
    kind: Kind
    process: str
    text: str

    @property
    def sentence(self) -> str:
        """The event as a sentence, with its time."""
        kind = "" if self.kind == FULL else f", kind {self.kind}"
        what = self.text.replace(" it", f" chunk {self.chunk}{kind}", 1)
        return f"{self.process} {what} ({_when(self.time)})"

    @property
    def advice(self) -> str:
        """What to do; empty if there is nothing."""
        return ADVICE.get(Reason[self.reason.upper()], "")


def of_shelf(pasts: Sequence[Past], url: str) -> list[Past]:
    """Return the histories of processes that use a shelf, also through a node server."""
    places = {_place(url)}
    places |= {
        _place(header_text(past, "socket"))
        for past in pasts
        if _place(header_text(past, "shelf")) in places
    }
    return [past for past in pasts if _place(header_text(past, "shelf")) in places - {""}]


def _place(url: str) -> str:
    return url.rstrip("/")


def events_of(pasts: Sequence[Past], chunks: Sequence[Chunk]) -> list[Noted]:
    """Return what histories say of chunks, the latest last: at most 50 events."""
    wanted = np.array([np.frombuffer(chunk.key[:KEY_BYTES], "<u8") for chunk in chunks])
    noted: list[Noted] = []
    for past in pasts if chunks else ():
        keys = np.ascontiguousarray(past.events["key"]).view("<u8")
        rows = np.isin(keys[:, 0], wanted[:, 0]) & np.isin(keys[:, 1], wanted[:, 1])
        process = process_of(past)
        noted += [_noted(row, process) for row in past.events[rows][-_MOST_EVENTS:]]
    return sorted(noted, key=lambda one: one.time)[-_MOST_EVENTS:]


def _noted(row: Any, process: str) -> Noted:
    """Return an event of a file that may hold anything."""
    event = next((one for one in Event if one == row["event"]), None)
    reason = next((one for one in Reason if one == row["detail"]), Reason.UNKNOWN)
    kind = KINDS[int(row["kind"])] if row["kind"] < len(KINDS) else FULL
    what = "did something with it that this version does not know" if event is None else ""
    text = what or _EVENTS[event or Event.MISSED]
    if _REASONS[reason]:
        text += f": {_REASONS[reason]}"
    name = "unknown" if event is None else event.name.lower()
    return Noted(
        *(float(row["time"]), name, reason.name.lower(), int(row["chunk"]), kind, process, text)
    )


def _when(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def process_of(past: Past | None) -> str:
    """Return what a process is called in texts."""
    if past is None:
        return "an engine"
    role, pid = header_text(past, "role") or "a process", past.header.get("pid")
    ended = "" if past.running else ", which has ended"
    return f"{role} (pid {pid if isinstance(pid, int) else '?'}{ended})"


def header_text(past: Past, name: str) -> str:
    """Return a text of a history's header; empty if it has none."""
    value = past.header.get(name)
    return value if isinstance(value, str) else ""


def still_bad(shelf: Shelf, pasts: Sequence[Past]) -> dict[str, str]:
    """Read the objects that engines of this machine have found bad, and return those that are.

    An engine that stores replaces a bad object when it computes the chunk anew. Read-only engines
    do not.

    Parameters
    ----------
    shelf : Shelf
    pasts : Sequence of Past
        Those of other shelves are left out.

    Returns
    -------
    dict
        What is wrong with each object, by its name.

    Raises
    ------
    StorageError
        If the storage failed.
    """
    names: dict[str, None] = {}
    for past in of_shelf(pasts, shelf.url):
        bad = past.header.get("bad")
        if isinstance(bad, dict):
            names |= dict.fromkeys(bad)
    found: dict[str, str] = {}
    for name in names:
        parsed = parse_path(name)
        if parsed is None or parsed.namespace is None:
            continue
        try:
            namespace = read_namespace(shelf.backend, parsed.namespace)
            fmt = ObjectFormat(namespace).of_name(parsed)
            size = fmt.object_size(parsed.shard, parsed.tail_tokens)
            shelf.view(fmt).load_named(parsed, memoryview(bytearray(size)))
        except ObjectMissingError:
            continue
        except BadObjectError as error:
            found[name] = str(error)
        except (ConfigError, ObjectNameError, ValueError):
            # Its description is gone or damaged, which `kvshelf ls` says.
            continue
    return found
