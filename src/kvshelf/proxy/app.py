"""The proxy as an ASGI application: its paths, and the way of a request through the legs.

Contracts
---------
* When a client disconnects, everything that was begun for it is cancelled.
* An answer that breaks off ends its connection, so that no client takes it for complete.
* Nothing of a request is logged.
* No body stops the event loop: large ones are parsed and encoded on a thread, one at a time.
* Health and metrics are on a port of their own; they cause one health request to each engine a
  second at most.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import anyio
import httpx
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send

from kvshelf.probes import Page, Probes
from kvshelf.proxy.bodies import DURABLE, RefusedError, Route, read_request
from kvshelf.proxy.client import Budget, Client, DisconnectedError, error_response
from kvshelf.proxy.durable import Durability
from kvshelf.proxy.legs import Call, Legs, UnansweredError, forwarded
from kvshelf.proxy.metrics import ProxyMetrics
from kvshelf.proxy.settings import Settings
from kvshelf.shelf.shelf import Shelf

logger = logging.getLogger(__name__)

#: Bytes of a body from which on it takes milliseconds to parse.
_LARGE: Final = 1 << 18
#: How long the health that an engine reported is served to further requests.
_HEALTH_SECONDS: Final = 1.0
_T = TypeVar("_T")


def make_app(
    settings: Settings, shelf: Shelf | None = None, admin: socket.socket | None = None
) -> Starlette:
    """Make the proxy.

    Parameters
    ----------
    settings : Settings
    shelf : Shelf, optional
        The engines' shelf, for requests with ``durable``; they are refused without it. The caller
        closes it.
    admin : socket, optional
        Where to answer ``/health`` and ``/metrics``; is closed at the end.
    """
    metrics = ProxyMetrics()
    legs = Legs(settings, metrics)
    durability = None if shelf is None else Durability(shelf, settings.durable_wait)
    budget = Budget(settings.max_held_bytes, metrics.body_bytes)
    passing = _Passing(settings, metrics, legs, durability, budget)
    health = _Health(legs)

    async def page(path: str) -> Page | None:
        if path == "/health":
            return await health.page()
        if path == "/metrics":
            return Page(200, CONTENT_TYPE_LATEST, generate_latest(metrics.registry))
        return None

    async def refuse(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(error.status_code, f"{error.detail}: the proxy does not serve this.")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        over = asyncio.Event()
        answering = None
        if admin is not None:
            answering = asyncio.create_task(Probes(admin, page).serve(over))
        try:
            yield
        finally:
            over.set()
            if answering is not None:
                await answering
            await legs.close()
            if durability is not None:
                durability.close()

    return Starlette(
        routes=[
            Path("/v1/completions", passing, methods=["POST"]),
            Path("/v1/chat/completions", passing, methods=["POST"]),
            Path("/v1/models", passing, methods=["GET"]),
        ],
        exception_handlers={HTTPException: refuse},
        lifespan=lifespan,
    )


class _Health:
    """The health of the engines."""

    def __init__(self, legs: Legs) -> None:
        self._legs = legs
        self._asking = anyio.Lock()
        self._page = Page(503, "", b"")
        self._until = 0.0

    async def page(self) -> Page:
        """Return the health of the engines, at most a second old."""
        async with self._asking:
            if time.monotonic() >= self._until:
                found = await self._legs.health()
                healthy = [engine for side in found.values() for engine in side.values()]
                can_answer = any(found["decode"].values())
                status = "ok" if all(healthy) else "degraded" if can_answer else "down"
                body = json.dumps({"status": status, **found}).encode()
                self._page = Page(200 if can_answer else 503, "application/json", body)
                self._until = time.monotonic() + _HEALTH_SECONDS
            return self._page


@dataclass(eq=False)
class _Passing:
    """The application of the paths whose requests are sent to engines.

    Starlette's own requests and responses do not cancel what runs for a client that leaves.
    """

    settings: Settings
    metrics: ProxyMetrics
    legs: Legs
    durability: Durability | None
    budget: Budget
    #: Held while the body of a large request is parsed or encoded.
    working: anyio.Lock = field(default_factory=anyio.Lock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(scope, receive, send, self.settings.timeout, self.budget)
        try:
            await self._answer(scope["path"], client)
        finally:
            client.over()

    async def _answer(self, path: str, client: Client) -> None:
        try:
            body = await client.body(self.settings.max_body_bytes)
        except DisconnectedError:
            self.metrics.disconnects.inc()
            return
        except RefusedError as error:
            await client.refuse(error.status, str(error))
            self.metrics.answers.labels(client.status).inc()
            return
        ended = False
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                await client.left()
                if not ended:
                    self.metrics.disconnects.inc()
                    group.cancel_scope.cancel()

            group.start_soon(watch)
            await self._serve(path, client, body)
            ended = True
            group.cancel_scope.cancel()

    async def _serve(self, path: str, client: Client, body: bytes) -> None:
        try:
            if path == "/v1/models":
                headers = forwarded(client.headers)
                call = Call("GET", path, headers, b"", self.settings.timeout)
                async with self.legs.answer(call, self.legs.decode) as answer:
                    await client.pass_on(answer)
            else:
                await self._generate(path, client, body)
        except RefusedError as error:
            await client.refuse(error.status, str(error), error.param)
        except UnansweredError as error:
            await client.refuse(error.status, str(error))
        except (httpx.TransportError, TimeoutError) as error:
            # The server closes the connection of an answer that is not complete.
            logger.warning("an answer broke off (%s)", type(error).__name__)
        self.metrics.answers.labels(client.status).inc()

    async def _generate(self, path: str, client: Client, raw: bytes) -> None:
        large = len(raw) > _LARGE
        chat = path == "/v1/chat/completions"
        request = await self._run(functools.partial(read_request, raw, chat=chat), large)
        durability = self.durability if request.durable else None
        if request.durable and durability is None:
            raise RefusedError(
                f"`{DURABLE}` is refused: the proxy was started without --store.", param=DURABLE
            )
        legs = self.legs
        headers = [pair for pair in forwarded(client.headers) if pair[0] != b"content-type"]
        headers.append((b"content-type", b"application/json"))
        params: dict[str, Any] | None = None
        if request.route is Route.HAND_OVER and legs.prefill.all:
            params = await legs.hand_over(
                path, headers, await self._run(request.prefill_body, large)
            )
        sides = [legs.decode]
        if request.route is Route.PREFILL_ONLY:
            sides.insert(0, legs.prefill)
        body = await self._run(functools.partial(request.body, params), large)
        call = Call("POST", path, headers, body, self.settings.timeout)
        async with legs.answer(call, *sides) as answer:
            if durability is None or answer.status != 200:
                await client.pass_on(answer)
                return
            waits = durability

            async def is_durable() -> bool:
                durable = await waits.wait(params, request.cache_salt)
                self.metrics.durable.labels("yes" if durable else "no").inc()
                return durable

            await client.pass_on_durable(answer, is_durable)

    async def _run(self, work: Callable[[], _T], large: bool) -> _T:
        """Do something with a body: on a thread if it is a large one.

        One after the other: while the interpreter parses, no other thread runs, and the event loop
        would wait for all that do at once.
        """
        if not large:
            return work()
        async with self.working:
            return await anyio.to_thread.run_sync(work)
