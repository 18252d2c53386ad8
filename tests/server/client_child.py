"""A client of a node server in a process of its own: ``client_child.py URL``.

It reads commands from standard input and answers each by a line:

=================  ==========================================================================
``fetch A B``      fetch the chunks A to B-1 of the prompt and hold them; the number held
``check``          compare what is held with what it must be: ``good`` or ``wrong``
``slowly``         say ``begun``, copy one half until the next line comes, then as check
``release``        give all back; ``released``
``connected``      wait until it is connected; ``True``, or ``False`` after a minute
``store A B``      store the chunks A to B-1; how often each outcome came
``mix A B``        say ``begun``; until a line comes fetch, compare, store and give back chunks
                   from A to B-1 by chance; ``good`` or ``wrong``
=================  ==========================================================================
"""

from __future__ import annotations

import random
import select
import sys
from collections import Counter

from kvshelf.errors import KVShelfError
from kvshelf.server.connection import Loan
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
    held: list[tuple[int, Loan]] = []

    def fetch(numbers: range) -> None:
        # One at a time: some may not be stored, and the server may be killed.
        for number in numbers:
            try:
                loans = client.fetch([name_of(FMT, chunks[number])], [SIZE])
            except KVShelfError:
                continue
            held.extend((number, loan) for loan in loans)

    def verdict(copies: list[bytes]) -> str:
        right = [
            copy == sealed(FMT, chunks[number])
            for (number, _), copy in zip(held, copies, strict=True)
        ]
        return "good" if all(right) else "wrong"

    def release() -> None:
        for _, loan in held:
            loan.release()
        held.clear()

    def store(number: int) -> str:
        try:
            return client.store(name_of(FMT, chunks[number]), sealed(FMT, chunks[number]))
        except KVShelfError as error:
            return type(error).__name__

    def mix(numbers: range) -> str:
        chance, answer = random.Random(), "good"
        while answer == "good" and not select.select([sys.stdin], [], [], 0)[0]:
            number = chance.choice(numbers)
            if chance.random() < 0.3:
                store(number)
            fetch(range(number, min(number + 8, numbers.stop)))
            answer = verdict([bytes(loan.view) for _, loan in held])
            if len(held) > 16 or chance.random() < 0.3:
                release()
        return answer

    while line := sys.stdin.readline():
        word, *numbers = line.split()
        span = range(*map(int, numbers)) if numbers else range(0)
        if word == "fetch":
            fetch(span)
            answer = str(len(held))
        elif word == "check":
            answer = verdict([bytes(loan.view) for _, loan in held])
        elif word == "slowly":
            say("begun")
            firsts = [bytes(loan.view[: SIZE // 2]) for _, loan in held]
            sys.stdin.readline()
            answer = verdict(
                [
                    first + bytes(loan.view[SIZE // 2 :])
                    for first, (_, loan) in zip(firsts, held, strict=True)
                ]
            )
        elif word == "release":
            release()
            answer = "released"
        elif word == "connected":
            answer = str(client.node.wait_connected(PATIENCE))
        elif word == "mix":
            say("begun")
            answer = mix(span)
            sys.stdin.readline()
        else:
            answer = str(dict(Counter(store(number) for number in span)))
        say(answer)


if __name__ == "__main__":
    main(sys.argv[1])
