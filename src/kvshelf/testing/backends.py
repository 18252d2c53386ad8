"""The backend suite: tests of the contracts in :mod:`kvshelf.backends.base`, for every backend.

A test class derives from :class:`BackendSuite`. It has a fixture ``backend``, which opens the
backend, empty and writable, and a fixture ``oracle``, an :class:`Oracle` of the same storage. The
oracle must not use the code under test, or the tests miss errors that both share. A ``conftest.py``
calls ``pytest.register_assert_rewrite("kvshelf.testing.backends")`` for readable failures.

Examples
--------
::

    class TestMine(BackendSuite):
        @pytest.fixture
        def backend(self, tmp_path):
            with closing(MyBackend(tmp_path)) as backend:
                yield backend

        @pytest.fixture
        def oracle(self, tmp_path):
            return MyOracle(tmp_path)
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, ClassVar

import pytest
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvshelf.backends.base import (
    NOT_REGULAR,
    Backend,
    BytesLike,
    ObjectInfo,
    Touched,
    Whole,
    WriteResult,
    delete_one,
    final_name,
)
from kvshelf.backends.wrappers import ReadOnlyBackend
from kvshelf.errors import (
    NotRegularError,
    ObjectMissingError,
    ObjectNameError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
)

__all__ = ["BackendSuite", "Oracle", "read_into"]

#: Names that every method of every backend rejects.
BAD_NAMES = (
    "",
    "/",
    "/no-such-folder-of-kvshelf/x",
    "..",
    "../x",
    "a/../x",
    "a/..",
    ".",
    "./a",
    "a/./b",
    "a//b",
    "a/",
    "a\\b/c",
    "a\0b",
    "naïve",
    "a/日本",
)


def _pattern(size: int, seed: int = 0) -> bytes:
    return hashlib.shake_128(seed.to_bytes(4, "little")).digest(size)


def read_into(backend: Backend, name: str, buffer: memoryview, offset: int = 0) -> int:
    """Open, read `len(buffer)` bytes from `offset`, close; return the number of bytes read."""
    with backend.open(name) as reader:
        return reader.read_into(buffer, offset)


def _read_all(backend: Backend, name: str) -> bytes:
    with backend.open(name) as reader:
        data = bytearray(reader.size)
        assert reader.read_into(memoryview(data), 0) == reader.size
        reader.close()
    return bytes(data)


def _race_in_process(
    reopen: Callable[[], Backend], number: int, names: Sequence[str], start: Any, results: Any
) -> None:
    backend = reopen()
    try:
        start.wait(60)
        results.put(
            (number, [backend.write(name, [bytes([number]) * 70_000]).value for name in names])
        )
    finally:
        backend.close()


def _every_call(backend: Backend, name: str) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {
        "stat": lambda: backend.stat(["good", name]),
        "info": lambda: backend.info(name),
        "open": lambda: backend.open(name),
        "read_into": lambda: read_into(backend, name, memoryview(bytearray(1))),
        "write": lambda: backend.write(name, [b"x"]),
        "replace": lambda: backend.write(name, [b"x"], "replace"),
        "delete": lambda: backend.delete([name]),
        "delete many": lambda: backend.delete(["good", name]),
        "set_aside": lambda: backend.set_aside(name),
        "touch": lambda: backend.touch(name),
    }
    if name:  # "" is the root in a listing
        calls["list"] = lambda: list(backend.list(name))
        calls["entries"] = lambda: list(backend.list(name, hidden=True))
        calls["folders"] = lambda: backend.folders(name)
    return calls


class Oracle(ABC):
    """Raw access to a backend's storage, without the backend."""

    #: Types of entries that :meth:`put_special` can make: ``folder``, ``link``, ``fifo``.
    specials: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """Return the bytes of the object `name`; None if it does not exist."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Create the object `name`, and its folders, with `data`."""

    @abstractmethod
    def names(self) -> set[str]:
        """Return the names of all entries but folders, temporaries and dot files included."""

    @abstractmethod
    def clear(self) -> None:
        """Remove everything below the root."""

    def put_special(self, name: str, kind: str) -> None:
        """Create an entry at `name` that is not a regular file, see :attr:`specials`."""
        raise NotImplementedError(kind)


class BackendSuite:
    """Tests of one backend; see the module for how to use them.

    Attributes
    ----------
    examples : int
        Number of operation sequences that hypothesis compares with a dictionary.
    replaced_reads_fail : bool
        Reads of an object that is being replaced may fail, as with stale file handles or a server
        that removes the object for a moment.
    one_creates : bool
        Of several writers in mode ``create``, exactly one gets CREATED.
    atomic : bool
        Readers see either no object or the whole object.
    empty_objects : bool
        An empty object exists as soon as it is written. A shelf has no empty objects.
    """

    examples: ClassVar[int] = 25
    replaced_reads_fail: ClassVar[bool] = False
    one_creates: ClassVar[bool] = False
    atomic: ClassVar[bool] = True
    empty_objects: ClassVar[bool] = True

    @pytest.fixture
    def reopen(self) -> Callable[[], Backend] | None:
        """Return a picklable callable that opens the same storage in another process.

        None: processes cannot share the storage.
        """
        return None

    def assert_gone(self, backend: Backend, name: str) -> None:
        """Assert that nothing is at `name`. Override to wait, for mounts with outdated caches."""
        assert backend.stat([name]) == [None]

    # ------------------------------------------------------------------------- write and read

    def test_published_bytes_are_the_buffers_in_order(
        self, backend: Backend, oracle: Oracle
    ) -> None:
        """An object is the concatenation of bytes, bytearrays and memoryviews of any format."""
        integers = memoryview(bytearray(range(32))).cast("I")
        square = memoryview(bytearray(range(16))).cast("B", (4, 4))
        pieces: list[BytesLike] = [
            b"head",
            bytearray(b"-"),
            memoryview(b"body"),
            b"",
            integers,
            square,
        ]
        assert backend.write("a/b/x", pieces) is WriteResult.CREATED
        expected = b"head-body" + bytes(range(32)) + bytes(range(16))
        assert oracle.get("a/b/x") == expected
        assert _read_all(backend, "a/b/x") == expected
        assert backend.stat(["a/b/x"]) == [len(expected)]

    def test_large_object_in_many_pieces(self, backend: Backend, oracle: Oracle) -> None:
        """More pieces than one system call takes, several MiB in all."""
        data = _pattern(9 << 20)
        step = 3001
        pieces = [memoryview(data)[i : i + step] for i in range(0, len(data), step)]
        assert len(pieces) > 2048
        assert backend.write("big", pieces) is WriteResult.CREATED
        assert oracle.get("big") == data
        assert _read_all(backend, "big") == data

    def test_racing_threads(self, backend: Backend, oracle: Oracle) -> None:
        """One of many writers creates the object, whole."""
        racers, rounds = 8, 12
        barrier = threading.Barrier(racers)

        def race(number: int) -> list[WriteResult]:
            results = []
            for turn in range(rounds):
                barrier.wait(60)
                results.append(backend.write(f"r/{turn}", [bytes([number]) * 50_000]))
            return results

        with ThreadPoolExecutor(racers) as pool:
            results = list(pool.map(race, range(racers)))
        for turn in range(rounds):
            answers = [result[turn] for result in results]
            created = [n for n, answer in enumerate(answers) if answer is WriteResult.CREATED]
            self._check_race(oracle.get(f"r/{turn}"), created, racers)
            assert set(answers) <= {WriteResult.CREATED, WriteResult.EXISTED}
        assert oracle.names() == {f"r/{turn}" for turn in range(rounds)}

    def test_racing_processes(
        self, backend: Backend, oracle: Oracle, reopen: Callable[[], Backend] | None
    ) -> None:
        """One of two writing processes creates the object, whole."""
        if reopen is None:
            pytest.skip("this storage belongs to one process")
        names = [f"p/{turn}" for turn in range(40)]
        context = multiprocessing.get_context("spawn")
        start, results = context.Barrier(2), context.Queue()
        racers = [
            context.Process(target=_race_in_process, args=(reopen, n, names, start, results))
            for n in (1, 2)
        ]
        for racer in racers:
            racer.start()
        answers = dict(results.get(timeout=60) for _ in racers)
        for racer in racers:
            racer.join(60)
            assert racer.exitcode == 0
            racer.close()
        results.close()
        results.join_thread()
        for turn, name in enumerate(names):
            created = [n for n, found in answers.items() if found[turn] == "created"]
            self._check_race(oracle.get(name), created, 3, size=70_000)
        assert oracle.names() == set(names)

    @classmethod
    def _check_race(
        cls, data: bytes | None, created: list[int], racers: int, size: int = 50_000
    ) -> None:
        assert created, "no writer got CREATED"
        if cls.one_creates:
            assert len(created) == 1
            assert data == bytes([created[0]]) * size
        elif cls.atomic:
            assert data in [bytes([number]) * size for number in range(racers)]

    def test_readers_never_see_a_torn_object(self, backend: Backend) -> None:
        """While an object is replaced repeatedly, each read sees one whole version."""
        if not self.atomic:
            pytest.skip("this storage does not publish atomically")
        versions = [bytes([number]) * 200_000 for number in range(4)]
        backend.write("a/x", [versions[0]])
        stop = threading.Event()
        seen: list[bytes] = []

        def read() -> None:
            while not stop.is_set():
                try:
                    data = _read_all(backend, "a/x")
                except TransientStorageError:
                    # Replaced between the probe of its size and the read.
                    continue
                except StorageError:
                    if self.replaced_reads_fail:
                        continue
                    raise
                if data not in versions:
                    seen.append(data)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        try:
            for turn in range(60):
                backend.write("a/x", [versions[turn % 4]], "replace")
        finally:
            stop.set()
            for reader in readers:
                reader.join(60)
        assert not seen

    # --------------------------------------------------------------------------------- probes

    def test_whole_objects_are_what_they_have_to_be(self, backend: Backend, oracle: Oracle) -> None:
        """One call reads those objects that are as expected, and no others; or it reads none."""
        parts = [os.urandom(size) for size in (241, 1024, 1025, 3 * 1024 + 64, (1 << 20) + 7)]
        hashes = ",".join(map(xxhash.xxh3_128_hexdigest, parts)).encode()
        header = b"".join((b"first", b"text", b"second", hashes, b"after"))
        good = header.ljust(4096) + b"".join(parts)
        borders = array("q", accumulate(map(len, parts), initial=4096))
        damaged = [0, 5, 9, 15, 15 + 32, len(header) - 1, len(header), 4095, 4096]
        damaged += [border - 1 for border in borders[1:]]
        variants: list[bytes | None] = [good, None, b"", good[:-1], good + b"\0"]
        variants += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in damaged]
        variants.append(good)
        for number, data in enumerate(variants):
            if data is not None:
                oracle.put(f"a/b-{number}", data)
        for kind in oracle.specials:
            oracle.put_special(f"a/b-{kind}", kind)
        ends = [*map(str, range(len(variants))), *oracle.specials]
        wholes = [Whole(end, b"first", b"second", b"after", borders) for end in ends]
        buffers = [memoryview(bytearray(len(good))) for _ in wholes]
        checked = backend.read_whole("a/b-", b"text", wholes, buffers)
        assert (checked is not None) is backend.reads_whole
        if checked is None:
            return
        alike = [data == good for data in variants] + [False] * len(oracle.specials)
        assert list(checked.done) == alike
        assert all(buffer == good for buffer, one in zip(buffers, alike, strict=True) if one)
        assert min(checked.reading, checked.checking) > 0
        late = backend.read_whole("a/b-", b"text", wholes, buffers, seconds=-1.0)
        assert late is not None
        assert not any(late.done)
        other = backend.read_whole("a/b-", b"test", wholes[:1], buffers[:1])
        assert other is not None
        assert not any(other.done)
        with pytest.raises(ObjectNameError):
            backend.read_whole("../a/b-", b"text", wholes, buffers)
        with pytest.raises(ObjectNameError):
            backend.read_whole("a/", b"text", [Whole("../x", b"", b"", b"", borders)], buffers[:1])
        for short in (memoryview(bytearray(len(good) - 1)), memoryview(good)):
            with pytest.raises(ValueError, match="writable"):
                backend.read_whole("a/b-", b"text", wholes[:1], [short])

    def test_touch_keeps_the_content(self, backend: Backend, oracle: Oracle) -> None:
        """Recording a use changes nothing but one of the times."""
        backend.write("a/x", [b"12345"])
        before = backend.info("a/x")
        assert before is not None
        for limit in (before.mtime, math.inf):
            touched = backend.touch("a/x", limit)
            after = backend.info("a/x")
            assert after is not None
            if limit == before.mtime or not backend.properties.renews:
                assert after.mtime == before.mtime
            assert _read_all(backend, "a/x") == b"12345"
            if touched is Touched.TOUCHED:
                times = after.mtime if backend.properties.renews else after.atime
                assert times is not None
                assert times >= before.mtime
        assert oracle.names() == {"a/x"}

    # --------------------------------------------------------------------------------- names

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_unsafe_names_are_refused(self, backend: Backend, oracle: Oracle, name: str) -> None:
        """No method accepts a name that is empty, absolute, not ASCII, or has ``..`` in it."""
        oracle.put("good", b"good")
        for what, call in _every_call(backend, name).items():
            with pytest.raises(ObjectNameError):
                pytest.fail(f"{what} answered {call()!r}")
        assert oracle.names() == {"good"}

    # ------------------------------------------------------------------------------- listings

    def test_listing_with_hidden_names_has_them_only_where_they_are_asked_for(
        self, backend: Backend, oracle: Oracle
    ) -> None:
        """Names with a leading dot belong to the backend and the shelf; refused names to nobody."""
        objects = {"top": 1, "a/x": 2}
        files = objects | {
            "a/.x.0123456789abcdef.tmp": 3,
            "a/.kvshelf/gave-up/y": 4,
            ".kvshelf/pins/z.json": 5,
            ".hidden/z": 6,
        }
        for name, size in files.items():
            oracle.put(name, b"." * size)
        for name in ("a/b\\c/x", "a/d\\e", ".kvshelf/f\\g"):
            oracle.put(name, b"1")
        if "link" in oracle.specials:
            oracle.put_special("a/link", "link")
            oracle.put_special(".kvshelf/link", "link")

        def listed(prefix: str, hidden: bool = False) -> dict[str, int]:
            return {row.name: row.size for row in backend.list(prefix, hidden=hidden)}

        assert listed("") == objects
        assert listed("", hidden=True) == files
        assert listed("a") == {"a/x": 2}
        assert listed("a/.kvshelf/gave-up") == {"a/.kvshelf/gave-up/y": 4}
        for prefix in ("a", ".kvshelf", "no/such"):
            inside = {name: size for name, size in files.items() if name.startswith(prefix + "/")}
            assert listed(prefix, hidden=True) == inside
        assert (backend.folders(), backend.folders("a"), backend.folders("no")) == (["a"], [], [])

    def test_only_some_folders_are_listed(self, backend: Backend, oracle: Oracle) -> None:
        """They are next to each other by name; those whose names begin alike are not the same."""
        temporary = ".0f.0123456789abcdef.tmp"
        folders = ("00", "0f", "0f-x", "0f.", "0f/10", "10", "10-x", "f", ".kvshelf", "0")
        names = [*(f"{folder}/x" for folder in folders), "0e", temporary]
        for name in names:
            oracle.put(f"a/{name}", b"1")
        oracle.put("b/0f/x", b"1")
        ranges = (
            ("00", "0f"),
            ("0f", "10"),
            ("0f-x", "0f-x"),
            ("2", "f"),
            ("x", "y"),
            (".0", ".~"),
        )
        for first, last in ranges:
            found = backend.list("a", hidden=True, start=first, end=last)
            assert sorted(row.name for row in found) == sorted(
                f"a/{name}" for name in names if first <= name.partition("/")[0] <= last
            )
        assert list(backend.list("a", start=".0", end=".~")) == []
        for end, expected in ((None, {"0e", temporary}), (".~", {temporary})):
            found = backend.list("a", hidden=True, start=".0", end=end, flat=True)
            assert {row.name for row in found} == {f"a/{name}" for name in expected}
        assert [row.name for row in backend.list(start="b", end="b")] == ["b/0f/x"]

    # ---------------------------------------------------------------------------- other changes

    @pytest.mark.parametrize("kind", ["file", "folder", "link", "fifo"])
    def test_set_aside(self, backend: Backend, oracle: Oracle, kind: str) -> None:
        """The entry leaves its name; where it is renamed, it is listed, whatever it is."""
        renamed = backend.properties.sets_aside
        if kind == "file":
            oracle.put("a/x", b"bad")
        elif kind in oracle.specials and renamed:
            oracle.put_special("a/x", kind)
        else:
            pytest.skip(f"this storage does not rename a {kind}")
        assert backend.set_aside("a/x") is True
        self.assert_gone(backend, "a/x")
        left = [row.name for row in backend.list("a", hidden=True)]
        assert [final_name(name[2:]) for name in left] == ["x"] * renamed
        assert backend.set_aside("a/x") is False
        assert backend.write("a/x", [b"object"]) is WriteResult.CREATED

    @pytest.mark.parametrize("kind", ["folder", "link", "fifo"])
    def test_things_that_are_no_regular_files(
        self, backend: Backend, oracle: Oracle, kind: str
    ) -> None:
        """They are recognised, and never opened, followed, listed or replaced by a create."""
        if kind not in oracle.specials:
            pytest.skip(f"this storage has no entry of type {kind}")
        oracle.put("a/y", b"good")
        oracle.put_special("a/x", kind)
        outside = oracle.get("a/x") if kind == "link" else None
        assert backend.stat(["a/x", "a/y"]) == [NOT_REGULAR, 4]
        with pytest.raises(NotRegularError):
            backend.open("a/x")
        assert backend.write("a/x", [b"object"]) is WriteResult.EXISTED
        assert backend.stat(["a/x"]) == [NOT_REGULAR]
        assert [row.name for row in backend.list("a") if row.name != "a/x/inside"] == ["a/y"]
        if kind == "folder":
            with pytest.raises(NotRegularError):
                backend.write("a/x", [b"object"], "replace")
            with pytest.raises(NotRegularError):
                delete_one(backend, "a/x")
            assert oracle.get("a/x/inside") == b"inside"
        else:
            assert backend.write("a/x", [b"object"], "replace") is WriteResult.REPLACED
            assert _read_all(backend, "a/x") == b"object"
            delete_one(backend, "a/x")
            if kind == "link":
                oracle.put_special("a/x", kind)
                assert oracle.get("a/x") == outside, "a write went through the link"
                assert delete_one(backend, "a/x") is True
        assert not [name for name in oracle.names() if name.endswith(".tmp")]

    def test_read_only(self, backend: Backend, oracle: Oracle) -> None:
        """Through a read-only wrapper everything can be read and nothing changed."""
        oracle.put("a/x", b"12345")
        fixed = ReadOnlyBackend(backend)
        assert fixed.properties.read_only
        assert fixed.stat(["a/x", "a/y"]) == [5, None]
        assert _read_all(fixed, "a/x") == b"12345"
        assert [row.name for row in fixed.list()] == ["a/x"]
        assert fixed.touch("a/x") is Touched.REFUSED
        for change in (
            lambda: fixed.write("a/y", [b""]),
            lambda: fixed.write("a/x", [b""], "replace"),
            lambda: delete_one(fixed, "a/x"),
            lambda: fixed.set_aside("a/x"),
        ):
            with pytest.raises(ReadOnlyStorageError):
                change()
        (refused,) = fixed.delete(["a/x"])
        assert isinstance(refused, ReadOnlyStorageError)
        assert oracle.names() == {"a/x"}

    def test_close_twice(self, backend: Backend) -> None:
        """Closing is idempotent, the url is shown in the repr, and the space makes sense."""
        space = backend.space()
        assert space is None or 0 <= space.free <= space.total > 0
        assert backend.url
        assert backend.url in repr(backend)
        backend.close()
        backend.close()

    # ------------------------------------------------------------------------- against a model

    def test_like_a_dictionary(self, backend: Backend, oracle: Oracle) -> None:
        """Any sequence of operations has the same outcome as on a dictionary."""
        empty_objects = self.empty_objects

        class Machine(_Model):
            def __init__(self) -> None:
                super().__init__(backend, oracle, empty_objects)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=30,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


_NAMES = st.builds(
    lambda folder, base: folder + base,
    st.sampled_from(("", "a/", "ab/", "a/b/", "a/b/c/", "d-0123/_/00/")),
    st.sampled_from(("x", "y.safetensors", "z" * 100, "n-1of2")),
)
_PREFIXES = st.sampled_from(("", "a", "ab", "a/b", "a/b/c", "d-0123", "d-0123/_", "none"))
_OFFSETS = st.integers(0, 100) | st.integers(0, 70_000) | st.just(1 << 40)
_DATA = st.binary(max_size=40) | st.integers(60_000, 70_000).map(_pattern)


class _Model(RuleBasedStateMachine):
    """A backend next to a dictionary."""

    def __init__(self, backend: Backend, oracle: Oracle, empty_objects: bool) -> None:
        super().__init__()
        self.backend = backend
        self.oracle = oracle
        self.least = b"" if empty_objects else b"0"
        self.objects: dict[str, bytes] = {}

    def teardown(self) -> None:
        self.oracle.clear()

    def check(self, name: str) -> None:
        """See of one object all that can be asked."""
        data, info = self.objects.get(name), self.backend.info(name)
        assert self.backend.stat([name]) == [None if data is None else len(data)]
        if data is None:
            assert info is None
            with pytest.raises(ObjectMissingError):
                self.backend.open(name)
        else:
            assert info is not None
            assert (info.name, info.size) == (name, len(data))
            self.check_held(info)
            assert info.mtime == 0 or abs(info.mtime - time.time()) < 3600
            assert _read_all(self.backend, name) == data

    def check_held(self, info: ObjectInfo) -> None:
        """Assert what an object holds, unless a cache may still show that it holds nothing."""
        assert info.held == info.size or self.backend.properties.cache_seconds

    @rule(name=_NAMES, data=_DATA, cut=st.integers(0, 70_000))
    def create(self, name: str, data: bytes, cut: int) -> None:
        data = data or self.least
        result = self.backend.write(name, [data[:cut], data[cut:]] if data else [])
        assert (result is WriteResult.EXISTED) == (name in self.objects)
        self.objects.setdefault(name, data)
        self.check(name)

    @rule(name=_NAMES, data=_DATA)
    def replace(self, name: str, data: bytes) -> None:
        data = data or self.least
        result = self.backend.write(name, [data], "replace")
        assert (result is WriteResult.REPLACED) == (name in self.objects)
        self.objects[name] = data
        self.check(name)

    @rule(name=_NAMES, data=_DATA)
    def appear(self, name: str, data: bytes) -> None:
        data = data or self.least
        self.oracle.put(name, data)
        self.objects[name] = data

    @rule(name=_NAMES)
    def delete(self, name: str) -> None:
        assert delete_one(self.backend, name) is (name in self.objects)
        self.objects.pop(name, None)
        self.check(name)

    @rule(names=st.lists(_NAMES, max_size=5, unique=True))
    def delete_many(self, names: list[str]) -> None:
        """Delete some; a storage need not say which were there."""
        for name, answer in zip(names, self.backend.delete(names), strict=True):
            assert answer is True or (answer is False and name not in self.objects)
            self.objects.pop(name, None)

    @rule(name=_NAMES)
    def set_aside(self, name: str) -> None:
        assert self.backend.set_aside(name) is (name in self.objects)
        self.objects.pop(name, None)
        if not self.backend.properties.cache_seconds:
            self.check(name)

    @precondition(lambda self: self.objects)
    @rule(data=st.data(), offset=_OFFSETS, length=st.integers(0, 100_000))
    def read(self, data: st.DataObject, offset: int, length: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.objects)))
        expected = self.objects[name][offset : offset + length]
        buffer = memoryview(bytearray(b"." * length))
        typed = buffer if length % 4 else buffer.cast("I")
        assert read_into(self.backend, name, typed, offset) == len(expected)
        assert buffer == expected.ljust(length, b"."), "the rest of the buffer stays"

    @rule(names=st.lists(_NAMES, max_size=12))
    def stat(self, names: list[str]) -> None:
        expected = [len(self.objects[name]) if name in self.objects else None for name in names]
        assert self.backend.stat(names) == expected

    @rule(prefix=_PREFIXES)
    def list(self, prefix: str) -> None:
        start = prefix + "/" if prefix else ""
        inside = {name: len(data) for name, data in self.objects.items() if name.startswith(start)}
        next(iter(self.backend.list(prefix)), None)
        rows = list(self.backend.list(prefix))
        assert sorted((row.name, row.size) for row in rows) == sorted(inside.items())
        for row in rows:
            self.check_held(row)
        paths = [name.removeprefix(start).partition("/") for name in inside]
        folders = sorted({folder for folder, slash, _ in paths if slash})
        assert [name for name in self.backend.folders(prefix) if name in folders] == folders

    @rule(name=_NAMES)
    def touch(self, name: str) -> None:
        self.backend.touch(name)

    @invariant()
    def storage_holds_the_objects(self) -> None:
        names = self.oracle.names()
        aside = {name for name in names if final_name(name.rpartition("/")[2])}
        assert names - aside == set(self.objects)
        for name in self.objects:
            assert self.oracle.get(name) == self.objects[name]
