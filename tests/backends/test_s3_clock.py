"""The clock of an S3 server: what it says, and when it says nothing."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvshelf.backends.oserrors import process_limit
from kvshelf.backends.s3_clock import time_of, time_of_server
from kvshelf.errors import ProcessLimitError

pytestmark = pytest.mark.real

DATE = ("Date", "Fri, 02 Jan 1970 00:00:01 GMT")


@contextmanager
def server(status: int, *headers: tuple[str, str]) -> Iterator[str]:
    """Start a server that answers every HEAD with the same."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(status)
            for header in (*headers, ("Content-Length", "0")):
                self.send_header(*header)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


@pytest.mark.parametrize("status", [200, 400, 403, 404, 503])
def test_any_answer_has_the_time(status: int) -> None:
    with server(status, DATE) as url:
        assert time_of_server(url) == 86401.0


def test_the_answer_that_redirects_has_it_too() -> None:
    with server(301, DATE, ("Location", "http://127.0.0.1:1/elsewhere")) as url:
        assert time_of_server(url) == 86401.0


def test_a_server_without_a_clock_does_not_tell() -> None:
    with server(200) as url:
        assert time_of_server(url) is None
    assert time_of("yesterday") is None
    assert time_of("Fri, 32 Jan 1970 00:00:01 GMT") is None


def test_a_server_that_is_gone_is_an_error_of_the_system() -> None:
    with server(200, DATE) as url:
        assert time_of_server(url)
    with pytest.raises(ConnectionRefusedError):
        time_of_server(url)


def test_what_clients_say_of_a_process_without_files_is_understood() -> None:
    """As libraries say it, which lose the number or hide it among causes."""
    rust = Exception(
        "Generic S3 error: error sending request\n\nDebug source:\n  Os {\n      code: 24,\n"
        '      kind: TooManyOpenFiles,\n      message: "Too many open files",\n  },'
    )
    cause = RuntimeError("Could not connect to the endpoint URL")
    cause.__cause__ = OSError(errno.EMFILE, "Too many open files")
    for error in (rust, cause, Exception("No memory (os error 12)")):
        assert isinstance(process_limit(error, "probing", "s3://b"), ProcessLimitError)
    for other in (ConnectionRefusedError(111, "refused"), Exception("timed out (os error 110)")):
        assert process_limit(other, "probing", "s3://b") is None
