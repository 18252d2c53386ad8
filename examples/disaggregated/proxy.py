"""An HTTP proxy before engines that prefill and engines that decode, on one shelf.

    python examples/disaggregated/proxy.py --prefill http://HOST:PORT --decode http://HOST:PORT

Both options are repeatable. It needs httpx, msgspec, starlette and uvicorn, as vLLM does.

A request goes to an engine that prefills first (the first leg), for one token and with
``"kv_transfer_params": {"do_remote_decode": true}``; then, with the params of that answer, to one
that decodes (the second leg), whose answer the client gets byte for byte. Engines are asked in
turn. Where one refuses the connection or answers 503, the next one is asked, as long as the client
has got no byte. A request that no engine could prefill goes to one that decodes as it is. When a
client leaves, the connections to engines that were opened for it are closed, which aborts its
request there. Nothing of a request is logged.

It is an example: it has no limits, no TLS and no metrics, and it knows neither load nor prefixes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

logger = logging.getLogger("uvicorn.error")

Fields = dict[str, Any]
Headers = list[tuple[bytes, bytes]]

PARAMS = "kv_transfer_params"
#: What would make the first leg's answer larger, or contradict its ``max_tokens``. Everything else
#: stays: what changes the prompt (tools, templates, documents) changes the keys of its chunks.
NOT_FOR_PREFILL = {
    *("echo", "logprob_token_ids", "logprobs", "min_tokens", "prompt_logprobs", "stream"),
    *("return_prompt_text", "return_token_ids", "stream_options", "top_logprobs"),
}
#: What the proxy reads; it does not look into other fields.
READ = {
    *(PARAMS, "vllm_xargs", "max_tokens", "max_completion_tokens", "use_beam_search"),
    *("echo", "logprobs", "prompt", "prompt_embeds", "prompt_logprobs"),
}
#: Headers of one connection, in either direction, which are not passed on.
NOT_PASSED_ON = {
    *(b"accept-encoding", b"connection", b"content-encoding", b"content-length", b"date", b"host"),
    *(b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
    *(b"server", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
}
#: Seconds without a byte of an engine.
PREFILL_SECONDS, DECODE_SECONDS = 60.0, 600.0
#: Seconds for which an engine that refused a connection is asked last.
ASIDE_SECONDS = 5.0


class RefusedError(Exception):
    """The client gets an error of the proxy: a message and an HTTP status."""


def read_request(raw: bytes, chat: bool) -> tuple[Fields, str]:
    """Return the fields of a client's request, as the bytes that came, and its legs.

    The legs are ``both``, ``prefill`` for an engine that prefills, ``decode`` for one that decodes.
    """
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        read = {name: msgspec.json.decode(fields[name]) for name in READ & fields.keys()}
    except (ValueError, RecursionError):
        raise RefusedError("The body must be a JSON object.", 400) from None
    # vLLM puts the extra arguments of a request where it looks for params.
    more = read.get("vllm_xargs")
    if read.get(PARAMS) is not None or (isinstance(more, dict) and PARAMS in more):
        raise RefusedError(f"`{PARAMS}` is between the engines; leave it out.", 400)
    longest = read.get("max_completion_tokens") if chat else None
    longest = read.get("max_tokens") if longest is None else longest
    if isinstance(longest, int) and longest <= 1:
        # The token with which a prefill ends is the whole answer.
        return fields, "prefill"
    # vLLM computes the whole prompt for log probabilities of its tokens, answers one set of params
    # for a list of prompts and none for a beam search, and embeddings make no keys.
    scored = read.get("echo") and read.get("logprobs") is not None
    prompt = read.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    alone = any(read.get(name) is not None for name in ("prompt_logprobs", "prompt_embeds"))
    alone = alone or read.get("use_beam_search") or (not chat and (scored or several))
    return fields, "decode" if alone else "both"


def prefill_body(fields: Fields, chat: bool) -> bytes:
    """Return the body of a first leg."""
    kept = {name: value for name, value in fields.items() if name not in NOT_FOR_PREFILL}
    kept |= {"stream": False, "n": 1, "max_tokens": 1, PARAMS: {"do_remote_decode": True}}
    return msgspec.json.encode(kept | ({"max_completion_tokens": 1} if chat else {}))


class Engines:
    """The engines of one side, asked in turn; those that were just not there are asked last."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.aside: dict[str, float] = {}
        self.turns = itertools.count()

    def in_turn(self) -> list[str]:
        """Return all engines in the order in which a request tries them."""
        first = next(self.turns) % len(self.urls)
        urls = self.urls[first:] + self.urls[:first]
        return sorted(urls, key=lambda url: time.monotonic() < self.aside.get(url, 0.0))


class Proxy:
    """The application: passes requests on to engines."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self.prefill, self.decode = Engines(prefill), Engines(decode)
        # Not a client of httpx, which keeps cookies and follows the environment's proxies. vLLM
        # closes connections that were idle for 5 s.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        self.transport = httpx.AsyncHTTPTransport(trust_env=False, limits=limits)
        paths = {"/v1/completions": "POST", "/v1/chat/completions": "POST", "/v1/models": "GET"}
        routes = [Route(path, self, methods=[method]) for path, method in paths.items()]
        routes.append(Route("/health", self.health))
        self.app = Starlette(routes=routes, lifespan=self.lifespan)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Close all connections to engines in the end."""
        async with self.transport:
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, until its client leaves."""
        request = Request(scope, receive)
        try:
            raw = await request.body()
        except ClientDisconnect:
            return
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(watch)
            try:
                await self.serve(request, raw, send)
            except RefusedError as error:
                message, status = error.args
                refusal = JSONResponse({"error": {"message": message, "code": status}}, status)
                await refusal(scope, receive, send)
            except httpx.TransportError as error:
                # An answer that is not complete ends its connection.
                logger.warning("an engine broke off (%s)", type(error).__name__)
            group.cancel_scope.cancel()

    async def serve(self, request: Request, raw: bytes, send: Send) -> None:
        """Send a request through its legs, and the last one's answer to the client."""
        sides, body = [self.decode], b""
        headers = passed_on(request.headers.raw)
        if request.method == "POST":
            chat = "chat" in request.url.path
            fields, legs = read_request(raw, chat)
            if legs == "prefill":
                sides = [self.prefill, self.decode]
            elif legs == "both":
                fields |= await self.hand_over(request, headers, prefill_body(fields, chat))
            body = msgspec.json.encode(fields)
        async with self.answer(request, headers, body, DECODE_SECONDS, *sides) as answer:
            start = {"status": answer.status_code, "headers": passed_on(answer.headers.raw)}
            await send({"type": "http.response.start", **start})
            async for piece in answer.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def hand_over(self, request: Request, headers: Headers, body: bytes) -> Fields:
        """Have an engine prefill; return the field for the second leg, if there is one."""
        try:
            async with self.answer(request, headers, body, PREFILL_SECONDS, self.prefill) as answer:
                found = msgspec.json.decode(await answer.aread(), type=dict[str, Any])
        except (RefusedError, httpx.TransportError, msgspec.DecodeError):
            return {}
        given = answer.status_code == 200 and isinstance(found.get(PARAMS), dict)
        return {PARAMS: found[PARAMS]} if given else {}

    @asynccontextmanager
    async def answer(
        self, request: Request, headers: Headers, body: bytes, seconds: float, *sides: Engines
    ) -> AsyncIterator[httpx.Response]:
        """Yield the first answer of an engine; its connection ends with the block."""
        method, path = request.method, request.url.path
        timeout = {"connect": 5.0, "read": seconds, "write": seconds}
        for side, url in [(one, url) for one in sides for url in one.in_turn()]:
            call = httpx.Request(method, url + path, headers=headers, content=body)
            call.extensions["timeout"] = timeout
            try:
                response = await self.transport.handle_async_request(call)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                side.aside[url] = time.monotonic() + ASIDE_SECONDS
                continue
            except httpx.TransportError as error:
                raise RefusedError(f"An engine failed: {type(error).__name__}.", 502) from None
            try:
                if response.status_code != 503:
                    yield response
                    return
            finally:
                with anyio.CancelScope(shield=True):
                    await response.aclose()
        raise RefusedError("No engine answers; try again later.", 503)

    async def health(self, _: Request) -> Response:
        """Answer which engines are healthy; 503 where none that decodes is."""
        urls = [*self.prefill.urls, *self.decode.urls]
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
            asked = (client.get(f"{url}/health") for url in urls)
            answers = await asyncio.gather(*asked, return_exceptions=True)
        good = {
            url: isinstance(answer, httpx.Response) and answer.is_success
            for url, answer in zip(urls, answers, strict=True)
        }
        return JSONResponse(good, 200 if any(good[url] for url in self.decode.urls) else 503)


def passed_on(headers: Headers) -> Headers:
    """Return headers without those of one connection."""
    return [(name, value) for name, value in headers if name.lower() not in NOT_PASSED_ON]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="A proxy before engines that share a shelf.")
    urls: dict[str, Any] = {"action": "append", "required": True, "metavar": "URL"}
    parser.add_argument("--prefill", help="an engine that computes prompts", **urls)
    parser.add_argument("--decode", help="an engine that answers", **urls)
    parser.add_argument("--host", default="127.0.0.1", help="where to listen")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    app = Proxy(options.prefill, options.decode).app
    limits: dict[str, Any] = {"access_log": False, "timeout_graceful_shutdown": 30}
    uvicorn.run(app, host=options.host, port=options.port, **limits)


if __name__ == "__main__":
    main()
