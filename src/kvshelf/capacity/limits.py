"""The constants of capacity: bounds, ages, pauses.

Modules read them as attributes of this one, so that a test replaces each in one place.
"""

from __future__ import annotations

from typing import Final

HOUR: Final = 3600.0
DAY: Final = 86400.0

# ------------------------------------------------------------------------- listing

#: Fan-out folders of a group.
FANS: Final = 256
#: Chunks that a slice has at least.
SLICE: Final = 2048
#: A namespace or a salt group with at most so many files is listed whole.
PAGE: Final = 1000
#: From so many folders on it is cheaper to ask first which ones exist.
WIDE: Final = 16
#: Bytes of the largest object of any model; a larger file is none.
MOST_BYTES: Final = 64 << 30
#: Units of a fan-out folder that a sweep lists; of more it lists a sample.
MOST_UNITS: Final = 4 * SLICE
#: Files that are listed beside the objects of a namespace, and of a shelf.
MOST_BESIDE: Final = 16384

# ------------------------------------------------------------------------- order of eviction

#: A unit that was never used since it was stored ages so much faster.
NEVER_USED_AGES: Final = 2.0
#: An access time that is so many seconds later than the modification time is a use.
USE_SECONDS: Final = 2.0
#: Ages that differ by less than this part count as equal.
SAME_PART: Final = 1 / 32
#: Ages that differ by less than so many seconds count as equal.
LEAST_SAME: Final = 1.0
#: The place in a prompt that counts for half of what the last place counts for.
HALF_DEPTH: Final = 64
#: Share of the place in the score among equal ages; the age has the rest.
DEPTH_PART: Final = 0.95
#: What the key adds to the place of a chunk at most.
TIE_PART: Final = 1e-3
#: A sweep deletes at most so many times what slices have to delete on average.
MOST_PART: Final = 2.0

# ------------------------------------------------------------------------- deletion

#: After so many failures and no success nothing more is deleted.
MOST_REFUSED: Final = 64
#: Names that a deletion remembers of files that could not be deleted.
MOST_STUCK: Final = 4096
#: Units that are deleted together where each is looked at.
AT_ONCE: Final = 32

# ------------------------------------------------------------------------- bounds of stores

#: Share of a bound down to which slices delete on average.
LOW: Final = 0.92
#: Share of a bound above which every slice deletes.
HIGH: Final = 0.97
#: Part of a slice's share of the bound that is written from one sweep to the next.
STEP: Final = 0.05
#: Keepers that begin together do not know each other: each assumes so many at first, ...
MOST_UNKNOWN: Final = 256
#: ... and this part of them after each further heartbeat.
KNOWN_PART: Final = 16
#: Seconds for which a credit counts.
CREDIT_SECONDS: Final = 30.0
#: Seconds of a turn where there is no room for a chunk of each keeper.
TURN_SECONDS: Final = 0.25
#: Seconds that a write waits for a sweep to make room.
WAIT_SECONDS: Final = 5.0
#: Slices over which estimates and thresholds are smoothed.
SMOOTH: Final = 5
#: Part of a storage that stores leave free.
FREE_PART: Final = 0.05
#: Bytes that stores leave free at most.
FREE_BYTES: Final = 20 << 30
#: Part of a filesystem in memory that stores leave free, whatever its size.
FREE_PART_IN_MEMORY: Final = 0.10
#: A sweep that pays for stores frees so many times the largest store.
FREED_AT_ONCE: Final = 4.0
#: The same at most, where a quota is reached again and again.
MOST_FREED_AT_ONCE: Final = 256.0

# ------------------------------------------------------------------------- pauses

#: Seconds of rest for each second of work: sweeps take 1 % of a core.
REST: Final = 99.0
#: The same where stores will soon need room: a quarter of a core.
HURRY: Final = 3.0
#: The same where a store was refused: nine tenths of a core.
RUSH: Final = 0.1
#: Keepers that share the sweeps for ages at most.
MOST_SHARING: Final = 64
#: Seconds between looks at the free space while stores come.
LOOK_SECONDS: Final = 1.0
#: Seconds between looks, and between sweeps for a quota, otherwise.
IDLE_SECONDS: Final = 60.0
#: Seconds for which the storage's time is known.
HEARTBEAT_SECONDS: Final = 30.0
#: Below this pace of heartbeats a process has just begun.
FIRST_HEARTBEATS_SECONDS: Final = 1.0
#: Seconds after its last heartbeat for which a keeper counts.
ALIVE_SECONDS: Final = 600.0
#: Seconds after its last store for which a process sweeps for stale files of an hour.
LEAVES_SECONDS: Final = 3 * HOUR
#: Least pause of the evictor's thread.
LEAST_PAUSE: Final = 0.02
#: Pause after an error that may pass.
TROUBLE_SECONDS: Final = 30.0
#: Pause after a refusal, or after an error of kvshelf's own.
REFUSED_SECONDS: Final = HOUR
#: Seconds from one round for a full disk to the next.
FULL_SECONDS: Final = 600.0
#: Seconds in which all pins are read.
PINS_SECONDS: Final = 60.0
#: Seconds that the end of an evictor waits for its thread.
JOIN_SECONDS: Final = 0.5

# ------------------------------------------------------------------------- heartbeats

#: Heartbeats whose names are listed.
MOST_HEARTBEATS: Final = 1024
#: Heartbeats that are read.
MOST_READ: Final = 64
#: Heartbeats that tell the age of eviction.
NEWEST: Final = 3
#: Bytes of a heartbeat.
HEARTBEAT_BYTES: Final = 4096

# ------------------------------------------------------------------------- recorded uses

#: Seconds after which a use is recorded again at the earliest.
FINEST: Final = 60.0
#: Seconds after which a use is recorded again at the latest.
COARSEST: Final = 3600.0
#: Parts of the age of eviction after which a use is recorded again.
USE_PARTS: Final = 8
#: Part of the age of eviction after which a storage that only copies copies an object.
COPY_PART: Final = 0.5
#: Seconds from one question of what keepers say to the next.
ASK_SECONDS: Final = 60.0
#: Chunks and names that wait to be recorded.
MOST_WAITING: Final = 1 << 17
#: Uses that are remembered.
MOST_USES: Final = 1 << 17
#: Seconds after a hit before its uses are recorded: its loads come first.
DELAY_SECONDS: Final = 0.5
#: Seconds that closing waits for queued uses to be recorded.
CLOSE_SECONDS: Final = 1.0

# ------------------------------------------------------------------------- threads

#: More threads than this make no storage faster.
MOST_THREADS: Final = 16
#: Items that are taken from their source while their results are not yielded.
AHEAD: Final = 1024
#: Seconds that an interrupt waits for the items in progress.
INTERRUPT_SECONDS: Final = 5.0
#: While so many calls of a storage hang, no further one is made.
MOST_HANGING: Final = 32
#: Rows of a listing that one call returns where calls may hang.
ROWS: Final = 256
