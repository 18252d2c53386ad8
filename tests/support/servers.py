"""Real S3 servers on this machine for tests: rclone, moto and SeaweedFS, on free ports."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.waiting import LONG

KEY, SECRET = "kvshelftest", "not-a-real-secret-0123456789"
BUCKET = "kvshelf-bucket"
RCLONE_CACHE_SECONDS = 1e-3


@dataclass(frozen=True)
class S3Server:
    """One running server.

    Attributes
    ----------
    endpoint : str
    folder : Path or None
        Where the server keeps buckets as plain folders; None where it keeps them in memory.
    process : subprocess.Popen
    """

    endpoint: str
    folder: Path | None
    process: subprocess.Popen[bytes]

    def options(self, **more: Any) -> dict[str, Any]:
        """Return storage options for the server."""
        return {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint, **more}

    def client(self, service: str = "s3") -> Any:
        """Return a botocore client, for looking past the code under test."""
        import botocore.session
        from botocore.config import Config

        return botocore.session.Session().create_client(
            service,
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            config=Config(
                s3={"addressing_style": "path"},
                response_checksum_validation="when_required",
                request_checksum_calculation="when_required",
            ),
        )


def free_port() -> int:
    """Return a port that no outgoing connection gets, nor other tests that run beside these."""
    first = 20_000 + 1000 * (os.getpid() % 10)
    for port in random.SystemRandom().sample(range(first, first + 1000), 1000):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def command(name: str) -> str | None:
    """Return a program of this Python's environment, or of the system."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LONG
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        assert process.poll() is None, f"the server for {url} ended with {process.returncode}"
        assert time.monotonic() < deadline, f"no answer from {url}"
        try:
            opener.open(url, timeout=5).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.02)
        else:
            return


@contextlib.contextmanager
def _running(
    arguments: list[str], endpoint: str, log: Path | None = None, **options: Any
) -> Iterator[Any]:
    with open(os.devnull if log is None else log, "ab") as output:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **options
        )
    try:
        _wait(endpoint, process)
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def rclone_s3(
    folder: Path, port: int = 0, cache_seconds: float = RCLONE_CACHE_SECONDS
) -> Iterator[S3Server]:
    """Serve the folders below `folder` as buckets, one of which is made.

    What is changed in the folder itself the server sees `cache_seconds` later; with no cache at all
    it hangs now and then, and with a short one it computes even when nobody asks it anything.
    """
    program = command("rclone")
    assert program is not None
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    endpoint = f"http://127.0.0.1:{port}"
    arguments = [program, "serve", "s3", "--config", "", "--addr", f"127.0.0.1:{port}"]
    arguments += ["--auth-key", f"{KEY},{SECRET}", "--force-path-style"]
    arguments += ["--vfs-cache-mode", "off", "--dir-cache-time", f"{cache_seconds}s", str(folder)]
    with _running(arguments, endpoint) as process:
        yield S3Server(endpoint, folder, process)


@contextlib.contextmanager
def moto_s3(port: int = 0, log: Path | None = None) -> Iterator[S3Server]:
    """Serve buckets from memory, one of which is made; `log` gets a line for each request."""
    program = command("moto_server")
    assert program is not None
    port = port or free_port()
    endpoint = f"http://127.0.0.1:{port}"
    with _running([program, "-H", "127.0.0.1", "-p", str(port)], endpoint, log) as process:
        server = S3Server(endpoint, None, process)
        server.client().create_bucket(Bucket=BUCKET)
        yield server


@contextlib.contextmanager
def seaweed_s3(folder: Path) -> Iterator[S3Server]:
    """Serve buckets from `folder`, one of which is made, with all services of SeaweedFS."""
    ports: set[int] = set()
    while len(ports) < 10:
        ports.add(free_port())
    arguments = [command("weed") or "", "mini", f"-dir={folder}", f"-s3.localSocket={folder}/s3"]
    arguments += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    arguments += ["-webdav=false", "-admin.ui=false", "-master.telemetry=false"]
    for service in ("master", "volume", "filer", "admin", "s3"):
        port = ports.pop()
        arguments += [f"-{service}.port={port}", f"-{service}.port.grpc={ports.pop()}"]
    endpoint = f"http://127.0.0.1:{port}"
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "TMPDIR": str(folder)}
    with _running(arguments, endpoint, env={**os.environ, **keys}) as process:
        server = S3Server(endpoint, None, process)
        server.client().create_bucket(Bucket=BUCKET)
        yield server
        process.terminate()  # Then it removes its sockets.
        process.wait()
