"""No lease is lost, none ends twice, and memory that a client reads stays its own."""

from __future__ import annotations

import weakref
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvshelf.server.leases import Leases
from tests.support.clocks import Clock

A, B = b"a" * 16, b"b" * 16


class Thing:
    """What is leased, whose end can be noticed."""

    def __init__(self, nbytes: int = 10) -> None:
        self.nbytes = nbytes


X, Y = Thing(), Thing()
THINGS = [Thing(15 + 5 * number) for number in range(6)]


def leases(clock: Clock, quota: int = 1000) -> Leases:
    return Leases(seconds=30.0, quota=quota, clock=clock)


def number(granted: tuple[int, bool] | None) -> int:
    assert granted is not None
    return granted[0]


def test_lookup_lease_ends_after_its_time_and_a_renewed_one_later() -> None:
    clock = Clock()
    book = leases(clock)
    book.grant(A, "r", X, fetched=False)
    book.grant(A, "r", Y, fetched=False)
    clock.now = 20
    assert book.grant(A, "r", X, fetched=False) == (1, False)
    clock.now = 30
    assert book.expire() == ([Y], [])
    clock.now = 50
    assert book.expire() == ([X], [])
    assert book.stats() == (0, 0)


def test_what_is_no_longer_leased_is_forgotten() -> None:
    clock = Clock()
    book = Leases(seconds=30.0, quota=1000, clock=clock)
    things: weakref.WeakSet[Thing] = weakref.WeakSet()
    for count in range(400):
        thing = Thing()
        things.add(thing)
        lease = number(book.grant(A, "r", thing, fetched=count % 2 == 0))
        assert book.grant(B, "r", thing, fetched=count % 3 == 0)
        if count % 5 == 0:
            clock.now += 31
            book.expire()
        book.release(A, [lease])
        book.end_session(A, "r")
        book.end_client(B)
    del thing
    assert not things


class LeaseMachine(RuleBasedStateMachine):
    """Random operations against a plain list of leases."""

    clients = st.sampled_from([A, B])
    sessions = st.sampled_from(["1", "2"])
    things = st.sampled_from(THINGS)

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.book = Leases(seconds=30.0, quota=100, clock=self.clock)
        self.pins: Counter[Thing] = Counter()
        #: By number: client, session, slot, fetched, end, overdue.
        self.model: dict[int, list] = {}
        self.used: set[int] = set()

    def ended(self, returned: list[Thing], numbers: list[int]) -> None:
        expected = Counter(self.model.pop(n)[2] for n in numbers)
        assert Counter(returned) == expected
        self.pins -= expected

    @rule(client=clients, session=sessions, slot=things, fetched=st.booleans())
    def grant(self, client: bytes, session: str, slot: Thing, fetched: bool) -> None:
        known = [n for n, m in self.model.items() if m[:3] == [client, session, slot] and not m[3]]
        mine = {m[2] for m in self.model.values() if m[0] == client}
        granted = self.book.grant(client, session, slot, fetched=fetched)
        if not known and slot not in mine and sum(one.nbytes for one in {*mine, slot}) > 100:
            assert granted is None
            return
        assert granted is not None
        number, new = granted
        assert new == (not known)
        if new:
            assert number not in self.used
            self.used.add(number)
            self.pins[slot] += 1
        else:
            assert [number] == known
        end = self.clock.now + 30
        self.model[number] = [client, session, slot, fetched, end, False]

    @rule(client=clients, data=st.data())
    def release(self, client: bytes, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.integers(0, max(self.used, default=0) + 1), max_size=4))
        mine = {n for n in numbers if n in self.model and self.model[n][0] == client}
        self.ended(self.book.release(client, numbers), list(mine))

    @rule(client=clients, session=sessions)
    def end_session(self, client: bytes, session: str) -> None:
        numbers = [n for n, m in self.model.items() if m[:2] == [client, session] and not m[3]]
        self.ended(self.book.end_session(client, session), numbers)

    @rule(client=clients, session=sessions, slot=things)
    def end_lookups(self, client: bytes, session: str, slot: Thing) -> None:
        """End those of the other client: this one has fetched the slot."""
        self.grant(client, session, slot, True)
        numbers = [
            n for n, m in self.model.items() if m[0] != client and m[1:4] == [session, slot, False]
        ]
        self.ended(self.book.end_lookups(client, session, slot), numbers)

    @rule(client=clients)
    def end_client(self, client: bytes) -> None:
        numbers = [n for n, m in self.model.items() if m[0] == client]
        self.ended(self.book.end_client(client), numbers)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        ended, overdue = self.book.expire()
        over = [n for n, m in self.model.items() if m[4] <= self.clock.now and not m[5]]
        self.ended(ended, [n for n in over if not self.model[n][3]])
        expected = set()
        for n in over:
            if n in self.model:
                self.model[n][5] = True
                expected.add(self.model[n][2])
        expected -= {m[2] for m in self.model.values() if m[3] and not m[5]}
        assert len(overdue) == len(expected) and set(overdue) == expected

    @invariant()
    def nothing_is_lost(self) -> None:
        count, nbytes = self.book.stats()
        assert count == len(self.model) == sum(self.pins.values())
        leased = {(m[0], m[2]) for m in self.model.values()}
        assert nbytes == sum(slot.nbytes for _, slot in leased)

    def teardown(self) -> None:
        for client in (A, B):
            self.end_client(client)
        assert not self.model
        assert self.book.stats() == (0, 0)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=150, stateful_step_count=60)
