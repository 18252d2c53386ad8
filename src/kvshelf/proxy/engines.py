"""The engines of one side, prefill or decode, and which of them gets a request.

Owns the numbers of requests in flight. Used on the event loop's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

#: Seconds for which an engine that could not be reached is not the first choice. It has the fewest
#: requests in flight, and would be tried by every request otherwise.
_ASIDE_SECONDS: Final = 5.0


class Engine:
    """One engine.

    Parameters
    ----------
    url : str
        Its base URL, without a slash at its end.
    name : str
        Its name in metrics, health and logs.

    Attributes
    ----------
    url, name : str
    in_flight : int
        Requests that it was sent and has not answered yet.
    """

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name
        self.in_flight = 0
        self._aside_until = 0.0

    @property
    def is_aside(self) -> bool:
        """Whether the last attempt to reach it, a moment ago, failed."""
        return time.monotonic() < self._aside_until

    def set_aside(self) -> None:
        """Note that it could not be reached, or closed a connection without an answer."""
        self._aside_until = time.monotonic() + _ASIDE_SECONDS

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a request as in flight."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Engines:
    """The engines of one side.

    Parameters
    ----------
    side : str
        ``prefill`` or ``decode``; a label of metrics.
    urls : Sequence of str
        Their base URLs.
    """

    def __init__(self, side: str, urls: Sequence[str]) -> None:
        self.side = side
        # The path of a URL may be a secret.
        hosts = [urlsplit(url).netloc for url in urls]
        self.all = [
            Engine(url, host if hosts.count(host) == 1 else f"{host}#{number}")
            for number, (url, host) in enumerate(zip(urls, hosts, strict=True), 1)
        ]
        self._turn = 0

    def choose(self, tried: Container[Engine], *, aside: bool) -> Engine | None:
        """Return the engine with the fewest requests in flight; of equal ones each in turn.

        Parameters
        ----------
        tried : Container of Engine
            Engines to leave out.
        aside : bool
            Choose among those that were not reached a moment ago, else among the others.
        """
        count = len(self.all)
        places = [
            place
            for place, engine in enumerate(self.all)
            if engine not in tried and engine.is_aside is aside
        ]
        if not places:
            return None
        best = min(
            places, key=lambda place: (self.all[place].in_flight, (place - self._turn) % count)
        )
        self._turn = best + 1
        return self.all[best]
