"""Runs the proxy on a port of this machine.

Owns the listening socket and the end: SIGTERM and SIGINT close the socket at once, give requests
that run the drain time, and then cancel them. A second signal cancels them at once.
"""

from __future__ import annotations

import signal
import socket
import sys

import uvicorn
from starlette.applications import Starlette


def serve(app: Starlette, listener: socket.socket, *, drain: float) -> None:
    """Serve until SIGTERM or SIGINT.

    Parameters
    ----------
    app : Starlette
    listener : socket
        Is closed at the end.
    drain : float
        Seconds that running requests have to end.
    """
    with listener:
        server = make_server(app, drain=drain)
        # uvicorn raises the signals that ended it once more.
        before = {which: signal.signal(which, _exit) for which in (signal.SIGTERM, signal.SIGINT)}
        try:
            server.run(sockets=[listener])
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)


def make_server(app: Starlette, *, drain: float) -> uvicorn.Server:
    """Make the server; :func:`serve` runs it."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            # Answers have the headers of engines.
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=max(1, round(drain)),
            ws="none",
        )
    )


def _exit(*_: object) -> None:
    sys.exit(0)
