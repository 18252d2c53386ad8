"""Requests to engines: the choice of an engine, retries, and the way of an answer.

Owns the HTTP client. Nothing of a client's request but its headers and body is sent to an engine,
and nothing of an answer is changed.

Contracts
---------
* A leg is repeated on another engine only before the first byte of an answer was handed out. An
  engine that cannot be reached costs nothing. A leg that an engine had received, and answered with
  5xx or not at all, is repeated once: a request that ends engines must not end all of them.
* A leg that timed out is not repeated: the client has waited that long.
* A caller that leaves :meth:`Legs.answer` early, a cancelled task included, closes the connection
  to the engine, which ends the request there.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import anyio
import httpx

from kvshelf.logs import RateLimitedLog
from kvshelf.proxy.engines import Engine, Engines
from kvshelf.proxy.metrics import ProxyMetrics
from kvshelf.proxy.settings import Settings

logger = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]

#: Headers of one connection (RFC 9110, 7.6.1); those that ``Connection`` names are left out, too.
_HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
#: Headers about the body or the connection of a client, which those to an engine are not. Engines
#: do not compress: the proxy looks for the end of a stream.
_OF_THE_CLIENT: Final = frozenset(
    (b"accept-encoding", b"content-encoding", b"content-length", b"expect", b"host")
)
_RETRIED: Final = frozenset((500, 502, 503, 504))
#: How many engines get a leg that fails after they received it.
_MOST_SENT: Final = 2
_CONNECT_SECONDS: Final = 5.0
_HEALTH_SECONDS: Final = 5.0
#: Shorter than vLLM keeps idle connections (VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 5 s), so that none is
#: used at the moment at which the engine closes it.
_IDLE_SECONDS: Final = 2.0


class UnansweredError(Exception):
    """No engine answered; the message is for the client.

    Parameters
    ----------
    message : str
    status : int
        HTTP status of the answer to the client.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Call:
    """A request to an engine.

    Attributes
    ----------
    method, path : str
    headers : list of pairs of bytes
        See :func:`forwarded`.
    body : bytes
    timeout : float
        Seconds without a byte from the engine.
    """

    method: str
    path: str
    headers: Headers
    body: bytes
    timeout: float


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's answer.

    Attributes
    ----------
    status : int
    headers : list of pairs of bytes
        Those that are passed on to a client.
    pieces : AsyncIterator of bytes
        The body, as it comes; raises ``httpx.TransportError`` when the engine breaks off.
    """

    status: int
    headers: Headers
    pieces: AsyncIterator[bytes]

    async def read(self) -> bytes:
        """Return the rest of the body."""
        return b"".join([piece async for piece in self.pieces])


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers of a client that engines get, ``Authorization`` among them."""
    return [(name, value) for name, value in _end_to_end(headers) if name not in _OF_THE_CLIENT]


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    lower = [(name.lower(), value) for name, value in headers]
    named = {
        token.strip().lower()
        for name, value in lower
        if name == b"connection"
        for token in value.split(b",")
    }
    return [(name, value) for name, value in lower if name not in _HOP_BY_HOP | named]


class Legs:
    """Sends requests to engines; belongs to one event loop.

    Parameters
    ----------
    settings : Settings
    metrics : ProxyMetrics

    Attributes
    ----------
    prefill, decode : Engines
    """

    def __init__(self, settings: Settings, metrics: ProxyMetrics) -> None:
        self.prefill = Engines("prefill", settings.prefill)
        self.decode = Engines("decode", settings.decode)
        self._settings = settings
        self._metrics = metrics
        self._log = RateLimitedLog(logger, lines=10)
        # Not a client of httpx: those keep cookies, follow the environment's proxies and add
        # headers.
        self._transport = httpx.AsyncHTTPTransport(
            trust_env=False,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_SECONDS),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    async def hand_over(self, path: str, headers: Headers, body: bytes) -> dict[str, Any] | None:
        """Have a prefill engine compute and store a prompt's KV.

        Returns
        -------
        dict or None
            The params for the decode engine; None where there is no hand-over, whatever the reason.
        """
        call = Call("POST", path, headers, body, self._settings.prefill_timeout)
        try:
            async with self.answer(call, self.prefill, last_resort=False) as answer:
                found = json.loads(await answer.read())
        except (UnansweredError, httpx.TransportError):
            self._metrics.handovers.labels("impossible").inc()
            return None
        except ValueError:
            found = None
        params = found.get("kv_transfer_params") if isinstance(found, dict) else None
        if answer.status != 200 or not isinstance(params, dict):
            # A decode engine will say of the client's own request what is wrong with it.
            self._metrics.handovers.labels("nothing").inc()
            return None
        self._metrics.handovers.labels("promised").inc()
        return params

    @asynccontextmanager
    async def answer(
        self, call: Call, *sides: Engines, last_resort: bool = True
    ) -> AsyncIterator[Answer]:
        """Yield the answer of an engine.

        Parameters
        ----------
        call : Call
        *sides : Engines
            The sides, in order of preference.
        last_resort : bool
            Also try engines that could not be reached a moment ago, after all others.

        Raises
        ------
        UnansweredError
            If no engine answered. Answers with an error are answers: the last one is passed on.
        """
        tried: set[Engine] = set()
        sent = 0
        failure: Answer | None = None
        while sent < _MOST_SENT:
            side, engine = _choose(sides, tried, last_resort)
            if engine is None:
                break
            tried.add(engine)
            async with AsyncExitStack() as opened:
                try:
                    answer = await opened.enter_async_context(self._ask(side, engine, call))
                    if answer.status in _RETRIED:
                        failure = Answer(answer.status, answer.headers, _once(await answer.read()))
                except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                    engine.set_aside()
                    self._note(side, engine, "unreachable", error)
                    continue
                except httpx.TimeoutException as error:
                    self._note(side, engine, "timeout", error)
                    message = f"The {side} engine did not answer within {call.timeout:g} seconds."
                    raise UnansweredError(message, 504) from None
                except httpx.TransportError as error:
                    engine.set_aside()
                    sent += 1
                    self._note(side, engine, "broken", error)
                    continue
                if answer.status in _RETRIED:
                    sent += 1
                    self._note(side, engine, "failed", None)
                    continue
                self._metrics.legs.labels(side, "answered").inc()
                yield answer
                return
        if failure is None:
            raise UnansweredError("No engine could be reached; try again later.", 502)
        yield failure

    @asynccontextmanager
    async def _ask(self, side: str, engine: Engine, call: Call) -> AsyncIterator[Answer]:
        """Send a call to an engine; yields its answer when the first piece of the body is there."""
        seconds = {"connect": _CONNECT_SECONDS, "pool": None}
        request = httpx.Request(
            call.method,
            engine.url + call.path,
            headers=call.headers,
            content=call.body,
            extensions={"timeout": seconds | dict.fromkeys(("read", "write"), call.timeout)},
        )
        started = time.monotonic()
        gauge = self._metrics.in_flight.labels(side, engine.name)
        with engine.busy(), gauge.track_inprogress():
            response = await self._transport.handle_async_request(request)
            try:
                pieces = response.aiter_raw()
                first = await anext(pieces, b"")
                self._metrics.first_byte.labels(side).observe(time.monotonic() - started)
                headers = _end_to_end(response.headers.raw)
                yield Answer(response.status_code, headers, _chained(first, pieces))
            finally:
                with anyio.CancelScope(shield=True):
                    await response.aclose()

    def _note(self, side: str, engine: Engine, outcome: str, error: Exception | None) -> None:
        self._metrics.legs.labels(side, outcome).inc()
        what = "" if error is None else f" ({type(error).__name__})"
        self._log.warning("the %s engine %s: %s%s", side, engine.name, outcome, what)

    async def health(self) -> dict[str, dict[str, bool]]:
        """Request the health of all engines at once.

        Returns
        -------
        dict
            For each side, whether each engine, by its name, answered its ``/health`` with 200.
        """
        sides = self.prefill, self.decode
        found = {side.side: {engine.name: False for engine in side.all} for side in sides}

        async def ask(side: str, engine: Engine) -> None:
            seconds = dict.fromkeys(("connect", "read", "write", "pool"), _HEALTH_SECONDS)
            request = httpx.Request("GET", f"{engine.url}/health", extensions={"timeout": seconds})
            try:
                response = await self._transport.handle_async_request(request)
                await response.aclose()
            except httpx.TransportError:
                return
            found[side][engine.name] = response.status_code == 200

        async with anyio.create_task_group() as group:
            for side in sides:
                for engine in side.all:
                    group.start_soon(ask, side.side, engine)
        return found


def _choose(
    sides: Iterable[Engines], tried: set[Engine], last_resort: bool
) -> tuple[str, Engine | None]:
    for aside in (False, True) if last_resort else (False,):
        for side in sides:
            engine = side.choose(tried, aside=aside)
            if engine is not None:
                return side.side, engine
    return "", None


async def _once(piece: bytes) -> AsyncIterator[bytes]:
    yield piece


async def _chained(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in pieces:
        yield piece
