"""A client of a node server in a process of its own: ``client_child.py URL``.

It reads commands from standard input and answers each by a line:

=================  ==========================================================================
``fetch A B``      fetch the chunks A to B-1 of the prompt and hold them; the number held
``check``          compare what is held with what it must be: ``good``, ``lapsed`` (a lease
                   was over) or ``wrong``
``slowly``         say ``begun``, copy byte by byte until the next line comes, then as check
``release``        give all back; ``released``
``connected``      wait until it is connected; ``True``, or ``False`` after a minute
``store A B``      store the chunks A to B-1; how often each outcome came
=================  ==========================================================================
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter

from kvshelf.errors import KVShelfError
from kvshelf.server.connection import Leased
from tests.server.desk import name_of
from tests.server.serve_process import Client
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks
from tests.support.waiting import PATIENCE

FMT = make_format()
SIZE = FMT.object_size(0)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(url: str) -> None:
    client = Client(url, FMT)
    chunks = make_chunks(FMT, 4096)
    held: list[tuple[int, Leased]] = []

    def verdict(copies: list[bytes]) -> str:
        # The order is that of a load: first the bytes are used, then it is asked if they were good.
        if not all(leased.valid() for _, leased in held):
            return "lapsed"
        right = [
            copy == sealed(FMT, chunks[at]) for (at, _), copy in zip(held, copies, strict=True)
        ]
        return "good" if all(right) else "wrong"

    for line in sys.stdin:
        word, *numbers = line.split()
        span = range(*map(int, numbers)) if numbers else range(0)
        if word == "fetch":
            names = [name_of(FMT, chunks[at]) for at in span]
            futures = client.channel.fetch("s", names, [SIZE] * len(names))
            for at, future in zip(span, futures, strict=True):
                # Some may not be stored, and the server may be killed.
                with contextlib.suppress(KVShelfError):
                    held.append((at, future.result(PATIENCE)))
            answer = str(len(held))
        elif word == "check":
            answer = verdict([bytes(leased.view) for _, leased in held])
        elif word == "slowly":
            say("begun")
            firsts = [bytes(leased.view[: SIZE // 2]) for _, leased in held]
            sys.stdin.readline()
            answer = verdict(
                [
                    first + bytes(leased.view[SIZE // 2 :])
                    for first, (_, leased) in zip(firsts, held, strict=True)
                ]
            )
        elif word == "release":
            for _, leased in held:
                leased.release()
            held.clear()
            answer = "released"
        elif word == "connected":
            answer = str(client.channel.wait_connected(PATIENCE))
        else:
            outcomes: Counter[str] = Counter()
            for at in span:
                try:
                    outcomes[client.store(name_of(FMT, chunks[at]), sealed(FMT, chunks[at]))] += 1
                except KVShelfError as error:
                    outcomes[type(error).__name__] += 1
            answer = str(dict(outcomes))
        say(answer)


if __name__ == "__main__":
    main(sys.argv[1])
