"""A real SFTP server on this machine for tests, by asyncssh."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

USER, PASSWORD = "kvshelftest", "not-a-real-password-0123456789"


@dataclass
class SFTPServer:
    """One running server.

    Attributes
    ----------
    port : int
    folder : Path
        What clients see as ``/``.
    """

    port: int
    folder: Path

    def options(self, **more: Any) -> dict[str, Any]:
        """Return storage options for the server."""
        return {"port": self.port, "username": USER, "password": PASSWORD, **more}


@contextlib.contextmanager
def sftp_server(folder: Path, port: int = 0) -> Iterator[SFTPServer]:
    """Serve a folder, on a thread of the server's own."""
    import asyncssh

    class Accounts(asyncssh.SSHServer):  # type: ignore[misc, unused-ignore]
        def begin_auth(self, username: str) -> bool:
            return True

        def password_auth_supported(self) -> bool:
            return True

        def validate_password(self, username: str, password: str) -> bool:
            return (username, password) == (USER, PASSWORD)

    def files(channel: Any) -> Any:
        return asyncssh.SFTPServer(channel, chroot=str(folder).encode())

    connections: list[Any] = []

    def accepted(connection: Any) -> None:
        connections.append(connection)

    folder.mkdir(parents=True, exist_ok=True)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="sftp-server", daemon=True)
    thread.start()

    async def start() -> Any:
        return await asyncssh.listen(
            "127.0.0.1",
            port,
            server_factory=Accounts,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            sftp_factory=files,
            acceptor=accepted,
        )

    async def stop() -> None:
        acceptor.close()
        for connection in connections:
            connection.abort()
        await acceptor.wait_closed()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    acceptor = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        yield SFTPServer(acceptor.get_port(), folder)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
