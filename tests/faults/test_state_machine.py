"""A shelf under any sequence of operations and faults, compared with a dictionary.

The oracle knows of each object whether it is good, bad or missing on the storage, and is told
nothing by the shelf but results. Faults may make an operation fail; what a failed operation has
done is then looked up on the storage itself, and must be one of the outcomes that were possible.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvshelf.backends import Backend, BytesLike, WriteMode, WriteResult, open_backend
from kvshelf.backends.base import delete_one
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.errors import BadObjectError, ObjectMissingError, StorageError
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf import repairs as repairs_module
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, Presence
from tests.faults.crash_child import make_format
from tests.sim.storage import Fault, FaultyStorage
from tests.support.prompts import make_chunks

FMT = make_format()
OTHER = make_format(weights="user:other")
SIZE = FMT.object_size(0)

Item = tuple[ObjectFormat, Chunk, int]


def items() -> list[Item]:
    """Two shards of a chunk, a chunk of another namespace, a tail in a group."""
    tails = KeyChain(FMT.namespace.digest, FMT.chunk_size, salt_group="0123456789abcdef", salt="s")
    tails.extend(range(FMT.chunk_size + 5))
    tail = tails.tail()
    assert tail is not None
    chunk = make_chunks(FMT, 1)[0]
    return [(FMT, chunk, 0), (FMT, chunk, 1), (OTHER, make_chunks(OTHER, 1)[0], 0), (FMT, tail, 1)]


ITEMS = items()


def flip(data: bytearray) -> None:
    if data:
        data[len(data) // 2] ^= 4


def cut(data: bytearray) -> None:
    del data[len(data) * 2 // 3 :]


any_item = st.sampled_from(ITEMS)
OPERATIONS = ("stat", "open", "read", "write", "publish", "list", "folders", "delete", "set_aside")
ERRNOS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT)

#: An operation of the backend, an errno value or what is done to its bytes, how often.
Trouble = tuple[str, "int | Callable[[bytearray], None]", int]
any_trouble = st.none() | st.one_of(
    st.tuples(st.sampled_from(OPERATIONS), st.sampled_from(ERRNOS), st.integers(1, 3)),
    st.tuples(st.sampled_from(["read", "write"]), st.sampled_from([flip, cut]), st.integers(1, 3)),
)


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


def restless(backend: Backend) -> Shelf:
    """Open a shelf whose breakers never open, because an open breaker hides the faults."""
    shelf = Shelf(backend)
    for breaker in (shelf.backend.reads, shelf.backend.writes):
        breaker.trip = lambda *_, **__: None  # type: ignore[method-assign]
    return shelf


class _Machine(RuleBasedStateMachine):
    """Operations of two shelves on one storage: one meets faults, the other does not."""

    url: str

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.make_storage()
        repairs_module.budget = repairs_module.Budget()
        self.recorder = Recorder(open_backend(self.url))
        self.faulty = FaultyStorage(self.recorder)
        self.shelf = restless(self.faulty)
        self.plain = Shelf(open_backend(self.url))
        #: What stands under the name of each item: its bytes. Missing: nothing.
        self.there: dict[int, bytes] = {}
        self.trouble = False
        for number in data.draw(st.sets(st.integers(0, len(ITEMS) - 1))):
            self.publish(self.plain, ITEMS[number])
            self.there[number] = self.right(ITEMS[number])

    def make_storage(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------------------- the oracle

    def name(self, item: Item) -> str:
        fmt, chunk, shard = item
        return self.plain.view(fmt).name(ObjectRef(chunk, shard))

    def publish(self, shelf: Shelf, item: Item, *, suspect: bool = False) -> WriteResult:
        fmt, chunk, shard = item
        ref = ObjectRef(chunk, shard)
        return shelf.view(fmt).publish(ref, self.right(item), suspect=suspect)

    def loaded(self, item: Item) -> bytes:
        fmt, chunk, shard = item
        buffer = bytearray(self.size(item))
        self.shelf.view(fmt).load(ObjectRef(chunk, shard), memoryview(buffer))
        return bytes(buffer)

    def size(self, item: Item) -> int:
        fmt, chunk, shard = item
        return fmt.object_size(shard, chunk.tokens if chunk.tail else None)

    def right(self, item: Item) -> bytes:
        fmt, chunk, shard = item
        image = bytearray([1 + shard]) * self.size(item)
        fmt.seal(memoryview(image), chunk, shard)
        return bytes(image)

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
        if found is None:
            self.there.pop(ITEMS.index(item), None)
        else:
            self.there[ITEMS.index(item)] = found

    def known(self, item: Item) -> bytes | None:
        return self.there.get(ITEMS.index(item))

    # ------------------------------------------------------------------------------- operations

    @rule(item=any_item, trouble=any_trouble)
    def write(self, item: Item, trouble: Trouble | None) -> None:
        self.arm(trouble)
        before, right = self.known(item), self.right(item)
        self.recorder.written.clear()
        stays = before is not None and len(before) == len(right)
        try:
            result = self.publish(self.shelf, item)
        except StorageError:
            assert self.trouble
            # A write may be done but not answered.
            self.settle(item, before, *self.written(right))
            return
        after = before if stays else right
        self.settle(item, after, *(() if stays else self.written(right)))
        if not self.trouble:
            assert (result is WriteResult.EXISTED) == stays
            assert (result is WriteResult.CREATED) == (before is None)

    def written(self, right: bytes) -> list[bytes]:
        """What the last operation may have published: the right bytes, or as faults made them."""
        return [*self.recorder.written, right]

    @rule(item=any_item, trouble=any_trouble)
    def load(self, item: Item, trouble: Trouble | None) -> None:
        self.arm(trouble)
        before, right = self.known(item), self.right(item)
        try:
            loaded = self.loaded(item)
        except ObjectMissingError:
            assert before is None or self.trouble
            self.settle(item, before)
        except BadObjectError:
            assert self.trouble or (before is not None and before != right)
            self.settle(item, before, None)
        except StorageError:
            assert self.trouble
            self.settle(item, before)
        else:
            assert before == right or self.trouble, "something was loaded that is not there"
            assert loaded == right, "a load gave wrong bytes"
            self.settle(item, before)

    @rule(item=any_item, trouble=any_trouble)
    def repair(self, item: Item, trouble: Trouble | None) -> None:
        self.arm(trouble)
        before, right = self.known(item), self.right(item)
        self.recorder.written.clear()
        try:
            result = self.publish(self.shelf, item, suspect=True)
        except StorageError:
            assert self.trouble
            self.settle(item, before, *self.written(right))
            return
        if self.trouble:
            self.settle(item, before, *self.written(right))
        else:
            self.settle(item, right)
            expected = (
                WriteResult.CREATED
                if before is None
                else WriteResult.EXISTED
                if before == right
                else WriteResult.REPLACED
            )
            assert result is expected

    @rule(chosen=st.lists(any_item, min_size=1, max_size=6), trouble=any_trouble)
    def probe(self, chosen: list[Item], trouble: Trouble | None) -> None:
        self.arm(trouble)
        for fmt in (FMT, OTHER):
            mine = [item for item in chosen if item[0] is fmt]
            answers = self.shelf.view(fmt).probe([(chunk, shard) for _, chunk, shard in mine])
            for item, answer in zip(mine, answers, strict=True):
                found = self.known(item)
                if answer is Presence.ERROR:
                    assert self.trouble
                elif answer is Presence.PRESENT:
                    assert found is not None and len(found) == self.size(item)
                elif answer is Presence.WRONG_SIZE:
                    assert found is not None and len(found) != self.size(item)
                else:
                    assert answer is Presence.MISSING
                    assert found is None or self.trouble

    @rule(item=any_item, trouble=any_trouble)
    def delete(self, item: Item, trouble: Trouble | None) -> None:
        self.arm(trouble)
        before = self.known(item)
        try:
            deleted = self.shelf.delete(self.name(item))
        except StorageError:
            assert self.trouble
            self.settle(item, before, None)
        else:
            assert deleted == (before is not None)
            self.settle(item, None)

    @rule(trouble=any_trouble)
    def list(self, trouble: Trouble | None) -> None:
        self.arm(trouble)
        try:
            found = {info.name: info.size for info in self.shelf.objects()}
        except StorageError:
            assert self.trouble
            return
        expected = {
            self.name(ITEMS[number]): len(content) for number, content in self.there.items()
        }
        assert found == expected

    # ------------------------------------------------------------------------------------ faults

    def arm(self, trouble: Trouble | None) -> None:
        """Make the next calls of one kind fail, or damage what they move."""
        if trouble is None:
            return
        operation, what, times = trouble
        fault = Fault(operation, "*" if operation in ("list", "folders") else "*.safetensors")
        fault.times = times
        if callable(what):
            fault.damage = what
        else:
            writing = operation in ("write", "publish", "delete", "set_aside")
            fault.error = storage_error(OSError(what, "made"), operation, "here", writing=writing)
        self.faulty.add(fault)
        self.trouble = True

    @rule(item=any_item, how=st.sampled_from(["flip", "cut", "remove", "appear"]))
    def meddle(self, item: Item, how: str) -> None:
        """Somebody else changes the storage."""
        content = self.known(item)
        name = self.name(item)
        if how == "remove":
            delete_one(self.plain.backend, name)
        elif how == "appear":
            self.plain.backend.write(name, [self.right(item)], "replace")
        elif content:
            data = bytearray(content)
            (flip if how == "flip" else cut)(data)
            self.plain.backend.write(name, [data], "replace")
        found = self.on_storage(item)
        self.settle(item, found)

    @precondition(lambda self: self.trouble)
    @rule()
    def heal(self) -> None:
        self.faulty.heal()
        self.trouble = False

    @rule()
    def restart(self) -> None:
        """Another process takes over."""
        self.shelf = restless(self.faulty)

    # ---------------------------------------------------------------------------------- always

    @invariant()
    def nothing_changes_by_itself(self) -> None:
        if not hasattr(self, "there"):
            return
        for number, item in enumerate(ITEMS):
            assert self.on_storage(item) == self.there.get(number)

    def teardown(self) -> None:
        """Whatever happened: without faults, storing again makes everything good."""
        if not hasattr(self, "there"):
            return
        self.faulty.heal()
        try:
            for item in ITEMS:
                self.publish(self.shelf, item, suspect=True)
                assert self.loaded(item) == self.right(item)
        finally:
            self.shelf.close()
            self.plain.close()


class _OnFolder(_Machine):
    #: Younger files of wrong size may still be copied, and are not moved.
    copy_seconds = repairs_module.COPY_SECONDS

    def make_storage(self) -> None:
        repairs_module.COPY_SECONDS = self.copy_seconds  # type: ignore[misc]
        self._folder = tempfile.TemporaryDirectory()
        self.url = str(Path(self._folder.name) / "shelf")

    def teardown(self) -> None:
        super().teardown()
        repairs_module.COPY_SECONDS = _OnFolder.copy_seconds  # type: ignore[misc]
        if hasattr(self, "_folder"):
            left = list(Path(self._folder.name).rglob("*.tmp"))
            self._folder.cleanup()
            assert len(left) <= self.faulty.counts["set_aside"], "temporaries of writers are left"


class _OnOldFolder(_OnFolder):
    copy_seconds = -1.0


class _InMemory(_Machine):
    def make_storage(self) -> None:
        _InMemory.count = getattr(_InMemory, "count", 0) + 1
        self.url = f"memory://state-machine-{self.count}"


_SETTINGS = settings(max_examples=12, stateful_step_count=25)
TestOnFolder = _OnFolder.TestCase
TestOnFolder.settings = _SETTINGS
TestOnOldFolder = _OnOldFolder.TestCase
TestOnOldFolder.settings = _SETTINGS
TestInMemory = _InMemory.TestCase
TestInMemory.settings = _SETTINGS
