"""One request of a client: reads its body, passes on an answer, or answers with an error.

Contracts
---------
* The body of an engine's answer reaches the client byte for byte; errors of engines too. Only a
  stream for ``durable`` gets a comment before its last event.
* A client that neither sends its body nor takes its answer is given up in bounded time.
* The bodies of all requests that are not over have a bounded size together.
* Errors of the proxy have the form of OpenAI's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio
from prometheus_client import Gauge
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from kvshelf.proxy.bodies import RefusedError
from kvshelf.proxy.durable import LastEvent
from kvshelf.proxy.legs import Answer, Headers

#: Seconds that a client may take to send the body of its request.
_BODY_SECONDS: Final = 60.0
#: Name of a header, and in a stream of a comment, that says whether the KV is on the store.
_DURABLE: Final = b"kvshelf-durable"
#: A part of the body is not read when these answers are sent.
_CLOSING: Final = frozenset((408, 413, 503))


class DisconnectedError(Exception):
    """The client left."""


class Budget:
    """Counts the bytes of the bodies of all requests.

    Parameters
    ----------
    most : int
        Most bytes at the same time.
    gauge : Gauge
        Shows their number.
    """

    def __init__(self, most: int, gauge: Gauge) -> None:
        self._most = most
        self._held = 0
        self._gauge = gauge

    def take(self, nbytes: int) -> bool:
        """Count bytes; False if there are too many with them."""
        if self._held + nbytes > self._most:
            return False
        self._held += nbytes
        self._gauge.set(self._held)
        return True

    def give_back(self, nbytes: int) -> None:
        """Count bytes no longer."""
        self._held -= nbytes
        self._gauge.set(self._held)


class Client:
    """The client of one request; belongs to one task but for :meth:`left`.

    Parameters
    ----------
    scope, receive, send
        What ASGI gives an application.
    timeout : float
        Seconds that the client may take to accept a piece of its answer.
    budget : Budget
        The bytes of its body count until :meth:`over`.

    Attributes
    ----------
    status : int or None
        Status of the answer; None before it has begun.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, timeout: float, budget: Budget
    ) -> None:
        self.headers: Headers = scope["headers"]
        self.status: int | None = None
        self._scope = scope
        self._receive = receive
        self._send = send
        self._timeout = timeout
        self._budget = budget
        self._counted = 0

    async def body(self, most: int) -> bytes:
        """Return the body of the request.

        Parameters
        ----------
        most : int
            Largest number of bytes.

        Raises
        ------
        DisconnectedError
            If the client left meanwhile.
        RefusedError
            If the body is too large, does not arrive in time, or those of all requests together
            are too large.
        """
        body = bytearray()
        for name, value in self.headers:
            if name == b"content-length" and int(value) > most:
                raise _too_large(most)
        try:
            with anyio.fail_after(_BODY_SECONDS):
                more = True
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise DisconnectedError
                    piece = message.get("body", b"")
                    if len(body) + len(piece) > most:
                        raise _too_large(most)
                    if not self._budget.take(len(piece)):
                        text = "The proxy holds too many bytes of requests; try again later."
                        raise RefusedError(text, 503)
                    self._counted += len(piece)
                    body += piece
                    more = message.get("more_body", False)
        except TimeoutError:
            raise RefusedError("The body did not arrive in time.", 408) from None
        return bytes(body)

    def over(self) -> None:
        """Count the bytes of the body no longer."""
        self._budget.give_back(self._counted)
        self._counted = 0

    async def left(self) -> None:
        """Return when the client has left, or has its answer."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def refuse(self, status: int, message: str, param: str | None = None) -> None:
        """Answer with an error of the proxy.

        Parameters
        ----------
        status : int
        message : str
        param : str, optional
            The field of the request that is wrong.
        """
        self.status = status
        response = error_response(status, message, param)
        if status in _CLOSING:
            response.headers["connection"] = "close"
        await response(self._scope, self._receive, self._send)

    async def pass_on(self, answer: Answer) -> None:
        """Pass an engine's answer on as it comes.

        Raises
        ------
        TimeoutError
            If the client takes no more of it.
        httpx.TransportError
            If the engine breaks off.
        """
        await self._start(answer.status, answer.headers)
        async for piece in answer.pieces:
            await self._put(piece)
        await self._end()

    async def pass_on_durable(
        self, answer: Answer, is_durable: Callable[[], Awaitable[bool]]
    ) -> None:
        """Pass an answer on, and withhold it, or the last event of a stream, until KV is durable.

        Parameters
        ----------
        answer : Answer
        is_durable : Callable
            Called when the engine's answer is complete; returns what the client learns. When it
            returns, the rest is passed on.

        Raises
        ------
        TimeoutError, httpx.TransportError
            As for :meth:`pass_on`.
        """
        kind = next((value for name, value in answer.headers if name == b"content-type"), b"")
        if not kind.startswith(b"text/event-stream"):
            whole = await answer.read()
            state = _spelled(await is_durable())
            await self._start(answer.status, [*answer.headers, (_DURABLE, state)])
            await self._put(whole)
        else:
            await self._start(answer.status, answer.headers)
            last = LastEvent()
            async for piece in answer.pieces:
                await self._put(last.feed(piece))
            state = _spelled(await is_durable())
            await self._put(b": %s: %s\n\n%s" % (_DURABLE, state, last.withheld))
        await self._end()

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _put(self, piece: bytes) -> None:
        if piece:
            with anyio.fail_after(self._timeout):
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def error_response(status: int, message: str, param: str | None = None) -> JSONResponse:
    """Return an error in the form of OpenAI's."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": None}
    return JSONResponse({"error": error}, status)


def _too_large(most: int) -> RefusedError:
    return RefusedError(f"The body is larger than the {most} bytes that are allowed.", 413)


def _spelled(durable: bool) -> bytes:
    return b"true" if durable else b"false"
