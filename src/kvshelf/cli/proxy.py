"""``kvshelf proxy``: an OpenAI-compatible proxy in front of prefill and decode engines.

The work is in :mod:`kvshelf.proxy`, whose packages the extra ``kvshelf[proxy]`` installs; they are
imported when the command runs.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from kvshelf.cli.common import address, find_shelf, open_existing, shown_address
from kvshelf.errors import ConfigError


def proxy(
    decode: Annotated[
        list[str],
        typer.Option("--decode", metavar="URL", help="An engine that answers clients. Repeatable."),
    ],
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            "--prefill",
            metavar="URL",
            help="An engine that computes prompts. Repeatable; without one, decode engines do all.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Where to listen; others than this machine: 0.0.0.0.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 8000,
    admin: Annotated[
        str,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Where to answer /health and /metrics, for probes and Prometheus; others than this"
            " machine: 0.0.0.0:9401. 0: any free port.",
        ),
    ] = "9401",
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            "--shelf",
            metavar="SHELF",
            help="The engines' shelf, to look at for requests with `durable`; refused without it.",
        ),
    ] = None,
    prefill_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.001, help="Longest prefill; then a decode engine does it all."
        ),
    ] = 60.0,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.001, help="Longest silence of a decode engine or a client."
        ),
    ] = 600.0,
    durable_wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="Longest wait for KV to be on the store."),
    ] = 30.0,
    max_body: Annotated[
        int, typer.Option(metavar="MIB", min=1, help="Largest body of a request.")
    ] = 8,
    max_bodies: Annotated[
        int,
        typer.Option(
            metavar="MIB", min=1, help="Most bytes of the bodies of all requests at the same time."
        ),
    ] = 512,
    max_connections: Annotated[
        int, typer.Option(metavar="COUNT", min=1, help="Most connections of clients.")
    ] = 2048,
    drain: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=1, help="How long requests may continue after SIGTERM or Ctrl-C."
        ),
    ] = 30.0,
) -> None:
    """Serve the OpenAI API from prefill and decode engines that share a shelf."""
    try:
        from kvshelf.probes import listen
        from kvshelf.proxy.app import make_app
        from kvshelf.proxy.server import serve
        from kvshelf.proxy.settings import Settings, engine_url
    except ImportError as error:
        raise ConfigError(
            f"kvshelf proxy needs packages that are missing ({error}): pip install 'kvshelf[proxy]'"
        ) from error
    settings = Settings(
        tuple(map(engine_url, prefill or ())),
        tuple(map(engine_url, decode)),
        prefill_timeout=prefill_timeout,
        timeout=timeout,
        durable_wait=durable_wait,
        max_body_bytes=max_body << 20,
        max_held_bytes=max_bodies << 20,
    )
    with ExitStack() as opened:
        shelf = None
        if store is not None:
            from kvshelf.shelf.shelf import Shelf

            shelf = opened.enter_context(Shelf(open_existing(*find_shelf(store))))
        listener = opened.enter_context(listen(host, port))
        health = opened.enter_context(listen(*address("--admin", admin)))
        typer.echo(
            f"kvshelf proxy: {shown_address(*listener.getsockname()[:2])},"
            f" prefill engines: {len(settings.prefill)}, decode engines: {len(settings.decode)},"
            f" health and metrics: {shown_address(*health.getsockname()[:2])}",
            err=True,
        )
        serve(make_app(settings, shelf, health), listener, connections=max_connections, drain=drain)
