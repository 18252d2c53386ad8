"""When requests are named as finished, against a model; and the end of single operations."""

from __future__ import annotations

import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvshelf.adapters.operations import Operation, Operations

IDS = st.sampled_from("abcd")


def begin(
    operations: Operations, request_id: str, *, is_store: bool = True, chunks: int = 1
) -> Operation:
    """Begin an operation that ends when it expires; chunk n has block 7 + n."""
    blocks = [{7 + number} for number in range(chunks)]
    return operations.begin(request_id, 60.0, blocks, is_store=is_store)


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
            self.operations.expire(one)

    @rule(request_ids=st.sets(IDS))
    def report(self, request_ids: set[str]) -> None:
        self.finished |= request_ids
        expected = self.finished - self.named - self.ids()
        assert self.operations.take_finished(request_ids) == expected
        self.named |= expected

    @invariant()
    def nothing_is_named_while_it_runs(self) -> None:
        assert not self.named & self.ids()


TestStores = StoresMachine.TestCase


def test_loads_are_named_once_when_the_last_has_ended() -> None:
    operations = Operations()
    first, second, other = (begin(operations, name, is_store=False) for name in "aab")
    operations.expire(first)
    assert operations.take_loaded() == set()
    operations.expire(second)
    operations.expire(other)
    assert operations.take_failed_blocks() == {7}
    assert operations.take_loaded() == {"a", "b"}
    assert operations.take_loaded() == operations.take_failed_blocks() == set()


def test_load_that_begins_again_is_named_for_both() -> None:
    operations = Operations()
    operations.expire(begin(operations, "a", is_store=False))
    again = begin(operations, "a", is_store=False)
    assert operations.take_loaded() == set()
    operations.expire(again)
    assert operations.take_loaded() == {"a"}


@pytest.mark.parametrize(
    ("works", "failed"), [("yy", set()), ("yn", {8}), ("ny", {7}), ("nn", {7, 8})]
)
def test_operation_ends_with_its_last_chunk_and_names_the_blocks_of_failed_ones(
    works: str, failed: set[int]
) -> None:
    operations = Operations()
    load = begin(operations, "a", is_store=False, chunks=2)
    for number, answer in enumerate(works):
        assert not load.is_over
        for _ in range(2):
            operations.end_chunk(load, number, is_done=answer == "y")
    assert load.is_over
    assert operations.take_failed_blocks() == failed


def test_operation_does_not_end_while_memory_is_accessed() -> None:
    operations = Operations()
    load = begin(operations, "a", is_store=False, chunks=2)
    assert operations.enter(load)
    operations.expire(load)
    assert not load.is_over
    assert not operations.enter(load)
    # What was copied too late does not count: the engine is told to compute it.
    operations.end_chunk(load, 0, is_done=True)
    operations.leave(load)
    assert load.is_over
    assert operations.take_failed_blocks() == {7, 8}
    operations.end_chunk(load, 1, is_done=True)
    operations.expire(load)
    assert operations.take_loaded() == {"a"}
    assert operations.take_loaded() == operations.take_failed_blocks() == set()


def test_request_is_not_named_while_a_store_that_is_late_accesses_its_blocks() -> None:
    operations = Operations()
    late = begin(operations, "a")
    assert operations.enter(late)
    operations.expire(late)
    assert operations.take_finished(["a"]) == set()
    operations.leave(late)
    assert operations.take_finished([]) == {"a"}


def test_operation_ends_once_for_many_threads() -> None:
    operations = Operations()
    store = begin(operations, "a", chunks=64)
    numbers = iter(range(64))
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        for number in [next(numbers) for _ in range(8)]:
            assert operations.enter(store)
            operations.end_chunk(store, number, is_done=True)
            operations.leave(store)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.is_over and not store.failed


def test_closed_operations_begin_nothing_and_end_together() -> None:
    operations = Operations()
    store, load = begin(operations, "a"), begin(operations, "b", is_store=False)
    operations.close(0.0)
    with pytest.raises(ValueError, match="was shut down"):
        begin(operations, "c")
    operations.expire_all()
    assert store.is_over and load.is_over
    assert operations.take_finished(["a"]) == {"a"}


@pytest.mark.parametrize("times", [1, 3])
def test_finish_without_stores_is_named_at_once_and_once(times: int) -> None:
    operations = Operations()
    assert operations.take_finished(["a"]) == {"a"}
    for _ in range(times):
        assert operations.take_finished(["a"]) == set()
