"""The table of faults: which trouble, at which moment, on which kind of storage.

Owns the list of cells, the stand-in for an engine that a cell is run with
(:class:`EngineStandIn`), and the ways to make trouble (:class:`Storage`): on a FUSE mount by rules
of its filesystem, in a bucket by the script of its store. The model of the shelf draws the same
faults for the fault-injecting backend.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvshelf.backends import Backend, Deadlines, open_backend
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import LookupService
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Failure
from tests.faults.faultfs import FaultMount
from tests.sim.s3 import Answer, Request, ScriptedS3, refusal
from tests.support.formats import make_format
from tests.support.prompts import make_chunks
from tests.support.prompts import prompt as random_tokens
from tests.support.transfers import Rig
from tests.support.waiting import LONG, PATIENT, until

#: Seconds beyond which a load is given up, in the tests' engines.
DEADLINE: Final = 0.25
#: A wait that takes longer has no end.
LIMIT: Final = 60.0
#: How long a storage that is well again may take to be used again.
RECOVERY: Final = LONG
#: Waits for an engine to use a storage that is well again.
eventually: Final = partial(until, what="use of the storage without a restart", seconds=RECOVERY)
#: Seconds for which failed keys and refused stores are left alone.
BACK_OFF: Final = 0.05
CHUNKS: Final = 3

#: What a mount meets, and when. Each fault meets each kind of storage at one moment:
#: the models of shelf, lookups and transfers draw the others.
FAULTS: Final = {
    "EIO": "read",
    "ENOSPC": "write",
    "EDQUOT": "publish",
    "EACCES": "list",
    "EROFS": "delete",
    "ESTALE": "probe",
    "ENOENT": "read",
    # The process's own: too many files open, no memory.
    "EMFILE": "probe",
    "ENOMEM": "read",
    # Bad blocks, damaged metadata, expired tickets of Kerberos; names, links and signals where none
    # was expected.
    "EUCLEAN": "read",
    "ENODATA": "probe",
    "EKEYEXPIRED": "write",
    "ETXTBSY": "publish",
    "ELOOP": "list",
    "ENAMETOOLONG": "probe",
    "EINTR": "read",
    "short read": "write",
    "short read once": "read",
    "flipped bit": "read",
    "flipped bit once": "write",
    "slow, in time": "read",
    "slow, too late": "write",
    "blocked for ever": "probe",
}
KILL: Final = "killed"
FROZEN: Final = "frozen"
STALE_FOLDER: Final = "ESTALE of folders"
#: What a mount meets beside.
MOUNT_FAULTS: Final = {KILL: "read", FROZEN: "probe", STALE_FOLDER: "list"}

#: Statuses that are answered, with the code that goes with them.
STATUSES: Final = {
    "403": "AccessDenied",
    "404": "NoSuchKey",
    "409": "OperationAborted",
    "412": "PreconditionFailed",
    "429": "TooManyRequests",
    "500": "InternalError",
    "503": "SlowDown",
}
RESET: Final = "reset"
STALLED: Final = "stalled"
WRONG_LENGTH: Final = "wrong length"
WRONG_BYTES: Final = "wrong bytes"
REFUSED: Final = "no server"
#: What a bucket meets, and when, and the counters of which one tells of it: none of a miss.
BUCKET_FAULTS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "403": ("write", ("dropped_chunks_error", "late_calls")),
    "404": ("read", ("load_failures_missing",)),
    "409": ("publish", ("dropped_chunks_error", "late_calls")),
    "412": ("publish", ()),
    "429": ("list", ()),
    "500": ("probe", ("probe_errors", "late_calls")),
    "503": ("read", ("load_failures_error", "load_failures_timeout")),
    RESET: ("read", ("load_failures_error", "load_failures_timeout")),
    STALLED: ("write", ("dropped_chunks_error", "late_calls")),
    # A client that asks for the size first cannot tell it from an object just replaced.
    WRONG_LENGTH: ("read", ("load_failures_bad", "load_failures_error")),
    WRONG_BYTES: ("read", ("load_failures_bad",)),
    REFUSED: ("probe", ("probe_errors", "late_calls")),
}


#: A fault, a moment, and a kind of storage.
CELLS: Final = [
    *((*fault, "fuse") for fault in (FAULTS | MOUNT_FAULTS).items()),
    *((fault, moment, "s3") for fault, (moment, _) in BUCKET_FAULTS.items()),
]


# --------------------------------------------------------------------------------------- storage

_FUSE_OPERATIONS: Final = {
    "probe": "getattr",
    "write": "create|write|flush",
    "publish": "link",
    "list": "opendir|readdir",
    "delete": "unlink|rename",
}


class Storage:
    """One shelf's place, and the trouble that can be made there.

    Attributes
    ----------
    backend : Backend
        What the engine gets: with the trouble.
    plain : Backend
        The same storage without trouble, to look at what is really there.
    deadline : float
        Seconds beyond which a call is given up.
    """

    backend: Backend
    plain: Backend
    deadline: float = DEADLINE

    def make_trouble(self, fault: str, moment: str) -> None:
        """Begin with a fault of the table."""
        raise NotImplementedError

    def met(self) -> int:
        """How often trouble was met."""
        raise NotImplementedError

    def heal(self) -> None:
        """End all trouble; what was held goes on."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the storage."""
        self.backend.close()
        self.plain.close()


class MountedStorage(Storage):
    """A directory on the fault-injecting filesystem."""

    def __init__(self, mount: FaultMount) -> None:
        if not mount.alive:
            mount.revive()
        self.mount = mount
        self.name = uuid.uuid4().hex
        (mount.source / self.name).mkdir()
        self.backend = open_backend(mount.path / self.name)
        self.plain = open_backend(mount.source / self.name)
        self._is_killed = self._is_frozen = False

    def make_trouble(self, fault: str, moment: str) -> None:
        operation = _FUSE_OPERATIONS.get(moment, "read")
        pattern = f"{self.name}*" if moment == "list" else f"{self.name}/*safetensors*"
        if fault == FROZEN:
            self._is_frozen = True
            self.mount.freeze()
            return
        what: dict[str, Any]
        if fault == STALE_FOLDER:
            pattern, what = f"{self.name}/*/_/??", {"error": errno.ESTALE}
        elif hasattr(errno, fault):
            what = {"error": getattr(errno, fault)}
            if fault == "EINTR":
                # A storm that passes: interrupted calls are made again.
                what["times"] = 30
            if moment == "read":
                operation = "open|read"
        elif fault.startswith(("short", "flipped")):
            what = {"cut" if fault.startswith("short") else "flip": True}
            if fault.endswith("once"):
                what["times"] = 1
            if moment == "write":
                operation = "write"
        elif fault == KILL:
            what = {"kill": True}
            self._is_killed = True
        elif fault == "blocked for ever":
            what = {"block": True}
        else:
            what = {"seconds": _SECONDS[fault], "times": 2}
        self.mount.add(operation, pattern, **what)

    def met(self) -> int:
        if self._is_killed:
            return int(self.mount.died())
        return int(self._is_frozen) or self.mount.met()

    def heal(self) -> None:
        if self._is_frozen:
            self.mount.thaw()
        if self._is_killed:
            self.mount.revive()
        else:
            self.mount.clear()
        self._is_killed = self._is_frozen = False


class BucketStorage(Storage):
    """A folder of a bucket whose store makes trouble; `plain` sees its objects by another store.

    What is written by `plain` is an hour old.
    """

    deadline = 2 * DEADLINE

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.store, self.well = ScriptedS3(), ScriptedS3()
        self.well.objects = self.store.objects
        self.well.clock = lambda: time.time() - 3600
        self.backend, self.plain = self.store.open(self.name), self.well.open(self.name)
        self._met, self._is_down, self._gate = 0, False, threading.Event()

    def make_trouble(self, fault: str, moment: str) -> None:
        if fault == REFUSED:
            self.store.close()
            self._met, self._is_down = 1, True
        self.store.script = partial(self._answer, fault, moment)

    def _answer(self, fault: str, moment: str, request: Request) -> Answer | None:
        # What many are deleted with, and a listing, name only the bucket.
        is_of_object = "safetensors" in request.path or moment in ("list", "delete")
        if request.kind != moment.replace("publish", "write") or not is_of_object:
            return None
        self._met += 1
        status = refusal(int(fault), STATUSES[fault]) if fault in STATUSES else None
        if moment in ("write", "delete", "probe") and fault in (RESET, STALLED):
            return Answer(ends_after=-1, gate=self._gate if fault == STALLED else None)
        if moment == "write" and status is None:
            request.body = _spoil(request.body, fault)
            return None
        if moment != "publish" and status is not None:
            return status
        answer = self.store.answer(request)
        assert isinstance(answer.body, bytes)
        if fault in (RESET, STALLED):
            answer.ends_after = len(answer.body) // 2 if moment != "publish" else -1
            answer.gate = self._gate if fault == STALLED else None
        elif status is None:
            answer.body = _spoil(answer.body, fault)
        return answer if status is None else status

    def met(self) -> int:
        return self._met

    def heal(self) -> None:
        self.store.script = lambda _: None
        self._gate.set()
        self._gate = threading.Event()
        if self._is_down:
            self.store.reopen()
        self._is_down = False

    def close(self) -> None:
        super().close()
        self.store.close()
        self.well.close()


def _spoil(body: bytes, fault: str) -> bytes:
    if fault == WRONG_LENGTH:
        return body[: len(body) // 2]
    return body[:-1] + bytes([body[-1] ^ 1]) if body else body


_SECONDS: Final = {"slow, in time": 0.2 * DEADLINE, "slow, too late": 1.6 * DEADLINE}


# ---------------------------------------------------------------------------------------- engine


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt and their chunks."""

    tokens: list[int]
    chunks: list[Chunk]


def make_prompt(fmt: ObjectFormat, seed: int) -> Prompt:
    return Prompt(random_tokens(CHUNKS, seed, unit=fmt.chunk_size), make_chunks(fmt, CHUNKS, seed))


@dataclass
class EngineStandIn:
    """What an engine does with a prompt: look up, load, compute the rest, store it.

    Computing is writing the content that belongs there. Blocks are handed out in turn, and so used
    again as soon as a load was reported finished.
    """

    backend: Backend
    fmt: ObjectFormat = field(default_factory=make_format)
    deadline: float = DEADLINE

    def __post_init__(self) -> None:
        self.rig = Rig(
            self.backend,
            self.fmt,
            blocks=CHUNKS * 2 * 8,
            memory_chunks=24,
            deadlines=Deadlines(self.deadline, self.deadline, self.deadline),
        )
        self.failed = FailedKeys()
        self.lookups = self._start_lookups()
        #: Seconds to wait for stores after an answer. An engine does not wait at all.
        self.patience = LIMIT
        self._turn = 0
        self._requests = 0
        self._last: dict[int, ChunkSlots] = {}

    def be_patient(self) -> None:
        """Take nothing for late from now on: the storage is well, and machines are busy."""
        self.patience = self.deadline = LIMIT
        self.rig.guard.deadlines = PATIENT

    def _start_lookups(self) -> LookupService:
        return LookupService(
            self.rig.shelf.view(self.fmt), failed=self.failed, counters=self.rig.counters
        )

    def answer(self, prompt: Prompt) -> int:
        """Serve a prompt; return how many of its chunks were loaded.

        Raises
        ------
        AssertionError
            If KV is wrong, or it took too long.
        """
        begin = time.monotonic()
        for key in self.rig.transfer.take_repaired():
            self.failed.forget(key)
        hit, age = self._look_up(prompt)
        start = self._turn * CHUNKS * self.rig.per_chunk
        self._turn = (self._turn + 1) % 8
        items = self.rig.items(prompt.chunks, start)
        self._forget(items)
        good = self._load(items[:hit]) if hit else 0
        for position, item in enumerate(items):
            if position >= good:
                self.rig.fill(item)
            else:
                assert self.rig.holds(item), f"chunk {position} is wrong"
            self._last[position + start] = item
        for item in items[good:]:
            self.rig.store(item, repair=self.failed.is_bad(item.chunk.key), age=age)
        self.rig.transfer.drain(self.patience)
        assert time.monotonic() - begin < LIMIT, "the answer had to wait for the storage"
        return good

    def _look_up(self, prompt: Prompt) -> tuple[int, float]:
        fmt = self.fmt
        if self.lookups.stalled(self.deadline):
            return 0, 0.0
        lookup = self.lookups.submit(
            prompt.tokens, lambda: KeyChain(fmt.namespace.digest, fmt.chunk_size)
        )
        if not lookup.wait(self.deadline if self.patience < LIMIT else LIMIT):
            lookup.cancel()
            return 0, 0.0
        return lookup.hit_chunks, time.monotonic() - lookup.as_of

    def _load(self, items: list[ChunkSlots]) -> int:
        self._requests += 1
        self.rig.start(str(self._requests), items)
        deadline = time.monotonic() + LIMIT
        while not (loads := self.rig.ended(0.02)):
            assert time.monotonic() < deadline, "the load never ends"
        (load,) = loads.values()
        for chunk, failure in load.failures:
            self.failed.add(chunk.key, bad=failure is Failure.BAD)
        return len(items) if load.failed_at is None else load.failed_at

    def _forget(self, items: list[ChunkSlots]) -> None:
        """Take back the blocks that `items` are about to use."""
        for item in items:
            for cache in self.rig.caches:
                cache[self.rig.block_ids(item)] = 0

    def check_blocks(self) -> None:
        """Nothing that came late was written over what stands in the blocks."""
        assert all(self.rig.holds(item) for item in self._last.values())

    def close(self) -> None:
        self.lookups.close()
        self.rig.close()


def within(
    seconds: float, call: Callable[[], Any], threads: list[threading.Thread] | None = None
) -> Any:
    """Call on a thread of its own; what came, an exception, or None when it takes too long.

    The thread is added to `threads`.
    """
    came: list[Any] = [None]

    def run() -> None:
        try:
            came[0] = call()
        except Exception as error:  # noqa: BLE001 - judged by the caller
            came[0] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if threads is not None:
        threads.append(thread)
    thread.join(seconds)
    return came[0]


def bad_objects(plain: Backend, fmt: ObjectFormat, prompts: list[Prompt]) -> Iterator[str]:
    """Yield the objects of `prompts` that are missing or bad, seen without trouble."""
    for prompt in prompts:
        for chunk in prompt.chunks:
            for shard in range(fmt.shards):
                image = memoryview(bytearray(fmt.object_size(shard)))
                name = f"{fmt.namespace.folder}/{object_name(chunk, shard, fmt.shards)}"
                try:
                    with plain.open(name) as reader:
                        fmt.read(reader, chunk, shard, image)
                except (OSError, ValueError) as error:
                    yield f"{name}: {error}"


def check_whole(plain: Backend, fmt: ObjectFormat, prompts: list[Prompt]) -> None:
    """Assert that each object of `prompts` is there and good, or soon will be.

    A write that a client still repeats after its caller gave it up replaces an object by its
    equal, and some servers (rclone) have no object while they do so.
    """

    def whole() -> bool:
        return not list(bad_objects(plain, fmt, prompts))

    with suppress(AssertionError):
        until(whole, seconds=RECOVERY)
    assert list(bad_objects(plain, fmt, prompts)) == []


def damage(plain: Backend, name: str, change: Callable[[bytearray], Any]) -> None:
    """Change the bytes of an object where it lies; it does not look freshly copied."""
    with plain.open(name) as reader:
        data = bytearray(reader.size)
        reader.read_into(memoryview(data), 0)
    change(data)
    plain.write(name, [data], "replace")
    then = time.time() - 3600
    with suppress(FileNotFoundError):
        os.utime(Path(plain.url) / name, (then, then))
