"""When requests are named as finished, against a model; and the end of single operations."""

from __future__ import annotations

import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvshelf.server.operations import LoadOperations, Operation, StoreOperations

IDS = st.sampled_from("abcd")


class StoresMachine(RuleBasedStateMachine):
    """Stores begin and end, and finishes are reported in any order and several times."""

    def __init__(self) -> None:
        super().__init__()
        self.stores = StoreOperations()
        self.running: list[str] = []
        self.finished: set[str] = set()
        self.named: set[str] = set()

    @rule(request_id=IDS)
    def begin(self, request_id: str) -> None:
        self.stores.begin(request_id)
        self.running.append(request_id)
        if request_id in self.named:
            # A new request of this name.
            self.named.discard(request_id)
            self.finished.discard(request_id)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.running:
            request_id = data.draw(st.sampled_from(self.running))
            self.running.remove(request_id)
            self.stores.end(request_id)

    @rule(request_ids=st.sets(IDS))
    def report(self, request_ids: set[str]) -> None:
        self.finished |= request_ids
        expected = self.finished - self.named - set(self.running)
        assert self.stores.finished(request_ids) == expected
        self.named |= expected

    @invariant()
    def nothing_is_named_while_it_runs(self) -> None:
        assert not self.named & set(self.running)


TestStores = StoresMachine.TestCase


def test_loads_are_named_once_when_the_last_has_ended() -> None:
    loads = LoadOperations()
    loads.begin("a")
    loads.begin("a")
    loads.begin("b")
    loads.end("a")
    assert loads.take_ended() == set()
    loads.end("a")
    loads.end("b")
    assert loads.take_ended() == {"a", "b"}
    assert loads.take_ended() == set()


def test_a_load_that_begins_again_is_named_for_both() -> None:
    loads = LoadOperations()
    loads.begin("a")
    loads.end("a")
    loads.begin("a")
    assert loads.take_ended() == set()
    loads.end("a")
    assert loads.take_ended() == {"a"}


def operation(parts: dict[int, int]) -> tuple[Operation, list[list[int]]]:
    ends: list[list[int]] = []
    return Operation("a", 0.0, parts, lambda one: ends.append(one.failed)), ends


def test_an_operation_ends_with_its_last_part() -> None:
    one, ends = operation({0: 2, 1: 1})
    one.part_ended(0, True)
    one.part_ended(1, True)
    assert not ends
    one.part_ended(0, True)
    assert ends == [[]]


def test_a_chunk_fails_with_one_of_its_parts() -> None:
    one, ends = operation({0: 2, 1: 1})
    one.part_ended(0, True)
    one.part_ended(0, False)
    one.part_ended(1, True)
    assert ends == [[0]]


def test_an_operation_does_not_end_while_memory_is_touched() -> None:
    one, ends = operation({0: 1, 1: 1})
    assert one.touch()
    one.expire()
    assert not ends
    assert not one.touch()
    one.part_ended(0, True)
    one.let_go()
    # What was copied too late does not count: the engine is told to compute it.
    assert ends == [[0, 1]]
    one.part_ended(1, True)
    one.expire()
    assert len(ends) == 1


def test_an_operation_ends_once_for_many_threads() -> None:
    one, ends = operation({0: 64})
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        for _ in range(8):
            assert one.touch()
            one.part_ended(0, True)
            one.let_go()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [[]]


@pytest.mark.parametrize("times", [1, 3])
def test_a_finish_without_stores_is_named_at_once_and_once(times: int) -> None:
    stores = StoreOperations()
    assert stores.finished(["a"]) == {"a"}
    for _ in range(times):
        assert stores.finished(["a"]) == set()
