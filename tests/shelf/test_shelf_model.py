"""A shelf under any sequence of operations and faults, compared with a dictionary.

The oracle knows of each object what stands under its name, and is told nothing by the shelf but
results. Faults may make an operation fail; what a failed operation has done is then looked up on
the storage itself, and must be one of the outcomes that were possible.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvshelf.backends import Backend, BytesLike, WriteMode, WriteResult, open_backend
from kvshelf.backends.base import delete_one
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.errors import BadObjectError, ObjectMissingError, StorageError
from kvshelf.format.keys import Chunk
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf import repairs as repairs_module
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, Presence
from tests.faults.crash_child import make_format
from tests.sim.storage import Fault, FaultyStorage
from tests.support.formats import sealed
from tests.support.prompts import make_chunks, make_tail

FMT = make_format()
OTHER = make_format(weights="user:other")

#: A format, a chunk, a shard.
Item = tuple[ObjectFormat, Chunk, int]
#: Two shards of a chunk, a chunk of another namespace, a tail.
ITEMS: list[Item] = [
    (FMT, make_chunks(FMT, 1)[0], 0),
    (FMT, make_chunks(FMT, 1)[0], 1),
    (OTHER, make_chunks(OTHER, 1)[0], 0),
    (FMT, make_tail(FMT), 1),
]
STORAGES = ("folder", "folder with old files", "memory")
OPERATIONS = ("stat", "open", "read", "write", "publish", "list", "folders", "delete", "set_aside")
ERRNOS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT)
_numbers = count()


def flip(data: bytearray) -> None:
    if data:
        data[len(data) // 2] ^= 4


def cut(data: bytearray) -> None:
    del data[len(data) * 2 // 3 :]


def grow(data: bytearray) -> None:
    data += bytes(100)


CHANGES = {"flip": flip, "cut": cut, "grow": grow, "empty": bytearray.clear}


#: An operation of the backend, an errno value or what is done to its bytes, how often.
Trouble = tuple[str, "int | Callable[[bytearray], None]", int]
any_trouble = st.none() | st.one_of(
    st.tuples(st.sampled_from(OPERATIONS), st.sampled_from(ERRNOS), st.integers(1, 3)),
    st.tuples(st.sampled_from(["read", "write"]), st.sampled_from([flip, cut]), st.integers(1, 3)),
)
any_item = st.sampled_from(ITEMS)


def image(item: Item, fill: int = 1) -> bytes:
    """Return a good object; `fill` tells it from other good ones of the same name."""
    return bytes(sealed(*item, fill))


class Recorder(WrappedBackend):
    """Keeps what was really written last, behind all faults."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.written: list[bytes] = []

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        if name.endswith(".safetensors"):
            self.written.append(b"".join(buffers))
        return super().write(name, buffers, mode)


class ShelfModel(RuleBasedStateMachine):
    """Operations of two shelves on one storage: one meets faults, the other does not."""

    @initialize(kind=st.sampled_from(STORAGES), stored=st.sets(any_item))
    def start(self, kind: str, stored: set[Item]) -> None:
        self.patch = pytest.MonkeyPatch()
        if kind == "folder with old files":
            # Younger files of wrong size may still be copied, and are not moved.
            self.patch.setattr(repairs_module, "COPY_SECONDS", -1.0)
        self.patch.setattr(repairs_module, "budget", repairs_module.RepairBudget())
        self.folder = tempfile.TemporaryDirectory()
        folder = str(Path(self.folder.name, "shelf"))
        url = f"memory://model-{next(_numbers)}" if kind == "memory" else folder
        self.recorder = Recorder(open_backend(url))
        self.faulty = FaultyStorage(self.recorder)
        self.plain = Shelf(open_backend(url))
        self.trouble = False
        self.restart()
        #: What stands under the name of each item: its bytes. Missing: nothing.
        self.there: dict[Item, bytes] = {}
        for item in sorted(stored, key=ITEMS.index):
            self.plain.view(item[0]).publish(ObjectRef(*item[1:]), image(item))
            self.there[item] = image(item)

    @rule()
    def restart(self) -> None:
        """Another process takes over; its breakers never open: they would hide the faults."""
        self.shelf = Shelf(self.faulty)
        for breaker in (self.shelf.backend.reads, self.shelf.backend.writes):
            breaker.trip = lambda *_, **__: None  # type: ignore[method-assign]

    # ------------------------------------------------------------------------------- the oracle

    def name(self, item: Item) -> str:
        return self.plain.view(item[0]).name(ObjectRef(*item[1:]))

    def load_bytes(self, item: Item) -> bytes:
        buffer = bytearray(len(image(item)))
        self.shelf.view(item[0]).load(ObjectRef(*item[1:]), memoryview(buffer))
        return bytes(buffer)

    def on_storage(self, item: Item) -> bytes | None:
        """What is really there."""
        try:
            with self.plain.backend.open(self.name(item)) as reader:
                data = bytearray(reader.size)
                reader.read_into(memoryview(data), 0)
                return bytes(data)
        except ObjectMissingError:
            return None

    def settle(self, item: Item, *possible: bytes | None) -> None:
        """After an operation: the storage holds one of the possible contents; take it over."""
        found = self.on_storage(item)
        assert found in possible, "an outcome that no order of events explains"
        self.there.pop(item, None)
        if found is not None:
            self.there[item] = found

    # ------------------------------------------------------------------------------- operations

    @rule(item=any_item, trouble=any_trouble, suspect=st.booleans())
    def publish(self, item: Item, trouble: Trouble | None, suspect: bool) -> None:
        self.arm(trouble)
        before, right = self.there.get(item), image(item)
        # Who suspects what stands there reads it; who does not looks at its size.
        stays = before is not None and len(before) == len(right)
        if suspect:
            stays = before in (right, image(item, 2))
        self.recorder.written.clear()
        try:
            result = self.shelf.view(item[0]).publish(ObjectRef(*item[1:]), right, suspect=suspect)
        except StorageError:
            assert self.trouble
            # A write may be done but not answered, and is as faults made it.
            self.settle(item, before, *self.recorder.written)
            return
        if self.trouble:
            kept = [before] if stays or suspect else []
            self.settle(item, *kept, *self.recorder.written)
        else:
            self.settle(item, before if stays else right)
            replaced = WriteResult.CREATED if before is None else WriteResult.REPLACED
            assert result is (WriteResult.EXISTED if stays else replaced)

    @rule(item=any_item, trouble=any_trouble)
    def load(self, item: Item, trouble: Trouble | None) -> None:
        self.arm(trouble)
        before, good = self.there.get(item), (image(item), image(item, 2))
        try:
            loaded = self.load_bytes(item)
        except ObjectMissingError:
            assert before is None or self.trouble
            self.settle(item, before)
        except BadObjectError:
            assert self.trouble or (before is not None and before not in good)
            self.settle(item, before, None)
        except StorageError:
            assert self.trouble
            self.settle(item, before)
        else:
            assert loaded in good, "a load gave wrong bytes"
            assert loaded == before or self.trouble, "something was loaded that is not there"
            self.settle(item, before)

    @rule(chosen=st.lists(any_item, min_size=1, max_size=6), trouble=any_trouble)
    def probe(self, chosen: list[Item], trouble: Trouble | None) -> None:
        self.arm(trouble)
        for fmt in (FMT, OTHER):
            mine = [item for item in chosen if item[0] is fmt]
            answers = self.shelf.view(fmt).probe([ObjectRef(*item[1:]) for item in mine])
            for item, answer in zip(mine, answers, strict=True):
                found = self.there.get(item)
                expected = Presence.MISSING
                if found is not None:
                    is_whole = len(found) == len(image(item))
                    expected = Presence.PRESENT if is_whole else Presence.WRONG_SIZE
                others = (Presence.ERROR, Presence.MISSING) if self.trouble else ()
                assert answer in (expected, *others)

    @rule(item=any_item, trouble=any_trouble)
    def delete(self, item: Item, trouble: Trouble | None) -> None:
        self.arm(trouble)
        before = self.there.get(item)
        try:
            assert self.shelf.delete(self.name(item)) == (before is not None)
        except StorageError:
            assert self.trouble
            self.settle(item, before, None)
        else:
            self.settle(item, None)

    @rule(trouble=any_trouble)
    def list(self, trouble: Trouble | None) -> None:
        self.arm(trouble)
        try:
            found = {info.name: info.size for info in self.shelf.objects()}
        except StorageError:
            assert self.trouble
            return
        assert found == {self.name(item): len(data) for item, data in self.there.items()}

    # ------------------------------------------------------------------------------------ faults

    def arm(self, trouble: Trouble | None) -> None:
        """Make the next calls of one kind fail, or damage what they move."""
        if trouble is None:
            return
        operation, what, times = trouble
        pattern = "*" if operation in ("list", "folders") else "*.safetensors"
        fault = Fault(operation, pattern, times=times)
        if callable(what):
            fault.damage = what
        else:
            writing = operation in ("write", "publish", "delete", "set_aside")
            fault.error = storage_error(OSError(what, "made"), operation, "here", writing=writing)
        self.faulty.add(fault)
        self.trouble = True

    @precondition(lambda self: self.trouble)
    @rule()
    def heal(self) -> None:
        self.faulty.heal()
        self.trouble = False

    @rule(item=any_item, how=st.sampled_from([*CHANGES, "remove", "another good one"]))
    def meddle(self, item: Item, how: str) -> None:
        """Somebody else changes the storage."""
        content = self.there.get(item)
        if how == "remove":
            delete_one(self.plain.backend, self.name(item))
        elif how == "another good one":
            self.plain.backend.write(self.name(item), [image(item, 2)], "replace")
        elif content is not None:
            data = bytearray(content)
            CHANGES[how](data)
            self.plain.backend.write(self.name(item), [data], "replace")
        self.settle(item, self.on_storage(item))

    # ---------------------------------------------------------------------------------- always

    @invariant()
    def nothing_changes_by_itself(self) -> None:
        for item in ITEMS if hasattr(self, "there") else ():
            assert self.on_storage(item) == self.there.get(item)

    def teardown(self) -> None:
        """Whatever happened: without faults, storing again makes everything good."""
        if not hasattr(self, "there"):
            return
        self.faulty.heal()
        for item in ITEMS:
            self.shelf.view(item[0]).publish(ObjectRef(*item[1:]), image(item), suspect=True)
            assert self.load_bytes(item) in (image(item), image(item, 2))
        self.shelf.close()
        self.plain.close()
        left = [*Path(self.folder.name).rglob("*.tmp")]
        assert len(left) <= self.faulty.counts["set_aside"], "temporaries of writers are left"
        self.folder.cleanup()
        self.patch.undo()


def test_shelf_does_what_a_dictionary_does_whatever_fails() -> None:
    run_state_machine_as_test(
        ShelfModel, settings=settings(max_examples=36, stateful_step_count=25)
    )
