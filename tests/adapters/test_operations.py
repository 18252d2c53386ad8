"""When requests are named as finished, against a model; and the end of single operations."""

from __future__ import annotations

import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvshelf.adapters.operations import Operation, Operations

IDS = st.sampled_from("abcd")


def begin(operations: Operations, request_id: str, *, store: bool = True) -> Operation:
    """Begin an operation that ends when it expires."""
    return operations.begin(request_id, 60.0, {0: 1}, lambda _: {7}, store=store)


class StoresMachine(RuleBasedStateMachine):
    """Stores begin and end, and finishes are reported in any order and several times."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = Operations()
        self.running: list[Operation] = []
        self.finished: set[str] = set()
        self.named: set[str] = set()

    def ids(self) -> set[str]:
        return {one.request_id for one in self.running}

    @rule(request_id=IDS)
    def begin(self, request_id: str) -> None:
        self.running.append(begin(self.operations, request_id))
        if request_id in self.named:
            # A new request of this name.
            self.named.discard(request_id)
            self.finished.discard(request_id)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.running:
            one = data.draw(st.sampled_from(self.running))
            self.running.remove(one)
            one.expire()

    @rule(request_ids=st.sets(IDS))
    def report(self, request_ids: set[str]) -> None:
        self.finished |= request_ids
        expected = self.finished - self.named - self.ids()
        assert self.operations.finished(request_ids) == expected
        self.named |= expected

    @invariant()
    def nothing_is_named_while_it_runs(self) -> None:
        assert not self.named & self.ids()


TestStores = StoresMachine.TestCase


def test_loads_are_named_once_when_the_last_has_ended() -> None:
    operations = Operations()
    first, second, other = (begin(operations, one, store=False) for one in "aab")
    first.expire()
    assert operations.take_loaded() == set()
    second.expire()
    other.expire()
    assert operations.take_failed_blocks() == {7}
    assert operations.take_loaded() == {"a", "b"}
    assert operations.take_loaded() == operations.take_failed_blocks() == set()


def test_load_that_begins_again_is_named_for_both() -> None:
    operations = Operations()
    begin(operations, "a", store=False).expire()
    again = begin(operations, "a", store=False)
    assert operations.take_loaded() == set()
    again.expire()
    assert operations.take_loaded() == {"a"}


def operation(parts: dict[int, int]) -> tuple[Operation, list[list[int]]]:
    ends: list[list[int]] = []
    return Operation("a", 0.0, parts, lambda one: ends.append(one.failed)), ends


@pytest.mark.parametrize(
    ("works", "failed"), [("yyy", []), ("yyn", [0]), ("nyy", [0]), ("yny", [1]), ("nnn", [0, 1])]
)
def test_operation_ends_with_its_last_part_and_names_the_chunks_of_failed_parts(
    works: str, failed: list[int]
) -> None:
    one, ends = operation({0: 2, 1: 1})
    for chunk, answer in zip((0, 1, 0), works, strict=True):
        assert not ends
        one.part_ended(chunk, answer == "y")
    assert ends == [failed]


def test_operation_does_not_end_while_memory_is_accessed() -> None:
    one, ends = operation({0: 1, 1: 1})
    assert one.acquire()
    one.expire()
    assert not ends
    assert not one.acquire()
    one.part_ended(0, True)
    one.release()
    # What was copied too late does not count: the engine is told to compute it.
    assert ends == [[0, 1]]
    one.part_ended(1, True)
    one.expire()
    assert len(ends) == 1


def test_request_is_not_named_while_a_store_that_is_late_accesses_its_blocks() -> None:
    operations = Operations()
    late = begin(operations, "a")
    assert late.acquire()
    late.expire()
    assert operations.finished(["a"]) == set()
    late.release()
    assert operations.finished([]) == {"a"}


def test_operation_ends_once_for_many_threads() -> None:
    one, ends = operation({0: 64})
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        for _ in range(8):
            assert one.acquire()
            one.part_ended(0, True)
            one.release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [[]]


@pytest.mark.parametrize("times", [1, 3])
def test_finish_without_stores_is_named_at_once_and_once(times: int) -> None:
    stores = Operations()
    assert stores.finished(["a"]) == {"a"}
    for _ in range(times):
        assert stores.finished(["a"]) == set()
