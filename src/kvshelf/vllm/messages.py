"""Messages from one side of the connector to the other, repeated until they have arrived.

vLLM carries one object in each direction with a step. Where a method that makes or takes such an
object raises, the object is lost, and vLLM goes on. So what must arrive is a numbered message: it
is part of each object until the other side has answered with its number.

Contracts
---------
* A receiver gets each message once, in the order of the numbers. A message that it raises is given
  to it again in the next step, :data:`MOST_TRIES` times at most, before any later one. So what it
  did before it raised must bear being done again.
* Receivers of one inbox do not depend on each other: what one of them raises delays no other.
* Nothing is sent while nothing waits for an answer.
* Each object belongs to one thread, the step thread of its side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, TypeVar

from kvshelf.logs import RateLimitedLog

#: How often a receiver gets a message that it raises.
MOST_TRIES: Final = 3

_M = TypeVar("_M")
_log = RateLimitedLog(logging.getLogger(__name__))


class Outbox(Generic[_M]):
    """What the other side has to know.

    Parameters
    ----------
    empty : Callable
        Makes a message that says nothing; its attributes equal those of others that say nothing.

    Attributes
    ----------
    next : object
        The message that the next step begins to bring; all of the side write to it.
    """

    def __init__(self, empty: Callable[[], _M]) -> None:
        self._empty, self._nothing = empty, vars(empty())
        self.next = empty()
        self._last = 0
        self._kept: list[tuple[int, _M]] = []

    def messages(self) -> list[tuple[int, _M]]:
        """Return all messages that have not been answered, with their numbers from 1 on."""
        if vars(self.next) != self._nothing:
            self._last += 1
            self._kept.append((self._last, self.next))
            self.next = self._empty()
        return list(self._kept)

    def heard(self, number: int) -> None:
        """Note that the other side has taken all messages up to `number`."""
        self._kept = [kept for kept in self._kept if kept[0] > number]


class Inbox(Generic[_M]):
    """What a side has taken of the messages of one sender.

    Parameters
    ----------
    receivers : Sequence of Callable
        Each gets all messages.
    """

    def __init__(self, receivers: Sequence[Callable[[_M], object]]) -> None:
        self._receivers = receivers
        self._taken = [0] * len(receivers)
        self._tries = [0] * len(receivers)

    @property
    def heard(self) -> int:
        """The number up to which all receivers have taken the messages."""
        return min(self._taken)

    def take(self, messages: Iterable[tuple[int, _M]]) -> None:
        """Give each receiver the messages that it does not have."""
        messages = list(messages)
        for index, receive in enumerate(self._receivers):
            for number, message in messages:
                if number <= self._taken[index]:
                    continue
                try:
                    receive(message)
                except Exception as error:  # noqa: BLE001 - the others must get theirs
                    self._tries[index] += 1
                    _log.error("a message between the connector's sides failed", exc_info=error)
                    if self._tries[index] < MOST_TRIES:
                        break
                self._taken[index], self._tries[index] = number, 0
