"""The clock of an S3 server.

Owns the request that asks for it: one HEAD, whose answer, whatever it is, has the server's time in
its ``Date`` header. obstore shows no such headers. Runs on the caller's
thread.
"""

from __future__ import annotations

import os
import ssl
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

_SECONDS: Final = 10.0


class _NoRedirect(HTTPRedirectHandler):
    """The answer that redirects has a date as well."""

    def redirect_request(self, *_: Any) -> None:
        return None


def time_of_server(url: str, verify: Any = None) -> float | None:
    """Return a server's time, in seconds since the epoch; None if it does not report it.

    Parameters
    ----------
    url : str
        Below which nothing needs to exist.
    verify : str, os.PathLike, False or None
        Which certificates are trusted: those of a file, any, or the usual ones.

    Raises
    ------
    OSError
        If the server does not answer.
    """
    given = isinstance(verify, (str, os.PathLike))
    context = ssl.create_default_context(cafile=verify if given else None)
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    opener = build_opener(_NoRedirect, HTTPSHandler(context=context))
    try:
        # The scheme was checked when the URL came from the options.
        request = Request(url, method="HEAD")  # noqa: S310
        with opener.open(request, timeout=_SECONDS) as answer:
            return time_of(answer.headers.get("Date"))
    except HTTPError as refused:
        with refused:
            return time_of(refused.headers.get("Date"))
    except URLError as error:
        raise error.reason if isinstance(error.reason, OSError) else error from None


def time_of(date: str | None) -> float | None:
    """Return the seconds since the epoch of an HTTP date; None if it is none."""
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None
