"""The process of a node server: what ``kvshelf serve`` runs, from its first check to its end.

Owns the order in which the parts are made and closed, and the signals. The socket comes first, so
that a second server is refused before it takes memory; then the memory, all of it, or the server
does not start; then the shelf, which may open later (a storage that does not answer now is tried
again, and nothing is found meanwhile).

SIGTERM and SIGINT end the server: what clients store is published within the drain time, and the
sockets close. A second signal ends it at once.

Threads
-------
The main thread waits for signals. ``kvshelf-loop`` is the loop's thread
(:mod:`kvshelf.server.session`), ``kvshelf-http`` answers HTTP.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Final

from kvshelf.config import Config
from kvshelf.memory.arena import Arena
from kvshelf.metrics import Counters
from kvshelf.server.health import Health, ServerMetrics
from kvshelf.server.node import Node
from kvshelf.server.session import Server
from kvshelf.tiers.runtime import Role, open_runtime

logger = logging.getLogger(__name__)

#: How long the loop may take to answer before it counts as hung.
_HEALTH_SECONDS: Final = 2.0
_CLOSE_SECONDS: Final = 5.0
#: Seconds for what clients have begun to store; Kubernetes gives a pod 30 s to end.
_DRAIN_SECONDS: Final = 4.0


def default_socket() -> str:
    """Return the URL of this user's server on this machine."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    # The folder is checked when the server starts: it must be this user's alone.
    folder = f"{runtime}/kvshelf" if runtime else f"/tmp/kvshelf-{os.getuid()}"  # noqa: S108
    return f"ipc://{os.path.abspath(folder)}/node.sock"


def serve(
    config: Config,
    url: str,
    memory_bytes: int,
    *,
    http: tuple[str, int] | None,
    ready: Callable[[str, int | None], None],
) -> None:
    """Serve until SIGTERM or SIGINT; called on the main thread.

    Parameters
    ----------
    config : Config
        The shelf, its bounds, its disk tier, deadlines and threads.
    url : str
        ``ipc://`` and the path of the socket.
    memory_bytes : int
        Memory for objects, taken now.
    http : tuple of str and int, or None
        Address and port for health and metrics; port 0: any free one.
    ready : Callable
        Called with the shelf's URL and the port for HTTP when clients can connect.

    Raises
    ------
    ConfigError
        If another server listens there, the memory is not free, or the configuration cannot work.
    StorageError
        If the shelf cannot be opened, and waiting would not help.
    """
    over = False
    failures: list[BaseException] = []

    def stop(*_: object) -> None:
        nonlocal over
        if over:
            os._exit(1)
        over = True

    with contextlib.ExitStack() as opened:
        # A signal may reach any thread at any time. Python writes a byte then, which wakes the main
        # thread for sure; a lock is not told, and a handler must not take one.
        wake_reader, wake_writer = map(opened.enter_context, socket.socketpair())
        wake_writer.setblocking(False)
        server = Server(url)
        opened.callback(server.close)
        arena = Arena(memory_bytes, shared=True)
        opened.callback(arena.close)
        counters = Counters()
        runtime = open_runtime(config, Role.SERVER, counters)
        shelf, disk = runtime.storage
        shelf.backend.count_into(counters.add)
        opened.callback(runtime.close)
        runtime.keep_bounds()
        node = Node(
            shelf,
            arena,
            disk_tier=disk,
            counters=counters,
            uses=runtime.uses,
            on_handover=runtime.note_handover,
        )
        opened.callback(node.close)
        opened.callback(runtime.uses.close)

        def run() -> None:
            nonlocal over
            try:
                server.run(node, arena, chunk_size=config.chunk_size)
            except BaseException as error:  # noqa: BLE001 - raised by the main thread
                failures.append(error)
            finally:
                over = True
                with contextlib.suppress(OSError):
                    wake_writer.send(b"\0")

        def problem() -> str | None:
            if over:
                return "the server is about to stop"
            if not shelf.available and (disk is None or not disk.available):
                return "the shelf does not answer"
            return None

        port = None
        if http is not None:
            health = Health(
                *http,
                healthy=lambda: answers(server.post, _HEALTH_SECONDS),
                problem=problem,
                metrics=ServerMetrics(
                    lambda: {**node.stats(), **server.stats()}, counters, shelf.backend
                ),
            )
            opened.callback(health.close)
            port = health.port
        # Or the collector would look at all of torch from time to time: a tenth of a second without
        # an answer.
        gc.collect()
        gc.freeze()
        handlers = {which: signal.signal(which, stop) for which in (signal.SIGTERM, signal.SIGINT)}
        wakes = signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=run, name="kvshelf-loop", daemon=True)
        thread.start()
        try:
            ready(shelf.url, port)
            while not over:
                wake_reader.recv(1)
            if not failures:
                unfinished = server.drain(_DRAIN_SECONDS)
                if unfinished:
                    logger.warning("%d stores of clients were not finished", unfinished)
        finally:
            server.stop()
            thread.join(_CLOSE_SECONDS)
            signal.set_wakeup_fd(wakes)
            for which, handler in handlers.items():
                signal.signal(which, handler)
        if failures:
            raise failures[0]


def answers(post: Callable[[Callable[[], None]], None], seconds: float) -> bool:
    """Whether a loop runs what is posted, within so many seconds."""
    has_run = threading.Event()
    post(has_run.set)
    return has_run.wait(seconds)
