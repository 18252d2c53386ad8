"""The requests of one client of the node server, and the answers on their way to it.

Owns the requests of a client that have not all their answers, and the frames on their way to it.
The outcomes of a fetch that come in one round of the loop are one message.

Contracts
---------
* What a client has waiting is bounded: requests without an answer, their bytes, and the bytes of
  answers that it does not read. With more requests it gets a fault, with more answers it is lost.
* Each answer that a request waits for is counted once, however the request ends. A lease that its
  client does not learn of ends.

Threads
-------
All methods are called on the loop's thread, and none blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import zmq

from kvshelf.errors import TransientStorageError
from kvshelf.server import messages
from kvshelf.server.messages import MAX_OPEN, MAX_OPEN_BYTES, Failed, Fetched, Ready, Reply

#: Bytes of answers of one client that wait for ZMQ's queue.
_MAX_BACKLOG: Final = 2 * messages.MAX_REPLY
#: Outcomes in one message.
_OUTCOMES: Final = 512


class Answers:
    """The answers of one client.

    Parameters
    ----------
    send : Callable
        Passes a frame to ZMQ; raises ``zmq.Again`` if its queue for this client is full.
    due : set of Answers
        Those of all clients that have something to send when a round ends.
    give_back : Callable
        Ends leases of the client.
    lose : Callable
        Called with a reason when the client can be sent nothing more; calls :meth:`end`.

    Attributes
    ----------
    ended : bool
        Nothing more is sent.
    """

    def __init__(
        self,
        send: Callable[[bytes], None],
        due: set[Answers],
        give_back: Callable[[Sequence[int]], None],
        lose: Callable[[str], None],
    ) -> None:
        self._send = send
        self._due = due
        self._give_back = give_back
        self._lose = lose
        self._open = 0
        self._open_bytes = 0
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        #: By the number of the fetch, until the round ends.
        self._outcomes: dict[int, list[Ready | Failed]] = {}
        self.ended = False

    def begin(self, number: int, answers: int, nbytes: int) -> PendingRequest:
        """Wait for the answers to a request.

        Raises
        ------
        TransientStorageError
            If the client waits for too many.
        """
        if self._open_bytes + nbytes > MAX_OPEN_BYTES or self._open + answers > MAX_OPEN:
            raise TransientStorageError(
                f"the client waits for {self._open} answers already, to requests of"
                f" {self._open_bytes} bytes"
            )
        nbytes = nbytes if answers else 0
        self._open += answers
        self._open_bytes += nbytes
        return PendingRequest(self, number, answers, nbytes)

    def send(self, number: int, reply: Reply) -> None:
        """Send a reply, or keep it while ZMQ's queue is full."""
        if self.ended:
            return
        frame = messages.encode_reply(number, reply)
        if not self._backlog and self._passed_on(frame):
            return
        self._backlog.append(frame)
        self._backlog_bytes += len(frame)
        self._due.add(self)
        if self._backlog_bytes > _MAX_BACKLOG:
            self._lose("it does not read its answers")

    def flush(self) -> None:
        """Send what is due, until ZMQ's queue is full."""
        waiting, self._outcomes = self._outcomes, {}
        for number, outcomes in waiting.items():
            for start in range(0, len(outcomes), _OUTCOMES):
                self.send(number, Fetched(outcomes[start : start + _OUTCOMES]))
        while self._backlog:
            frame = self._backlog.popleft()
            if not self._passed_on(frame):
                self._backlog.appendleft(frame)
                return
            self._backlog_bytes -= len(frame)
        self._due.discard(self)

    def end(self) -> None:
        """Send nothing more. Idempotent."""
        self.ended = True
        self._backlog.clear()
        self._due.discard(self)

    def _passed_on(self, frame: bytes) -> bool:
        """Pass a frame to ZMQ; False if it is not gone."""
        try:
            self._send(frame)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            self._lose(f"it has no connection: {error}")
        return True

    def settle(self, answers: int, nbytes: int) -> None:
        """Wait for so many answers less, to requests of so many bytes."""
        self._open -= answers
        self._open_bytes -= nbytes

    def announce(self, number: int, outcomes: Sequence[Ready | Failed]) -> None:
        """Send outcomes of a fetch when the round ends."""
        self._outcomes.setdefault(number, []).extend(outcomes)
        self._due.add(self)

    def take_back(self, number: int) -> None:
        """Do not send the outcomes of a fetch that were announced in this round."""
        self.release(self._outcomes.pop(number, ()))

    def release(self, outcomes: Sequence[Ready | Failed]) -> None:
        """End leases that the client does not learn of."""
        self._give_back([outcome.lease for outcome in outcomes if isinstance(outcome, Ready)])


@dataclass(slots=True)
class PendingRequest:
    """A request that waits for its answers; made by :meth:`Answers.begin`."""

    _answers: Answers
    _number: int
    _left: int
    _nbytes: int

    def settle(self) -> bool:
        """Wait for nothing more; return whether anything was waited for."""
        waited = self._left
        self._answered(waited)
        return waited > 0

    def done(self, reply: Reply) -> None:
        """Answer the request."""
        if self.settle():
            self._answers.send(self._number, reply)

    def each(self, outcomes: Sequence[Ready | Failed]) -> None:
        """Answer a fetch, for some of its objects."""
        expected = len(outcomes) <= self._left
        if expected:
            self._answered(len(outcomes))
        if expected and not self._answers.ended:
            self._answers.announce(self._number, outcomes)
        else:
            # The request as a whole has failed, or its client is gone: its objects are not needed.
            self._answers.release(outcomes)

    def fail(self, reply: Reply) -> None:
        """Answer the request as a whole, also if some of its objects were announced."""
        self._answers.take_back(self._number)
        self.done(reply)

    def _answered(self, answers: int) -> None:
        self._left -= answers
        nbytes = 0 if self._left else self._nbytes
        self._nbytes -= nbytes
        self._answers.settle(answers, nbytes)
